"""AGH: GH in many orders of types, each answer improved by moving types and by emptying pairs.

A move takes a type's share from one pair to another, with the configuration that M1 or M3 give; the best
that saves is made. A pair that a move leaves empty is given up with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from atoll.core.compiling import entry, lean_part
from atoll.core.rng import stream
from atoll.solve.joint.greedy.gh import construct, start, switches_of
from atoll.solve.joint.greedy.greedy_steps import SELECT, find_config, fits, seconds_at
from atoll.solve.joint.joint_problem import Floats, Ints, JointAnswer, JointProblem
from atoll.solve.joint.joint_tables import (
    CACHE,
    DELAY,
    ERROR,
    LEDGER_TYPE,
    LOAD,
    TABLES_TYPE,
    JointTables,
    Ledger,
    answer_of,
    configure,
    copy,
    copy_totals,
    cost,
    ledger_of,
    put,
    tables_of,
    take,
    within,
)

COMPILED_AS = "the choice of models"
PASSES = 3
"""L: passes of moves over all that is placed."""
PATIENCE = 5
"""Orders in a row without a better answer after which no more are tried."""
_GAIN = 1e-9
"""USD that a change must save."""


def agh(
    problem: JointProblem,
    seed: int = 0,
    *,
    select: bool = True,
    rank: bool = True,
    upgrade: bool = True,
    fill: bool = False,
) -> JointAnswer:
    """Return AGH's answer; M1, M2 and M3 can be switched off, and pairs be filled (see `greedy`)."""
    tables = tables_of(problem)
    best = ledger_of(tables)
    improve(tables, best, orders_of(problem, seed), switches_of(select, rank, upgrade, fill))
    return answer_of(problem, best.config, best.share)


def orders_of(problem: JointProblem, seed: int) -> Ints:
    """Return the orders in which types are placed: eight sorted ones, then random ones."""
    types, models, tiers, _ = problem.shape
    keys = (problem.rate, problem.unmet_usd, problem.data_stored_gb, problem.error_limit)
    # Descending arrivals, which is GH's own, come first.
    orders = [np.argsort(sign * key, kind="stable") for key in keys for sign in (-1.0, 1.0)]
    number = types * models * tiers
    # Larger problems take longer per order, so fewer random ones are drawn.
    repeats = 3 if number > 5000 else 5 if number > 2000 else 10 if number > 500 else 20
    draw = stream(seed, "choice", "orders")
    orders += [draw.permutation(types) for _ in range(repeats)]
    return np.array(orders, np.int64)


def improve(tables: JointTables, best: Ledger, orders: Ints, switches: int) -> None:
    """Write the best answer over these orders into `best`."""
    types, pairs, _ = tables.delay.shape
    _agh(
        tuple(tables),
        tuple(best),
        tuple(ledger_of(tables)),
        tuple(ledger_of(tables)),
        tuple(ledger_of(tables)),
        orders,
        switches,
        np.empty((types, pairs), np.int64),
        np.empty(max(types, pairs), np.int64),
        np.empty((2, pairs)),
    )


@lean_part
def moving(
    tables: JointTables,
    ledger: Ledger,
    switches: int,
    first: Ints,
    i: int,
    p: int,
    share: float,
) -> tuple[float, int]:
    """Return what it costs to put a share of a type, just taken off elsewhere, on a pair, and how.

    The cost is inf where it cannot be.
    """
    c = find_config(tables, ledger, switches, first, i, p)
    if c < 0:
        return np.inf, -1
    seconds = seconds_at(tables, switches, first, i, p, c)
    if (
        not within(ledger.types[ERROR, i] + share * tables.error[i, p], tables.error_limit[i])
        or (
            switches & SELECT
            and not within(ledger.types[DELAY, i] + share * seconds, tables.delay_limit[i])
        )
        or not fits(tables, ledger, switches, i, p, c, share)
    ):
        return np.inf, -1
    # What this move adds: delay and data of the share, weights if they are new here, and a change of rent.
    usd = share * (tables.delay_usd[i] * seconds + tables.data_usd[i])
    if ledger.share[i, p] <= 0.0:
        usd += tables.keep_usd[p]
    now = ledger.config[p]
    if now != c:
        usd += tables.rent[p, c]
        # A larger configuration also changes the delay of all that is on the pair already.
        if now >= 0:
            usd -= tables.rent[p, now]
            for other in range(ledger.share.shape[0]):
                longer = tables.delay[other, p, c] - tables.delay[other, p, now]
                usd += tables.delay_usd[other] * ledger.share[other, p] * longer
    return usd, c


@lean_part
def is_empty(ledger: Ledger, p: int) -> bool:
    """Say whether no type is on a pair."""
    for i in range(ledger.share.shape[0]):  # noqa: SIM110  (compiled code has no generators)
        if ledger.share[i, p] > 0.0:
            return False
    return True


@lean_part
def relocate(tables: JointTables, ledger: Ledger, switches: int, first: Ints) -> bool:
    """Make one pass of moves; say whether any was made."""
    types, pairs = first.shape
    moved = False
    for i in range(types):
        for p in range(pairs):
            if ledger.share[i, p] <= 0.0:
                continue
            old = ledger.config[p]
            seconds = seconds_at(tables, switches, first, i, p, old)
            # The share is taken off first, so that the pairs are judged as if it were nowhere.
            share = take(tables, ledger, i, p, seconds)
            usd = share * (tables.delay_usd[i] * seconds + tables.data_usd[i]) + tables.keep_usd[p]
            # A pair that is left empty saves its rent as well.
            if is_empty(ledger, p):
                usd += tables.rent[p, old]
                configure(tables, ledger, p, -1)
            # The move must save a little: without that, rounding could move a type to and fro for ever.
            best, best_c, best_usd = -1, -1, usd - _GAIN
            for other in range(pairs):
                if other == p:
                    continue
                after, c = moving(tables, ledger, switches, first, i, other, share)
                if after < best_usd:
                    best, best_c, best_usd = other, c, after
            if best < 0:
                # Nothing is better: the pair gets back the configuration that it may have lost with its last
                # type.
                configure(tables, ledger, p, old)
                put(tables, ledger, i, p, share, seconds)
                continue
            moved = True
            configure(tables, ledger, best, best_c)
            put(
                tables, ledger, i, best, share, seconds_at(tables, switches, first, i, best, best_c)
            )
    return moved


@lean_part
def move_away(tables: JointTables, ledger: Ledger, switches: int, first: Ints, p: int) -> bool:
    """Move all types of a pair to other active pairs, each to the cheapest; say whether all found one."""
    types, pairs = first.shape
    old = ledger.config[p]
    for i in range(types):
        if ledger.share[i, p] <= 0.0:
            continue
        share = take(tables, ledger, i, p, seconds_at(tables, switches, first, i, p, old))
        best, best_c, best_usd = -1, -1, np.inf
        for other in range(pairs):
            # Only pairs that are rented already: a pair is emptied to save rent, not to move it.
            if other == p or ledger.config[other] < 0:
                continue
            usd, c = moving(tables, ledger, switches, first, i, other, share)
            if usd < best_usd:
                best, best_c, best_usd = other, c, usd
        # Types moved so far stay where they are: the caller restores all of it.
        if best < 0:
            return False
        configure(tables, ledger, best, best_c)
        put(tables, ledger, i, best, share, seconds_at(tables, switches, first, i, best, best_c))
    configure(tables, ledger, p, -1)
    return True


@lean_part
def restore(source: Ledger, target: Ledger, active: Ints, count: int) -> None:
    """Write one answer over another that differs from it only at some pairs."""
    for place in range(count):
        p = active[place]
        target.config[p] = source.config[p]
        target.pairs[LOAD, p] = source.pairs[LOAD, p]
        target.pairs[CACHE, p] = source.pairs[CACHE, p]
        for i in range(source.share.shape[0]):
            target.share[i, p] = source.share[i, p]
    for i in range(source.share.shape[0]):
        for row in range(3):
            target.types[row, i] = source.types[row, i]
    copy_totals(source, target)


@lean_part
def consolidate(
    tables: JointTables, ledger: Ledger, kept: Ledger, switches: int, first: Ints, active: Ints
) -> None:
    """Empty pairs, the least loaded first, where that saves."""
    count = 0
    for p in range(first.shape[1]):
        if ledger.config[p] >= 0:
            place = count
            load = ledger.pairs[LOAD, p] / tables.power[p, ledger.config[p]]
            while place > 0:
                before = active[place - 1]
                if ledger.pairs[LOAD, before] / tables.power[before, ledger.config[before]] <= load:
                    break
                active[place] = before
                place -= 1
            active[place] = p
            count += 1
    for place in range(count):
        p = active[place]
        # Only active pairs can change while one is emptied, so no more than those are copied.
        restore(ledger, kept, active, count)
        before = cost(tables, ledger)
        if (
            not move_away(tables, ledger, switches, first, p)
            or cost(tables, ledger) >= before - _GAIN
        ):
            restore(kept, ledger, active, count)


@entry(
    f"({TABLES_TYPE}, {LEDGER_TYPE}, {LEDGER_TYPE}, {LEDGER_TYPE}, {LEDGER_TYPE}, int64[:, ::1],"
    " int64, int64[:, ::1], int64[::1], float64[:, ::1])"
)
def _agh(
    tables: tuple[Any, ...],
    best: tuple[Any, ...],
    covered: tuple[Any, ...],
    ledger: tuple[Any, ...],
    kept: tuple[Any, ...],
    orders: Ints,
    switches: int,
    first: Ints,
    listed: Ints,
    rank: Floats,
) -> None:
    search(
        JointTables(*tables), Ledger(*best), Ledger(*covered), Ledger(*ledger), Ledger(*kept), orders,
        switches, first, listed, rank,
    )  # fmt: skip


@lean_part
def search(
    tables: JointTables,
    best: Ledger,
    covered: Ledger,
    ledger: Ledger,
    kept: Ledger,
    orders: Ints,
    switches: int,
    first: Ints,
    listed: Ints,
    rank: Floats,
) -> None:
    """Write the best answer over all orders into `best`; the rest is scratch."""
    # The first phase does not depend on the order: it is done once and copied.
    start(tables, covered, switches, first, listed)
    least = np.inf
    idle = 0
    for number in range(orders.shape[0]):
        copy(covered, ledger)
        construct(tables, ledger, switches, orders[number], first, rank, listed)
        for _ in range(PASSES):
            if not relocate(tables, ledger, switches, first):
                break
        consolidate(tables, ledger, kept, switches, first, listed)
        usd = cost(tables, ledger)
        if usd < least - _GAIN:
            least = usd
            copy(ledger, best)
            idle = 0
        else:
            idle += 1
            if idle == PATIENCE:
                return
