"""Routing of all types to a few chosen offers (numba), and what it costs.

Prices are found first (`exchange_prices`): their cost is a bound. At most as many types as rows bind are
then mixed of several ways, and pay for the weights of all of them, which the bound has only in part. So
routes of such types are closed one after the other as long as that saves; and where weights that are stored
whole do not fit any more, prices are found again for less storage.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from atoll.core.compiling import lean_part
from atoll.solve.joint.joint_problem import Floats, Ints
from atoll.solve.joint.joint_tables import BUDGET, JointTables
from research.joint.exchange.exchange_offers import MAX, Offers
from research.joint.exchange.exchange_prices import (
    PRICES_TYPE,
    SharePrices,
    prices_of,
    solve_prices,
)
from research.joint.exchange.ways import (
    COUNT,
    GB,
    GB_USD,
    MEMBERS,
    MIN,
    RENT,
    WAYS_TYPE,
    TypeWays,
    gb_limit,
    list_ways,
    unserved,
    ways_of,
)

_SHRINKS = 4
"""Times that prices are found for less storage."""
_CLOSINGS = 4
"""Rounds of closing routes."""
_CLOSED = 1e8
"""USD for a way that is closed."""


class Selection(NamedTuple):
    """Chosen offers and who goes where."""

    number: Ints
    """number[0] offers are chosen."""
    members: Ints
    """members[a], an offer."""
    share: Floats
    """share[i, a]: of a type that goes to a member."""


class Workspace(NamedTuple):
    """Arrays that one selection is worked out on."""

    ways: tuple[Any, ...]
    prices: tuple[Any, ...]
    share: Floats
    """A routing that is tried."""
    saved: Floats
    """Costs of paths that are closed for a trial."""
    split: Ints
    """Types that are mixed of several ways."""


SELECTION_TYPE = "Tuple((int64[::1], int64[::1], float64[:, ::1]))"
WORKSPACE_TYPE = f"Tuple(({WAYS_TYPE}, {PRICES_TYPE}, float64[:, ::1], float64[::1], int64[::1]))"


def selection_of(types: int) -> Selection:
    """Return a selection of nothing."""
    return Selection(np.zeros(1, np.int64), np.zeros(MAX, np.int64), np.zeros((types, MAX)))


def workspace_of(types: int) -> Workspace:
    """Return a workspace for so many types."""
    return Workspace(
        tuple(ways_of(types)), tuple(prices_of(types)), np.zeros((types, MAX)),
        np.zeros(1 + MAX * MAX), np.zeros(types, np.int64),
    )  # fmt: skip


@lean_part
def duplicate(source: Selection, target: Selection) -> None:
    """Write one selection over another."""
    target.number[0] = source.number[0]
    for a in range(source.number[0]):
        target.members[a] = source.members[a]
    copy_shares(source.share, target.share, source.number[0])


@lean_part
def copy_shares(source: Floats, target: Floats, members: int) -> None:
    """Write one routing over another."""
    for i in range(source.shape[0]):
        for a in range(members):
            target[i, a] = source[i, a]


@lean_part
def price(
    tables: JointTables,
    offers: Offers,
    selection: Selection,
    ways: TypeWays,
    prices: SharePrices,
    gb_usd: float,
    most: float,
) -> float:
    """Return a bound on what a selection costs with rent, its prices being found unless it is over `most`."""
    rent = 0.0
    for a in range(selection.number[0]):
        ways.members[a] = selection.members[a]
        rent += offers.rent[selection.members[a]]
    ways.size[MEMBERS] = selection.number[0]
    ways.money[RENT] = rent
    ways.money[GB] = gb_limit(tables, rent, gb_usd, tables.limits[BUDGET])
    ways.money[GB_USD] = gb_usd
    # Nothing may be stored beside this rent, so no type could be served.
    if ways.money[GB] <= 0.0:
        return np.inf
    list_ways(tables, offers, ways)
    prices.spent[0] += ways.first[prices.key.shape[0]]
    # Rows are scaled to what they have, so every limit is 1.
    for r in range(ways.size[COUNT]):
        prices.limit[r] = 1.0
    return rent + solve_prices(ways, prices, most - rent)


@lean_part
def mix(
    tables: JointTables, offers: Offers, ways: TypeWays, prices: SharePrices, share: Floats
) -> tuple[float, float]:
    """Write the routing that prices lead to; return its cost with rent, and the GB it stores."""
    types, members = prices.key.shape[0], ways.size[MEMBERS]
    for i in range(types):
        for a in range(members):
            share[i, a] = 0.0
        # The key has what the basic ways of its type leave: all of it first, and then less.
        add_way(ways, share, i, prices.key[i], 1.0)
    for r in range(ways.size[COUNT]):
        i = prices.owner[r]
        if i >= 0 and prices.value[r] > 0.0:
            add_way(ways, share, i, prices.key[i], -prices.value[r])
            add_way(ways, share, i, prices.basic[r], prices.value[r])
    usd, gb = ways.money[RENT], 0.0
    for i in range(types):
        left = 1.0
        for a in range(members):
            part = share[i, a]
            # Shares this small are rounding, and would still pay for the weights that are stored whole.
            if part <= MIN:
                share[i, a] = 0.0
                continue
            f = ways.members[a]
            usd += offers.keep[f] + part * offers.usd[f, i]
            gb += tables.keep_gb[offers.pair[f]] + part * tables.data_gb[i]
            left -= part
        usd += unserved(tables, i, max(0.0, left))
    return usd, gb


@lean_part
def add_way(ways: TypeWays, share: Floats, i: int, w: int, part: float) -> None:
    """Send a part of a type by a way."""
    for side in range(2):
        if ways.place[w, side] >= 0:
            share[i, ways.place[w, side]] += part * ways.share[w, side]


@lean_part
def fit(
    tables: JointTables,
    offers: Offers,
    ways: TypeWays,
    prices: SharePrices,
    share: Floats,
    most: float,
) -> float:
    """Write a routing that fits storage and budget, for prices just found; return its cost, or inf."""
    row = ways.row[0, MAX]
    usd, gb = mix(tables, offers, ways, prices, share)
    for _ in range(_SHRINKS):
        if gb <= ways.money[GB] or row < 0:
            break
        # As much less as the weights stored whole exceed the limit, and a little for rounding.
        prices.limit[row] = max(0.0, prices.limit[row] - (gb / ways.money[GB] - 1.0) - MIN)
        if ways.money[RENT] + solve_prices(ways, prices, most - ways.money[RENT]) >= most:
            break
        usd, gb = mix(tables, offers, ways, prices, share)
    # The limit is put back: the next routing of this selection starts from all of the storage.
    if row >= 0:
        prices.limit[row] = 1.0
    return usd if gb <= ways.money[GB] else np.inf


@lean_part
def settle(
    tables: JointTables,
    offers: Offers,
    selection: Selection,
    ways: TypeWays,
    prices: SharePrices,
    workspace: Workspace,
    most: float,
    close_routes: bool,
) -> float:
    """Write the routing of a selection that has been priced; return its cost, inf where it is over `most`."""
    members = ways.size[MEMBERS]
    # Before storage is made to fit, which may mix others.
    count = list_split(ways, prices, workspace.split)
    least = fit(tables, offers, ways, prices, workspace.share, np.inf)
    copy_shares(workspace.share, selection.share, members)
    if not close_routes:
        return least
    for turn in range(_CLOSINGS):
        # The last trial may have left other prices, so the types that are mixed are listed again.
        if turn > 0:
            solve_prices(ways, prices, np.inf)
            count = list_split(ways, prices, workspace.split)
        closed = False
        for n in range(count):
            i = workspace.split[n]
            for a in range(members):
                close(ways, i, a, workspace.saved)
                # A closing must beat the best routing, and what the caller would accept.
                target = min(least, most)
                bound = ways.money[RENT] + solve_prices(
                    ways, prices, target - ways.money[RENT] - 1e-9
                )
                usd = np.inf
                if bound < target - 1e-9:
                    usd = fit(tables, offers, ways, prices, workspace.share, target)
                if usd < target - 1e-9:
                    least = usd
                    closed = True
                    copy_shares(workspace.share, selection.share, members)
                else:
                    # Only a closing that saves stays; the next ones are tried on top of it.
                    reopen(ways, i, workspace.saved)
        if not closed:
            break
    return least


@lean_part
def list_split(ways: TypeWays, prices: SharePrices, split: Ints) -> int:
    """List types that are mixed of several ways; return how many."""
    count = 0
    for r in range(ways.size[COUNT]):
        i = prices.owner[r]
        if i >= 0 and prices.value[r] > MIN:
            known = False
            for n in range(count):
                known = known or split[n] == i
            if not known:
                split[count] = i
                count += 1
    return count


@lean_part
def close(ways: TypeWays, i: int, a: int, saved: Floats) -> None:
    """Close the ways of a type to a member; what they cost is saved."""
    first = ways.first[i]
    for w in range(first, ways.first[i + 1]):
        saved[w - first] = ways.cost[w]
        if ways.place[w, 0] == a or ways.place[w, 1] == a:
            # Dear rather than removed: the ways of a type keep their places, and closing is undone by the
            # costs alone.
            ways.cost[w] = _CLOSED


@lean_part
def reopen(ways: TypeWays, i: int, saved: Floats) -> None:
    """Take back the last closing."""
    first = ways.first[i]
    for w in range(first, ways.first[i + 1]):
        ways.cost[w] = saved[w - first]
