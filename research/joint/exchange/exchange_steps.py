"""Steps from one selection of offers to a cheaper one (numba): leave out, take in, one or two at once.

What is left of a selection is priced, every offer is judged at these prices (`estimates`), and the likeliest
are routed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.core.compiling import lean_part
from atoll.solve.joint.joint_problem import Floats, Ints
from atoll.solve.joint.joint_tables import JointTables
from research.joint.exchange.estimates import PLAIN, TRIES, Shortlist, list_short
from research.joint.exchange.exchange_offers import MAX, Offers
from research.joint.exchange.exchange_prices import SharePrices
from research.joint.exchange.exchange_routing import (
    Selection,
    Workspace,
    duplicate,
    price,
    settle,
)
from research.joint.exchange.ways import TypeWays

ROUNDS = 2000
FIRSTS = 12
"""Offers to which a second is sought."""
STARTS = 4
"""Pairs from which steps start."""
ANCHORS = 64
"""Offers that can serve the hardest type, from which pairs are made."""
ENOUGH = 2.0
"""Prices are not sought beyond so many times the least cost: they are calmed anyway."""
_GAIN = 1e-7
"""USD that a step must save."""
# Slots of `Search.usd`.
GB_USD, MIN = 0, 1
# Slots of `Search.work`.
DRAWN, EFFORT_LEFT = 0, 1


class Search(NamedTuple):
    """Arrays that steps work in."""

    usd: Floats
    """Price of a GB over the horizon; the least cost so far."""
    work: Ints
    """The last number drawn; how many ways and offers may be looked at."""
    held: Ints
    """A shortlist of firsts."""
    starts: Ints
    """starts[n, 0 and 1]: offers to start from."""
    start_usd: Floats
    """Their costs, the least first."""
    anchors: Ints
    """Offers that can serve the hardest type."""


SEARCH_TYPE = (
    "Tuple((float64[::1], int64[::1], int64[::1], int64[:, ::1], float64[::1], int64[::1]))"
)


def search_of(gb_usd: float, seed: int, effort: int) -> Search:
    """Return a search that has found nothing yet."""
    return Search(
        np.array([gb_usd, np.inf]), np.array([seed, effort], np.int64), np.zeros(TRIES, np.int64),
        np.zeros((STARTS, 2), np.int64), np.zeros(STARTS), np.zeros(ANCHORS, np.int64),
    )  # fmt: skip


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
    tables: JointTables,
    offers: Offers,
    probe: Selection,
    best: Selection,
    search: Search,
    workspace: Workspace,
    most: float,
) -> float:
    """Return what a selection costs once routed, inf where that is `most` or more; keep the best there is."""
    ways, prices = TypeWays(*workspace.ways), SharePrices(*workspace.prices)
    # The bound first: most selections are too dear by it and are never routed.
    bound = price(tables, offers, probe, ways, prices, search.usd[GB_USD], most)
    if bound >= most:
        return np.inf
    # Closing routes is dear, and is worth it only where the result may be the best.
    usd = settle(tables, offers, probe, ways, prices, workspace, most, bound < search.usd[MIN])
    if usd < search.usd[MIN]:
        search.usd[MIN] = usd
        duplicate(probe, best)
    return usd


@lean_part
def enough(search: Search) -> float:
    """Return the bound at which prices of a selection to which an offer is sought are high enough."""
    return float(ENOUGH * search.usd[MIN])


@lean_part
def step(
    tables: JointTables,
    offers: Offers,
    now: Selection,
    trial: Selection,
    probe: Selection,
    best: Selection,
    search: Search,
    workspace: Workspace,
    short: Shortlist,
    one: int,
    usd: float,
) -> float:
    """Leave out a member (-1: none), take in one offer or none, whatever is best, if that saves."""
    ways, prices = TypeWays(*workspace.ways), SharePrices(*workspace.prices)
    leave_out(now, trial, one, -1)
    bound = price(tables, offers, trial, ways, prices, search.usd[GB_USD], enough(search))
    least = usd - _GAIN
    found = 0
    # A selection has room for MAX members only.
    if trial.number[0] < MAX:
        found = list_short(tables, offers, ways, prices, short, least, PLAIN, False)
    # Taking nothing in is a step, too, where a member is left out.
    if one >= 0 and bound < least:
        duplicate(trial, probe)
        value = judge(tables, offers, probe, best, search, workspace, least)
        if value < least:
            duplicate(probe, now)
            least = value
    for place in range(found):
        leave_out(trial, probe, -1, -1)
        take_in(probe, short.held[place])
        value = judge(tables, offers, probe, best, search, workspace, least)
        if value < least:
            duplicate(probe, now)
            least = value
    return least if least < usd - _GAIN else usd


@lean_part
def descend(
    tables: JointTables,
    offers: Offers,
    now: Selection,
    trial: Selection,
    probe: Selection,
    best: Selection,
    search: Search,
    workspace: Workspace,
    short: Shortlist,
) -> None:
    """Make steps until none saves, or no work is left."""
    usd = judge(tables, offers, now, best, search, workspace, np.inf)
    one, idle = -1, 0
    for _ in range(ROUNDS):
        # Every member and the empty step were tried once without success: nothing more to find here.
        if idle > now.number[0] or is_spent(search, workspace):
            break
        after = step(tables, offers, now, trial, probe, best, search, workspace, short, one, usd)
        idle = 0 if after < usd else idle + 1
        usd = after
        # Members in turn, and then a step that only takes one in.
        one = one + 1 if one + 1 < now.number[0] else -1


@lean_part
def is_spent(search: Search, workspace: Workspace) -> bool:
    """Say whether no work is left."""
    return bool(SharePrices(*workspace.prices).spent[0] > search.work[EFFORT_LEFT])


@lean_part
def deepen(
    tables: JointTables,
    offers: Offers,
    now: Selection,
    trial: Selection,
    probe: Selection,
    best: Selection,
    search: Search,
    workspace: Workspace,
    short: Shortlist,
    hopeful: int,
) -> None:
    """Take two offers in at once, each of the best few firsts with the best seconds."""
    ways, prices = TypeWays(*workspace.ways), SharePrices(*workspace.prices)
    price(tables, offers, now, ways, prices, search.usd[GB_USD], enough(search))
    firsts = list_short(tables, offers, ways, prices, short, np.inf, hopeful, False)
    firsts = min(firsts, FIRSTS)
    # The shortlist is written over below, so the firsts are copied out of it.
    for n in range(firsts):
        search.held[n] = short.held[n]
    for n in range(firsts):
        if is_spent(search, workspace):
            break
        leave_out(now, trial, -1, -1)
        take_in(trial, search.held[n])
        price(tables, offers, trial, ways, prices, search.usd[GB_USD], enough(search))
        found = list_short(tables, offers, ways, prices, short, search.usd[MIN], PLAIN, False)
        for place in range(found):
            leave_out(trial, probe, -1, -1)
            take_in(probe, short.held[place])
            judge(tables, offers, probe, best, search, workspace, search.usd[MIN])


@lean_part
def draw(search: Search, below: int) -> int:
    """Return a number below a limit, from the search's own sequence."""
    # A linear congruence, so that compiled code has its own sequence and the same seed the same steps.
    search.work[DRAWN] = (search.work[DRAWN] * 1103515245 + 12345) % 2147483648
    # The low bits of such a sequence repeat soon, so they are dropped.
    return int((search.work[DRAWN] >> 8) % below)


@lean_part
def shake(offers: Offers, best: Selection, now: Selection, search: Search) -> None:
    """Leave out one or two members of the best answer and take in an offer, all of them drawn."""
    count = best.number[0]
    one, two = -1, -1
    if count > 0:
        # Both numbers may be the same: then only one member is left out.
        one, two = draw(search, count), draw(search, count)
    leave_out(best, now, one, two)
    if offers.number[0] > 0:
        g = draw(search, offers.number[0])
        # A pair has one configuration, so a second offer of it is not taken in.
        for a in range(now.number[0]):
            if offers.pair[now.members[a]] == offers.pair[g]:
                return
        take_in(now, g)
