"""Placements for goals that the search for the largest flow does not see: candidates, then polishing.

Short ranges make deep pipelines, which flow well and answer slowly. So besides the largest flow, candidates
are the largest flows of clusters whose nodes carry nothing with few layers, and the simple rules. The best
of them are annealed by the goal itself (`polish`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from atoll.core.rng import stream
from atoll.solve.place.instance import FlowInstance, Flows, Ints, Placement
from atoll.solve.place.polish import Value, polish

_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the most layers any node holds, below which nodes that could hold more carry nothing."""

_EACH = 8
"""Candidates of each search."""

_SEARCHING = 0.2
"""Share of the time for finding candidates; the rest is for polishing the best."""
_POLISHED = 3
_FIRST = 0.5
"""Share of the time left in which the best few are polished in turn; in the rest, the best of them."""

Log = Callable[[float, float, float], None]
Score = Callable[[FlowInstance, Placement], Flows]


def with_longer_ranges(instance: FlowInstance, least: int) -> FlowInstance:
    """Return the instance where nodes carry nothing with fewer layers than `least`, or than they can hold.

    Searching on it gives pipelines with fewer hops.
    """
    rate = instance.rate.copy()
    for i, most in enumerate(instance.most):
        rate[i, 1 : min(least, int(most))] = 0.0
    return replace(instance, rate=rate)


def best_candidates(
    instance: FlowInstance,
    score: Score,
    starts: Sequence[Placement],
    *,
    seconds: float,
    seed: int,
    workers: int = 1,
    bound: float,
    quick: Value | None = None,
    log: Log | None = None,
    most: int = 1,
) -> list[tuple[Placement, Flows]]:
    """Return the placements whose flows by `score` carry the most, best first, at most `most` of them.

    None of them where nothing carries anything. `quick` values (start, end) about as `score` does, in less
    time; without it `score` is used throughout.
    """
    from atoll.solve.place.search.search import search_many

    began = time.perf_counter()
    scored: list[tuple[float, Placement, Flows]] = []

    def look(placement: Placement) -> None:
        flows = score(instance, placement)
        if flows.value > max((entry[0] for entry in scored), default=0.0) and log is not None:
            log(time.perf_counter() - began, flows.value, bound)
        if flows.value > 0:
            scored.append((flows.value, placement, flows))

    def value(start: Ints, end: Ints) -> float:
        return score(instance, Placement(start, end)).value

    for placement in starts:
        look(placement)
    longest = int(instance.most.max())
    lengths = sorted({1, *(max(1, round(share * longest)) for share in _SHARES)})
    for left, least in zip(range(len(lengths), 0, -1), lengths, strict=True):
        remaining = seconds * _SEARCHING - (time.perf_counter() - began)
        if remaining <= 0:
            break
        many = search_many(
            with_longer_ranges(instance, least),
            candidates=_EACH,
            seconds=remaining / left,
            seed=seed,
            workers=workers,
            start=starts,
        )
        for result in many:
            look(result.placement)
    scored.sort(key=lambda entry: -entry[0])
    remaining = max(0.0, seconds - (time.perf_counter() - began))
    first = scored[:_POLISHED]
    for number in range(len(first) + 1 if remaining > 0 and scored else 0):
        # In turn, then once more from the best of all.
        again = number == len(first)
        _, placement, _ = max(scored, key=lambda entry: entry[0]) if again else first[number]
        share = remaining * (1.0 - _FIRST if again else _FIRST / len(first))
        random = stream(seed, "polish", str(number))
        look(polish(instance, placement, quick or value, seconds=share, random=random)[0])
    scored.sort(key=lambda entry: -entry[0])
    kept: dict[bytes, tuple[Placement, Flows]] = {}
    for _, placement, flows in scored:
        kept.setdefault(placement.start.tobytes() + placement.end.tobytes(), (placement, flows))
    return list(kept.values())[:most]
