"""The choice problem by exchange: which few pairs are active, in which configuration; routing follows.

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
    find_caps,
    lift,
    route,
    selection_of,
    settle,
    span,
    stored_gb,
    unserved,
)
from atoll.solve.choice.simplex import PIVOTS_TYPE, Pivots, pivots_of
from atoll.solve.choice.tables import (
    BUDGET,
    TABLES_TYPE,
    ChoiceTables,
    answer_of,
    ledger_of,
    tables_of,
)

COMPILED_AS = "the choice of models"
TRIES = 4
"""Offers that are routed at each step, those of the least bounds."""
LOOSE = 1.0
"""By how much, as a share, one offer may be dearer for a second to be sought."""
ROUNDS = 2000
EFFORT = 300_000
"""Estimates that may be made; routing a selection counts as `ROUTING` of them."""
ROUTING = 100
ANCHORS = 16
"""Offers of a model from which pairs are made."""
NEARLY = 1.1
"""An error over the limit by so much may do: the rest stays unserved."""
FINES = (1.0, 6.0, 36.0)
"""USD for each USD over the budget, one after the other."""
_GAIN = 1e-7
"""USD that a step must save."""


# Slots of `Search.usd`.
STORING, FINE, LEAST = 0, 1, 2
# Slots of `Search.work`.
ROUTED, BOUNDED, STEPS, OFFERED, DRAWN, LEFT = 0, 1, 2, 3, 4, 5


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
    first: Ints
    """Offers to which a second is sought."""
    gain: Floats
    room: Floats
    """Of types that an offer serves more cheaply, and what they take of it."""
    scratch: Floats
    pivots: tuple[Any, ...]


SEARCH_TYPE = (
    "Tuple((float64[::1], int64[::1], float64[::1], int64[::1], float64[::1], int64[::1],"
    f" int64[::1], float64[::1], float64[::1], float64[:, ::1], {PIVOTS_TYPE}))"
)


def exchange(problem: ChoiceProblem, seed: int = 0, *, effort: int = EFFORT) -> ChoiceAnswer:
    """Return the best answer found; `seed` is that of AGH's random orders."""
    tables = tables_of(problem)
    ledger = ledger_of(tables)
    improve(tables, ledger, orders_of(problem, seed), switches_of(True, True, True))
    start = answer_of(problem, ledger.config, ledger.share)
    types = tables.delay.shape[0]
    offers = offers_of(tables)
    search = Search(
        np.array([problem.horizon_h * problem.storage_usd, 0.0, np.inf]),
        np.array([0, 0, 0, 0, seed, effort], np.int64),
        np.empty(types), np.empty(types, np.int64), np.empty(TRIES), np.empty(TRIES, np.int64),
        np.empty(TRIES, np.int64),
        np.empty(types), np.empty(types), np.empty((2, MOST)),
        tuple(pivots_of(3 * types + 2 * MOST + 1, types, MOST)),
    )  # fmt: skip
    best, now, trial, probe, second = (selection_of(types) for _ in range(5))
    _exchange(
        tuple(tables),
        tuple(offers),
        tuple(best),
        tuple(now),
        tuple(trial),
        tuple(probe),
        tuple(second),
        tuple(search),
        ledger.config,
        problem.shape[2],
        cost_of(problem, start).total,
    )
    found = _answer(problem, offers, best)
    return found if cost_of(problem, found).total < cost_of(problem, start).total else start


def _answer(problem: ChoiceProblem, offers: Offers, selection: Selection) -> ChoiceAnswer:
    types, models, tiers, _ = problem.shape
    config = np.full(models * tiers, -1, np.int64)
    share = np.zeros((types, models * tiers))
    for a in range(int(selection.number[0])):
        f = selection.members[a]
        if selection.share[:, a].any():
            config[offers.pair[f]] = offers.config[f]
            share[:, offers.pair[f]] = selection.share[:, a]
    return answer_of(problem, config, share)


@lean_part
def blend(offers: Offers, i: int, f: int, g: int) -> tuple[float, float]:
    """Return what a type costs that two offers serve wholly, inf where they cannot; and the first's share."""
    low, high = span(offers.slow[f, i], offers.slow[g, i], 0.0, 1.0)
    low, high = span(offers.wrong[f, i], offers.wrong[g, i], low, high)
    if low > high:
        return np.inf, 0.0
    share = high if offers.usd[f, i] < offers.usd[g, i] else low
    usd = share * offers.usd[f, i] + (1.0 - share) * offers.usd[g, i]
    return offers.keep[f] + offers.keep[g] + usd, share


@lean_part
def estimate(  # noqa: C901  (one loop, split it would be slower)
    offers: Offers, trial: Selection, g: int, search: Search, usd: float, most: float
) -> float:
    """Return about what the members cost with one more offer; `most` or more: given up.

    `usd` is the rent of all and the least that types can cost. As long as the offer has room, each type takes
    the best there is with it; beyond that, those stay away whose gain is least for the room they take.
    """
    count = trial.number[0]
    base, order, gain, room = search.base, search.order, search.gain, search.room
    taken = 0.0
    gaining = 0
    for place in range(order.shape[0]):
        i = order[place]
        value = offers.alone[g, i]
        size = max(offers.load[g, i], offers.cache[g, i])
        share = 1.0 / max(1.0, offers.slow[g, i], offers.wrong[g, i])
        whole = share >= 1.0
        for a in range(count):
            f = trial.members[a]
            if whole and offers.slow[f, i] <= 1.0 and offers.wrong[f, i] <= 1.0:
                continue
            least = offers.keep[f] + offers.keep[g] + min(offers.usd[f, i], offers.usd[g, i])
            if least < value and least < base[i]:
                both, part = blend(offers, i, f, g)
                if both < value:
                    value, share = both, 1.0 - part
        if value < base[i]:
            gain[gaining] = base[i] - value
            room[gaining] = share * size
            taken += share * size
            gaining += 1
            usd += value - offers.floor[i]
        else:
            usd += base[i] - offers.floor[i]
        if usd >= most:
            return most
    while taken > 1.0:
        worst = 0
        for n in range(1, gaining):
            if gain[n] * room[worst] < gain[worst] * room[n]:
                worst = n
        if room[worst] <= 0.0:
            break
        lost = min(1.0, (taken - 1.0) / room[worst])
        usd += lost * gain[worst]
        taken -= lost * room[worst]
        gaining -= 1
        gain[worst] = gain[gaining]
        room[worst] = room[gaining]
        if lost < 1.0 or usd >= most:
            break
    return usd


@lean_part
def leave_out(
    tables: ChoiceTables,
    offers: Offers,
    now: Selection,
    trial: Selection,
    one: int,
    two: int,
    search: Search,
) -> None:
    """Write the selection without two members (-1: none); their types go where there is room."""
    duplicate(now, trial)
    types = now.usd.shape[0]
    if one < 0:
        return
    for i in range(types):
        left = trial.share[i, one] > 0.0 or (two >= 0 and trial.share[i, two] > 0.0)
        search.order[i] = 1 if left else 0
        if left:
            lift(offers, trial, i)
    count = 0
    for a in range(now.number[0]):
        if a in (one, two):
            continue
        trial.members[count] = trial.members[a]
        trial.used[0, count] = trial.used[0, a]
        trial.used[1, count] = trial.used[1, a]
        for i in range(types):
            trial.share[i, count] = trial.share[i, a]
        count += 1
    trial.number[0] = count
    for i in range(types):
        if search.order[i] == 1:
            find_caps(offers, trial, i, search.scratch[0])
            usd = choose(tables, offers, trial, i, search.scratch[0], search.scratch[1])
            for a in range(count):
                trial.share[i, a] = 0.0
            settle(offers, trial, i, search.scratch[1], usd)


@lean_part
def duplicate(source: Selection, target: Selection) -> None:
    """Write one selection over another."""
    target.number[0] = source.number[0]
    for a in range(source.number[0]):
        target.members[a] = source.members[a]
        target.used[0, a] = source.used[0, a]
        target.used[1, a] = source.used[1, a]
    for i in range(source.usd.shape[0]):
        target.usd[i] = source.usd[i]
        for a in range(source.number[0]):
            target.share[i, a] = source.share[i, a]


@lean_part
def has_pair(offers: Offers, trial: Selection, g: int) -> bool:
    """Say whether a member is of the same pair as an offer."""
    for a in range(trial.number[0]):  # noqa: SIM110  (compiled code has no generators)
        if offers.pair[trial.members[a]] == offers.pair[g]:
            return True
    return False


@lean_part
def judge(
    tables: ChoiceTables, offers: Offers, probe: Selection, best: Selection, search: Search
) -> float:
    """Return what a selection costs once routed, and keep it if it is the best that is within the budget."""
    usd, paid = route(
        tables, offers, probe, Pivots(*search.pivots), search.usd[STORING], search.usd[FINE],
        search.scratch,
    )  # fmt: skip
    search.work[ROUTED] += 1
    search.work[LEFT] -= ROUTING
    if paid and usd < search.usd[LEAST]:
        search.usd[LEAST] = usd
        duplicate(probe, best)
    return usd


@lean_part
def sort_types(offers: Offers, trial: Selection, search: Search) -> None:
    """Note what types cost, and sort them: those with most to gain first."""
    base, order = search.base, search.order
    for i in range(base.shape[0]):
        base[i] = trial.usd[i]
        place = i
        while place > 0:
            before = order[place - 1]
            if base[before] - offers.floor[before] >= base[i] - offers.floor[i]:
                break
            order[place] = before
            place -= 1
        order[place] = i


@lean_part
def shortlist(
    tables: ChoiceTables, offers: Offers, trial: Selection, search: Search, most: float
) -> int:
    """List offers with the least estimates below `most`, the best first; return how many."""
    bounds, held = search.bounds, search.held
    sort_types(offers, trial, search)
    rent, least = 0.0, 0.0
    for a in range(trial.number[0]):
        rent += offers.rent[trial.members[a]]
    for i in range(offers.floor.shape[0]):
        least += offers.floor[i]
    over = rent + search.usd[STORING] * stored_gb(tables, offers, trial) - tables.limits[BUDGET]
    fine = search.usd[FINE]
    found = 0
    for g in range(offers.number[0]):
        first = rent + offers.rent[g] + least + fine * max(0.0, over + offers.rent[g])
        if first >= most or has_pair(offers, trial, g):
            continue
        search.work[BOUNDED] += 1
        search.work[LEFT] -= 1
        value = estimate(offers, trial, g, search, first, most)
        if value >= most:
            continue
        # One offer of a model: others of it are much alike.
        model = offers.model[g]
        place = 0
        while place < found and offers.model[held[place]] != model:
            place += 1
        if place < found:
            if value >= bounds[place]:
                continue
        elif found < TRIES:
            found += 1
        else:
            place = TRIES - 1
        while place > 0 and bounds[place - 1] > value:
            bounds[place] = bounds[place - 1]
            held[place] = held[place - 1]
            place -= 1
        bounds[place] = value
        held[place] = g
        if found == TRIES:
            most = bounds[TRIES - 1]
    return found


@lean_part
def step(
    tables: ChoiceTables,
    offers: Offers,
    now: Selection,
    trial: Selection,
    probe: Selection,
    second: Selection,
    best: Selection,
    search: Search,
    one: int,
    two: int,
    usd: float,
    deep: bool,
) -> float:
    """Leave out two members (-1: none), take in one offer or two, whatever is best, if that saves."""
    leave_out(tables, offers, now, trial, one, two, search)
    count = trial.number[0]
    found = 0
    # With a second offer an estimate may still fall.
    loose = LOOSE if deep and two < 0 and count + 1 < MOST else 0.0
    if count < MOST:
        found = shortlist(tables, offers, trial, search, (1.0 + loose) * usd - _GAIN)
    else:
        sort_types(offers, trial, search)
    least_usd = usd - _GAIN
    if one >= 0:
        duplicate(trial, probe)
        least_usd = take_if_less(tables, offers, now, probe, best, search, least_usd)
    for place in range(found):
        search.first[place] = search.held[place]
        if search.bounds[place] < least_usd:
            duplicate(trial, probe)
            take_in(probe, search.held[place])
            least_usd = take_if_less(tables, offers, now, probe, best, search, least_usd)
    if loose == 0.0 or least_usd < usd - _GAIN:
        return least_usd if least_usd < usd - _GAIN else usd
    for place in range(found):
        take_in(trial, search.first[place])
        sort_types(offers, trial, search)
        duplicate(trial, probe)
        judge(tables, offers, probe, best, search)
        # `second` keeps what `probe` is without the second offer.
        duplicate(probe, second)
        more = shortlist(tables, offers, second, search, least_usd)
        for n in range(more):
            if search.bounds[n] < least_usd:
                duplicate(second, probe)
                take_in(probe, search.held[n])
                least_usd = take_if_less(tables, offers, now, probe, best, search, least_usd)
        trial.number[0] = count
    return least_usd if least_usd < usd - _GAIN else usd


@lean_part
def take_in(selection: Selection, g: int) -> None:
    """Add an offer, with nothing on it."""
    count = selection.number[0]
    selection.members[count] = g
    selection.used[0, count] = 0.0
    selection.used[1, count] = 0.0
    for i in range(selection.usd.shape[0]):
        selection.share[i, count] = 0.0
    selection.number[0] = count + 1


@lean_part
def take_if_less(
    tables: ChoiceTables,
    offers: Offers,
    now: Selection,
    probe: Selection,
    best: Selection,
    search: Search,
    usd: float,
) -> float:
    """Route a selection and make it the one that is if it costs less; return the lesser cost."""
    value = judge(tables, offers, probe, best, search)
    if value < usd:
        duplicate(probe, now)
        return value
    return usd


@lean_part
def descend(
    tables: ChoiceTables,
    offers: Offers,
    now: Selection,
    trial: Selection,
    probe: Selection,
    second: Selection,
    best: Selection,
    search: Search,
    deep: bool,
) -> None:
    """Make steps until none saves, or no work is left."""
    sort_types(offers, now, search)
    usd = judge(tables, offers, now, best, search)
    one, two, idle = -1, -1, 0
    for _ in range(ROUNDS):
        count = now.number[0]
        ways = 1 + count + count * (count - 1) // 2
        if idle >= ways or search.work[LEFT] <= 0:
            break
        after = step(tables, offers, now, trial, probe, second, best, search, one, two, usd, deep)
        search.work[STEPS] += 1
        idle = 0 if after < usd else idle + 1
        if after < usd and one == -1:
            usd = after
            continue
        usd = after
        # None, then each, then each two.
        count = now.number[0]
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
    for f in range(offers.number[0]):
        c = config[offers.pair[f]]
        if c >= 0 and gpus[c] == gpus[offers.config[f]] and count < MOST:
            if count > 0 and offers.pair[now.members[count - 1]] == offers.pair[f]:
                # Two configurations of as many GPUs: the one that the answer has.
                if offers.config[f] == c:
                    now.members[count - 1] = f
                continue
            take_in(now, f)
            count += 1


@entry(
    f"({TABLES_TYPE}, {OFFERS_TYPE}, {SELECTION_TYPE}, {SELECTION_TYPE}, {SELECTION_TYPE},"
    f" {SELECTION_TYPE}, {SELECTION_TYPE}, {SEARCH_TYPE}, int64[::1], int64, float64)"
)
def _exchange(
    tables: tuple[Any, ...],
    offers: tuple[Any, ...],
    best: tuple[Any, ...],
    now: tuple[Any, ...],
    trial: tuple[Any, ...],
    probe: tuple[Any, ...],
    second: tuple[Any, ...],
    search: tuple[Any, ...],
    config: Ints,
    tiers: int,
    usd: float,
) -> None:
    run(
        ChoiceTables(*tables), Offers(*offers), Selection(*best), Selection(*now), Selection(*trial),
        Selection(*probe), Selection(*second), Search(*search), config, tiers, usd,
    )  # fmt: skip


@lean_part
def run(
    tables: ChoiceTables,
    offers: Offers,
    best: Selection,
    now: Selection,
    trial: Selection,
    probe: Selection,
    second: Selection,
    search: Search,
    config: Ints,
    tiers: int,
    usd: float,
) -> None:
    """Write the best selection found into `best`; `usd` is the cost of `config`."""
    list_offers(tables, offers, tiers, usd)
    search.work[OFFERED] = offers.number[0]
    search.usd[LEAST] = usd
    start_empty(tables, now)
    for fine in FINES:
        search.usd[FINE] = fine
        descend(tables, offers, now, trial, probe, second, best, search, False)
    pair_up(tables, offers, now, trial, probe, second, best, search)
    start_empty(tables, now)
    enter(offers, now, config, tables.gpus)
    search.usd[FINE] = FINES[1]
    descend(tables, offers, now, trial, probe, second, best, search, False)
    duplicate(best, now)
    descend(tables, offers, now, trial, probe, second, best, search, True)
    kick = 0
    while search.work[LEFT] > 0:
        duplicate(best, now)
        shake(tables, offers, now, trial, search)
        search.usd[FINE] = FINES[1 + kick % 2]
        descend(tables, offers, now, trial, probe, second, best, search, False)
        kick += 1
        # Each costs something, whatever it finds.
        search.work[LEFT] -= ROUTING


@lean_part
def hardest(offers: Offers) -> int:
    """Return the type that costs most to serve alone, with rent."""
    hard, most = 0, -1.0
    for i in range(offers.floor.shape[0]):
        least = np.inf
        for f in range(offers.number[0]):
            least = min(least, offers.rent[f] + offers.alone[f, i])
        if least > most:
            hard, most = i, least
    return hard


@lean_part
def pair_up(
    tables: ChoiceTables,
    offers: Offers,
    now: Selection,
    trial: Selection,
    probe: Selection,
    second: Selection,
    best: Selection,
    search: Search,
) -> None:
    """Start from pairs: an offer that can serve the hardest type, cheap ones first, with the best second.

    The best pair of each model that can is where a descent begins.
    """
    hard = hardest(offers)
    search.usd[FINE] = FINES[1]
    count = offers.number[0]
    for f in range(count):
        offers.useless[f] = 1 if offers.wrong[f, hard] > NEARLY else 0
    begin = 0
    while begin < count and search.work[LEFT] > 0:
        end = begin
        while end < count and offers.model[end] == offers.model[begin]:
            end += 1
        least = np.inf
        for _ in range(ANCHORS):
            g = -1
            for f in range(begin, end):
                if offers.useless[f] == 0 and (g < 0 or offers.rent[f] < offers.rent[g]):
                    g = f
            if g < 0 or search.work[LEFT] <= 0:
                break
            offers.useless[g] = 1
            start_empty(tables, trial)
            take_in(trial, g)
            judge(tables, offers, trial, best, search)
            found = shortlist(tables, offers, trial, search, np.inf)
            for place in range(found):
                duplicate(trial, probe)
                take_in(probe, search.held[place])
                usd = judge(tables, offers, probe, best, search)
                if usd < least:
                    least = usd
                    duplicate(probe, now)
        if least < np.inf:
            descend(tables, offers, now, trial, probe, second, best, search, False)
        begin = end


@lean_part
def start_empty(tables: ChoiceTables, now: Selection) -> None:
    """Select nothing."""
    now.number[0] = 0
    for i in range(now.usd.shape[0]):
        now.usd[i] = unserved(tables, i, 1.0)


@lean_part
def draw(search: Search, below: int) -> int:
    """Return a number below a limit, from the search's own sequence."""
    search.work[DRAWN] = (search.work[DRAWN] * 1103515245 + 12345) % 2147483648
    return int((search.work[DRAWN] >> 8) % below)


@lean_part
def shake(
    tables: ChoiceTables, offers: Offers, now: Selection, trial: Selection, search: Search
) -> None:
    """Leave out one or two members and take in an offer, all of them drawn."""
    count = now.number[0]
    if count > 0:
        one = draw(search, count)
        two = draw(search, count)
        leave_out(tables, offers, now, trial, one, two, search)
        duplicate(trial, now)
    if offers.number[0] > 0:
        g = draw(search, offers.number[0])
        if not has_pair(offers, now, g):
            take_in(now, g)
