"""The choice problem by exchange: which few pairs are active, in which configuration; routing follows.

Rent dominates, so few pairs are active. The state is that set; its cost is that of routing all types to it
(`routing`). One step leaves out at most one member and takes in at most one offer. What is left is priced,
every offer is judged at these prices (`estimates`), and those with the least bounds are routed. Steps start
from nothing, then from pairs of offers one of which can answer the hardest type, and then from the best
answer with some members drawn to be left out. Work is counted, not timed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from atoll.core.compiling import entry, lean_part
from atoll.solve.choice.estimates import (
    BY_MODEL,
    BY_PAIR,
    PLAIN,
    SHORTLIST_TYPE,
    TRIES,
    Shortlist,
    list_short,
    look_at_all,
    look_at_best,
    shortlist_of,
)
from atoll.solve.choice.offers import MOST, OFFERS_TYPE, Offers, list_offers, offers_of
from atoll.solve.choice.prices import Prices
from atoll.solve.choice.problem import ChoiceAnswer, ChoiceProblem, Floats, Ints
from atoll.solve.choice.routing import (
    DESK_TYPE,
    SELECTION_TYPE,
    Desk,
    Selection,
    desk_of,
    duplicate,
    price,
    selection_of,
    settle,
)
from atoll.solve.choice.tables import TABLES_TYPE, ChoiceTables, answer_of, tables_of
from atoll.solve.choice.ways import Ways

COMPILED_AS = "the choice of models"
ROUNDS = 2000
EFFORT = 1_000_000
"""Ways and offers that may be looked at."""
NEARLY = 1.1
"""An error over the limit by so much may do: the rest stays unserved."""
ANCHORS = 64
"""Offers that can serve the hardest type, from which pairs are made."""
SCOUTS = 3
"""Of these, how many are tried with all offers."""
POOL = 120
"""Offers that are looked at afterwards."""
FIRSTS = 12
"""Offers to which a second is sought."""
SECONDS = 6
"""Offers that are routed with each of those that can serve the hardest type."""
STARTS = 4
"""Pairs from which steps start."""
KICKS = int(__import__("os").environ.get("KICKS","40"))
"""Times that members of the best answer are left out."""
ENOUGH = 2.0
"""Prices are not sought beyond so many times the least cost: they are calmed anyway."""
_GAIN = 1e-7
"""USD that a step must save."""
# Slots of `Search.usd`.
GB_USD, LEAST = 0, 1
# Slots of `Search.work`.
DRAWN, EFFORT_LEFT, ROUTED, LISTED, PRICED = 0, 1, 2, 3, 4


class Search(NamedTuple):
    """What steps work in."""

    usd: Floats
    """What a GB costs over the horizon; the least cost so far."""
    work: Ints
    """The last number drawn, work left, selections routed, shortlists made, selections priced."""
    held: Ints
    """A shortlist."""
    bounds: Floats
    """Its bounds."""
    starts: Ints
    """starts[n, 0 and 1]: offers to start from."""
    start_usd: Floats
    """What they cost, the least first."""
    anchors: Ints
    """Offers that can serve the hardest type."""
    knobs: Ints


SEARCH_TYPE = (
    "Tuple((float64[::1], int64[::1], int64[::1], float64[::1], int64[:, ::1], float64[::1],"
    " int64[::1], int64[::1]))"
)
TRACE: list[Any] = []


def exchange(problem: ChoiceProblem, seed: int = 0, *, effort: int = EFFORT) -> ChoiceAnswer:
    """Return the best answer found; `seed` is that of the members drawn to be left out."""
    tables = tables_of(problem)
    types = tables.delay.shape[0]
    offers = offers_of(tables)
    search = Search(
        np.array([problem.horizon_h * problem.storage_usd, np.inf, 0.0, 0.0, 0.0]),
        np.array([seed, effort, 0, 0, 0, 0, 0, 0,0,0,0], np.int64),
        np.zeros(TRIES, np.int64), np.zeros(TRIES),
        np.zeros((50, 2), np.int64), np.zeros(50), np.zeros(200, np.int64), np.array([SCOUTS,POOL,FIRSTS,STARTS,ANCHORS,KICKS]),
    )  # fmt: skip
    best, now, trial, probe = (selection_of(types) for _ in range(4))
    _exchange(
        tuple(tables), tuple(offers), tuple(best), tuple(now), tuple(trial), tuple(probe),
        tuple(search), tuple(desk_of(types)), tuple(shortlist_of(types, len(offers.pair))), problem.shape[2],
    )  # fmt: skip
    TRACE[:] = [search, offers.number[0], best.number[0]]
    return _answer(problem, offers, best)


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
def leave_out(now: Selection, trial: Selection, one: int, two: int) -> None:
    """Write the members of a selection without two of them (-1: none)."""
    count = 0
    for a in range(now.number[0]):
        if a not in (one, two):
            trial.members[count] = now.members[a]
            count += 1
    trial.number[0] = count


@lean_part
def take_in(selection: Selection, g: int) -> None:
    """Add an offer."""
    selection.members[selection.number[0]] = g
    selection.number[0] += 1


@lean_part
def judge(
    tables: ChoiceTables,
    offers: Offers,
    probe: Selection,
    best: Selection,
    search: Search,
    desk: Desk,
    most: float,
) -> float:
    """Return what a selection costs once routed, inf where that is `most` or more; keep the best there is."""
    ways, prices = Ways(*desk.ways), Prices(*desk.prices)
    search.work[PRICED] += 1
    bound = price(tables, offers, probe, ways, prices, search.usd[GB_USD], most)
    if bound >= most:
        return np.inf
    search.work[ROUTED] += 1
    usd = settle(tables, offers, probe, ways, prices, desk, most, bound < search.usd[LEAST])
    if usd < search.usd[LEAST]:
        search.usd[LEAST] = usd
        duplicate(probe, best)
    return usd


@lean_part
def enough(search: Search) -> float:
    """Return the bound at which prices of a selection to which an offer is sought are high enough."""
    return ENOUGH * search.usd[LEAST]


@lean_part
def step(
    tables: ChoiceTables,
    offers: Offers,
    now: Selection,
    trial: Selection,
    probe: Selection,
    best: Selection,
    search: Search,
    desk: Desk,
    short: Shortlist,
    one: int,
    usd: float,
) -> float:
    """Leave out a member (-1: none), take in one offer or none, whatever is best, if that saves."""
    ways, prices = Ways(*desk.ways), Prices(*desk.prices)
    leave_out(now, trial, one, -1)
    bound = price(tables, offers, trial, ways, prices, search.usd[GB_USD], enough(search))
    least = usd - _GAIN
    found = 0
    if trial.number[0] < MOST:
        search.work[LISTED] += 1
        found = list_short(tables, offers, ways, prices, short, least, PLAIN, False)
    if one >= 0 and bound < least:
        duplicate(trial, probe)
        value = judge(tables, offers, probe, best, search, desk, least)
        if value < least:
            duplicate(probe, now)
            least = value
    for place in range(found):
        leave_out(trial, probe, -1, -1)
        take_in(probe, short.held[place])
        value = judge(tables, offers, probe, best, search, desk, least)
        if value < least:
            duplicate(probe, now)
            least = value
    return least if least < usd - _GAIN else usd


@lean_part
def descend(
    tables: ChoiceTables,
    offers: Offers,
    now: Selection,
    trial: Selection,
    probe: Selection,
    best: Selection,
    search: Search,
    desk: Desk,
    short: Shortlist,
) -> None:
    """Make steps until none saves, or no work is left."""
    usd = judge(tables, offers, now, best, search, desk, np.inf)
    one, idle = -1, 0
    for _ in range(ROUNDS):
        if idle > now.number[0] or is_spent(search, desk):
            break
        after = step(
            tables, offers, now, trial, probe, best, search, desk, short, one, usd
        )
        idle = 0 if after < usd else idle + 1
        usd = after
        one = one + 1 if one + 1 < now.number[0] else -1


@lean_part
def is_spent(search: Search, desk: Desk) -> bool:
    """Say whether no work is left."""
    return Prices(*desk.prices).spent[0] > search.work[EFFORT_LEFT]


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
def list_anchors(offers: Offers, search: Search, short: Shortlist) -> int:
    """List offers that can serve the hardest type, those of most merit first; return how many."""
    hard = hardest(offers)
    count = 0
    for f in range(offers.number[0]):
        if offers.wrong[f, hard] > NEARLY or offers.load[f, hard] > NEARLY:
            continue
        place = count
        while place > 0 and short.merit[search.anchors[place - 1]] > short.merit[f]:
            if place < search.knobs[4]:
                search.anchors[place] = search.anchors[place - 1]
            place -= 1
        if place < search.knobs[4]:
            search.anchors[place] = f
            count = min(search.knobs[4], count + 1)
    return count


@lean_part
def scout(
    tables: ChoiceTables,
    offers: Offers,
    trial: Selection,
    search: Search,
    desk: Desk,
    short: Shortlist,
) -> int:
    """List anchors, and narrow the offers that are looked at; return how many anchors there are.

    These are offers that can serve the hardest type. A few of them show which other offers are worth a look.
    """
    ways, prices = Ways(*desk.ways), Prices(*desk.prices)
    look_at_all(offers, short)
    trial.number[0] = 0
    price(tables, offers, trial, ways, prices, search.usd[GB_USD], np.inf)
    list_short(tables, offers, ways, prices, short, np.inf, BY_MODEL, True)
    anchors = list_anchors(offers, search, short)
    for g in range(offers.number[0]):
        short.merit[g] = np.inf
    for n in range(search.knobs[0]):
        if anchors > 0:
            trial.number[0] = 0
            take_in(trial, search.anchors[n * anchors // search.knobs[0]])
            price(tables, offers, trial, ways, prices, search.usd[GB_USD], np.inf)
            list_short(tables, offers, ways, prices, short, np.inf, PLAIN, True)
            search.work[LISTED] += 1
    if anchors > 0:
        for n in range(anchors):
            short.merit[search.anchors[n]] = -np.inf
        look_at_best(offers, short, anchors + search.knobs[1])
    return anchors


@lean_part
def pair_up(
    tables: ChoiceTables,
    offers: Offers,
    trial: Selection,
    probe: Selection,
    best: Selection,
    search: Search,
    desk: Desk,
    short: Shortlist,
    anchors: int,
) -> int:
    """Find pairs to start from: an anchor with the best second offer; return how many."""
    ways, prices = Ways(*desk.ways), Prices(*desk.prices)
    count = 0
    for n in range(anchors):
        if is_spent(search, desk):
            break
        f = search.anchors[n]
        trial.number[0] = 0
        take_in(trial, f)
        # The last of the starts is what there is to beat.
        most = np.inf if count < search.knobs[3] else search.start_usd[search.knobs[3] - 1]
        price(tables, offers, trial, ways, prices, search.usd[GB_USD], enough(search))
        found = list_short(tables, offers, ways, prices, short, most, PLAIN, False)
        search.work[LISTED] += 1
        least, second = most, -1
        for place in range(min(found, SECONDS)):
            leave_out(trial, probe, -1, -1)
            take_in(probe, short.held[place])
            usd = judge(tables, offers, probe, best, search, desk, least)
            if usd < least:
                least, second = usd, short.held[place]
        if second >= 0:
            count = keep_start(offers, search, count, f, second, least)
    return count


@lean_part
def deepen(
    tables: ChoiceTables,
    offers: Offers,
    now: Selection,
    trial: Selection,
    probe: Selection,
    best: Selection,
    search: Search,
    desk: Desk,
    short: Shortlist,
    hopeful: int,
) -> None:
    """Take two offers in at once, each of the best few firsts with the best seconds."""
    ways, prices = Ways(*desk.ways), Prices(*desk.prices)
    price(tables, offers, now, ways, prices, search.usd[GB_USD], enough(search))
    firsts = list_short(tables, offers, ways, prices, short, np.inf, hopeful, False)
    search.work[LISTED] += 1
    firsts = min(firsts, search.knobs[2])
    for n in range(firsts):
        search.held[n] = short.held[n]
    for n in range(firsts):
        if is_spent(search, desk):
            break
        leave_out(now, trial, -1, -1)
        take_in(trial, search.held[n])
        price(tables, offers, trial, ways, prices, search.usd[GB_USD], enough(search))
        found = list_short(tables, offers, ways, prices, short, search.usd[LEAST], PLAIN, False)
        search.work[LISTED] += 1
        for place in range(found):
            leave_out(trial, probe, -1, -1)
            take_in(probe, short.held[place])
            judge(tables, offers, probe, best, search, desk, search.usd[LEAST])


@lean_part
def keep_start(
    offers: Offers, search: Search, count: int, f: int, second: int, usd: float
) -> int:
    """Note a pair to start from, one for each (model, tier) of its first offer; return how many there are."""
    place = 0
    while place < count and offers.pair[search.starts[place, 0]] != offers.pair[f]:
        place += 1
    if place < count:
        if usd >= search.start_usd[place]:
            return count
    elif count < search.knobs[3]:
        count += 1
    else:
        place = search.knobs[3] - 1
        if usd >= search.start_usd[place]:
            return count
    while place > 0 and search.start_usd[place - 1] > usd:
        search.start_usd[place] = search.start_usd[place - 1]
        search.starts[place, 0] = search.starts[place - 1, 0]
        search.starts[place, 1] = search.starts[place - 1, 1]
        place -= 1
    search.start_usd[place] = usd
    search.starts[place, 0] = f
    search.starts[place, 1] = second
    return count


@entry(
    f"({TABLES_TYPE}, {OFFERS_TYPE}, {SELECTION_TYPE}, {SELECTION_TYPE}, {SELECTION_TYPE},"
    f" {SELECTION_TYPE}, {SEARCH_TYPE}, {DESK_TYPE}, {SHORTLIST_TYPE}, int64)"
)
def _exchange(
    tables: tuple[Any, ...],
    offers: tuple[Any, ...],
    best: tuple[Any, ...],
    now: tuple[Any, ...],
    trial: tuple[Any, ...],
    probe: tuple[Any, ...],
    search: tuple[Any, ...],
    desk: tuple[Any, ...],
    short: tuple[Any, ...],
    tiers: int,
) -> None:
    run(
        ChoiceTables(*tables), Offers(*offers), Selection(*best), Selection(*now), Selection(*trial),
        Selection(*probe), Search(*search), Desk(*desk), Shortlist(*short), tiers,
    )  # fmt: skip


@lean_part
def run(
    tables: ChoiceTables,
    offers: Offers,
    best: Selection,
    now: Selection,
    trial: Selection,
    probe: Selection,
    search: Search,
    desk: Desk,
    short: Shortlist,
    tiers: int,
) -> None:
    """Write the best selection found into `best`."""
    list_offers(tables, offers, tiers, np.inf)
    anchors = scout(tables, offers, trial, search, desk, short)
    now.number[0] = 0
    descend(tables, offers, now, trial, probe, best, search, desk, short)
    search.usd[2] = search.usd[LEAST]
    search.work[5] = Prices(*desk.prices).spent[0]
    search.work[6] = search.work[LISTED]
    starts = pair_up(tables, offers, trial, probe, best, search, desk, short, anchors)
    search.usd[3] = search.usd[LEAST]
    search.work[7] = Prices(*desk.prices).spent[0]
    search.work[8] = search.work[LISTED]
    for hopeful in (BY_MODEL, BY_PAIR):
        for n in range(starts):
            now.number[0] = 0
            take_in(now, search.starts[n, 0])
            deepen(tables, offers, now, trial, probe, best, search, desk, short, hopeful)
        duplicate(best, now)
        descend(tables, offers, now, trial, probe, best, search, desk, short)
        if hopeful == BY_MODEL:
            for n in range(starts):
                now.number[0] = 0
                take_in(now, search.starts[n, 0])
                take_in(now, search.starts[n, 1])
                descend(tables, offers, now, trial, probe, best, search, desk, short)
    search.usd[4] = search.usd[LEAST]
    search.work[9] = Prices(*desk.prices).spent[0]
    search.work[10] = search.work[LISTED]
    for kick in range(search.knobs[5]):
        if is_spent(search, desk):
            break
        if kick % 2 == 0:
            leave_out(best, now, draw(search, max(1, best.number[0])), -1)
            deepen(tables, offers, now, trial, probe, best, search, desk, short, BY_PAIR)
        else:
            shake(offers, best, now, search)
            descend(tables, offers, now, trial, probe, best, search, desk, short)


@lean_part
def draw(search: Search, below: int) -> int:
    """Return a number below a limit, from the search's own sequence."""
    search.work[DRAWN] = (search.work[DRAWN] * 1103515245 + 12345) % 2147483648
    return int((search.work[DRAWN] >> 8) % below)


@lean_part
def shake(offers: Offers, best: Selection, now: Selection, search: Search) -> None:
    """Leave out one or two members of the best answer and take in an offer, all of them drawn."""
    count = best.number[0]
    one, two = -1, -1
    if count > 0:
        one, two = draw(search, count), draw(search, count)
    leave_out(best, now, one, two)
    if offers.number[0] > 0:
        g = draw(search, offers.number[0])
        for a in range(now.number[0]):
            if offers.pair[now.members[a]] == offers.pair[g]:
                return
        take_in(now, g)
