"""Solvers for fleets with any-to-any models behind one call: a problem with classes in, a plan out.

`exact` is the default: all options on all kinds of nodes, templates of plain services beside them, one
programme. The others are ways to deploy that people and papers use, to compare with: one executor for
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
from atoll.solve.cells.boxes import LaidMachine
from atoll.solve.cells.build import BuiltProgramme, ChooseOptions, build_programme
from atoll.solve.cells.equal import plan_cells
from atoll.solve.cells.options import Option, named_options
from atoll.solve.cells.packing import overloads_interfaces
from atoll.solve.cells.patterns import solve_with_topology
from atoll.solve.cells.programme import solve_programme
from atoll.solve.cells.to_plan import plan_of
from atoll.solve.cells.types import CellAnswer
from atoll.solve.effort import Countdown, Effort
from atoll.solve.family import SolverFamily
from atoll.solve.progress import OnProgress, Progress
from atoll.solve.templates.library import Libraries, template_libraries

DEFAULT = "exact"
CELLS = "cells"
CUTS = ("monolith", "E/PD", "EP/D", "E/P/D")
NAMES = (DEFAULT, *CUTS, CELLS)
_TEMPLATES = 0.5
"""Share of a deadline after which templates of plain services are those that there are."""


def solve(
    name: str,
    problem: Problem,
    catalog: Catalog,
    effort: Effort,
    deadline_s: float,
    on_progress: OnProgress | None = None,
) -> Plan:
    """Return the plan of the solver called `name`; "infeasible", with reasons, where there is none."""
    _refuse_options(problem, effort)
    deadline = Countdown(deadline_s)
    libraries = _libraries(problem, catalog, effort, deadline, on_progress)
    if name == CELLS:
        return plan_cells(problem, catalog, effort, libraries, deadline, solver=name)
    choose = None if name == DEFAULT else _cut(name, catalog)
    _tell(on_progress, "options", "how long parts take on every kind of node")
    built = build_programme(problem, catalog, effort, libraries, choose=choose)
    reasons = missing_executors(built)

    def make(built: BuiltProgramme, answer: CellAnswer, boxes: Sequence[LaidMachine] = ()) -> Plan:
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
    _tell(on_progress, "allocating", f"{len(built.programme.executors):,} kinds of executors")
    answer = solve_programme(
        built.programme, gap=effort.gap, work=effort.work, deadline_s=deadline.share(1.0)
    )
    _tell(on_progress, "allocating", _describe(answer), 1.0)
    plan = make(built, answer)
    if not overloads_interfaces(plan, problem, catalog):
        return plan
    _tell(on_progress, "topology", "more goes between machines than their interfaces carry")
    bound = answer.bound
    answer, boxes = solve_with_topology(
        built.programme, gap=effort.gap, work=effort.work, deadline_s=deadline.share(1.0)
    )
    plan = make(built, answer, boxes)
    if not overloads_interfaces(plan, problem, catalog):
        return plan
    # What runs has its place, whatever would hand over less: then no executor takes more than its share of
    # an interface. What is proven without that limit holds with it, and no more.
    built = build_programme(
        problem, catalog, effort, libraries, choose=choose, within_interfaces=True
    )
    answer = solve_programme(
        built.programme, gap=effort.gap, work=effort.work, deadline_s=deadline.share(1.0)
    )
    return make(built, replace(answer, bound=min(answer.bound, bound)))


def missing_executors(built: BuiltProgramme) -> tuple[str, ...]:
    """Return in words the parts that no executor can run for a class within its promise."""
    found = []
    for demand in built.programme.classes:
        runnable = {
            part
            for executor in built.programme.executors
            if executor.service == demand.service
            for klass, part in executor.seconds
            if klass == demand.name
        }
        if any(all(part in runnable for part in way) for way in demand.ways):
            continue
        lacking = sorted({part for way in demand.ways for part in way} - runnable)
        parts = " or ".join(part.replace("@", " on ") for part in lacking) or "a path"
        found.append(
            f"{demand.service}: no kind of node runs {parts} for '{demand.name}' within its promise"
        )
    return tuple(found)


def _cut(name: str, catalog: Catalog) -> ChooseOptions:
    def choose(service: Service, ways: Sequence[Sequence[str]]) -> tuple[Option, ...]:
        return named_options(name, catalog.model(service.model), ways)

    return choose


def _nothing() -> CellAnswer:
    return CellAnswer("infeasible", (), {}, (), {}, {}, 0.0, 0.0, 0.0, 0.0)


def _libraries(
    problem: Problem,
    catalog: Catalog,
    effort: Effort,
    deadline: Countdown,
    on_progress: OnProgress | None,
) -> Libraries | None:
    """The templates of plain services; none where there are no such."""
    if not problem.roles:
        return None
    compile_entries("atoll.solve.templates")
    stop: Callable[[], bool] = lambda: deadline.left < deadline.seconds * (1.0 - _TEMPLATES)  # noqa: E731
    return template_libraries(
        problem, catalog, cached=effort.cached, on_progress=on_progress, until=stop
    )


def _refuse_options(problem: Problem, effort: Effort) -> None:
    options = {
        "objective": effort.objective is not None,
        "partial": effort.partial,
        "best-effort": not effort.promise,
    }
    for option, is_set in options.items():
        if is_set:
            raise UsageError(f"--{option} is for fixed clusters", hint="leave it out")
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


def _tell(
    on_progress: OnProgress | None, phase: str, text: str, share: float | None = None
) -> None:
    if on_progress is not None:
        on_progress(Progress(phase, text, share) if share is not None else Progress(phase, text))


def _describe(answer: CellAnswer) -> str:
    if answer.status == "infeasible":
        return "no plan"
    gap = 1.0 - answer.bound / answer.objective if answer.objective > 0 else 0.0
    return f"best {format_price(answer.usd_per_hour)}, gap {format_share(max(0.0, gap))}"


def _count_templates(problem: Problem, catalog: Catalog, cached: bool) -> dict[str, dict[str, int]]:
    if not problem.roles:
        return {}
    libraries = template_libraries(problem, catalog, cached=cached)
    return {
        role: {"templates": len(library), "multisets": library.multisets}
        for role, library in libraries.roles.items()
    }


FAMILY = SolverFamily(
    names=NAMES,
    baselines=(*CUTS, CELLS),
    solve=solve,
    count_templates=_count_templates,
    failure="no plan meets the demand of {name}",
    hint="allow more kinds of nodes, looser promises or less demand",
)
