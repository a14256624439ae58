"""The steps that GH and AGH are made of (numba): a pair's configuration, how much fits, what it costs.

M1 (6) finds the smallest configuration that holds the weights and keeps the delay; M2 (7, 8) ranks pairs by
cost for the share they can take; M3 (9) gives an active pair more GPUs where its delay is too long. Each can
be switched off, to see what it does. Without M1 the smallest configuration is taken and trusted to hold
weights and delay. Without M2 pairs come in the order of their cost, whatever share they can take. Without
M3 an active pair stays as it is, and is trusted to have the delay that M1 found.

Where the paper is silent: of configurations with as many GPUs the one with the shorter delay is taken; an
upgrade must keep the delay of types that are on the pair already; after a part of a type is placed, (8) is
computed again for what is left; the first phase activates nothing that would pass its share of the budget.

Taken literally a share that does not fit is skipped. With `FILL` a pair takes of the share (8) what it has
compute for, and its cost is for that, so that a type larger than any one pair is spread over several: a
service over machines. Which pairs come first stays a matter of (8).
"""

from __future__ import annotations

import numpy as np

from atoll.core.compiling import lean_part
from atoll.solve.joint.joint_problem import Floats, Ints
from atoll.solve.joint.joint_tables import (
    BUDGET,
    CACHE,
    DELAY,
    ERROR,
    LOAD,
    MONEY,
    STORAGE,
    STORED,
    UNMET,
    JointTables,
    Ledger,
    configure,
    in_stock,
    put,
    within,
)

# Bits of `switches`.
SELECT, RANK, UPGRADE, FILL = 1, 2, 4, 8
FIRST_SHARE = 0.8
"""beta: the share of the budget that the first phase may spend."""
_MIN = 1e-9
"""A smaller share of a type is not worth a placement."""


@lean_part
def find_first(tables: JointTables, switches: int, first: Ints) -> None:
    """Write the configuration of M1 for each type and pair into `first`, -1 where there is none."""
    types, pairs, configs = tables.delay.shape
    gpus = tables.gpus
    for i in range(types):
        for p in range(pairs):
            best = -1
            for c in range(configs):
                if tables.rent[p, c] == np.inf:
                    continue
                if switches & SELECT and (
                    tables.room[p, c] < 0.0
                    or not within(tables.delay[i, p, c], tables.delay_limit[i])
                ):
                    continue
                if (
                    best < 0
                    or gpus[c] < gpus[best]
                    or (gpus[c] == gpus[best] and tables.delay[i, p, c] < tables.delay[i, p, best])
                ):
                    best = c
            first[i, p] = best


@lean_part
def seconds_at(tables: JointTables, switches: int, first: Ints, i: int, p: int, c: int) -> float:
    """Return the delay that a type is taken to have on a pair of this configuration."""
    if switches & UPGRADE or first[i, p] < 0:
        return float(tables.delay[i, p, c])
    return float(tables.delay[i, p, first[i, p]])


@lean_part
def find_upgrade(tables: JointTables, ledger: Ledger, i: int, p: int) -> int:
    """Return the smallest larger configuration of an active pair with which a type keeps its delay (9)."""
    now = ledger.config[p]
    best = -1
    for c in range(tables.gpus.shape[0]):
        # Cheap tests first; the delay of types that are there already is looked at last.
        if (
            tables.gpus[c] <= tables.gpus[now]
            or (best >= 0 and tables.gpus[c] >= tables.gpus[best])
            or not within(tables.delay[i, p, c], tables.delay_limit[i])
            or not within(
                ledger.totals[MONEY] + tables.rent[p, c] - tables.rent[p, now],
                tables.limits[BUDGET],
            )
            or not in_stock(tables, ledger, p, c)
        ):
            continue
        kept = True
        for other in range(ledger.share.shape[0]):
            share = ledger.share[other, p]
            if share > 0.0:
                longer = share * (tables.delay[other, p, c] - tables.delay[other, p, now])
                kept = kept and within(
                    ledger.types[DELAY, other] + longer, tables.delay_limit[other]
                )
        if kept:
            best = c
    return best


@lean_part
def find_config(
    tables: JointTables, ledger: Ledger, switches: int, first: Ints, i: int, p: int
) -> int:
    """Return the configuration that a pair needs for a type, -1 where there is none."""
    now = ledger.config[p]
    # An inactive pair takes the configuration that M1 found for this type.
    if now < 0:
        return int(first[i, p])
    if not switches & UPGRADE:
        return now if first[i, p] >= 0 else -1
    # The pair as it is keeps the delay: an upgrade would only cost.
    if within(tables.delay[i, p, now], tables.delay_limit[i]):
        return int(now)
    return find_upgrade(tables, ledger, i, p)


@lean_part
def coverage(
    tables: JointTables, ledger: Ledger, switches: int, i: int, p: int, seconds: float
) -> float:
    """Return the share of a type that error and delay let a pair take (8)."""
    most = ledger.types[UNMET, i]
    error = tables.error[i, p]
    left = tables.error_limit[i] - ledger.types[ERROR, i]
    if error * most > left:
        most = left / error
    left = tables.delay_limit[i] - ledger.types[DELAY, i]
    if switches & SELECT and seconds * most > left:
        most = left / seconds
    return float(most)


@lean_part
def filled(
    tables: JointTables, ledger: Ledger, switches: int, i: int, p: int, c: int, most: float
) -> float:
    """Return how much of a share a pair of this configuration takes: what it has compute for, or all."""
    if switches & FILL:
        left = max(0.0, tables.power[p, c] - ledger.pairs[LOAD, p])
        if tables.load[i, p] * most > left:
            return float(left / tables.load[i, p])
    return most


@lean_part
def price(tables: JointTables, ledger: Ledger, i: int, p: int, c: int, seconds: float) -> float:
    """Return what it costs to place a type on a pair (7)."""
    now = ledger.config[p]
    total = tables.keep_usd[p] + tables.data_usd[i] + tables.delay_usd[i] * seconds
    if now < 0:
        total += tables.rent[p, c]
    elif tables.gpus[c] > tables.gpus[now]:
        total += tables.rent[p, c] - tables.rent[p, now]
    return float(total)


@lean_part
def fits(
    tables: JointTables, ledger: Ledger, switches: int, i: int, p: int, c: int, share: float
) -> bool:
    """Say whether a share of a type can go to a pair of this configuration (5f) to (5h), (5c)."""
    room = tables.room[p, c]
    # Without M1 weights are trusted to fit, so a negative room counts as none.
    if not switches & SELECT:
        room = max(room, 0.0)
    now = ledger.config[p]
    # Of an active pair only the difference of rents is new.
    rent = tables.rent[p, c] - (tables.rent[p, now] if now >= 0 else 0.0)
    new = ledger.share[i, p] <= 0.0
    money = rent + share * tables.data_usd[i] + (tables.keep_usd[p] if new else 0.0)
    stored = share * tables.data_gb[i] + (tables.keep_gb[p] if new else 0.0)
    return (
        within(ledger.pairs[LOAD, p] + share * tables.load[i, p], tables.power[p, c])
        and within(ledger.pairs[CACHE, p] + share * tables.cache[i, p], room)
        and within(ledger.totals[STORED] + stored, tables.limits[STORAGE])
        and within(ledger.totals[MONEY] + money, tables.limits[BUDGET])
        and in_stock(tables, ledger, p, c)
    )


@lean_part
def cover(  # noqa: C901  (one pass over types and pairs)
    tables: JointTables, ledger: Ledger, first: Ints, covered: Ints
) -> None:
    """Activate pairs until each type has one that could serve it, or the budget's share is spent (10, 11)."""
    types, pairs = first.shape
    for i in range(types):
        covered[i] = 0
    # The first phase leaves a part of the budget for what routing needs later.
    cap = FIRST_SHARE * tables.limits[BUDGET]
    while True:
        best, best_c, best_value = -1, -1, 0.0
        for p in range(pairs):
            if ledger.config[p] >= 0:
                continue
            number, c = 0, -1
            for i in range(types):
                if (
                    covered[i] == 0
                    and first[i, p] >= 0
                    and within(tables.error[i, p], tables.error_limit[i])
                ):
                    number += 1
                    # The largest configuration that any of these types needs serves all of them.
                    if c < 0 or tables.gpus[first[i, p]] > tables.gpus[c]:
                        c = first[i, p]
            if (
                number > 0
                and within(ledger.totals[MONEY] + tables.rent[p, c], cap)
                and in_stock(tables, ledger, p, c)
            ):
                # Types per dollar: greedy covering.
                value = number / tables.rent[p, c]
                if value > best_value:
                    best, best_c, best_value = p, c, value
        if best < 0:
            return
        configure(tables, ledger, best, best_c)
        for i in range(types):
            if first[i, best] >= 0 and within(tables.error[i, best], tables.error_limit[i]):
                covered[i] = 1


@lean_part
def comes_first(rank: Floats, p: int, q: int) -> bool:
    """Say whether a pair is tried before another."""
    # Pairs that can take all of a type come first, then the cheaper ones; the number breaks ties.
    if rank[1, p] != rank[1, q]:
        return bool(rank[1, p] < rank[1, q])
    if rank[0, p] != rank[0, q]:
        return bool(rank[0, p] < rank[0, q])
    return p < q


@lean_part
def sink(rank: Floats, heap: Ints, place: int, count: int) -> None:
    """Let an entry of a heap sink to where it belongs."""
    while 2 * place + 1 < count:
        child = 2 * place + 1
        if child + 1 < count and comes_first(rank, heap[child + 1], heap[child]):
            child += 1
        if not comes_first(rank, heap[child], heap[place]):
            return
        heap[place], heap[child] = heap[child], heap[place]
        place = child


@lean_part
def allocate(
    tables: JointTables,
    ledger: Ledger,
    switches: int,
    first: Ints,
    i: int,
    rank: Floats,
    heap: Ints,
) -> None:
    """Place one type on pairs in the order of M2; `rank`, two rows by pair, and `heap` are scratch."""
    pairs = first.shape[1]
    count = 0
    unmet = ledger.types[UNMET, i]
    for p in range(pairs):
        c = find_config(tables, ledger, switches, first, i, p)
        if c < 0:
            continue
        seconds = seconds_at(tables, switches, first, i, p, c)
        most = coverage(tables, ledger, switches, i, p, seconds)
        share = filled(tables, ledger, switches, i, p, c, most)
        if share <= _MIN:
            continue
        usd = price(tables, ledger, i, p, c, seconds)
        rank[0, p] = usd
        rank[1, p] = 0.0
        if switches & RANK:
            rank[0, p] = usd / share
            rank[1, p] = 1.0 if most < unmet else 0.0
        heap[count] = p
        count += 1
    # A heap, so that pairs are put in order only as far as the type needs them.
    for place in range(count // 2 - 1, -1, -1):
        sink(rank, heap, place, count)
    while count > 0 and ledger.types[UNMET, i] > _MIN:
        best = heap[0]
        count -= 1
        heap[0] = heap[count]
        sink(rank, heap, 0, count)
        # Asked again: what was placed meanwhile changes the configuration and how much the pair can take.
        c = find_config(tables, ledger, switches, first, i, best)
        if c < 0:
            continue
        seconds = seconds_at(tables, switches, first, i, best, c)
        most = coverage(tables, ledger, switches, i, best, seconds)
        share = filled(tables, ledger, switches, i, best, c, most)
        if share > _MIN and fits(tables, ledger, switches, i, best, c, share):
            configure(tables, ledger, best, c)
            put(tables, ledger, i, best, share, seconds)
