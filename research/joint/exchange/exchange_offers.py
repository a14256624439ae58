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
from atoll.solve.joint.joint_problem import Floats, Ints
from atoll.solve.joint.joint_tables import BUDGET, JointTables

MAX = 8
"""Pairs that may be active at once."""
_ENDLESS = 1e9


class Offers(NamedTuple):
    """All offers worth a look; rows by offer, the first `number[0]` of them."""

    number: Ints
    pair: Ints
    model: Ints
    config: Ints
    ample: Ints
    """ample[f]: 1 where all types together fit."""
    useless: Ints
    """Scratch."""
    rent: Floats
    keep: Floats
    """USD for the weights, for each type placed here."""
    errors: Floats
    """The sum of `wrong` over types: who errs less in each errs less in all."""
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
    "Tuple((int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1],"
    " float64[::1], float64[::1], float64[::1], float64[:, ::1],"
    " float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[:, ::1],"
    " float64[::1]))"
)


def offers_of(tables: JointTables) -> Offers:
    """Return memory for the offers of an instance."""
    types, pairs, configs = tables.delay.shape
    most = pairs * configs
    whole = [np.empty(most, np.int64) for _ in range(5)]
    one = [np.empty(most) for _ in range(3)]
    rows = [np.empty((most, types)) for _ in range(6)]
    return Offers(  # type: ignore[call-arg]
        np.zeros(1, np.int64), *whole, *one, *rows, np.empty(types),
    )  # fmt: skip


@lean_part
def ratio(value: float, limit: float) -> float:
    """Return a value as a share of its limit, at most `_ENDLESS`: differences of shares are divided by."""
    if value <= 0.0:
        return 0.0
    return value / limit if value < _ENDLESS * limit else _ENDLESS


@lean_part
def beats(offers: Offers, g: int, f: int) -> bool:
    """Say whether an offer does all that another does for no more money, if neither fills up.

    Money that the other saves by being faster counts; delays within the limit are as good as each other.
    """
    if (
        offers.rent[g] > offers.rent[f]
        or offers.keep[g] > offers.keep[f]
        or offers.errors[g] > offers.errors[f]
    ):
        return False
    # What types pay more at the other offer must not exceed the rent that it saves.
    usd = offers.rent[g]
    for i in range(offers.floor.shape[0]):
        if offers.wrong[g, i] > offers.wrong[f, i] or (
            offers.slow[g, i] > 1.0 and offers.slow[g, i] > offers.slow[f, i]
        ):
            return False
        usd += max(0.0, offers.usd[g, i] - offers.usd[f, i])
        if usd > offers.rent[f]:
            return False
    # Of equal offers the first stays.
    return usd < offers.rent[f] or g < f


@lean_part
def is_as_large(offers: Offers, g: int, f: int) -> bool:
    """Say whether an offer has room for as much as another."""
    for i in range(offers.floor.shape[0]):
        if offers.load[g, i] > offers.load[f, i] or offers.cache[g, i] > offers.cache[f, i]:
            return False
    return True


@lean_part
def thin(offers: Offers, first: int, last: int) -> int:
    """Keep those of a range of offers that others of it do not make useless; return the range's new end.

    An offer is useless beside a better one that has room for all types, or beside two better ones of other
    pairs that have as much room as it has: one of them may be full.
    """
    for f in range(first, last):
        offers.useless[f] = 0
    for f in range(first, last):
        better = 0
        for g in range(first, last):
            # Whatever beats a useless one beats those that it beats.
            if offers.useless[g] == 0 and g != f and beats(offers, g, f):
                if offers.ample[g]:
                    better = 2
                elif is_as_large(offers, g, f):
                    better += 2 if offers.pair[g] == offers.pair[f] else 1
                if better >= 2:
                    break
        offers.useless[f] = 1 if better >= 2 else 0
    kept = first
    for f in range(first, last):
        if not offers.useless[f]:
            if kept < f:
                move(offers, f, kept)
            kept += 1
    return kept


@lean_part
def move(offers: Offers, f: int, to: int) -> None:
    """Write one offer over another."""
    offers.pair[to] = offers.pair[f]
    offers.model[to] = offers.model[f]
    offers.config[to] = offers.config[f]
    offers.ample[to] = offers.ample[f]
    offers.rent[to] = offers.rent[f]
    offers.keep[to] = offers.keep[f]
    offers.errors[to] = offers.errors[f]
    for i in range(offers.floor.shape[0]):
        offers.usd[to, i] = offers.usd[f, i]
        offers.slow[to, i] = offers.slow[f, i]
        offers.wrong[to, i] = offers.wrong[f, i]
        offers.load[to, i] = offers.load[f, i]
        offers.cache[to, i] = offers.cache[f, i]
        offers.alone[to, i] = offers.alone[f, i]


@lean_part
def list_offers(tables: JointTables, offers: Offers, tiers: int, max_usd: float) -> None:
    """Write the offers that can be part of an answer cheaper than `max_usd`."""
    types, pairs, configs = tables.delay.shape
    floor = offers.floor
    for i in range(types):
        floor[i] = tables.unmet_usd[i]
    count, of_model = 0, 0
    for p in range(pairs):
        of_pair = count
        for c in range(configs):
            if (
                tables.room[p, c] >= 0.0
                and tables.rent[p, c] <= min(tables.limits[BUDGET], max_usd)
                and not is_slower(tables, p, c)
            ):
                write_offer(tables, offers, count, p, c)
                offers.model[count] = p // tiers
                count += 1
        count = thin(offers, of_pair, count)
        if p % tiers == tiers - 1:
            # Error and weights are those of the model, but for the precision: offers of one are alike.
            count = thin(offers, of_model, count)
            of_model = count
    offers.number[0] = count
    least = 0.0
    for i in range(types):
        least += floor[i]
    keep_cheap(offers, max_usd - least)


@lean_part
def is_slower(tables: JointTables, p: int, c: int) -> bool:
    """Say whether a configuration of as many GPUs is as fast for every type."""
    types, _, configs = tables.delay.shape
    for d in range(configs):
        if d == c or tables.gpus[d] != tables.gpus[c] or not tables.rent[p, d] < np.inf:
            continue
        slower, equal = True, True
        for i in range(types):
            if tables.delay[i, p, d] > tables.delay[i, p, c]:
                slower = False
                break
            equal = equal and tables.delay[i, p, d] == tables.delay[i, p, c]
        if slower and (not equal or d < c):
            return True
    return False


@lean_part
def keep_cheap(offers: Offers, max_usd: float) -> None:
    """Keep offers whose rent is less than that."""
    kept = 0
    for f in range(offers.number[0]):
        if offers.rent[f] < max_usd:
            if kept < f:
                move(offers, f, kept)
            kept += 1
    offers.number[0] = kept


@lean_part
def write_offer(tables: JointTables, offers: Offers, f: int, p: int, c: int) -> None:
    """Write one offer."""
    offers.pair[f] = p
    offers.config[f] = c
    offers.rent[f] = tables.rent[p, c]
    keep = tables.keep_usd[p]
    offers.keep[f] = keep
    load, cache, errors = 0.0, 0.0, 0.0
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
        errors += wrong
        load += offers.load[f, i]
        cache += offers.cache[f, i]
        offers.alone[f, i] = keep + most * usd + (1.0 - most) * tables.unmet_usd[i]
        # The floor is optimistic, as if all of a type could go here: bounds rely on it.
        offers.floor[i] = min(offers.floor[i], keep + usd)
    offers.errors[f] = errors
    offers.ample[f] = 1 if load <= 1.0 and cache <= 1.0 else 0
