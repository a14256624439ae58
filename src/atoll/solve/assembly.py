"""From what a solver chose to a plan: flows, throughput, places, routes, cost.

A solver chooses layouts and where they stand; everything else in a plan follows. Nodes of a stage
share its flow in proportion to their capacity, a stage feeds every node of the next, and an instance
carries what its weakest stage does. Slices find their machine in `packing`, requests their way in `legs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InternalError
from atoll.core.ids import parse_node_type, parse_role
from atoll.perf.layers import Split
from atoll.perf.memory_model import position_of
from atoll.plan.capacities import best_tp, count_slots, node_capacity, share_kv_bytes
from atoll.plan.plan import (
    PROVEN_GAP,
    SINK,
    SOURCE,
    Flow,
    Goal,
    Instance,
    Market,
    Node,
    Plan,
    RequestPath,
    Status,
)
from atoll.plan.problem import Problem
from atoll.solve.derating import Derating, apply_all
from atoll.solve.legs import routes_of
from atoll.solve.packing import find_offer, pack, rent

Source = tuple[str, str, Market]
"""A kind of node, the type of machine it is (a part of), and the market."""
_MARKET_ORDER: tuple[Market, ...] = ("owned", "on-demand", "spot")


class StageLike(Protocol):
    """Layers [start, end) on data-parallel nodes, by kind."""

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
        """Kinds of the nodes of the stage."""
        ...


class LayoutLike(Protocol):
    """Stages in order, first to last; `templates.generate.Layout` is one."""

    @property
    def stages(self) -> Sequence[StageLike]:
        """The stages."""
        ...

    @property
    def engine(self) -> str | None:
        """The engine that runs it; None where layouts are free."""
        ...

    @property
    def tp(self) -> Split:
        """GPUs of each node that split a layer."""
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
    engine: str | None = None
    tp: Split = None


@dataclass(frozen=True)
class NewInstance:
    """One instance to start: a role laid out over nodes of a region.

    `rented` says how many nodes of each kind come from machines of which type on which market; None where
    every kind of the layout has only one source in that region. `slots` are the machines that slices must be
    of, where that matters.
    """

    role: str
    region: str
    layout: LayoutLike
    rented: Mapping[Source, int] | None = None
    slots: Mapping[Source, tuple[int, ...]] = field(default_factory=dict)


def plan_from_layouts(
    problem: Problem,
    catalog: Catalog,
    chosen: Iterable[NewInstance],
    *,
    status: Status,
    solver: str,
    kept: Iterable[Instance] = (),
    bound: float | None = None,
    reasons: Sequence[str] = (),
    cut_short: bool = False,
    derating: Derating | None = None,
) -> Plan:
    """Return the plan with the `chosen` instances started and the `kept` running ones kept.

    Instances that cost money and get no request are left out where all demand is met without them. A chosen
    instance that equals a running one (same role, region, nodes, markets and layers) is kept,
    too, as often as there are such. Ids of kept instances stay; new ids are unused so far.
    """
    staying = [keep(problem, catalog, instance) for instance in kept]
    taken = {instance.id for instance in (*staying, *problem.running)}
    # What was not kept by name may still equal a chosen one.
    idle = {i.id: i for i in problem.running if i.id not in {s.id for s in staying}}
    started: list[Instance] = []
    # In a fixed order, so that equal choices get equal ids.
    order = sorted(
        chosen,
        key=lambda c: (
            c.role, c.region, _shape(c.layout), _split(c.rented), sorted(c.slots.items())
        ),
    )  # fmt: skip
    for choice in order:
        new = build_instance(problem, catalog, choice, id=_next_id(choice.role, taken))
        same = next((old for old in idle.values() if old.placement_key == new.placement_key), None)
        if same is None:
            taken.add(new.id)
            started.append(new)
        else:
            del idle[same.id]
            staying.append(keep(problem, catalog, same))

    def made(instances: Iterable[Instance]) -> Plan:
        return assemble(
            problem,
            instances,
            catalog=catalog,
            status=status,
            solver=solver,
            bound=bound,
            reasons=reasons,
            cut_short=cut_short,
        )

    plan = made(
        pack(problem, apply_all(derating, sorted((*staying, *started), key=lambda i: i.id)))
    )
    reached = {name for route in plan.routes for name in route.instances}
    unused = {i.id for i in plan.instances if i.usd_per_hour > 0.0 and i.id not in reached}
    met = plan.status in ("optimal", "feasible")
    if not unused or not met or problem.limits.spread > 1 or problem.limits.survival.lost:
        return plan
    # All is served without them, and none is there to stand in one region more, or for one that is lost.
    return made(i for i in plan.instances if i.id not in unused)


def assemble(
    problem: Problem,
    instances: Iterable[Instance],
    *,
    status: Status,
    solver: str,
    bound: float | None = None,
    reasons: Sequence[str] = (),
    cut_short: bool = False,
    goal: Goal = "cost",
    value: float | None = None,
    catalog: Catalog | None = None,
    paths: Sequence[RequestPath] = (),
    served_by_paths: Mapping[str, float] | None = None,
) -> Plan:
    """Return a plan of ready instances: adds routes, served fractions, cost, objective and gap.

    Requests of any-to-any services go by `paths`; which share of them is served, `served_by_paths` says.

    The objective is the cost, or `value` in tokens/s with another `goal`. A bound a hair on the wrong side
    of the objective, as rounding leaves it, is moved to the objective. The status becomes "partial" where
    demand is not met, "feasible" where it is and the gap is too large for "optimal"; "infeasible" means an
    empty plan. The catalog is the problem's unless given.
    """
    standing = tuple(instances)
    routes, served = routes_of(problem, catalog, standing)
    # Nothing of these is served unless `served_by_paths` says so.
    graphs = {service.name: 0.0 for service in problem.graph_services}
    served |= graphs | dict(served_by_paths or {})
    usd = rent(problem, standing)
    fresh = sum(instance.usd_per_hour for instance in standing if not instance.kept)
    init = problem.settings.init_penalty * fresh
    reached = usd + init if goal == "cost" else value
    objective = None if status == "infeasible" else reached
    if objective is None:
        bound = None
    elif bound is not None:
        bound = min(bound, objective) if goal == "cost" else max(bound, objective)
    gap = relative_gap(objective, bound)
    if status == "optimal" and (gap is None or gap > PROVEN_GAP):
        status = "feasible"
    short = min(served.values()) < 1.0
    if short and status != "infeasible":
        status = "partial"
    elif status == "partial":
        status = "feasible"
    return Plan(
        problem_hash=problem.content_hash(),
        problem_name=problem.name,
        instances=standing,
        routes=routes,
        paths=tuple(paths),
        served_fraction=served,
        usd_per_hour=usd,
        init_usd=init,
        goal=goal,
        objective=objective,
        bound=bound,
        gap=gap,
        status=status,
        solver=solver,
        cut_short=cut_short,
        reasons=tuple(reasons),
        notes=problem.list_unpublished(standing),
        engines=problem.launches(),
    )


def infeasible(
    problem: Problem, *, solver: str, reasons: Sequence[str], cut_short: bool = False
) -> Plan:
    """Return the empty plan that says why there is none."""
    return assemble(
        problem, (), status="infeasible", solver=solver, reasons=reasons, cut_short=cut_short
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
        engine=choice.layout.engine,
    )
    bare = _with_room(problem, catalog, bare)
    return _with_flows(bare, node_capacities(problem, catalog, bare))


def _with_room(problem: Problem, catalog: Catalog, instance: Instance) -> Instance:
    """Return the instance with the slots of its engine, and the KV cache of its shares of GPUs."""
    slots = count_slots(problem, catalog, instance)
    # Where not one request has room its nodes carry nothing, and the validator says so.
    if slots != instance.slots:
        instance = instance.model_copy(update={"slots": slots or None})
    if all(node.gpu_shares == 1 for node in instance.nodes):
        return instance
    nodes = tuple(
        node.model_copy(update={"kv_bytes": share_kv_bytes(problem, catalog, instance, node)})
        for node in instance.nodes
    )
    return instance.model_copy(update={"nodes": nodes})


def keep(problem: Problem, catalog: Catalog, running: Instance) -> Instance:
    """Return a running instance as this problem sees it: same nodes and layers, today's price.

    Its throughput is worked out again, since promise and lengths may have changed. Flows of a placement
    that is no stage layout are scaled down until every node can carry its own.
    """
    capacities = node_capacities(problem, catalog, running)
    usd = price(problem, running.region, running.nodes)
    # What was simulated of it was under the promises and lengths of then.
    priced = running.model_copy(update={"usd_per_hour": usd, "kept": True, "simulated": None})
    priced = _with_room(problem, catalog, priced)
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
    service, run = problem.service(instance.service), problem.run_by(instance.engine)
    spec = catalog.model(service.model).llm
    return {
        node.id: node_capacity(
            run,
            catalog,
            service,
            instance.role_id,
            node.kind,
            node.layers,
            instance.stages,
            position_of(spec, node.start, node.end),
            tp=node.tp,
            region=instance.region,
            machine=node.node_type,
        )
        for node in instance.nodes
    }


def is_stage_layout(instance: Instance) -> bool:
    """Return whether the instance is stages one after the other, each feeding the next."""
    stages = instance.layout()
    meets = all(a.end == b.start for a, b in pairwise(stages))
    return not instance.partial and meets and stages[0].start == 0


def _nodes(problem: Problem, catalog: Catalog, choice: NewInstance) -> tuple[Node, ...]:
    """Number the nodes and give each a machine type and a market: one's own first, spot last.

    Slices have their number of GPUs here; which GPUs of which machine is for `packing` to say.
    """
    service, run = problem.service_of(choice.role), problem.run_by(choice.layout.engine)
    spec = catalog.model(service.model).llm
    stages = len(choice.layout.stages)
    kinds = [(s.start, s.end, kind) for s in choice.layout.stages for kind in s.nodes]
    left = Counter(choice.rented or _only_sources(problem, choice))
    order = sorted(left, key=lambda source: (_MARKET_ORDER.index(source[2]), source[1], source[0]))
    slots = {source: list(some) for source, some in choice.slots.items()}
    nodes: list[Node] = []
    for index, (start, end, kind) in enumerate(kinds):
        source = next((s for s in order if s[0] == kind and left[s] > 0), None)
        if source is None:
            raise InternalError(f"{choice.role} in {choice.region}: no {kind} left to take")
        left[source] -= 1
        _, node_type, market = source
        part, machine = parse_node_type(kind), parse_node_type(node_type)
        if part.gpu != machine.gpu or part.gpu_count > machine.gpu_count:
            raise InternalError(
                f"{choice.role} in {choice.region}: {kind} is no part of {node_type}"
            )
        whole = part.gpu_count == machine.gpu_count
        nodes.append(
            Node(
                id=f"n{index}",
                node_type=node_type,
                market=market,
                start=start,
                end=end,
                tp=(part.gpu_count if choice.layout.tp == "all" else choice.layout.tp)
                or best_tp(
                    run,
                    catalog,
                    service,
                    choice.role,
                    kind,
                    end - start,
                    stages,
                    position_of(spec, start, end),
                    region=choice.region,
                    machine=node_type,
                ),
                gpu_ids=None if whole else tuple(range(part.gpu_count)),
                slot=slots[source].pop(0) if not whole and slots.get(source) else None,
            )
        )
    # What is rented and what is laid out must agree in both directions.
    if left.total() != 0:
        raise InternalError(f"{choice.role} in {choice.region}: more nodes rented than laid out")
    return tuple(nodes)


def _only_sources(problem: Problem, choice: NewInstance) -> dict[Source, int]:
    counts = Counter(kind for stage in choice.layout.stages for kind in stage.nodes)
    rented: dict[Source, int] = {}
    for kind, count in sorted(counts.items()):
        offers = [o for o in problem.offers if o.region == choice.region and kind in o.kinds]
        if len(offers) != 1:
            raise InternalError(f"{kind} in {choice.region}: from {len(offers)} offers, say which")
        rented[kind, offers[0].node_type, offers[0].market] = count
    return rented


def price(problem: Problem, region: str, nodes: Sequence[Node]) -> float:
    """Return what the nodes of an instance in a region cost per hour; a slice costs its share."""
    return sum(
        find_offer(problem, (node.region or region, node.node_type, node.market)).usd_per_hour
        * node.share
        for node in nodes
    )


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


def _next_id(role: str, taken: set[str]) -> str:
    role_id = parse_role(role)
    number = 0
    while f"{role_id.model}-{role_id.phase}-{number}" in taken:
        number += 1
    return f"{role_id.model}-{role_id.phase}-{number}"


def _shape(layout: LayoutLike) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
    return tuple((stage.start, stage.end, tuple(stage.nodes)) for stage in layout.stages)


def _split(rented: Mapping[Source, int] | None) -> tuple[tuple[Source, int], ...]:
    return tuple(sorted((rented or {}).items()))
