"""The heuristic: services take what is cheapest for them, in turn, and are then moved while that helps.

1. *Fit.* Every service in turn covers its share at prices, of what is left (`fill`). Nodes that more would
   like to have than there are get dearer, services that found nothing come first, and all of it is done
   again, a few times; the cheapest that serves all is kept.
2. *Move.* A service gives back what it has and covers its share anew, at three sets of prices: slices at
   their share of a machine, slices that pay for all of it, and slices for little where machines stand half
   empty. Pairs of services do so together, the second before the first. What costs less is kept.

Prices only guide: what counts is what the machines cost, with every limit (`market_ledger`). All of it is
counted work and gives the same answer for the same problem.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.rent.fast.market_ledger import Books, Families, MarketLedger, within_limits
from atoll.solve.rent.fast.picker import PickerRoom, ServicePicker
from atoll.solve.rent.items import RentModel, Solution, available_nodes
from atoll.solve.rent.relaxation import market_prices

Chosen = tuple[dict[int, int], ...]

_SHARE_TOLERANCE = 1e-9
"""Share of a demand or of a limit that sums may miss by rounding."""
_MIN_GAIN = 1e-9
"""Share of the cost that a change must save: less may be rounding, and would be undone and done for ever."""
_ROUNDS = 8
"""Rounds of fitting all services together, with dearer prices each."""
_MAX_STALLED = 3
"""Rounds without a cheaper plan after which dearer nodes are given up."""
# Picks of `fill` before a service gives up; each that fails closes cells or makes them dearer.
_TRIES = 24
# Rounds of moves at most: one that saves nothing ends them earlier.
_MOVES = 4
# All ordered pairs of the six services that lose most.
_MAX_PAIRS = 30
# Items tried at true cost in place of another one.
_CANDIDATES = 4
# Offers of which one machine less is tried, those that waste most first.
_MAX_CLOSED = 6
# Services that may move together to do without a machine.
_MAX_USERS = 6
_EMPTY_PART_PRICE = 0.05
"""Price of an empty part of a machine that is paid for anyway, as a share of its usual price."""
# Factor on the price of nodes that are there one by one, but not all together.
_DEARER = 1.6
# A share is found to 2**-8, which is also the least that is tried.
_HALVINGS = 8
_STEPS_UP = (0.1, 0.5, 2.0, 8.0, 64.0)
"""Surcharges on a machine, in mean prices, tried in turn where there may be few machines."""


@dataclass(frozen=True)
class Fitted:
    """Items that fit together, with their machines: what they cost, and the share of each service."""

    solution: Solution
    cost: float
    served: Floats
    books: Books


class FastSearch:
    """A heuristic over the items of a model; `fit` serves a share of everything, None where it finds none.

    It gives up once `until` holds.
    """

    def __init__(self, model: RentModel, until: Callable[[], bool] = lambda: False) -> None:
        self.model, self._is_over = model, until
        self.ledger = MarketLedger(model, Families.of(model))
        room = PickerRoom(model)
        self.pickers = [ServicePicker(model, m, room) for m in range(len(model.items))]
        self.chosen: list[dict[int, int]] = [{} for _ in self.pickers]
        self.cut = any(len(sizes) > 1 for sizes in model.supply.sizes)
        self._full = np.zeros(model.rows, np.bool_)
        self._nodes = available_nodes(model.supply).ravel()
        self.failed: set[int] = set()
        self._set_toll(0.0)

    # Prices

    def _set_toll(self, toll: float) -> None:
        """Let every machine cost so much more, where prices guide."""
        model = self.model
        self.ledger.paid = model.supply.usd + toll
        guided = replace(model, supply=replace(model.supply, usd=self.ledger.paid))
        self._shared = market_prices(guided).row
        self._bases = [self._shared]
        # Where machines are cut, a slice may have to pay for all of its machine.
        if self.cut:
            self._bases.append(market_prices(guided, alone=True).row)

    def _with_rooms(self) -> Floats:
        """Prices as they are: little for what fits into open machines, else all of a machine."""
        ledger, supply = self.ledger, self.model.supply
        price = self._bases[1 if self.cut else 0].copy()
        room = ledger.machines * supply.gpus - ledger.used
        fits = room[ledger.families.source_offer] >= ledger.source_gpus
        open_cells = ledger.source_cell[fits]
        price[open_cells] = _EMPTY_PART_PRICE * self._shared[open_cells]
        return price

    # One service

    def give_back(self, m: int) -> dict[int, int]:
        """Give back what a service has; return it."""
        had, self.chosen[m] = self.chosen[m], {}
        if had:
            self.ledger.take_all(self.pickers[m].items, had, -1)
            # Something is free again: cells that were full are asked anew.
            self._full[:] = False
        return had

    def fill(self, m: int, target: float, price: Floats, wanted: Ints | None = None) -> bool:
        """Let a service cover a share of its demand at these prices, of what is left; all of it or nothing.

        `wanted` counts the nodes that it would take if there were plenty.
        """
        picker, items, chosen = self.pickers[m], self.pickers[m].items, self.chosen[m]
        row = price
        # Ask as if there were plenty first: overloads must show also where the service finds something else.
        if wanted is not None:
            first = picker.pick(price, target)
            if first is not None:
                wanted += items.use(first, self.model.rows)
        for _ in range(_TRIES):
            rest = target - picker.served(chosen)
            if rest <= _SHARE_TOLERANCE * target:
                break
            # Full cells stay full while items are only taken: this service does not ask for them again.
            if self._full.any():
                row = np.where(self._full, np.inf, row)
            picked = picker.pick(row, rest, chosen)
            if picked is None:
                self.give_back(m)
                return False
            if self.ledger.take_all(items, picked):
                _add(chosen, picked)
                continue
            row = self._take_some(m, picked, row)
        else:
            self.give_back(m)
            return False
        # Spread comes after covering and before pruning, which keeps the regions that it needs.
        if not self._spread(m, price):
            self.give_back(m)
            return False
        self._prune(m, target)
        return True

    def _take_some(self, m: int, picked: dict[int, int], price: Floats) -> Floats:
        """Take what there is of some items; return prices that say what there was not."""
        items, chosen, ledger = self.pickers[m].items, self.chosen[m], self.ledger
        row = price.copy()
        for item in sorted(picked, key=lambda i: (-items.share[i], i)):
            for _ in range(picked[item]):
                if ledger.take(items, item, 1):
                    chosen[item] = chosen.get(item, 0) + 1
                    continue
                _, rows, _ = items.list_use(np.array([item]))
                # Nodes of which not even one is left are closed: a higher price would not say that.
                single = [int(at) for at in rows if not self._can_have(int(at))]
                self._full[single] = True
                if not single:
                    # One of each is there, but not all that it takes together.
                    row[rows] *= _DEARER
                break
        return row

    def _can_have(self, row: int) -> bool:
        """Whether one more node of a cell, or one more GPU of an offer, is left."""
        cells, ledger = self.model.cells, self.ledger
        nodes, gpus = np.zeros(0, np.int64), np.zeros(0, np.int64)
        at, one = np.array([row if row < cells else row - cells]), np.ones(1, np.int64)
        move = (at, one, nodes, gpus) if row < cells else (nodes, gpus, at, one)
        return ledger.can_move(*move)

    def _spread(self, m: int, price: Floats) -> bool:
        """Let every phase of a service stand in enough regions."""
        spread, items, chosen = self.model.limits.spread, self.pickers[m].items, self.chosen[m]
        if spread == 1 or not chosen:
            return True
        cost = items.prices(np.where(self._full, np.inf, price))
        for phase in sorted({int(items.phase[item]) for item in chosen}):
            stands = {int(items.region[i]) for i in chosen if items.phase[i] == phase}
            for item in np.lexsort((np.arange(len(items)), cost)).tolist():
                if len(stands) >= spread:
                    break
                if items.phase[item] != phase or int(items.region[item]) in stands:
                    continue
                if chosen.get(item, 0) < items.upper[item] and self.ledger.take(items, item, 1):
                    chosen[item] = chosen.get(item, 0) + 1
                    stands.add(int(items.region[item]))
            if len(stands) < spread:
                return False
        return True

    def _stands_enough(self, m: int, chosen: dict[int, int]) -> bool:
        items, spread = self.pickers[m].items, self.model.limits.spread
        if spread == 1:
            return True
        places: dict[int, set[int]] = {}
        for item in chosen:
            places.setdefault(int(items.phase[item]), set()).add(int(items.region[item]))
        return all(len(regions) >= spread for regions in places.values())

    def _prune(self, m: int, target: float) -> None:
        """Give back what is not needed to cover the share, the dearest first."""
        picker, chosen = self.pickers[m], self.chosen[m]
        cost = {i: _item_price(picker, i, self._shared) for i in chosen}
        for item in sorted(chosen, key=lambda i: (-cost[i], i)):
            while item in chosen:
                # Try it on a copy: the ledger changes only once the service can do without the item.
                less = dict(chosen)
                less[item] -= 1
                if not less[item]:
                    del less[item]
                enough = picker.served(less) >= target * (1.0 - _SHARE_TOLERANCE)
                if not enough or not self._stands_enough(m, less):
                    break
                if not self.ledger.take(picker.items, item, -1):
                    return
                self._full[:] = False
                _add(chosen, {item: -1})

    def prune(self, target: float) -> None:
        """Give back what is not needed where all serve a share."""
        for m in range(len(self.pickers)):
            self._prune(m, target)

    # All of them

    def fit(self, targets: Floats, *, rounds: int = _ROUNDS, move: bool = True) -> Fitted | None:
        """Serve a share of each service; None where no way was found. `failed` says who found nothing."""
        best: Fitted | None = None
        mean = float(np.mean(self.model.supply.usd)) if len(self.model.supply.usd) else 0.0
        # A limit on machines asks for fewer and larger ones: tolls on each rise until the plan is within it.
        tolls = [0.0]
        if self.model.limits.max_nodes is not None:
            tolls += [step * mean for step in _STEPS_UP]
        for toll in tolls:
            self._set_toll(toll)
            found = self._fit_rounds(targets, rounds)
            # Tolls change prices, not what there is: higher ones are not tried where this finds nothing.
            if found is None:
                break
            if move:
                found = self._move_all(targets, found)
            if within_limits(self.model, found.solution.machines):
                best = found
                break
        # The toll was for this fit only: bounds and moves count with true prices.
        self._set_toll(0.0)
        return best

    def _fit_rounds(self, targets: Floats, rounds: int) -> Fitted | None:
        """The cheapest of what fits at each of the sets of prices."""
        found = [self._fit_at(targets, rounds, base) for base in self._bases]
        fitting = [each for each in found if each is not None]
        if fitting:
            self.failed = set()
        return min(fitting, key=lambda each: each.cost, default=None)

    def _fit_at(self, targets: Floats, rounds: int, base: Floats) -> Fitted | None:
        # Surcharges by cell, from round to round.
        scarce = np.ones(self.model.cells)
        order = self.order(targets)
        best: Fitted | None = None
        stale = 0
        for _ in range(rounds):
            if self._is_over():
                break
            price = base
            if (scarce > 1.0).any():
                price = base.copy()
                price[: self.model.cells] *= scarce
            wanted = np.zeros(self.model.rows, np.int64)
            found, failed = self._fill_all(order, targets, price, wanted)
            over = self._overload(wanted)
            if found is not None and (best is None or found.cost < best.cost * (1.0 - _MIN_GAIN)):
                best, stale = found, 0
            else:
                stale += 1
            self.failed = set() if best is not None else failed
            # Nobody wants more than there is: the next round would have the same prices.
            if best is not None and (stale >= _MAX_STALLED or not (over > 1.0).any()):
                break
            # Damped: at most threefold and less than in proportion; down by a tenth, never below
            # the base price.
            scarce = np.where(over > 1.0, scarce * np.minimum(over, 3.0) ** 0.6, scarce)
            scarce = np.where(over < 0.9, np.maximum(1.0, 0.9 * scarce), scarce)
            # Who found nothing chooses first in the next round; else the order stays.
            if failed:
                order = [*(m for m in order if m in failed), *(m for m in order if m not in failed)]
        return best

    def order(self, targets: Floats) -> list[int]:
        """Services in the order in which they choose: those that have most to lose first."""
        loss = np.zeros(len(self.pickers))
        for m, picker in enumerate(self.pickers):
            if targets[m] > 0.0:
                picker.pick(self._shared, float(targets[m]))
                loss[m] = picker.cost if np.isfinite(picker.cost) else 0.0
        return [int(m) for m in np.argsort(-loss, kind="stable") if targets[m] > 0.0]

    def _fill_all(
        self, order: Sequence[int], targets: Floats, price: Floats, wanted: Ints
    ) -> tuple[Fitted | None, set[int]]:
        self.clear()
        failed: set[int] = set()
        for m in order:
            if self._is_over():
                return None, set(order)
            if not self.fill(m, float(targets[m]), price, wanted):
                failed.add(m)
        # Spot is a share of all GPUs, so it is judged once all services have theirs.
        if failed or not self.ledger.sound:
            return None, failed
        return self.fitted(), failed

    def take(self, m: int, chosen: dict[int, int]) -> bool:
        """Let a service that has nothing have these items, if they fit beside what is taken."""
        fits = self.ledger.take_all(self.pickers[m].items, chosen)
        if fits:
            self.chosen[m] = dict(chosen)
        return fits

    def raise_to(self, m: int, target: float) -> bool:
        """Let a service reach a share: with more, or with other instances; as before where neither can be."""
        books, had = self.ledger.copy(), dict(self.chosen[m])
        # A service that finds no more has given back all that it had: the second time is from nothing.
        if any(self.fill(m, target, self._bases[0]) for _ in range(2)):
            return True
        self.ledger.go_back(books)
        self.chosen[m] = had
        return False

    def fill_in_turn(
        self, services: Sequence[int], target: float, until: Callable[[], bool]
    ) -> bool:
        """Let services reach a share in turn, at market prices; False at the first that cannot, or late."""
        cells = self.model.cells
        for m in services:
            if until():
                return False
            # Cells that the others have taken: asking for one after the other would use up all tries.
            self._full[:cells] |= self.ledger.need >= self._nodes
            if not self.raise_to(m, target):
                return False
        return True

    def clear(self) -> None:
        """Give everything back."""
        self.ledger.clear()
        self.chosen = [{} for _ in self.pickers]
        self.failed = set()
        self._full[:] = False

    def fitted(self) -> Fitted:
        """Return what all services have now."""
        items = tuple(dict(sorted(chosen.items())) for chosen in self.chosen)
        served = [p.served(c) for p, c in zip(self.pickers, self.chosen, strict=True)]
        return Fitted(
            self.ledger.solution(items), self.ledger.cost, np.array(served), self.ledger.copy()
        )

    def _overload(self, wanted: Ints) -> Floats:
        """By cell, what is wanted over what there is: nodes of its own, or GPUs of its family."""
        families, supply = self.ledger.families, self.model.supply
        cells = wanted[: self.model.cells]
        # What is wanted where there is nothing counts as a huge overload, not as a division by zero.
        with np.errstate(divide="ignore", invalid="ignore"):
            own = np.where(cells > 0, cells / np.maximum(self._nodes, 1e-9), 0.0)
        gpus = np.zeros(self.model.cells)
        gpus[families.cell_of] = families.cell_gpus
        asked, there = np.zeros(len(families)), np.zeros(len(families))
        known = families.of_cell >= 0
        np.add.at(asked, families.of_cell[known], (cells * gpus)[known])
        np.add.at(there, families.of_offer, supply.gpus * supply.available)
        together = np.where(asked > 0, asked / np.maximum(there, 1e-9), 0.0)
        out = own.copy()
        out[known] = np.maximum(own[known], together[families.of_cell[known]])
        return out

    # Moving

    def _load(self, found: Fitted) -> None:
        self.clear()
        self.ledger.go_back(found.books)
        self.chosen = [dict(chosen) for chosen in found.solution.items]

    def _losses(self, targets: Floats) -> list[tuple[float, int]]:
        """Return by how much each service pays more than it would on an unlimited market, most first."""
        losses = []
        for m, chosen in enumerate(self.chosen):
            if not chosen:
                continue
            picker = self.pickers[m]
            paid = sum(_item_price(picker, i, self._shared) * n for i, n in chosen.items())
            picker.pick(self._shared, float(targets[m]))
            losses.append((paid - picker.cost, m))
        return sorted(losses, key=lambda pair: (-pair[0], pair[1]))

    def _move_all(self, targets: Floats, found: Fitted) -> Fitted:
        self._load(found)
        for _ in range(_MOVES):
            before = self.ledger.cost
            losses = self._losses(targets)
            paid = sum(
                _item_price(self.pickers[m], i, self._shared) * n
                for m, chosen in enumerate(self.chosen)
                for i, n in chosen.items()
            )
            # Every machine is full and everyone has the cheapest: there is nothing to gain.
            idle = before - paid > _MIN_GAIN * max(1.0, before)
            moving = [m for loss, m in losses if idle or loss > _MIN_GAIN * max(1.0, before)]
            # Single services, then machines that stand half empty, then ordered pairs, then single items.
            for m in moving:
                self._move([m], targets)
            self._close_all(targets)
            for pair in itertools.islice(itertools.permutations(moving[:6], 2), _MAX_PAIRS):
                self._move(list(pair), targets)
            for m in moving:
                self._swap(m, float(targets[m]))
            if self.ledger.cost >= before * (1.0 - _MIN_GAIN):
                break
        after = self.fitted()
        return after if after.cost < found.cost and self.ledger.sound else found

    def _move(self, some: list[int], targets: Floats) -> None:
        """Let some services choose anew, one after the other, and keep that if all costs less."""
        ledger, bound = self.ledger, self.ledger.within
        best, books = ledger.cost * (1.0 - _MIN_GAIN), ledger.copy()
        kept = {m: self.give_back(m) for m in some}
        # Every set of prices starts from the same books, without the services that move.
        without = ledger.copy()
        # None: marginal prices, which depend on what the services before have taken by then.
        prices: list[Floats | None] = [*self._bases, None]
        if self.cut:
            prices.append(self._with_rooms())
        for price in prices:
            for m in some:
                now = ledger.marginal(self._shared) if price is None else price
                if not self.fill(m, float(targets[m]), now):
                    break
            else:
                # Limits that held before must hold after.
                if ledger.sound and ledger.cost < best and (ledger.within or not bound):
                    best, books = ledger.cost, ledger.copy()
                    kept = {m: dict(self.chosen[m]) for m in some}
            for m in some:
                self.chosen[m] = {}
            ledger.go_back(without)
            self._full[:] = False
        # The best, or else what there was: books and choices change together.
        ledger.go_back(books)
        for m in some:
            self.chosen[m] = kept[m]

    def _swap(self, m: int, target: float) -> None:
        """Exchange single items of a service for others of their phase and region, at true costs."""
        ledger, picker = self.ledger, self.pickers[m]
        items = picker.items
        for item in sorted(self.chosen[m]):
            chosen = self.chosen[m]
            if chosen.get(item, 0) < 1:
                continue
            bound, books, cost = ledger.within, ledger.copy(), ledger.cost
            less = dict(chosen)
            _add(less, {item: -1})
            # What the others leave open: an item that carries less cannot take its place.
            needed = picker.needed(less, item, target)
            ledger.take(items, item, -1)
            group = picker.group(item)
            price = items.prices(ledger.marginal(self._shared))[group]
            price[items.share[group] < needed * (1.0 - _SHARE_TOLERANCE)] = np.inf
            best, found = cost * (1.0 - _MIN_GAIN), None
            without = ledger.copy()
            for place in np.argsort(price, kind="stable")[:_CANDIDATES]:
                other = int(group[place])
                # In order of price: none of the rest can be had either.
                if not price[place] < np.inf:
                    break
                if other == item or less.get(other, 0) >= items.upper[other]:
                    continue
                if ledger.take(items, other, 1):
                    more = dict(less)
                    _add(more, {other: 1})
                    fits = ledger.sound and (ledger.within or not bound)
                    if fits and ledger.cost < best and self._stands_enough(m, more):
                        best, found = ledger.cost, (more, ledger.copy())
                ledger.go_back(without)
            if found is None:
                ledger.go_back(books)
            else:
                self.chosen[m] = found[0]
                ledger.go_back(found[1])
            self._full[:] = False

    def _close_all(self, targets: Floats) -> None:
        """Try to do without a machine of each offer that has idle GPUs, the dearest first."""
        supply, ledger = self.model.supply, self.ledger
        idle = ledger.machines * supply.gpus - ledger.used
        worth = idle * supply.usd / supply.gpus
        for k in np.argsort(-worth, kind="stable")[:_MAX_CLOSED]:
            if worth[k] <= 0.0:
                break
            # GPUs in use beyond what one machine less can hold: so many must go elsewhere.
            used = int(ledger.used[k] - (ledger.machines[k] - 1) * supply.gpus[k])
            some = self._users(int(k), used)
            if not some:
                continue
            # One machine less is on offer while they move.
            ledger.available[k] = ledger.machines[k] - 1
            self._move(some, targets)
            ledger.available[k] = supply.available[k]

    def _users(self, k: int, gpus: int) -> list[int]:
        """Services with nodes of the family of an offer, the fewest first, until so many GPUs are theirs."""
        families = self.ledger.families
        own = families.of_cell == families.of_offer[k]
        sizes = np.where(own, self.ledger.gpus_of, 0)
        taken = []
        for m, chosen in enumerate(self.chosen):
            if chosen:
                used = self.pickers[m].items.use(chosen, self.model.rows)
                number = int(used[: self.model.cells] @ sizes) + int(used[self.model.cells + k])
                if number:
                    taken.append((number, m))
        some: list[int] = []
        total = 0
        for number, m in sorted(taken):
            if total >= gpus or len(some) >= _MAX_USERS:
                break
            some.append(m)
            total += number
        # The one with the most GPUs chooses first.
        return some[::-1]

    # A program

    @property
    def bases(self) -> list[Floats]:
        """The sets of prices that guide."""
        return self._bases

    def lower_bound(self) -> float:
        """Return what serving everything costs at least with these items, every machine full."""
        total = 0.0
        for picker in self.pickers:
            picker.pick(self._shared, 1.0)
            total += picker.cost
        return total

    def adopt(self, solution: Solution) -> Fitted | None:
        """Return a solution as one that fits, with the machines that it has; None where limits forbid it."""
        self.clear()
        supply, ledger = self.model.supply, self.ledger
        kinds = len(supply.kinds)
        slots = {
            (int(k), int(cell) % kinds): s
            for s, (k, cell) in enumerate(
                zip(ledger.families.source_offer, ledger.source_cell, strict=True)
            )
        }
        for m, chosen in enumerate(solution.items):
            use = self.pickers[m].items.use(chosen, self.model.rows)
            ledger.need += use[: self.model.cells]
            ledger.held += use[self.model.cells :]
        for (k, _, kind), number in solution.slices.items():
            ledger.slices[slots[k, kind]] = number
        # A program may take more slices than are in use where that costs it nothing.
        over = -ledger.need
        np.add.at(over, ledger.source_cell, ledger.slices)
        for s in np.flatnonzero(ledger.slices):
            spare = min(int(ledger.slices[s]), max(0, int(over[ledger.source_cell[s]])))
            ledger.slices[s] -= spare
            over[ledger.source_cell[s]] -= spare
        ledger.sum_up()
        self.chosen = [dict(chosen) for chosen in solution.items]
        # Below zero where slices are missing for what the items need.
        fits = not over.any() and bool((ledger.machines <= supply.available).all())
        if not fits or not ledger.sound or not ledger.within:
            return None
        if not all(self._stands_enough(m, chosen) for m, chosen in enumerate(self.chosen)):
            return None
        return self.fitted()

    # Shortage

    def fit_most(self, priority: bool) -> Fitted | None:
        """Serve as much as fits: the largest common share found, or those of more weight first."""
        weights = np.array([service.weight for service in self.model.services])
        if priority:
            return self._by_weight(weights)
        some = np.ones(len(self.pickers))
        # The smallest share that the halvings below can tell from nothing.
        min_share = 2.0**-_HALVINGS
        found = self.fit(min_share * some, rounds=3, move=False)
        while found is None and some.any():
            # Not even one instance of each: one less, of those that found no place, or of all.
            short = [
                m
                for m in range(len(some))
                if some[m] > 0.0 and (m in self.failed or not self.failed)
            ]
            out = min(short or np.flatnonzero(some).tolist(), key=lambda m: (weights[m], -m))
            some[out] = 0.0
            found = self.fit(min_share * some, rounds=3, move=False) if some.any() else None
        if found is None:
            return None
        # `best` serves `low` all the time: it only moves to shares that were found.
        low, high, best = min_share, 1.0, found
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            trial = self.fit(middle * some, rounds=3, move=False)
            if trial is None:
                high = middle
            else:
                low, best = middle, trial
        return self._move_within(low * some, best)

    def settle(self, found: Fitted) -> Fitted:
        """Return what serves the same common share of all for less, if that is found."""
        share = min(1.0, float(found.served.min()))
        return self._move_within(np.full(len(self.pickers), share), found)

    def _move_within(self, targets: Floats, found: Fitted) -> Fitted:
        after = self._move_all(targets, found)
        return after if within_limits(self.model, after.solution.machines) else found

    def _by_weight(self, weights: Floats) -> Fitted | None:
        self.clear()
        for m in np.argsort(-weights, kind="stable"):
            low, high = 0.0, 1.0
            # All of it first: no halving is needed where there is enough.
            for step in range(_HALVINGS + 1):
                share = 1.0 if step == 0 else (low + high) / 2.0
                self.give_back(int(m))
                if self.fill(int(m), share, self._shared) and self._holds():
                    low = share
                    if step == 0:
                        break
                else:
                    high = share
            # The last try need not be the best one: fill once more at the share of that.
            self.give_back(int(m))
            if low > 0.0 and not (self.fill(int(m), low, self._shared) and self._holds()):
                self.give_back(int(m))
        found = self.fitted()
        return found if any(found.solution.items) else None

    def _holds(self) -> bool:
        return self.ledger.within and self.ledger.sound


def _add(chosen: dict[int, int], more: dict[int, int]) -> None:
    for item, number in more.items():
        chosen[item] = chosen.get(item, 0) + number
        if not chosen[item]:
            del chosen[item]


def _item_price(picker: ServicePicker, item: int, price: Floats) -> float:
    _, rows, amount = picker.items.list_use(np.array([item]))
    return float(price[rows] @ amount)
