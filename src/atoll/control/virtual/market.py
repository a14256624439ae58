"""Prices and numbers of machines over time: from a file, or drawn.

A file is a CSV of `time,region,node_type,market,price,available`: seconds from the start, an offer of the
fleet, dollars per hour and machines, each row from its time on. Before an offer's first row, and for offers
without any, the fleet's own price and number hold.

Drawn markets (`draw_market`) move spot offers only. The logarithm of a price over its mean reverts to 0:

    x(t + d) = x(t) e^(-d/tau) + s sqrt(1 - e^(-2d/tau)) z,    z standard normal

with standard deviation s and time constant tau, seen every `step_s`; a price is never above that of the same
machine on demand. Independently an offer has machines for an exponential time of mean `up_s`, then none for
one of mean `down_s`.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import InputError
from atoll.core.files import read_text_limited
from atoll.core.rng import stream
from atoll.plan.plan import OfferKey
from atoll.plan.problem import Offer

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

COLUMNS = ("time", "region", "node_type", "market", "price", "available")
_MAX_ROWS = 2_000_000


@dataclass(frozen=True)
class MarketStatistics:
    """How a drawn market moves; the defaults are livelier than a year of public spot prices was.

    There, over 244 zones and GPU machines, the logarithm had a standard deviation of 0.24 (median), but took
    weeks to move by as much; machines came and went within hours, gone for one to two.
    """

    deviation: float = 0.2
    reverts_s: float = 48 * 3600.0
    step_s: float = 3600.0
    up_s: float = 24 * 3600.0
    down_s: float = 3600.0


@dataclass(frozen=True)
class MarketSeries:
    """Offers over time: `usd[i, k]` and `available[i, k]` of offer k from `times_s[i]` on, the first 0."""

    offers: tuple[Offer, ...]
    times_s: tuple[float, ...]
    usd: Floats
    available: Ints
    _made: dict[int, tuple[Offer, ...]] = field(default_factory=dict, repr=False, compare=False)

    def index(self, time_s: float) -> int:
        """Return which row holds at a time since the start."""
        return max(0, bisect_right(self.times_s, time_s) - 1)

    def next_change_s(self, time_s: float) -> float:
        """Return when the next row begins, inf where none does."""
        at = bisect_right(self.times_s, time_s)
        return self.times_s[at] if at < len(self.times_s) else math.inf

    def at(self, time_s: float) -> tuple[Offer, ...]:
        """Return the offers at a time since the start."""
        row = self.index(time_s)
        if row not in self._made:
            self._made[row] = tuple(
                offer
                if offer.usd_per_hour == usd and offer.available == number
                else offer.model_copy(update={"usd_per_hour": usd, "available": number})
                for offer, usd, number in zip(
                    self.offers, self.usd[row].tolist(), self.available[row].tolist(), strict=True
                )
            )
        return self._made[row]

    def over(self, start_s: float, end_s: float) -> tuple[Offer, ...]:
        """Return the offers of a while: mean prices, and the most machines there were at any time of it."""
        first, last = self.index(start_s), self.index(end_s - 1e-9)
        edges = [start_s, *self.times_s[first + 1 : last + 1], end_s]
        spans = np.diff(edges)
        usd = (spans[:, None] * self.usd[first : last + 1]).sum(axis=0) / spans.sum()
        most = self.available[first : last + 1].max(axis=0)
        return tuple(
            offer.model_copy(update={"usd_per_hour": price, "available": number})
            for offer, price, number in zip(self.offers, usd.tolist(), most.tolist(), strict=True)
        )


@dataclass(frozen=True, slots=True)
class RegionOutage:
    """A region whose machines all die `begin_s` after the start; nothing is on offer there until `end_s`."""

    region: str
    begin_s: float
    end_s: float


def move_market(
    market: MarketSeries, begin_s: float, end_s: float, move: Callable[[Offer], Offer]
) -> MarketSeries:
    """Return a market whose offers are others from one time after the start to another."""
    edges = sorted({*market.times_s, begin_s, end_s})
    rows = [market.index(time_s) for time_s in edges]
    usd, available = market.usd[rows].copy(), market.available[rows].copy()
    for row, time_s in enumerate(edges):
        if begin_s <= time_s < end_s:
            moved = [move(offer) for offer in market.at(time_s)]
            usd[row] = [offer.usd_per_hour for offer in moved]
            available[row] = [offer.available for offer in moved]
    return MarketSeries(market.offers, tuple(edges), usd, available)


def lose_region(market: MarketSeries, outage: RegionOutage) -> MarketSeries:
    """Return a market that has nothing in a region while it is out."""
    return move_market(
        market,
        outage.begin_s,
        outage.end_s,
        lambda offer: (
            offer.model_copy(update={"available": 0}) if offer.region == outage.region else offer
        ),
    )


def hold_market(offers: Sequence[Offer]) -> MarketSeries:
    """Return a market that never moves."""
    given = tuple(sorted(offers, key=lambda offer: offer.key))
    usd = np.array([[offer.usd_per_hour for offer in given]])
    return MarketSeries(given, (0.0,), usd, np.array([[offer.available for offer in given]]))


def draw_market(
    offers: Sequence[Offer], days: float, seed: int, statistics: MarketStatistics | None = None
) -> MarketSeries:
    """Return a drawn market; each offer has chance of its own, whatever others there are."""
    law = statistics or MarketStatistics()
    given = tuple(sorted(offers, key=lambda offer: offer.key))
    end_s = days * 86_400.0
    steps = np.arange(0.0, end_s + law.step_s, law.step_s)
    asked = {offer.key: offer.usd_per_hour for offer in given}
    prices: list[Floats] = []
    outages: list[list[tuple[float, float]]] = []
    for offer in given:
        luck = stream(seed, "market", *offer.key)
        if offer.market != "spot":
            prices.append(np.full(len(steps), offer.usd_per_hour))
            outages.append([])
            continue
        cap = asked.get((offer.region, offer.node_type, "on-demand"), math.inf)
        prices.append(np.minimum(cap, offer.usd_per_hour * _draw_factor(luck, len(steps), law)))
        outages.append(_draw_outages(luck, end_s, law))
    edges = {float(x) for x in steps} | {x for some in outages for pair in some for x in pair}
    times = tuple(sorted(x for x in edges if x <= end_s))
    row = np.searchsorted(steps, np.array(times), side="right") - 1
    usd = np.stack([each[row] for each in prices], axis=1)
    available = np.tile(np.array([offer.available for offer in given], np.int64), (len(times), 1))
    for k, some in enumerate(outages):
        for begin, end in some:
            available[bisect_right(times, begin) - 1 : bisect_right(times, end) - 1, k] = 0
    return MarketSeries(given, times, usd, available)


def _draw_factor(luck: np.random.Generator, count: int, law: MarketStatistics) -> Floats:
    """Return factors of mean 1 at every step, from the law that they settle to."""
    stay = math.exp(-law.step_s / law.reverts_s)
    shocks = luck.standard_normal(count) * law.deviation
    shocks[1:] *= math.sqrt(1.0 - stay * stay)
    x = np.empty(count)
    level = 0.0
    for at, shock in enumerate(shocks.tolist()):
        level = stay * level + shock if at else shock
        x[at] = level
    return np.asarray(np.exp(x - 0.5 * law.deviation**2))


def _draw_outages(
    luck: np.random.Generator, end_s: float, law: MarketStatistics
) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    time_s = 0.0
    while True:
        time_s += float(luck.exponential(law.up_s))
        if time_s >= end_s:
            return found
        gone_s = float(luck.exponential(law.down_s))
        found.append((time_s, time_s + gone_s))
        time_s += gone_s


def read_market(path: Path, offers: Sequence[Offer]) -> MarketSeries:
    """Return the market of a CSV file; see the top of this module for its columns."""
    given = tuple(sorted(offers, key=lambda offer: offer.key))
    place = {offer.key: k for k, offer in enumerate(given)}
    rows: list[tuple[float, int, float, int]] = []
    lines = csv.reader(read_text_limited(path).splitlines())
    for number, cells in enumerate(lines, 1):
        if number == 1:
            if tuple(cell.strip() for cell in cells) != COLUMNS:
                raise InputError(f"the columns are not {','.join(COLUMNS)}", path=path, line=number)
            continue
        if cells:
            rows.append(_read_row(cells, place, path, number))
        if len(rows) > _MAX_ROWS:
            raise InputError(f"more than {_MAX_ROWS:,} prices", path=path, line=number)
    if not rows:
        raise InputError("there are no prices in it", path=path)
    times = sorted({0.0, *(time_s for time_s, _, _, _ in rows)})
    usd = np.tile([offer.usd_per_hour for offer in given], (len(times), 1))
    available = np.tile(np.array([offer.available for offer in given], np.int64), (len(times), 1))
    at = {time_s: i for i, time_s in enumerate(times)}
    for time_s, k, price, count in sorted(rows):
        usd[at[time_s] :, k] = price
        available[at[time_s] :, k] = count
    return MarketSeries(given, tuple(times), usd, available)


def _read_row(
    cells: Sequence[str], place: dict[OfferKey, int], path: Path, line: int
) -> tuple[float, int, float, int]:
    try:
        text, region, node_type, market, usd, count = (cell.strip() for cell in cells)
        time_s, price, number = float(text), float(usd), int(count)
    except ValueError:
        hint = "2 numbers and 3 names between the time and the number of machines"
        raise InputError("not a row of prices", path=path, line=line, hint=hint) from None
    key = next((known for known in place if known == (region, node_type, market)), None)
    if key is None:
        hint = "offers are those of the fleet's pool"
        text = f"the fleet has no offer of {region} {node_type} {market}"
        raise InputError(text, path=path, line=line, hint=hint)
    if not (0.0 <= time_s < math.inf and 0.0 <= price < math.inf and number >= 0):
        raise InputError("time, price and number are 0 or more", path=path, line=line)
    return time_s, place[key], price, number
