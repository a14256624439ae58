"""Offers: pairs in a configuration, with all that routing types to them needs, in shares of limits (numba).

An offer f is a pair (a model on a tier) in one configuration. What it would do to a type is kept in one row,
so that looking at an offer reads memory in order: `slow` and `wrong` are delay and error over the type's
limits, `load` and `cache` what a whole type takes of the offer's FLOP/s and memory. Storage is the one
resource beside these: what is stored is paid by the GB, so that capacity and budget both limit GB.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.core.compiling import lean_part
from atoll.solve.choice.problem import Floats, Ints
from atoll.solve.choice.tables import BUDGET, ChoiceTables

MOST = 24
"""Pairs that may be active at once."""
_ENDLESS = 1e9


class Offers(NamedTuple):
    """All offers worth a look; rows by offer, the first `count[0]` of them."""

    count: Ints
    pair: Ints
    config: Ints
    rent: Floats
    keep: Floats
    """USD for the weights, for each type placed here."""
    usd: Floats
    """usd[f, i]: data and delay of all of a type."""
    slow: Floats
    """slow[f, i]: delay over the type's limit."""
    wrong: Floats
    """wrong[f, i]: error over the type's limit."""
    load: Floats
    """load[f, i]: what all of a type takes of the FLOP/s."""
    cache: Floats
    """cache[f, i]: what all of a type takes of the memory left beside weights."""
    alone: Floats
    """alone[f, i]: the type's cost if it goes here as far as delay and error let it."""
    floor: Floats
    """floor[i]: less than this no type costs, whatever the offers."""


OFFERS_TYPE = (
    "Tuple((int64[::1], int64[::1], int64[::1], float64[::1], float64[::1], float64[:, ::1],"
    " float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[:, ::1],"
    " float64[::1]))"
)


def offers_of(tables: ChoiceTables) -> Offers:
    """Return memory for the offers of an instance."""
    types, pairs, configs = tables.delay.shape
    most = pairs * configs
    rows = [np.empty((most, types)) for _ in range(6)]
    return Offers(
        np.zeros(1, np.int64), np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most),
        np.empty(most), *rows, np.empty(types),
    )  # fmt: skip


@lean_part
def ratio(value: float, limit: float) -> float:
    """Return a value as a share of its limit, at most `_ENDLESS`: differences of shares are divided by."""
    if value <= 0.0:
        return 0.0
    return value / limit if value < _ENDLESS * limit else _ENDLESS


@lean_part
def is_matched(tables: ChoiceTables, p: int, c: int) -> bool:
    """Say whether a pair has a configuration of as many GPUs that is as fast for every type."""
    types, _, configs = tables.delay.shape
    for other in range(configs):
        if other == c or tables.gpus[other] != tables.gpus[c] or tables.rent[p, other] == np.inf:
            continue
        faster, slower = False, False
        for i in range(types):
            faster = faster or tables.delay[i, p, other] < tables.delay[i, p, c]
            slower = slower or tables.delay[i, p, other] > tables.delay[i, p, c]
        if not slower and (faster or other < c):
            return True
    return False


@lean_part
def list_offers(tables: ChoiceTables, offers: Offers, most_usd: float) -> None:
    """Write the offers that can be part of an answer cheaper than `most_usd`."""
    types, pairs, configs = tables.delay.shape
    floor = offers.floor
    for i in range(types):
        floor[i] = tables.unmet_usd[i]
    count = 0
    for p in range(pairs):
        for c in range(configs):
            if (
                tables.room[p, c] < 0.0
                or tables.rent[p, c] > min(tables.limits[BUDGET], most_usd)
                or is_matched(tables, p, c)
            ):
                continue
            write_offer(tables, offers, count, p, c)
            count += 1
    least = 0.0
    for i in range(types):
        least += floor[i]
    # An offer that with its rent alone makes an answer dearer than one that is known is of no use.
    kept = 0
    for f in range(count):
        if offers.rent[f] + least < most_usd:
            if kept < f:
                write_offer(tables, offers, kept, offers.pair[f], offers.config[f])
            kept += 1
    offers.count[0] = kept


@lean_part
def write_offer(tables: ChoiceTables, offers: Offers, f: int, p: int, c: int) -> None:
    """Write one offer."""
    offers.pair[f] = p
    offers.config[f] = c
    offers.rent[f] = tables.rent[p, c]
    keep = tables.keep_usd[p]
    offers.keep[f] = keep
    for i in range(tables.delay.shape[0]):
        seconds = tables.delay[i, p, c]
        usd = tables.data_usd[i] + tables.delay_usd[i] * seconds
        slow = ratio(seconds, tables.delay_limit[i])
        wrong = ratio(tables.error[i, p], tables.error_limit[i])
        most = 1.0 / max(1.0, slow, wrong)
        offers.usd[f, i] = usd
        offers.slow[f, i] = slow
        offers.wrong[f, i] = wrong
        offers.load[f, i] = ratio(tables.load[i, p], tables.power[p, c])
        offers.cache[f, i] = ratio(tables.cache[i, p], tables.room[p, c])
        offers.alone[f, i] = keep + most * usd + (1.0 - most) * tables.unmet_usd[i]
        offers.floor[i] = min(offers.floor[i], keep + usd)
