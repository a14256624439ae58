"""Simulation in the loop: the best of some placements by a measure of their plans, then changes to it.

A measure (a simulation, say) sees what the analytic value does not, and takes a tenth of a second or more.
So candidates are measured, each with its lasting flow and the best few with other flows too; placements
by known rules, and those that were given, with all. Then the best of these are changed step by step: of a
few changes the one with the best analytic value is measured, and kept where it is better.

A measurement is of one draw of requests, and the next draw may give 2 % more or less, as much as good
placements differ by. So none is taken for better before it was so under `DRAWS` draws together; one that
falls behind is given up at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from atoll.solve.deadline import Deadline
from atoll.solve.effort import Measured
from atoll.solve.place.flow_instance import FlowInstance, Flows, Placement
from atoll.solve.place.placement_polish import Value, change

Measure = Callable[[Placement, Flows, int], Measured]
"""Values a placement with a flow under one of some draws of requests."""
Split = Callable[[FlowInstance, Placement], Flows]

_OTHERWISE = 4
"""How many of the best placements are measured with the other ways to split the flow."""
_DRAWN = 8
"""Changes that are drawn for each that is measured."""
_PROMISING = 0.9
"""Share of the analytic value of what is changed that a change must have to be measured."""
_CLIMBING = 3
"""Placements, the best so far, that are changed in turn."""
_PATIENCE = 100
"""Changes measured without a better one, after which the climb ends."""
DRAWS = 3
"""Draws of requests under which what is taken was measured."""
MEASURED = 80
"""Measurements in all."""


@dataclass(frozen=True)
class Refined:
    """The best placement by the measure, its flow and value; `first` is that of the first candidate."""

    placement: Placement
    flows: Flows
    value: Measured
    first: Measured
    runs: int


@dataclass
class PlacementRuns:
    """Measurements of a placement with the flow that a split makes of it, under the first few draws."""

    placement: Placement
    flows: Flows
    split: Split
    values: list[Measured] = field(default_factory=list)

    def has(self, placement: Placement, flows: Flows) -> bool:
        """Whether a plan of these would be the same: ranges of nodes without flow do not count."""
        used = self.flows.enter + self.flows.edge.sum(axis=0) > 0.0
        return (
            self.flows.value == flows.value
            and np.array_equal(self.flows.edge, flows.edge)
            and np.array_equal(self.flows.enter, flows.enter)
            and np.array_equal(self.placement.start[used], placement.start[used])
            and np.array_equal(self.placement.end[used], placement.end[used])
        )

    def mean(self, draws: int) -> Measured:
        """The mean of its measurements under the first draws."""
        return Measured.mean(self.values[:draws])


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
    climb = _Climb(instance, measure, deadline, max_runs)
    first = climb.look(candidates[0], splits[:1])
    for placement in known:
        climb.look(placement, splits)
    best_known = max(climb.seen[1:], key=lambda one: one.values[0].tokens_per_s, default=None)
    if best_known is not None:
        climb.measure_all(best_known)
        climb.floor = best_known
    seen = frozenset(climb.key(placement) for placement in known)
    others = [placement for placement in candidates[1:] if climb.key(placement) not in seen]
    for placement in others:
        climb.look(placement, splits[:1])
    # Measurements are few, so only the leading placements are measured with other splits.
    leading = sorted(climb.seen, key=lambda one: -one.values[0].score)[:_OTHERWISE]
    for one in (one for one in leading if climb.key(one.placement) not in seen):
        climb.look(one.placement, splits[1:])
    climbing = climb.leaders()
    stale = 0
    while not climb.is_over() and stale < _PATIENCE:
        # In turn, so that one good placement does not take all measurements.
        turn = stale % len(climbing)
        here = climbing[turn]
        tried = climb.pick_promising(here.placement, quick, random)
        stale += 1
        if tried is None:
            continue
        new = climb.look(tried, (here.split,))
        if climb.is_better(new, here):
            climbing[turn], stale = new, 0
    best = climbing[0]
    for other in climbing[1:]:
        if climb.is_better(other, best):
            best = other
    return Refined(best.placement, best.flows, best.mean(DRAWS), first.mean(DRAWS), climb.runs)


@dataclass
class _Climb:
    """What was measured so far, and what may still be; what generates less than `floor` comes last."""

    instance: FlowInstance
    measure: Measure
    deadline: Deadline
    max_runs: int
    floor: PlacementRuns | None = None
    runs: int = 0
    keys: set[bytes] = field(default_factory=set)
    seen: list[PlacementRuns] = field(default_factory=list)

    def is_over(self) -> bool:
        """Whether no more may be measured."""
        return self.runs >= self.max_runs or self.deadline.is_over()

    def look(self, placement: Placement, splits: Sequence[Split]) -> PlacementRuns:
        """Measure a placement once with each split while there is time; return the last one measured."""
        for split in splits:
            # The first of all is always measured: there must be an answer, however late it is.
            if self.seen and self.is_over():
                break
            self.keys.add(self.key(placement))
            flows = split(self.instance, placement)
            # Where there is one way only all splits are alike.
            if any(one.has(placement, flows) for one in self.seen):
                continue
            self.seen.append(PlacementRuns(placement, flows, split))
            self._measure(self.seen[-1])
        return self.seen[-1]

    def key(self, placement: Placement) -> bytes:
        """What placements have in common that differ by which of equal nodes holds what."""
        columns = (placement.end, placement.start, self.instance.kind)
        return np.stack(columns)[:, np.lexsort(columns)].tobytes()

    def measure_all(self, one: PlacementRuns) -> None:
        """Measure under the draws that are left, while there is time."""
        while len(one.values) < DRAWS and not self.is_over():
            self._measure(one)

    def is_better(self, one: PlacementRuns, other: PlacementRuns) -> bool:
        """Whether one is better under all draws of the other; it is measured until it is not."""
        while True:
            shared = min(len(one.values), len(other.values))
            if one is other or self._rank(one, shared) <= self._rank(other, shared):
                return False
            if shared == len(other.values):
                return True
            if self.is_over():
                return False
            self._measure(one)

    def leaders(self) -> list[PlacementRuns]:
        """The best few, one of each placement, measured under all draws."""
        ranked = sorted(self.seen, key=lambda one: self._rank(one, 1), reverse=True)
        # What was measured once was lucky or not: only those measured alike are compared.
        ranked = ranked[: 2 * _CLIMBING]
        for one in ranked:
            self.measure_all(one)
        least = min(len(one.values) for one in ranked)
        best: dict[bytes, PlacementRuns] = {}
        for one in sorted(ranked, key=lambda one: self._rank(one, least), reverse=True):
            best.setdefault(self.key(one.placement), one)
        return list(best.values())[:_CLIMBING]

    def pick_promising(
        self, placement: Placement, quick: Value, random: np.random.Generator
    ) -> Placement | None:
        """Return the change with the best analytic value of a few not seen before, None if there is none."""
        instance = self.instance
        least = _PROMISING * quick(placement.start, placement.end)
        options: list[tuple[float, Placement]] = []
        # Many draws come to nothing or are known already; the limit ends a search that finds no more.
        for _ in range(20 * _DRAWN):
            drawn = change(instance, placement.start, placement.end, random)
            if drawn is None or self.key(tried := Placement(*drawn)) in self.keys:
                continue
            # Drawing is cheap and measuring is not: the quick value picks which change is worth it.
            value = quick(*drawn)
            if value > least:
                options.append((value, tried))
            if len(options) >= _DRAWN:
                break
        if not options:
            return None
        best = max(options, key=lambda option: option[0])[1]
        self.keys.add(self.key(best))
        return best

    def _rank(self, one: PlacementRuns, draws: int) -> tuple[bool, float]:
        value = one.mean(draws)
        floor = 0.0
        if self.floor is not None:
            floor = self.floor.mean(draws).tokens_per_s
        return value.tokens_per_s >= floor, value.score

    def _measure(self, one: PlacementRuns) -> None:
        value = Measured(0.0, 0.0, 0.0)
        if one.flows.value > 0:
            value = self.measure(one.placement, one.flows, len(one.values))
        one.values.append(value)
        self.runs += 1
