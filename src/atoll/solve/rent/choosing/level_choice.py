"""Levels of ways with the allocation that they cost least with, as plain arrays: `allocate` with levels free.

Ways that nothing on offer can serve are closed, as long as others may answer for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from atoll.core.errors import UsageError
from atoll.solve.deadline import Deadline
from atoll.solve.rent.allocation import KEEP, OPTIMAL, WORK, allocated, is_servable, rent_model
from atoll.solve.rent.allocation_types import (
    Allocation,
    AllocationLimits,
    Log,
    RunningColumn,
    ServiceDemand,
    Statistics,
    Supply,
)
from atoll.solve.rent.choosing.level_rows import ChoiceRow, LevelRows
from atoll.solve.rent.choosing.search import LevelOutcome, LevelSearch
from atoll.solve.rent.incumbent import Incumbent, Target, Work
from atoll.solve.rent.items import RentModel, Solution
from atoll.solve.rent.rental_program import cheapest_supply


@dataclass(frozen=True)
class LevelAllocation:
    """Levels by service number, with the allocation that they were found with (None: not all is served).

    `bound` is what no levels and no allocation cost less than, USD per hour; `error_usd` is by choice what
    one more unit of mean error saves, USD per hour. `served` is the common fraction of all demand that was
    found where not all can be served.
    """

    levels: dict[int, float]
    bound: float
    objective: float
    allocation: Allocation | None
    error_usd: tuple[float, ...]
    served: float
    cut_short: bool


def choose_levels(
    services: Sequence[ServiceDemand],
    supply: Supply,
    limits: AllocationLimits,
    rows: LevelRows,
    *,
    init_penalty: float = 0.0,
    running: Sequence[RunningColumn] = (),
    deadline_s: float = 300.0,
    work: float = WORK,
    gap: float = 1e-3,
    seed: int = 0,
    log: Log | None = None,
) -> LevelAllocation:
    """Return the levels and the allocation that cost least together, of those found with so much `work`.

    Arguments are those of `allocate`; services that `rows` name are ways, at levels, the others at 1.
    """
    # A hair closer than asked, so that rounding cannot leave it a hair away.
    return _Chooser(services, supply, limits, rows, init_penalty, running, seed).run(
        Incumbent(Target(0.99 * gap), Deadline(deadline_s), Work(work), log), gap
    )


@dataclass
class _Chooser:
    services: Sequence[ServiceDemand]
    supply: Supply
    limits: AllocationLimits
    rows: LevelRows
    init_penalty: float
    running: Sequence[RunningColumn]
    seed: int
    fixed: dict[int, float] = field(default_factory=dict)
    """Levels of ways that are not chosen: nothing can serve them, or nothing is asked of them."""

    def __post_init__(self) -> None:
        asked = [m for m, s in enumerate(self.services) if any(r.demand > 0.0 for r in s.roles)]
        model = self._model(asked)
        # Ways of one service, which have its name, stand in as many regions together.
        named = [self.services[m].name for m in asked]
        spread = [1 if named.count(name) > 1 else self.limits.spread for name in named]
        useful = {m for i, m in enumerate(asked) if is_servable(model, i, spread[i])}
        # Nothing is served on spot by a service that nothing serves off it.
        useful -= {
            on for row in self.rows.by_choice for off, on, _ in row.spot if off not in useful
        }
        self.lost = any(m not in useful for m in asked if m not in self.rows.ways)
        rows = self.rows.without(way for way in self.rows.ways if way not in useful)
        dropped: set[int] = set()
        for group in rows.groups:
            if rows.least({}, group) is not None:
                continue
            # Nobody can answer: as much as can be by ways that are of use, with the fewest errors.
            dropped |= set(group.members)
            cost = dict.fromkeys((way for way in group.ways if way not in useful), 1e3)
            levels = self.rows.least(cost, group)
            if levels is None:
                names = " and ".join(self.rows.by_choice[c].name for c in group.members)
                raise UsageError(
                    f"no mix of models meets what {names} ask for together",
                    hint="allow more error (max_error) or lower min_share",
                    field="max_error",
                )
            self.fixed |= levels
            self.lost = self.lost or bool(set(group.ways) & set(asked))
        self.kept = [c for c in range(len(rows.by_choice)) if c not in dropped]
        self.active = sorted(useful)
        number = {m: i for i, m in enumerate(self.active)}
        fraction = {number[way]: level for way, level in self.fixed.items() if way in number}
        # Ways fixed at nothing need no instances.
        self.active = [m for i, m in enumerate(self.active) if fraction.get(i, 1.0) > 1e-9]
        self.number = {m: i for i, m in enumerate(self.active)}
        self.model = self._model(self.active)
        self.inner = LevelRows(tuple(self._inner_row(rows.by_choice[c]) for c in self.kept))

    def _inner_row(self, row: ChoiceRow) -> ChoiceRow:
        """A choice between the services that are left; who is not is never chosen."""
        number = self.number
        some = [(number[w], e) for w, e in zip(row.ways, row.errors, strict=True) if w in number]
        return replace(
            row,
            ways=tuple(way for way, _ in some),
            errors=tuple(error for _, error in some),
            floors=tuple(
                (tuple(number[w] for w in ways if w in number), floor) for ways, floor in row.floors
            ),
            spot=tuple(
                (number[off], number[on], share)
                for off, on, share in row.spot
                # Where nothing is on spot there is nothing to limit.
                if off in number and on in number
            ),
        )

    def _model(self, active: Sequence[int]) -> RentModel:
        fraction = {m: max(1e-9, self.fixed.get(m, 1.0)) for m in active}
        return rent_model(
            self.services, self.supply, self.limits, self.running, self.init_penalty, fraction
        )

    def run(self, standing: Incumbent, gap: float) -> LevelAllocation:
        found = LevelSearch(self.model, self.inner, standing, self.seed).run()
        # Ways that were dropped are at 0; what is fixed, and then what was found, goes over that.
        levels = dict.fromkeys(self.rows.ways, 0.0)
        levels |= self.fixed
        levels |= {self.active[way]: level for way, level in found.levels.items()}
        error_usd = [0.0] * len(self.rows.by_choice)
        for at, c in enumerate(self.kept):
            error_usd[c] = found.error_usd.get(at, 0.0)
        if found.solution is None or self.lost:
            served = 0.0 if self.lost else found.served
            late = standing.deadline.missed
            return LevelAllocation(levels, 0.0, np.inf, None, tuple(error_usd), served, late)
        answer = self._answer(found, found.solution, standing, gap)
        return LevelAllocation(
            levels,
            answer.bound,
            answer.objective,
            answer,
            tuple(error_usd),
            1.0,
            answer.cut_short,
        )

    def _answer(
        self, found: LevelOutcome, solution: Solution, standing: Incumbent, gap: float
    ) -> Allocation:
        model = self.model
        # What must survive stands on the machines that it was given.
        if self.limits.losses is None:
            # What answers nothing need not stand, unless it is in a region more that its service must be in.
            items = tuple(
                {} if found.levels.get(m, 1.0) <= 0.0 and self.limits.spread == 1 else number
                for m, number in enumerate(solution.items)
            )
            solution = cheapest_supply(model, items, self.seed) or solution
        usd = float(self.supply.usd @ solution.machines)
        per_gpu = self.init_penalty * self.supply.usd / self.supply.gpus
        init = sum(float(per_gpu[k]) * gpus * n for (k, gpus), n in solution.count_slices().items())
        hair = KEEP if any(some.running for some in model.items) else 0.0
        objective = usd + init
        bound = max(0.0, min(standing.bound / (1.0 + hair), objective))
        proven = 0.0 if objective <= 0.0 else (objective - bound) / objective
        chosen = tuple(
            replace(allocated(model, m, i, item, count), places=solution.places.get((i, item), ()))
            for i, m in enumerate(self.active)
            for item, count in sorted(solution.items[i].items())
        )
        work = standing.work
        return Allocation(
            status="optimal" if proven <= OPTIMAL else "feasible",
            instances=chosen,
            machines=solution.machines,
            slices=solution.count_slices(),
            usd_per_hour=usd,
            init_usd=init,
            objective=objective,
            bound=bound,
            gap=proven,
            served=np.ones(len(self.services)),
            fraction_bound=1.0,
            demand_usd=np.zeros(len(self.services)),
            node_usd=np.zeros((model.regions, len(self.supply.kinds))),
            binding=(),
            cut_short=standing.deadline.missed
            or (proven > gap and standing.deadline.limit() <= 0.0),
            statistics=Statistics(
                rounds=work.rounds,
                mips=work.mips,
                nodes=work.nodes,
                iterations=work.iterations,
                pairs=sum(len(some) for some in model.items),
            ),
        )
