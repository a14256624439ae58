"""Simulation in the loop: the best of some placements by a measure of their plans, then changes to it.

A measure (a simulation, say) sees what the analytic value does not, and takes a tenth of a second or more.
So candidates are measured, each with its lasting flow and the best few with the largest flow too. Then
the best of these are changed step by step: of a few changes the one with the best analytic value is measured,
and kept where it is better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.solve.deadline import Deadline
from atoll.solve.effort import Measured
from atoll.solve.place.flow_instance import FlowInstance, Flows, Placement
from atoll.solve.place.placement_polish import Value, change

Measure = Callable[[Placement, Flows], Measured]
Split = Callable[[FlowInstance, Placement], Flows]

_OTHERWISE = 4
"""How many of the best placements are measured with the other ways to split the flow."""
_DRAWN = 3
"""Changes that are drawn for each that is measured."""
_CLIMBING = 3
"""Placements, the best so far, that are changed in turn."""
_PATIENCE = 100
"""Changes measured without a better one, after which the climb ends."""
MEASURED = 120
"""Measurements in all."""


@dataclass(frozen=True)
class Refined:
    """The best placement by the measure, its flow and value; `first` is that of the first candidate."""

    placement: Placement
    flows: Flows
    value: Measured
    first: Measured
    runs: int


def refine(
    instance: FlowInstance,
    candidates: Sequence[Placement],
    splits: Sequence[Split],
    measure: Measure,
    *,
    quick: Value,
    deadline: Deadline,
    random: np.random.Generator,
    max_runs: int = MEASURED,
) -> Refined:
    """Return the best placement by `measure` found with at most so many measurements.

    `splits` make flows of a placement, the usual one first; `quick` is the analytic value. A deadline ends
    it early; the first candidate is measured however little time there is.
    """
    keys: set[bytes] = set()
    runs: list[tuple[Measured, Placement, Flows, Split]] = []

    def look(placement: Placement, split: Split) -> None:
        flows = split(instance, placement)
        value = measure(placement, flows) if flows.value > 0 else Measured(0.0, 0.0)
        runs.append((value, placement, flows, split))

    def is_over() -> bool:
        return len(runs) >= max_runs or deadline.is_over()

    for placement in candidates:
        # The first candidate is always measured: there must be an answer, however late it is.
        if runs and is_over():
            break
        keys.add(_key(placement))
        look(placement, splits[0])
    first = runs[0][0]
    # Measurements are few, so only the leading placements are measured with other splits.
    leading = sorted(runs, key=lambda run: -run[0].score)[:_OTHERWISE]
    for _, placement, _, _ in leading:
        for split in splits[1:]:
            if not is_over():
                look(placement, split)
    runs.sort(key=lambda run: -run[0].score)
    # Of runs with the same placement the best is kept: it comes last in the reversed order.
    climbing = list({_key(run[1]): run for run in reversed(runs)}.values())
    climbing = sorted(climbing, key=lambda run: -run[0].score)[:_CLIMBING]
    stale = 0
    while not is_over() and stale < _PATIENCE:
        # In turn, so that one good placement does not take all measurements.
        turn = stale % len(climbing)
        tried = _pick_promising(instance, climbing[turn][1], quick, keys, random)
        stale += 1
        if tried is None:
            continue
        look(tried, climbing[turn][3])
        if runs[-1][0].score > climbing[turn][0].score:
            climbing[turn], stale = runs[-1], 0
    best = max(climbing, key=lambda run: run[0].score)
    return Refined(best[1], best[2], best[0], first, len(runs))


def _pick_promising(
    instance: FlowInstance,
    placement: Placement,
    quick: Value,
    keys: set[bytes],
    random: np.random.Generator,
) -> Placement | None:
    """Return the change with the best analytic value of a few not seen before, None if there is none."""
    options: list[tuple[float, Placement]] = []
    # Many draws come to nothing or are known already; the limit ends a search that finds no more.
    for _ in range(20 * _DRAWN):
        tried = change(instance, placement.start, placement.end, random)
        if tried is None or _key(Placement(*tried)) in keys:
            continue
        # Drawing is cheap and measuring is not: the quick value picks which change is worth it.
        value = quick(*tried)
        if value > 0:
            options.append((value, Placement(*tried)))
        if len(options) >= _DRAWN:
            break
    if not options:
        return None
    best = max(options, key=lambda option: option[0])[1]
    keys.add(_key(best))
    return best


def _key(placement: Placement) -> bytes:
    return placement.start.tobytes() + placement.end.tobytes()
