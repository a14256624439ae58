"""Lower bounds on the cost of one more offer, given the prices of those that are chosen (numba).

Prices say what each type costs now. A new offer lowers that to what the type would pay there, alone or mixed
with a member at that member's price; what its own FLOP/s and memory cannot take stays as it is. By duality no
routing with the offer costs less than what is left then, but for memory and FLOP/s being counted as one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.core.compiling import lean_part
from atoll.solve.joint.joint_problem import Floats, Ints
from atoll.solve.joint.joint_tables import BUDGET, STORAGE, JointTables
from research.joint.exchange.exchange_offers import MAX, Offers
from research.joint.exchange.exchange_prices import SharePrices
from research.joint.exchange.ways import (
    COUNT,
    GB,
    GB_USD,
    MEMBERS,
    RENT,
    TypeWays,
    gb_limit,
    span,
)

STEEP = 0.5
"""Worth of an offer's FLOP/s and memory, as a share of its rent."""
TRIES = 14
"""Offers on a shortlist."""
# Ways to make a list: as if nothing came after, or something did, and of what one offer is enough.
PLAIN, BY_MODEL, BY_PAIR = 0, 1, 2
_MIN_GAIN = 1e-9
_OVERFULL = 2.0
SCARCE = 0.05
"""Price of a GB too much, as a share of what it costs not to serve what it stores."""


class Shortlist(NamedTuple):
    """Offers with the least bounds, and what they are found with."""

    bounds: Floats
    """bounds[n], USD with rent."""
    held: Ints
    """held[n], an offer."""
    order: Ints
    """Types, those with most to gain first."""
    rest: Floats
    """rest[n]: what types from the n-th on can gain at most."""
    usd: Floats
    """usd[i, a]: all of a type at a member, with the price of what it takes there."""
    data: Floats
    """data[i]: what storing a type's data costs beyond its price per GB."""
    gain: Floats
    room: Floats
    """Of types that an offer serves more cheaply: what they gain, and what they take of it."""
    gb: Floats
    """gb[i]: what a type stores now."""
    fair: Floats
    """fair[i]: the least that a type costs alone, paying its part of the rent."""
    number: Ints
    """number[0] offers are looked at."""
    pool: Ints
    """pool[n], those offers."""
    merit: Floats
    """merit[f]: the least bound that an offer had so far."""


SHORTLIST_TYPE = (
    "Tuple((float64[::1], int64[::1], int64[::1], float64[::1], float64[:, ::1], float64[::1],"
    " float64[::1], float64[::1], float64[::1], float64[::1], int64[::1], int64[::1], float64[::1]))"
)


def shortlist_of(types: int, offers: int) -> Shortlist:
    """Return memory for so many types and offers."""
    return Shortlist(
        np.zeros(TRIES), np.zeros(TRIES, np.int64), np.zeros(types, np.int64), np.zeros(types + 1),
        np.zeros((types, MAX)), np.zeros(types), np.zeros(types), np.zeros(types),
        np.zeros(types), np.zeros(types), np.zeros(1, np.int64),
        np.zeros(offers, np.int64), np.full(offers, np.inf),
    )  # fmt: skip


@lean_part
def calm(  # noqa: C901  (rows, then types)
    tables: JointTables,
    offers: Offers,
    ways: TypeWays,
    prices: SharePrices,
    short: Shortlist,
    steep: float,
    hopeful: int,
) -> float:
    """Lower prices to what they may sensibly be; return the bound that they give, with rent.

    Where types stay unserved, prices are beyond reason, and bounds for one more offer far too low. FLOP/s and
    memory of a member are worth about its rent: that is what more of them costs. `hopeful`, no type costs
    more than what its part of the rent of some other offer comes to.
    """
    types = prices.key.shape[0]
    rows = ways.size[COUNT]
    most = 0.0
    for a in range(ways.size[MEMBERS]):
        rent = offers.rent[ways.members[a]]
        most = max(most, rent)
        for kind in range(2):
            r = ways.row[kind, a]
            if r >= 0:
                prices.usd[r] = max(0.0, min(prices.usd[r], steep * rent))
    # Storage has no rent of its own: the dearest member stands in.
    r = ways.row[0, MAX]
    if r >= 0:
        prices.usd[r] = max(0.0, min(prices.usd[r], steep * most))
    # By duality: rent, less what the rows are worth, plus what every type pays at these prices.
    bound = ways.money[RENT]
    for r in range(rows):
        bound -= prices.usd[r]
    for i in range(types):
        least, way = np.inf, ways.first[i]
        for w in range(ways.first[i], ways.first[i + 1]):
            usd = ways.cost[w]
            for r in range(rows):
                usd += prices.usd[r] * ways.use[w, r]
            if usd < least:
                least, way = usd, w
        gb = 0.0
        for side in range(2):
            a = ways.place[way, side]
            if a >= 0:
                gb += tables.keep_gb[offers.pair[ways.members[a]]]
                gb += ways.share[way, side] * tables.data_gb[i]
        short.gb[i] = gb
        if hopeful > 0:
            least = min(least, short.fair[i])
        prices.type_usd[i] = least
        bound += least
    return float(bound)


@lean_part
def prepare(
    tables: JointTables, offers: Offers, ways: TypeWays, prices: SharePrices, short: Shortlist
) -> float:
    """Note prices by type and member, and sort types; return by how much a GB costs more than its price."""
    types = prices.key.shape[0]
    storage = 0.0
    row = ways.row[0, MAX]
    if row >= 0 and prices.usd[row] > 0.0:
        storage = prices.usd[row] / ways.money[GB]
    for i in range(types):
        short.data[i] = storage * tables.data_gb[i]
        for a in range(ways.size[MEMBERS]):
            f = ways.members[a]
            usd = offers.usd[f, i] + short.data[i]
            if ways.row[0, a] >= 0:
                usd += prices.usd[ways.row[0, a]] * offers.load[f, i]
            if ways.row[1, a] >= 0:
                usd += prices.usd[ways.row[1, a]] * offers.cache[f, i]
            short.usd[i, a] = usd
        # Insertion sort: types are few, and compiled code allocates nothing here.
        place = i
        hope = prices.type_usd[i] - offers.floor[i]
        while place > 0:
            before = short.order[place - 1]
            if prices.type_usd[before] - offers.floor[before] >= hope:
                break
            short.order[place] = before
            place -= 1
        short.order[place] = i
    # Suffix sums let `gain_of` give up as soon as the types that are left cannot make up the rest.
    short.rest[types] = 0.0
    for place in range(types - 1, -1, -1):
        i = short.order[place]
        short.rest[place] = short.rest[place + 1] + max(0.0, prices.type_usd[i] - offers.floor[i])
    return storage


@lean_part
def fill(gain: Floats, room: Floats, count: int, total: float, taken: float) -> float:
    """Return the most that can be gained in a room of 1, where all together need `taken` for `total`."""
    # Two ways to the same result: pick the best few, or drop the worst few, whichever takes fewer turns.
    if taken > _OVERFULL:
        # Few fit: take the best ones.
        left, total = 1.0, 0.0
        while left > 0.0 and count > 0:
            best = 0
            for n in range(1, count):
                # Multiplied out, the comparison of gain per room needs no division, and a room of 0 does no
                # harm.
                if gain[n] * room[best] > gain[best] * room[n]:
                    best = n
            part = 1.0 if room[best] <= left else left / room[best]
            total += part * gain[best]
            left -= part * room[best]
            if part < 1.0:
                break
            count -= 1
            gain[best] = gain[count]
            room[best] = room[count]
        return total
    while taken > 1.0:
        worst = 0
        for n in range(1, count):
            if gain[n] * room[worst] < gain[worst] * room[n]:
                worst = n
        lost = min(1.0, (taken - 1.0) / room[worst])
        total -= lost * gain[worst]
        taken -= lost * room[worst]
        count -= 1
        gain[worst] = gain[count]
        room[worst] = room[count]
        if lost < 1.0:
            break
    return total


@lean_part
def gain_of(
    tables: JointTables,
    offers: Offers,
    ways: TypeWays,
    prices: SharePrices,
    short: Shortlist,
    g: int,
    storage: float,
    own: float,
    need: float,
) -> tuple[float, bool, float]:
    """Return what types gain by an offer, `need` or less: given up; whether it fills up; GB stored.

    Types choose their ways as if all of the offer cost `own`.
    """
    gain, room = short.gain, short.room
    types = prices.key.shape[0]
    keep_g = offers.keep[g] + storage * tables.keep_gb[offers.pair[g]]
    total, taken, stored = 0.0, 0.0, 0.0
    gaining = 0
    gb_g = tables.keep_gb[offers.pair[g]]
    for place in range(types):
        # Types come by what they can gain: if all that are left gained everything, it would still be too
        # little.
        if total + short.rest[place] <= need:
            return need, False, 0.0
        i = short.order[place]
        now = prices.type_usd[i]
        size = max(offers.load[g, i], offers.cache[g, i])
        usd = offers.usd[g, i] + short.data[i] + own * size
        slow, wrong = offers.slow[g, i], offers.wrong[g, i]
        # Served alone, a type may only send the part that keeps its delay and its errors.
        most = 1.0 / max(1.0, slow, wrong)
        value = keep_g + most * usd + (1.0 - most) * tables.unmet_usd[i]
        share = most
        gb = gb_g + most * tables.data_gb[i]
        for a in range(ways.size[MEMBERS]):
            f = ways.members[a]
            least = keep_g + offers.keep[f] + min(usd, short.usd[i, a])
            if least >= value or least >= now:
                continue
            # Neither of the two breaks a limit alone, so a mixture is never cheaper than the better one.
            if most >= 1.0 and offers.slow[f, i] <= 1.0 and offers.wrong[f, i] <= 1.0:
                continue
            low, high = span(slow, offers.slow[f, i], 0.0, 1.0)
            low, high = span(wrong, offers.wrong[f, i], low, high)
            if low > high:
                continue
            # Between the two limits the cost is a line: its least is at one end.
            part = high if usd < short.usd[i, a] else low
            both = keep_g + offers.keep[f] + storage * tables.keep_gb[offers.pair[f]]
            both += part * usd + (1.0 - part) * short.usd[i, a]
            if both < value:
                value, share = both, part
                gb = gb_g + tables.keep_gb[offers.pair[f]] + tables.data_gb[i]
        if value < now - _MIN_GAIN:
            size *= share
            gain[gaining] = now - value + own * size
            room[gaining] = size
            total += gain[gaining]
            taken += size
            stored += gb
            gaining += 1
        else:
            stored += short.gb[i]
    # More than the offer holds was counted: only the best part of it can be had.
    full = taken > 1.0
    if full and total > need:
        total = fill(gain, room, gaining, total, taken)
    return total, full, stored


@lean_part
def has_pair(offers: Offers, ways: TypeWays, g: int) -> bool:
    """Say whether a member is of the same pair as an offer."""
    for a in range(ways.size[MEMBERS]):  # noqa: SIM110  (compiled code has no generators)
        if offers.pair[ways.members[a]] == offers.pair[g]:
            return True
    return False


@lean_part
def alike(offers: Offers, f: int, g: int, hopeful: int) -> bool:
    """Say whether one of two offers is enough on a list: of a pair, or of a model in a configuration."""
    if hopeful == BY_MODEL:
        return bool(offers.model[f] == offers.model[g] and offers.config[f] == offers.config[g])
    return bool(offers.pair[f] == offers.pair[g])


@lean_part
def list_short(  # noqa: C901  (one loop, split it would be slower)
    tables: JointTables,
    offers: Offers,
    ways: TypeWays,
    prices: SharePrices,
    short: Shortlist,
    most: float,
    hopeful: int,
    scouting: bool,
) -> int:
    """List offers with the least bounds below `most`, the best first; return how many.

    The members have been priced. Of each pair one offer is listed, or
    `hopeful` of each model. `scouting`, the bounds of all are noted.
    """
    usd = calm(tables, offers, ways, prices, short, STEEP, hopeful)
    storage = prepare(tables, offers, ways, prices, short)
    bounds, held = short.bounds, short.held
    # Rent that the budget does not allow is not looked at.
    left = tables.limits[BUDGET] - ways.money[RENT]
    gb_usd = ways.money[GB_USD]
    # Rent takes from what may be stored once the budget is the tighter limit.
    spare = left - gb_usd * tables.limits[STORAGE]
    found = 0
    types = prices.key.shape[0]
    phi, data = 0.0, 0.0
    for i in range(types):
        phi += tables.unmet_usd[i]
        data += tables.data_gb[i]
    scarce = SCARCE * phi / data if data > 0.0 else 0.0
    for n in range(short.number[0]):
        g = short.pool[n]
        rent = offers.rent[g]
        if rent >= left:
            continue
        cost = usd + rent
        if storage > 0.0 and rent > spare and gb_usd > 0.0:
            cost += storage * (rent - max(0.0, spare)) / gb_usd
        # Even if every type gained all it can the offer would not do, or its pair is a member already.
        if cost - short.rest[0] >= most or has_pair(offers, ways, g):
            continue
        prices.spent[0] += types
        level = most
        if found == TRIES and not scouting:
            level = min(level, bounds[TRIES - 1])
        need = cost - level
        gain, full, stored = gain_of(tables, offers, ways, prices, short, g, storage, 0.0, need)
        # An offer that fills up is dearer than its rent: it is judged again as if its room had a price.
        if full:
            prices.spent[0] += types
            more, _, less = gain_of(
                tables, offers, ways, prices, short, g, storage, STEEP * rent, need
            )
            if more > gain:
                gain, stored = more, less
        value = cost - gain
        # It is no bound any more with this, but says what is likely.
        likely = value
        if hopeful == 0:
            likely += scarce * max(0.0, stored - gb_limit(tables, rent, gb_usd, left))
        if scouting:
            short.merit[g] = min(short.merit[g], likely)
        if value >= level or (found == TRIES and likely >= bounds[TRIES - 1]):
            continue
        # Of offers that are alike only the best is listed, so that the list is not full of the same.
        place = 0
        while place < found and not alike(offers, held[place], g, hopeful):
            place += 1
        if place < found:
            if likely >= bounds[place]:
                continue
        elif found < TRIES:
            found += 1
        else:
            place = TRIES - 1
        # The list stays sorted: a better offer moves up past the ones that it beats.
        while place > 0 and bounds[place - 1] > likely:
            bounds[place] = bounds[place - 1]
            held[place] = held[place - 1]
            place -= 1
        bounds[place] = likely
        held[place] = g
    return found


@lean_part
def look_at_all(offers: Offers, short: Shortlist) -> None:
    """Look at all offers from now on."""
    short.number[0] = offers.number[0]
    for g in range(offers.number[0]):
        short.pool[g] = g
        short.merit[g] = np.inf
    for i in range(offers.floor.shape[0]):
        least = np.inf
        for g in range(offers.number[0]):
            share = 1.0 / max(1.0, offers.slow[g, i], offers.wrong[g, i])
            size = share * max(offers.load[g, i], offers.cache[g, i])
            least = min(least, offers.alone[g, i] + size * offers.rent[g])
        # A type's fair part of an offer: what it costs there, with rent by the room that it takes.
        short.fair[i] = least


@lean_part
def look_at_best(short: Shortlist, most: int) -> None:
    """Look only at those offers that had the least bounds, up to so many."""
    if most >= short.number[0]:
        return
    # The bound that so many are below, by halving.
    low, high = np.inf, -np.inf
    for n in range(short.number[0]):
        merit = short.merit[short.pool[n]]
        if abs(merit) < np.inf:
            low, high = min(low, merit), max(high, merit)
    # So many halvings bring two doubles close enough to tell almost all offers apart.
    for _ in range(40):
        middle = 0.5 * (low + high)
        count = 0
        for n in range(short.number[0]):
            count += 1 if short.merit[short.pool[n]] <= middle else 0
        if count > most:
            high = middle
        else:
            low = middle
    kept = 0
    for n in range(short.number[0]):
        if short.merit[short.pool[n]] <= low:
            short.pool[kept] = short.pool[n]
            kept += 1
    short.number[0] = kept
