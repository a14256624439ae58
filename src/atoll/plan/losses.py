"""Losses of a plan: which units may go, and what is left without them.

A unit is a machine with all that stands on it (every slice, whichever service has it), a zone or a region. A
place on offer (`region` of an offer) is a zone; what comes before its last "/" is its region, and a place
without one is a region of one zone. An instance goes with any of its nodes. What is left is then routed
anew: a service is served by its instances that do both phases, and by as much prefill as can hand its KV over
to decode that is left.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.core.ids import Phase
from atoll.plan.handover import handover
from atoll.plan.plan import Instance, Market, Node, Plan
from atoll.plan.survival import Survival, Unit
from atoll.plan.validate.violation import TOLERANCE

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.problem import Problem, Service

_MIN_FLOW = 1e-12
"""Requests/s below which a way is full."""


def region_of(place: str) -> str:
    """Return the region of a place on offer: what comes before its last "/"."""
    return place.rpartition("/")[0] or place


@dataclass(frozen=True)
class Loss:
    """Units that are lost at once: how they and their kinds are called, and which instances and nodes go."""

    unit: Unit
    units: tuple[str, ...]
    kinds: tuple[str, ...]
    instances: frozenset[str]
    nodes: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """What is lost, in words."""
        return " and ".join(self.units)

    @classmethod
    def of_all(cls, some: Sequence[Loss]) -> Loss:
        """Return the loss of several units of a sort at once."""
        return cls(
            some[0].unit,
            tuple(name for one in some for name in one.units),
            tuple(kind for one in some for kind in one.kinds),
            frozenset().union(*(one.instances for one in some)),
            tuple(node for one in some for node in one.nodes),
        )


def _machine(instance: Instance, node: Node) -> tuple[str, ...]:
    """Identity of the machine that a node is (a part of)."""
    if node.host is not None:
        return (node.host,)
    place, own = instance.region_of(node), f"{instance.id} {node.id}"
    if node.gpu_ids is None:
        return (place, node.node_type, node.market, own)
    return (place, node.node_type, node.market, "", str(node.slot))


def kind_of(unit: Unit, place: str, node_type: str = "", market: Market = "on-demand") -> str:
    """Return what units of a kind are called: machines of one offer, a zone, a region."""
    if unit != "machine":
        return f"{unit} {place if unit == 'zone' else region_of(place)}"
    return f"{node_type}{'' if market == 'on-demand' else f' ({market})'} in {place}"


def units_of(instances: Iterable[Instance], unit: Unit) -> list[Loss]:
    """Return all units of a sort that any of some instances stands on, each alone."""
    nodes: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    names: dict[tuple[str, ...], tuple[str, str]] = {}
    for instance in instances:
        for node in instance.nodes:
            place = instance.region_of(node)
            key = {
                "machine": _machine(instance, node),
                "zone": (place,),
                "region": (region_of(place),),
            }[unit]
            kind = kind_of(unit, place, node.node_type, node.market)
            cut = unit == "machine" and node.gpu_ids is not None
            nodes.setdefault(key, []).append((instance.id, node.id))
            names.setdefault(key, (f"machine {node.slot}, {kind}" if cut else kind, kind))
    return [
        Loss(unit, (names[key][0],), (names[key][1],), frozenset(i for i, _ in held), tuple(held))
        for key, held in sorted(nodes.items())
    ]


def losses(instances: Sequence[Instance], survival: Survival) -> Iterator[Loss]:
    """Yield the losses that instances must survive; of those that are alike only one.

    Where they stand on fewer units than may be lost, all of them are lost.
    """
    weights = {instance.id: _weight(instance) for instance in instances}

    def likeness(one: Loss) -> Likeness:
        return tuple(sorted(weights[name] for name in one.instances))

    for unit, number in survival.lost.items():
        alike: dict[Likeness, list[Loss]] = {}
        seen: set[frozenset[str]] = set()
        for one in units_of(instances, unit):
            # Nodes of one instance each take all of it with them.
            if one.instances not in seen and one.kinds[0] not in survival.spared:
                seen.add(one.instances)
                alike.setdefault(likeness(one), []).append(one)
        few = [one for some in alike.values() for one in some[:number]]
        tried: set[tuple[Likeness, ...]] = set()
        for some in itertools.combinations(few, min(number, len(few))):
            if not some:
                continue
            key = tuple(sorted(map(likeness, some)))
            if key in tried:
                continue
            tried.add(key)
            yield Loss.of_all(some)


def list_losses(instances: Sequence[Instance], survival: Survival) -> Iterator[Loss]:
    """Yield every loss that instances must survive, and those of fewer units, single ones first."""
    seen: set[frozenset[str]] = set()
    for number in range(1, max(survival.lost.values(), default=0) + 1):
        for unit, most in survival.lost.items():
            units = [u for u in units_of(instances, unit) if u.kinds[0] not in survival.spared]
            for some in itertools.combinations(units, number if number <= most else 0):
                loss = Loss.of_all(some) if some else None
                if loss is not None and loss.instances not in seen:
                    seen.add(loss.instances)
                    yield loss


Likeness = tuple[tuple[str, str, float], ...]
"""What goes with a unit: units that are equal in this are alike."""


def _weight(instance: Instance) -> tuple[str, str, float]:
    """What goes with an instance."""
    return (instance.role, instance.region, round(instance.throughput_per_s, 9))


def left_shares(
    plan: Plan, problem: Problem, catalog: Catalog, lost: Collection[str]
) -> dict[str, float]:
    """Return by service the share of its demand that its instances can serve without those that are lost."""
    left: dict[str, list[Instance]] = defaultdict(list)
    for instance in plan.instances:
        if instance.id not in lost:
            left[instance.service].append(instance)
    return {
        service.name: _served(problem, catalog, service, left[service.name])
        for service in problem.plain_services
    }


def _served(
    problem: Problem, catalog: Catalog, service: Service, instances: list[Instance]
) -> float:
    """Return the share of a service's demand that instances can serve, at most 1."""
    demand = service.demand_per_s
    if demand <= 0.0:
        return 1.0
    per_request = {
        Phase.PREFILL: service.lengths.input_mean,
        Phase.DECODE: service.lengths.output_mean,
        Phase.BOTH: 1.0,
    }
    carried: dict[Phase, defaultdict[str, float]] = {p: defaultdict(float) for p in per_request}
    for instance in instances:
        if instance.role_id in service.roles:
            rate = instance.throughput_per_s / per_request[instance.phase]
            carried[instance.phase][instance.region] += rate
    prefill, decode = carried[Phase.PREFILL], carried[Phase.DECODE]
    paired = 0.0
    if prefill and decode:
        moved = handover(problem, catalog, service)
        room = {
            (a, b): float("inf")
            if a == b
            else catalog.links.between(a, b).bandwidth_bytes_per_s / moved.bytes_per_request
            for a in prefill
            for b in decode
            if moved is not None and moved.reaches(a, b)
        }
        paired = _max_flow(dict(prefill), dict(decode), room)
    return min(1.0, (sum(carried[Phase.BOTH].values()) + paired) / demand)


def _max_flow(
    senders: Mapping[str, float],
    receivers: Mapping[str, float],
    room: Mapping[tuple[str, str], float],
) -> float:
    """Return the most that senders can pass to receivers over ways with so much room, by augmenting paths."""
    spare: dict[tuple[str, str], float] = defaultdict(float)
    for name, rate in senders.items():
        spare["source", f"from {name}"] = rate
    for name, rate in receivers.items():
        spare[f"to {name}", "sink"] = rate
    for (a, b), rate in room.items():
        spare[f"from {a}", f"to {b}"] = rate
    near: dict[str, set[str]] = defaultdict(set)
    for a, b in list(spare):
        near[a].add(b)
        near[b].add(a)
    total = 0.0
    while True:
        before: dict[str, str] = {"source": ""}
        waiting = ["source"]
        # Shortest first, so that it ends after a few ways.
        for at in waiting:
            for to in sorted(near[at]):
                if to not in before and spare[at, to] > _MIN_FLOW:
                    before[to] = at
                    waiting.append(to)
        if "sink" not in before:
            return total
        way, at = [], "sink"
        while before[at]:
            way.append((before[at], at))
            at = before[at]
        flow = min(spare[step] for step in way)
        for a, b in way:
            spare[a, b] -= flow
            spare[b, a] += flow
        total += flow


@dataclass(frozen=True)
class Left:
    """What is left after a loss: by service the share of its demand that can be served."""

    loss: Loss
    shares: Mapping[str, float]


def list_left(plan: Plan, problem: Problem, catalog: Catalog) -> list[Left]:
    """Return what each loss leaves that the problem's plan must survive, of services that must be kept."""
    survival = problem.limits.survival
    return [
        Left(
            loss,
            {
                name: share
                for name, share in left_shares(plan, problem, catalog, loss.instances).items()
                if survival.covers(name)
            },
        )
        for loss in losses(plan.instances, survival)
    ]


def survives(plan: Plan, problem: Problem, catalog: Catalog) -> bool:
    """Return whether every loss leaves as much of what a plan serves as the problem asks for."""
    return not find_shortest(list_left(plan, problem, catalog), plan, problem)


def find_shortest(left: Iterable[Left], plan: Plan, problem: Problem) -> dict[str, Left]:
    """Return by service the loss that leaves least, of services that are left too little."""
    found: dict[str, Left] = {}
    for one in left:
        for name, share in one.shares.items():
            served = plan.served_fraction.get(name, 1.0)
            short = share < problem.limits.survival.keep * served - TOLERANCE
            if short and (name not in found or share < found[name].shares[name]):
                found[name] = one
    return found
