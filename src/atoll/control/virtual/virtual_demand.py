"""Demand in virtual time: requests per minute of every service, from a trace or drawn.

Drawn traffic (`draw_demand`) follows the weeks of the Azure trace of 2024, conversation and code in turn: the
rate of a service is its own, times the curve of the week, times chance that comes and goes, times bursts:

    rate(t) = rate * curve(t) * e^(y(t) - s^2/2) * (1 + burst(t))

y reverts to 0 as prices do (`market`), with standard deviation `deviation` and time constant `reverts_s`;
bursts come `bursts_per_day` times a day on average, raise the rate by a share between `burst_least` and
`burst_most`, and last `burst_s` on average, ramps of a quarter of that included. Requests of a minute are
Poisson.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import InputError
from atoll.core.rng import stream

if TYPE_CHECKING:
    from atoll.plan.problem import Problem
    from atoll.workload.requests import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MINUTE_S = 60.0
DAY_MINUTES = 1440
CURVES = ("conv-week", "code-week")
MAX_DAYS = 31.0
"""The longest trace that is taken whole."""


@dataclass(frozen=True)
class TrafficStatistics:
    """How drawn traffic moves."""

    deviation: float = 0.05
    reverts_s: float = 1800.0
    bursts_per_day: float = 1.0
    burst_least: float = 0.1
    burst_most: float = 0.4
    burst_s: float = 1200.0


@dataclass(frozen=True)
class DemandSeries:
    """Requests per minute by service, in order of names; `history` are minutes before the start."""

    services: tuple[str, ...]
    counts: Ints
    history: int = 0

    @property
    def minutes(self) -> int:
        """Minutes from the start on."""
        return int(self.counts.shape[1]) - self.history

    def rate_before(self, service: int, minute: int, minutes: int) -> float:
        """Return requests/s over so many minutes before this one, as many as are known."""
        last = self.history + minute
        first = max(0, last - minutes)
        if last == first:
            return 0.0
        return float(self.counts[service, first:last].sum()) / (MINUTE_S * (last - first))

    def smooth(self, minutes: int = 5) -> Floats:
        """Return requests/s at every minute since the start: means over some minutes around it."""
        window = np.ones(minutes) / minutes
        rates = []
        for row in self.counts:
            around = np.pad(row.astype(np.float64), minutes // 2, mode="edge")
            rates.append(np.convolve(around, window, mode="valid")[self.history :])
        smoothed: Floats = np.array(rates) / MINUTE_S
        return smoothed

    def take(self, minutes: int) -> DemandSeries:
        """Return the first so many minutes after the start."""
        counts = self.counts[:, : self.history + minutes]
        return DemandSeries(self.services, counts, self.history)


def draw_demand(
    problem: Problem,
    days: float,
    seed: int,
    *,
    history_days: float = 0.0,
    statistics: TrafficStatistics | None = None,
) -> DemandSeries:
    """Return drawn traffic for every service of a fleet, at its rate in the mean over a week."""
    from atoll.workload.builtin import curve

    law = statistics or TrafficStatistics()
    history = round(history_days * DAY_MINUTES)
    minutes = history + round(days * DAY_MINUTES)
    # History comes before the start of a week, so that the days that count begin with it.
    at_s: Floats = (np.arange(minutes, dtype=np.float64) - history + 0.5) * MINUTE_S
    rows = []
    for number, service in enumerate(problem.services):
        luck = stream(seed, "virtual traffic", service.name)
        usual = curve(CURVES[number % len(CURVES)]).at(at_s)
        rate = service.rate_per_s * usual * _draw_chance(luck, minutes, law)
        rate *= 1.0 + _draw_bursts(luck, minutes, law)
        rows.append(luck.poisson(rate * MINUTE_S))
    names = tuple(service.name for service in problem.services)
    return DemandSeries(names, np.array(rows, np.int64), history)


def _draw_chance(luck: np.random.Generator, minutes: int, law: TrafficStatistics) -> Floats:
    stay = math.exp(-MINUTE_S / law.reverts_s)
    shocks = luck.standard_normal(minutes) * law.deviation
    shocks[1:] *= math.sqrt(1.0 - stay * stay)
    level, found = 0.0, []
    for at, shock in enumerate(shocks.tolist()):
        level = stay * level + shock if at else shock
        found.append(level)
    return np.asarray(np.exp(np.array(found) - 0.5 * law.deviation**2))


def _draw_bursts(luck: np.random.Generator, minutes: int, law: TrafficStatistics) -> Floats:
    raised = np.zeros(minutes)
    for _ in range(luck.poisson(law.bursts_per_day * minutes / DAY_MINUTES)):
        begin = int(luck.integers(0, minutes))
        length = max(2, round(float(luck.exponential(law.burst_s)) / MINUTE_S))
        height = float(luck.uniform(law.burst_least, law.burst_most))
        ramp = max(1, length // 4)
        inside = np.arange(length)
        shape = np.minimum(1.0, (np.minimum(inside, length - 1 - inside) + 1) / ramp)
        end = min(minutes, begin + length)
        here = raised[begin:end]
        np.maximum(here, height * shape[: end - begin], out=here)
    return raised


def count_requests(
    workload: Workload, problem: Problem, days: float | None = None, seed: int = 0
) -> DemandSeries:
    """Return the requests of a trace by minute and service, over again from its start if it is shorter.

    Requests of a model are for the service of its name; where a trace names none of the services, requests
    are shared out by what is asked of each. Without `days` it is as long as the trace, up to `MAX_DAYS`.
    """
    names = tuple(service.name for service in problem.services)
    place: Mapping[str, int] = {name: at for at, name in enumerate(names)}
    most = round((MAX_DAYS if days is None else days) * DAY_MINUTES)
    rates = np.array([service.rate_per_s for service in problem.services])
    shares = rates / rates.sum() if rates.sum() > 0.0 else np.full(len(names), 1 / len(names))
    luck = stream(seed, "virtual trace")
    found = np.zeros((len(names), most), np.int64)
    last_s, known = 0.0, False
    for chunk in workload.chunks(seed):
        if not len(chunk.arrival_s):
            continue
        last_s = float(chunk.arrival_s[-1])
        minute = np.floor(chunk.arrival_s / MINUTE_S).astype(np.int64)
        of_model = np.array([place.get(name, -1) for name in chunk.models], np.int64)
        service = of_model[chunk.model]
        known = known or bool((service >= 0).any())
        if not known:
            service = luck.choice(len(names), len(minute), p=shares)
        keep = (minute < most) & (service >= 0)
        np.add.at(found, (service[keep], minute[keep]), 1)
        if minute[-1] >= most:
            break
    if not found.any():
        raise InputError("no request of the trace is for a service of the fleet", field="simulate")
    length = max(1, min(most, math.ceil(last_s / MINUTE_S)))
    wanted = length if days is None else most
    counts = np.tile(found[:, :length], (1, math.ceil(wanted / length)))[:, :wanted]
    return DemandSeries(names, counts)
