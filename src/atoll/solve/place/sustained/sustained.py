"""Sustained throughput: what is left of a flow once the time requests stay, and their KV cache, count.

`max-flow` asks how many tokens/s nodes and links could carry. `sustain` asks how many last: every hop
adds seconds to each token's round trip, a request stays for as many round trips as it generates tokens,
and all that time it holds KV cache on every node of its pipeline. The model is in `residence`, the search
for the flow and its multiple in `sustained_kernel`, the derivation and how well it predicts in
docs/internals/sustained.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.core.errors import InputError
from atoll.solve.array_types import Floats, Ints
from atoll.solve.place.flow_instance import FlowInstance, Flows, Placement
from atoll.solve.place.sustained.balance import balance
from atoll.solve.place.sustained.residence import BATCHES, Arcs, Site
from atoll.solve.place.sustained.sustained_kernel import arcs_of, place_value
from atoll.solve.place.sustained.sustained_kernel import sustain as largest_share

TRIED = (np.inf, 3.0, 2.0, 1.5, 1.25)
"""How many times as slow as the fastest pipeline one may be; each is tried, the best flow is kept."""
ADMITTED = 0.8
"""Share of the KV cache that is booked where requests always wait (Helix's offline rule, and `sim`'s)."""
SPARE = 0.85 / 0.8
"""To how many times `ADMITTED` a single node may be booked before requests are sent around it."""
SPREAD = 1.34
"""E[prompt^2] / E[prompt]^2 of the Azure conversation trace."""
TOGETHER = 1.21
"""E[prompt answer] / (E[prompt] E[answer]) of the same trace."""
LARGE = 300
"""Nodes above which one flow is tried: each takes seconds."""
BALANCED = 32
"""Nodes up to which flows are balanced: with more it takes long, and Helix's rules see no gain on 42."""
ROUNDS = 4
"""How often the flow is sought anew under what the last one showed (1 in the search)."""


@dataclass(frozen=True)
class Sustained:
    """Throughput that a flow over a placement sustains.

    `tokens_per_s` counts prompt and generated tokens, `decode_tokens_per_s` generated ones. `limiting` is the
    node whose KV cache is full first (None: it never is). Per node: `kv_use` of what may be used (1: full),
    `hop_s` the seconds a token spends there, `round_trip_s` once round for tokens that pass it; `residence_s`
    is how long a request stays on average, `in_flight` how many do at a time. `flows` are scaled to what is
    sustained.
    """

    tokens_per_s: float
    decode_tokens_per_s: float
    limiting: int | None
    kv_use: Floats
    hop_s: Floats
    round_trip_s: Floats
    residence_s: float
    in_flight: float
    flows: Flows


def site_of(
    instance: FlowInstance,
    *,
    fill: float = ADMITTED,
    input_square: float | None = None,
    held: float | None = None,
) -> Site:
    """Return the arrays the evaluators read.

    `fill` is the share of KV cache that requests may be counted with; `input_square` the mean square of
    prompt lengths; `held` the tokens that a request counts with, averaged over requests in flight. By
    default lengths vary as in the Azure conversation trace: long answers belong to long prompts, and a
    request is in flight for as long as it answers, so the prompts in flight are longer than the mean.
    """
    timing = instance.timing
    if timing is None:
        raise InputError(
            "sustained throughput needs step times and KV sizes, and this cluster has none",
            field="cluster.profiles",
            hint="give profiles, or use --objective max-flow",
        )
    batches = np.arange(BATCHES + 1, dtype=np.float64)
    decode_s = np.array(
        [
            _curve(x, y, batches)
            for x, y in zip(timing.decode_sequences, timing.decode_s, strict=True)
        ]
    ).reshape(instance.size, BATCHES + 1)
    prompt = np.array([timing.input_mean])
    prompt_s = np.array(
        [
            _curve(x, y, prompt)[0]
            for x, y in zip(timing.prefill_tokens, timing.prefill_s, strict=True)
        ]
    )
    square = SPREAD * timing.input_mean**2 if input_square is None else input_square
    site = Site(
        layers=instance.layers,
        partial=instance.partial,
        prompt=timing.input_mean,
        answer=timing.output_mean,
        spread=max(1.0, square / timing.input_mean**2),
        # Tokens that a request holds: prompts in flight are longer than the mean, since long answers go with
        # them.
        held=TOGETHER * timing.input_mean + timing.output_mean if held is None else held,
        spare=SPARE,
        step_s=timing.step_s,
        decode_s=decode_s,
        prompt_s=prompt_s,
        kv=timing.kv_tokens * fill,
        rate=instance.rate,
        link=instance.link,
        latency=instance.latency,
        enter=instance.enter,
        enter_s=instance.enter_s,
        leave=instance.leave,
        leave_s=instance.leave_s,
    )
    # Compiled code is made for one layout of arrays.
    arrays: dict[str, Any] = {
        name: np.ascontiguousarray(value, np.float64)
        for name, value in site._asdict().items()
        if isinstance(value, np.ndarray)
    }
    return site._replace(**arrays)


def _curve(x: Floats, y: Floats, at: Floats) -> Floats:
    """Interpolate a curve padded with its last point; beyond it goes on with its last slope."""
    # Tables are padded with their last point to equal length; what comes after the largest x is padding.
    count = int(np.argmax(x)) + 1
    x, y = x[:count], y[:count]
    if count == 1:
        return np.full(len(at), y[0])
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    values: Floats = np.interp(at, x, y) + np.maximum(at - x[-1], 0.0) * slope
    return values


def sustain(
    instance: FlowInstance, placement: Placement, flows: Flows, site: Site | None = None
) -> Sustained:
    """Return what a given flow sustains: the largest multiple of it that lasts."""
    if site is None:
        site = site_of(instance)
    tail, head = arcs_of(site, placement.start, placement.end)
    return _answer(site, placement, tail, head, flows.on_arcs(tail, head))


def best_flows(
    instance: FlowInstance,
    placement: Placement,
    site: Site | None = None,
    *,
    balanced: bool = True,
) -> Sustained:
    """Return the best flow found for a placement, with what it sustains.

    Without `balanced` it is a cheapest flow, which leaves to some nodes what equal ones beside them cannot
    take.
    """
    if site is None:
        site = site_of(instance)
    room = np.zeros(instance.size * (instance.size + 2))
    best, best_flow = -1.0, room
    few = instance.size > LARGE
    # On a large cluster every flow takes seconds, so only the first is tried.
    for dearest in TRIED[:1] if few else TRIED:
        rounds = 2 if few else ROUNDS
        value, _ = place_value(site, placement.start, placement.end, rounds, dearest, room)
        if value > best:
            best, best_flow = value, room.copy()
    tail, head = arcs_of(site, placement.start, placement.end)
    flow = best_flow[: len(tail)]
    if balanced and best > 0.0 and instance.size <= BALANCED:
        flow = balance(site, placement, tail, head, flow)
    return _answer(site, placement, tail, head, flow)


def evaluator(site: Site) -> Callable[[Ints, Ints], float]:
    """Return a function from (start, end) to sustained tokens/s, for a search."""
    room = np.zeros(len(site.step_s) * (len(site.step_s) + 2))

    def value(start: Ints, end: Ints) -> float:
        return float(place_value(site, start, end, 2, np.inf, room)[0])

    return value


def _answer(site: Site, placement: Placement, tail: Ints, head: Ints, flow: Floats) -> Sustained:
    size = len(placement.start)
    use, trip, hop = np.zeros(size), np.zeros(size), np.zeros(size)
    # Arcs without flow would only slow down every step of the bisection.
    kept = flow > 0.0
    tail, head, flow = tail[kept], head[kept], flow[kept]
    scale = 0.0
    if len(tail):
        arcs = Arcs(tail, head, flow)
        scale = float(largest_share(site, placement.start, placement.end, arcs, use, trip, hop))
    flows = Flows.of_arcs(size, tail, head, flow * scale)
    total = flows.value
    per_request = site.prompt + site.answer
    stays = (site.answer + 1.0) * float((flows.enter * trip).sum()) / total if total > 0 else 0.0
    return Sustained(
        tokens_per_s=total,
        decode_tokens_per_s=total * site.answer / per_request,
        # Rounding: a cache this full is the one that limits.
        limiting=int(np.argmax(use)) if use.max(initial=0.0) > 0.999 else None,
        kv_use=use,
        hop_s=np.where(use > 0, hop, 0.0),
        round_trip_s=trip,
        residence_s=stays,
        in_flight=total / per_request * stays,
        flows=flows,
    )
