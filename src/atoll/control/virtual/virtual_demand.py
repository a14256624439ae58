"""Demand in virtual time: requests per minute of every service, from a trace or drawn.

Drawn traffic (`draw_demand`) follows the weeks of the Azure trace of 2024, conversation and code in turn: the
rate of a service is its own, times the curve of the week, times chance that comes and goes, times bursts:

    rate(t) = rate * curve(t) * e^(y(t) - s^2/2) * (1 + burst(t))

y reverts to 0 as prices do (`market`), with standard deviation `deviation` and time constant `reverts_s`;
bursts come `bursts_per_day` times a day on average, raise the rate by a share between `burst_least` and
`burst_most`, and last `burst_s` on average, ramps of a quarter of that included. Requests of a minute are
Poisson.

Where a service has classes, how many of a minute's requests are of each is drawn by shares that move: the
written one of class k times e^z(t), all made to add up to 1, with z reverting to 0 as y does, with standard
deviation `mix_deviation` and time constant `mix_reverts_s`. So it is for traces that do not say classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    mix_deviation: float = 0.2
    mix_reverts_s: float = 21_600.0


@dataclass(frozen=True)
class DemandSeries:
    """Requests per minute by service, in order of names; `history` are minutes before the start.

    `classes` has those of every class of a service that has some, a row for each in the service's order.
    """

    services: tuple[str, ...]
    counts: Ints
    history: int = 0
    classes: Mapping[str, Ints] = field(default_factory=dict)

    @property
    def minutes(self) -> int:
        """Minutes from the start on."""
        return int(self.counts.shape[1]) - self.history

    def rate_before(
        self, service: int, minute: int, minutes: int, klass: int | None = None
    ) -> float:
        """Return requests/s over so many minutes before this one, of a class if given.

        As many minutes as are known.
        """
        last = self.history + minute
        first = max(0, last - minutes)
        if last == first:
            return 0.0
        rows, at = (
            (self.counts, service)
            if klass is None
            else (self.classes[self.services[service]], klass)
        )
        return float(rows[at, first:last].sum()) / (MINUTE_S * (last - first))

    def smooth(self, minutes: int = 5, of: str | None = None) -> Floats:
        """Return requests/s at every minute since the start: means over some minutes around it.

        By service, or by class of one service.
        """
        window = np.ones(minutes) / minutes
        rates = []
        for row in self.counts if of is None else self.classes[of]:
            around = np.pad(row.astype(np.float64), minutes // 2, mode="edge")
            rates.append(np.convolve(around, window, mode="valid")[self.history :])
        smoothed: Floats = np.array(rates) / MINUTE_S
        return smoothed

    def lanes(self, service: str, minutes: int = 5) -> Floats:
        """Return `smooth` of each class of a service, or of the service where it has none."""
        if service in self.classes:
            return self.smooth(minutes, service)
        at = self.services.index(service)
        return self.smooth(minutes)[at : at + 1]

    def take(self, minutes: int) -> DemandSeries:
        """Return the first so many minutes after the start."""
        end = self.history + minutes
        classes = {name: rows[:, :end] for name, rows in self.classes.items()}
        return DemandSeries(self.services, self.counts[:, :end], self.history, classes)

    def restated(self, problem: Problem, rates: Mapping[str, Sequence[float]]) -> Problem:
        """Return the problem with these requests/s of services, or of the classes of those that have some."""
        services = tuple(
            service.model_copy(update={"rate_per_s": max(0.0, float(sum(rates[service.name])))})
            for service in problem.services
        )
        return restate_classes(problem.model_copy(update={"services": services}), rates)


MIN_CLASS_SHARE = 1e-6
"""Share of a class that nobody asks for: it is there all the same."""


def restate_classes(problem: Problem, rates: Mapping[str, Sequence[float]]) -> Problem:
    """Return the problem with the shares that these requests/s of classes have of their services."""
    services = []
    for service in problem.services:
        own = rates.get(service.name, ())
        if service.is_graph and sum(own) > 0.0:
            shares = [max(rate / sum(own), MIN_CLASS_SHARE) for rate in own]
            classes = tuple(
                klass.model_copy(update={"share": share / sum(shares)})
                for klass, share in zip(service.classes, shares, strict=True)
            )
            service = service.model_copy(update={"classes": classes})
        services.append(service)
    return problem.model_copy(update={"services": tuple(services)})


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
    counts = np.array(rows, np.int64)
    return DemandSeries(names, counts, history, draw_classes(problem, counts, seed, law))


def draw_classes(
    problem: Problem, counts: Ints, seed: int, law: TrafficStatistics
) -> dict[str, Ints]:
    """Return requests per minute of each class, for services that have classes."""
    found = {}
    for service, row in zip(problem.services, counts, strict=True):
        if not service.is_graph:
            continue
        luck = stream(seed, "virtual mix", service.name)
        walks = [
            _draw_walk(luck, len(row), law.mix_deviation, law.mix_reverts_s)
            for _ in service.classes
        ]
        weights = np.exp(np.array(walks)) * np.array([[k.share] for k in service.classes])
        shares = (weights / weights.sum(axis=0)).T
        found[service.name] = luck.multinomial(row, shares).T.astype(np.int64)
    return found


def _draw_chance(luck: np.random.Generator, minutes: int, law: TrafficStatistics) -> Floats:
    walk = _draw_walk(luck, minutes, law.deviation, law.reverts_s)
    return np.asarray(np.exp(walk - 0.5 * law.deviation**2))


def _draw_walk(
    luck: np.random.Generator, minutes: int, deviation: float, reverts_s: float
) -> Floats:
    """Return a walk that reverts to 0, a step a minute."""
    stay = math.exp(-MINUTE_S / reverts_s)
    shocks = luck.standard_normal(minutes) * deviation
    shocks[1:] *= math.sqrt(1.0 - stay * stay)
    level, found = 0.0, []
    for at, shock in enumerate(shocks.tolist()):
        level = stay * level + shock if at else shock
        found.append(level)
    return np.array(found)


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
    workload: Workload,
    problem: Problem,
    days: float | None = None,
    seed: int = 0,
    statistics: TrafficStatistics | None = None,
) -> DemandSeries:
    """Return the requests of a trace by minute and service, over again from its start if it is shorter.

    Requests of a model are for the service of its name; where a trace names none of the services, requests
    are shared out by what is asked of each. Without `days` it is as long as the trace, up to `MAX_DAYS`.
    Classes are drawn, as `statistics` say.
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
    classes = draw_classes(problem, counts, seed, statistics or TrafficStatistics())
    return DemandSeries(names, counts, 0, classes)
