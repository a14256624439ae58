"""The inner loop of the search for the largest common share: what a region has is given to others (numba).

A step takes a few instances of a region away, at random: of one service, of those that use the same
machines, or any. Then services that lost something, and some that are short, take in turn what is cheapest
for what it carries, whoever gains most for the price first. What is worth no less than before, after rent,
stays; a little less does so now and then.

What instances take is counted by *capacity* (`market_capacities`). A capacity that is used up is closed: a
bit in the word of its region, so that items which need it are passed by at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from atoll.core.compiling import entry, lean_part
from atoll.solve.array_types import Floats, Ints, Small
from atoll.solve.random_words import Words, below, unit
from atoll.solve.rent.fast.fast_kernel import Tiny

COMPILED_AS = "the planner under shortage"
_EQUAL = 1e-9
"""Shares and capacities that rounding may make of nothing."""
_PASSED_BY = 0.1
"""How often an item that is the best so far is passed by: else a step would mostly restore what was."""
MOST_AWAY = 14
"""Instances that a step takes away at most."""
_OTHERS = 10
"""Services that are short and may take something, beside those that lost something."""


class ShareItems(NamedTuple):
    """Items in the order of service, region and phase, and then of price for what they carry.

    Those of a phase p of service m in region r are `begin[(m * regions + r) * 3 + p]` up to the next. `uses`
    (padded with -1) are capacities, `amount` how much of each; `needs` has the bits of those in the region.
    """

    regions: int
    begin: Ints
    service: Small
    region: Small
    phase: Tiny
    share: Floats
    cost: Floats
    rate: Floats
    rent: Floats
    needs: Ints
    uses: Small
    amount: Floats


class Capacities(NamedTuple):
    """What is left of each capacity, the least that anything takes of it, its region and its bit there.

    `closed` has the bits of those that are used up, by region; `copies` is how many more of an item can be.
    """

    free: Floats
    least: Floats
    region: Small
    bit: Ints
    closed: Ints
    copies: Small


class StandingItems(NamedTuple):
    """What stands: items by region, how many there, levels by service, region and phase, share by service.

    `worth` is what all of each service's demand is worth. The rest is room to work in.
    """

    item: Small
    number: Ints
    level: Floats
    share: Floats
    worth: Floats
    random: Words
    taken: Small
    added: Small
    candidate: Small
    is_candidate: Tiny
    short: Small
    ratio: Floats
    pair: Small


ITEMS_TYPE = (
    "Tuple((int64, int64[::1], int32[::1], int32[::1], int8[::1], float64[::1], float64[::1],"
    " float64[::1], float64[::1], int64[::1], int32[:, ::1], float64[:, ::1]))"
)
CAPACITIES_TYPE = (
    "Tuple((float64[::1], float64[::1], int32[::1], int64[::1], int64[::1], int32[::1]))"
)
STANDING_TYPE = (
    "Tuple((int32[:, ::1], int64[::1], float64[:, :, ::1], float64[::1], float64[::1], uint64[::1],"
    " int32[::1], int32[::1], int32[::1], int8[::1], int32[::1], float64[::1], int32[:, ::1]))"
)


@lean_part
def _fits(items: ShareItems, capacities: Capacities, i: int) -> bool:
    """Return whether there is room for one more of an item."""
    uses, amount, free = items.uses, items.amount, capacities.free
    for j in range(uses.shape[1]):
        at = uses[i, j]
        # The rest of the row is padding.
        if at < 0:
            break
        if amount[i, j] > free[at] + _EQUAL:
            return False
    return bool(capacities.copies[i] > 0)


@lean_part
def _use(items: ShareItems, capacities: Capacities, i: int, sign: int) -> None:
    """Take what an item takes, or with `sign` -1 give it back."""
    uses, amount, free = items.uses, items.amount, capacities.free
    closed, bit = capacities.closed, capacities.bit
    for j in range(uses.shape[1]):
        at = uses[i, j]
        if at < 0:
            break
        free[at] -= sign * amount[i, j]
        where = capacities.region[at]
        if free[at] + _EQUAL < capacities.least[at]:
            closed[where] = closed[where] | bit[at]
        else:
            closed[where] = closed[where] & ~bit[at]
    capacities.copies[i] -= sign


@lean_part
def _level(items: ShareItems, standing: StandingItems, i: int, sign: int) -> None:
    """Count what an item carries: both phases, or what prefill and decode serve together in its region."""
    m, r, level = items.service[i], items.region[i], standing.level
    before = level[m, r, 2] + min(level[m, r, 0], level[m, r, 1])
    level[m, r, items.phase[i]] += sign * items.share[i]
    standing.share[m] += level[m, r, 2] + min(level[m, r, 0], level[m, r, 1]) - before


@lean_part
def _cheapest(
    items: ShareItems,
    capacities: Capacities,
    standing: StandingItems,
    group: int,
    wanted: float,
) -> int:
    """Return the item of a group that there is room for and that costs least for what it carries."""
    rate, needs = items.rate, items.needs
    best = -1
    begin, end = items.begin[group], items.begin[group + 1]
    if begin == end:
        return best
    closed = capacities.closed[items.region[begin]]
    value = 1e300
    for i in range(begin, end):
        # They come in the order of the rate, which nothing costs less than.
        if rate[i] >= value:
            break
        if needs[i] & closed:
            continue
        each = rate[i] if items.share[i] <= wanted else items.cost[i] / wanted
        if each < value and _fits(items, capacities, i) and unit(standing.random) > _PASSED_BY:
            value = each
            best = i
    return best


@lean_part
def _choose(
    items: ShareItems,
    capacities: Capacities,
    standing: StandingItems,
    m: int,
    r: int,
    target: float,
    c: int,
) -> float:
    """Write the one or two items that candidate c, service m, gains most by; return what for their price."""
    pair = standing.pair
    pair[c, 0] = pair[c, 1] = -1
    missing = target - standing.share[m]
    if missing <= _EQUAL:
        return 0.0
    group = (m * items.regions + r) * 3
    prefill, decode = standing.level[m, r, 0], standing.level[m, r, 1]
    best = 0.0
    i = _cheapest(items, capacities, standing, group + 2, missing)
    if i >= 0:
        best = min(items.share[i], missing) / items.cost[i]
        pair[c, 0] = i
    # What one phase has more than the other is served by that one alone.
    more = min(abs(prefill - decode), missing)
    if more > _EQUAL:
        i = _cheapest(items, capacities, standing, group + (1 if prefill > decode else 0), more)
        if i >= 0 and min(items.share[i], more) / items.cost[i] > best:
            best = min(items.share[i], more) / items.cost[i]
            pair[c, 0] = i
    first = below(standing.random, 2)
    ahead = max(0.0, prefill - decode if first == 0 else decode - prefill)
    behind = max(0.0, decode - prefill if first == 0 else prefill - decode)
    i = _cheapest(items, capacities, standing, group + first, missing)
    if i >= 0:
        _use(items, capacities, i, 1)
        wanted = min(missing, items.share[i] + ahead) - behind
        if wanted > _EQUAL:
            k = _cheapest(items, capacities, standing, group + 1 - first, wanted)
            if k >= 0:
                served = min(items.share[i] + ahead, items.share[k] + behind, missing)
                value = served / (items.cost[i] + items.cost[k])
                if value > best:
                    best = value
                    pair[c, 0] = i
                    pair[c, 1] = k
        _use(items, capacities, i, -1)
    return float(standing.worth[m] * best)


@lean_part
def _count(standing: StandingItems, m: int, target: float, number: int) -> float:
    """Make a service the next candidate; return what it has is worth."""
    standing.is_candidate[m] = 1
    standing.candidate[number] = m
    value: float = standing.worth[m] * min(standing.share[m], target)
    return value


@lean_part
def _pick(items: ShareItems, standing: StandingItems, r: int, seed: int, how: int) -> int:
    """Return the place of an instance of a region to take away: one like that of `seed`, or any."""
    number, like = standing.number[r], -1
    if how < 2:
        found = 0
        for place in range(number):
            i = standing.item[r, place]
            if how == 0:
                alike = items.service[i] == items.service[seed]
            else:
                alike = (items.needs[i] & items.needs[seed]) != 0
            if alike:
                found += 1
                # Each of those found so far is as likely.
                if below(standing.random, found) == 0:
                    like = place
    return like if like >= 0 else below(standing.random, number)


@lean_part
def _take_away(
    items: ShareItems, capacities: Capacities, standing: StandingItems, r: int, i: int, place: int
) -> None:
    standing.number[r] -= 1
    standing.item[r, place] = standing.item[r, standing.number[r]]
    _level(items, standing, i, -1)
    _use(items, capacities, i, -1)


@lean_part
def _clear(
    items: ShareItems, capacities: Capacities, standing: StandingItems, r: int, target: float
) -> tuple[int, int, float]:
    """Take instances of a region away; return how many, the candidates, and what these were worth."""
    random = standing.random
    how, most, seed = below(random, 3), 1 + below(random, MOST_AWAY), -1
    away, candidates, worth = 0, 0, 0.0
    while away < most and standing.number[r] > 0:
        place = _pick(items, standing, r, seed, how if seed >= 0 else 2)
        i = standing.item[r, place]
        if seed < 0:
            seed = i
        m = items.service[i]
        if not standing.is_candidate[m]:
            worth += _count(standing, m, target, candidates)
            candidates += 1
        _take_away(items, capacities, standing, r, i, place)
        standing.taken[away] = i
        away += 1
    return away, candidates, worth


@lean_part
def _invite(standing: StandingItems, target: float, candidates: int) -> tuple[int, float]:
    """Make candidates of some that are short; return how many there are, and what those were worth."""
    short = 0
    worth = 0.0
    for m in range(standing.share.shape[0]):
        if not standing.is_candidate[m] and standing.share[m] < target - _EQUAL:
            standing.short[short] = m
            short += 1
    for n in range(min(_OTHERS, short)):
        place = n + below(standing.random, short - n)
        m = standing.short[place]
        standing.short[place] = standing.short[n]
        worth += _count(standing, m, target, candidates)
        candidates += 1
    return candidates, worth


@lean_part
def _best(
    items: ShareItems,
    capacities: Capacities,
    standing: StandingItems,
    r: int,
    target: float,
    number: int,
) -> int:
    """Return the candidate that gains most for the price, -1 where nobody gains."""
    best, value = -1, 0.0
    for c in range(number):
        ratio = standing.ratio[c]
        # Below 0 it is not known; where somebody else has taken something since, it is not known any more.
        if ratio > value:
            one, two = standing.pair[c, 0], standing.pair[c, 1]
            gone = not _fits(items, capacities, one)
            if gone or (two >= 0 and not _fits(items, capacities, two)):
                ratio = -1.0
        if ratio < 0.0:
            ratio = _choose(items, capacities, standing, standing.candidate[c], r, target, c)
        standing.ratio[c] = ratio
        if ratio > value:
            best, value = c, ratio
    return best


@lean_part
def _fill(
    items: ShareItems,
    capacities: Capacities,
    standing: StandingItems,
    r: int,
    target: float,
    number: int,
) -> int:
    """Let candidates take what gains most, until nobody gains; return how many instances that is."""
    added = 0
    for c in range(number):
        standing.ratio[c] = -1.0
    while added + 1 < standing.added.shape[0]:
        best = _best(items, capacities, standing, r, target, number)
        if best < 0:
            break
        for n in range(2):
            i = standing.pair[best, n]
            # Both may want the last of something.
            if i >= 0 and _fits(items, capacities, i):
                _level(items, standing, i, 1)
                _use(items, capacities, i, 1)
                standing.added[added] = i
                added += 1
        standing.ratio[best] = -1.0
    return added


@lean_part
def _step(
    items: ShareItems, capacities: Capacities, standing: StandingItems, target: float, worse: float
) -> None:
    """Take some instances of a region away and fill it again, as the module says."""
    r = below(standing.random, items.regions)
    away, number, before = _clear(items, capacities, standing, r, target)
    number, more = _invite(standing, target, number)
    added = _fill(items, capacities, standing, r, target, number)
    after = 0.0
    for c in range(number):
        m = standing.candidate[c]
        after += standing.worth[m] * min(standing.share[m], target)
        standing.is_candidate[m] = 0
    for n in range(added):
        after -= items.rent[standing.added[n]]
    for n in range(away):
        before -= items.rent[standing.taken[n]]
    if after >= before + more - worse * unit(standing.random):
        _put_back(standing, r, standing.added, added)
        return
    for n in range(added):
        _level(items, standing, standing.added[n], -1)
        _use(items, capacities, standing.added[n], -1)
    for n in range(away):
        _level(items, standing, standing.taken[n], 1)
        _use(items, capacities, standing.taken[n], 1)
    _put_back(standing, r, standing.taken, away)


@lean_part
def _put_back(standing: StandingItems, r: int, some: Small, number: int) -> None:
    """List instances of a region, with what they take and carry counted already."""
    for n in range(number):
        standing.item[r, standing.number[r]] = some[n]
        standing.number[r] += 1


@entry(f"({ITEMS_TYPE}, {CAPACITIES_TYPE}, {STANDING_TYPE}, int64, float64, float64)")
def take_steps(
    items: tuple[Any, ...],
    capacities: tuple[Any, ...],
    standing: tuple[Any, ...],
    steps: int,
    target: float,
    worse: float,
) -> None:
    """Take so many steps towards a share of `target` for all, none of them worse by more than `worse`."""
    for _ in range(steps):
        _step(ShareItems(*items), Capacities(*capacities), StandingItems(*standing), target, worse)
