"""Covering one service at prices, and dealing slices to machines (numba).

A service is covered by *legs*: prefill and decode in a region, or both phases together there. For each phase
and region a table says what covering a level costs with whole instances, in steps of the demand that is asked
for; all of it is served by the best leg or by the best two that share it. Instances that run are kept where
they carry a step for less than new ones do. Steps are rounded down, so that what covers a level does so
truly; as the sum of a few items may be a step or two short only by that, the last steps are tried with their
true sums first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.core.compiling import entry, part
from atoll.solve.array_types import Floats, Ints, Small

Tiny = NDArray[np.int8]

COMPILED_AS = "the fast planner"
_LEVELS_BELOW = 5
"""Levels below the full one at which items are written too."""
# Legs whose tables are made at most: every pair of them is tried at every level.
_LEGS = 6
_TOLERANCE = 1e-9
"""Differences of shares and costs below this come from rounding."""
_COVER_TOLERANCE = 1e-10
"""Share of what is wanted that a cover may miss by rounding."""


@part
def _rate_items(
    pattern: Small,
    region: Small,
    rows: Small,
    amount: Small,
    kinds: int,
    new: int,
    row_price: Floats,
    cost: Floats,
) -> None:
    """Write what each item costs at these prices."""
    width = rows.shape[1]
    for i in range(len(pattern)):
        p = pattern[i]
        # New items name rows by kind inside their region, running ones name them outright.
        first = region[i] * kinds if i < new else 0
        total = 0.0
        for j in range(width):
            # The rest of the row is padding.
            if rows[p, j] < 0:
                break
            total += amount[p, j] * row_price[first + rows[p, j]]
        cost[i] = total


@part
def _best_rate(
    begin: int, end: int, pattern: Small, share: Floats, cost: Floats, target: float
) -> float:
    """Return a lower bound on covering all that is asked for: at the best price for a share of it."""
    rate = np.inf
    for i in range(begin, end):
        if cost[i] < np.inf:
            # Carrying more than is asked for is worth no more than carrying all of it.
            each = cost[i] / min(1.0, share[pattern[i]] / target)
            if each < rate:
                rate = each
    return rate


@part
def _fill_table(
    begin: int,
    end: int,
    pattern: Small,
    share: Floats,
    cost: Floats,
    target: float,
    steps: int,
    best: Floats,
    best_item: Small,
    weight: Ints,
    table: Floats,
    choice: Small,
) -> None:
    """Write what covering each level costs with new items of one phase and region."""
    # The cheapest item of every weight: others of that weight are never needed.
    for d in range(steps + 1):
        best[d] = np.inf
        best_item[d] = -1
    for i in range(begin, end):
        if cost[i] == np.inf:
            continue
        # Rounded down, so that the true shares reach a level too; the tolerance is for exact steps.
        w = min(steps, int(share[pattern[i]] / target * steps + _TOLERANCE))
        if w >= 1 and cost[i] < best[w]:
            best[w] = cost[i]
            best_item[w] = i
    # Only what is cheaper than all that carries more is worth a look.
    number = 0
    low = np.inf
    for w in range(steps, 0, -1):
        if best[w] < low:
            low = best[w]
            weight[number] = w
            number += 1
    table[0] = 0.0
    choice[0] = -1
    # An item and the cheapest cover of what it leaves; it may carry more than is left.
    for d in range(1, steps + 1):
        min_value = np.inf
        which = -1
        for n in range(number):
            w = weight[n]
            value = best[w] + (table[d - w] if d > w else 0.0)
            if value < min_value:
                min_value = value
                which = best_item[w]
        table[d] = min_value
        choice[d] = which


@part
def _keep_running(
    phase: int,
    at: int,
    of_phase: Tiny,
    region: Small,
    pattern: Small,
    share: Floats,
    new: int,
    cost: Floats,
    left: Ints,
    kept: Ints,
    target: float,
    steps: int,
    rate: float,
    base_level: Ints,
    base_cost: Floats,
    group: int,
) -> None:
    """Keep running items of a phase and region that carry a share for no more than new ones do."""
    level = 0
    total = 0.0
    while level < steps:
        best = -1
        value = np.inf
        for i in range(new, len(pattern)):
            if of_phase[i] != phase or region[i] != at or kept[i - new] >= left[i - new]:
                continue
            if cost[i] == np.inf:
                continue
            each = cost[i] / min(1.0, share[pattern[i]] / target)
            if each < value:
                value = each
                best = i
        # New ones do it for less. By the tolerance, what runs stays where both cost the same.
        if best < 0 or value > rate * (1.0 + _TOLERANCE):
            break
        w = min(steps, int(share[pattern[best]] / target * steps + _TOLERANCE))
        # Less than a step: keeping it would not raise the level.
        if w < 1:
            break
        kept[best - new] += 1
        level += w
        total += cost[best]
    base_level[group] = min(level, steps)
    base_cost[group] = total


@part
def _covers(group: int, d: int, table: Floats, base_level: Ints, base_cost: Floats) -> float:
    """Return the cost of covering a level in one phase and region."""
    # Where nothing is asked for, nothing that runs is kept either.
    if d <= 0:
        return 0.0
    value: float = base_cost[group] + table[group, max(0, d - base_level[group])]
    return value


@part
def _write_items(
    group: int,
    d: int,
    phase: int,
    at: int,
    of_phase: Tiny,
    region: Small,
    pattern: Small,
    share: Floats,
    new: int,
    target: float,
    steps: int,
    choice: Small,
    base_level: Ints,
    kept: Ints,
    number: int,
    out_item: Ints,
    out_count: Ints,
    covered: Floats,
) -> int:
    """Append what covers a level in one phase and region; its true share goes to `covered[0]`."""
    covered[0] = 0.0
    for i in range(new, len(pattern)):
        if of_phase[i] == phase and region[i] == at and kept[i - new] > 0:
            out_item[number] = i
            out_count[number] = kept[i - new]
            covered[0] += share[pattern[i]] * kept[i - new]
            number += 1
    # Walk down the table from what running items leave.
    rest = d - base_level[group]
    while rest > 0:
        i = choice[group, rest]
        if i < 0:
            return -1
        if number > 0 and out_item[number - 1] == i:
            out_count[number - 1] += 1
        else:
            out_item[number] = i
            out_count[number] = 1
            number += 1
        covered[0] += share[pattern[i]]
        # Rounded as in the table, so that the walk stays on its entries.
        rest -= min(steps, int(share[pattern[i]] / target * steps + _TOLERANCE))
    return number


@part
def _trim(
    begin: int,
    end: int,
    pattern: Small,
    share: Floats,
    cost: Floats,
    new: int,
    first: int,
    last: int,
    out_item: Ints,
    out_count: Ints,
    surplus: float,
) -> None:
    """Exchange one of each item for the cheapest that still covers all, given what is covered too much."""
    for n in range(first, last):
        i = out_item[n]
        # What runs stays, and one of several would need an entry of its own.
        if i >= new or out_count[n] != 1:
            continue
        needed = share[pattern[i]] - surplus
        best = i
        for o in range(begin, end):
            if cost[o] < cost[best] and share[pattern[o]] >= needed:
                best = o
        if best != i:
            surplus -= share[pattern[i]] - share[pattern[best]]
            out_item[n] = best


@entry(
    "(int8[::1], int32[::1], int32[::1], int32[:, ::1], int32[:, ::1], float64[::1], int64[::1], int64,"
    " int64, int64, float64[::1], int64[::1], float64, int64, float64[::1], float64[::1], int32[::1],"
    " int64[::1], float64[:, ::1], int32[:, ::1], int64[::1], float64[::1], float64[::1], int64[::1],"
    " int64[::1], int64[::1], int64[::1], float64[::1])"
)
def pick_items(  # noqa: C901 - one pass over groups, legs and levels
    phase: Tiny,
    region: Small,
    pattern: Small,
    rows: Small,
    amount: Small,
    share: Floats,
    begin: Ints,
    kinds: int,
    new: int,
    regions: int,
    row_price: Floats,
    left: Ints,
    target: float,
    steps: int,
    cost: Floats,
    best: Floats,
    best_item: Small,
    weight: Ints,
    table: Floats,
    choice: Small,
    base_level: Ints,
    base_cost: Floats,
    min_cost: Floats,
    kept: Ints,
    legs: Ints,
    out_item: Ints,
    out_count: Ints,
    covered: Floats,
) -> int:
    """Write items that cover `target` of a service at the least price; return how many, -1 for none.

    `left[r]` says how many running items there are to keep. The others are room to work in; `cost` is left
    with the price of each item, `covered[1]` with that of all.
    """
    _rate_items(pattern, region, rows, amount, kinds, new, row_price, cost)
    for r in range(len(kept)):
        kept[r] = 0
    # Groups are prefill in each region, then decode, then both phases together.
    for group in range(3 * regions):
        rate = _best_rate(begin[group], begin[group + 1], pattern, share, cost, target)
        base_level[group] = 0
        base_cost[group] = 0.0
        min_cost[group] = rate
        if len(kept) > 0:
            _keep_running(
                group // regions, group % regions, phase, region, pattern, share, new, cost, left, kept,
                target, steps, rate, base_level, base_cost, group,
            )  # fmt: skip
            # The rate of new items is no lower bound beside items that run.
            if base_level[group] > 0:
                min_cost[group] = 0.0
    # The legs that serve all of it for least: 0.. apart, regions.. together. One that costs more at its best
    # rate than another does truly is not looked at.
    found = 0
    cheapest = np.inf
    while True:
        leg = -1
        rate = np.inf
        for each in range(2 * regions):
            value = _leg_rate(each, regions, min_cost)
            if value < rate:
                rate = value
                leg = each
        if leg < 0 or rate >= cheapest or found >= _LEGS:
            break
        for which in range(2):
            if leg >= regions and which == 1:
                continue
            group = regions + leg if leg >= regions else which * regions + leg
            _fill_table(
                begin[group], begin[group + 1], pattern, share, cost, target, steps, best, best_item,
                weight, table[group], choice[group],
            )  # fmt: skip
            # Its table is made: at an infinite rate the leg does not come up again.
            min_cost[group] = np.inf
        value = _leg_cost(leg, steps, regions, table, base_level, base_cost)
        if value == np.inf:
            continue
        place = found
        # Sorted in: the first leg is the best that serves everything alone.
        while place > 0 and value < _leg_cost(
            legs[place - 1], steps, regions, table, base_level, base_cost
        ):
            legs[place] = legs[place - 1]
            place -= 1
        legs[place] = leg
        found += 1
        cheapest = min(cheapest, value)
    covered[1] = np.inf
    if found == 0:
        return -1
    first, second, split = legs[0], legs[0], steps
    min_value = _leg_cost(first, steps, regions, table, base_level, base_cost)
    # Two legs that share the demand: a level by the one, the rest by the other.
    for a in range(found):
        for b in range(found):
            if a == b:
                continue
            for d in range(1, steps):
                value = _leg_cost(legs[a], d, regions, table, base_level, base_cost)
                # Cost does not fall with the level: more of this leg cannot be part of a better pair.
                if value >= min_value:
                    break
                value += _leg_cost(legs[b], steps - d, regions, table, base_level, base_cost)
                # By the tolerance, one leg goes before two that cost the same.
                if value < min_value * (1.0 - _TOLERANCE):
                    min_value = value
                    first, second, split = legs[a], legs[b], d
    number = 0
    for turn in range(2):
        leg = first if turn == 0 else second
        level = split if turn == 0 else steps - split
        if level == 0:
            continue
        for which in range(2):
            if leg >= regions and which == 1:
                continue
            at = leg % regions
            of = 2 if leg >= regions else which
            group = of * regions + at
            # Only a full level is tried with fewer steps: true sums say whether they are enough.
            exact = level == steps
            lowest = max(1, level - _LEVELS_BELOW) if exact else level
            wanted = target * level / steps
            start = number
            for d in range(lowest, level + 1):
                number = _write_items(
                    group, d, of, at, phase, region, pattern, share, new, target, steps, choice,
                    base_level, kept, start, out_item, out_count, covered,
                )  # fmt: skip
                if number < 0:
                    return -1
                if covered[0] >= wanted * (1.0 - _COVER_TOLERANCE):
                    break
            _trim(
                begin[group], begin[group + 1], pattern, share, cost, new, start, number, out_item,
                out_count, covered[0] - wanted,
            )  # fmt: skip
    # Summed anew: trimming has changed items.
    covered[1] = 0.0
    for n in range(number):
        covered[1] += cost[out_item[n]] * out_count[n]
    return number


@part
def _leg_rate(leg: int, regions: int, min_cost: Floats) -> float:
    """Return a lower bound on the cost of a leg."""
    value: float = min_cost[regions + leg]
    return value if leg >= regions else value + min_cost[leg]


@part
def _leg_cost(
    leg: int, d: int, regions: int, table: Floats, base_level: Ints, base_cost: Floats
) -> float:
    """Return the cost of a leg that serves a level: phases apart, or together."""
    if leg >= regions:
        return _covers(regions + leg, d, table, base_level, base_cost)
    return _covers(leg, d, table, base_level, base_cost) + _covers(
        regions + leg, d, table, base_level, base_cost
    )


@part
def _deal(  # noqa: C901 - one loop over families, cells and offers
    which: Ints,
    cell_begin: Ints,
    cell_of: Ints,
    cell_gpus: Ints,
    source_begin: Ints,
    source_offer: Ints,
    offer_begin: Ints,
    offer_of: Ints,
    gpus: Ints,
    available: Ints,
    need: Ints,
    held: Ints,
    usd: Floats,
    paid: Floats,
    start: Floats,
    used: Ints,
    slices: Ints,
    total: Floats,
) -> int:
    """Deal the nodes that some families (a GPU type in a region) need to their offers.

    Large slices first, each to an open machine, or else to the machine that costs least for the GPUs that
    are still to be dealt, at `paid`. `used` has GPUs of each offer after that, `slices` by source, `total`
    what each family costs. Returns the first family that does not fit, or -1.
    """
    for f in which:
        rest = 0
        # GPUs that are still to be dealt: they say how full one more machine would get.
        for c in range(cell_begin[f], cell_begin[f + 1]):
            rest += need[cell_of[c]] * cell_gpus[c]
            for s in range(source_begin[c], source_begin[c + 1]):
                slices[s] = 0
        # What running instances hold stays on its offer, and counts first.
        for o in range(offer_begin[f], offer_begin[f + 1]):
            used[offer_of[o]] = held[offer_of[o]]
            if held[offer_of[o]] > available[offer_of[o]] * gpus[offer_of[o]]:
                return int(f)
        cost = 0.0
        for c in range(cell_begin[f], cell_begin[f + 1]):
            size = cell_gpus[c]
            number = need[cell_of[c]]
            while number > 0:
                best = -1
                min_value = np.inf
                for s in range(source_begin[c], source_begin[c + 1]):
                    k = source_offer[s]
                    # Room in an open machine costs no rent; one more is paid by the GPUs that it will hold.
                    machines = -(-used[k] // gpus[k])
                    if machines * gpus[k] - used[k] >= size:
                        value = start[k] * size
                    elif machines < available[k]:
                        value = paid[k] * size / min(gpus[k], rest) + start[k] * size
                    else:
                        continue
                    if value < min_value:
                        min_value = value
                        best = s
                if best < 0:
                    return int(f)
                k = source_offer[best]
                room = -(-used[k] // gpus[k]) * gpus[k] - used[k]
                if room < size:
                    room += gpus[k]
                # As many as that machine holds.
                taken = min(number, room // size)
                number -= taken
                rest -= taken * size
                used[k] += taken * size
                slices[best] += taken
                cost += start[k] * taken * size
        # Rent is counted at true prices: `paid` guides the choice only.
        for o in range(offer_begin[f], offer_begin[f + 1]):
            k = offer_of[o]
            cost += usd[k] * -(-used[k] // gpus[k])
        total[f] = cost
    return -1


deal_slices = entry(
    "(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1],"
    " int64[::1], int64[::1], int64[::1], int64[::1], float64[::1], float64[::1], float64[::1],"
    " int64[::1], int64[::1], float64[::1])"
)(_deal)


@entry(
    "(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1],"
    " int64[::1], int64[::1], int64[::1], float64[::1], float64[::1], float64[::1], int64[::1],"
    " int64[::1], float64[::1], int64[::1], float64[::1])"
)
def price_one_more(
    cell_begin: Ints,
    cell_of: Ints,
    cell_gpus: Ints,
    source_begin: Ints,
    source_offer: Ints,
    offer_begin: Ints,
    offer_of: Ints,
    gpus: Ints,
    available: Ints,
    need: Ints,
    held: Ints,
    usd: Floats,
    paid: Floats,
    start: Floats,
    used: Ints,
    slices: Ints,
    total: Floats,
    one: Ints,
    price: Floats,
) -> None:
    """Write what one more node of each cell costs now, inf where there is none.

    `total`, `used`, `slices` and `one` are room to work in.
    """
    before = np.inf
    for f in range(len(cell_begin) - 1):
        one[0] = f
        # Step -1 deals what is needed now, to compare with.
        for step in range(-1, cell_begin[f + 1] - cell_begin[f]):
            c = cell_begin[f] + step
            if step >= 0:
                need[cell_of[c]] += 1
            failed = _deal(
                one, cell_begin, cell_of, cell_gpus, source_begin, source_offer, offer_begin, offer_of,
                gpus, available, need, held, usd, paid, start, used, slices, total,
            )  # fmt: skip
            value = total[f] if failed < 0 else np.inf
            if step < 0:
                before = value
            else:
                need[cell_of[c]] -= 1
                # What cannot be dealt now cannot be compared.
                price[cell_of[c]] = max(0.0, value - before) if before < np.inf else np.inf
