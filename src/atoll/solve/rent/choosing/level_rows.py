"""Conditions on the levels of ways: every choice is answered, errs little enough, and keeps its floors.

Levels y_w of the ways w that choices name, numbered as the services of the problem are:

    sum over a choice's variants of y           = 1
    sum over them of error times y             <= max_error
    sum over those of a model of y             >= its least share
    y of a service on spot                     <= the share of spot times what it serves in all
    0 <= y <= 1

Choices that name the same way are linked; `LevelRows.groups` are those that are, together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from atoll.plan.problem import Problem
from atoll.solve.lp import LinearProgram, Sparse

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NONE = 1e-9
"""Rest of a level that is rounding."""
_NO_RANGE = 1e-7
"""Levels that are so close to nothing, or to all, whatever is chosen, are there."""
MIN = 1e-6
"""Levels below this are not worth an instance: they are taken for nothing where conditions allow it."""


@dataclass(frozen=True)
class ChoiceRow:
    """One choice: its ways by number, how often each errs, and the floors as (ways, least share).

    `spot` are services whose requests are served off spot or on it, as (way off, way on, largest share on).
    """

    name: str
    ways: tuple[int, ...]
    errors: tuple[float, ...]
    max_error: float | None = None
    floors: tuple[tuple[tuple[int, ...], float], ...] = ()
    spot: tuple[tuple[int, int, float], ...] = ()

    def error(self, levels: Mapping[int, float]) -> float:
        """Return the mean error at these levels."""
        return sum(levels[way] * e for way, e in zip(self.ways, self.errors, strict=True))


@dataclass(frozen=True)
class LevelGroup:
    """Choices that share ways, by number, and all the ways that they name."""

    members: tuple[int, ...]
    ways: tuple[int, ...]


@dataclass(frozen=True)
class LevelRows:
    """The conditions on levels; ways in `closed` are at 0."""

    by_choice: tuple[ChoiceRow, ...]
    closed: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def of(cls, problem: Problem) -> LevelRows:
        """Return the conditions of a problem's choices; ways are numbered as its services."""
        number = {service.name: m for m, service in enumerate(problem.services)}
        rows = []
        for choice in problem.choices:
            floors = []
            for model, min_share in choice.min_share.items():
                own = tuple(number[v.service] for v in choice.variants if v.model == model)
                if min_share > 0.0:
                    floors.append((own, min_share))
            rows.append(
                ChoiceRow(
                    choice.name,
                    tuple(number[v.service] for v in choice.variants),
                    tuple(v.error for v in choice.variants),
                    choice.max_error,
                    tuple(floors),
                )
            )
        return cls(tuple(rows))

    @cached_property
    def ways(self) -> tuple[int, ...]:
        """Every way that a choice names, in order."""
        return tuple(sorted({way for choice in self.by_choice for way in choice.ways}))

    @cached_property
    def groups(self) -> tuple[LevelGroup, ...]:
        """Choices that are linked by ways, together; the order is that of their first choice."""
        group = list(range(len(self.by_choice)))
        first: dict[int, int] = {}
        for c, choice in enumerate(self.by_choice):
            for way in choice.ways:
                other = group[first.setdefault(way, c)]
                group = [other if g == group[c] else g for g in group]
        members: dict[int, list[int]] = {}
        for c, g in enumerate(group):
            members.setdefault(g, []).append(c)
        return tuple(
            LevelGroup(
                tuple(some), tuple(sorted({way for c in some for way in self.by_choice[c].ways}))
            )
            for some in members.values()
        )

    @cached_property
    def ranges(self) -> dict[int, tuple[float, float]]:
        """The least and the largest level of each way that the conditions allow."""
        found = {}
        for group in self.groups:
            for way in group.ways:
                ends = []
                for sign in (1.0, -1.0):
                    levels = self.least({way: sign}, group)
                    ends.append(0.0 if levels is None else levels[way])
                low, high = max(0.0, ends[0] - NONE), min(1.0, ends[1] + NONE)
                # Where the error allowed is the least possible, ways are at 0 or 1. Ranges of rounding alone
                # leave an integer program whose solutions are all within its tolerance of none.
                if high < _NO_RANGE:
                    low = high = 0.0
                elif low > 1.0 - _NO_RANGE:
                    low = high = 1.0
                found[way] = (low, high)
        return found

    @cached_property
    def possible(self) -> bool:
        """Whether any levels meet the conditions."""
        return self.least({}) is not None

    def least(
        self,
        cost: Mapping[int, float],
        group: LevelGroup | None = None,
        most: Mapping[int, float] | None = None,
    ) -> dict[int, float] | None:
        """Return the levels of the least cost, none above `most` of its way; None if there are none."""
        choices = range(len(self.by_choice)) if group is None else group.members
        ways = self.ways if group is None else group.ways
        place = {way: i for i, way in enumerate(ways)}
        lp = LinearProgram()
        nothing = np.zeros(0, np.int64)
        upper = [0.0 if way in self.closed else 1.0 for way in ways]
        if most is not None:
            upper = [min(u, max(0.0, most.get(w, 1.0))) for u, w in zip(upper, ways, strict=True)]
        lp.add_columns(
            np.array([cost.get(way, 0.0) for way in ways]),
            np.zeros(len(ways)),
            np.array(upper),
            Sparse.of(nothing, nothing, np.zeros(0), len(ways)),
        )
        for lower, high, terms in self.list_rows(choices):
            at = np.array([place[way] for way, _ in terms], np.int64)
            value = np.array([v for _, v in terms])
            entries = Sparse.of(np.zeros(len(at), np.int64), at, value, 1)
            lp.add_rows(np.array([lower]), np.array([high]), entries)
        found = lp.solve()
        if found.status != "optimal":
            return None
        return {way: min(1.0, max(0.0, float(found.values[i]))) for way, i in place.items()}

    def list_rows(
        self, choices: Iterable[int]
    ) -> list[tuple[float, float, tuple[tuple[int, float], ...]]]:
        """Return the conditions as (least, most, coefficients by way)."""
        rows: list[tuple[float, float, tuple[tuple[int, float], ...]]] = []
        for c in choices:
            choice = self.by_choice[c]
            rows.append((1.0, 1.0, tuple((way, 1.0) for way in choice.ways)))
            if choice.max_error is not None:
                terms = tuple(zip(choice.ways, choice.errors, strict=True))
                rows.append((-np.inf, choice.max_error, terms))
            for own, floor in choice.floors:
                rows.append((floor, np.inf, tuple((way, 1.0) for way in own)))
            for off, on, share in choice.spot:
                rows.append((0.0, np.inf, ((off, share), (on, share - 1.0))))
        return rows

    def hold(self, levels: Mapping[int, float], tolerance: float = 1e-7) -> bool:
        """Return whether levels meet the conditions."""
        for lower, upper, terms in self.list_rows(range(len(self.by_choice))):
            value = sum(levels.get(way, 0.0) * coefficient for way, coefficient in terms)
            if not lower - tolerance <= value <= upper + tolerance:
                return False
        return all(-tolerance <= level <= 1.0 + tolerance for level in levels.values())

    def without(self, ways: Iterable[int]) -> LevelRows:
        """Return the conditions with more ways closed."""
        return LevelRows(self.by_choice, self.closed | frozenset(ways))

    def settle(self, max_levels: Mapping[int, float]) -> dict[int, float] | None:
        """Return the levels that err least of those that capacities allow; None if there are none.

        `max_levels` is the share of its demand that each way can carry. Of what costs the same, the best
        answers are taken. Levels too low to matter are left out where that is possible.
        """
        cost: dict[int, float] = {}
        for choice in self.by_choice:
            for way, error in zip(choice.ways, choice.errors, strict=True):
                # Of ways that err alike the first, so that equal problems get equal levels.
                cost[way] = cost.get(way, 0.0) + error + 1e-7 * way
        levels = self.least(cost, most=max_levels)
        if levels is None:
            return None
        small = {way for way, level in levels.items() if 0.0 < level < MIN}
        if small:
            rest = self.without(small).least(cost, most=max_levels)
            levels = levels if rest is None else rest
        return {way: 0.0 if level <= NONE else level for way, level in levels.items()}
