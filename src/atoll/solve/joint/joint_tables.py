"""Inputs of the compiled heuristics for the joint problem: its tables by pair, and an answer being built.

A *pair* p = j K + k is a model on a tier. All money is USD over the horizon; loads are for a whole type.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.core.compiling import lean_part
from atoll.solve.joint.joint_problem import Bools, Floats, Ints, JointAnswer, JointProblem

# Slots of `JointTables.limits`.
BUDGET, STORAGE = 0, 1
# Rows of `Ledger.pairs`: the load that is on a pair, and the KV cache.
LOAD, CACHE = 0, 1
# Rows of `Ledger.types`: mean delay and mean error so far, and the share that is not served.
DELAY, ERROR, UNMET = 0, 1, 2
# Slots of `Ledger.totals`: money against the budget, GB in storage.
MONEY, STORED = 0, 1

SLACK = 1e-9
"""Tolerance of rounding on a limit, as a share of it."""


class JointTables(NamedTuple):
    """An instance by pair; what does not change."""

    limits: Floats
    """Budget, USD; storage, GB."""
    delay: Floats
    """delay[i, p, c], seconds."""
    error: Floats
    """error[i, p]."""
    load: Floats
    """load[i, p], TFLOP/h."""
    cache: Floats
    """cache[i, p], GB of KV cache over all GPUs."""
    power: Floats
    """power[p, c], TFLOP/h."""
    room: Floats
    """room[p, c], GB left beside weights over all GPUs; below 0 where the weights do not fit."""
    rent: Floats
    """rent[p, c], USD; inf where a tier has no such configuration."""
    keep_usd: Floats
    """keep_usd[p]: the weights of a pair in storage, for each type placed there."""
    keep_gb: Floats
    """keep_gb[p]."""
    data_usd: Floats
    """data_usd[i]."""
    data_gb: Floats
    """data_gb[i]."""
    delay_usd: Floats
    """delay_usd[i], USD per second."""
    unmet_usd: Floats
    """unmet_usd[i]."""
    max_unmet: Floats
    """max_unmet[i]."""
    delay_limit: Floats
    """delay_limit[i], seconds."""
    error_limit: Floats
    """error_limit[i]."""
    gpus: Ints
    """gpus[c]."""
    lot: Ints
    """lot[p], which stock a pair's GPUs are of."""
    stock: Floats
    """stock[l], GPUs; inf where there is no limit."""


class Ledger(NamedTuple):
    """An answer being built, and the sums that its constraints are about."""

    config: Ints
    """config[p], -1 where a pair is not active."""
    share: Floats
    """share[i, p]."""
    pairs: Floats
    """pairs[LOAD or CACHE, p]."""
    types: Floats
    """types[DELAY, ERROR or UNMET, i]."""
    totals: Floats
    """MONEY, STORED."""
    used: Floats
    """used[l], GPUs of each stock."""


TABLES_TYPE = (
    "Tuple((float64[::1], float64[:, :, ::1], float64[:, ::1], float64[:, ::1], float64[:, ::1],"
    " float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[::1], float64[::1], float64[::1],"
    " float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], int64[::1],"
    " int64[::1], float64[::1]))"
)
LEDGER_TYPE = (
    "Tuple((int64[::1], float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[::1],"
    " float64[::1]))"
)
"""Types of the entries' arguments: `JointTables` and `Ledger` as plain tuples, which numba can name."""


def tables_of(problem: JointProblem) -> JointTables:
    """Return the tables of a problem."""
    types, models, tiers, configs = problem.shape
    pairs = models * tiers
    gpus = problem.gpus.astype(np.int64)
    tier = np.tile(np.arange(tiers), models)
    weights = np.repeat(problem.weights_gb, tiers)
    memory = problem.memory_gb[tier][:, None] * gpus - weights[:, None]
    # The division of (5f) and this difference may round differently: what just fits, fits.
    memory = np.where(np.abs(memory) <= SLACK * weights[:, None], 0.0, memory)
    rent = problem.horizon_h * problem.gpu_usd[tier][:, None] * gpus
    storing = problem.horizon_h * problem.storage_usd
    table = np.ascontiguousarray
    return JointTables(
        limits=np.array([problem.budget, problem.storage_gb], np.float64),
        delay=table(problem.delay.reshape(types, pairs, configs), np.float64),
        error=table(problem.error.reshape(types, pairs), np.float64),
        load=table(problem.load_tflop.reshape(types, pairs), np.float64),
        cache=table(problem.kv_load_gb.reshape(types, pairs), np.float64),
        power=table(problem.capacity_tflop[tier][:, None] * gpus, np.float64),
        room=table(memory, np.float64),
        rent=table(np.where(problem.allowed[tier], rent, np.inf), np.float64),
        keep_usd=table(storing * weights, np.float64),
        keep_gb=table(weights, np.float64),
        data_usd=table(storing * problem.data_stored_gb, np.float64),
        data_gb=table(problem.data_stored_gb, np.float64),
        delay_usd=table(problem.delay_usd, np.float64),
        unmet_usd=table(problem.unmet_usd, np.float64),
        max_unmet=table(problem.max_unmet, np.float64),
        delay_limit=table(problem.delay_limit, np.float64),
        error_limit=table(problem.error_limit, np.float64),
        gpus=table(gpus),
        lot=table(np.zeros(pairs) if problem.lot is None else problem.lot[tier], np.int64),
        stock=table([np.inf] if problem.stock is None else problem.stock, np.float64),
    )


def ledger_of(tables: JointTables) -> Ledger:
    """Return an answer in which nothing is served."""
    types, pairs, _ = tables.delay.shape
    sums = np.zeros((3, types))
    sums[UNMET] = 1.0
    return Ledger(
        np.full(pairs, -1, np.int64), np.zeros((types, pairs)), np.zeros((2, pairs)), sums,
        np.zeros(2), np.zeros(len(tables.stock)),
    )  # fmt: skip


def answer_of(problem: JointProblem, config: Ints, share: Floats) -> JointAnswer:
    """Return the answer that configurations and shares by pair are."""
    types, models, tiers, _ = problem.shape
    routed = share.reshape(types, models, tiers).copy()
    placed: Bools = routed > 0.0
    return JointAnswer(
        config=config.reshape(models, tiers).copy(),
        routed=routed,
        placed=placed,
        unmet=np.maximum(0.0, 1.0 - routed.sum(axis=(1, 2))),
    )


@lean_part
def within(value: float, limit: float) -> bool:
    """Say whether a sum keeps a limit, but for rounding."""
    return value <= limit + SLACK * abs(limit)


@lean_part
def clear(ledger: Ledger) -> None:
    """Take everything out of an answer."""
    config, share, pairs, types = ledger.config, ledger.share, ledger.pairs, ledger.types
    for i in range(share.shape[0]):
        for p in range(share.shape[1]):
            share[i, p] = 0.0
        types[DELAY, i] = 0.0
        types[ERROR, i] = 0.0
        types[UNMET, i] = 1.0
    for p in range(config.shape[0]):
        config[p] = -1
        pairs[LOAD, p] = 0.0
        pairs[CACHE, p] = 0.0
    ledger.totals[MONEY] = 0.0
    ledger.totals[STORED] = 0.0
    for lot in range(ledger.used.shape[0]):
        ledger.used[lot] = 0.0


@lean_part
def copy(source: Ledger, target: Ledger) -> None:
    """Write one answer over another."""
    for p in range(source.config.shape[0]):
        target.config[p] = source.config[p]
        target.pairs[LOAD, p] = source.pairs[LOAD, p]
        target.pairs[CACHE, p] = source.pairs[CACHE, p]
    for i in range(source.share.shape[0]):
        for p in range(source.share.shape[1]):
            target.share[i, p] = source.share[i, p]
        for row in range(3):
            target.types[row, i] = source.types[row, i]
    copy_totals(source, target)


@lean_part
def copy_totals(source: Ledger, target: Ledger) -> None:
    """Write the sums over all types and pairs of one answer over those of another."""
    target.totals[MONEY] = source.totals[MONEY]
    target.totals[STORED] = source.totals[STORED]
    for lot in range(source.used.shape[0]):
        target.used[lot] = source.used[lot]


@lean_part
def put(tables: JointTables, ledger: Ledger, i: int, p: int, share: float, seconds: float) -> None:
    """Route a share of a type to an active pair, `seconds` being its delay there."""
    if ledger.share[i, p] <= 0.0:
        ledger.totals[MONEY] += tables.keep_usd[p]
        ledger.totals[STORED] += tables.keep_gb[p]
    ledger.share[i, p] += share
    ledger.pairs[LOAD, p] += share * tables.load[i, p]
    ledger.pairs[CACHE, p] += share * tables.cache[i, p]
    ledger.types[DELAY, i] += share * seconds
    ledger.types[ERROR, i] += share * tables.error[i, p]
    ledger.types[UNMET, i] -= share
    if ledger.types[UNMET, i] < 1e-12:
        ledger.types[UNMET, i] = 0.0
    ledger.totals[MONEY] += share * tables.data_usd[i]
    ledger.totals[STORED] += share * tables.data_gb[i]


@lean_part
def take(tables: JointTables, ledger: Ledger, i: int, p: int, seconds: float) -> float:
    """Take a type off a pair and return the share that was there."""
    share = ledger.share[i, p]
    ledger.share[i, p] = 0.0
    ledger.pairs[LOAD, p] -= share * tables.load[i, p]
    ledger.pairs[CACHE, p] -= share * tables.cache[i, p]
    ledger.types[DELAY, i] -= share * seconds
    ledger.types[ERROR, i] -= share * tables.error[i, p]
    ledger.types[UNMET, i] += share
    ledger.totals[MONEY] -= share * tables.data_usd[i] + tables.keep_usd[p]
    ledger.totals[STORED] -= share * tables.data_gb[i] + tables.keep_gb[p]
    return float(share)


@lean_part
def configure(tables: JointTables, ledger: Ledger, p: int, c: int) -> None:
    """Give a pair another configuration (-1: none) and its types the delays of it."""
    old = ledger.config[p]
    if old == c:
        return
    if old >= 0:
        ledger.totals[MONEY] -= tables.rent[p, old]
        ledger.used[tables.lot[p]] -= tables.gpus[old]
    if c >= 0:
        ledger.totals[MONEY] += tables.rent[p, c]
        ledger.used[tables.lot[p]] += tables.gpus[c]
    if old >= 0 and c >= 0:
        for i in range(ledger.share.shape[0]):
            if ledger.share[i, p] > 0.0:
                ledger.types[DELAY, i] += ledger.share[i, p] * (
                    tables.delay[i, p, c] - tables.delay[i, p, old]
                )
    ledger.config[p] = c


@lean_part
def in_stock(tables: JointTables, ledger: Ledger, p: int, c: int) -> bool:
    """Say whether there are GPUs enough to give a pair this configuration."""
    now = ledger.config[p]
    more = tables.gpus[c] - (tables.gpus[now] if now >= 0 else 0)
    return bool(ledger.used[tables.lot[p]] + more <= tables.stock[tables.lot[p]])


@lean_part
def cost(tables: JointTables, ledger: Ledger) -> float:
    """Return the cost of an answer (5a)."""
    total = ledger.totals[MONEY]
    for i in range(ledger.share.shape[0]):
        total += tables.delay_usd[i] * ledger.types[DELAY, i]
        total += tables.unmet_usd[i] * ledger.types[UNMET, i]
    return float(total)
