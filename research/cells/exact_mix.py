"""The exact mixture of cells, and how often Algorithm 2 of the Cornserve paper takes more GPUs than it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.solve.graph.cell_mixes import (
    SAME,
    Cell,
    CellMix,
    efficient_cells,
    greedy_mix,
    useful_cells,
)


@dataclass(frozen=True, slots=True)
class MixStatistics:
    """Of `cases` random ones, in how many Algorithm 2 takes more GPUs, and by which factor at worst."""

    cases: int
    worse: int
    worst: float

    @property
    def share(self) -> float:
        """Share of cases in which Algorithm 2 takes more GPUs than needed."""
        return self.worse / self.cases if self.cases else 0.0


def exact_mix(cells: Sequence[Cell], target: float) -> CellMix:
    """Return the fewest GPUs that serve `target` requests/s, and of those the mix that serves most.

    best[n] = max over cells of best[n - GPUs] + rate: the most that n GPUs serve.
    """
    useful = useful_cells(cells, target)
    best = [0.0]
    choice: list[Cell | None] = [None]
    while best[-1] < target * (1.0 - SAME):
        number = len(best)
        options = [(best[number - g] + rate, g, rate) for g, rate in useful if g <= number]
        rate, size, one = max(options, default=(0.0, 0, 0.0))
        # A GPU more may be left idle.
        choice.append((size, one) if rate > best[-1] else None)
        best.append(max(rate, best[-1]))
    counts: dict[int, int] = {}
    number, total, gpus = len(best) - 1, 0.0, 0
    while number > 0:
        taken = choice[number]
        if taken is None:
            number -= 1
            continue
        counts[taken[0]] = counts.get(taken[0], 0) + 1
        total += taken[1]
        gpus += taken[0]
        number -= taken[0]
    return CellMix(dict(sorted(counts.items())), total, gpus)


def compare_mixes(cases: int, seed: int, *, largest: int = 8) -> MixStatistics:
    """Return how Algorithm 2 does over random cells made efficient by Algorithm 1 and random targets."""
    rng = random.Random(seed)
    worse, worst = 0, 1.0
    for _ in range(cases):
        rates = {}
        size, rate = 1, rng.uniform(0.5, 2.0)
        while size <= largest:
            rates[size] = rate
            rate *= rng.uniform(1.6, 2.6)
            size *= 2
        if rng.random() < 0.3:
            rates[1] = 0.0
        cells = efficient_cells(rates.__getitem__, largest)
        target = rng.uniform(0.5, 4.0) * max(rate for _, rate in cells)
        ratio = greedy_mix(cells, target).gpus / exact_mix(cells, target).gpus
        worse += ratio > 1.0
        worst = max(worst, ratio)
    return MixStatistics(cases, worse, worst)
