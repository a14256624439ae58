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
from atoll.plan.executors import routes_of
from atoll.plan.plan import PROVEN_GAP, Plan
from atoll.plan.problem import Problem, Service
from atoll.plan.validate.validate_spot import check_spot
from atoll.solve.assembly import relative_gap
from atoll.solve.deadline import Deadline
from atoll.solve.effort import Effort
from atoll.solve.family import SolverFamily
from atoll.solve.graph.boxes import LaidMachine
from atoll.solve.graph.equal_cells import plan_cells
from atoll.solve.graph.executor_options import (
    Option,
    named_options,
    options_of,
    without_way,
)
from atoll.solve.graph.executor_packing import strains_links
from atoll.solve.graph.executor_program import solve_program
from atoll.solve.graph.graph_build import BuiltProgram, Groups, build_program
from atoll.solve.graph.graph_service import ChooseOptions
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
_OPTIONS = 0.6
"""Share of a deadline after which no more sets of parts are looked at."""
_FIRST_SHARE = 0.4
"""Share of a deadline for the plan without a limit on spot; two more may follow."""


def solve(problem: Problem, request: PlanRequest) -> Plan:
    """Return the plan of the request's solver; "infeasible", with reasons, where there is none.

    Where the share of requests on spot is limited, the plan without that limit is taken if it keeps it, and
    else the cheapest of two that do: with that share of the GPUs in use, and with none on spot. What is
    proven is what holds without the limit.
    """
    limit = problem.limits.spot_share
    offered = [offer for offer in problem.offers if offer.market != "spot"]
    if limit is None or len(offered) == len(problem.offers):
        return _solve(problem, request)
    deadline = Deadline(request.deadline_s)
    off = problem.replace(offers=offered)
    if limit <= 0.0:
        return _restamp(_solve(off, request), problem)
    free = problem.replace(limits=problem.limits.model_copy(update={"spot_share": None}))
    first = _solve(free, replace(request, deadline_s=deadline.share(_FIRST_SHARE)))
    if not any(check_spot(first, problem)):
        return _restamp(first, problem)
    tried = [
        _restamp(_solve(each, replace(request, deadline_s=deadline.share(share))), problem)
        for each, share in ((problem, 0.5), (off, 1.0))
    ]
    best = max((plan for plan in tried if not any(check_spot(plan, problem))), key=_merit)
    if first.bound is None or best.objective is None or best.status == "partial":
        return _with_bound(best, None)
    return _with_bound(best, min(first.bound, best.objective))


def _merit(plan: Plan) -> tuple[float, float]:
    """Order of plans: more served, then less cost."""
    return min(plan.served_fraction.values(), default=0.0), -(plan.objective or 0.0)


def _restamp(plan: Plan, problem: Problem) -> Plan:
    return plan.model_copy(update={"problem_hash": problem.content_hash()})


def _with_bound(plan: Plan, bound: float | None) -> Plan:
    gap = relative_gap(plan.objective, bound)
    status = plan.status
    if status in ("optimal", "feasible"):
        status = "optimal" if gap is not None and gap <= PROVEN_GAP else "feasible"
    return plan.model_copy(update={"bound": bound, "gap": gap, "status": status})


def _solve(problem: Problem, request: PlanRequest) -> Plan:
    name, effort = request.solver or DEFAULT, request.effort
    effort.refuse_cluster_options()
    refuse_limits(problem)
    catalog = request.catalog_for(problem)
    deadline = Deadline(request.deadline_s)
    libraries = _libraries(problem, catalog, request, deadline)
    if name == CELLS:
        return plan_cells(problem, catalog, effort, libraries, deadline, solver=name)
    choose = None if name == DEFAULT else _cut(name, catalog)
    request.say("options", "how long parts take on every kind of node")

    def build(
        *, anywhere: bool, within_interfaces: bool = False, groups: Groups = "ignored"
    ) -> BuiltProgram:
        return build_program(
            problem,
            catalog,
            effort,
            libraries,
            choose=choose,
            anywhere=anywhere,
            within_interfaces=within_interfaces,
            groups=groups,
            until=lambda: deadline.left < deadline.seconds * (1.0 - _OPTIONS),
        )

    built = build(anywhere=not effort.patterns)
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
            proven=name == DEFAULT and effort.patterns and not built.cut_short,
        )

    if reasons and problem.settings.on_shortage == "fail":
        return make(built, _nothing())
    request.say("allocating", f"{len(built.program.executors):,} kinds of executors")

    def allocate(built: BuiltProgram) -> GraphAnswer:
        left = deadline.share(1.0)
        return solve_program(built.program, gap=effort.gap, work=effort.work, deadline_s=left)

    answer = allocate(built)
    work = {"nodes": answer.nodes, "iterations": answer.iterations}
    request.say("allocating", _describe(answer), 1.0, work)
    answer = replace(answer, cut_short=answer.cut_short or built.cut_short)
    plan = make(built, answer)
    if not strains_links(plan, problem, catalog):
        return plan
    request.say("topology", "links between machines carry less, or later, than they would have to")
    bound = answer.bound
    free = built.program, answer
    grouped = any(offer.node_type in catalog.links.groups for offer in problem.offers)
    every: tuple[Groups, ...] = ("ignored", "shared", "apart") if grouped else ("ignored",)
    for groups in every if effort.patterns else ():
        told = built if groups == "ignored" else build(anywhere=False, groups=groups)
        assert told.by_machine is not None
        answer, boxes = solve_with_topology(
            told.by_machine,
            gap=effort.gap,
            work=effort.work,
            deadline_s=deadline.share(1.0),
            free=free,
            exact=told.exact,
        )
        plan = make(replace(told, program=told.by_machine), answer, boxes)
        if answer.status != "infeasible" and not strains_links(plan, problem, catalog):
            return plan
    # What runs has its place, whatever would hand over less: then every link is as slow as the slowest, and
    # no executor takes more than its share of an interface. What is proven without that holds with it.
    for within in (False, True) if effort.patterns else (True,):
        safe = build(anywhere=True, within_interfaces=within)
        answer = allocate(safe)
        plan = make(safe, replace(answer, bound=min(answer.bound, bound)))
        if not strains_links(plan, problem, catalog):
            break
    return plan


def all_options(catalog: Catalog, service: Service) -> tuple[Option, ...]:
    """Return the sets of parts that executors of a service may run, by any rule."""
    model = catalog.model(service.model)
    routes = [route for klass in service.classes for route in routes_of(catalog, service, klass)]
    cuts = (option for name in CUTS for option in named_options(name, model, routes))
    return tuple(dict.fromkeys((*options_of(model, service, routes), *cuts)))


def hangs_on_links(problem: Problem, catalog: Catalog) -> bool:
    """Return whether it makes a difference to the promises of a fleet which way data goes."""
    return build_program(problem, catalog, Effort(), None).hangs_on_links


def missing_executors(built: BuiltProgram) -> tuple[str, ...]:
    """Return in words the parts that no executor can run for a class within its promise."""
    found = []
    for demand in built.program.classes:
        runnable = {
            part
            for executor in built.program.executors
            for service, klass, part in executor.seconds
            if (service, klass) == demand.key
        }
        if any(all(part in runnable for part in route) for route in demand.routes):
            continue
        lacking = sorted({part for route in demand.routes for part in route} - runnable)
        names = dict.fromkeys(without_way(part).replace("@", " on ") for part in lacking)
        parts = " or ".join(names) or "a path"
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


_NO_WAY_AROUND = (
    "requests of any-to-any models take paths that are planned with every machine there: none around a "
    "lost machine is planned or simulated"
)
UNPLANNED = {
    "spread": "an any-to-any service stands where its paths do, and the programme of executors has no least "
    "share of requests for a region",
    "survive": _NO_WAY_AROUND,
    "spot_loss": _NO_WAY_AROUND,
}
"""Limits that are refused beside any-to-any models, by name, and why."""


def refuse_limits(problem: Problem) -> None:
    """Raise UsageError for limits that plans with any-to-any services do not keep."""
    limits = problem.limits
    asked = {
        "spread": limits.spread > 1,
        "survive": bool(limits.survival.lost),
        "spot_loss": limits.spot_loss_per_h > 0.0,
    }
    for name, is_set in asked.items():
        if is_set:
            raise UsageError(
                UNPLANNED[name],
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
