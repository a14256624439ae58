"""Why a plan is what it is, made exact by planning again; the words are in `plan.explain`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UsageError
from atoll.core.ids import Phase, RoleId
from atoll.perf.layers import default_tp
from atoll.plan.capacities import kv_context, memory_model
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem, Service
from atoll.solve.effort import DEADLINE_S, Effort
from atoll.solve.explain.explanation import (
    Constraint,
    Explanation,
    NodeUse,
    RoleFit,
    served_share,
    slacks,
    tight_constraints,
)
from atoll.solve.explain.repairs import find_repairs
from atoll.solve.explain.whatif import (
    MOST_SECONDS,
    OutOfTimeError,
    Planner,
    break_even,
    loosen,
    soft,
    worth,
)
from atoll.solve.progress import OnProgress, Progress
from atoll.solve.registry import solve
from atoll.solve.rent.optimal import Solved
from atoll.solve.templates.cache import TemplateCache
from atoll.solve.templates.generate import TemplateLibrary, best_layout
from atoll.solve.templates.library import template_libraries


def explain(
    plan: Plan,
    planner: Planner,
    *,
    node_types: Sequence[str] | None = None,
    constraints: bool = True,
    repairs: bool = True,
) -> Explanation:
    """Return why a plan is what it is.

    `node_types` are those to say something about (None: all on offer, and where demand is not met without
    asking for prices); `repairs` are looked for if demand is not met, unless False. What the planner's
    limits leave no time for is named in `left_out`.
    """
    problem = soft(planner.problem)
    left_out: list[str] = []
    try:
        base, _ = planner.solve(problem, "the plan itself")
    except OutOfTimeError:
        return _read_off(plan, planner.problem, ("everything that needs planning again",))
    # Of an infeasible plan nothing can be read off; the most that can be served says what binds.
    shown = base.plan if plan.status == "infeasible" else plan
    tight = tight_constraints(shown, planner.problem)
    if constraints:
        tight = _worths(tight, base, problem, planner, left_out)
    short = served_share(base.plan, problem) < 1.0
    possible_repairs = find_repairs(planner, left_out) if short and repairs else None
    kinds = problem.node_types if node_types is None else tuple(node_types)
    asked = node_types is not None or not short
    uses = tuple(
        _node_use(kind, shown, base.plan, problem, planner, left_out, asked=asked) for kind in kinds
    )
    return _read_off(shown, planner.problem, tuple(left_out)).model_copy(
        update={
            "status": plan.status,
            "best_usd_per_hour": base.plan.objective,
            "bound": base.plan.bound,
            "constraints": tight,
            "repairs": possible_repairs,
            "node_types": uses,
            "plans": planner.plans,
        }
    )


def explain_problem(
    problem: Problem,
    plan: Plan | None = None,
    *,
    node_types: Sequence[str] | None = None,
    repairs: bool | None = None,
    deadline_s: float = MOST_SECONDS,
    cached: bool = True,
    on_progress: OnProgress | None = None,
    catalog: Catalog | None = None,
) -> Explanation:
    """Return why a plan for a problem is what it is; without a plan, why the cheapest is.

    `node_types` are those to say something about, and then nothing else is said; `repairs` are looked for
    where demand is not met, unless False. `deadline_s` is for all of it together.
    """
    refuse_cluster(problem)
    facts = problem.catalog() if catalog is None else catalog
    libraries = template_libraries(problem, facts, cached=cached, on_progress=on_progress)
    if plan is None:
        plan = solve(
            problem,
            effort=Effort(cached=cached),
            deadline_s=min(DEADLINE_S, deadline_s),
            on_progress=on_progress,
            catalog=facts,
        )
    total = expected_plans(plan, problem, node_types)

    def tell(plans: int, question: str) -> None:
        if on_progress is not None:
            on_progress(Progress("planning again", question, min(1.0, plans / max(1, total))))

    planner = Planner(
        problem,
        facts,
        libraries,
        TemplateCache() if cached else None,
        most_seconds=deadline_s,
        progress=tell,
    )
    return explain(
        plan,
        planner,
        node_types=node_types,
        constraints=node_types is None,
        repairs=node_types is None if repairs is None else repairs,
    )


def refuse_cluster(problem: Problem) -> None:
    """Refuse a fixed cluster: its plan already says what binds."""
    if problem.cluster is not None:
        raise UsageError(
            f"{problem.name} is a fixed cluster", hint="its plan says what binds: run `atoll plan`"
        )


def expected_plans(plan: Plan, problem: Problem, node_types: Sequence[str] | None) -> int:
    """Return about how often `explain` will plan again, for a progress bar."""
    rented = {kind for _, kind, _ in plan.count_nodes()}
    prices = 3 * sum(kind not in rented for kind in node_types or problem.node_types)
    if node_types is not None:
        return 1 + prices
    tight = len(tight_constraints(plan, problem))
    if plan.status not in ("partial", "infeasible"):
        return 1 + tight + prices
    return 1 + tight + 5 * len(problem.node_types) + 2 * len(problem.roles)


def _read_off(plan: Plan, problem: Problem, left_out: tuple[str, ...]) -> Explanation:
    return Explanation(
        problem_name=plan.problem_name,
        status=plan.status,
        served=served_share(plan, problem),
        usd_per_hour=plan.usd_per_hour,
        objective=plan.objective,
        constraints=tight_constraints(plan, problem),
        demand=slacks(plan, problem),
        left_out=left_out,
    )


def _worths(
    tight: tuple[Constraint, ...],
    base: Solved,
    problem: Problem,
    planner: Planner,
    left_out: list[str],
) -> tuple[Constraint, ...]:
    """Ask what loosening each constraint is worth, the most promising first; keep the order given."""
    saved = base.allocation.node_usd
    regions, kinds = problem.regions, planner.libraries.node_types

    def promise(index: int) -> float:
        rental = tight[index].rental
        if rental is None:
            return np.inf
        return float(saved[regions.index(rental.region), kinds.index(rental.node_type)])

    out = list(tight)
    order = sorted(range(len(tight)), key=lambda i: (-promise(i), i))
    for done, index in enumerate(order):
        constraint = tight[index]
        question = f"{constraint.loosened}: {constraint.where}"
        try:
            other = planner.plan(loosen(problem, constraint), question)
        except OutOfTimeError:
            left_out.append(f"what {len(order) - done} of the constraints are worth")
            break
        out[index] = constraint.model_copy(update={"worth": worth(base.plan, other, problem)})
    return tuple(out)


def _node_use(
    kind: str,
    plan: Plan,
    base: Plan,
    problem: Problem,
    planner: Planner,
    left_out: list[str],
    *,
    asked: bool,
) -> NodeUse:
    offers = [offer for offer in problem.offers if offer.node_type == kind]
    used = sum(
        count for (_, node_type, _), count in plan.count_nodes().items() if node_type == kind
    )
    standing = [i for i in plan.instances if any(n.node_type == kind for n in i.nodes)]
    roles = dict.fromkeys(f"{i.service} {i.phase}" for i in standing)
    use = NodeUse(
        node_type=kind,
        verdict="used",
        used=used,
        available=sum(offer.available for offer in offers),
        instances=tuple(instance.id for instance in standing),
        used_by=tuple(roles),
        roles=tuple(role_fit(planner, role, kind) for role in problem.roles),
        usd_per_hour=min((o.usd_per_hour for o in offers if o.available), default=None),
    )
    if used:
        return use
    if not use.available:
        return use.model_copy(update={"verdict": "not-offered"})
    if not any(fit.carries for fit in use.roles):
        return use.model_copy(update={"verdict": "carries-nothing"})
    if not asked:
        return use.model_copy(update={"verdict": "too-dear", "asked": False})
    try:
        price = break_even(kind, base, problem, planner)
    except OutOfTimeError:
        left_out.append(f"at which price {kind} would be used")
        return use.model_copy(update={"verdict": "too-dear", "asked": False})
    if price is None:
        return use.model_copy(update={"verdict": "idle"})
    low = (use.usd_per_hour or 0.0) * price.factor
    return use.model_copy(
        update={
            "verdict": "too-dear",
            "break_even_usd_per_hour": low,
            "exact": price.exact,
        }
    )


def role_fit(planner: Planner, role: RoleId, kind: str) -> RoleFit:
    """Return whether a node type can be part of an instance of a role, and if not, why."""
    problem, library = planner.problem, planner.libraries.roles[str(role)]
    service = problem.service_of(role)
    column = planner.libraries.node_types.index(kind)
    tables = library.tables
    name = f"{service.name} {role.phase}"
    if not service.allows(kind):
        reason = f"{service.name} may not stand on it"
    elif library.counts[:, column].any():
        return RoleFit(role=str(role), carries=True, reason=f"carries {name}")
    elif tables.memory_bytes[column] > tables.memory_limit:
        ratio = problem.settings.memory_ratio
        reason = f"has more than {ratio:g} times the memory of {service.name} (memory_ratio)"
    elif not tables.rates[:, :, column].any():
        reason = f"{_why_nothing(planner, service, role.phase, kind)} ({name})"
    elif _alone(library, column) <= 0.0:
        most = problem.settings.max_nodes_per_instance
        reason = f"up to {most} of them do not hold {service.name} within the promise ({name})"
    else:
        reason = f"adds nothing to nodes that carry {name} without it"
    return RoleFit(role=str(role), carries=False, reason=reason)


def _why_nothing(planner: Planner, service: Service, phase: Phase, kind: str) -> str:
    """Say why not a single layer is carried: it does not fit, or takes too long."""
    problem, catalog = planner.problem, planner.catalog
    node = catalog.node(kind)
    phases = (Phase.PREFILL, Phase.DECODE) if phase is Phase.BOTH else (phase,)
    tp = default_tp(catalog.model(service.model).llm, node)
    for each in phases:
        memory = memory_model(problem, catalog, service, each, node, tp)
        if memory.max_layers(kv_context(service, each)) == 0:
            return "not one layer fits beside a request"
    return "breaks the promise with a single layer"


def _alone(library: TemplateLibrary, column: int) -> float:
    """The most that an instance of this node type alone carries."""
    tables, best = library.tables, 0.0
    for number in range(1, library.max_nodes + 1):
        if number * tables.memory_bytes[column] > tables.memory_limit:
            break
        counts = np.zeros(len(tables.node_types), np.int8)
        counts[column] = number
        best = max(best, best_layout(tables, counts).throughput)
    return best
