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

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Small = NDArray[np.int32]
Tiny = NDArray[np.int8]
Bools = NDArray[np.bool_]

COMPILED_AS = "the fast planner"
_SPARE = 5
_LEGS = 6
_HAIR = 1e-9
_FULL = 1e-10


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
        first = region[i] * kinds if i < new else 0
        total = 0.0
        for j in range(width):
            if rows[p, j] < 0:
                break
            total += amount[p, j] * row_price[first + rows[p, j]]
        cost[i] = total


@part
def _best_rate(
    begin: int, end: int, pattern: Small, share: Floats, cost: Floats, target: float
) -> float:
    """What covering all that is asked for costs at least, at the best price for a share of it."""
    rate = np.inf
    for i in range(begin, end):
        if cost[i] < np.inf:
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
    for d in range(steps + 1):
        best[d] = np.inf
        best_item[d] = -1
    for i in range(begin, end):
        if cost[i] == np.inf:
            continue
        w = min(steps, int(share[pattern[i]] / target * steps + _HAIR))
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
    for d in range(1, steps + 1):
        least = np.inf
        which = -1
        for n in range(number):
            w = weight[n]
            value = best[w] + (table[d - w] if d > w else 0.0)
            if value < least:
                least = value
                which = best_item[w]
        table[d] = least
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
        if best < 0 or value > rate * (1.0 + _HAIR):
            break
        w = min(steps, int(share[pattern[best]] / target * steps + _HAIR))
        if w < 1:
            break
        kept[best - new] += 1
        level += w
        total += cost[best]
    base_level[group] = min(level, steps)
    base_cost[group] = total


@part
def _covers(group: int, d: int, table: Floats, base_level: Ints, base_cost: Floats) -> float:
    """What covering a level costs in one phase and region."""
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
        rest -= min(steps, int(share[pattern[i]] / target * steps + _HAIR))
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
    least_cost: Floats,
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
    for group in range(3 * regions):
        rate = _best_rate(begin[group], begin[group + 1], pattern, share, cost, target)
        base_level[group] = 0
        base_cost[group] = 0.0
        least_cost[group] = rate
        if len(kept) > 0:
            _keep_running(
                group // regions, group % regions, phase, region, pattern, share, new, cost, left, kept,
                target, steps, rate, base_level, base_cost, group,
            )  # fmt: skip
            if base_level[group] > 0:
                least_cost[group] = 0.0
    # The legs that serve all of it for least: 0.. apart, regions.. together. One that costs more at its best
    # rate than another does truly is not looked at.
    found = 0
    cheapest = np.inf
    while True:
        leg = -1
        rate = np.inf
        for each in range(2 * regions):
            value = _leg_rate(each, regions, least_cost)
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
            least_cost[group] = np.inf
        value = _leg_cost(leg, steps, regions, table, base_level, base_cost)
        if value == np.inf:
            continue
        place = found
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
    least = _leg_cost(first, steps, regions, table, base_level, base_cost)
    for a in range(found):
        for b in range(found):
            if a == b:
                continue
            for d in range(1, steps):
                value = _leg_cost(legs[a], d, regions, table, base_level, base_cost)
                if value >= least:
                    break
                value += _leg_cost(legs[b], steps - d, regions, table, base_level, base_cost)
                if value < least * (1.0 - _HAIR):
                    least = value
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
            exact = level == steps
            lowest = max(1, level - _SPARE) if exact else level
            wanted = target * level / steps
            start = number
            for d in range(lowest, level + 1):
                number = _write_items(
                    group, d, of, at, phase, region, pattern, share, new, target, steps, choice,
                    base_level, kept, start, out_item, out_count, covered,
                )  # fmt: skip
                if number < 0:
                    return -1
                if covered[0] >= wanted * (1.0 - _FULL):
                    break
            _trim(
                begin[group], begin[group + 1], pattern, share, cost, new, start, number, out_item,
                out_count, covered[0] - wanted,
            )  # fmt: skip
    covered[1] = 0.0
    for n in range(number):
        covered[1] += cost[out_item[n]] * out_count[n]
    return number


@part
def _leg_rate(leg: int, regions: int, least_cost: Floats) -> float:
    """What a leg costs at least."""
    value: float = least_cost[regions + leg]
    return value if leg >= regions else value + least_cost[leg]


@part
def _leg_cost(
    leg: int, d: int, regions: int, table: Floats, base_level: Ints, base_cost: Floats
) -> float:
    """What a leg costs that serves a level: phases apart, or together."""
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
    spot: Bools,
    spot_share: float,
    used: Ints,
    slices: Ints,
    spot_used: Ints,
    total: Floats,
) -> int:
    """Deal the nodes that some families (a GPU type in a region) need to their offers.

    Large slices first, each to an open machine, or else to the machine that costs least for the GPUs that
    are still to be dealt, at `paid`. `used` has GPUs of each offer after that, `slices` by source, `total`
    what each family costs. `spot_used` are GPUs on spot so far, and all that are in use in the end. Returns
    the first family that does not fit, or -1.
    """
    for f in which:
        rest = 0
        for c in range(cell_begin[f], cell_begin[f + 1]):
            rest += need[cell_of[c]] * cell_gpus[c]
            for s in range(source_begin[c], source_begin[c + 1]):
                slices[s] = 0
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
                least = np.inf
                for s in range(source_begin[c], source_begin[c + 1]):
                    k = source_offer[s]
                    if (
                        spot[k]
                        and spot_share < 1.0
                        and spot_used[0] + size > spot_share * spot_used[1] + _HAIR
                    ):
                        continue
                    machines = -(-used[k] // gpus[k])
                    if machines * gpus[k] - used[k] >= size:
                        value = start[k] * size
                    elif machines < available[k]:
                        value = paid[k] * size / min(gpus[k], rest) + start[k] * size
                    else:
                        continue
                    if value < least:
                        least = value
                        best = s
                if best < 0:
                    return int(f)
                k = source_offer[best]
                room = -(-used[k] // gpus[k]) * gpus[k] - used[k]
                if room < size:
                    room += gpus[k]
                taken = min(number, room // size)
                if spot[k] and spot_share < 1.0:
                    taken = 1
                number -= taken
                rest -= taken * size
                used[k] += taken * size
                if spot[k]:
                    spot_used[0] += taken * size
                slices[best] += taken
                cost += start[k] * taken * size
        for o in range(offer_begin[f], offer_begin[f + 1]):
            k = offer_of[o]
            cost += usd[k] * -(-used[k] // gpus[k])
        total[f] = cost
    return -1


deal_slices = entry(
    "(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1],"
    " int64[::1], int64[::1], int64[::1], int64[::1], float64[::1], float64[::1], float64[::1],"
    " boolean[::1], float64, int64[::1], int64[::1], int64[::1], float64[::1])"
)(_deal)


@entry(
    "(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1],"
    " int64[::1], int64[::1], int64[::1], int64[::1], float64[::1], float64[::1], float64[::1],"
    " boolean[::1], float64, int64[::1], int64[::1], int64[::1], float64[::1], int64[::1], int64[::1],"
    " float64[::1])"
)
def price_one_more(
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
    spot: Bools,
    spot_share: float,
    used: Ints,
    slices: Ints,
    spot_used: Ints,
    total: Floats,
    one: Ints,
    spot_start: Ints,
    price: Floats,
) -> None:
    """Write what one more node of each cell costs now, inf where there is none.

    `which` are all families where a limit on spot joins them; else it is empty, and each is dealt alone.
    `total`, `used`, `slices` and `spot_used` are room to work in.
    """
    before = np.inf
    for f in range(len(cell_begin) - 1):
        one[0] = f
        some = which if len(which) > 0 else one
        for step in range(-1, cell_begin[f + 1] - cell_begin[f]):
            c = cell_begin[f] + step
            spot_used[0] = spot_start[0]
            spot_used[1] = spot_start[1]
            if step >= 0:
                need[cell_of[c]] += 1
                spot_used[1] += cell_gpus[c]
            failed = _deal(
                some, cell_begin, cell_of, cell_gpus, source_begin, source_offer, offer_begin, offer_of,
                gpus, available, need, held, usd, paid, start, spot, spot_share, used, slices, spot_used,
                total,
            )  # fmt: skip
            value = np.inf
            if failed < 0:
                value = 0.0
                for g in some:
                    value += total[g]
            if step < 0:
                before = value
            else:
                need[cell_of[c]] -= 1
                # What cannot be dealt now cannot be compared.
                price[cell_of[c]] = max(0.0, value - before) if before < np.inf else np.inf
