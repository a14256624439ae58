"""The largest common share of very many services, by giving what a region has to others, again and again.

All are to have the same share, the target, and more than that is worth nothing. Steps (`share_kernel`) take
instances away and fill the region again, at prices that say what is scarce. A target that nearly all reach is
raised, first by much and then by little; who does not reach it is worth more from round to round. What served
the worst-served most is kept. The same steps then lower the rent of what was found (`lower_rent`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.solve.array_types import Floats
from atoll.solve.deadline import Deadline
from atoll.solve.rent.incumbent import Work
from atoll.solve.rent.items import RentModel
from atoll.solve.rent.many.share_tables import Chosen, ShareTables

_STEPS = 20
"""Steps of a round for each service."""
_STEP_WORK = 0.15
"""Work of a step, in simplex iterations."""
_RENT_STEP_WORK = 0.05
"""And where only the rent is lowered: mostly what is taken away comes back."""
_UP, _LEAST_UP = 0.25, 0.01
"""By which part a target is raised, first and last."""
_LAST, _LAST_UP = 0.25, 0.004
"""Part of the work and time kept for who is left behind, and what a target is raised by then."""
_LAST_TRIES = 12
"""Rounds after which a target is lowered then."""
_SLOWER = 3.0
"""How much less it is raised from a target that is not reached."""
_TRIES = 4
"""Rounds after which it counts as not reached, but for the smallest rise."""
_FEW = 0.02
"""Share of the services that may miss a target that is raised."""
_NEAR = 3e-3
"""Share of a target that may be missed for it to count as reached."""
_PATIENCE = 200
"""Rounds without more for the worst-served after which the search ends."""
_DEARER, _CALMER, _DEAREST = 1.2, 1.1, 5.0
"""What a service that is short is worth more after each round, and less when it is not; at most in all."""
_WORSE = 1e-4
"""Share of a service's mean worth that a step may lose."""
_EQUAL = 1e-9
_MUST = 1e6
"""What serving all is worth beside its rent, where it must be served."""
_RENT_WORSE = 1e-4
"""Share of the mean rent of a service that a step may lose."""
_RENT_PATIENCE = 20
"""Rounds without a lower rent after which lowering ends."""
_MIN_SAVED = 1e-4
"""Share of a rent that is a lower one."""


@dataclass(frozen=True)
class FoundShare:
    """Items of each service with their numbers, and the share of the demand that they serve."""

    chosen: list[dict[int, int]]
    share: Floats

    @property
    def merit(self) -> tuple[int, float]:
        """Order of what is found: how many are served, then who is served worst of them."""
        some = self.share[self.share > _EQUAL]
        return len(some), float(some.min(initial=1.0)) if len(some) else 0.0


def find_share(
    model: RentModel,
    row_price: Floats | None,
    first: float,
    work: Work,
    deadline: Deadline,
    seed: int,
) -> FoundShare:
    """Search from a share of `first` on, while there is work and time, until it gets no better.

    One round is made in any case. `row_price` are a relaxation's prices, else the market's are used.
    """
    tables = ShareTables(model, row_price, seed)
    standing, number = tables.standing, len(tables.worth)
    dearer = np.ones(number)
    target, best, idle = _Target(first), _found(tables), 0
    worse, steps = _WORSE * float(tables.worth.mean()), _STEPS * number
    last = _LAST * work.left, _LAST * deadline.left
    while True:
        standing.worth[:] = tables.worth * dearer
        tables.take_steps(steps, target.share, worse)
        work.charge(_STEP_WORK * steps)
        now = _found(tables)
        idle += 1
        if now.merit > best.merit:
            best, idle = now, 0
        late = idle >= _PATIENCE or work.left < last[0] or deadline.left < last[1]
        if late and not target.last:
            target.finish(best.merit[1])
            idle = 0
        elif idle >= _PATIENCE or best.merit >= (number, 1.0):
            return best
        if work.left <= 0.0 or deadline.is_over():
            return best
        short, before = standing.share < target.share - _EQUAL, target.share
        if target.follow(standing.share, best.merit[1]):
            dearer[:] = 1.0
            idle = 0 if target.share > before else idle
        else:
            dearer[short] = np.minimum(_DEAREST, dearer[short] * _DEARER)
            dearer[~short] = np.maximum(1.0, dearer[~short] / _CALMER)


def lower_rent(
    model: RentModel,
    row_price: Floats,
    chosen: Chosen,
    share: float,
    work: Work,
    deadline: Deadline,
    seed: int,
) -> list[dict[int, int]]:
    """Return items that serve a share of each service for less than `chosen`, at a relaxation's prices."""
    tables = ShareTables(model, row_price, seed, chosen, rented=True)
    share = min(share, float(tables.standing.share.min(initial=1.0)))
    number, best, found, idle = len(tables.worth), tables.rent, tables.chosen(), 0
    tables.standing.worth[:] = _MUST * best * tables.worth
    worse, steps = _RENT_WORSE * best / max(1, number), _STEPS * number
    while work.left > 0.0 and not deadline.is_over() and idle < _RENT_PATIENCE:
        tables.take_steps(steps, share, worse)
        work.charge(_RENT_STEP_WORK * steps)
        idle += 1
        if tables.standing.share.min(initial=1.0) < share - _EQUAL:
            continue
        rent = tables.rent
        if rent < best * (1.0 - _MIN_SAVED):
            idle = 0
        if rent < best:
            best, found = rent, tables.chosen()
    return found


def _found(tables: ShareTables) -> FoundShare:
    return FoundShare(tables.chosen(), tables.standing.share.copy())


class _Target:
    """The share that all are to have next.

    First it is raised while nearly all reach it, to where a few of the services are left behind, and in the
    end brought down to where these come up to it.
    """

    def __init__(self, share: float) -> None:
        self.share, self.last = share, False
        self._reached, self._up, self._tries = 0.0, _UP, 0

    def finish(self, best: float) -> None:
        """From now on what counts is who is served worst: until now so much."""
        self.last, self._up, self._tries = True, _LAST_UP, 0
        self.share = (best + self.share) / 2.0

    def follow(self, share: Floats, best: float) -> bool:
        """Choose the next one by the shares that were reached at this one; return whether it is another."""
        before = self.share
        self._tries += 1
        behind = np.count_nonzero(share < before * (1.0 - (0.0 if self.last else _NEAR)) - _EQUAL)
        if behind <= (0.0 if self.last else _FEW * len(share)):
            self._reached, self._tries = before, 0
            self.share = min(1.0, before * (1.0 + self._up))
        elif self._tries >= _TRIES and self._up > _LEAST_UP:
            self._up, self._tries = max(_LEAST_UP, self._up / _SLOWER), 0
            self.share = self._reached * (1.0 + self._up) if self._reached else before / 2.0
        elif self.last and self._tries >= _LAST_TRIES:
            self._tries = 0
            self.share = (best + before) / 2.0
        return self.share != before
