"""Simulation in the loop: the best of some placements by a measure of their plans, then changes to it.

A measure (a simulation, say) sees what the analytic value does not, and takes a tenth of a second or more.
So candidates are measured, each with its lasting flow and the best few with the largest flow too; placements
by known rules, and those that were given, with both. Then the best of these are changed step by step: of a
few changes the one with the best analytic value is measured, and kept where it is better.
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


@dataclass(frozen=True)
class PlacementRun:
    """A measurement: of a placement with the flow that a split makes of it."""

    value: Measured
    placement: Placement
    flows: Flows
    split: Split

    def rank(self, floor: float) -> tuple[bool, float]:
        """How good it is; what generates less than `floor` comes after all else."""
        return self.value.tokens_per_s >= floor, self.value.score


def refine(
    instance: FlowInstance,
    candidates: Sequence[Placement],
    splits: Sequence[Split],
    measure: Measure,
    *,
    quick: Value,
    deadline: Deadline,
    random: np.random.Generator,
    known: Sequence[Placement] = (),
    max_runs: int = MEASURED,
) -> Refined:
    """Return the best placement by `measure` found with at most so many measurements.

    `splits` make flows of a placement, the usual one first; `quick` is the analytic value. `known` placements
    are measured with all splits, and what is returned carries no less than any of them. A deadline ends
    it early; the first candidate is measured however little time there is.
    """
    keys: set[bytes] = set()
    runs: list[PlacementRun] = []

    def is_over() -> bool:
        return len(runs) >= max_runs or deadline.is_over()

    def look(placement: Placement, splits: Sequence[Split]) -> None:
        for split in splits:
            # The first of all is always measured: there must be an answer, however late it is.
            if runs and is_over():
                return
            keys.add(_key(placement))
            flows = split(instance, placement)
            value = measure(placement, flows) if flows.value > 0 else Measured(0.0, 0.0)
            runs.append(PlacementRun(value, placement, flows, split))

    look(candidates[0], splits[:1])
    first = runs[0].value
    for placement in known:
        look(placement, splits)
    floor = max((run.value.tokens_per_s for run in runs[1:]), default=0.0)
    seen = frozenset(_key(placement) for placement in known)
    others = [placement for placement in candidates[1:] if _key(placement) not in seen]
    for placement in others:
        look(placement, splits[:1])
    # Measurements are few, so only the leading placements are measured with other splits.
    leading = sorted(runs, key=lambda run: -run.value.score)[:_OTHERWISE]
    for run in (run for run in leading if _key(run.placement) not in seen):
        look(run.placement, splits[1:])
    climbing = _leaders(runs, floor)
    stale = 0
    while not is_over() and stale < _PATIENCE:
        # In turn, so that one good placement does not take all measurements.
        turn = stale % len(climbing)
        here = climbing[turn]
        tried = _pick_promising(instance, here.placement, quick, keys, random)
        stale += 1
        if tried is None:
            continue
        look(tried, (here.split,))
        if runs[-1].rank(floor) > here.rank(floor):
            climbing[turn], stale = runs[-1], 0
    best = max(climbing, key=lambda run: run.rank(floor))
    return Refined(best.placement, best.flows, best.value, first, len(runs))


def _leaders(runs: Sequence[PlacementRun], floor: float) -> list[PlacementRun]:
    """The best few measurements, one of each placement."""
    ranked = sorted(runs, key=lambda run: run.rank(floor), reverse=True)
    best: dict[bytes, PlacementRun] = {}
    for run in ranked:
        best.setdefault(_key(run.placement), run)
    return list(best.values())[:_CLIMBING]


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
