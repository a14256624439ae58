"""Power of a plan at its planned load: watts by instance and machine, joules per token, kg CO2 per hour.

GPUs of all machines in use draw what they draw waiting, also those of cut machines that no instance has.
Instances add what their steps take beside that (`perf.energy`), at the batch that the requests they get
lead to (`perf.operating_point`): the rate that arrives, without headroom. Executors of any-to-any models draw
as much as their GPUs may for the share of time that they work (`executor_use`), which is on the high side
where they write text. Only GPUs are counted; `pue` of the grid is for what else a site draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from atoll.catalog.catalog import Catalog
from atoll.catalog.nodes import NodeType
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import UsageError
from atoll.core.ids import Phase, parse_node_type
from atoll.engines.table import EngineChoice
from atoll.perf.capacity import copy_node, copy_of
from atoll.perf.energy import dynamic_joules, min_dynamic_joules, power_model
from atoll.perf.layers import node_splits, tp_sizes
from atoll.perf.operating_point import OperatingPoint, operating_point
from atoll.perf.step import AnalyticStepModel, Position, analytic
from atoll.plan.capacities import node_capacity, node_source
from atoll.plan.executor_use import executor_use
from atoll.plan.footprint import ObjectiveWeights, PowerGrid, PowerUse
from atoll.plan.plan import Instance, Node, OfferKey, Plan
from atoll.plan.problem import Offer, Problem, Service
from atoll.workload.lengths import LengthMix

_KILO = 1e3
_GRAMS_PER_TONNE = 1e6
_HALF = 0.5
"""Of what lies between waiting and the limit: a guess where no service fits on a machine alone."""


@dataclass(frozen=True)
class InstanceDraw:
    """Watts of an instance: its GPUs waiting, and what its steps add; how busy its busiest node is."""

    service: str
    requests_per_s: float
    idle_w: float
    dynamic_w: float
    busy: float

    @property
    def watts(self) -> float:
        """All of it."""
        return self.idle_w + self.dynamic_w


@dataclass(frozen=True)
class PlanDraw:
    """Watts of a plan's GPUs without `pue`: by instance, and by machines of an offer with idle GPUs."""

    instances: dict[str, InstanceDraw]
    machines: dict[OfferKey, float]
    counts: dict[OfferKey, int]

    @property
    def watts(self) -> float:
        """All of it."""
        return sum(self.machines.values())

    def region_watts(self) -> dict[str, float]:
        """Return watts by region, sorted."""
        found: dict[str, float] = {}
        for (region, _, _), watts in sorted(self.machines.items()):
            found[region] = found.get(region, 0.0) + watts
        return found


def power_of(plan: Plan, problem: Problem, catalog: Catalog | None = None) -> PowerUse:
    """Return what a plan draws, with the grid of its problem and its weights' value."""
    facts = problem.catalog() if catalog is None else catalog
    return power_use(plan, problem, draw_of(plan, problem, facts))


def power_use(plan: Plan, problem: Problem, draw: PlanDraw) -> PowerUse:
    """Return what a plan draws as the problem's grid and weights count it."""
    grid = problem.grid
    tokens: dict[str, float] = {}
    watts: dict[str, float] = {}
    lengths = {service.name: service.lengths for service in problem.services}
    seen: set[tuple[str, Phase]] = set()
    for instance in plan.instances:
        own = draw.instances[instance.id]
        watts[own.service] = watts.get(own.service, 0.0) + own.watts
        seen.add((own.service, instance.phase))
        # Every request is decoded once, wherever that is; executors run parts of requests.
        if instance.phase not in (Phase.PREFILL, Phase.SERVE):
            made = own.requests_per_s * lengths[own.service].output_mean
            tokens[own.service] = tokens.get(own.service, 0.0) + made
    weighted = None
    if not problem.weights.rent_only:
        weighted = weighted_usd(plan, problem.weights, grid, draw)
    figures: dict[str, Any] = {name: figure(grid, draw) for name, figure in FIGURES.items()}
    return PowerUse(
        joules_per_token={
            name: watts[name] * grid.pue / made for name, made in sorted(tokens.items()) if made > 0
        },
        weighted_usd_per_hour=weighted,
        **figures,
    )


def kg_per_hour(grid: PowerGrid, draw: PlanDraw) -> float | None:
    """Return kg CO2 per hour of what a plan draws, None where the grid of a region is not known."""
    total = 0.0
    for region, watts in draw.region_watts().items():
        grams = grid.intensity(region)
        # A sum without a region would look better than it is.
        if grams is None:
            return None
        total += watts / _KILO * grid.pue * grams / _KILO
    return total


FIGURES: Mapping[str, Callable[[PowerGrid, PlanDraw], float | None]] = {
    "watts": lambda grid, draw: draw.watts * grid.pue,
    "kg_per_hour": kg_per_hour,
}
"""What a plan draws, by the field of `PowerUse`."""


def usd_per_watt(weights: ObjectiveWeights, grid: PowerGrid, region: str) -> float:
    """Return what a watt that GPUs draw in a region counts per hour, in USD, `pue` included."""
    per_kwh = weights.usd_per_kwh
    if weights.usd_per_tonne > 0.0:
        grams = grid.intensity(region)
        if grams is None:
            raise UsageError(
                f"nobody said what electricity in {region} costs the climate",
                hint=f"add `grid: {{{region}: 400 g/kWh}}`, or a default there",
                field="grid",
            )
        per_kwh += weights.usd_per_tonne * grams / _GRAMS_PER_TONNE
    return per_kwh * grid.pue / _KILO


def weighted_usd(plan: Plan, weights: ObjectiveWeights, grid: PowerGrid, draw: PlanDraw) -> float:
    """Return the objective of a plan in USD per hour: rent and starts, energy and carbon, as weighed."""
    total = weights.usd * (plan.usd_per_hour + plan.init_usd)
    for region, watts in draw.region_watts().items():
        total += watts * usd_per_watt(weights, grid, region)
    return total


def draw_of(plan: Plan, problem: Problem, catalog: Catalog) -> PlanDraw:
    """Return what the GPUs of a plan draw, machine by machine; it may be of an unsettled problem."""
    problem = problem.settled(plan.mixes)
    rates = _request_rates(plan, problem)
    instances: dict[str, InstanceDraw] = {}
    executors = _executor_draws(plan, problem, catalog) if problem.graph_services else {}
    counts = dict(sorted(plan.count_nodes().items()))
    # Every GPU of a machine draws this, also those that nothing runs on.
    machines = {key: n * machine_idle_w(catalog, key[1]) for key, n in counts.items()}
    for instance in plan.instances:
        if instance.id in executors:
            (node,) = instance.nodes
            instances[instance.id] = own = executors[instance.id]
            machines[instance.region, node.node_type, node.market] += own.dynamic_w
            continue
        service = problem.service(instance.service)
        inflow = _inflow(instance)
        dynamic, busy = 0.0, 0.0
        for node in instance.nodes:
            rate = rates[instance.id] * inflow[node.id]
            watts, point = _node_draw(problem, catalog, service, instance, node, rate)
            dynamic += watts
            busy = max(busy, point.busy)
            machines[instance.region_of(node), node.node_type, node.market] += watts
        idle = sum(node.gpus * _idle_w(catalog, node.node_type) for node in instance.nodes)
        instances[instance.id] = InstanceDraw(service.name, rates[instance.id], idle, dynamic, busy)
    return PlanDraw(instances, machines, counts)


def _executor_draws(plan: Plan, problem: Problem, catalog: Catalog) -> dict[str, InstanceDraw]:
    """Return what executors draw, by id: up to their limit while they work."""
    found = {}
    for use in executor_use(plan, problem, catalog).executors:
        service = problem.service(use.service)
        kind = parse_node_type(use.kind)
        power = power_model(catalog.gpu(kind.gpu))
        # The headroom is planned for, and does not come.
        asked = service.rate_per_s / service.demand_per_s if service.demand_per_s else 0.0
        busy = min(1.0, (1.0 if use.busy is None else use.busy) * asked)
        each = busy * (power.limit_w - power.idle_w)
        found[use.id] = InstanceDraw(
            use.service,
            use.requests_per_s * asked,
            kind.gpu_count * power.idle_w,
            kind.gpu_count * each,
            busy,
        )
    return found


def machine_idle_w(catalog: Catalog, node_type: str) -> float:
    """Return what all GPUs of a machine draw while they wait, in watts."""
    return parse_node_type(node_type).gpu_count * _idle_w(catalog, node_type)


def _idle_w(catalog: Catalog, node_type: str) -> float:
    return power_model(catalog.gpu(parse_node_type(node_type).gpu)).idle_w


def _request_rates(plan: Plan, problem: Problem) -> dict[str, float]:
    """Requests/s that each instance gets of what arrives and is served."""
    rates: dict[str, float] = {}
    for service in problem.plain_services:
        served = plan.served_fraction.get(service.name, 1.0)
        # A fraction is one of the demand with its headroom; the headroom is the first to go.
        rate = service.rate_per_s * min(1.0, served * service.headroom)
        routed = any(route.service == service.name for route in plan.routes)
        for phase in (Phase.PREFILL, Phase.DECODE, Phase.BOTH):
            own = [i for i in plan.instances if i.service == service.name and i.phase is phase]
            shares = plan.weights(service.name, phase) if routed else _by_throughput(own)
            rates |= {one.id: rate * shares.get(one.id, 0.0) for one in own}
    return rates


def _by_throughput(instances: Iterable[Instance]) -> dict[str, float]:
    each = {one.id: one.throughput_per_s for one in instances}
    total = sum(each.values())
    return {name: rate / total if total > 0.0 else 0.0 for name, rate in each.items()}


def _inflow(instance: Instance) -> dict[str, float]:
    """The share of an instance's requests that passes each node."""
    into = dict.fromkeys((node.id for node in instance.nodes), 0.0)
    for flow in instance.flows:
        if flow.dst in into:
            into[flow.dst] += flow.per_s
    whole = instance.throughput_per_s
    return {name: rate / whole if whole > 0.0 else 0.0 for name, rate in into.items()}


def _node_draw(
    problem: Problem,
    catalog: Catalog,
    service: Service,
    instance: Instance,
    node: Node,
    requests_per_s: float,
) -> tuple[float, OperatingPoint]:
    """Watts that a node adds to waiting, and how each copy of its layers works."""
    # A node without GPU ids is a machine of its own.
    machine = None if node.gpu_ids is None else node.node_type
    source = node_source(catalog, node.kind, region=instance.region_of(node), machine=machine).node
    copies = max(1, node.gpus // node.tp)
    copy, engine = copy_of(source, node.tp, problem.engine_of(service))
    watts, point = _copy_draw(
        catalog.model(service.model).llm,
        copy,
        engine,
        instance.phase,
        service.lengths.mix(),
        node.start,
        node.end,
        requests_per_s / copies,
    )
    return watts * copies, point


@lru_cache(maxsize=4096)
def _copy_draw(
    spec: TransformerSpec,
    copy: NodeType,
    engine: EngineChoice,
    phase: Phase,
    lengths: LengthMix,
    start: int,
    end: int,
    requests_per_s: float,
) -> tuple[float, OperatingPoint]:
    model = _model_of(spec, copy, engine)
    point = operating_point(model, phase, lengths, start, end, requests_per_s)
    joules = sum(share * dynamic_joules(model, batch, start, end) for share, batch in point.steps)
    return point.steps_per_s * joules, point


@lru_cache(maxsize=1024)
def _model_of(spec: TransformerSpec, copy: NodeType, engine: EngineChoice) -> AnalyticStepModel:
    return analytic(spec, copy, tp=copy.count, engine=engine)


def guess_machine_w(problem: Problem, catalog: Catalog, offer: Offer) -> float:
    """Return what a machine on offer draws at capacity: the mean over services that fit on it alone.

    Where none does, it is half way from waiting to its limit.
    """
    power = power_model(catalog.gpu(parse_node_type(offer.node_type).gpu))
    found = []
    for service in problem.plain_services:
        mix = service.lengths.mix()
        spec = catalog.model(service.model).llm
        for role in service.roles:
            units = {Phase.PREFILL: mix.input_mean, Phase.DECODE: mix.output_mean}
            for gpus, kind in zip(offer.sizes, offer.kinds, strict=True):
                if not service.allows(kind):
                    continue
                rate = node_capacity(
                    problem, catalog, service, role, kind, spec.layers, 1, Position.WHOLE,
                    region=offer.region, machine=offer.node_type,
                )  # fmt: skip
                if rate <= 0.0:
                    continue
                copy = copy_node(catalog.node(kind), gpus)
                # The guess is for the whole slice as one copy: it must split so.
                if gpus not in tp_sizes(spec, gpus):
                    continue
                requests = rate / units.get(role.phase, 1.0)
                engine = problem.engine_of(service)
                drawn, _ = _copy_draw(spec, copy, engine, role.phase, mix, 0, spec.layers, requests)
                found.append(power.idle_w + drawn / gpus)
                break
    guess = power.idle_w + _HALF * (power.limit_w - power.idle_w)
    each = sum(found) / len(found) if found else guess
    return offer.gpus * min(each, power.limit_w)


def min_request_joules(problem: Problem, catalog: Catalog, service: Service) -> float:
    """Return what no plan goes below for a request of a service, in joules beside what GPUs draw waiting.

    Nothing is known of any-to-any services.
    """
    if service.is_graph:
        return 0.0
    spec = catalog.model(service.model).llm
    models = []
    rows = 1.0
    for kind in problem.kinds_for(service.name):
        node = catalog.node(kind)
        for tp in node_splits(spec, node):
            model = _model_of(spec, *copy_of(node, tp, problem.engine_of(service)))
            engine = model.engine
            # The largest step that any engine here could take: it bounds what a token costs from below.
            rows = max(rows, engine.max_tokens, engine.mixed_tokens, engine.max_sequences)
            models.append(model)
    if not models:
        return 0.0
    tokens = service.lengths.input_mean + service.lengths.output_mean
    return tokens * min_dynamic_joules(models, float(rows))
