"""The cheapest allocation that is still enough after a loss: one set of rows for each scenario.

A scenario is the loss of a unit with all that stands on it, or of several at once. In each, requests take
ways of their own over what is left; a share `keep` of the demand must find one.

    zones, regions    everything there is lost, nothing else: which is known beforehand
    whole machines    each has a node of one instance. y_i says whether item i is in use, and then one of it
                      may be lost. z_{m,p,g} >= share_i y_i is the most that one loss takes of a phase in a
                      region, so instances that are alike are not told apart
    machines cut      slices that share one die together, so machines j of an offer are told apart:
                      x_{i,k,j} nodes of item i on machine j of offer k, and the machine takes
                      sum_i share_i x_{i,k,j} of each phase with it
    k at once         z >= k t + sum_u max(0, loss_u - t): the k largest of all units u together

Rows as in `instance_master`, once for each scenario, over what is left. This is exact for the loss of one
machine where nodes on cut machines are instances of their own. Else there are two programs: one of which
every plan that survives is a solution, for the bound (a node of several counts for its part), and one whose
solutions all survive (`safe`: every node counts for all of its instance; of several losses at once each phase
and region has its worst).

Where models are chosen, or a share on spot, ways have levels (`choosing.level_rows`): a scenario keeps the
share `keep` of each model's level. Ways of one service, on spot and off it, stand in for each other there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.lp import Sparse
from atoll.solve.rent.allocation_types import BOTH, DECODE, PREFILL, LossLimits, NodePlace
from atoll.solve.rent.choosing.level_rows import LevelRows
from atoll.solve.rent.choosing.masters import LevelInstanceMaster
from atoll.solve.rent.incumbent import Incumbent, MipLimits, Work
from atoll.solve.rent.items import MANY, RentModel, Solution, available_nodes
from atoll.solve.rent.mix_master import Decomposition
from atoll.solve.rent.relaxation import market_prices, price_of_all, slacks
from atoll.solve.rent.rent_search import SearchOutcome, lowest, oracles_of

_MACHINES = 8
"""Machines of an offer that are told apart, at least where so many are on offer."""
_STAGES = (60, 240, 1000)
"""Items of all services that are solved over, one number after the other, before all of them."""
SMALL_SURVIVING = 240
"""Items up to which no prices are sought first: the program over all of them is solved at once."""
_MAX_COLUMNS = 30_000
"""Columns of a program beyond which it is not begun."""
_TIE = 1e-7
"""Share of the dearest machine's price that an instance counts with, beside its rent."""
_ROUNDING = 1e-9
_TOLERANCE = 1e-7
"""Share of the demand that a scenario may miss by rounding: well below what a plan is checked to."""

_NO_LEVELS = LevelRows(())
"""All services are asked for all of their demand."""

Terms = dict[int, float]
"""A linear expression: coefficients by column."""
Group = tuple[int, int, int]
"""A phase of a service in a region: (service, phase, region); both together are in region 0, for nothing has
to be paired there."""
Slot = tuple[int, int]
"""A machine that is told apart: (offer, number)."""


@dataclass
class _Unit:
    """What the loss of one machine takes of each group."""

    lost: dict[Group, Terms] = field(default_factory=lambda: defaultdict(dict))


class SurvivingMaster(LevelInstanceMaster):
    """The program over instances, at levels that are free where `rows` has any, with rows for every loss.

    `machines` says by offer that is cut how many of its machines are told apart; there may be more of those
    in `rest`. With `max_left` machines are free of charge and the share that scenarios leave is as large as
    can be.
    """

    def __init__(
        self,
        model: RentModel,
        losses: LossLimits,
        let_in: Sequence[Ints],
        work: Work,
        seed: int,
        *,
        safe: bool,
        machines: Mapping[int, int],
        rest: frozenset[int] = frozenset(),
        max_left: bool = False,
        rows: LevelRows = _NO_LEVELS,
    ) -> None:
        super().__init__(model, "cost", rows, let_in, work, seed)
        self.losses, self.safe = losses, safe
        # Of equally dear allocations the one of fewest instances; what that adds is taken off the bound.
        own = np.arange(self._first, self.lp.columns)
        each = _TIE * float(model.supply.usd.max(initial=0.0))
        self.lp.set_costs(own, np.full(len(own), each))
        self._tie = each * self._max_instances()
        # Of levels that cost as much those that err least: that takes from the objective, so from the bound.
        for choice in rows.by_choice:
            for way, error in zip(choice.ways, choice.errors, strict=True):
                self.levels.add_cost(way, each * error)
        self._machines, self._rest = machines, frozenset() if safe else rest
        self._last = self.lp.columns
        self._whole: list[int] = list(range(self._first, self._last))
        self._covered = [m for m, s in enumerate(model.services) if losses.covers(s.name)]
        # Shares of ways at levels are of the same demand: those of one service are kept together.
        self._kin: dict[int, int] = {}
        first: dict[str, int] = {}
        for m, service in enumerate(model.services):
            self._kin[m] = first.setdefault(service.name, m) if m in rows.ways else m
        self._slots: dict[Slot, int] = {}
        self._nodes: dict[tuple[int, int, int, int, Slot], int] = {}
        """Columns x by (service, item, row, place in `slices`, machine)."""
        if max_left:
            self._tie = 0.0
            self.lp.set_costs(np.arange(self.lp.columns), np.zeros(self.lp.columns))
        # The share of what is to be kept that scenarios leave out: none, unless the least of it is sought.
        self._short = self._column(float(max_left), cost=1.0)
        for gone in losses.places:
            self._add_scenario({}, frozenset(gone))
        if losses.machines:
            self._add_machine_losses()

    # -- machines -------------------------------------------------------------------------------------

    def _add_machine_losses(self) -> None:
        number = self.losses.machines
        self._add_slots()
        cut = self._cut_units()
        single = self._single_units(number)
        if number == 1:
            for unit in cut.values():
                self._add_scenario(unit.lost, frozenset())
            for group, some in single.items():
                most = self._column()
                for each in some:
                    self._row({most: 1.0, **{c: -v for c, v in each.items()}}, 0.0)
                self._add_scenario({group: {most: 1.0}}, frozenset())
            return
        worst: dict[Group, Terms] = {}
        for group in sorted({*single, *(g for unit in cut.values() for g in unit.lost)}):
            losses = [unit.lost[group] for unit in cut.values() if group in unit.lost]
            worst[group] = self._largest([*losses, *single.get(group, [])], number)
        if self.safe:
            self._add_scenario(worst, frozenset())
            return
        for group, terms in worst.items():
            self._add_scenario({group: terms}, frozenset())

    def _largest(self, losses: Iterable[Terms], number: int) -> Terms:
        """Return an expression that is the sum of the `number` largest losses at least."""
        level = self._column()
        total: Terms = {level: float(number)}
        for terms in losses:
            above = self._column()
            self._row({above: 1.0, level: 1.0, **{c: -v for c, v in terms.items()}}, 0.0)
            total[above] = 1.0
        return total

    def _add_slots(self) -> None:
        """Columns for machines that are told apart, and for the nodes on each."""
        supply = self.model.supply
        number = len(supply.usd)
        cut: dict[int, list[int]] = defaultdict(list)
        for at, (k, gpus, _) in enumerate(self.slices):
            if gpus < supply.gpus[k]:
                cut[k].append(at)
        self._cut = cut
        sources: dict[int, list[int]] = defaultdict(list)
        for at, (k, _, kind) in enumerate(self.slices):
            sources[self.model.cell(k, kind)].append(at)
        rented: dict[int, Terms] = {}
        for k in sorted(cut):
            columns = [self._column(1.0, whole=True) for _ in range(self._machines[k])]
            self._slots |= {(k, j): column for j, column in enumerate(columns)}
            whole = [at for at, s in enumerate(self.slices) if s[0] == k and s[1] == supply.gpus[k]]
            # Machines that are cut, those taken whole and those that are kept whole are all that are rented.
            rented[k] = {
                k: 1.0,
                **{number + at: -1.0 for at in whole},
                **dict.fromkeys(columns, -1.0),
            }
        taken: dict[int, Terms] = defaultdict(dict)
        held: dict[Slot, Terms] = defaultdict(dict)
        for m in range(len(self.model.services)):
            self._add_nodes(m, sources, taken, held, rented)
        for k, places in cut.items():
            self._row(rented[k], 0.0)
            for at in places:
                terms = {number + at: 1.0, **{c: -v for c, v in taken[at].items()}}
                # Beyond the machines that are told apart there may be others, but for what must be safe.
                self._row(terms, 0.0, np.inf if k in self._rest else 0.0)
            for j in range(self._machines[k]):
                own = {c: -v for c, v in held[k, j].items()}
                self._row({**own, self._slots[k, j]: float(supply.gpus[k])}, 0.0)
                if j:
                    # Machines that are alike are filled in order.
                    more = held[k, j - 1]
                    self._row(_add(more, held[k, j], -1.0), 0.0)

    def _add_nodes(
        self,
        m: int,
        sources: Mapping[int, list[int]],
        taken: dict[int, Terms],
        held: dict[Slot, Terms],
        rented: dict[int, Terms],
    ) -> None:
        """Columns for the nodes of a service's items on machines that are told apart."""
        items, some, supply = self.model.items[m], self._let_in[m], self.model.supply
        place, rows, amounts = items.list_use(some)
        for at, row, amount in zip(place.tolist(), rows.tolist(), amounts.tolist(), strict=True):
            item, column = int(some[at]), self._offset(m) + at
            terms: Terms = {column: float(amount)}
            loose = False
            if row >= self.model.cells:
                k = row - self.model.cells
                if k not in self._cut:
                    continue
                if amount % supply.gpus[k] == 0:  # it holds machines of its own
                    rented[k][column] = -float(amount // supply.gpus[k])
                    continue
                if self.safe:
                    # Where it stands, it may stand beside others: it is started anew, where that is known.
                    self.lp.set_bounds(np.array([column]), np.zeros(1), np.zeros(1))
                    continue
                loose = k in self._rest
                for j in range(self._machines[k]):
                    x = self._column(float(supply.gpus[k]))
                    self._nodes[m, item, row, -1, (k, j)] = x
                    terms[x] = -1.0
                    held[k, j][x] = 1.0
            else:
                for source in sources[row]:
                    k, gpus, _ = self.slices[source]
                    if gpus == supply.gpus[k]:
                        loose = True
                        continue
                    loose |= k in self._rest
                    for j in range(self._machines[k]):
                        x = self._column(float(supply.gpus[k] // gpus), whole=True)
                        self._nodes[m, item, row, source, (k, j)] = x
                        terms[x] = -1.0
                        taken[source][x] = 1.0
                        held[k, j][x] = float(gpus)
            if len(terms) > 1:
                self._row(terms, 0.0, np.inf if loose else 0.0)

    def _cut_units(self) -> dict[Slot, _Unit]:
        """What each machine that is told apart takes with it."""
        units: dict[Slot, _Unit] = defaultdict(_Unit)
        rows_of: dict[tuple[int, int], set[int]] = defaultdict(set)
        for m, item, row, _, _ in self._nodes:
            rows_of[m, item].add(row)
        for (m, item, row, _, slot), x in self._nodes.items():
            if m not in self._covered or slot[0] in self.losses.spared:
                continue
            items = self.model.items[m]
            part = 1.0
            if not self.safe:
                # A node of several of an instance: for its part, which is never too much.
                part = 1.0 / (self._amount(m, item, row) * len(rows_of[m, item]))
            group = self._group(m, int(items.phase[item]), int(items.region[item]))
            units[slot].lost[group][x] = part * float(items.share[item])
        return dict(units)

    def _amount(self, m: int, item: int, row: int) -> int:
        place, rows, amounts = self.model.items[m].list_use(np.array([item]))
        del place
        return int(amounts[rows == row][0])

    def _single_units(self, number: int) -> dict[Group, list[Terms]]:
        """What the loss of one instance takes, of items that may have a machine to themselves."""
        model, nodes = self.model, available_nodes(self.model.supply).ravel()
        cells = np.concatenate([nodes, model.supply.gpus * model.supply.available])
        alone = self._stand_alone()
        largest = 1.0 + number * self._largest_loss()
        found: dict[Group, list[Terms]] = defaultdict(list)
        for m in self._covered:
            items, some = model.items[m], self._let_in[m]
            place, rows, amounts = items.list_use(some)
            most = np.full(len(some), float(MANY))
            np.minimum.at(most, place, np.floor(cells[rows] / np.maximum(amounts, 1)))
            most = np.minimum(most, items.upper[some])
            # More than all of the demand and what may be lost of it is of no use.
            most = np.minimum(most, np.floor(largest / items.share[some]) + 1.0)
            for at, item in enumerate(some.tolist()):
                if (m, item) not in alone or most[at] < 1.0:
                    continue
                share, column = float(items.share[item]), self._offset(m) + at
                group = self._group(m, int(items.phase[item]), int(items.region[item]))
                for r in range(min(number, int(most[at]))):
                    used = self._column(1.0, whole=True)
                    self._row({used: float(most[at]) - r, column: -1.0}, -float(r))
                    found[group].append({used: share})
        return found

    def _stand_alone(self) -> set[tuple[int, int]]:
        """Items with a node that may have a machine to itself, or one that is not told apart."""
        alone: set[tuple[int, int]] = set()
        supply, model = self.model.supply, self.model
        loose = set()
        for k, gpus, kind in self.slices:
            if k not in self.losses.spared and (gpus == supply.gpus[k] or k in self._rest):
                loose.add(model.cell(k, kind))
        for m in self._covered:
            items, some = model.items[m], self._let_in[m]
            place, rows, amounts = items.list_use(some)
            for at, row, amount in zip(
                place.tolist(), rows.tolist(), amounts.tolist(), strict=True
            ):
                k = row - model.cells
                own = k not in self._cut or amount % supply.gpus[k] == 0 or k in self._rest
                held = k >= 0 and k not in self.losses.spared and own
                if row in loose or held:
                    alone.add((m, int(some[at])))
        return alone

    def _largest_loss(self) -> float:
        """The most that one machine can take of any phase, in shares of the demand."""
        supply = self.model.supply
        slices = max((supply.gpus[k] // gpus for k, gpus, _ in self.slices), default=1)
        return float(slices)

    # -- scenarios ------------------------------------------------------------------------------------

    def _add_scenario(self, lost: Mapping[Group, Terms], gone: frozenset[int]) -> None:
        """Ask that what is left in a scenario serves what must be kept."""
        model, keep = self.model, self.losses.keep
        crossing = any(service.pairs for service in model.services)
        hit = {group[0] for group in lost}
        links: dict[tuple[int, int], Terms] = defaultdict(dict)
        for m in sorted({self._kin[m] for m in self._covered}):
            # Others are served as they were, unless they share links.
            if not gone and not crossing and m not in hit:
                continue
            service, kin = model.services[m], [n for n in self._covered if self._kin[n] == m]
            levels = self._left(m, lost, gone)
            total: Terms = {self._short: keep, **levels.pop((BOTH, 0), {})}
            # Columns are 1 less a level.
            total |= {self.levels.column(n): keep for n in kin if n in self._rows.ways}
            for g, h in [*((g, g) for g in range(model.regions)), *sorted(service.pairs)]:
                if (PREFILL, g) not in levels or (DECODE, h) not in levels:
                    continue
                flow = self._column(1.0)
                levels[PREFILL, g][flow] = levels[DECODE, h][flow] = -1.0
                total[flow] = 1.0
                if g != h:
                    load = service.kv_bytes_per_s / float(model.supply.link[g, h])
                    links[g, h][flow] = -load
            for terms in levels.values():
                self._row(terms, -_TOLERANCE * keep)
            self._row(total, keep * len(kin))
        for terms in links.values():
            self._row(terms, -1.0)

    def _left(
        self, m: int, lost: Mapping[Group, Terms], gone: frozenset[int]
    ) -> dict[tuple[int, int], Terms]:
        """What is left of a service in a scenario, by phase and region; of both phases together, at 0."""
        levels: dict[tuple[int, int], Terms] = defaultdict(dict)
        for n in (n for n, first in self._kin.items() if first == m):
            items = self.model.items[n]
            for at, item in enumerate(self._let_in[n].tolist()):
                phase, g = int(items.phase[item]), int(items.region[item])
                if g not in gone:
                    own = levels[self._group(m, phase, g)[1:]]
                    own[self._offset(n) + at] = float(items.share[item])
        for (service, phase, g), terms in lost.items():
            if service == m:
                own = levels[phase, g]
                for column, value in terms.items():
                    own[column] = own.get(column, 0.0) - value
        return levels

    def _group(self, service: int, phase: int, region: int) -> Group:
        return self._kin[service], phase, 0 if phase == BOTH else region

    # -- the program ----------------------------------------------------------------------------------

    def _column(self, upper: float = np.inf, *, whole: bool = False, cost: float = 0.0) -> int:
        """Add a column of 0 and more; return where it is."""
        none = np.zeros(0, np.int64)
        at = self.lp.add_columns(
            np.full(1, cost), np.zeros(1), np.full(1, upper), Sparse.of(none, none, np.zeros(0), 1)
        )
        if whole:
            self._whole.append(at)
        return at

    def _row(self, terms: Terms, lower: float, upper: float = np.inf) -> None:
        columns = np.array(sorted(terms), np.int64)
        values = np.array([terms[int(c)] for c in columns])
        entries = Sparse.of(np.zeros(len(columns), np.int64), columns, values, 1)
        self.lp.add_rows(np.full(1, lower), np.full(1, upper), entries)

    def find(self, limits: MipLimits) -> SurvivingAnswer:
        """Solve with whole numbers."""
        stands = sorted({*self._presence.values(), *self._stands.values()})
        integer = np.array([*self._whole, *stands], np.int64)
        result = self.solve_integer(integer, limits, exact=True)
        bound = np.inf if result.status == "infeasible" else result.bound - self._tie
        if result.values is None:
            return SurvivingAnswer(np.inf, bound, None)
        values = result.values
        machines, slices = self.supply_of(values)
        chosen = []
        for m, some in enumerate(self._let_in):
            first = self._offset(m)
            number = np.rint(values[first : first + len(some)]).astype(np.int64)
            chosen.append({int(some[i]): int(number[i]) for i in np.flatnonzero(number)})
        solution = Solution(machines, slices, tuple(chosen), self._places(values))
        return SurvivingAnswer(result.objective, bound, solution, self.levels.read(values))

    def _places(self, values: Floats) -> dict[tuple[int, int], tuple[NodePlace, ...]]:
        """The nodes of items that are parts of machines, by service and item: which machine each is on."""
        found: dict[tuple[int, int], list[NodePlace]] = defaultdict(list)
        for (m, item, _, source, (k, j)), x in sorted(self._nodes.items()):
            if source >= 0:
                gpus = self.slices[source][1]
                found[m, item] += [NodePlace(k, gpus, j)] * round(values[x])
        return {key: tuple(places) for key, places in found.items()}


@dataclass(frozen=True)
class SurvivingAnswer:
    """Result of an integer solve; `bound` is for items let in."""

    objective: float
    bound: float
    solution: Solution | None
    levels: Mapping[int, float] = field(default_factory=dict)


def _add(a: Terms, b: Terms, factor: float) -> Terms:
    total = dict(a)
    for column, value in b.items():
        total[column] = total.get(column, 0.0) + factor * value
    return total


def minimise_surviving(
    model: RentModel, losses: LossLimits, standing: Incumbent, seed: int, *, safe: bool
) -> SearchOutcome:
    """Search for the cheapest allocation that survives, and report to `standing`; see `rent_search`.

    What is proven of any allocation is proven of these, too: items are let in by what they cost at least.
    """
    standing.ceiling = price_of_all(model) * (1.0 + _ROUNDING) + _ROUNDING
    oracles = oracles_of(model)
    mixes = Decomposition(model, oracles, "cost", np.zeros(len(oracles)), standing, seed)
    first = mixes.rate(market_prices(model))
    demand = np.array([legs.least for legs in first.legs])
    if standing.bound == np.inf:
        return SearchOutcome(first.prices, np.where(np.isfinite(demand), demand, 0.0), 0, 0)
    total = sum(len(items) for items in model.items)
    if total > SMALL_SURVIVING:
        mixes.unserved = 3.0 * np.maximum(1.0, demand)
        mixes.master.set_unserved(mixes.unserved)
        mixes.converge()
    item_slacks = slacks(mixes.oracles, mixes.root)
    search_surviving(model, losses, standing, seed, item_slacks, mixes.root.value, safe=safe)
    prices, duals = mixes.relaxed or (first.prices, demand)
    return SearchOutcome(prices, duals, mixes.master.number, 0 if standing.closed else total)


def search_surviving(
    model: RentModel,
    losses: LossLimits,
    standing: Incumbent,
    seed: int,
    item_slacks: list[Floats],
    root: float,
    *,
    safe: bool,
    rows: LevelRows = _NO_LEVELS,
) -> dict[int, float]:
    """Solve over more and more items, and report to `standing`; return the levels of what was found.

    By `item_slacks` an item raises the bound `root`, once it is used.
    """
    levels: dict[int, float] = {}
    total = sum(len(items) for items in model.items)
    stages = [] if total <= SMALL_SURVIVING else [n for n in _STAGES if n < total]
    for max_items in (*stages, None):
        if standing.done:
            break
        needed = standing.wanted - root
        chosen, limit = lowest(item_slacks, needed, max_items)
        last = limit >= needed
        if not standing.deadline.allows(sum(len(some) for some in chosen)):
            break
        machines, rest = _tell_apart(model, standing.objective)
        if _count_columns(chosen, machines) > _MAX_COLUMNS:
            break
        master = SurvivingMaster(
            model,
            losses,
            chosen,
            standing.work,
            seed,
            safe=safe,
            machines=machines,
            rest=rest,
            rows=rows,
        )
        answer = master.find(standing.limits(standing.work.part(0.9 if last else 0.35)))
        if answer.solution is not None and standing.offer(answer.solution, answer.objective):
            levels = dict(answer.levels)
        # What must be safe may take more than is needed: nothing is proven by it.
        if not safe:
            standing.prove(min(answer.bound, root + limit))
        if last:
            break
    return levels


def find_max_left(model: RentModel, losses: LossLimits, standing: Incumbent, seed: int) -> float:
    """Return the largest share of what must be kept that every loss can leave, as far as is found; 0 if none.

    All of the demand is served while nothing is lost.
    """
    every = [np.arange(len(items)) for items in model.items]
    machines, _ = _tell_apart(model, np.inf)
    if _count_columns(every, machines) > _MAX_COLUMNS:
        return 0.0
    master = SurvivingMaster(
        model, losses, every, standing.work, seed, safe=True, machines=machines, max_left=True
    )
    answer = master.find(MipLimits(standing.deadline.limit(), 0.0, 1e-4, standing.work.part(0.5)))
    return 0.0 if answer.solution is None else max(0.0, 1.0 - answer.objective)


def _tell_apart(model: RentModel, max_usd: float) -> tuple[dict[int, int], frozenset[int]]:
    """Return how many machines of each offer that is cut are told apart, and offers with more of use."""
    supply = model.supply
    found: dict[int, int] = {}
    rest: set[int] = set()
    for k, sizes in enumerate(supply.sizes):
        if sizes[0][0] == supply.gpus[k] or supply.available[k] < 1:
            continue
        of_use = int(supply.available[k])
        if np.isfinite(max_usd) and supply.usd[k] > 0.0:
            of_use = min(of_use, int(max_usd / supply.usd[k] + _ROUNDING))
        found[k] = max(1, min(of_use, _MACHINES))
        if of_use > found[k]:
            rest.add(k)
    return found, frozenset(rest)


def _count_columns(let_in: Sequence[Ints], machines: Mapping[int, int]) -> int:
    """About how many columns a program has."""
    each = max(machines.values(), default=0) + 2
    return each * sum(len(some) for some in let_in)
