"""Plans for problems with choices: levels first, then a plan for the plain problem that they leave.

The default solver chooses levels together with machines (`choose`), and then plans the settled problem as it
would any other; of the two plans the cheaper one is taken. What is proven is what holds over all mixes of
models. GH and AGH choose models and machines together, too (`joint_fleet`). Other rules choose the mix that
would cost least at the best price for each model's throughput: one model, or two that err as much as is
allowed.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.core.compiling import compile_entries
from atoll.core.errors import UsageError
from atoll.core.ids import Phase
from atoll.core.units import format_share
from atoll.plan.choice import ModelMix
from atoll.plan.plan import PROVEN_GAP, Plan
from atoll.plan.problem import Problem, Service
from atoll.solve.deadline import Deadline
from atoll.solve.plan_request import FindPlan, PlanRequest
from atoll.solve.rent import rent_baselines as baselines
from atoll.solve.rent.choosing.choose import ChosenLevels, choose
from atoll.solve.rent.choosing.joint_fleet import CHOOSERS, COMPILED
from atoll.solve.rent.choosing.level_rows import LevelRows
from atoll.solve.rent.optimal import SOLVER
from atoll.solve.templates.library import Libraries, template_libraries

_TEMPLATES = 0.4
_CHOOSING = 0.6
"""Shares of what is left of a deadline after which templates, and the choice, are as they are."""
_COST_TOLERANCE = 1e-9
"""Relative difference of costs that counts as rounding."""


def refuse_others(problem: Problem) -> None:
    """Raise UsageError where choices are asked for that only rented fleets of plain models can have."""
    names = ", ".join(problem.variants)
    if problem.family == "place":
        raise UsageError(
            f"{names}: a choice of models needs nodes that are rented, {problem.name} has a cluster",
            hint="name one model, or give offers instead of a cluster",
            field="services",
        )
    optional = {name for names in problem.variants.values() for name in names}
    graphs = [service.name for service in problem.graph_services]
    if graphs:
        what = "is a choice" if graphs[0] in optional else "stands beside one"
        raise UsageError(
            f"{graphs[0]} is of an any-to-any model and {what}: shares of models are set over templates of "
            "plain ones, which executors have none of",
            hint="plan any-to-any models in a fleet without choices of models",
            field="services",
        )


def solve_choice(problem: Problem, request: PlanRequest, find: FindPlan) -> Plan:
    """Return the plan of the request's solver for a problem with choices; it is of the settled one.

    `find` plans the settled problem, and checks the plan.
    """
    refuse_others(problem)
    if request.solver in CHOOSERS:
        compile_entries(COMPILED)
    deadline = Deadline(request.deadline_s)
    if request.solver in CHOOSERS:
        tables = _single_nodes(problem, request, deadline)
        plan = CHOOSERS[request.solver](problem, request.catalog_for(problem), tables)
        return plan if tables.complete else plan.model_copy(update={"cut_short": True})
    if request.solver not in (None, SOLVER):
        mixes = rule_mixes(problem, request, deadline)
        settled = problem.settled(mixes)
        plan = find(settled, replace(request, deadline_s=deadline.share(1.0)))
        return _unproven(plan, mixes)
    chosen = choose_mixes(problem, request, deadline)
    settled = problem.settled(chosen.mixes)
    plan = find(settled, replace(request, deadline_s=deadline.share(1.0)))
    return with_mixes(_cheaper(plan, chosen.plan), chosen)


def choose_mixes(
    problem: Problem,
    request: PlanRequest,
    deadline: Deadline,
    scale: dict[str, float] | None = None,
) -> ChosenLevels:
    """Return the levels of the cheapest plan found; `scale` multiplies demands, by service."""
    refuse_others(problem)
    catalog, effort = request.catalog_for(problem), request.effort
    for rooms in ("atoll.solve.templates", "atoll.solve.cover", "atoll.solve.rent"):
        compile_entries(rooms)
    keep_s = deadline.left * (1.0 - _TEMPLATES)
    libraries: Libraries = template_libraries(
        problem,
        catalog,
        cached=effort.cached,
        on_progress=request.on_progress,
        until=lambda: deadline.left < keep_s,
    )

    def log(_seconds: float, objective: float, bound: float) -> None:
        if 0.0 < objective < float("inf"):
            gap = format_share(max(0.0, 1.0 - bound / objective))
            request.say("choosing models", f"best ${objective:.2f}/h, gap {gap}")

    return choose(
        problem,
        catalog,
        libraries,
        deadline_s=deadline.share(_CHOOSING),
        gap=effort.gap,
        work=effort.work,
        log=log,
        derating=effort.derating,
        scale=scale,
    )


def with_mixes(plan: Plan, chosen: ChosenLevels) -> Plan:
    """Return a plan for a settled problem with its mixes, and with no more proven than holds over all."""
    fields: dict[str, object] = {"mixes": chosen.mixes}
    if chosen.cut_short:
        fields["cut_short"] = True
    bound = chosen.bound if plan.status in ("optimal", "feasible") else None
    objective = plan.objective
    if bound is None or objective is None:
        fields |= {"bound": None, "gap": None}
        if plan.status == "optimal":
            fields["status"] = "feasible"
        return plan.model_copy(update=fields)
    bound = min(bound, objective)
    gap = (objective - bound) / objective if objective > 0.0 else 0.0
    status = "optimal" if gap <= PROVEN_GAP else "feasible"
    return plan.model_copy(update={**fields, "bound": bound, "gap": gap, "status": status})


def _unproven(plan: Plan, mixes: tuple[ModelMix, ...]) -> Plan:
    """A plan of a rule: what is proven for its own mix says nothing of others."""
    status = "feasible" if plan.status == "optimal" else plan.status
    update = {"mixes": mixes, "bound": None, "gap": None, "status": status}
    return plan.model_copy(update=update)


def _cheaper(plan: Plan, other: Plan | None) -> Plan:
    """The better of two plans for the same problem: the one that serves all of it, at the lower price."""
    if other is None or other.problem_hash != plan.problem_hash:
        return plan
    if other.status not in ("optimal", "feasible"):
        return plan
    if plan.status not in ("optimal", "feasible"):
        return other
    here, there = plan.objective or 0.0, other.objective or 0.0
    return other if there < here * (1.0 - _COST_TOLERANCE) else plan


def rule_mixes(problem: Problem, request: PlanRequest, deadline: Deadline) -> tuple[ModelMix, ...]:
    """Return the mixes that cost least where every model is served at its best price for throughput."""
    tables = _single_nodes(problem, request, deadline)
    options = baselines.replicas(problem, tables)
    best = {role: some[0].efficiency for role, some in options.items() if some}
    rows = LevelRows.of(problem)
    cost = {way: _price_of(problem.services[way], best) for way in rows.ways}
    dear = 1e6 * (1.0 + max((usd for usd in cost.values() if usd is not None), default=0.0))
    levels = rows.least({way: dear if usd is None else usd for way, usd in cost.items()})
    if levels is None:
        raise UsageError(
            "no mix of models meets what the choices ask for together",
            hint="allow more error (max_error) or lower min_share",
            field="max_error",
        )
    named = {problem.services[way].name: level for way, level in levels.items()}
    return problem.mixes_at(named)


def _single_nodes(problem: Problem, request: PlanRequest, deadline: Deadline) -> Libraries:
    """Return what single nodes carry, as simple rules count it."""
    effort = request.effort
    for rooms in ("atoll.solve.templates", "atoll.solve.cover"):
        compile_entries(rooms)
    keep_s = deadline.left * (1.0 - _TEMPLATES)
    tables = template_libraries(
        problem,
        request.catalog_for(problem),
        cached=effort.cached,
        until=lambda: deadline.left < keep_s,
        single=True,
    )
    return tables if effort.derating is None else effort.derating.scale(tables)


def _price_of(service: Service, best: dict[str, float]) -> float | None:
    """Return the cost of a whole service at the best prices for throughput, USD/h; None: none serves it."""
    usd = {}
    for role in service.roles:
        if best.get(str(role), 0.0) > 0.0:
            usd[role.phase] = service.demand(role) / best[str(role)]
    ways = [usd[Phase.BOTH]] if Phase.BOTH in usd else []
    if Phase.PREFILL in usd and Phase.DECODE in usd:
        ways.append(usd[Phase.PREFILL] + usd[Phase.DECODE])
    return min(ways, default=None)
