"""The cheapest option for each service such that all hold together in enough scenarios."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_COMBINATIONS = 4_000
"""Up to so many combinations all of them are looked at."""
_STARTS = 3
"""Combinations of equally sure options that a search starts from, where there are more."""
_CENT = 1e-9
_Rank = tuple[float, float, float, tuple[int, ...]]


@dataclass(frozen=True)
class RentableMachines:
    """Machines that can be had, by offer: USD/h that one is expected to cost, its GPUs, and how many."""

    usd: NDArray[np.float64]
    gpus: NDArray[np.float64]
    available: NDArray[np.float64]


@dataclass(frozen=True)
class OptionTable:
    """Options of one service: in which scenarios each holds, and the machines it takes, by offer.

    `holds` is (options, scenarios), `whole` are machines and `cut` GPUs of machines that may be shared, both
    (options, offers).
    """

    holds: NDArray[np.bool_]
    whole: NDArray[np.float64]
    cut: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.holds)

    def pick(self, options: Sequence[int]) -> OptionTable:
        """Return the table of some of the options."""
        at = list(options)
        return OptionTable(self.holds[at], self.whole[at], self.cut[at])


def choose_options(
    tables: Sequence[OptionTable], machines: RentableMachines, target: float
) -> tuple[int, ...]:
    """Return which option to take of each service: the cheapest that hold together in a share of scenarios.

    Where none do it is those that hold together most often, and of those the cheapest. With few combinations
    that is exact. With many, it starts from options that are all as sure, and from the cheapest bettered one
    by one, by share won for a dollar, and makes them cheaper again as far as that goes. Machines that are cut
    are paid whole, and may be shared by services.
    """
    # Options that use less of what is scarce must stay, even if they are dearer.
    scarce = _scarce(tables, machines)
    useful = [_useful(table, machines, scarce) for table in tables]
    few = [table.pick(at) for table, at in zip(tables, useful, strict=True)]
    search = _OptionSearch(few, machines, target)
    fits = math.prod(len(table) for table in few) <= _MAX_COMBINATIONS
    taken = search.look_at_all() if fits else search.search()
    return tuple(at[option] for at, option in zip(useful, taken, strict=True))


def share_held(tables: Sequence[OptionTable], taken: Sequence[int]) -> float:
    """Return the share of scenarios in which the options taken hold together."""
    held = np.stack([table.holds[at] for table, at in zip(tables, taken, strict=True)])
    return float(np.all(held, axis=0).mean())


def _scarce(tables: Sequence[OptionTable], machines: RentableMachines) -> NDArray[np.bool_]:
    """Offers of which some combination may take more than there are."""
    max_machines = sum((t.whole + np.ceil(t.cut / machines.gpus)).max(axis=0) for t in tables)
    return np.asarray(max_machines > machines.available)


def _useful(table: OptionTable, machines: RentableMachines, scarce: NDArray[np.bool_]) -> list[int]:
    """Options of which no other surely costs no more, holds wherever they do, and is as easily had."""
    max_usd = (table.whole + np.ceil(table.cut / machines.gpus)) @ machines.usd
    min_usd = (table.whole + table.cut / machines.gpus) @ machines.usd
    # Cheap and sure ones first: an option can only be made useless by one that is kept before it.
    order = sorted(range(len(table)), key=lambda at: (max_usd[at], -table.holds[at].sum(), at))
    useful: list[int] = []
    for option in order:
        if not any(
            # The dearest that the one can be against the least that the other can: cut machines may be
            # shared.
            max_usd[other] <= min_usd[option] + _CENT
            and np.all(table.holds[other] >= table.holds[option])
            and np.all(table.whole[other] <= table.whole[option], where=scarce)
            and np.all(table.cut[other] <= table.cut[option], where=scarce)
            for other in useful
        ):
            useful.append(option)
    return useful


class _OptionSearch:
    def __init__(
        self, tables: Sequence[OptionTable], machines: RentableMachines, target: float
    ) -> None:
        self.tables, self.machines, self.target = tables, machines, target

    def share(self, taken: Sequence[int]) -> float:
        return share_held(self.tables, taken)

    def usd(self, taken: Sequence[int]) -> float:
        """Cost of the machines per hour; infinite where there are not so many."""
        pairs = list(zip(self.tables, taken, strict=True))
        cut = sum(table.cut[at] for table, at in pairs)
        whole = sum(table.whole[at] for table, at in pairs)
        # A machine that is cut is paid whole; rounding must not ask for one more.
        needed = whole + np.ceil(cut / self.machines.gpus - _CENT)
        if np.any(needed > self.machines.available):
            return math.inf
        return float(needed @ self.machines.usd)

    def rank(self, taken: tuple[int, ...]) -> _Rank:
        """Less is better: what is missing of the target, then dollars, then scenarios in which it fails."""
        share, usd = self.share(taken), self.usd(taken)
        # Not to be had at all is worse than any share that is missing.
        missing = max(0.0, self.target - share) if usd < math.inf else 2.0
        return (missing, round(usd, 9), -share, taken)

    def look_at_all(self) -> tuple[int, ...]:
        combinations = product(*(range(len(table)) for table in self.tables))
        return min(self.rank(taken) for taken in combinations)[3]

    def changes(self, taken: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
        for service, table in enumerate(self.tables):
            for option in range(len(table)):
                if option != taken[service]:
                    yield (*taken[:service], option, *taken[service + 1 :])

    def search(self) -> tuple[int, ...]:
        """Start from services that are all about as sure, and from the cheapest; make each cheaper."""
        starts = [*self.equally_sure(), self.climb()]
        return min(self.rank(self.descend(start)) for start in starts)[3]

    def equally_sure(self) -> list[tuple[int, ...]]:
        """The cheapest options that each hold in a share of scenarios: the least shares that do, all told."""
        shares = [table.holds.mean(axis=1) for table in self.tables]
        usd = [(t.whole + t.cut / self.machines.gpus) @ self.machines.usd for t in self.tables]
        found: list[tuple[int, ...]] = []
        for level in sorted({float(x) for some in shares for x in some}):
            taken = tuple(
                min(
                    range(len(some)),
                    key=lambda at: (max(0.0, level - some[at]), cost[at]),
                )
                for some, cost in zip(shares, usd, strict=True)
            )
            if self.share(taken) >= self.target and self.usd(taken) < math.inf:
                found.append(taken)
                if len(found) == _STARTS:
                    break
        return found

    def climb(self) -> tuple[int, ...]:
        taken: tuple[int, ...] = (0,) * len(self.tables)
        while (share := self.share(taken)) < self.target:
            usd = self.usd(taken)
            worth: list[tuple[float, float, tuple[int, ...]]] = []
            for other in self.changes(taken):
                won, paid = self.share(other) - share, self.usd(other) - usd
                if won > 0.0 and paid < math.inf:
                    # More than the target is worth nothing.
                    gain = min(won, self.target - share)
                    worth.append((gain / max(paid, _CENT), won, other))
            if not worth:
                # One more of anything wins nothing: all of the surest together may.
                surest = tuple(int(np.argmax(t.holds.mean(axis=1))) for t in self.tables)
                if self.share(surest) <= share or self.usd(surest) == math.inf:
                    break
                taken = surest
                continue
            taken = max(worth)[2]
        return taken

    def descend(self, taken: tuple[int, ...]) -> tuple[int, ...]:
        """Change one option for a cheaper one as long as as many scenarios hold as must."""
        # A start below the target must at least not get worse.
        min_share = min(self.target, self.share(taken))
        while True:
            usd = self.usd(taken)
            cheaper = [
                (self.usd(other), other)
                for other in self.changes(taken)
                if self.share(other) >= min_share
            ]
            if not cheaper or min(cheaper)[0] >= usd - _CENT:
                return taken
            taken = min(cheaper)[1]
