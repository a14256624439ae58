"""Where the money of a plan goes: by service, phase, region, node type and market."""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.frozen import Frozen
from atoll.core.ids import Phase
from atoll.plan.plan import Instance, Node, Plan
from atoll.plan.problem import Problem, Service

_HOUR_S = 3600.0


class CostLine(Frozen):
    """What one part of a plan costs per hour, and its share of the whole."""

    name: str
    usd_per_hour: float
    share: float
    nodes: int
    gpus: int


class PhaseCost(Frozen):
    """One phase of a service. Tokens are prompt tokens, generated tokens, or both together.

    `tokens_per_s` is what the demand asks for, as far as it is served; `utilisation` is the share of the
    instances' throughput that it takes.
    """

    phase: Phase
    usd_per_hour: float
    nodes: int
    gpus: int
    tokens_per_s: float
    utilisation: float | None
    usd_per_million_tokens: float | None


class ServiceCost(Frozen):
    """One service: what it costs per hour, per million tokens read and written, per request."""

    service: str
    model: str
    usd_per_hour: float
    share: float
    requests_per_s: float
    usd_per_million_tokens: float | None
    usd_per_thousand_requests: float | None
    phases: tuple[PhaseCost, ...]


class CostReport(Frozen):
    """The cost of a plan, broken down; every breakdown adds up to `usd_per_hour`."""

    usd_per_hour: float
    init_usd: float
    nodes: int
    gpus: int
    usd_per_million_tokens: float | None
    services: tuple[ServiceCost, ...]
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
    return CostReport(
        usd_per_hour=plan.usd_per_hour,
        init_usd=plan.init_usd,
        nodes=plan.nodes,
        gpus=plan.gpus,
        usd_per_million_tokens=_per(plan.usd_per_hour, tokens, 1e6),
        services=services,
        regions=_lines(plan, problem, lambda instance, node: instance.region_of(node)),
        node_types=_lines(plan, problem, lambda _, node: node.node_type),
        markets=_lines(plan, problem, lambda _, node: node.market),
    )


def _service(plan: Plan, service: Service) -> ServiceCost:
    served = [plan.served_fraction.get(str(role), 1.0) for role in service.roles]
    # A fraction is one of the demand with its headroom; the headroom is the first to go.
    rate = service.rate_per_s * min(1.0, min(served) * service.headroom)
    phases = tuple(_phase(plan, service, role.phase, str(role), rate) for role in service.roles)
    usd = sum(phase.usd_per_hour for phase in phases)
    return ServiceCost(
        service=service.name,
        model=service.model,
        usd_per_hour=usd,
        share=_share(usd, plan.usd_per_hour),
        requests_per_s=rate,
        usd_per_million_tokens=_per(usd, rate * _tokens(service), 1e6),
        usd_per_thousand_requests=_per(usd, rate, 1e3),
        phases=phases,
    )


def _phase(plan: Plan, service: Service, phase: Phase, role: str, rate: float) -> PhaseCost:
    instances = plan.of_role(role)
    lengths = service.lengths
    tokens = {Phase.PREFILL: lengths.input_mean, Phase.DECODE: lengths.output_mean}
    per_request = tokens.get(phase, _tokens(service))
    usd = sum(instance.usd_per_hour for instance in instances)
    supply = sum(instance.throughput_per_s for instance in instances)
    units = rate * tokens.get(phase, 1.0)
    return PhaseCost(
        phase=phase,
        usd_per_hour=usd,
        nodes=sum(len(instance.nodes) for instance in instances),
        gpus=sum(instance.gpus for instance in instances),
        tokens_per_s=rate * per_request,
        utilisation=units / supply if supply > 0 else None,
        usd_per_million_tokens=_per(usd, rate * per_request, 1e6),
    )


def _tokens(service: Service) -> float:
    return service.lengths.input_mean + service.lengths.output_mean


def _lines(
    plan: Plan, problem: Problem, name: Callable[[Instance, Node], str]
) -> tuple[CostLine, ...]:
    """Add up nodes by a name; the dearest come first."""
    usd: dict[str, float] = {}
    nodes: dict[str, list[Node]] = {}
    for instance in plan.instances:
        for node in instance.nodes:
            offer = problem.offer(instance.region_of(node), node.node_type, node.market)
            key = name(instance, node)
            usd[key] = usd.get(key, 0.0) + (0.0 if offer is None else offer.usd_per_hour)
            nodes.setdefault(key, []).append(node)
    return tuple(
        CostLine(
            name=key,
            usd_per_hour=usd[key],
            share=_share(usd[key], plan.usd_per_hour),
            nodes=len(nodes[key]),
            gpus=sum(node.gpus for node in nodes[key]),
        )
        for key in sorted(usd, key=lambda key: (-usd[key], key))
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _per(usd_per_hour: float, per_s: float, units: float) -> float | None:
    return usd_per_hour / (per_s * _HOUR_S) * units if per_s > 0 else None
