"""Flows that keep a latency promise: no way in use is slower than the promise, however requests mix.

A plan says how much flows over each edge, and requests may follow any way along edges with flow. So the
promise is counted for the longest way, of S nodes, and for the slowest links on any way, W seconds: every
node then has (promise - W) / S for its step, and carries what `plan.cluster_capacities` says it can in
that time. That is how rented nodes are counted, too.

More hops allow more ways and leave each less time, so every S is tried. Where the largest flow at an S takes
longer ways, edges go one by one, the least used of the longest way first; slow links first lower what
nodes may carry, and go the same way where nothing is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.core.errors import UsageError
from atoll.perf.step import Position
from atoll.plan.cluster_capacities import Wires
from atoll.solve.array_types import Floats
from atoll.solve.place.evaluate import edges, max_flow
from atoll.solve.place.flow_instance import ClusterPromise, FlowInstance, Flows, Placement, part_of

MAX_STAGES = 16
"""Pipelines with more hops than this are not tried."""
_ROUNDS = 60
"""How many edges may go, for each number of hops."""
_TRICKLE = 1e-9
_FLOW_TOLERANCE = 1e-9
"""Relative difference of flows that counts as rounding."""

Edge = tuple[int, int]
"""Node numbers; -1 is the source as a start and the sink as an end."""
OUTSIDE = -1


@dataclass(frozen=True)
class Ways:
    """Of all ways along a flow: the most nodes on one, the most seconds on links, and their edges.

    `wires_s` are those of a prompt and of a token, each on the way where it takes longest.
    """

    hops: int
    wires_s: Wires
    longest: tuple[Edge, ...]
    slowest: tuple[Edge, ...]


def promise_of(instance: FlowInstance) -> ClusterPromise:
    """Return the promise of an instance that has one."""
    if instance.promise is None:
        raise UsageError("nothing is known about the times of these nodes")
    return instance.promise


def position(instance: FlowInstance, start: int, end: int) -> Position:
    """Return where layers [start, end) lie in the model."""
    if start == 0:
        return Position.WHOLE if end == instance.layers else Position.FIRST
    return Position.LAST if end == instance.layers else Position.MIDDLE


def rates_within(
    instance: FlowInstance, placement: Placement, stages: int, wires_s: Wires = (0.0, 0.0)
) -> Floats:
    """Return the tokens/s each node of a placement carries in a pipeline of so many stages."""
    promise = promise_of(instance)
    lengths = promise.service.lengths
    rates = np.zeros(instance.size)
    for i in np.flatnonzero(placement.end > placement.start):
        start, end = int(placement.start[i]), int(placement.end[i])
        row, _ = promise.nodes[i].rates(stages, position(instance, start, end), wires_s)
        rates[i] = row[end - start]
    return rates * (lengths.input_mean + lengths.output_mean)


def rate_table(instance: FlowInstance, stages: int) -> Floats:
    """Return tokens/s by node and number of layers that hold wherever these lie in the model."""
    promise = promise_of(instance)
    lengths = promise.service.lengths
    table = np.zeros_like(instance.rate)
    # The least over positions, so that the table holds wherever the layers lie in the model.
    where = (Position.WHOLE,) if stages == 1 else (Position.FIRST, Position.MIDDLE, Position.LAST)
    for i, node in enumerate(promise.nodes):
        rows = [node.rates(stages, at)[0] for at in where]
        held = np.arange(min(int(instance.max_layers[i]), instance.layers) + 1)
        table[i, held] = np.min(rows, axis=0)[held]
        # A node that holds all layers is a whole pipeline, also where others have more stages.
        if stages > 1 and held[-1] == instance.layers:
            table[i, instance.layers] = node.rates(stages, Position.WHOLE)[0][instance.layers]
    # With one stage a node that holds less than all layers is no pipeline.
    if stages == 1:
        table[:, : instance.layers] = 0.0
    return table * (lengths.input_mean + lengths.output_mean)


def max_within(instance: FlowInstance) -> FlowInstance:
    """Return the instance where nodes carry the most that any number of hops allows: what bounds hold for."""
    promise = promise_of(instance)
    lengths = promise.service.lengths
    table = np.zeros_like(instance.rate)
    for i, node in enumerate(promise.nodes):
        held = np.arange(min(int(instance.max_layers[i]), instance.layers) + 1)
        for stages in (1, 2):
            # Fewer stages leave more time, so two are the best for less than all layers.
            for at in Position if stages == 2 else (Position.WHOLE,):
                row = node.rates(stages, at)[0][held]
                if stages == 1:
                    row = np.where(held == instance.layers, row, 0.0)
                table[i, held] = np.maximum(table[i, held], row)
    return replace(instance, rate=table * (lengths.input_mean + lengths.output_mean))


def flow_within(instance: FlowInstance, placement: Placement) -> Flows:
    """Return a large flow whose every way keeps the promise; a flow of 0 if there is none.

    Where there are several regions, flows that stay inside them are tried as well.
    """
    best = _nothing(instance)
    variants = [instance]
    # Slow links between regions may cost more time than the flow over them brings.
    if len(set(instance.regions)) > 1:
        region = np.array(instance.regions)
        inside = np.where(region[:, None] == region[None, :], instance.link, 0.0)
        variants.append(replace(instance, link=inside))
    for variant in variants:
        for stages in _stage_counts(variant, placement):
            flows = _flow_of_stages(variant, placement, stages, best.value)
            if flows.value > best.value * (1 + _FLOW_TOLERANCE):
                best = flows
    return best


def flow_of_groups(
    instance: FlowInstance, placement: Placement, groups: Sequence[Sequence[int]]
) -> Flows:
    """Return the flow of a placement whose groups of nodes are pipelines of their own."""
    edge, enter, leave = (
        np.zeros((instance.size, instance.size)),
        np.zeros(instance.size),
        np.zeros(instance.size),
    )
    total = 0.0
    for group in groups:
        rows = np.array(sorted(group))
        part = flow_within(
            part_of(instance, rows), Placement(placement.start[rows], placement.end[rows])
        )
        edge[np.ix_(rows, rows)] = part.edge
        enter[rows], leave[rows] = part.enter, part.leave
        total += part.value
    return Flows(total, edge, enter, leave)


def _nothing(instance: FlowInstance) -> Flows:
    n = instance.size
    return Flows(0.0, np.zeros((n, n)), np.zeros(n), np.zeros(n))


def _stage_counts(instance: FlowInstance, placement: Placement) -> range:
    """Numbers of nodes on a way through a placement, from the fewest to the most."""
    tail, head = edges(instance, placement)
    before: dict[int, list[int]] = {}
    for a, b in zip(tail.tolist(), head.tolist(), strict=True):
        before.setdefault(b, []).append(a)
    fewest: dict[int, int] = {}
    most: dict[int, int] = {}
    ends: list[int] = []
    # Sorted by end, all nodes before a node on any way come before it.
    order = np.lexsort((placement.start, placement.end))
    for i in map(int, order):
        if placement.end[i] <= placement.start[i]:
            continue
        known = [k for k in before.get(i, ()) if k in fewest]
        if placement.start[i] == 0 and instance.enter[i] > 0:
            fewest[i] = most[i] = 1
        elif known:
            fewest[i] = 1 + min(fewest[k] for k in known)
        if known:
            most[i] = max(most.get(i, 0), 1 + max(most[k] for k in known))
        if i in fewest and placement.end[i] == instance.layers and instance.leave[i] > 0:
            ends.append(i)
    if not ends:
        return range(0)
    longest = min(MAX_STAGES, max(most[i] for i in ends))
    return range(min(fewest[i] for i in ends), longest + 1)


def _flow_of_stages(
    instance: FlowInstance, placement: Placement, stages: int, min_flow: float
) -> Flows:
    """Return a large flow over ways of at most `stages` nodes, one of 0 if it is not above `min_flow`."""
    held = placement.end - placement.start
    wires_s: Wires = (0.0, 0.0)
    remaining = instance
    everyone = np.arange(instance.size)
    for _ in range(_ROUNDS):
        rate = np.zeros_like(instance.rate)
        rate[everyone, held] = rates_within(instance, placement, stages, wires_s)
        rate[:, 0] = 0.0
        flows = max_flow(replace(remaining, rate=rate), placement)
        if flows.value > min_flow:
            ways = ways_of(remaining, placement, flows, stages)
            if ways.hops > stages:
                remaining = _remove_least(remaining, flows, ways.longest)
                continue
            # Waits on links never fall between rounds, so the loop cannot swing between two answers.
            slower = max(wires_s[0], ways.wires_s[0]), max(wires_s[1], ways.wires_s[1])
            if slower == wires_s:
                return flows
            if _leaves_time(promise_of(instance), slower):
                wires_s = slower
                continue
        if wires_s == (0.0, 0.0):
            break
        # The links of the slowest way leave too little: do without it.
        rate[everyone, held] = rates_within(instance, placement, stages)
        rate[:, 0] = 0.0
        flows = max_flow(replace(remaining, rate=rate), placement)
        if flows.value <= min_flow:
            break
        ways = ways_of(remaining, placement, flows, stages)
        remaining, wires_s = _remove_least(remaining, flows, ways.slowest), (0.0, 0.0)
    return _nothing(instance)


def _leaves_time(promise: ClusterPromise, wires_s: Wires) -> bool:
    return wires_s[0] < promise.service.ttft_s and wires_s[1] < promise.service.tpot_s


def ways_of(instance: FlowInstance, placement: Placement, flows: Flows, stages: int) -> Ways:
    """Return the longest way of a flow, and the slowest by its links, where `stages` share the promise."""
    service = promise_of(instance).service
    lengths = service.lengths
    per_request = lengths.input_mean + lengths.output_mean
    # Rounding leaves a trickle on edges that carry nothing; a way over one would not exist.
    min_flow = flows.value * _TRICKLE
    with np.errstate(divide="ignore", invalid="ignore"):
        # A capacity is bytes/s over the bytes of a token, so one token takes 1 / capacity.
        enter, between, leave = 1 / instance.enter, 1 / instance.link, 1 / instance.leave
    each = lengths.output_mean * service.tpot_s / (stages * per_request)
    # Where a node is left by: (nodes so far, the one before), (seconds so far, the one before) of
    # prompts and of tokens.
    hops: dict[int, tuple[int, int]] = {}
    late: tuple[dict[int, tuple[float, int]], dict[int, tuple[float, int]]] = ({}, {})
    last_hops = (0, OUTSIDE)
    last_late = [(0.0, OUTSIDE), (0.0, OUTSIDE)]
    for i in map(int, np.lexsort((placement.start, placement.end))):
        into: list[tuple[int, float, float]] = []
        if flows.enter[i] > min_flow:
            # A message has one token at least, however small the flow.
            batch = max(1.0, flows.enter[i] * each)
            wait = float(instance.enter_s[i])
            into.append(
                (
                    OUTSIDE,
                    wait + lengths.input_mean * float(enter[i]),
                    wait + batch * float(enter[i]),
                )
            )
        for k in map(int, np.flatnonzero(flows.edge[:, i] > min_flow)):
            if k in hops:
                batch = max(1.0, flows.edge[k, i] * each)
                wait, one = float(instance.latency[k, i]), float(between[k, i])
                into.append((k, wait + lengths.input_mean * one, wait + batch * one))
        if not into:
            continue
        hops[i] = max((1 + (hops[k][0] if k != OUTSIDE else 0), k) for k, _, _ in into)
        for phase in (0, 1):
            late[phase][i] = max(
                (way[1 + phase] + (late[phase][way[0]][0] if way[0] != OUTSIDE else 0.0), way[0])
                for way in into
            )
        if flows.leave[i] > min_flow:
            last_hops = max(last_hops, (hops[i][0], i))
            batch = max(1.0, flows.leave[i] * each)
            for phase, tokens in enumerate((1.0, batch)):
                gone = late[phase][i][0] + float(instance.leave_s[i]) + tokens * float(leave[i])
                last_late[phase] = max(last_late[phase], (gone, i))
    # Of prompt and token, the one that takes the larger share of its promise is what must give way.
    shares = last_late[0][0] / service.ttft_s, last_late[1][0] / service.tpot_s
    worse = 0 if shares[0] > shares[1] else 1
    return Ways(
        last_hops[0],
        (last_late[0][0], last_late[1][0]),
        tuple(_way({i: came for i, (_, came) in hops.items()}, last_hops[1])),
        tuple(_way({i: came for i, (_, came) in late[worse].items()}, last_late[worse][1])),
    )


def _way(came: dict[int, int], last: int) -> Iterator[Edge]:
    place, after = last, OUTSIDE
    while place != OUTSIDE:
        yield place, after
        place, after = came[place], place
    yield OUTSIDE, after


def scale_flows(flows: Flows, share: float) -> Flows:
    """Return a flow with this share of it on every edge."""
    return Flows(flows.value * share, flows.edge * share, flows.enter * share, flows.leave * share)


def _carried(flows: Flows, edge: Edge) -> float:
    src, dst = edge
    if src == OUTSIDE:
        return float(flows.enter[dst])
    return float(flows.leave[src] if dst == OUTSIDE else flows.edge[src, dst])


def _remove_least(instance: FlowInstance, flows: Flows, way: Sequence[Edge]) -> FlowInstance:
    """Return the instance without the least used edge of a way."""
    src, dst = min(way, key=lambda edge: (_carried(flows, edge), edge))
    link, enter, leave = instance.link.copy(), instance.enter.copy(), instance.leave.copy()
    if src == OUTSIDE:
        enter[dst] = 0.0
    elif dst == OUTSIDE:
        leave[src] = 0.0
    else:
        link[src, dst] = 0.0
    return replace(instance, link=link, enter=enter, leave=leave)
