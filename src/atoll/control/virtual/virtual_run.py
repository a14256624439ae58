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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.control.decision.control_view import DAY_S, PromiseSeen, TrafficSeen, TrafficWindow
from atoll.control.decision.forecast import build_profile
from atoll.control.decision.lane_capacity import ROUNDING, CarriedLoad
from atoll.control.operation.control_loop import TrafficReport
from atoll.control.virtual.fluid import FluidQueue, KeptCurve
from atoll.control.virtual.fluid_calibration import open_queue
from atoll.control.virtual.market import MarketSeries
from atoll.control.virtual.virtual_demand import DAY_MINUTES, MINUTE_S, DemandSeries
from atoll.control.virtual.world import EPOCH_S, VirtualWorld, WorldSettings
from atoll.plan.problem import Problem
from atoll.plan.startup import StartupTimes

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
class OperationResult:
    """Cost and kept promises of a fleet operated for a while.

    `short_s` and `below_demand_s` are summed over services; see the module's text. `events` counts what
    happened to machines.
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
        """By how many points the worst service keeps more than it shall."""
        kept = self.kept_by_service.values()
        return min(100.0 * (share - own) for share, own in zip(kept, self.targets, strict=True))


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


class _Ledger:
    """Lets requests flow through what is ready, and writes down what becomes of them."""

    def __init__(self, setting: VirtualSetting, world: VirtualWorld) -> None:
        self.setting, self.world = setting, world
        problem, demand = setting.problem, setting.demand
        self.names = tuple(service.name for service in problem.services)
        self._mixed = frozenset(self.names)
        self._queues: list[FluidQueue] = [
            open_queue(service, setting.curves.get(service.name, KeptCurve()))
            for service in problem.services
        ]
        shape = (len(self.names), demand.minutes)
        self.arrived, self.kept = np.zeros(shape), np.zeros(shape)
        self.late, self.lost, self.capacity = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.usd = np.zeros(demand.minutes)
        self._rates = [
            [float(x) / MINUTE_S for x in row[demand.history :]] for row in demand.counts
        ]
        # What is asked is a rate: counts of some minutes tell it to within chance.
        counted_s = _SEEN_MINUTES * MINUTE_S
        smooth = demand.smooth(_SEEN_MINUTES)
        least = smooth - 2.0 * np.sqrt(np.maximum(smooth, 0.0) / counted_s)
        self._asked = [row.tolist() for row in least]
        self._version = -1
        self._carried: list[float] = [0.0] * len(self.names)
        self._short = [_Shortage() for _ in self.names]
        law = setting.machines
        # Known once half of the minutes around have passed, seen and ordered within a turn, then up.
        known_s = 0.5 * _SEEN_MINUTES * MINUTE_S
        startup_s = setting.startup.longest_s if law.startup_s is None else law.startup_s
        self._grace_s = known_s + setting.turn_s + startup_s * (1.0 + law.startup_spread)

    def serve(self, seconds: float) -> None:
        """Let a stretch pass in which nothing changes; it lies within a minute."""
        minute = min(int(self.world.elapsed_s // MINUTE_S + 1e-9), self.arrived.shape[1] - 1)
        self._look()
        self.usd[minute] += self.world.usd_per_hour() * seconds / MINUTE_S
        for at, queue in enumerate(self._queues):
            came = self._rates[at][minute] * seconds
            carried = self._carried[at]
            served = queue.serve(came, seconds, carried)
            self.arrived[at, minute] += came
            self.kept[at, minute] += served.kept
            self.late[at, minute] += served.late
            self.lost[at, minute] += served.lost
            self.capacity[at, minute] += carried * seconds / MINUTE_S
            self._note_short(at, carried < self._asked[at][minute] * (1.0 - ROUNDING), seconds)

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
        minute = min(int(self.world.elapsed_s // MINUTE_S + 1e-9), self.arrived.shape[1] - 1)
        for at, name in enumerate(self.names):
            carried = load.of_service(name)[name]
            asked = self.setting.demand.rate_before(at, minute, _SEEN_MINUTES)
            if carried < min(before[at], asked) * (1.0 - ROUNDING):
                self._short[at].own = True

    def carried(self) -> list[float]:
        """Return the requests/s that each service carries now."""
        self._look()
        return list(self._carried)

    def _look(self) -> None:
        if self._version != self.world.version:
            self._version = self.world.version
            load = CarriedLoad(self.setting.problem, self._mixed, self.world.ready())
            before, self._carried = self._carried, [load.of_service(n)[n] for n in self.names]
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

    def report(self, minute: int, profiles: list[tuple[tuple[float, ...], float]]) -> TrafficReport:
        """Return what gateways would say at the start of a minute."""
        demand = self.setting.demand
        traffic, promises = [], []
        for at, service in enumerate(self.setting.problem.services):
            last, five, hour = (
                TrafficWindow(demand.rate_before(at, minute, n)) for n in (1, _SEEN_MINUTES, 60)
            )
            traffic.append(TrafficSeen(service.name, last, five, hour, *profiles[at]))
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
        )


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


def _build_profiles(setting: VirtualSetting, minute: int) -> list[tuple[tuple[float, ...], float]]:
    """Return the profiles that whoever watched until now would have."""
    demand = setting.demand
    per_step = round(_PROFILE_STEP_S / MINUTE_S)
    known = demand.history + minute
    steps = known // per_step
    start_s = EPOCH_S + (minute - steps * per_step) * MINUTE_S
    found: list[tuple[tuple[float, ...], float]] = []
    for row in demand.counts:
        if steps < DAY_S / _PROFILE_STEP_S:
            found.append(((), DAY_S))
            continue
        used = row[known - steps * per_step : known].reshape(steps, per_step)
        rates = used.sum(axis=1) / _PROFILE_STEP_S
        found.append(build_profile(rates, _PROFILE_STEP_S, start_s))
    return found
