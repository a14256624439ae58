"""Requests as a fluid: how many keep their promises while demand and capacity move.

A service has capacity c: the requests/s at which as many of them keep their promises as it asks for. With a
requests/s the load is r = a / c, and a share k(r) of them keeps both promises; k is simulated (`calibrate`).
Answers take a while, so load follows r with the time constant `lag_s`, the time of an answer.
What instances finish at most is f = `stretch` * c. While a > f, or until what waits is worked off, a queue
q grows by a - f; who arrives then waits for q / f seconds. The load is then `stretch`, so a share k(stretch)
keeps its promises of those whose wait is within TTFT, and nobody of the others; who would wait longer than
`PATIENCE_S` is turned away. So every request is kept, late or lost when it arrives:

    arrived = kept + late + lost
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

PATIENCE_S = 60.0
"""Who would wait longer than this is turned away."""
_MAX_LOAD = 1e6


@dataclass(frozen=True)
class KeptCurve:
    """Shares of requests that keep their promises by load, straight lines between; see the module's text."""

    loads: tuple[float, ...] = (0.5, 0.9, 1.0, 1.15, 1.3)
    kept: tuple[float, ...] = (0.99, 0.97, 0.95, 0.8, 0.4)
    stretch: float = 1.3

    def at(self, load: float) -> float:
        """Return the share at a load."""
        if load <= self.loads[0]:
            return self.kept[0]
        if load >= self.loads[-1]:
            return self.kept[-1]
        right = bisect_right(self.loads, load)
        low, high = self.loads[right - 1], self.loads[right]
        share = (load - low) / (high - low)
        return self.kept[right - 1] * (1.0 - share) + self.kept[right] * share


@dataclass(frozen=True, slots=True)
class ServedRequests:
    """Outcome of the requests of an interval."""

    kept: float
    late: float
    lost: float


class FluidQueue:
    """The requests of a service that wait, and what becomes of those that come."""

    def __init__(self, curve: KeptCurve, ttft_s: float, lag_s: float = 0.0) -> None:
        self.curve, self.ttft_s, self.lag_s = curve, ttft_s, lag_s
        self.waiting = 0.0
        self._load: float | None = None

    def serve(self, arrived: float, seconds: float, capacity_per_s: float) -> ServedRequests:
        """Let so many requests come evenly over a while, with a capacity that holds."""
        if seconds <= 0.0:
            return ServedRequests(0.0, 0.0, 0.0)
        rate = arrived / seconds
        finished = capacity_per_s * self.curve.stretch
        if finished <= 0.0:
            room = max(0.0, rate * PATIENCE_S - self.waiting)
            late = min(arrived, room)
            self.waiting += late
            return ServedRequests(0.0, late, arrived - late)
        load = self._follow(min(_MAX_LOAD, rate / capacity_per_s), seconds)
        if self.waiting <= 0.0 and rate <= finished:
            kept = arrived * self.curve.at(load)
            return ServedRequests(kept, arrived - kept, 0.0)
        return self._serve_queue(rate, seconds, finished, load)

    def _follow(self, load: float, seconds: float) -> float:
        """Return the mean load over a while, following the load that is asked for."""
        before = load if self._load is None else self._load
        if self.lag_s <= 0.0:
            self._load = load
            return load
        ratio = seconds / self.lag_s
        left = math.exp(-ratio)
        self._load = load + (before - load) * left
        return load + (before - load) * (1.0 - left) / ratio

    def _serve_queue(
        self, rate: float, seconds: float, finished: float, load: float
    ) -> ServedRequests:
        """As `serve`, while requests wait, or begin to."""
        growth = rate - finished
        soon, most = finished * self.ttft_s, finished * PATIENCE_S
        begin = self.waiting
        before = max(0.0, begin - most)
        begin -= before  # capacity fell: who waits too long already is still counted as late
        end = begin + growth * seconds
        free_s = 0.0
        if end < 0.0:
            free_s, end = seconds - begin / -growth, 0.0
        lost = max(0.0, end - most)
        self.waiting = end - lost
        queued_s = seconds - free_s
        soon_s = _time_below(begin, growth, soon, queued_s)
        kept = rate * (free_s * self.curve.at(load) + soon_s * self.curve.at(self.curve.stretch))
        arrived = rate * seconds
        lost = min(lost, arrived - kept)
        return ServedRequests(kept, arrived - kept - lost, lost)


def _time_below(begin: float, growth: float, level: float, seconds: float) -> float:
    """Return for how long a line stays at or below a level."""
    if growth == 0.0:
        return seconds if begin <= level else 0.0
    reached_s = (level - begin) / growth
    if growth > 0.0:
        return min(seconds, max(0.0, reached_s))
    return seconds - min(seconds, max(0.0, reached_s))
