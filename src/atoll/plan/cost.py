"""Where the money of a plan goes: by service, phase, region, node type and market.

A cut machine is paid whole: instances pay their shares, and what no instance has of it is a line of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from atoll.core.frozen import Frozen
from atoll.core.ids import Phase
from atoll.plan.plan import Instance, OfferKey, Plan
from atoll.plan.problem import Problem, Service

_HOUR_S = 3600.0


def price_again(plan: Plan, problem: Problem) -> Plan | None:
    """Return a plan at the prices of another problem, without what was proven of it at its own.

    None where a machine of it is not on offer there.
    """
    instances = []
    for instance in plan.instances:
        usd = 0.0
        for node in instance.nodes:
            offer = problem.offer(instance.region_of(node), node.node_type, node.market)
            if offer is None:
                return None
            usd += offer.usd_per_hour * node.gpus / offer.gpus
        instances.append(instance.model_copy(update={"usd_per_hour": usd}))
    machines = sum(
        count * offer.usd_per_hour
        for key, count in plan.count_nodes().items()
        if (offer := problem.offer(*key)) is not None
    )
    fresh = sum(instance.usd_per_hour for instance in instances if not instance.kept)
    init = fresh * problem.settings.init_penalty
    return plan.model_copy(
        update={
            "instances": tuple(instances),
            "usd_per_hour": machines,
            "init_usd": init,
            "objective": machines + init if plan.goal == "cost" else plan.objective,
            "bound": None,
            "gap": None,
            "capacity_bound": None,
            "promises": (),
            "status": "feasible",
            "problem_hash": problem.content_hash(),
        }
    )


class CostLine(Frozen):
    """Cost of one part of a plan per hour, its share of the whole, its machines and GPUs in use."""

    name: str
    usd_per_hour: float
    share: float
    nodes: int
    gpus: int


class PhaseCost(Frozen):
    """One phase of a service. Tokens are prompt tokens, generated tokens, or both together.

    `share` is the share of the service's requests that pass through it: those that are served apart, or
    together. `tokens_per_s` is what those served ask for. `demand_per_s` is that share of all demand with
    its headroom, and `capacity_per_s` what the instances carry, both in units of the role; `utilisation` is
    the share of it that the requests served take. `nodes` are machines or slices of them.
    """

    phase: Phase
    share: float
    usd_per_hour: float
    nodes: int
    gpus: int
    tokens_per_s: float
    demand_per_s: float
    capacity_per_s: float
    utilisation: float | None
    usd_per_million_tokens: float | None


class ServiceCost(Frozen):
    """One service: what it costs per hour, per million tokens read and written, per request.

    `served` is the share of its demand, headroom included. Phases without instances are left out where
    another one has some.
    """

    service: str
    model: str
    usd_per_hour: float
    share: float
    served: float
    requests_per_s: float
    usd_per_million_tokens: float | None
    usd_per_thousand_requests: float | None
    phases: tuple[PhaseCost, ...]


class CostReport(Frozen):
    """The cost of a plan, broken down.

    Regions, node types and markets each add up to `usd_per_hour`; services do with `idle`, the GPUs of cut
    machines that no instance has.
    """

    usd_per_hour: float
    init_usd: float
    nodes: int
    gpus: int
    usd_per_million_tokens: float | None
    services: tuple[ServiceCost, ...]
    idle: CostLine
    regions: tuple[CostLine, ...]
    node_types: tuple[CostLine, ...]
    markets: tuple[CostLine, ...]


def cost_report(plan: Plan, problem: Problem) -> CostReport:
    """Return where the money of a plan goes. Rates are those that arrive, without headroom."""
    services = tuple(_service(plan, service) for service in problem.services)
    tokens = sum(
        cost.requests_per_s * _tokens(service)
        for cost, service in zip(services, problem.services, strict=True)
    )
    machines = plan.count_nodes()
    used = _gpus_in_use(plan)
    return CostReport(
        usd_per_hour=plan.usd_per_hour,
        init_usd=plan.init_usd,
        nodes=plan.nodes,
        gpus=plan.gpus,
        usd_per_million_tokens=_per(plan.usd_per_hour, tokens, 1e6),
        services=services,
        idle=CostLine(
            name="idle GPUs",
            usd_per_hour=plan.idle_usd,
            share=_share(plan.idle_usd, plan.usd_per_hour),
            nodes=0,
            gpus=plan.idle_gpus,
        ),
        regions=_lines(plan, problem, machines, used, lambda key: key[0]),
        node_types=_lines(plan, problem, machines, used, lambda key: key[1]),
        markets=_lines(plan, problem, machines, used, lambda key: key[2]),
    )


def idle_by_region(plan: Plan, problem: Problem) -> dict[str, float]:
    """Return what is paid per hour for GPUs that no instance has, by region; regions without are left out."""
    report = cost_report(plan, problem)
    usd = {line.name: line.usd_per_hour for line in report.regions}
    for instance in plan.instances:
        for node in instance.nodes:
            region = instance.region_of(node)
            offer = problem.offer(region, node.node_type, node.market)
            if offer is not None:
                usd[region] -= offer.usd_per_hour * node.share
    # Sums of shares are rounded: what is left of nothing is not idle.
    return {region: idle for region, idle in sorted(usd.items()) if idle > 1e-9 * plan.usd_per_hour}


def _service(plan: Plan, service: Service) -> ServiceCost:
    served = plan.served_fraction.get(service.name, 1.0)
    # A fraction is one of the demand with its headroom; the headroom is the first to go.
    rate = service.rate_per_s * min(1.0, served * service.headroom)
    standing = [role for role in service.roles if plan.of_role(role)]
    phases = tuple(
        _phase(plan, service, role.phase, plan.of_role(role), rate)
        for role in standing or service.roles
    )
    if not phases:  # any-to-any models have no roles of an llm
        phases = (_executors(plan, service, rate),)
    usd = sum(phase.usd_per_hour for phase in phases)
    return ServiceCost(
        service=service.name,
        model=service.model,
        usd_per_hour=usd,
        share=_share(usd, plan.usd_per_hour),
        served=served,
        requests_per_s=rate,
        usd_per_million_tokens=_per(usd, rate * _tokens(service), 1e6),
        usd_per_thousand_requests=_per(usd, rate, 1e3),
        phases=phases,
    )


def _phase(
    plan: Plan, service: Service, phase: Phase, instances: Sequence[Instance], rate: float
) -> PhaseCost:
    lengths = service.lengths
    tokens = {Phase.PREFILL: lengths.input_mean, Phase.DECODE: lengths.output_mean}
    routed = any(route.service == service.name for route in plan.routes)
    share = sum(plan.weights(service.name, phase).values()) if routed else 1.0
    per_request = tokens.get(phase, _tokens(service))
    usd = sum(instance.usd_per_hour for instance in instances)
    supply = sum(instance.throughput_per_s for instance in instances)
    units = share * tokens.get(phase, 1.0)
    return PhaseCost(
        phase=phase,
        share=share,
        usd_per_hour=usd,
        nodes=sum(len(instance.nodes) for instance in instances),
        gpus=sum(instance.gpus for instance in instances),
        tokens_per_s=rate * share * per_request,
        demand_per_s=units * service.demand_per_s,
        capacity_per_s=supply,
        utilisation=units * rate / supply if supply > 0 else None,
        usd_per_million_tokens=_per(usd, rate * share * per_request, 1e6),
    )


def _executors(plan: Plan, service: Service, rate: float) -> PhaseCost:
    """Return the cost of a service's executors; how busy each is, only the performance model can say.

    Of those that it shares it has the share that its requests are of all that pass them.
    """
    own = [i for i in plan.executor_instances if service.name in i.services]
    usd = sum(instance.usd_per_hour * instance.part_of(service.name) for instance in own)
    served = plan.served_fraction.get(service.name, 1.0)
    return PhaseCost(
        phase=Phase.SERVE,
        share=1.0,
        usd_per_hour=usd,
        nodes=len(own),
        gpus=sum(instance.gpus for instance in own),
        tokens_per_s=rate * _tokens(service),
        demand_per_s=service.demand_per_s,
        capacity_per_s=service.demand_per_s * served,
        utilisation=None,
        usd_per_million_tokens=_per(usd, rate * _tokens(service), 1e6),
    )


def _tokens(service: Service) -> float:
    return service.lengths.input_mean + service.lengths.output_mean


def _gpus_in_use(plan: Plan) -> Counter[OfferKey]:
    """GPUs that instances have, by region, node type and market."""
    used: Counter[OfferKey] = Counter()
    for instance in plan.instances:
        for node in instance.nodes:
            used[instance.region_of(node), node.node_type, node.market] += node.gpus
    return used


def _lines(
    plan: Plan,
    problem: Problem,
    machines: Mapping[OfferKey, int],
    used: Mapping[OfferKey, int],
    name: Callable[[OfferKey], str],
) -> tuple[CostLine, ...]:
    """Add up machines by a name; the dearest come first."""
    usd: dict[str, float] = {}
    nodes: Counter[str] = Counter()
    gpus: Counter[str] = Counter()
    for key, count in sorted(machines.items()):
        offer = problem.offer(*key)
        line = name(key)
        usd[line] = usd.get(line, 0.0) + (0.0 if offer is None else count * offer.usd_per_hour)
        nodes[line] += count
        gpus[line] += used[key]
    return tuple(
        CostLine(
            name=line,
            usd_per_hour=usd[line],
            share=_share(usd[line], plan.usd_per_hour),
            nodes=nodes[line],
            gpus=gpus[line],
        )
        for line in sorted(usd, key=lambda line: (-usd[line], line))
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _per(usd_per_hour: float, per_s: float, units: float) -> float | None:
    return usd_per_hour / (per_s * _HOUR_S) * units if per_s > 0 else None
