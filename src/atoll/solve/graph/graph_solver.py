"""Solvers for fleets with any-to-any models behind one call: a problem with classes in, a plan out.

`exact` is the default: all options on all kinds of nodes, templates of plain services beside them, one
program. The others are ways to deploy that people and papers use, to compare with: one executor for
everything (`monolith`), fixed cuts (`E/PD`, `EP/D`, `E/P/D`), and Cornserve's cells of equal GPUs (`cells`).
They choose the best machines and numbers for their cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from atoll.catalog.catalog import Catalog
from atoll.core.compiling import compile_entries
from atoll.core.errors import UsageError
from atoll.core.units import format_price, format_share
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem, Service
from atoll.solve.deadline import Deadline
from atoll.solve.family import SolverFamily
from atoll.solve.graph.boxes import LaidMachine
from atoll.solve.graph.equal_cells import plan_cells
from atoll.solve.graph.executor_options import Option, named_options
from atoll.solve.graph.executor_packing import overloads_interfaces
from atoll.solve.graph.executor_program import solve_program
from atoll.solve.graph.graph_build import BuiltProgram, ChooseOptions, build_program
from atoll.solve.graph.graph_to_plan import plan_of
from atoll.solve.graph.graph_types import GraphAnswer
from atoll.solve.graph.patterns import solve_with_topology
from atoll.solve.plan_request import PlanRequest
from atoll.solve.rent.rent_solver import count_templates
from atoll.solve.templates.library import Libraries, template_libraries

DEFAULT = "exact"
CELLS = "cells"
CUTS = ("monolith", "E/PD", "EP/D", "E/P/D")
NAMES = (DEFAULT, *CUTS, CELLS)
_TEMPLATES = 0.5
"""Share of a deadline after which templates of plain services are those that there are."""


def solve(problem: Problem, request: PlanRequest) -> Plan:
    """Return the plan of the request's solver; "infeasible", with reasons, where there is none."""
    name, effort = request.solver or DEFAULT, request.effort
    effort.refuse_cluster_options()
    _refuse_limits(problem)
    catalog = request.catalog_for(problem)
    deadline = Deadline(request.deadline_s)
    libraries = _libraries(problem, catalog, request, deadline)
    if name == CELLS:
        return plan_cells(problem, catalog, effort, libraries, deadline, solver=name)
    choose = None if name == DEFAULT else _cut(name, catalog)
    request.say("options", "how long parts take on every kind of node")
    built = build_program(problem, catalog, effort, libraries, choose=choose)
    reasons = missing_executors(built)

    def make(built: BuiltProgram, answer: GraphAnswer, boxes: Sequence[LaidMachine] = ()) -> Plan:
        return plan_of(
            problem,
            catalog,
            built,
            answer,
            libraries,
            effort,
            solver=name,
            reasons=reasons,
            boxes=boxes,
            proven=name == DEFAULT,
        )

    if reasons and problem.settings.on_shortage == "fail":
        return make(built, _nothing())
    request.say("allocating", f"{len(built.program.executors):,} kinds of executors")
    answer = solve_program(
        built.program, gap=effort.gap, work=effort.work, deadline_s=deadline.share(1.0)
    )
    request.say("allocating", _describe(answer), 1.0)
    plan = make(built, answer)
    if not overloads_interfaces(plan, problem, catalog):
        return plan
    request.say("topology", "more goes between machines than their interfaces carry")
    bound = answer.bound
    answer, boxes = solve_with_topology(
        built.program, gap=effort.gap, work=effort.work, deadline_s=deadline.share(1.0)
    )
    plan = make(built, answer, boxes)
    if not overloads_interfaces(plan, problem, catalog):
        return plan
    # What runs has its place, whatever would hand over less: then no executor takes more than its share of
    # an interface. What is proven without that limit holds with it, and no more.
    built = build_program(
        problem, catalog, effort, libraries, choose=choose, within_interfaces=True
    )
    answer = solve_program(
        built.program, gap=effort.gap, work=effort.work, deadline_s=deadline.share(1.0)
    )
    return make(built, replace(answer, bound=min(answer.bound, bound)))


def missing_executors(built: BuiltProgram) -> tuple[str, ...]:
    """Return in words the parts that no executor can run for a class within its promise."""
    found = []
    for demand in built.program.classes:
        runnable = {
            part
            for executor in built.program.executors
            if executor.service == demand.service
            for klass, part in executor.seconds
            if klass == demand.name
        }
        if any(all(part in runnable for part in route) for route in demand.routes):
            continue
        lacking = sorted({part for route in demand.routes for part in route} - runnable)
        parts = " or ".join(part.replace("@", " on ") for part in lacking) or "a path"
        found.append(
            f"{demand.service}: no kind of node runs {parts} for '{demand.name}' within its promise"
        )
    return tuple(found)


def _cut(name: str, catalog: Catalog) -> ChooseOptions:
    def choose(service: Service, routes: Sequence[Sequence[str]]) -> tuple[Option, ...]:
        return named_options(name, catalog.model(service.model), routes)

    return choose


def _nothing() -> GraphAnswer:
    return GraphAnswer("infeasible", (), {}, (), {}, {}, 0.0, 0.0, 0.0, 0.0)


def _libraries(
    problem: Problem,
    catalog: Catalog,
    request: PlanRequest,
    deadline: Deadline,
) -> Libraries | None:
    """The templates of plain services; none where there are no such."""
    if not problem.roles:
        return None
    compile_entries("atoll.solve.templates")
    stop: Callable[[], bool] = lambda: deadline.left < deadline.seconds * (1.0 - _TEMPLATES)  # noqa: E731
    return template_libraries(
        problem,
        catalog,
        cached=request.effort.cached,
        on_progress=request.on_progress,
        until=stop,
    )


def _refuse_limits(problem: Problem) -> None:
    limits = problem.limits
    asked = {
        "spread": limits.spread > 1,
        "survive": limits.survive > 0,
        "spot_loss": limits.spot_loss_per_h > 0.0,
    }
    for name, is_set in asked.items():
        if is_set:
            raise UsageError(
                "fleets with classes of requests are not planned for that",
                field=f"limits.{name}",
                hint="leave it out, or plan plain services in a fleet of their own",
            )


def _describe(answer: GraphAnswer) -> str:
    if answer.status == "infeasible":
        return "no plan"
    gap = 1.0 - answer.bound / answer.objective if answer.objective > 0 else 0.0
    return f"best {format_price(answer.usd_per_hour)}, gap {format_share(max(0.0, gap))}"


FAMILY = SolverFamily(
    names=NAMES,
    baselines=(*CUTS, CELLS),
    solve=solve,
    count_templates=count_templates,
    failure="no plan meets the demand of {name}",
    hint="allow more kinds of nodes, looser promises or less demand",
)
