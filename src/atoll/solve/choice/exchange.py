"""The choice problem by exchange: which few pairs are active, in which configuration, decides; routing follows.

Rent dominates, so few pairs are active. The state is that set; its cost is that of routing all types to it
(`routing`). One step leaves out at most one member and takes in at most one offer: every offer is first
judged by a bound, what it would cost if nothing ever filled up, which stops as soon as it is no better than
the best known; those with the least bounds are then routed. Steps start from nothing and from AGH's answer,
and the answer is never dearer than AGH's. Work is counted, not timed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from atoll.core.compiling import entry, lean_part
from atoll.solve.choice.agh import improve, orders_of
from atoll.solve.choice.gh import switches_of
from atoll.solve.choice.offers import MOST, OFFERS_TYPE, Offers, list_offers, offers_of
from atoll.solve.choice.problem import ChoiceAnswer, ChoiceProblem, Floats, Ints, cost_of
from atoll.solve.choice.routing import (
    SELECTION_TYPE,
    Selection,
    choose,
    route,
    selection_of,
    span,
)
from atoll.solve.choice.tables import (
    BUDGET,
    TABLES_TYPE,
    ChoiceTables,
    answer_of,
    ledger_of,
    tables_of,
)

COMPILED_AS = "the choice of models"
TRIES = 8
"""Offers that are routed at each step, those of the least bounds."""
ROUNDS = 2000
_GAIN = 1e-7
"""USD that a step must save."""


# Slots of `Search.usd`.
STORING, FINE, LEAST = 0, 1, 2
# Slots of `Search.work`.
ROUTED, BOUNDED, STEPS, OFFERED = 0, 1, 2, 3


class Search(NamedTuple):
    """What steps work in."""

    usd: Floats
    """What a GB costs over the horizon; what a USD over the budget costs; the least cost within it."""
    work: Ints
    """Selections routed, offers judged by a bound, steps, offers."""
    base: Floats
    """base[i]: what a type costs without a new offer."""
    order: Ints
    """Types, those with most to gain first."""
    bounds: Floats
    """Of the offers to be routed."""
    held: Ints
    """Those offers."""
    scratch: Floats


SEARCH_TYPE = (
    "Tuple((float64[::1], int64[::1], float64[::1], int64[::1], float64[::1], int64[::1],"
    " float64[:, ::1]))"
)


def exchange(problem: ChoiceProblem, seed: int = 0) -> ChoiceAnswer:
    """Return the best answer found; `seed` is that of AGH's random orders."""
    tables = tables_of(problem)
    ledger = ledger_of(tables)
    improve(tables, ledger, orders_of(problem, seed), switches_of(True, True, True))
    start = answer_of(problem, ledger.config, ledger.share)
    types, pairs, _ = tables.delay.shape
    offers = offers_of(tables)
    search = Search(
        np.array([problem.horizon_h * problem.storage_usd, 0.0, np.inf]), np.zeros(4, np.int64),
        np.empty(types), np.empty(types, np.int64), np.empty(TRIES), np.empty(TRIES, np.int64),
        np.empty((4, MOST)),
    )  # fmt: skip
    best, now, trial = selection_of(types), selection_of(types), selection_of(types)
    _exchange(
        tuple(tables),
        tuple(offers),
        tuple(best),
        tuple(now),
        tuple(trial),
        tuple(search),
        ledger.config,
        problem.shape[2],
        cost_of(problem, start).total,
    )
    global LAST
    LAST = search
    found = _answer(problem, offers, best)
    return found if cost_of(problem, found).total < cost_of(problem, start).total else start


def _answer(problem: ChoiceProblem, offers: Offers, selection: Selection) -> ChoiceAnswer:
    types, models, tiers, _ = problem.shape
    config = np.full(models * tiers, -1, np.int64)
    share = np.zeros((types, models * tiers))
    for i in range(types):
        for side in range(2):
            a = selection.picks[i, side]
            if a >= 0:
                f = selection.members[a]
                config[offers.pair[f]] = offers.config[f]
                share[i, offers.pair[f]] = selection.parts[i, side]
    return answer_of(problem, config, share)


@lean_part
def blend(offers: Offers, i: int, f: int, g: int) -> float:
    """Return what a type costs that two offers serve wholly together, inf where they cannot."""
    low, high = span(offers.slow[f, i], offers.slow[g, i], 0.0, 1.0)
    low, high = span(offers.wrong[f, i], offers.wrong[g, i], low, high)
    if low > high:
        return np.inf
    share = high if offers.usd[f, i] < offers.usd[g, i] else low
    usd = share * offers.usd[f, i] + (1.0 - share) * offers.usd[g, i]
    return offers.keep[f] + offers.keep[g] + usd


@lean_part
def bound(
    offers: Offers, trial: Selection, g: int, base: Floats, order: Ints, usd: float, most: float
) -> float:
    """Return what the members cost with one more offer if nothing fills up; `most` or more: given up.

    `base[i]` is what a type costs without it, `usd` the rent of all and the least that types can cost.
    """
    count = trial.count[0]
    for place in range(order.shape[0]):
        i = order[place]
        value = min(base[i], offers.alone[g, i])
        whole = offers.slow[g, i] <= 1.0 and offers.wrong[g, i] <= 1.0
        for a in range(count):
            f = trial.members[a]
            if whole and offers.slow[f, i] <= 1.0 and offers.wrong[f, i] <= 1.0:
                continue
            least = offers.keep[f] + offers.keep[g] + min(offers.usd[f, i], offers.usd[g, i])
            if least < value:
                value = min(value, blend(offers, i, f, g))
        usd += value - offers.floor[i]
        if usd >= most:
            return most
    return usd


@lean_part
def leave_out(now: Selection, trial: Selection, one: int, two: int) -> None:
    """Write the members without two of them (-1: none)."""
    count = 0
    for a in range(now.count[0]):
        if a not in (one, two):
            trial.members[count] = now.members[a]
            count += 1
    trial.count[0] = count


@lean_part
def duplicate(source: Selection, target: Selection) -> None:
    """Write one selection over another."""
    target.count[0] = source.count[0]
    for a in range(source.count[0]):
        target.members[a] = source.members[a]
        target.used[0, a] = source.used[0, a]
        target.used[1, a] = source.used[1, a]
    for i in range(source.usd.shape[0]):
        target.usd[i] = source.usd[i]
        for side in range(2):
            target.picks[i, side] = source.picks[i, side]
            target.parts[i, side] = source.parts[i, side]


@lean_part
def has_pair(offers: Offers, trial: Selection, g: int) -> bool:
    """Say whether a member is of the same pair as an offer."""
    for a in range(trial.count[0]):
        if offers.pair[trial.members[a]] == offers.pair[g]:
            return True
    return False


@lean_part
def judge(
    tables: ChoiceTables, offers: Offers, trial: Selection, best: Selection, search: Search
) -> float:
    """Return what a selection costs, and keep it if it is the best that is within the budget."""
    usd, paid = route(
        tables, offers, trial, search.usd[STORING], search.usd[FINE], search.scratch
    )
    search.work[ROUTED] += 1
    if paid and usd < search.usd[LEAST]:
        search.usd[LEAST] = usd
        duplicate(trial, best)
    return usd


@lean_part
def step(
    tables: ChoiceTables,
    offers: Offers,
    now: Selection,
    trial: Selection,
    best: Selection,
    search: Search,
    one: int,
    two: int,
    usd: float,
) -> float:
    """Leave out two members (-1: none), take in the offer that is best then, if that saves; return the cost."""
    types = now.usd.shape[0]
    base, order, bounds, held = search.base, search.order, search.bounds, search.held
    leave_out(now, trial, one, two)
    count = trial.count[0]
    rent, least, alone, data = 0.0, 0.0, 0.0, 0.0
    for a in range(count):
        search.scratch[0, a] = 1.0
        rent += offers.rent[trial.members[a]]
    for i in range(types):
        base[i] = choose(tables, offers, trial, i, 0.0, search.scratch[0], search.scratch[1])
        least += offers.floor[i]
        alone += base[i]
        data += tables.data_usd[i]
        place = i
        # Types with most to gain come first.
        while place > 0:
            before = order[place - 1]
            if base[before] - offers.floor[before] >= base[i] - offers.floor[i]:
                break
            order[place] = before
            place -= 1
        order[place] = i
    found = 0
    over = rent + data - tables.limits[BUDGET]
    fine = search.usd[FINE]
    if count < MOST:
        most = usd - _GAIN
        for g in range(offers.count[0]):
            first = rent + offers.rent[g] + least + fine * max(0.0, over + offers.rent[g])
            if first >= most or has_pair(offers, trial, g):
                continue
            search.work[BOUNDED] += 1
            value = bound(offers, trial, g, base, order, first, most)
            if value >= most:
                continue
            place = min(found, TRIES - 1)
            while place > 0 and bounds[place - 1] > value:
                bounds[place] = bounds[place - 1]
                held[place] = held[place - 1]
                place -= 1
            bounds[place] = value
            held[place] = g
            found = min(found + 1, TRIES)
            if found == TRIES:
                most = bounds[TRIES - 1]
    chosen, least_usd = -2, usd - _GAIN
    if one >= 0 and rent + alone < least_usd:
        value = judge(tables, offers, trial, best, search)
        if value < least_usd:
            chosen, least_usd = -1, value
    trial.count[0] = count + 1
    for place in range(found):
        if bounds[place] >= least_usd:
            break
        trial.members[count] = held[place]
        value = judge(tables, offers, trial, best, search)
        if value < least_usd:
            chosen, least_usd = held[place], value
    if chosen == -2:
        return usd
    trial.count[0] = count
    if chosen >= 0:
        trial.members[count] = chosen
        trial.count[0] = count + 1
    duplicate(trial, now)
    return least_usd


@lean_part
def descend(
    tables: ChoiceTables,
    offers: Offers,
    now: Selection,
    trial: Selection,
    best: Selection,
    search: Search,
) -> None:
    """Make steps until none saves."""
    duplicate(now, trial)
    usd = judge(tables, offers, trial, best, search)
    one, two, idle = -1, -1, 0
    for _ in range(ROUNDS):
        count = now.count[0]
        ways = 1 + count + count * (count - 1) // 2
        if idle >= ways:
            break
        after = step(tables, offers, now, trial, best, search, one, two, usd)
        search.work[STEPS] += 1
        idle = 0 if after < usd else idle + 1
        if after < usd and one == -1:
            usd = after
            continue
        usd = after
        # None, then each, then each two.
        count = now.count[0]
        if two < 0:
            one += 1
            if one >= count:
                one, two = 0, 1
        else:
            two += 1
            if two >= count:
                one += 1
                two = one + 1
        if two >= count:
            one, two = -1, -1


@lean_part
def enter(offers: Offers, now: Selection, config: Ints, gpus: Ints) -> None:
    """Take in the offers that are the active pairs of an answer, those that are offers."""
    count = 0
    for f in range(offers.count[0]):
        c = config[offers.pair[f]]
        if c >= 0 and gpus[c] == gpus[offers.config[f]] and count < MOST:
            if count > 0 and offers.pair[now.members[count - 1]] == offers.pair[f]:
                # Two configurations of as many GPUs: the one that the answer has.
                if offers.config[f] == c:
                    now.members[count - 1] = f
                continue
            now.members[count] = f
            count += 1
    now.count[0] = count


@entry(
    f"({TABLES_TYPE}, {OFFERS_TYPE}, {SELECTION_TYPE}, {SELECTION_TYPE}, {SELECTION_TYPE},"
    f" {SEARCH_TYPE}, int64[::1], int64, float64)"
)
def _exchange(
    tables: tuple[Any, ...],
    offers: tuple[Any, ...],
    best: tuple[Any, ...],
    now: tuple[Any, ...],
    trial: tuple[Any, ...],
    search: tuple[Any, ...],
    config: Ints,
    tiers: int,
    usd: float,
) -> None:
    run(
        ChoiceTables(*tables), Offers(*offers), Selection(*best), Selection(*now), Selection(*trial),
        Search(*search), config, tiers, usd,
    )  # fmt: skip


@lean_part
def run(
    tables: ChoiceTables,
    offers: Offers,
    best: Selection,
    now: Selection,
    trial: Selection,
    search: Search,
    config: Ints,
    tiers: int,
    usd: float,
) -> None:
    """Write the best selection found into `best`; `usd` is the cost of `config`."""
    list_offers(tables, offers, tiers, usd)
    search.work[OFFERED] = offers.count[0]
    search.usd[LEAST] = usd
    now.count[0] = 0
    fine = 1.0
    for _ in range(4):
        search.usd[FINE] = fine
        descend(tables, offers, now, trial, best, search)
        fine *= 8.0
