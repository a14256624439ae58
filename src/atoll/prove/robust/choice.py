"""The cheapest option for each service such that all hold together in enough scenarios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_COMBINATIONS = 4_000
"""Up to so many combinations all of them are looked at."""


@dataclass(frozen=True)
class OptionTable:
    """Options of one service: what each is expected to cost in USD/h, and in which scenarios it holds."""

    usd: NDArray[np.float64]
    holds: NDArray[np.bool_]
    """(options, scenarios)."""

    def __len__(self) -> int:
        return len(self.usd)


def choose_options(tables: Sequence[OptionTable], target: float) -> tuple[int, ...]:
    """Return which option to take of each service: the cheapest that hold together in a share of scenarios.

    Where none do it is the ones that hold together most often, and of those the cheapest. With few
    combinations that is exact; with many, options are bettered one by one, by share won for a dollar, and
    then made cheaper again as far as that goes.
    """
    useful = [_useful(table) for table in tables]
    few = [
        OptionTable(table.usd[at], table.holds[at])
        for table, at in zip(tables, useful, strict=True)
    ]
    fits = math.prod(len(table) for table in few) <= _MOST_COMBINATIONS
    taken = _look_at_all(few, target) if fits else _climb(few, target)
    return tuple(at[option] for at, option in zip(useful, taken, strict=True))


def _useful(table: OptionTable) -> list[int]:
    """Options of which no other costs less and holds wherever they do."""
    order = sorted(range(len(table)), key=lambda at: (float(table.usd[at]), -table.holds[at].sum()))
    useful: list[int] = []
    for option in order:
        if not any(np.all(table.holds[other] >= table.holds[option]) for other in useful):
            useful.append(option)
    return useful


def share_held(tables: Sequence[OptionTable], taken: Sequence[int]) -> float:
    """Return the share of scenarios in which the options taken hold together."""
    held = np.stack([table.holds[at] for table, at in zip(tables, taken, strict=True)])
    return float(np.all(held, axis=0).mean())


def _usd(tables: Sequence[OptionTable], taken: Sequence[int]) -> float:
    return float(sum(table.usd[at] for table, at in zip(tables, taken, strict=True)))


def _rank(
    tables: Sequence[OptionTable], taken: tuple[int, ...], target: float
) -> tuple[float, float, float, tuple[int, ...]]:
    """Less is better: what is missing of the target, then dollars, then scenarios in which it fails."""
    share = share_held(tables, taken)
    return (max(0.0, target - share), round(_usd(tables, taken), 9), -share, taken)


def _look_at_all(tables: Sequence[OptionTable], target: float) -> tuple[int, ...]:
    combinations = product(*(range(len(table)) for table in tables))
    return min((_rank(tables, taken, target) for taken in combinations), key=lambda r: r)[3]


def _climb(tables: Sequence[OptionTable], target: float) -> tuple[int, ...]:
    taken = [int(np.argmin(table.usd)) for table in tables]
    while (share := share_held(tables, taken)) < target:
        best: tuple[float, float, int, int] | None = None
        for service, table in enumerate(tables):
            for option in range(len(table)):
                trial = [*taken[:service], option, *taken[service + 1 :]]
                won = share_held(tables, trial) - share
                if won <= 0.0:
                    continue
                paid = max(float(table.usd[option] - table.usd[taken[service]]), 1e-9)
                worth = (min(won, target - share) / paid, won, -service, -option)
                best = worth if best is None else max(best, worth)
        if best is None:
            # One more of anything wins nothing: all of the surest together may.
            surest = [int(np.argmax(table.holds.mean(axis=1))) for table in tables]
            if share_held(tables, surest) <= share:
                break
            taken = surest
            continue
        taken[-best[2]] = -best[3]
    least = min(target, share_held(tables, taken))
    while True:
        savings: list[tuple[float, int, int]] = []
        for service, table in enumerate(tables):
            for option in range(len(table)):
                saved = float(table.usd[taken[service]] - table.usd[option])
                trial = [*taken[:service], option, *taken[service + 1 :]]
                if saved > 1e-9 and share_held(tables, trial) >= least:
                    savings.append((saved, -service, -option))
        if not savings:
            return tuple(taken)
        _, service, option = max(savings)
        taken[-service] = -option
