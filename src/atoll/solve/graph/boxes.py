"""Executors in machines, and one machine's part of the program with topology.

What one executor hands to another in the same machine is free. What leaves a machine or comes into it takes
its NIC. For every edge (part, next part) with bytes, k[e, e'] is what e hands to e' inside; the rest goes
over the NICs at both ends:

    sum_{e'} k[e, e'] <= z[part, e]            sum_e k[e, e'] <= z[next, e']
    sum over edges of bytes (z[part] - sum k)  <= NIC         out, and in likewise with z[next]

Machines with the same executors are alike, so one block has the flows of all N of them, divided evenly. Under
a chain only pairs that keep its budget are coupled inside; what is left over must find partners outside by
the nested rows. Couplings of single edges make one of whole paths where edges and chains of a route form no
circle; where they do, traffic is what each edge could have at best.

Where a NIC has no limit its traffic is not counted. In a machine whose GPUs are joined in groups, all k
between unlike executors that do not fit into one group take the link between two, as if all went over one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.core.ids import parse_node_type
from atoll.plan.plan import OfferKey
from atoll.solve.graph.graph_types import ClassDemand, GraphAnswer, GraphProgram, Machines

_SAME_S = 1e-9

RouteKey = tuple[int, int, str]
"""Class, route and region."""
InsideKey = tuple[str, str, int, tuple[str, int], tuple[str, int]]
"""Service, class, route, and (part, executor type) that hands over and that takes."""


@dataclass(frozen=True, slots=True)
class LaidMachine:
    """One machine: its offer, executors (type, kind of slice, how many), and traffic in and out (bytes/s).

    `flows` has requests/s by (service, class, route, part, executor type) for which its executors run a part,
    `inside` those of which one executor hands a part's result to another, or to itself.
    """

    offer: OfferKey
    slot: int
    executors: tuple[tuple[int, str, int], ...]
    bytes_in_per_s: float = 0.0
    bytes_out_per_s: float = 0.0
    flows: tuple[tuple[tuple[str, str, int, str, int], float], ...] = ()
    inside: tuple[tuple[InsideKey, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Pattern:
    """Machines with the same executors: the offer, by index, and (type, how many) in one of them."""

    offer: int
    executors: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ZFlow:
    """Requests of a class on a route for which an executor type in a block runs a part; shares of demand."""

    route: RouteKey
    part: str
    executor: int
    load: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class KFlow:
    """Requests that two executor types in a block hand over inside, by the two flows they are part of."""

    first: int
    second: int
    edge: tuple[str, str]


@dataclass
class MachineBlock:
    """Flows of machines with given executor types: z, k, and what a unit of them takes of the NIC."""

    z: list[ZFlow] = field(default_factory=list)
    k: list[KFlow] = field(default_factory=list)
    out: dict[tuple[str, int], float] = field(default_factory=dict)
    into: dict[tuple[str, int], float] = field(default_factory=dict)
    """By ("z" or "k", index): shares of the NIC."""
    inner: dict[int, float] = field(default_factory=dict)
    """By index of k: shares of the link between groups of GPUs."""

    def add_traffic(self, which: str, index: int, out: float, into: float) -> None:
        """Count what one unit of a flow sends and receives."""
        self.out[which, index] = self.out.get((which, index), 0.0) + out
        self.into[which, index] = self.into.get((which, index), 0.0) + into


def make_block(
    program: GraphProgram,
    routes: Mapping[RouteKey, object],
    machine: Machines,
    types: list[int],
    scale: float,
) -> MachineBlock:
    """Return the flows of machines of an offer with executors of these types, at `scale` times the demand."""
    block = MachineBlock()
    for route in routes:
        t, w, region = route
        if region != machine.region:
            continue
        klass = program.classes[t]
        rate = klass.rate_per_s * scale
        mine: dict[str, list[int]] = {part: [] for part in klass.routes[w]}
        for part, flows in mine.items():
            places = klass.places.get(part)
            for e in types:
                executor = program.executors[e]
                here = (region, machine.key[1], executor.uses[0][0])
                if places is not None and here not in places:
                    continue
                seconds = executor.seconds.get((*klass.key, part))
                if seconds is not None:
                    late = float(executor.latency_s.get((*klass.key, part), 0.0))
                    flows.append(len(block.z))
                    block.z.append(ZFlow(route, part, e, max(1e-6, seconds * rate), late))
        if min(machine.nic_bytes_per_s, machine.inner_bytes_per_s) < float("inf"):
            _add_edges(block, klass, mine, rate, machine, program)
    return block


def _add_edges(
    block: MachineBlock,
    klass: ClassDemand,
    mine: dict[str, list[int]],
    rate: float,
    machine: Machines,
    program: GraphProgram,
) -> None:
    """Add what one route's flows take of the NIC at `rate` requests/s, and what is handed over inside."""
    load, inner = rate / machine.nic_bytes_per_s, rate / machine.inner_bytes_per_s
    bounds = {
        frozenset((c.first, c.second)): c.budget_s if c.inside_s is None else c.inside_s
        for c in klass.chains
        if c.first in mine and c.second in mine
    }
    for (part, after), size in klass.bytes_between.items():
        if part not in mine or after not in mine or size <= 0.0:
            continue
        for i in mine[part]:
            block.add_traffic("z", i, size * load, 0.0)
        for i in mine[after]:
            block.add_traffic("z", i, 0.0, size * load)
        budget = bounds.get(frozenset((part, after)), float("inf")) + _SAME_S
        for i, j in itertools.product(mine[part], mine[after]):
            ends = {block.z[i].executor, block.z[j].executor}
            gpus = sum(_gpus_of(program, e) for e in ends)
            # An executor hands nothing to itself.
            apart = len(ends) > 1 and gpus > machine.group_gpus
            took = machine.inner_s + size / machine.inner_bytes_per_s if apart else 0.0
            if block.z[i].latency_s + took + block.z[j].latency_s <= budget:
                block.add_traffic("k", len(block.k), -size * load, -size * load)
                if apart:
                    block.inner[len(block.k)] = size * inner
                block.k.append(KFlow(i, j, (part, after)))


def _gpus_of(program: GraphProgram, e: int) -> int:
    """GPUs of an executor type."""
    return sum(parse_node_type(kind).gpu_count * n for kind, n in program.executors[e].uses)


def pack_boxes(program: GraphProgram, answer: GraphAnswer) -> tuple[LaidMachine, ...]:
    """Lay the executors of an answer into machines, those that talk to each other into the same.

    By falling size, so that every machine with room has room for a whole slice: sizes divide each other.
    """
    talk = _talk(program, answer)
    slices: dict[OfferKey, list[tuple[int, int, str]]] = {}
    for placed in answer.placed:
        for key, kind, count in placed.slices:
            size = int(kind.rsplit(":", 1)[1])
            slices.setdefault(key, []).extend([(-size, placed.executor, kind)] * count)
    boxes = []
    for offer in program.machines:
        number = answer.machines.get(offer.key, 0)
        free = [offer.gpus] * number
        inside: list[Counter[tuple[int, str]]] = [Counter() for _ in range(number)]
        for size, e, kind in sorted(slices.get(offer.key, [])):
            room = [i for i in range(number) if free[i] >= -size]
            best = max(room, key=lambda i: (_pull(talk, inside[i], e), -i))
            free[best] += size
            inside[best][e, kind] += 1
        boxes += [
            LaidMachine(
                offer.key, slot, tuple((e, kind, n) for (e, kind), n in sorted(each.items()))
            )
            for slot, each in enumerate(inside)
        ]
    return tuple(boxes)


def _talk(program: GraphProgram, answer: GraphAnswer) -> dict[tuple[int, int], float]:
    """Return bytes/s between executor types if requests were spread evenly."""
    classes = {klass.key: klass for klass in program.classes}
    flows: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for flow in answer.flows:
        at = (flow.service, flow.klass, flow.part)
        flows.setdefault(at, []).append((flow.executor, flow.rate_per_s))
    talk: dict[tuple[int, int], float] = {}
    for key, klass in classes.items():
        for (part, after), size in klass.bytes_between.items():
            receivers = flows.get((*key, after), [])
            total = sum(rate for _, rate in receivers)
            for e, rate in flows.get((*key, part), []):
                for other, more in receivers:
                    amount = size * rate * more / total
                    talk[e, other] = talk.get((e, other), 0.0) + amount
                    talk[other, e] = talk.get((other, e), 0.0) + amount
    return talk


def _pull(
    talk: dict[tuple[int, int], float], inside: Counter[tuple[int, str]], e: int
) -> tuple[float, int]:
    """Return how much a machine attracts an executor: partners there, few of its own type, fill."""
    partners = sum(talk.get((e, other), 0.0) * n for (other, _), n in inside.items())
    own = sum(n for (other, _), n in inside.items() if other == e)
    return (partners / (1 + own), -own)
