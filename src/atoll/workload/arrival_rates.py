"""How the rate of arrivals moves: curves over a day or a week, and chance on any time scale.

The relative rate at time t is m(t) = curve(t) * x_1(t) * x_2(t) * ..., with mean 1. `curve` repeats; each
layer x_i holds a value drawn from a Gamma law of mean 1 and CV c_i for an exponential time of mean tau_i,
then draws again, so that its autocovariance is r_i(u) = c_i^2 exp(-u / tau_i). A layer may also switch
the rate off and on.

With arrivals at rate lambda and independent gaps of CV c under that clock, counts in windows of w
seconds have a variance over mean (Fano factor) of about

    F(w) = c^2 + lambda * w * V(w),   V(w) = 2 / w^2 * integral_0^w (w - u) R(u) du,
    R(u) = prod_i (1 + r_i(u)) - 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from atoll.core.errors import InputError
from atoll.core.rng import stream
from atoll.workload.arrivals import MAX_CV, Renewal
from atoll.workload.requests import CHUNK, Floats

DAY_S = 86_400.0
MAX_RATE = 1e7
_CELLS_PER_POINT = 12
_HOLDS = 1024
_PIECES = 4096
"""Pieces of constant rate that a clock makes at a time."""


@dataclass(frozen=True)
class RateCurve:
    """A relative rate that repeats every `period_s` seconds.

    `levels` are spread evenly over the period, each at the middle of its share of it, and joined by
    straight lines. They are scaled to mean 1.
    """

    levels: tuple[float, ...]
    period_s: float = DAY_S

    def __post_init__(self) -> None:
        if (
            not self.levels
            or not all(0.0 <= x < 1e12 for x in self.levels)
            or sum(self.levels) <= 0
        ):
            raise InputError("the levels of a rate curve are 0 or more, not all 0", field="curve")
        if not 1.0 <= self.period_s <= 1e9:
            raise InputError(f"{self.period_s!r} is not a period of 1s or more", field="curve")

    @cached_property
    def cells(self) -> Floats:
        """The relative rate in each of many equal cells of the period; mean 1."""
        count = len(self.levels)
        at = (np.arange(count * _CELLS_PER_POINT) + 0.5) / _CELLS_PER_POINT
        # The curve repeats: each end has the other one as its neighbour.
        middles = np.arange(-1, count + 1) + 0.5
        around = np.array([self.levels[-1], *self.levels, self.levels[0]])
        cells: Floats = np.interp(at, middles, around)
        cells /= cells.mean()
        return cells

    @property
    def cell_s(self) -> float:
        """Seconds of one cell."""
        return self.period_s / len(self.cells)

    def at(self, seconds: Floats) -> Floats:
        """Return the relative rate at these times."""
        index = np.floor(seconds / self.cell_s).astype(np.int64) % len(self.cells)
        return self.cells[index]


@dataclass(frozen=True, slots=True)
class Layer:
    """Chance on one time scale: a factor of mean 1 and this CV, drawn anew every `hold_s` on average."""

    hold_s: float
    cv: float

    def __post_init__(self) -> None:
        _check_time(self.hold_s, "hold_s")
        if not 0.0 < self.cv <= MAX_CV:
            raise InputError(f"{self.cv!r} is not a CV above 0, up to {MAX_CV:g}", field="cv")

    @property
    def piece_s(self) -> float:
        """Mean seconds that a value holds."""
        return self.hold_s

    def covariance(self, lag_s: Floats) -> Floats:
        """Return the autocovariance of the factor at these lags."""
        return self.cv * self.cv * np.exp(-lag_s / self.hold_s)

    def values(self, rng: np.random.Generator) -> Iterator[tuple[Floats, Floats]]:
        """Yield, without end, how long values hold in seconds, and the values."""
        shape = 1.0 / (self.cv * self.cv)
        while True:
            held = rng.standard_exponential(_HOLDS) * self.hold_s
            yield held, rng.standard_gamma(shape, _HOLDS) / shape


@dataclass(frozen=True, slots=True)
class Silence:
    """Times without any request: on for `on_s` seconds on average, then off for `off_s`; mean 1."""

    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        _check_time(self.on_s, "on_s")
        _check_time(self.off_s, "off_s")

    @property
    def piece_s(self) -> float:
        """Mean seconds that a value holds."""
        return (self.on_s + self.off_s) / 2

    def covariance(self, lag_s: Floats) -> Floats:
        """Return the autocovariance of the factor at these lags."""
        return self.off_s / self.on_s * np.exp(-lag_s * (1.0 / self.on_s + 1.0 / self.off_s))

    def values(self, rng: np.random.Generator) -> Iterator[tuple[Floats, Floats]]:
        """Yield, without end, how long values hold in seconds, and the values."""
        # As if it had run for ever: it begins on with the share of time that it is on.
        on_first = rng.random() < self.on_s / (self.on_s + self.off_s)
        # An even number of values: on and off alternate from one block to the next, too.
        on = np.arange(_HOLDS) % 2 == (0 if on_first else 1)
        means, levels = (
            np.where(on, self.on_s, self.off_s),
            np.where(on, 1 + self.off_s / self.on_s, 0.0),
        )
        while True:
            yield rng.standard_exponential(_HOLDS) * means, levels


def _check_time(seconds: float, field: str) -> None:
    if not 1e-3 <= seconds <= 1e9:
        raise InputError(f"{seconds!r} is not a time of 1ms or more", field=field)


class _Path:
    """The values of a layer over time, made as far as they are asked for."""

    def __init__(self, layer: Layer | Silence, rng: np.random.Generator) -> None:
        self._values = layer.values(rng)
        self.ends = np.zeros(0)
        self._levels = np.zeros(0)
        self._last_s = 0.0

    def reach(self, low_s: float, high_s: float) -> None:
        """Make the path up to `high_s` and forget what lies before `low_s`."""
        past = int(np.searchsorted(self.ends, low_s, side="right"))
        ends, levels = [self.ends[past:]], [self._levels[past:]]
        while self._last_s <= high_s:
            held, values = next(self._values)
            ends.append(self._last_s + np.cumsum(held))
            levels.append(values)
            self._last_s = float(ends[-1][-1])
        self.ends, self._levels = np.concatenate(ends), np.concatenate(levels)

    def at(self, seconds: Floats) -> Floats:
        """The values at these times, which `reach` has covered."""
        return self._levels[np.searchsorted(self.ends, seconds, side="right")]


@dataclass(frozen=True)
class RateClock:
    """Maps operational time, in which one request is due per unit, to seconds.

    `rate_per_s` is the mean rate of requests; `start_s` is where in its curve the clock starts.
    """

    rate_per_s: float
    curve: RateCurve | None = None
    layers: tuple[Layer | Silence, ...] = ()
    start_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.rate_per_s <= MAX_RATE:
            raise InputError(
                f"{self.rate_per_s!r} requests/s is not a rate above 0, up to 1e7", field="rate"
            )

    @property
    def steady(self) -> bool:
        """Whether the rate never changes."""
        return self.curve is None and not self.layers

    @property
    def piece_s(self) -> float:
        """Mean seconds between changes of the rate; only where it is not steady."""
        changes = sum(1.0 / layer.piece_s for layer in self.layers)
        changes += 0.0 if self.curve is None else 1.0 / self.curve.cell_s
        return 1.0 / changes

    def chunk(self, limit: int = CHUNK) -> int:
        """Return how many arrivals are made at a time, so few that they span few pieces of rate."""
        if self.steady:
            return limit
        return min(limit, max(256, round(self.rate_per_s * self.piece_s * _PIECES)))

    def blocks(self, seed: int, name: str) -> Iterator[tuple[Floats, Floats]]:
        """Yield, without end, times in seconds and the requests due from block start to each."""
        paths = [
            _Path(layer, stream(seed, "workload", name, f"layer {index}"))
            for index, layer in enumerate(self.layers)
        ]
        block_s = self.piece_s * _PIECES
        for number in itertools.count():
            low, high = number * block_s, (number + 1) * block_s
            for path in paths:
                path.reach(low, high)
            # Between two edges no layer changes, so the rate is constant.
            edges = np.unique(np.concatenate([[low, high], *self._changes(paths, low, high)]))
            # Looked up in the middle: on an edge rounding would decide.
            middles = (edges[:-1] + edges[1:]) / 2
            level = np.full(len(middles), self.rate_per_s)
            for path in paths:
                level *= path.at(middles)
            if self.curve is not None:
                level *= self.curve.at(middles + self.start_s)
            yield edges, np.concatenate(([0.0], np.cumsum(level * np.diff(edges))))

    def _changes(self, paths: Sequence[_Path], low: float, high: float) -> Iterator[Floats]:
        for path in paths:
            first, last = np.searchsorted(path.ends, (low, high), side="right")
            yield path.ends[first:last]
        if self.curve is not None:
            cell = self.curve.cell_s
            first_cell = np.floor((low + self.start_s) / cell) + 1
            yield np.arange(first_cell * cell - self.start_s, high, cell)


class _Hands:
    """Where a clock stands: turns requests due since the last arrival into seconds."""

    def __init__(self, clock: RateClock, seed: int, name: str) -> None:
        self._rate = clock.rate_per_s
        self._now_s = 0.0
        self._blocks = None if clock.steady else clock.blocks(seed, name)
        self._edges, self._due = np.zeros(1), np.zeros(1)

    def seconds(self, due: Floats) -> Floats:
        """Return when these arrivals come; `due` ascends and counts from the last one returned."""
        if self._blocks is None:
            times: Floats = self._now_s + due / self._rate
            self._now_s = float(times[-1])
            return times
        edges, sums = [self._edges], [self._due]
        reached = float(self._due[-1])
        while reached < due[-1]:
            more_edges, more_due = next(self._blocks)
            edges.append(more_edges[1:])
            sums.append(reached + more_due[1:])
            reached = float(sums[-1][-1])
        known_edges, known_due = np.concatenate(edges), np.concatenate(sums)
        times = np.interp(due, known_due, known_edges)
        # What is left of the last block is for the next call.
        keep = int(np.searchsorted(known_due, due[-1], side="right")) - 1
        self._edges, self._due = known_edges[keep:], known_due[keep:] - due[-1]
        return times


def arrivals(
    renewal: Renewal,
    clock: RateClock,
    *,
    seed: int,
    name: str,
    end_s: float | None = None,
    chunk: int = CHUNK,
) -> Iterator[Floats]:
    """Yield arrival times in seconds, ascending, in arrays of at most `chunk`; endless without `end_s`."""
    rng = stream(seed, "workload", name, "arrivals")
    hands = _Hands(clock, seed, name)
    chunk = clock.chunk(chunk)
    first: float | None = renewal.first(rng)
    while True:
        gaps = renewal.gaps(rng, chunk)
        if first is not None:
            # A clock starts at no particular moment, so the gap before the first arrival has another law.
            gaps[0], first = first, None
        times = hands.seconds(np.cumsum(gaps))
        if end_s is not None and times[-1] >= end_s:
            times = times[: int(np.searchsorted(times, end_s, side="left"))]
            if len(times):
                yield times
            return
        yield times
