"""Days in seconds: an operator in a virtual world, and what that cost and kept.

Turns come every `turn_s`, and at once when machines are lost or a notice is given: a real controller looks
every few seconds, but between these nothing changes that it would act on. Between two turns requests flow
(`fluid`) through what is ready; each minute is written down.

A service is *short* while it carries less than is asked: the mean rate of the five minutes around, less two
standard errors of it. Of that it is `below_demand` what an operator could have prevented: seconds that its
own drains brought, and those beyond the time that it takes to see a shortage and to start something, from
when it began or a loss made it worse, whether or not there were machines. Until then only spare capacity
helps, which the plan decides on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.control.decision.control_view import (
    DAY_S,
    PromiseSeen,
    TrafficSeen,
    TrafficWindow,
    name_class,
)
from atoll.control.decision.forecast import MIN_RATE, build_profile
from atoll.control.decision.lane_capacity import ROUNDING, CarriedLoad, list_needs
from atoll.control.operation.control_loop import TrafficReport
from atoll.control.virtual.executor_fluid import ExecutorLoads
from atoll.control.virtual.fluid import KeptCurve
from atoll.control.virtual.fluid_calibration import open_queue
from atoll.control.virtual.market import MarketSeries
from atoll.control.virtual.virtual_demand import DAY_MINUTES, MINUTE_S, DemandSeries, Ints
from atoll.control.virtual.world import EPOCH_S, VirtualWorld, WorldSettings
from atoll.plan.plan import RequestPath
from atoll.plan.problem import Problem, Service
from atoll.plan.startup import StartupTimes
from atoll.workload.classes import RequestClass

Floats = NDArray[np.float64]

_PROFILE_STEP_S = 600.0
_SEEN_MINUTES = 5


class FleetOperator(Protocol):
    """Who keeps a fleet: looks once a turn, and orders."""

    name: str

    def turn(self, world: VirtualWorld, seen: TrafficReport) -> None:
        """Look at the world and give orders."""
        ...


@dataclass(frozen=True)
class OperationSeries:
    """Minute by minute what the fleet costs ($/h), and by service requests, what became of them, capacity."""

    usd_per_hour: Floats
    arrived: Floats
    kept: Floats
    late: Floats
    lost: Floats
    capacity_per_s: Floats


@dataclass(frozen=True)
class ClassOutcome:
    """Requests of a class of a service, minute by minute, and how many kept their promises."""

    service: str
    klass: str
    target: float
    arrived: Floats
    kept: Floats

    @property
    def kept_share(self) -> float:
        """The share of them that kept their promises."""
        return float(self.kept.sum() / max(1.0, self.arrived.sum()))


@dataclass(frozen=True)
class OperationResult:
    """Cost and kept promises of a fleet operated for a while.

    `short_s` and `below_demand_s` are summed over services; see the module's text. `events` counts what
    happened to machines, and `classes` are those of services that have some.
    """

    name: str
    services: tuple[str, ...]
    targets: tuple[float, ...]
    days: float
    usd: float
    series: OperationSeries
    short_s: float
    below_demand_s: float
    events: Mapping[str, int] = field(default_factory=dict)
    classes: tuple[ClassOutcome, ...] = ()

    @property
    def kept_share(self) -> float:
        """The share of all requests that kept their promises."""
        return float(self.series.kept.sum() / max(1.0, self.series.arrived.sum()))

    @property
    def kept_by_service(self) -> dict[str, float]:
        """The same by service."""
        kept, arrived = self.series.kept.sum(axis=1), self.series.arrived.sum(axis=1)
        shares = (kept / np.maximum(1.0, arrived)).tolist()
        return dict(zip(self.services, shares, strict=True))

    @property
    def points_above_target(self) -> float:
        """By how many points the worst service, or class of one, keeps more than it shall."""
        kept = self.kept_by_service.values()
        each = [share - own for share, own in zip(kept, self.targets, strict=True)]
        each += [one.kept_share - one.target for one in self.classes if one.arrived.sum() > 0.0]
        return 100.0 * min(each)


@dataclass(frozen=True)
class VirtualSetting:
    """Setting that all contenders share: a fleet, its traffic, its market, machines, and chance."""

    problem: Problem
    demand: DemandSeries
    market: MarketSeries
    curves: Mapping[str, KeptCurve]
    machines: WorldSettings = field(default_factory=WorldSettings)
    seed: int = 0
    turn_s: float = 180.0

    @property
    def days(self) -> float:
        """Days of traffic."""
        return self.demand.minutes / DAY_MINUTES

    @cached_property
    def startup(self) -> StartupTimes:
        """How long its instances take to start."""
        return StartupTimes(self.problem)


@dataclass
class _Shortage:
    """How long a service has been short, and whether an operator's own order began it."""

    since_s: float | None = None
    own: bool = False
    short_s: float = 0.0
    below_s: float = 0.0


class _Lane:
    """The requests of a service, or of one class of it, while they flow."""

    def __init__(self, service: Service, klass: RequestClass | None, curve: KeptCurve) -> None:
        self.queue = open_queue(service, curve, klass)
        self.klass = klass
        self.rates: list[float] = []
        """Requests/s by minute."""
        self.arrived: Floats = np.zeros(0)
        self.kept: Floats = np.zeros(0)

    def open(self, counts: Ints) -> None:
        """Begin with what comes by minute."""
        self.rates = [float(x) / MINUTE_S for x in counts]
        self.arrived, self.kept = np.zeros(len(counts)), np.zeros(len(counts))


class _Ledger:
    """Lets requests flow through what is ready, and writes down what becomes of them."""

    def __init__(self, setting: VirtualSetting, world: VirtualWorld) -> None:
        self.setting, self.world = setting, world
        problem, demand = setting.problem, setting.demand
        self.names = tuple(service.name for service in problem.services)
        self._mixed = frozenset(self.names)
        models = problem.catalog().models if problem.graph_services else {}
        self._needs = [
            list_needs(models[service.model], service) if service.is_graph else ()
            for service in problem.services
        ]
        self._lanes = [_open_lanes(setting, service) for service in problem.services]
        for service, lanes in zip(problem.services, self._lanes, strict=True):
            rows = demand.classes.get(service.name)
            if rows is None:
                at = self.names.index(service.name)
                rows = demand.counts[at : at + 1]
            for lane, row in zip(lanes, rows, strict=True):
                lane.open(row[demand.history :])
        shape = (len(self.names), demand.minutes)
        self.arrived, self.kept = np.zeros(shape), np.zeros(shape)
        self.late, self.lost, self.capacity = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.usd = np.zeros(demand.minutes)
        # What is asked is a rate: counts of some minutes tell it to within chance.
        counted_s = _SEEN_MINUTES * MINUTE_S
        smooth = demand.smooth(_SEEN_MINUTES)
        least = smooth - 2.0 * np.sqrt(np.maximum(smooth, 0.0) / counted_s)
        self._asked = [row.tolist() for row in least]
        self._version = -1
        self._carried: list[float] = [0.0] * len(self.names)
        self._loads: list[ExecutorLoads | None] = [None] * len(self.names)
        self._short = [_Shortage() for _ in self.names]
        law = setting.machines
        # Known once half of the minutes around have passed, seen and ordered within a turn, then up.
        known_s = 0.5 * _SEEN_MINUTES * MINUTE_S
        startup_s = setting.startup.longest_s if law.startup_s is None else law.startup_s
        self._grace_s = known_s + setting.turn_s + startup_s * (1.0 + law.startup_spread)

    def _minute(self) -> int:
        return min(int(self.world.elapsed_s // MINUTE_S + 1e-9), self.arrived.shape[1] - 1)

    def serve(self, seconds: float) -> None:
        """Let a stretch pass in which nothing changes; it lies within a minute."""
        minute = self._minute()
        self._look()
        self.usd[minute] += self.world.usd_per_hour() * seconds / MINUTE_S
        for at, lanes in enumerate(self._lanes):
            carried, capacities = self._measure(at, minute)
            for lane, capacity in zip(lanes, capacities, strict=True):
                came = lane.rates[minute] * seconds
                served = lane.queue.serve(came, seconds, capacity)
                lane.arrived[minute] += came
                lane.kept[minute] += served.kept
                self.arrived[at, minute] += came
                self.kept[at, minute] += served.kept
                self.late[at, minute] += served.late
                self.lost[at, minute] += served.lost
            self.capacity[at, minute] += carried * seconds / MINUTE_S
            self._note_short(at, carried < self._asked[at][minute] * (1.0 - ROUNDING), seconds)

    def _measure(self, at: int, minute: int) -> tuple[float, list[float]]:
        """Return the requests/s that a service carries, and each of its lanes with the others as they are."""
        loads = self._loads[at]
        if loads is None:
            return self._carried[at], [self._carried[at]]
        # A class that nobody asks for this minute still works off what waits.
        rates = [max(MIN_RATE, lane.rates[minute]) for lane in self._lanes[at]]
        capacities = [
            0.0 if math.isinf(load) or load <= 0.0 else rate / load
            for rate, load in zip(rates, loads.of(rates).tolist(), strict=True)
        ]
        self._carried[at] = loads.carried(rates)
        return self._carried[at], capacities

    def note_orders(self, before: list[float]) -> None:
        """See whether orders of a turn took a service below what is asked of it.

        What is drained because its machine is taken back was lost before.
        """
        if self._version == self.world.version:
            return
        serving = self.world.ready()
        serving += [
            seen.instance
            for seen in self.world.observe()
            if seen.status.state == "draining" and seen.status.ends_s is not None
        ]
        load = CarriedLoad(self.setting.problem, self._mixed, serving)
        minute = self._minute()
        for at, name in enumerate(self.names):
            carried = load.of_service(name)[name]
            if self._needs[at]:
                own = [one for one in serving if one.service == name]
                rates = [lane.rates[minute] for lane in self._lanes[at]]
                carried = ExecutorLoads(self._needs[at], own, self._paths(name)).carried(rates)
            asked = self.setting.demand.rate_before(at, minute, _SEEN_MINUTES)
            if carried < min(before[at], asked) * (1.0 - ROUNDING):
                self._short[at].own = True

    def carried(self) -> list[float]:
        """Return the requests/s that each service carries now."""
        self._look()
        minute = self._minute()
        return [self._measure(at, minute)[0] for at in range(len(self.names))]

    def _paths(self, service: str) -> list[RequestPath]:
        return [path for path in self.world.paths if path.service == service]

    def _look(self) -> None:
        if self._version == self.world.version:
            return
        self._version = self.world.version
        ready = self.world.ready()
        load = CarriedLoad(self.setting.problem, self._mixed, ready)
        minute, before = self._minute(), list(self._carried)
        for at, name in enumerate(self.names):
            if self._needs[at]:
                own = [one for one in ready if one.service == name]
                self._loads[at] = ExecutorLoads(self._needs[at], own, self._paths(name))
                self._measure(at, minute)
            else:
                self._carried[at] = load.of_service(name)[name]
        for at, one in enumerate(self._short):
            if self._carried[at] < before[at] and one.since_s is not None:
                one.since_s = self.world.elapsed_s  # more was lost, and has to be seen first

    def _note_short(self, at: int, short: bool, seconds: float) -> None:
        one = self._short[at]
        now_s = self.world.elapsed_s
        if not short:
            one.since_s, one.own = None, False
            return
        if one.since_s is None:
            one.since_s = now_s
        one.short_s += seconds
        if one.own:
            one.below_s += seconds
        else:
            over_s = now_s + seconds - (one.since_s + self._grace_s)
            one.below_s += min(seconds, max(0.0, over_s))

    def report(self, minute: int, profiles: Profiles) -> TrafficReport:
        """Return what gateways would say at the start of a minute."""
        demand = self.setting.demand

        def see(name: str, key: str, at: int, klass: int | None = None) -> TrafficSeen:
            last, five, hour = (
                TrafficWindow(demand.rate_before(at, minute, n, klass))
                for n in (1, _SEEN_MINUTES, 60)
            )
            return TrafficSeen(name, last, five, hour, *profiles[key])

        traffic, promises = [], []
        for at, service in enumerate(self.setting.problem.services):
            classes = tuple(
                see(klass.name, name_class(service.name, klass.name), at, k)
                for k, klass in enumerate(service.classes)
            )
            traffic.append(replace(see(service.name, service.name, at), classes=classes))
            first = max(0, minute - _SEEN_MINUTES)
            came = float(self.arrived[at, first:minute].sum())
            if came > 0.0:
                kept = float(self.kept[at, first:minute].sum()) / came
                promises.append(
                    PromiseSeen(service.name, min(1.0, kept), service.attainment, round(came))
                )
        return TrafficReport(tuple(traffic), tuple(promises))

    def finish(self, name: str) -> OperationResult:
        """Return all of it."""
        setting = self.setting
        series = OperationSeries(
            self.usd, self.arrived, self.kept, self.late, self.lost, self.capacity
        )
        return OperationResult(
            name=name,
            services=self.names,
            targets=tuple(service.attainment for service in setting.problem.services),
            days=setting.days,
            usd=self.world.usd,
            series=series,
            short_s=sum(one.short_s for one in self._short),
            below_demand_s=sum(one.below_s for one in self._short),
            events=dict(vars(self.world.counts)),
            classes=tuple(
                ClassOutcome(
                    service.name,
                    lane.klass.name,
                    service.class_target(lane.klass.name),
                    lane.arrived,
                    lane.kept,
                )
                for service, lanes in zip(setting.problem.services, self._lanes, strict=True)
                for lane in lanes
                if lane.klass is not None
            ),
        )


def _open_lanes(setting: VirtualSetting, service: Service) -> list[_Lane]:
    """Return the lanes of a service: one for each of its classes, or one."""
    classes: tuple[RequestClass | None, ...] = service.classes or (None,)
    names = [service.name if k is None else name_class(service.name, k.name) for k in classes]
    curves = [setting.curves.get(name, KeptCurve()) for name in names]
    return [_Lane(service, *one) for one in zip(classes, curves, strict=True)]


def operate(
    setting: VirtualSetting,
    operator: FleetOperator,
    *,
    on_progress: Callable[[float], None] | None = None,
) -> OperationResult:
    """Have an operator keep a fleet for all of its traffic; what it orders first is there at the start.

    `on_progress` is told now and then which share is done.
    """
    world = VirtualWorld(setting.market, setting.machines, setting.seed, startup=setting.startup.of)
    ledger = _Ledger(setting, world)
    profiles = _build_profiles(setting, 0)
    operator.turn(world, ledger.report(0, profiles))
    world.settle()
    turn_minutes = max(1, round(setting.turn_s / MINUTE_S))
    for minute in range(setting.demand.minutes):
        if minute % DAY_MINUTES == 0 and minute:
            profiles = _build_profiles(setting, minute)
        woken = minute % turn_minutes == 0
        while True:
            if woken:
                before = ledger.carried()
                operator.turn(world, ledger.report(minute, profiles))
                ledger.note_orders(before)
            woken = world.advance((minute + 1) * MINUTE_S, ledger.serve)
            if not woken:
                break
        if on_progress is not None and minute % 60 == 0:
            on_progress(minute / setting.demand.minutes)
    return ledger.finish(operator.name)


Profiles = Mapping[str, tuple[tuple[float, ...], float]]
"""Usual rates and their period, by service and by class."""


def _build_profiles(setting: VirtualSetting, minute: int) -> Profiles:
    """Return the profiles that whoever watched until now would have."""
    demand = setting.demand
    per_step = round(_PROFILE_STEP_S / MINUTE_S)
    known = demand.history + minute
    steps = known // per_step
    start_s = EPOCH_S + (minute - steps * per_step) * MINUTE_S
    rows = dict(zip(demand.services, demand.counts, strict=True))
    for service in setting.problem.graph_services:
        for klass, row in zip(service.classes, demand.classes[service.name], strict=True):
            rows[name_class(service.name, klass.name)] = row
    found: dict[str, tuple[tuple[float, ...], float]] = {}
    for name, row in rows.items():
        if steps < DAY_S / _PROFILE_STEP_S:
            found[name] = ((), DAY_S)
            continue
        used = row[known - steps * per_step : known].reshape(steps, per_step)
        rates = used.sum(axis=1) / _PROFILE_STEP_S
        found[name] = build_profile(rates, _PROFILE_STEP_S, start_s)
    return found
