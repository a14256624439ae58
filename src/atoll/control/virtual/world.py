"""Machines and instances in virtual time: what targets would show, and what they do with orders.

Nothing sleeps and nothing has a clock of its own: `advance` moves time from event to event. An instance is
ready after its start-up time and ends when its machines fail, are taken back after a notice, or it was told
to. Machines are paid for by the second from the order on until they are free again, at the price of the
moment. All chance comes from one seed, drawn in the order of starts, so that the same orders see the same.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from atoll.control.decision.control_view import ObservedInstance
from atoll.control.decision.decide import (
    ControlAction,
    DrainInstance,
    ReweightRoutes,
    StartInstance,
    StopInstance,
)
from atoll.control.decision.machine_pool import MachinePool
from atoll.control.virtual.market import MarketSeries, RegionOutage
from atoll.core.rng import stream
from atoll.deploy.labels import Labels
from atoll.deploy.target import FailureKind, InstanceState, InstanceStatus
from atoll.plan.plan import Instance, OfferKey, RequestPath, count_machines
from atoll.plan.problem import Offer

_STARTUP_S = 240.0
"""Start-up of instances of which nothing is known."""
HOUR_S = 3600.0
WEEK_S = 604_800.0
EPOCH_S = 2860 * WEEK_S
"""Unix time at which virtual time begins, at the start of a week as profiles count them."""


@dataclass(frozen=True)
class WorldSettings:
    """How machines behave.

    Start-up takes between 1 - `startup_spread` and 1 + `startup_spread` times `startup_s`, None: what the
    world is told that an instance takes. Every node fails
    `failures_per_h` times an hour, every spot node is taken back `preemptions_per_h` times, `notice_s` after
    that was said; so are spot nodes beyond what a market has left. A start fails with chance
    `failed_starts`. An instance that is drained is gone after `drain_s`, and stays listed for `listed_s`.
    """

    startup_s: float | None = None
    startup_spread: float = 0.2
    failures_per_h: float = 0.001
    preemptions_per_h: float = 0.01
    notice_s: float = 120.0
    failed_starts: float = 0.01
    drain_s: float = 60.0
    listed_s: float = 300.0
    outages: tuple[RegionOutage, ...] = ()


@dataclass
class WorldCounts:
    """Counts of events, for reports and tests."""

    starts: int = 0
    failed_starts: int = 0
    refused: int = 0
    failures: int = 0
    preempted: int = 0
    drains: int = 0


@dataclass(order=True)
class _Event:
    time_s: float
    number: int
    kind: str = field(compare=False)
    name: str = field(compare=False)


class VirtualWorld:
    """Instances on a market; `time_s` is Unix time, `elapsed_s` since the start."""

    def __init__(
        self,
        market: MarketSeries,
        settings: WorldSettings | None = None,
        seed: int = 0,
        startup: Callable[[Instance], float] = lambda _instance: _STARTUP_S,
    ) -> None:
        self.market, self.settings = market, settings or WorldSettings()
        self._startup = startup
        self.elapsed_s = 0.0
        self.usd = 0.0
        self.counts = WorldCounts()
        self.version = 0
        """Grows whenever what serves changes."""
        self.paths: tuple[RequestPath, ...] = ()
        """Ways that requests of any-to-any services go."""
        self._observed: dict[str, ObservedInstance] = {}
        self._luck = stream(seed, "virtual world")
        self._events: list[_Event] = []
        self._number = 0
        self._rate: float | None = None
        self._alarm = False
        for outage in self.settings.outages:
            self._plan("outage", outage.region, outage.begin_s)

    @property
    def time_s(self) -> float:
        """Unix time."""
        return EPOCH_S + self.elapsed_s

    @property
    def offers(self) -> tuple[Offer, ...]:
        """Machines on offer now."""
        return self.market.at(self.elapsed_s)

    def observe(self) -> tuple[ObservedInstance, ...]:
        """Return every instance, those that ended a moment ago too."""
        return tuple(self._observed.values())

    def ready(self) -> list[Instance]:
        """Return what serves."""
        return [s.instance for s in self._observed.values() if s.status.state == "ready"]

    def living(self) -> dict[str, ObservedInstance]:
        """Return what starts or serves."""
        return {
            name: seen
            for name, seen in self._observed.items()
            if seen.status.state in ("starting", "ready")
        }

    def has_room(self, instance: Instance) -> bool:
        """Return whether the machines of an instance can be had now."""
        return MachinePool(self.offers, self._holding()).has_room(instance)

    def usd_per_hour(self) -> float:
        """Return what all machines in use cost now."""
        if self._rate is None:
            self._reckon()
        return self._rate or 0.0

    def apply(self, action: ControlAction) -> None:
        """Do what a controller says."""
        match action:
            case StartInstance(instance, labels):
                self.start(instance, labels)
            case DrainInstance(name):
                self.drain(name)
            case StopInstance(name):
                self.stop(name)
            case ReweightRoutes():
                # Those of plain services follow capacity here.
                self.route(action.paths)

    def route(self, paths: Iterable[RequestPath]) -> None:
        """Have requests of any-to-any services go these ways, as far as executors serve."""
        given = tuple(paths)
        if given != self.paths:
            self.paths = given
            self.version += 1

    def start(self, instance: Instance, labels: Labels | None = None) -> None:
        """Order an instance; one that stands already is left as it is."""
        given = labels or _label(instance)
        name = given.instance
        if name in self._observed:
            return
        law = self.settings
        self.counts.starts += 1
        startup, fails, dies, taken = (float(x) for x in self._luck.random(4))
        if not self.has_room(instance):
            self.counts.refused += 1
            self._put(name, given, instance, "failed", _REFUSED, "capacity")
            return
        self._put(name, given, instance, "starting")
        startup_s = self._startup(instance) if law.startup_s is None else law.startup_s
        wait_s = startup_s * (1.0 + law.startup_spread * (2.0 * startup - 1.0))
        if fails < law.failed_starts:
            self._plan("fail", name, 0.5 * wait_s)
            return
        self._plan("ready", name, wait_s)
        nodes = len(instance.nodes)
        spot = sum(node.market == "spot" for node in instance.nodes)
        self._plan("die", name, wait_s + _draw_s(dies, law.failures_per_h * nodes))
        self._plan("notice", name, _draw_s(taken, law.preemptions_per_h * spot))

    def drain(self, name: str) -> None:
        """Have an instance take no new requests and end."""
        seen = self._observed.get(name)
        if seen is not None and seen.status.state in ("starting", "ready"):
            self.counts.drains += 1
            self._turn(name, "draining")
            self._plan("gone", name, self.settings.drain_s)

    def stop(self, name: str) -> None:
        """End an instance now."""
        if name in self._observed and self._observed[name].status.state != "gone":
            self._turn(name, "gone")

    def settle(self) -> None:
        """Have all that starts be ready at once: a fleet that ran before the time that is looked at."""
        for name, seen in list(self._observed.items()):
            if seen.status.state == "starting":
                self._turn(name, "ready")

    def advance(self, until_s: float, serve: Callable[[float], None]) -> bool:
        """Move time to `until_s` after the start, or to when something is lost; return whether it was.

        `serve` is called for every stretch in which nothing changes: it is given its seconds, and sees the
        world as it was during it.
        """
        self._alarm = False
        while not self._alarm:
            event_s = self._events[0].time_s if self._events else math.inf
            change_s = self.market.next_change_s(self.elapsed_s)
            next_s = min(event_s, change_s, until_s)
            if next_s > self.elapsed_s:
                self._charge(next_s - self.elapsed_s)
                serve(next_s - self.elapsed_s)
                self.elapsed_s = next_s
            if change_s <= until_s and change_s == next_s:
                self._rate = None
                self._take_back()
            elif event_s <= until_s:
                self._happen(heapq.heappop(self._events))
            else:
                return False
        return True

    def _happen(self, event: _Event) -> None:
        if event.kind == "outage":
            self._lose_region(event.name)
            return
        seen = self._observed.get(event.name)
        if seen is None:
            return
        state = seen.status.state
        if event.kind == "ready" and state == "starting":
            self._turn(event.name, "ready")
        elif event.kind == "fail" and state == "starting":
            self.counts.failed_starts += 1
            self._alarm = True
            self._turn(event.name, "failed", "it did not come up", "capacity")
        elif event.kind == "die" and state in ("starting", "ready", "draining"):
            self.counts.failures += 1
            self._alarm = True
            self._turn(event.name, "gone", "a machine died", "ended")
        elif event.kind == "notice" and state in ("starting", "ready"):
            self._notify(event.name)
        elif event.kind == "end" and state in ("starting", "ready", "draining"):
            self._turn(event.name, "gone", "its machine was taken back", "ended")
        elif event.kind == "gone" and state == "draining":
            self._turn(event.name, "gone")
        elif event.kind == "forget" and state == "gone":
            del self._observed[event.name]

    def _lose_region(self, region: str) -> None:
        """Have everything die that has a machine in a region."""
        for name, seen in list(self._observed.items()):
            there = any(seen.instance.region_of(node) == region for node in seen.instance.nodes)
            if there and seen.status.state in ("starting", "ready", "draining"):
                self.counts.failures += 1
                self._alarm = True
                self._turn(name, "gone", "its region is out", "ended")

    def _notify(self, name: str) -> None:
        """Say that an instance's machines are taken back."""
        seen = self._observed[name]
        if seen.status.ends_s is None:
            self.counts.preempted += 1
            self._alarm = True
            ends_s = self.time_s + self.settings.notice_s
            status = replace(seen.status, ends_s=ends_s)
            self._observed[name] = replace(seen, status=status)
            self._plan("end", name, self.settings.notice_s)

    def _take_back(self) -> None:
        """Take spot machines back that a market has no more, the latest first."""
        available = {offer.key: offer.available for offer in self.offers if offer.market == "spot"}
        held: dict[OfferKey, list[str]] = {}
        for name, seen in self._observed.items():
            if seen.status.state in ("starting", "ready") and seen.status.ends_s is None:
                for key in count_machines((seen.instance,)):
                    held.setdefault(key, []).append(name)
        for key, names in sorted(held.items()):
            if key not in available:
                continue
            using = count_machines(self._observed[name].instance for name in names)[key]
            for name in reversed(names):
                if using <= available[key]:
                    break
                using -= count_machines((self._observed[name].instance,))[key]
                self._notify(name)

    def _holding(self) -> Iterable[Instance]:
        return (seen.instance for seen in self._observed.values() if _holds(seen.status))

    def _put(
        self,
        name: str,
        labels: Labels,
        instance: Instance,
        state: InstanceState,
        reason: str = "",
        kind: FailureKind | None = None,
    ) -> None:
        status = InstanceStatus(name, labels, state, self.time_s, None, reason, kind)
        self._observed[name] = ObservedInstance(status, instance)
        self._rate = None

    def _turn(
        self, name: str, state: InstanceState, reason: str = "", kind: FailureKind | None = None
    ) -> None:
        seen = self._observed[name]
        if "ready" in (state, seen.status.state):
            self.version += 1
        status = replace(seen.status, state=state, since_s=self.time_s, reason=reason, kind=kind)
        self._observed[name] = replace(seen, status=status)
        self._rate = None
        if state == "gone":
            self._plan("forget", name, self.settings.listed_s)

    def _plan(self, kind: str, name: str, after_s: float) -> None:
        if math.isfinite(after_s):
            self._number += 1
            heapq.heappush(self._events, _Event(self.elapsed_s + after_s, self._number, kind, name))

    def _charge(self, seconds: float) -> None:
        if self._rate is None:
            self._reckon()
        self.usd += (self._rate or 0.0) * seconds / HOUR_S

    def _reckon(self) -> None:
        """Find what machines cost now; a start that was refused holds none."""
        prices = {offer.key: offer.usd_per_hour for offer in self.offers}
        holding = [seen.instance for seen in self._observed.values() if _holds(seen.status)]
        used = sorted(count_machines(holding).items())
        self._rate = sum(prices[key] * number for key, number in used)


_REFUSED = "there is none left"


def _holds(status: InstanceStatus) -> bool:
    """Whether an instance has its machines: until it is gone, unless it never got any."""
    refused = status.state == "failed" and status.reason == _REFUSED
    return status.state != "gone" and not refused


def _draw_s(chance: float, per_h: float) -> float:
    """Return seconds until something that happens so often an hour, by a number between 0 and 1."""
    return math.inf if per_h <= 0.0 else -math.log1p(-chance) * HOUR_S / per_h


def _label(instance: Instance) -> Labels:
    return Labels(
        fleet="virtual",
        instance=instance.id,
        plan="",
        placement="",
        service=instance.service,
        role=instance.role,
    )
