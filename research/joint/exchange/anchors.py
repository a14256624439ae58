"""Where exchange starts from (numba): offers that can serve the hardest type, each with a second offer.

Few offers can serve the type that is hardest to serve, and one of them is in nearly every good answer. The
best of them are the anchors. A few anchors show which other offers are worth a look at all; each anchor is
then tried with the likeliest of these.
"""

from __future__ import annotations

import numpy as np

from atoll.core.compiling import lean_part
from atoll.solve.joint.joint_tables import JointTables
from research.joint.exchange.estimates import (
    BY_MODEL,
    PLAIN,
    Shortlist,
    list_short,
    look_at_all,
    look_at_best,
)
from research.joint.exchange.exchange_offers import Offers
from research.joint.exchange.exchange_prices import SharePrices
from research.joint.exchange.exchange_routing import Selection, Workspace, price
from research.joint.exchange.exchange_steps import (
    ANCHORS,
    GB_USD,
    STARTS,
    Search,
    enough,
    is_spent,
    judge,
    leave_out,
    take_in,
)
from research.joint.exchange.ways import TypeWays

NEARLY = 1.1
"""An error over the limit by so much may do: the rest stays unserved."""
SCOUTS = 3
"""Anchors that are tried with all offers."""
POOL = 120
"""Offers that are looked at afterwards, beside anchors."""
SECONDS = 6
"""Offers that are routed with each anchor."""


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
            # Past the end of the list the last anchor falls out.
            if place < ANCHORS:
                search.anchors[place] = search.anchors[place - 1]
            place -= 1
        if place < ANCHORS:
            search.anchors[place] = f
            count = min(ANCHORS, count + 1)
    return count


@lean_part
def scout(
    tables: JointTables,
    offers: Offers,
    trial: Selection,
    search: Search,
    workspace: Workspace,
    short: Shortlist,
) -> int:
    """List anchors, and narrow the offers that are looked at; return how many anchors there are.

    These are offers that can serve the hardest type. A few of them show which other offers are worth a look.
    """
    ways, prices = TypeWays(*workspace.ways), SharePrices(*workspace.prices)
    look_at_all(offers, short)
    trial.number[0] = 0
    price(tables, offers, trial, ways, prices, search.usd[GB_USD], np.inf)
    list_short(tables, offers, ways, prices, short, np.inf, BY_MODEL, True)
    anchors = list_anchors(offers, search, short)
    # Merits of the first look were for anchors only; those with anchors in place count from here.
    for g in range(offers.number[0]):
        short.merit[g] = np.inf
    for n in range(SCOUTS):
        if anchors > 0:
            trial.number[0] = 0
            # Spread over the list of anchors, so that scouts are unlike each other.
            take_in(trial, search.anchors[n * anchors // SCOUTS])
            price(tables, offers, trial, ways, prices, search.usd[GB_USD], np.inf)
            list_short(tables, offers, ways, prices, short, np.inf, PLAIN, True)
    if anchors > 0:
        for n in range(anchors):
            # Anchors themselves stay in the pool, whatever their merit.
            short.merit[search.anchors[n]] = -np.inf
        look_at_best(short, anchors + POOL)
    return anchors


@lean_part
def pair_up(
    tables: JointTables,
    offers: Offers,
    trial: Selection,
    probe: Selection,
    best: Selection,
    search: Search,
    workspace: Workspace,
    short: Shortlist,
    anchors: int,
) -> int:
    """Find pairs to start from: an anchor with the best second offer; return how many."""
    ways, prices = TypeWays(*workspace.ways), SharePrices(*workspace.prices)
    count = 0
    for n in range(anchors):
        if is_spent(search, workspace):
            break
        f = search.anchors[n]
        trial.number[0] = 0
        take_in(trial, f)
        # The last of the starts is what there is to beat.
        most = np.inf if count < STARTS else search.start_usd[STARTS - 1]
        price(tables, offers, trial, ways, prices, search.usd[GB_USD], enough(search))
        found = list_short(tables, offers, ways, prices, short, most, PLAIN, False)
        least, second = most, -1
        for place in range(min(found, SECONDS)):
            leave_out(trial, probe, -1, -1)
            take_in(probe, short.held[place])
            usd = judge(tables, offers, probe, best, search, workspace, least)
            if usd < least:
                least, second = usd, short.held[place]
        if second >= 0:
            count = keep_start(offers, search, count, f, second, least)
    return count


@lean_part
def keep_start(offers: Offers, search: Search, count: int, f: int, second: int, usd: float) -> int:
    """Note a pair to start from, one for each (model, tier) of its first offer; return how many there are."""
    place = 0
    while place < count and offers.pair[search.starts[place, 0]] != offers.pair[f]:
        place += 1
    if place < count:
        if usd >= search.start_usd[place]:
            return count
    elif count < STARTS:
        count += 1
    else:
        place = STARTS - 1
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
