"""Routing of all types to a few chosen offers (numba): each type's best where there is room, else a small LP.

A type's best mixture of offers keeps its delay and its error: three rows with the one that the shares add up,
so it has at most three parts, one of which may be what is unserved. Mixtures of up to two offers are looked
at, each with the weights it has to store. Types compete only for FLOP/s, memory and storage. Where what is
best for each does not fit, all are routed at once by a linear programme, in which weights count in proportion
to the share that needs them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.core.compiling import lean_part
from atoll.solve.choice.offers import MOST, Offers
from atoll.solve.choice.problem import Floats, Ints
from atoll.solve.choice.simplex import Pivots, maximise
from atoll.solve.choice.tables import BUDGET, STORAGE, ChoiceTables

_LEAST = 1e-7
"""A smaller share of a type is not placed."""
_OVER = 1e-9
_TRIALS = 5
"""Programmes solved for one selection, each with weights that count as the last one had them."""
_STEEPEST = 0.02
_UNUSED = 2.0
"""By how much weights count where nothing is now: a part of a type would come there."""
_GB_USD = 0.02
"""USD over the budget that a GB over the storage counts as."""
_FORBIDDEN = 1e7
"""USD for all of a type unserved beyond what may be."""


class Selection(NamedTuple):
    """Chosen offers and who goes where."""

    number: Ints
    """number[0] offers are chosen."""
    members: Ints
    """members[a], an offer."""
    share: Floats
    """share[i, a]: of a type that goes to a member."""
    usd: Floats
    """usd[i]: what a type costs, without rent."""
    used: Floats
    """used[0 and 1, a]: FLOP/s and memory in use, as shares."""


SELECTION_TYPE = "Tuple((int64[::1], int64[::1], float64[:, ::1], float64[::1], float64[:, ::1]))"


def selection_of(types: int) -> Selection:
    """Return a selection of nothing."""
    return Selection(
        np.zeros(1, np.int64), np.zeros(MOST, np.int64), np.zeros((types, MOST)), np.zeros(types),
        np.zeros((2, MOST)),
    )  # fmt: skip


@lean_part
def unserved(tables: ChoiceTables, i: int, share: float) -> float:
    """Return what an unserved share of a type costs; beyond what may be unserved, more than anything."""
    usd = tables.unmet_usd[i] * share
    if share > tables.most_unmet[i] + _OVER:
        usd += _FORBIDDEN * (share - tables.most_unmet[i])
    return float(usd)


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
def choose(  # noqa: C901  (singles, then mixtures)
    tables: ChoiceTables,
    offers: Offers,
    selection: Selection,
    i: int,
    caps: Floats,
    out: Floats,
) -> float:
    """Find the cheapest mixture for a type, of which `caps[a]` may go to member a; return its cost.

    The mixture is written to `out`: places of the two members and their shares.
    """
    count = selection.number[0]
    members = selection.members
    best = unserved(tables, i, 1.0)
    out[0], out[1], out[2], out[3] = -1.0, -1.0, 0.0, 0.0
    whole = False
    for a in range(count):
        f = members[a]
        most = min(caps[a], 1.0 / max(1.0, offers.slow[f, i], offers.wrong[f, i]))
        if most < _LEAST:
            continue
        keep = offers.keep[f]
        usd = keep + most * offers.usd[f, i] + unserved(tables, i, 1.0 - most)
        whole = whole or most >= 1.0
        if usd < best:
            best = usd
            out[0], out[1], out[2], out[3] = a, -1.0, most, 0.0
    for a in range(count):
        if caps[a] < _LEAST:
            continue
        f = members[a]
        keep = offers.keep[f]
        is_whole = caps[a] >= 1.0 and offers.slow[f, i] <= 1.0 and offers.wrong[f, i] <= 1.0
        for b in range(a):
            g = members[b]
            if (
                is_whole
                and caps[b] >= 1.0
                and offers.slow[g, i] <= 1.0
                and offers.wrong[g, i] <= 1.0
            ):
                # Cost is linear between them: one of the two alone is cheaper.
                continue
            both = keep + offers.keep[g]
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
                best = choose_part(tables, offers, selection, i, caps, a, b, best, out)
    return best


@lean_part
def choose_part(
    tables: ChoiceTables,
    offers: Offers,
    selection: Selection,
    i: int,
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
        usd = keep + unserved(tables, i, 1.0 - one - two)
        usd += one * offers.usd[f, i] + two * offers.usd[g, i]
        if usd < best:
            best = usd
            out[0], out[1], out[2], out[3] = a, b, one, two
    return best


@lean_part
def settle(offers: Offers, selection: Selection, i: int, out: Floats, usd: float) -> None:
    """Take over what `choose` found; the type was nowhere."""
    for side in range(2):
        a = int(out[side])
        if a >= 0:
            f = selection.members[a]
            selection.share[i, a] = out[2 + side]
            selection.used[0, a] += out[2 + side] * offers.load[f, i]
            selection.used[1, a] += out[2 + side] * offers.cache[f, i]
    selection.usd[i] = usd


@lean_part
def lift(offers: Offers, selection: Selection, i: int) -> None:
    """Take a type off all members."""
    for a in range(selection.number[0]):
        share = selection.share[i, a]
        if share > 0.0:
            f = selection.members[a]
            selection.used[0, a] -= share * offers.load[f, i]
            selection.used[1, a] -= share * offers.cache[f, i]
            selection.share[i, a] = 0.0


@lean_part
def find_caps(offers: Offers, selection: Selection, i: int, caps: Floats) -> None:
    """Write the share of a type that each member has room for."""
    for a in range(selection.number[0]):
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
def is_too_full(selection: Selection) -> bool:
    """Say whether a member is over its limits."""
    for a in range(selection.number[0]):
        if max(selection.used[0, a], selection.used[1, a]) > 1.0 + _OVER:
            return True
    return False


@lean_part
def stored_gb(tables: ChoiceTables, offers: Offers, selection: Selection) -> float:
    """Return the GB in storage."""
    total = 0.0
    for i in range(selection.usd.shape[0]):
        for a in range(selection.number[0]):
            if selection.share[i, a] > 0.0:
                total += tables.keep_gb[offers.pair[selection.members[a]]]
                total += selection.share[i, a] * tables.data_gb[i]
    return total


@lean_part
def route_each(tables: ChoiceTables, offers: Offers, selection: Selection, scratch: Floats) -> None:
    """Give each type what is best for it, whatever room there is."""
    count = selection.number[0]
    for a in range(count):
        selection.used[0, a] = 0.0
        selection.used[1, a] = 0.0
        scratch[0, a] = 1.0
    for i in range(selection.usd.shape[0]):
        for a in range(count):
            selection.share[i, a] = 0.0
        usd = choose(tables, offers, selection, i, scratch[0], scratch[1])
        settle(offers, selection, i, scratch[1], usd)


@lean_part
def add_row(pivots: Pivots, rows: int, first: int, last: int, columns: int, limit: float) -> int:
    """Begin a row, 0 outside of a range of columns that the caller writes; return the number of rows."""
    for c in range(columns):
        if c < first or c >= last:
            pivots.table[rows, c] = 0.0
    pivots.value[rows] = limit
    return rows + 1


@lean_part
def slope_of(selection: Selection, i: int, a: int, again: bool) -> float:
    """Return by how much weights count for a share of a type."""
    if not again:
        return 1.0
    if selection.share[i, a] > 0.0:
        return float(1.0 / max(selection.share[i, a], _STEEPEST))
    return _UNUSED


@lean_part
def route_all(  # noqa: C901  (row after row)
    tables: ChoiceTables,
    offers: Offers,
    selection: Selection,
    pivots: Pivots,
    gb: float,
    again: bool,
) -> None:
    """Route all types at once, within what members have and `gb` of storage.

    Weights count in proportion to the share that needs them; `again`, so that those of a share as it is now
    count whole.
    """
    types, count = selection.usd.shape[0], selection.number[0]
    columns = types * count
    table = pivots.table
    rows = 0
    for i in range(types):
        at = i * count
        slow, wrong = False, False
        rows = add_row(pivots, rows, at, at + count, columns, 1.0)
        for a in range(count):
            f = selection.members[a]
            table[rows - 1, at + a] = 1.0
            slow = slow or offers.slow[f, i] > 1.0
            wrong = wrong or offers.wrong[f, i] > 1.0
            slope = slope_of(selection, i, a, again)
            pivots.profit[at + a] = tables.unmet_usd[i] - offers.usd[f, i] - slope * offers.keep[f]
        if slow:
            rows = add_row(pivots, rows, at, at + count, columns, 1.0)
            for a in range(count):
                table[rows - 1, at + a] = offers.slow[selection.members[a], i]
        if wrong:
            rows = add_row(pivots, rows, at, at + count, columns, 1.0)
            for a in range(count):
                table[rows - 1, at + a] = offers.wrong[selection.members[a], i]
    for a in range(count):
        f = selection.members[a]
        for resource in range(2):
            rows = add_row(pivots, rows, 0, 0, columns, 1.0)
            for i in range(types):
                table[rows - 1, i * count + a] = (
                    offers.load[f, i] if resource == 0 else offers.cache[f, i]
                )
    rows = add_row(pivots, rows, 0, columns, columns, gb)
    for i in range(types):
        for a in range(count):
            slope = slope_of(selection, i, a, again)
            size = slope * tables.keep_gb[offers.pair[selection.members[a]]] + tables.data_gb[i]
            table[rows - 1, i * count + a] = size
    maximise(pivots, rows, columns)
    for i in range(types):
        for a in range(count):
            selection.share[i, a] = 0.0
    for r in range(rows):
        c = pivots.basic[r]
        if c >= 0 and pivots.value[r] > _LEAST:
            selection.share[c // count, c % count] = min(1.0, pivots.value[r])
    take_stock(tables, offers, selection)


@lean_part
def take_stock(tables: ChoiceTables, offers: Offers, selection: Selection) -> None:
    """Sum up what types cost and what members have to do."""
    count = selection.number[0]
    for a in range(count):
        selection.used[0, a] = 0.0
        selection.used[1, a] = 0.0
    for i in range(selection.usd.shape[0]):
        left, usd = 1.0, 0.0
        for a in range(count):
            share = selection.share[i, a]
            if share > 0.0:
                f = selection.members[a]
                selection.used[0, a] += share * offers.load[f, i]
                selection.used[1, a] += share * offers.cache[f, i]
                usd += offers.keep[f] + share * offers.usd[f, i]
                left -= share
        selection.usd[i] = usd + unserved(tables, i, max(0.0, left))


@lean_part
def route(
    tables: ChoiceTables,
    offers: Offers,
    selection: Selection,
    pivots: Pivots,
    storing_usd: float,
    fine: float,
    scratch: Floats,
) -> tuple[float, bool]:
    """Route all types; return the cost with rent, and whether storage and budget suffice.

    `storing_usd` is what a GB costs over the horizon. Each USD over the budget, and each GB over the
    storage, counts as `fine` more.
    """
    rent = 0.0
    for a in range(selection.number[0]):
        rent += offers.rent[selection.members[a]]
    gb = tables.limits[STORAGE]
    if storing_usd > 0.0 and rent < tables.limits[BUDGET]:
        gb = min(gb, (tables.limits[BUDGET] - rent) / storing_usd)
    route_each(tables, offers, selection, scratch)
    stored = stored_gb(tables, offers, selection)
    if stored > gb or is_too_full(selection):
        least = np.inf
        limit = gb
        for trial in range(_TRIALS):
            route_all(tables, offers, selection, pivots, limit, trial > 0)
            usd, _ = add_up(tables, offers, selection, rent, storing_usd, fine)
            if usd < least:
                least = usd
                for i in range(selection.usd.shape[0]):
                    for a in range(selection.number[0]):
                        pivots.kept[i, a] = selection.share[i, a]
            # Weights are stored whole, which the programme does not know.
            limit = max(0.0, limit - 0.5 * max(0.0, stored_gb(tables, offers, selection) - gb))
        for i in range(selection.usd.shape[0]):
            for a in range(selection.number[0]):
                selection.share[i, a] = pivots.kept[i, a]
        take_stock(tables, offers, selection)
    return add_up(tables, offers, selection, rent, storing_usd, fine)


@lean_part
def add_up(
    tables: ChoiceTables,
    offers: Offers,
    selection: Selection,
    rent: float,
    storing_usd: float,
    fine: float,
) -> tuple[float, bool]:
    """Return what a routing costs, with fines, and whether there are none."""
    stored = stored_gb(tables, offers, selection)
    over = max(0.0, rent + storing_usd * stored - tables.limits[BUDGET])
    over += _GB_USD * max(0.0, stored - tables.limits[STORAGE])
    total = rent
    for i in range(selection.usd.shape[0]):
        total += selection.usd[i]
    return total + fine * over, over <= 0.0
