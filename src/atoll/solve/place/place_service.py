"""One service on a fixed cluster, or on some nodes of it: every way to place it, by name.

`flow.search` is the default; `flow.milp` proves optima of small clusters; `cp` goes by simulated latency; the
others are simple rules to compare with (`place_baselines`; `memp` is in `cp`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from atoll.catalog.catalog import Catalog
from atoll.plan.plan import Goal, Plan
from atoll.plan.problem import Problem, Service
from atoll.solve.deadline import Deadline
from atoll.solve.effort import GAP, KnownPlacement, Latency, Rank
from atoll.solve.place.bottleneck import bottleneck
from atoll.solve.place.flow_instance import FlowInstance, Flows, Placement
from atoll.solve.place.from_problem import flow_instance, placement_of
from atoll.solve.place.machine_cuts import Cut
from atoll.solve.place.place_to_plan import Placed
from atoll.solve.place.placement_candidates import CandidateWork, Score

SEARCH = "flow.search"
MILP = "flow.milp"
RULES = ("swarm", "petals", "separate", "separate-plus", "chain", "random")
KNOWN_RULES = ("swarm", "separate", "separate-plus", "chain")
"""Rules whose placements are candidates; Petals' is one, too, with the partial inference that it needs."""
CP = "cp"
MEMP = "memp"
NAMES = (SEARCH, MILP, *RULES)
OBJECTIVES: tuple[Goal, ...] = ("sustained", "max-flow", "latency")
SECONDS = 60.0

_NODE_EVALUATIONS = 10_000
"""Evaluations of searches for candidates, for each node."""
_MAX_EVALUATIONS = 600_000
"""Evaluations of searches for candidates, on clusters of any size."""
_STEPS = 24_000
"""Steps of polishing by a quick value."""
_SLOW_STEPS = 400
"""Steps of polishing by flows within a promise, each of which takes milliseconds."""
_BALANCED_STEPS = 6_000
"""Steps of polishing by flows that are balanced, which takes milliseconds where they are any good."""

Log = Callable[[float, float, float], None]
"""Told seconds so far, the best value and the proven bound, both in tokens/s."""


@dataclass(frozen=True)
class FlowEffort:
    """How to solve: what for, with partial inference or without it, and until when at most.

    Work is counted; `seconds` is a safety net that ends it early. `work` is the share of the usual work to
    do, and `bounded` asks for the tightest bound as well. With `promise`, no pipeline may be slower than the
    service promises (`latency`). `rank` values plans (a simulation, say): the best few by `sustain`
    throughput are ranked by it and the best changed further (`refine`); without it the best by `sustain`
    is taken. `latency` fills the tables of placements by latency (`cp`), and `gap` is how close they come.
    `known` placements are candidates like those by the simple rules.
    `done` counts what was done, by name.
    """

    seconds: float = SECONDS
    objective: Goal | None = None
    partial: bool = False
    promise: bool = False
    workers: int = 1
    log: Log | None = None
    rank: Rank | None = None
    work: float = 1.0
    bounded: bool = True
    latency: Latency | None = None
    gap: float = GAP
    known: tuple[KnownPlacement, ...] = ()
    done: Counter[str] = field(default_factory=Counter, compare=False)
    say: Callable[[str], None] = lambda _text: None

    @property
    def goal(self) -> Goal:
        """The objective, by default the first of those that can be asked for."""
        return self.objective or OBJECTIVES[0]


@dataclass(frozen=True)
class ServicePlacement:
    """A placement of one service, the proven bound on any in tokens/s, and what limits it if not a cut."""

    placed: Placed
    bound: float | None
    limit: str | None = None


def places(
    name: str,
    problem: Problem,
    catalog: Catalog,
    service: Service,
    effort: FlowEffort,
    deadline: Deadline,
    *,
    nodes: Sequence[str] | None = None,
    units: Cut | None = None,
    max_placements: int = 1,
) -> list[ServicePlacement]:
    """Return the best placements of one service, best first; more than one for `sustain` searches only."""
    instance = flow_instance(
        problem,
        catalog,
        service,
        partial=effort.partial,
        nodes=nodes,
        units=units,
        promised=effort.promise,
    )
    if instance.size == 0:
        return []
    seed = problem.settings.seed
    score = score_of(effort)
    bound: float | None = None
    placements: list[Placement | None]
    # Rules give one placement and prove nothing, so they have no bound.
    if name in RULES:
        instance, placement = by_rule(name, instance, seed)
        placements = [placement]
    elif effort.goal == "max-flow" and not effort.promise:
        placement, bound = _search_flow(name, instance, effort, deadline, seed)
        placements = [placement]
    else:
        placements, bound = _search_scored(instance, score, effort, deadline, seed, max_placements)
    placements_found = []
    for placement in placements:
        flows = None if placement is None else score(instance, placement)
        if placement is None or flows is None or flows.value <= 0:
            continue
        placed = Placed(service, instance, placement, flows, promised=effort.promise)
        # Only a flow that lasts is said to be limited by a KV cache.
        lasting = effort.goal == "sustained" and not effort.promise
        limit = describe_limit(instance, placement, flows) if lasting else None
        placements_found.append(ServicePlacement(placed, bound, limit))
    return placements_found


def score_of(effort: FlowEffort) -> Score:
    """Return what makes the flow of a placement: within the promise, what lasts, or the largest."""
    from atoll.solve.place.evaluate import max_flow
    from atoll.solve.place.latency import flow_within

    def lasting(instance: FlowInstance, placement: Placement) -> Flows:
        from atoll.solve.place.sustained.sustained import best_flows

        return within_rates(instance, placement, best_flows(instance, placement).flows)

    if effort.promise:
        return flow_within
    return lasting if effort.goal == "sustained" else max_flow


def within_rates(instance: FlowInstance, placement: Placement, flows: Flows) -> Flows:
    """Return a flow scaled down until no node carries more than its rate."""
    from atoll.solve.place.latency import scale_flows

    held = placement.end - placement.start
    rate = instance.rate[range(instance.size), held]
    through = flows.enter + flows.edge.sum(axis=0)
    used = through > 0
    return scale_flows(flows, min(1.0, float((rate[used] / through[used]).min(initial=1.0))))


def _search_scored(
    instance: FlowInstance,
    score: Score,
    effort: FlowEffort,
    deadline: Deadline,
    seed: int,
    max_placements: int,
) -> tuple[list[Placement | None], float]:
    from atoll.solve.place.bound.bounds import upper_bound
    from atoll.solve.place.latency import max_within
    from atoll.solve.place.placement_candidates import (
        best_candidates,
        by_range_length,
        by_stage_count,
    )

    # Bounds within a promise must hold for any number of hops, so nodes count with the most they ever carry.
    bounding = max_within(instance) if effort.promise else instance
    # The bound by covers takes seconds: it is left out within a promise, and where no close bound is asked
    # for.
    bound = upper_bound(bounding, tight=effort.bounded and not effort.promise).value
    quick, balanced_steps = None, 0
    if effort.goal == "sustained" and not effort.promise:
        from atoll.solve.place.sustained.sustained import BALANCED, evaluator, site_of

        quick = evaluator(site_of(instance))
        balanced_steps = _BALANCED_STEPS if instance.size <= BALANCED else 0
    evaluations = min(_NODE_EVALUATIONS * instance.size, _MAX_EVALUATIONS)
    # Without a quick value every step computes flows within the promise, so far fewer are taken.
    steps = _STEPS if quick is not None else _SLOW_STEPS
    best = best_candidates(
        instance,
        score,
        starts(instance, seed, deadline, effort.work, effort.known),
        by_stage_count(instance) if effort.promise else by_range_length(instance),
        work=CandidateWork(
            round(evaluations * effort.work),
            round(steps * effort.work),
            round(balanced_steps * effort.work),
        ),
        deadline=deadline,
        seed=seed,
        workers=effort.workers,
        bound=bound,
        quick=quick,
        log=effort.log,
        limit=max_placements,
        done=effort.done,
    )
    return [placement for placement, _ in best], bound


def describe_limit(instance: FlowInstance, placement: Placement, flows: Flows) -> str | None:
    """Say which node's KV cache is full first."""
    from atoll.solve.place.sustained.sustained import sustain

    lasting = sustain(instance, placement, flows)
    if lasting.limiting is None:
        return None
    name, kind = instance.names[lasting.limiting], instance.node_types[lasting.limiting]
    held = int(placement.end[lasting.limiting] - placement.start[lasting.limiting])
    return (
        f"KV cache of {name} ({kind}, {held} layers) is full with {lasting.in_flight:,.0f} requests in "
        f"flight for {lasting.residence_s:,.0f} s each"
    )


def by_rule(name: str, instance: FlowInstance, seed: int) -> tuple[FlowInstance, Placement | None]:
    """Return the placement by a simple rule; Petals' needs partial inference, so the instance may change."""
    from atoll.solve.place import place_baselines as baselines

    if name == "petals":
        # Petals enters a node in the middle of its range, which needs partial inference.
        instance = replace(instance, partial=True)
        return instance, baselines.petals(instance, seed)
    if name == "random":
        return instance, baselines.at_random(instance, seed)
    rules = {
        "swarm": baselines.swarm,
        "separate": baselines.separate,
        "separate-plus": baselines.separate_plus,
        "chain": baselines.chain,
    }
    return instance, rules[name](instance)


def known_placements(
    instance: FlowInstance, seed: int, known: Sequence[KnownPlacement] = ()
) -> list[Placement]:
    """Return placements that were given, as far as they fit these nodes, and those by the simple rules."""
    own = (_given(instance, one) for one in known)
    names = [*KNOWN_RULES, *(["petals"] if instance.partial else [])]
    rules = (by_rule(name, instance, seed)[1] for name in names)
    return [placement for placement in (*own, *rules) if placement is not None]


def _given(instance: FlowInstance, known: KnownPlacement) -> Placement | None:
    ranges = [known.get(name, (0, 0)) for name in instance.names]
    held = [end - start for start, end in ranges]
    if any(held) and all(j <= most for j, most in zip(held, instance.max_layers, strict=True)):
        return placement_of(instance, ranges)
    return None


def starts(
    instance: FlowInstance,
    seed: int,
    deadline: Deadline,
    work: float = 1.0,
    known: Sequence[KnownPlacement] = (),
) -> list[Placement]:
    """Return placements to search from: known ones, simple rules, one or two lanes of blocks (`lanes`)."""
    from atoll.solve.place.bound.lanes import ITERATIONS, lanes

    placements = known_placements(instance, seed, known)
    # Rules take no time; lanes do, and are left out where it is over.
    if not deadline.is_over():
        iterations = max(1, round(ITERATIONS * min(1.0, work)))
        own = lanes(instance, seconds=deadline.limit(), iterations=iterations)
        placements += [] if own is None else [own]
    return placements


def _search_flow(
    name: str, instance: FlowInstance, effort: FlowEffort, deadline: Deadline, seed: int
) -> tuple[Placement | None, float | None]:
    from atoll.solve.place.search.flow_search import WORK, search

    best = search(
        instance,
        seconds=deadline.limit(),
        work=max(1, round(WORK * effort.work)),
        seed=seed,
        workers=effort.workers,
        start=starts(instance, seed, deadline, effort.work, effort.known),
        log=effort.log,
    )
    deadline.missed |= best.cut_short
    effort.done.update(searches=1, evaluations=best.evaluations)
    if name == MILP and best.value < best.bound:
        from atoll.solve.place.milp.milp import solve_milp

        proven = solve_milp(
            instance, seconds=deadline.limit(), start=[best.placement], log=effort.log
        )
        best = replace(
            proven if proven.value >= best.value else best, bound=min(best.bound, proven.bound)
        )
    return best.placement, best.bound


def reasons(plan: Plan, problem: Problem, catalog: Catalog) -> list[str]:
    """Name the bottleneck of every instance of a plan."""
    lines = []
    for instance in plan.instances:
        cut = bottleneck(instance, problem, catalog)
        if cut is not None:
            service = f"{instance.service}: " if len(plan.instances) > 1 else ""
            lines.append(f"{service}bottleneck {cut}")
    return lines


def shortage(
    problem: Problem, catalog: Catalog, service: Service, nodes: Sequence[str] | None = None
) -> str | None:
    """Say how much is missing where nodes cannot hold all layers of a model together."""
    from atoll.solve.place.bound.bounds import find_missing

    spec = catalog.model(service.model).llm
    per_layer = sum(spec.layer_weight_bytes(i) for i in range(spec.layers)) / spec.layers
    lacking = find_missing(flow_instance(problem, catalog, service, nodes=nodes), per_layer)
    return f"{service.model}: {lacking}" if lacking.layers else None
