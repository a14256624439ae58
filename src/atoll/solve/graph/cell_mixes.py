"""Mixtures of cells of powers of two GPUs: the algorithms of the Cornserve paper, kept as baselines.

A *cell* is (GPUs, requests/s). Algorithm 1 keeps cells that beat the largest efficient one before them,
scaled up; Algorithm 2 covers a target with the largest cell that does not exceed what is left, the smallest
at the end. The paper calls that optimal. It is not: cells (1, 1), (2, 2.1), (4, 4.3) for 4.25 take 5 GPUs by
Algorithm 2 and 4 at best (`research/cells/exact_mix.py`). As printed they do not end where one GPU serves
nothing (a model that does not fit it): there the smallest cell is taken for ever. Here cells that serve
nothing are left out, which is what the text means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atoll.core.errors import InputError

Cell = tuple[int, float]
"""GPUs and requests/s."""

SAME = 1e-9
"""Relative difference of rates that counts as rounding."""


@dataclass(frozen=True, slots=True)
class CellMix:
    """How many cells of each number of GPUs, what they serve together in requests/s, and their GPUs."""

    cells: Mapping[int, int]
    rate_per_s: float
    gpus: int


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
    useful = useful_cells(cells, target)
    counts: dict[int, int] = {}
    rate, gpus = 0.0, 0
    while rate < target * (1.0 - SAME):
        fitting = [cell for cell in useful if cell[1] <= (target - rate) * (1.0 + SAME)]
        size, more = max(fitting) if fitting else min(useful)
        rate += more
        gpus += size
        counts[size] = counts.get(size, 0) + 1
    return CellMix(counts, rate, gpus)


def useful_cells(cells: Sequence[Cell], target: float) -> list[Cell]:
    """Return the cells that serve anything, smallest first; `target` (requests/s) must be servable."""
    useful = sorted(cell for cell in cells if cell[1] > 0.0)
    if not 0.0 <= target < math.inf:
        raise InputError(f"{target} requests/s", field="target", hint="give a number from 0 up")
    if target > 0.0 and not useful:
        raise InputError("no cell serves anything", field="cells", hint="allow larger cells")
    return useful
