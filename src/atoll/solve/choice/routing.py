"""Routing of all types to a few chosen offers (numba): exact for each type alone, repaired where offers fill up.

A type's best mixture of offers keeps its delay and its error: three rows with the one that the shares add up,
so it has at most three parts, one of which may be what is unserved. Mixtures of up to two offers are looked
at, each with the weights it has to store. Types compete only for FLOP/s, memory and storage. All take what
is best for them first; while an offer is over its limit, the type with the cheapest way out, for what it
frees, goes as far as it must. Storage is treated by a price per GB that rises until it suffices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.core.compiling import lean_part
from atoll.solve.choice.offers import MOST, Offers
from atoll.solve.choice.problem import Floats, Ints
from atoll.solve.choice.tables import BUDGET, STORAGE, ChoiceTables

_FREE = 1e18
_LEAST = 1e-7
"""A smaller share of a type is not placed."""
_OVER = 1e-9
_PASSES = 3
"""Passes in which each type may choose again, once all fit."""
_MOST_MOVES = 200
_PRICES = 8
_RISE = 3.0
"""How often the price of storage may rise, and by how much."""
_FORBIDDEN = 1e7
"""USD for all of a type unserved beyond what may be."""


class Selection(NamedTuple):
    """Chosen offers and who goes where."""

    count: Ints
    """count[0] offers are chosen."""
    members: Ints
    """members[a], an offer."""
    picks: Ints
    """picks[i, 0 and 1]: places in `members`, -1 where there is none."""
    parts: Floats
    """parts[i, 0 and 1]: shares."""
    usd: Floats
    """usd[i]: what a type costs, without rent."""
    used: Floats
    """used[0 and 1, a]: FLOP/s and memory in use, as shares."""


SELECTION_TYPE = (
    "Tuple((int64[::1], int64[::1], int64[:, ::1], float64[:, ::1], float64[::1], float64[:, ::1]))"
)


def selection_of(types: int) -> Selection:
    """Return a selection of nothing."""
    return Selection(
        np.zeros(1, np.int64), np.zeros(MOST, np.int64), np.full((types, 2), -1, np.int64),
        np.zeros((types, 2)), np.zeros(types), np.zeros((2, MOST)),
    )  # fmt: skip


@lean_part
def unserved(tables: ChoiceTables, i: int, share: float) -> float:
    """Return what an unserved share of a type costs; beyond what may be unserved, more than anything."""
    usd = tables.unmet_usd[i] * share
    if share > tables.most_unmet[i] + _OVER:
        usd += _FORBIDDEN * (share - tables.most_unmet[i])
    return usd


@lean_part
def span(one: float, other: float, low: float, high: float) -> tuple[float, float]:
    """Narrow the shares s for which s `one` + (1 - s) `other` is at most 1."""
    if one > 1.0:
        if other > 1.0:
            return 1.0, 0.0
        return low, min(high, (1.0 - other) / (one - other))
    if other > 1.0:
        return max(low, (other - 1.0) / (other - one)), high
    return low, high


@lean_part
def choose(
    tables: ChoiceTables,
    offers: Offers,
    selection: Selection,
    i: int,
    gb_usd: float,
    caps: Floats,
    out: Floats,
) -> float:
    """Find the cheapest mixture for a type, of which `caps[a]` may go to member a; return its cost.

    `gb_usd` is a price per GB beside that which is paid, and counts in the cost. The mixture is written to
    `out`: places of the two members and their shares.
    """
    count = selection.count[0]
    members = selection.members
    data = gb_usd * tables.data_gb[i]
    best = unserved(tables, i, 1.0)
    out[0], out[1], out[2], out[3] = -1.0, -1.0, 0.0, 0.0
    whole = False
    for a in range(count):
        f = members[a]
        most = min(caps[a], 1.0 / max(1.0, offers.slow[f, i], offers.wrong[f, i]))
        if most < _LEAST:
            continue
        keep = offers.keep[f] + gb_usd * tables.keep_gb[offers.pair[f]]
        usd = keep + most * (offers.usd[f, i] + data) + unserved(tables, i, 1.0 - most)
        whole = whole or most >= 1.0
        if usd < best:
            best = usd
            out[0], out[1], out[2], out[3] = a, -1.0, most, 0.0
    for a in range(count):
        if caps[a] < _LEAST:
            continue
        f = members[a]
        keep = offers.keep[f] + gb_usd * tables.keep_gb[offers.pair[f]]
        is_whole = caps[a] >= 1.0 and offers.slow[f, i] <= 1.0 and offers.wrong[f, i] <= 1.0
        for b in range(a):
            g = members[b]
            if is_whole and caps[b] >= 1.0 and offers.slow[g, i] <= 1.0 and offers.wrong[g, i] <= 1.0:
                # Cost is linear between them: one of the two alone is cheaper.
                continue
            both = keep + offers.keep[g] + gb_usd * tables.keep_gb[offers.pair[g]] + data
            if caps[b] < _LEAST or both + min(offers.usd[f, i], offers.usd[g, i]) >= best:
                continue
            low, high = max(0.0, 1.0 - caps[b]), min(1.0, caps[a])
            low, high = span(offers.slow[f, i], offers.slow[g, i], low, high)
            low, high = span(offers.wrong[f, i], offers.wrong[g, i], low, high)
            if low <= high:
                share = high if offers.usd[f, i] < offers.usd[g, i] else low
                usd = both + share * offers.usd[f, i] + (1.0 - share) * offers.usd[g, i]
                if usd < best and share > _LEAST and share < 1.0 - _LEAST:
                    best = usd
                    whole = True
                    out[0], out[1], out[2], out[3] = a, b, share, 1.0 - share
    if whole:
        return best
    for a in range(count):
        for b in range(count):
            if a != b:
                best = choose_part(tables, offers, selection, i, gb_usd, caps, a, b, best, out)
    return best


@lean_part
def choose_part(
    tables: ChoiceTables,
    offers: Offers,
    selection: Selection,
    i: int,
    gb_usd: float,
    caps: Floats,
    a: int,
    b: int,
    best: float,
    out: Floats,
) -> float:
    """Try mixtures of two members that leave some of a type unserved: `choose` where nothing serves all."""
    f, g = selection.members[a], selection.members[b]
    slow_a, slow_b, wrong_a, wrong_b = (
        offers.slow[f, i], offers.slow[g, i], offers.wrong[f, i], offers.wrong[g, i],
    )  # fmt: skip
    keep = offers.keep[f] + offers.keep[g]
    keep += gb_usd * (tables.keep_gb[offers.pair[f]] + tables.keep_gb[offers.pair[g]])
    for way in range(2):
        if way == 0:
            # As much as can be to one, then to the other.
            one = min(caps[a], 1.0 / max(1.0, slow_a, wrong_a))
            two = min(caps[b], 1.0 - one)
            if slow_b > 0.0:
                two = min(two, (1.0 - one * slow_a) / slow_b)
            if wrong_b > 0.0:
                two = min(two, (1.0 - one * wrong_a) / wrong_b)
        else:
            # Delay and error both at their limits.
            size = slow_a * wrong_b - slow_b * wrong_a
            if abs(size) < 1e-12:
                continue
            one = (wrong_b - slow_b) / size
            two = (slow_a - wrong_a) / size
        if one < _LEAST or two < _LEAST or one > caps[a] or two > caps[b] or one + two > 1.0:
            continue
        usd = keep + unserved(tables, i, 1.0 - one - two) + (one + two) * gb_usd * tables.data_gb[i]
        usd += one * offers.usd[f, i] + two * offers.usd[g, i]
        if usd < best:
            best = usd
            out[0], out[1], out[2], out[3] = a, b, one, two
    return best


@lean_part
def settle(offers: Offers, selection: Selection, i: int, out: Floats, usd: float) -> None:
    """Take over what `choose` found."""
    for side in range(2):
        a = int(out[side])
        share = out[2 + side]
        selection.picks[i, side] = a
        selection.parts[i, side] = share
        if a >= 0:
            f = selection.members[a]
            selection.used[0, a] += share * offers.load[f, i]
            selection.used[1, a] += share * offers.cache[f, i]
    selection.usd[i] = usd


@lean_part
def lift(offers: Offers, selection: Selection, i: int) -> None:
    """Take a type off all members."""
    for side in range(2):
        a = selection.picks[i, side]
        if a >= 0:
            f = selection.members[a]
            share = selection.parts[i, side]
            selection.used[0, a] -= share * offers.load[f, i]
            selection.used[1, a] -= share * offers.cache[f, i]
        selection.picks[i, side] = -1
        selection.parts[i, side] = 0.0


@lean_part
def find_caps(offers: Offers, selection: Selection, i: int, caps: Floats) -> None:
    """Write the share of a type that each member has room for."""
    for a in range(selection.count[0]):
        f = selection.members[a]
        cap = 1.0
        left = max(0.0, 1.0 - selection.used[0, a])
        if offers.load[f, i] > left:
            cap = left / offers.load[f, i]
        left = max(0.0, 1.0 - selection.used[1, a])
        if offers.cache[f, i] * cap > left:
            cap = left / offers.cache[f, i]
        caps[a] = cap


@lean_part
def fullest(selection: Selection) -> int:
    """Return the member that is furthest over its limits, -1 where none is."""
    worst, most = -1, 1.0 + _OVER
    for a in range(selection.count[0]):
        used = max(selection.used[0, a], selection.used[1, a])
        if used > most:
            worst, most = a, used
    return worst


@lean_part
def part_of(selection: Selection, i: int, a: int) -> float:
    """Return the share of a type that goes to a member."""
    for side in range(2):
        if selection.picks[i, side] == a:
            return selection.parts[i, side]
    return 0.0


@lean_part
def rechoose(
    tables: ChoiceTables,
    offers: Offers,
    selection: Selection,
    i: int,
    gb_usd: float,
    scratch: Floats,
) -> float:
    """Take a type off and find where it goes best now, into `scratch[1]`; return the cost. It stays off."""
    lift(offers, selection, i)
    find_caps(offers, selection, i, scratch[0])
    return choose(tables, offers, selection, i, gb_usd, scratch[0], scratch[1])


@lean_part
def remember(selection: Selection, i: int, out: Floats) -> None:
    """Write where a type goes now, as `choose` does."""
    for side in range(2):
        out[side] = selection.picks[i, side]
        out[2 + side] = selection.parts[i, side]


@lean_part
def relieve(
    tables: ChoiceTables, offers: Offers, selection: Selection, gb_usd: float, scratch: Floats
) -> None:
    """Move types until no member is over its limits."""
    types = selection.usd.shape[0]
    for _ in range(_MOST_MOVES):
        a = fullest(selection)
        if a < 0:
            return
        f = selection.members[a]
        best, best_rate, best_usd = -1, np.inf, 0.0
        for i in range(types):
            share = part_of(selection, i, a)
            if share <= 0.0:
                continue
            before = selection.usd[i]
            remember(selection, i, scratch[2])
            usd = rechoose(tables, offers, selection, i, gb_usd, scratch)
            left = 0.0
            for side in range(2):
                if int(scratch[1, side]) == a:
                    left = scratch[1, 2 + side]
            settle(offers, selection, i, scratch[2], before)
            freed = (share - left) * max(offers.load[f, i], offers.cache[f, i])
            if freed > 0.0 and max(0.0, usd - before) / freed < best_rate:
                best, best_rate, best_usd = i, max(0.0, usd - before) / freed, usd
                for slot in range(4):
                    scratch[3, slot] = scratch[1, slot]
        if best < 0:
            break
        lift(offers, selection, best)
        settle(offers, selection, best, scratch[3], best_usd)
    # What cannot be relieved by moving is not served.
    for i in range(types):
        a = fullest(selection)
        if a >= 0 and part_of(selection, i, a) > 0.0:
            usd = rechoose(tables, offers, selection, i, gb_usd, scratch)
            settle(offers, selection, i, scratch[1], usd)


@lean_part
def stored_gb(tables: ChoiceTables, offers: Offers, selection: Selection) -> float:
    """Return the GB in storage."""
    total = 0.0
    for i in range(selection.usd.shape[0]):
        for side in range(2):
            a = selection.picks[i, side]
            if a >= 0:
                total += tables.keep_gb[offers.pair[selection.members[a]]]
                total += selection.parts[i, side] * tables.data_gb[i]
    return total


@lean_part
def reroute(
    tables: ChoiceTables,
    offers: Offers,
    selection: Selection,
    order: Ints,
    gb_usd: float,
    scratch: Floats,
) -> None:
    """Let all types take what is best, relieve what is too full, then let each choose again."""
    types = selection.usd.shape[0]
    for a in range(selection.count[0]):
        selection.used[0, a] = 0.0
        selection.used[1, a] = 0.0
        scratch[0, a] = 1.0
    for i in range(types):
        usd = choose(tables, offers, selection, i, gb_usd, scratch[0], scratch[1])
        settle(offers, selection, i, scratch[1], usd)
    if fullest(selection) < 0:
        return
    relieve(tables, offers, selection, gb_usd, scratch)
    for _ in range(_PASSES):
        gained = False
        for place in range(order.shape[0]):
            i = order[place]
            before = selection.usd[i]
            remember(selection, i, scratch[2])
            usd = rechoose(tables, offers, selection, i, gb_usd, scratch)
            if usd < before - _OVER:
                settle(offers, selection, i, scratch[1], usd)
                gained = True
            else:
                settle(offers, selection, i, scratch[2], before)
        if not gained:
            return


@lean_part
def reprice(tables: ChoiceTables, offers: Offers, selection: Selection, gb_usd: float) -> None:
    """Write what types cost where they are, at a price per GB."""
    for i in range(selection.usd.shape[0]):
        left = 1.0
        usd = 0.0
        for side in range(2):
            a = selection.picks[i, side]
            if a >= 0:
                f = selection.members[a]
                share = selection.parts[i, side]
                usd += offers.keep[f] + gb_usd * tables.keep_gb[offers.pair[f]]
                usd += share * (offers.usd[f, i] + gb_usd * tables.data_gb[i])
                left -= share
        selection.usd[i] = usd + unserved(tables, i, max(0.0, left))


@lean_part
def route(
    tables: ChoiceTables,
    offers: Offers,
    selection: Selection,
    order: Ints,
    storing_usd: float,
    fine: float,
    scratch: Floats,
) -> tuple[float, bool]:
    """Improve a routing; return the cost with rent, and whether storage and budget suffice.

    `storing_usd` is what a GB costs over the horizon. Each USD over the budget counts as `fine` more, and
    each GB over the storage as much as USD over the budget that would have to be spared.
    """
    rent, total = 0.0, 0.0
    for a in range(selection.count[0]):
        rent += offers.rent[selection.members[a]]
    reroute(tables, offers, selection, order, 0.0, scratch)
    gb_usd = 0.0
    over = 0.0
    for _ in range(_PRICES):
        stored = stored_gb(tables, offers, selection)
        over = max(0.0, rent + storing_usd * stored - tables.limits[BUDGET])
        over += max(0.0, stored - tables.limits[STORAGE])
        if over <= 0.0 or rent >= tables.limits[BUDGET]:
            break
        gb_usd = max(storing_usd, _RISE * gb_usd)
        if gb_usd > 2.0 * fine * storing_usd and stored <= tables.limits[STORAGE]:
            break
        reroute(tables, offers, selection, order, gb_usd, scratch)
    reprice(tables, offers, selection, 0.0)
    for i in range(selection.usd.shape[0]):
        total += selection.usd[i]
    return rent + total + fine * over, over <= 0.0
