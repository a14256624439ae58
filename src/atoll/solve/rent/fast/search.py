"""The heuristic: services take what is cheapest for them, in turn, and are then moved while that helps.

1. *Fit.* Every service in turn covers its share at prices, of what is left (`fill`). Nodes that more would
   like to have than there are get dearer, services that found nothing come first, and all of it is done
   again, a few times; the cheapest that serves all is kept.
2. *Move.* A service gives back what it has and covers its share anew, at three sets of prices: slices at
   their share of a machine, slices that pay for all of it, and slices for little where machines stand half
   empty. Pairs of services do so together, the second before the first. What costs less is kept.

Prices only guide: what counts is what the machines cost, with every limit (`ledger`). All of it is counted
work and gives the same answer for the same problem.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll.solve.rent.fast.ledger import Books, Families, MarketLedger
from atoll.solve.rent.fast.picker import PickerRoom, ServicePicker
from atoll.solve.rent.items import RentModel, Solution, available_nodes
from atoll.solve.rent.relaxation import market_prices

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Chosen = tuple[dict[int, int], ...]

_HAIR = 1e-9
_WORTH = 1e-9
_ROUNDS = 8
_ENOUGH = 3
"""Rounds without a cheaper plan after which dearer nodes are given up."""
_TRIES = 24
_MOVES = 4
_MOST_PAIRS = 30
_CANDIDATES = 4
_MOST_CLOSED = 6
_MOST_USERS = 6
_LITTLE = 0.05
"""What an empty part of a machine that is paid anyway is taken to cost, of its share."""
_DEARER = 1.6
_HALVINGS = 8
_STEPS_UP = (0.1, 0.5, 2.0, 8.0, 64.0)
"""What a machine is taken to cost on top, in mean prices, where there may be few of them."""


@dataclass(frozen=True)
class Fitted:
    """Items that fit together, with their machines: what they cost, and the share of each service."""

    solution: Solution
    cost: float
    served: Floats
    books: Books


class FastSearch:
    """A heuristic over the items of a model; `fit` serves a share of everything, None where it finds none."""

    def __init__(self, model: RentModel) -> None:
        self.model = model
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
        if self.cut:
            self._bases.append(market_prices(guided, alone=True).row)
        share = model.limits.spot_share
        if share is not None and share < 1.0 and model.supply.spot.any():
            self._bases += [
                _blend(guided, share, alone) for alone in ((False, True) if self.cut else (False,))
            ]

    def _with_rooms(self) -> Floats:
        """Prices as they are: little for what fits into open machines, else all of a machine."""
        ledger, supply = self.ledger, self.model.supply
        price = self._bases[1 if self.cut else 0].copy()
        room = ledger.machines * supply.gpus - ledger.used
        fits = room[ledger.families.source_offer] >= ledger.source_gpus
        open_cells = ledger.source_cell[fits]
        price[open_cells] = _LITTLE * self._shared[open_cells]
        return price

    # One service

    def give_back(self, m: int) -> dict[int, int]:
        """Give back what a service has; return it."""
        had, self.chosen[m] = self.chosen[m], {}
        if had:
            self.ledger.take_all(self.pickers[m].items, had, -1)
            self._full[:] = False
        return had

    def fill(self, m: int, target: float, price: Floats, wanted: Ints | None = None) -> bool:
        """Let a service cover a share of its demand at these prices, of what is left; all of it or nothing.

        `wanted` counts the nodes that it would take if there were plenty.
        """
        picker, items, chosen = self.pickers[m], self.pickers[m].items, self.chosen[m]
        row = price
        if wanted is not None:
            first = picker.pick(price, target)
            if first is not None:
                wanted += items.use(first, self.model.rows)
        for _ in range(_TRIES):
            rest = target - picker.served(chosen)
            if rest <= _HAIR * target:
                break
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
                less = dict(chosen)
                less[item] -= 1
                if not less[item]:
                    del less[item]
                if picker.served(less) < target * (1.0 - _HAIR) or not self._stands_enough(m, less):
                    break
                if not self.ledger.take(picker.items, item, -1):
                    return
                self._full[:] = False
                _add(chosen, {item: -1})

    # All of them

    def fit(self, targets: Floats, *, rounds: int = _ROUNDS, move: bool = True) -> Fitted | None:
        """Serve a share of each service; None where no way was found. `failed` says who found nothing."""
        best: Fitted | None = None
        mean = float(np.mean(self.model.supply.usd)) if len(self.model.supply.usd) else 0.0
        tolls = [0.0]
        if self.model.limits.max_nodes is not None:
            tolls += [step * mean for step in _STEPS_UP]
        for toll in tolls:
            self._set_toll(toll)
            found = self._fit_rounds(targets, rounds)
            if found is None:
                break
            if move:
                found = self._move_all(targets, found)
            if self._admits(found):
                best = found
                break
        self._set_toll(0.0)
        return best

    def _admits(self, found: Fitted) -> bool:
        limits, supply = self.model.limits, self.model.supply
        machines = found.solution.machines
        if limits.max_nodes is not None and int(machines.sum()) > limits.max_nodes:
            return False
        rent = float(supply.budgeted @ machines)
        return limits.budget is None or rent <= limits.budget * (1.0 + _HAIR)

    def _fit_rounds(self, targets: Floats, rounds: int) -> Fitted | None:
        """The cheapest of what fits at each of the sets of prices."""
        found = [self._fit_at(targets, rounds, base) for base in self._bases]
        fitting = [each for each in found if each is not None]
        if fitting:
            self.failed = set()
        return min(fitting, key=lambda each: each.cost, default=None)

    def _fit_at(self, targets: Floats, rounds: int, base: Floats) -> Fitted | None:
        scarce = np.ones(self.model.cells)
        order = self._order(targets)
        best: Fitted | None = None
        stale = 0
        for _ in range(rounds):
            price = base
            if (scarce > 1.0).any():
                price = base.copy()
                price[: self.model.cells] *= scarce
            wanted = np.zeros(self.model.rows, np.int64)
            found, failed = self._fill_all(order, targets, price, wanted)
            over = self._overload(wanted)
            if found is not None and (best is None or found.cost < best.cost * (1.0 - _WORTH)):
                best, stale = found, 0
            else:
                stale += 1
            self.failed = set() if best is not None else failed
            if best is not None and (stale >= _ENOUGH or not (over > 1.0).any()):
                break
            scarce = np.where(over > 1.0, scarce * np.minimum(over, 3.0) ** 0.6, scarce)
            scarce = np.where(over < 0.9, np.maximum(1.0, 0.9 * scarce), scarce)
            if failed:
                order = [*(m for m in order if m in failed), *(m for m in order if m not in failed)]
        return best

    def _order(self, targets: Floats) -> list[int]:
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
        failed = {m for m in order if not self.fill(m, float(targets[m]), price, wanted)}
        if failed or not self.ledger.spot_fits:
            return None, failed
        return self._fitted(), failed

    def clear(self) -> None:
        """Give everything back."""
        self.ledger.clear()
        self.chosen = [{} for _ in self.pickers]
        self._full[:] = False

    def _fitted(self) -> Fitted:
        items = tuple(dict(sorted(chosen.items())) for chosen in self.chosen)
        served = [p.served(c) for p, c in zip(self.pickers, self.chosen, strict=True)]
        return Fitted(
            self.ledger.solution(items), self.ledger.cost, np.array(served), self.ledger.copy()
        )

    def _overload(self, wanted: Ints) -> Floats:
        """By cell, what is wanted over what there is: nodes of its own, or GPUs of its family."""
        families, supply = self.ledger.families, self.model.supply
        cells = wanted[: self.model.cells]
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
        """What each service pays above the least it could, at prices as if there were plenty, most first."""
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
            idle = before - paid > _WORTH * max(1.0, before)
            moving = [m for loss, m in losses if idle or loss > _WORTH * max(1.0, before)]
            for m in moving:
                self._move([m], targets)
            self._close_all(targets)
            for pair in itertools.islice(itertools.permutations(moving[:6], 2), _MOST_PAIRS):
                self._move(list(pair), targets)
            for m in moving:
                self._swap(m, float(targets[m]))
            if self.ledger.cost >= before * (1.0 - _WORTH):
                break
        after = self._fitted()
        return after if after.cost < found.cost and self.ledger.spot_fits else found

    def _move(self, some: list[int], targets: Floats) -> None:
        """Let some services choose anew, one after the other, and keep that if all costs less."""
        ledger, bound = self.ledger, self.ledger.within
        best, books = ledger.cost * (1.0 - _WORTH), ledger.copy()
        kept = {m: self.give_back(m) for m in some}
        without = ledger.copy()
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
                if ledger.spot_fits and ledger.cost < best and (ledger.within or not bound):
                    best, books = ledger.cost, ledger.copy()
                    kept = {m: dict(self.chosen[m]) for m in some}
            for m in some:
                self.chosen[m] = {}
            ledger.go_back(without)
            self._full[:] = False
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
            needed = picker.needed(less, item, target)
            ledger.take(items, item, -1)
            group = picker.group(item)
            price = items.prices(ledger.marginal(self._shared))[group]
            price[items.share[group] < needed * (1.0 - _HAIR)] = np.inf
            best, found = cost * (1.0 - _WORTH), None
            without = ledger.copy()
            for place in np.argsort(price, kind="stable")[:_CANDIDATES]:
                other = int(group[place])
                if not price[place] < np.inf:
                    break
                if other == item or less.get(other, 0) >= items.upper[other]:
                    continue
                if ledger.take(items, other, 1):
                    more = dict(less)
                    _add(more, {other: 1})
                    fits = ledger.spot_fits and (ledger.within or not bound)
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
        for k in np.argsort(-worth, kind="stable")[:_MOST_CLOSED]:
            if worth[k] <= 0.0:
                break
            used = int(ledger.used[k] - (ledger.machines[k] - 1) * supply.gpus[k])
            some = self._users(int(k), used)
            if not some:
                continue
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
            if total >= gpus or len(some) >= _MOST_USERS:
                break
            some.append(m)
            total += number
        return some[::-1]

    # A programme

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
        slots = {
            (int(k), int(gpus)): s
            for s, (k, gpus) in enumerate(
                zip(ledger.families.source_offer, ledger.source_gpus, strict=True)
            )
        }
        for m, chosen in enumerate(solution.items):
            use = self.pickers[m].items.use(chosen, self.model.rows)
            ledger.need += use[: self.model.cells]
            ledger.held += use[self.model.cells :]
        for (k, gpus), number in solution.slices.items():
            ledger.slices[slots[k, gpus]] = number
        # A programme may take more slices than are in use where that costs it nothing.
        over = -ledger.need
        np.add.at(over, ledger.source_cell, ledger.slices)
        for s in np.flatnonzero(ledger.slices):
            spare = min(int(ledger.slices[s]), max(0, int(over[ledger.source_cell[s]])))
            ledger.slices[s] -= spare
            over[ledger.source_cell[s]] -= spare
        ledger.sum_up()
        self.chosen = [dict(chosen) for chosen in solution.items]
        fits = not over.any() and bool((ledger.machines <= supply.available).all())
        if not fits or not ledger.spot_fits or not ledger.within:
            return None
        if not all(self._stands_enough(m, chosen) for m, chosen in enumerate(self.chosen)):
            return None
        return self._fitted()

    # Shortage

    def fit_most(self, priority: bool) -> Fitted | None:
        """Serve as much as fits: the largest common share found, or those of more weight first."""
        weights = np.array([service.weight for service in self.model.services])
        if priority:
            return self._by_weight(weights)
        some = np.ones(len(self.pickers))
        least = 2.0**-_HALVINGS
        found = self.fit(least * some, rounds=3, move=False)
        while found is None and some.any():
            # Not even one instance of each: one less, of those that found no place, or of all.
            short = [
                m
                for m in range(len(some))
                if some[m] > 0.0 and (m in self.failed or not self.failed)
            ]
            out = min(short or np.flatnonzero(some).tolist(), key=lambda m: (weights[m], -m))
            some[out] = 0.0
            found = self.fit(least * some, rounds=3, move=False) if some.any() else None
        if found is None:
            return None
        low, high, best = least, 1.0, found
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
        return after if self._admits(after) else found

    def _by_weight(self, weights: Floats) -> Fitted | None:
        self.clear()
        for m in np.argsort(-weights, kind="stable"):
            low, high = 0.0, 1.0
            for step in range(_HALVINGS + 1):
                share = 1.0 if step == 0 else (low + high) / 2.0
                self.give_back(int(m))
                if self.fill(int(m), share, self._shared) and self._holds():
                    low = share
                    if step == 0:
                        break
                else:
                    high = share
            self.give_back(int(m))
            if low > 0.0 and not (self.fill(int(m), low, self._shared) and self._holds()):
                self.give_back(int(m))
        found = self._fitted()
        return found if any(found.solution.items) else None

    def _holds(self) -> bool:
        return self.ledger.within and self.ledger.spot_fits


def _blend(model: RentModel, share: float, alone: bool) -> Floats:
    """Prices of nodes of which a share at most may be spot: that much as spot, the rest as others."""
    spot = model.supply.spot
    never = replace(model.supply, available=np.where(spot, 0, model.supply.available))
    cheap = market_prices(model, alone=alone).row
    steady = market_prices(replace(model, supply=never), alone=alone).row
    # Where only spot is sold, something else has to make up for it.
    steady = np.where((steady > 0.0) | (cheap == 0.0), steady, 2.5 * cheap)
    return share * cheap + (1.0 - share) * steady


def _add(chosen: dict[int, int], more: dict[int, int]) -> None:
    for item, number in more.items():
        chosen[item] = chosen.get(item, 0) + number
        if not chosen[item]:
            del chosen[item]


def _item_price(picker: ServicePicker, item: int, price: Floats) -> float:
    _, rows, amount = picker.items.list_use(np.array([item]))
    return float(price[rows] @ amount)
