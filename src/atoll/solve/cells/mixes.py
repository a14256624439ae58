"""Mixtures of cells of powers of two GPUs: the algorithms of the Cornserve paper, and the exact answer.

A *cell* is (GPUs, requests/s). Algorithm 1 keeps cells that beat the largest efficient one before them,
scaled up; Algorithm 2 covers a target with the largest cell that does not exceed what is left, the smallest
at the end. The paper calls that optimal. It is not: cells (1, 1), (2, 2.1), (4, 4.3) for 4.25 take 5 GPUs by
Algorithm 2 and 4 at best. Both are kept as baselines. As printed they do not end where one GPU serves
nothing (a model that does not fit it): there the smallest cell is taken for ever. Here cells that serve
nothing are left out, which is what the text means.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atoll.core.errors import InputError

Cell = tuple[int, float]
"""GPUs and requests/s."""

_SAME = 1e-9
"""Relative difference of rates that counts as rounding."""


@dataclass(frozen=True, slots=True)
class CellMix:
    """How many cells of each number of GPUs, what they serve together in requests/s, and their GPUs."""

    cells: Mapping[int, int]
    rate_per_s: float
    gpus: int


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


def efficient_cells(rate_of_gpus: Callable[[int], float], largest: int) -> tuple[Cell, ...]:
    """Algorithm 1 (baseline): cells of 1, 2, 4, ... `largest` GPUs that beat the last efficient one, scaled.

    Cells that serve nothing are passed over; as printed the first is always taken.
    """
    cells: list[Cell] = []
    gpus = 1
    while gpus <= largest:
        rate = rate_of_gpus(gpus)
        if rate > 0.0 and (not cells or rate > gpus / cells[-1][0] * cells[-1][1]):
            cells.append((gpus, rate))
        gpus *= 2
    return tuple(cells)


def greedy_mix(cells: Sequence[Cell], target: float) -> CellMix:
    """Algorithm 2 (baseline): the largest cell that fits what is left of `target` (requests/s), until met."""
    useful = _useful(cells, target)
    counts: dict[int, int] = {}
    rate, gpus = 0.0, 0
    while rate < target * (1.0 - _SAME):
        fitting = [cell for cell in useful if cell[1] <= (target - rate) * (1.0 + _SAME)]
        size, more = max(fitting) if fitting else min(useful)
        rate += more
        gpus += size
        counts[size] = counts.get(size, 0) + 1
    return CellMix(counts, rate, gpus)


def exact_mix(cells: Sequence[Cell], target: float) -> CellMix:
    """Return the fewest GPUs that serve `target` requests/s, and of those the mix that serves most.

    best[n] = max over cells of best[n - GPUs] + rate: the most that n GPUs serve.
    """
    useful = _useful(cells, target)
    best = [0.0]
    choice: list[Cell | None] = [None]
    while best[-1] < target * (1.0 - _SAME):
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


def _useful(cells: Sequence[Cell], target: float) -> list[Cell]:
    useful = sorted(cell for cell in cells if cell[1] > 0.0)
    if not 0.0 <= target < math.inf:
        raise InputError(f"{target} requests/s", field="target", hint="give a number from 0 up")
    if target > 0.0 and not useful:
        raise InputError("no cell serves anything", field="cells", hint="allow larger cells")
    return useful


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
