"""Flows that keep a latency promise: no pipeline in use is slower than the promise, however requests mix.

A plan says how much flows over each edge, and requests may follow any way along edges with flow. So the
promise must hold for the slowest such way: its prompt time within TTFT, the time of one token's round
within TPOT. Times are means at the flow itself. A node that runs j layers for r requests/s
takes steps of

    tau = d / (1 - r p),    d = step_s + j D(1 + r O tau),    p = j P(I)

seconds: d without prompts, of which one comes in r tau of the steps and adds p. A token waits for half
a step and runs in the next, 1.5 tau; a prompt p more. A link adds its latency and what sending takes.

Times fall as the flow falls, so a flow that is too slow is scaled down; and where one edge makes the
slowest way, leaving it out may serve more than slowing everything. Edges go one by one, the least used
of the slowest way first, and the best flow on the way is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from atoll.core.errors import UsageError
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.instance import Floats, FlowInstance, Flows, Ints, Placement, Timing

_ROUNDS = 400
_STEPS = 30
_SETTLING = 40
_NEVER_S = 1e5
_TRICKLE = 1e-9

Edge = tuple[int, int]
"""Node numbers; -1 is the source as a start and the sink as an end."""
OUTSIDE = -1


@dataclass(frozen=True)
class Slowest:
    """The slowest ways of a flow: seconds to the first token, seconds per further token, and their edges."""

    prompt_s: float
    token_s: float
    prompt_way: tuple[Edge, ...]
    token_way: tuple[Edge, ...]

    def keeps(self, ttft_s: float, tpot_s: float) -> bool:
        """Return whether even the slowest way is within the promise."""
        return self.prompt_s <= ttft_s and self.token_s <= tpot_s


def timing_of(instance: FlowInstance) -> Timing:
    """Return the times of an instance that has them."""
    if instance.timing is None:
        raise UsageError("nothing is known about the times of these nodes")
    return instance.timing


def slowest(instance: FlowInstance, placement: Placement, flows: Flows) -> Slowest:
    """Return the slowest ways along the edges of a flow, at the load it means."""
    timing = timing_of(instance)
    per_request = timing.input_mean + timing.output_mean
    held = (placement.end - placement.start).astype(np.float64)
    through = (flows.enter + flows.edge.sum(axis=0)) / per_request
    token_s, prompt_s = hop_times(timing, np.maximum(held, 1.0), through)
    least = flows.value * _TRICKLE
    order = np.argsort(placement.end, kind="stable")
    enter, between, leave = _messages(instance, timing)
    ways = []
    for kind, hop_s in enumerate((token_s, prompt_s)):
        # The latest a request can be behind node i, and the node it came from.
        behind = np.full(instance.size, -np.inf)
        came = np.full(instance.size, OUTSIDE)
        last, late = OUTSIDE, 0.0
        for i in map(int, order):
            options: list[tuple[float, int]] = []
            if flows.enter[i] > least:
                options.append((enter[kind][i], OUTSIDE))
            options += [
                (behind[k] + between[kind][k, i], int(k))
                for k in np.flatnonzero(flows.edge[:, i] > least)
            ]
            if not options:
                continue
            arrived, came[i] = max(options)
            behind[i] = arrived + hop_s[i]
            # What leaves is one token, whatever came in.
            if flows.leave[i] > least and behind[i] + leave[i] > late:
                last, late = i, float(behind[i] + leave[i])
        ways.append((late, tuple(_way(came, last))))
    (next_s, next_way), (first, first_way) = ways
    return Slowest(first, next_s, first_way, next_way)


def hop_times(timing: Timing, layers: Floats, rate: Floats) -> tuple[Floats, Floats]:
    """Return seconds of a token and of a prompt on nodes at `rate` requests/s, inf if that is too much."""
    each = layers * _curves(timing.prefill_tokens, timing.prefill_s, timing.input_mean)
    spare = 1.0 - rate * each
    tau = timing.step_s + layers * _curves(timing.decode_sequences, timing.decode_s, 1.0)
    for _ in range(_SETTLING):
        batch = 1.0 + rate * timing.output_mean * np.minimum(tau, _NEVER_S)
        alone = timing.step_s + layers * _curves(timing.decode_sequences, timing.decode_s, batch)
        with np.errstate(divide="ignore"):
            tau = np.where(spare > 0, alone / np.maximum(spare, 1e-12), np.inf)
    tau = np.where(tau < _NEVER_S, tau, np.inf)
    return 1.5 * tau, 1.5 * tau + each


def _curves(x: Floats, y: Floats, at: float | Floats) -> Floats:
    """Every row's curve at its point, on with its last slope (rows repeat their last point)."""
    points = np.broadcast_to(np.asarray(at, np.float64), (len(x),))
    values = np.empty(len(x))
    for i, point in enumerate(points):
        count = int(np.argmax(x[i])) + 1
        xs, ys = x[i, :count], y[i, :count]
        over = max(0.0, float(point) - float(xs[-1]))
        slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]) if count > 1 else 0.0
        values[i] = np.interp(point, xs, ys) + over * slope
    return values


def _messages(
    instance: FlowInstance, timing: Timing
) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats], Floats]:
    """Seconds of a token and of a prompt from the source and between nodes, and of a token to the sink."""
    with np.errstate(divide="ignore"):
        # A capacity is bytes/s over the bytes of a token, so one token takes 1 / capacity.
        enter, between, leave = 1 / instance.enter, 1 / instance.link, 1 / instance.leave
    prompt = timing.input_mean
    return (
        (instance.enter_s + enter, instance.enter_s + prompt * enter),
        (instance.latency + between, instance.latency + prompt * between),
        instance.leave_s + leave,
    )


def _way(came: Ints, last: int) -> Iterator[Edge]:
    place, after = last, OUTSIDE
    while place != OUTSIDE:
        yield place, after
        place, after = int(came[place]), place
    yield OUTSIDE, after


def flow_within(
    instance: FlowInstance, placement: Placement, ttft_s: float, tpot_s: float
) -> Flows:
    """Return a large flow whose every pipeline keeps the promise; a flow of 0 if there is none."""
    best = scale_flows(max_flow(instance, placement), 0.0)
    remaining = instance
    for _ in range(_ROUNDS):
        flows = max_flow(remaining, placement)
        if flows.value <= best.value:
            break
        share = _largest_share(remaining, placement, flows, ttft_s, tpot_s)
        if share * flows.value > best.value:
            best = scale_flows(flows, share)
        if share >= 1.0:
            break
        slow = slowest(remaining, placement, scale_flows(flows, max(share, 1e-6)))
        late = slow.prompt_s / ttft_s > slow.token_s / tpot_s
        way = slow.prompt_way if late else slow.token_way
        remaining = _remove_edge(remaining, min(way, key=lambda edge: (_inflow(flows, edge), edge)))
    return best


def _largest_share(
    instance: FlowInstance, placement: Placement, flows: Flows, ttft_s: float, tpot_s: float
) -> float:
    """The largest share of a flow that keeps the promise: 1, 0, or found by bisection."""

    def keeps(share: float) -> bool:
        return slowest(instance, placement, scale_flows(flows, share)).keeps(ttft_s, tpot_s)

    if keeps(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low if low > 2.0 ** (2 - _STEPS) else 0.0


def scale_flows(flows: Flows, share: float) -> Flows:
    """Return a flow with this share of it on every edge."""
    return Flows(flows.value * share, flows.edge * share, flows.enter * share, flows.leave * share)


def _inflow(flows: Flows, edge: Edge) -> float:
    src, dst = edge
    if src == OUTSIDE:
        return float(flows.enter[dst])
    return float(flows.leave[src] if dst == OUTSIDE else flows.edge[src, dst])


def _remove_edge(instance: FlowInstance, edge: Edge) -> FlowInstance:
    src, dst = edge
    link, enter, leave = instance.link.copy(), instance.enter.copy(), instance.leave.copy()
    if src == OUTSIDE:
        enter[dst] = 0.0
    elif dst == OUTSIDE:
        leave[src] = 0.0
    else:
        link[src, dst] = 0.0
    return replace(instance, link=link, enter=enter, leave=leave)
