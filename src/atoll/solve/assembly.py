"""From what a solver chose to a plan: flows, throughput, routes, cost.

A solver chooses layouts and where they stand; everything else in a plan follows. Nodes of a stage
share its flow in proportion to their capacity, a stage feeds every node of the next, and an instance
carries what its weakest stage does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InternalError
from atoll.core.ids import parse_role
from atoll.perf.layers import default_tp
from atoll.perf.memory import position_of
from atoll.plan.capacities import node_capacity
from atoll.plan.plan import SINK, SOURCE, Flow, Goal, Instance, Market, Node, Plan, Route, Status
from atoll.plan.problem import Problem
from atoll.plan.validate.violation import exceeds

_MARKET_ORDER: tuple[Market, ...] = ("owned", "on-demand", "spot")


class StageLike(Protocol):
    """Layers [start, end) on data-parallel nodes, by node type."""

    @property
    def start(self) -> int:
        """First layer."""
        ...

    @property
    def end(self) -> int:
        """Past the last layer."""
        ...

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node types of the stage."""
        ...


class LayoutLike(Protocol):
    """Stages in order, first to last; `templates.generate.Layout` is one."""

    @property
    def stages(self) -> Sequence[StageLike]:
        """The stages."""
        ...


@dataclass(frozen=True, slots=True)
class PlainStage:
    """A stage written out by hand; see `StageLike`."""

    start: int
    end: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlainLayout:
    """A layout written out by hand; see `LayoutLike`."""

    stages: tuple[PlainStage, ...]


@dataclass(frozen=True)
class NewInstance:
    """One instance to start: a role laid out over nodes of a region.

    `rented` says how many nodes of each (node type, market) to take; None where every node type of the
    layout is offered on one market only in that region.
    """

    role: str
    region: str
    layout: LayoutLike
    rented: Mapping[tuple[str, Market], int] | None = None


def plan_from_layouts(
    problem: Problem,
    catalog: Catalog,
    chosen: Iterable[NewInstance],
    *,
    status: Status,
    solver: str,
    kept: Iterable[Instance] = (),
    bound: float | None = None,
    seconds: float = 0.0,
    cpu_seconds: float = 0.0,
    reasons: Sequence[str] = (),
) -> Plan:
    """Return the plan with the `chosen` instances started and the `kept` running ones kept.

    A chosen instance that equals a running one (same role, region, nodes, markets and layers) is kept,
    too, as often as there are such. Ids of kept instances stay; new ids are unused so far.
    """
    staying = [keep(problem, catalog, instance) for instance in kept]
    taken = {instance.id for instance in (*staying, *problem.running)}
    idle = {i.id: i for i in problem.running if i.id not in {s.id for s in staying}}
    started: list[Instance] = []
    order = sorted(chosen, key=lambda c: (c.role, c.region, _shape(c.layout), _split(c.rented)))
    for choice in order:
        new = build_instance(problem, catalog, choice, id=_next_id(choice.role, taken))
        same = next((old for old in idle.values() if old.placement_key == new.placement_key), None)
        if same is None:
            taken.add(new.id)
            started.append(new)
        else:
            del idle[same.id]
            staying.append(keep(problem, catalog, same))
    return assemble(
        problem,
        (*staying, *started),
        status=status,
        solver=solver,
        bound=bound,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        reasons=reasons,
    )


def assemble(
    problem: Problem,
    instances: Iterable[Instance],
    *,
    status: Status,
    solver: str,
    bound: float | None = None,
    seconds: float = 0.0,
    cpu_seconds: float = 0.0,
    reasons: Sequence[str] = (),
    goal: Goal = "cost",
    value: float | None = None,
) -> Plan:
    """Return a plan of ready instances: adds routes, served fractions, cost, objective and gap.

    The objective is the cost, or `value` in tokens/s with another `goal`. A bound a hair on the wrong side
    of the objective, as rounding leaves it, is moved to the objective. The status becomes "partial" where
    demand is not met, and "infeasible" means an empty plan.
    """
    standing = tuple(instances)
    served = {str(role): _served_fraction(problem, str(role), standing) for role in problem.roles}
    if status in ("optimal", "feasible") and min(served.values()) < 1.0:
        status = "partial"
    usd = sum(instance.usd_per_hour for instance in standing)
    fresh = sum(instance.usd_per_hour for instance in standing if not instance.kept)
    init = problem.settings.init_penalty * fresh
    reached = usd + init if goal == "cost" else value
    objective = None if status == "infeasible" else reached
    if objective is None:
        bound = None
    elif bound is not None:
        bound = min(bound, objective) if goal == "cost" else max(bound, objective)
    return Plan(
        problem_hash=problem.content_hash(),
        problem_name=problem.name,
        instances=standing,
        routes=routes_by_throughput(standing),
        served_fraction=served,
        usd_per_hour=usd,
        init_usd=init,
        goal=goal,
        objective=objective,
        bound=bound,
        gap=relative_gap(objective, bound),
        status=status,
        solver=solver,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        reasons=tuple(reasons),
    )


def infeasible(
    problem: Problem,
    *,
    solver: str,
    reasons: Sequence[str],
    seconds: float = 0.0,
    cpu_seconds: float = 0.0,
) -> Plan:
    """Return the empty plan that says why there is none."""
    return assemble(
        problem,
        (),
        status="infeasible",
        solver=solver,
        reasons=reasons,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
    )


def relative_gap(objective: float | None, bound: float | None) -> float | None:
    """Return their difference over the larger, 0 where both are 0, None where either is unknown.

    The larger is the objective where less is better (cost) and the bound where more is (tokens/s).
    """
    if objective is None or bound is None:
        return None
    high = max(objective, bound)
    return abs(objective - bound) / high if high > 0 else 0.0


def build_instance(problem: Problem, catalog: Catalog, choice: NewInstance, *, id: str) -> Instance:  # noqa: A002
    """Return the instance of a layout in a region, its flows and its price worked out."""
    nodes = _nodes(problem, catalog, choice)
    bare = Instance(
        id=id,
        service=parse_role(choice.role).model,
        role=choice.role,
        region=choice.region,
        stages=len(choice.layout.stages),
        nodes=nodes,
        flows=(),
        throughput_per_s=0.0,
        usd_per_hour=price(problem, choice.region, nodes),
    )
    return _with_flows(bare, node_capacities(problem, catalog, bare))


def keep(problem: Problem, catalog: Catalog, running: Instance) -> Instance:
    """Return a running instance as this problem sees it: same nodes and layers, today's price.

    Its throughput is worked out again, since promise and lengths may have changed. Flows of a placement
    that is no stage layout are scaled down until every node can carry its own.
    """
    capacities = node_capacities(problem, catalog, running)
    usd = price(problem, running.region, running.nodes)
    priced = running.model_copy(update={"usd_per_hour": usd, "kept": True})
    if is_stage_layout(running):
        return _with_flows(priced, capacities)
    through = {node.id: 0.0 for node in running.nodes}
    for flow in running.flows:
        if flow.dst in through:
            through[flow.dst] += flow.per_s
    scale = min([1.0, *(capacities[node] / flow for node, flow in through.items() if flow > 0)])
    flows = tuple(f.model_copy(update={"per_s": f.per_s * scale}) for f in running.flows)
    return priced.model_copy(
        update={"flows": flows, "throughput_per_s": running.throughput_per_s * scale}
    )


def node_capacities(problem: Problem, catalog: Catalog, instance: Instance) -> dict[str, float]:
    """Return what each node of an instance can carry, by node id, in units of the role per second."""
    service = problem.service(instance.service)
    spec = catalog.model(service.model).llm
    return {
        node.id: node_capacity(
            problem,
            catalog,
            service,
            instance.role_id,
            node.node_type,
            node.layers,
            instance.stages,
            position_of(spec, node.start, node.end),
            tp=node.tp,
            region=instance.region,
        )
        for node in instance.nodes
    }


def is_stage_layout(instance: Instance) -> bool:
    """Return whether the instance is stages one after the other, each feeding the next."""
    stages = instance.layout()
    meets = all(a.end == b.start for a, b in pairwise(stages))
    return not instance.partial and meets and stages[0].start == 0


def routes_by_throughput(instances: Iterable[Instance]) -> tuple[Route, ...]:
    """Return routes that load every instance of a role in proportion to what it carries."""
    by_role: dict[str, list[Instance]] = {}
    for instance in instances:
        if instance.throughput_per_s > 0:
            by_role.setdefault(instance.role, []).append(instance)
    routes: list[Route] = []
    for role, group in by_role.items():
        total = sum(instance.throughput_per_s for instance in group)
        weights = {i.id: min(1.0, i.throughput_per_s / total) for i in group}
        role_id = parse_role(role)
        routes.append(Route(service=role_id.model, phase=role_id.phase, weights=weights))
    return tuple(routes)


def _nodes(problem: Problem, catalog: Catalog, choice: NewInstance) -> tuple[Node, ...]:
    """Number the nodes and give each a market: one's own first, spot last."""
    spec = catalog.model(problem.service_of(choice.role).model).llm
    kinds = [(s.start, s.end, kind) for s in choice.layout.stages for kind in s.nodes]
    left = Counter(choice.rented or _only_markets(problem, choice))
    nodes: list[Node] = []
    for index, (start, end, kind) in enumerate(kinds):
        market = next((m for m in _MARKET_ORDER if left[kind, m] > 0), None)
        if market is None:
            raise InternalError(f"{choice.role} in {choice.region}: no {kind} left to take")
        left[kind, market] -= 1
        nodes.append(
            Node(
                id=f"n{index}",
                node_type=kind,
                market=market,
                start=start,
                end=end,
                tp=default_tp(spec, catalog.node(kind)),
            )
        )
    if left.total() != 0:
        raise InternalError(f"{choice.role} in {choice.region}: more nodes rented than laid out")
    return tuple(nodes)


def _only_markets(problem: Problem, choice: NewInstance) -> dict[tuple[str, Market], int]:
    counts = Counter(kind for stage in choice.layout.stages for kind in stage.nodes)
    rented: dict[tuple[str, Market], int] = {}
    for kind, count in counts.items():
        markets = [m for m in _MARKET_ORDER if problem.offer(choice.region, kind, m) is not None]
        if len(markets) != 1:
            raise InternalError(f"{kind} in {choice.region}: on {len(markets)} markets, say which")
        rented[kind, markets[0]] = count
    return rented


def price(problem: Problem, region: str, nodes: Sequence[Node]) -> float:
    """Return what the nodes of an instance in a region cost, in USD per hour."""
    total = 0.0
    for node in nodes:
        place = node.region or region
        offer = problem.offer(place, node.node_type, node.market)
        if offer is None:
            raise InternalError(f"{node.node_type} ({node.market}) is not on offer in {place}")
        total += offer.usd_per_hour
    return total


def _with_flows(instance: Instance, capacities: Mapping[str, float]) -> Instance:
    """Give a stage layout its flows: every stage carries what the weakest can."""
    stages = instance.layout()
    totals = [sum(capacities[node.id] for node in stage.nodes) for stage in stages]
    carried = min(totals)
    shares = [
        {node.id: capacities[node.id] / total for node in stage.nodes if total > 0}
        for stage, total in zip(stages, totals, strict=True)
    ]
    flows: list[Flow] = []
    if carried > 0:
        layers = [{SOURCE: 1.0}, *shares, {SINK: 1.0}]
        for before, after in pairwise(layers):
            flows += [
                Flow(src=a, dst=b, per_s=carried * x * y)
                for a, x in before.items()
                for b, y in after.items()
                if x > 0 and y > 0
            ]
    return instance.model_copy(update={"flows": tuple(flows), "throughput_per_s": carried})


def _served_fraction(problem: Problem, role: str, instances: Sequence[Instance]) -> float:
    demand = problem.demand(role)
    supply = sum(i.throughput_per_s for i in instances if i.role == role)
    return supply / demand if exceeds(demand, supply) else 1.0


def _next_id(role: str, taken: set[str]) -> str:
    role_id = parse_role(role)
    number = 0
    while f"{role_id.model}-{role_id.phase}-{number}" in taken:
        number += 1
    return f"{role_id.model}-{role_id.phase}-{number}"


def _shape(layout: LayoutLike) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
    return tuple((stage.start, stage.end, tuple(stage.nodes)) for stage in layout.stages)


def _split(rented: Mapping[tuple[str, Market], int] | None) -> tuple[tuple[str, str, int], ...]:
    return tuple(sorted((kind, market, n) for (kind, market), n in (rented or {}).items()))
