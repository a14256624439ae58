"""A gateway as its pages see it, made of its parts, under a clock of the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from atoll.runtime.gateway.budgets import BudgetWatch
from atoll.runtime.gateway.chooser import BackendChooser
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.gateway.traffic_tally import TrafficTally
from atoll.runtime.pool.member import Backend, Member
from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.logs import Log, SilentLog

Json = dict[str, Any]


@dataclass
class Timer:
    """What is to be called at a time, unless it is cancelled."""

    at_s: float
    call: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Clock:
    """A loop that does nothing but tell the time and call what is due."""

    now_s: float = 1000.0
    timers: list[Timer] = field(default_factory=list)

    def time(self) -> float:
        return self.now_s

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(self.now_s + seconds, call)
        self.timers.append(timer)
        return timer

    @property
    def waiting(self) -> int:
        return sum(not timer.cancelled for timer in self.timers)

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        until_s = self.now_s + seconds
        while due := [t for t in self.timers if not t.cancelled and t.at_s <= until_s]:
            timer = min(due, key=lambda t: t.at_s)
            self.timers.remove(timer)
            self.now_s = timer.at_s
            timer.call()
        self.now_s = until_s


class KeptLog:
    """Keeps what was logged."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Json]] = []

    def event(self, event: str, /, **fields: object) -> None:
        self.events.append((event, fields))

    def flush(self) -> None:
        pass


@dataclass
class Stats:
    """Accounts, as far as they say how they fare."""

    figures: Json

    def stats(self) -> Json:
        return self.figures


@dataclass
class Nodes:
    """A fabric, as far as it is shown."""

    nodes: list[Json] = field(default_factory=list)
    hubs: list[Json] = field(default_factory=list)
    changes: int = 0

    def snapshot(self) -> Json:
        return {"nodes": self.nodes, "hubs": self.hubs}


@dataclass
class Asked:
    """A request that runs."""

    model: str


@dataclass
class View:
    """A gateway of parts."""

    pool: BackendPool = field(default_factory=BackendPool)
    settings: GatewaySettings = field(default_factory=GatewaySettings)
    clock: Clock = field(default_factory=Clock)
    log: Log = field(default_factory=SilentLog)
    accounts: Stats | None = None
    federation: Nodes | None = None
    relays: list[Asked] = field(default_factory=list)
    connections: list[object] = field(default_factory=list)
    draining: bool = False
    started_s: float = 1_700_000_000.0

    def __post_init__(self) -> None:
        self.loop = cast("asyncio.AbstractEventLoop", self.clock)
        self.chooser = BackendChooser(self.pool, None, self.settings)
        self.chooser.configure(self.settings)
        self.budgets = BudgetWatch(lambda: self.settings.budgets, None, self.log)
        self.traffic = TrafficTally(self.pool, self.chooser, self.clock.now_s)

    def add(self, name: str, *models: str, **more: Any) -> Member:
        return self.pool.add(
            Backend(id=name, url="http://127.0.0.1:1", models=models or ("m",), **more)
        )


def node(sid: str, name: str, **more: Any) -> Json:
    """A node as a fabric describes it."""
    return {
        "sid": sid,
        "name": name,
        "provider": "ETH",
        "role": "worker",
        "region": "eu-west-1",
        "site": "lab",
        "hardware": {
            "gpus": [{"type": "A100", "count": 2, "memory_bytes": 85899345920}],
            "cpu": "",
            "cpus": 32,
            "memory_bytes": 270_000_000_000,
        },
        "engine": "vllm",
        "engine_version": "0.32",
        "services": [service("m")],
        "max_inflight": None,
        "price_usd_per_hour": None,
        "stability": "standard",
        "ends_s": None,
        "labels": {},
        "state": "serving",
        "alive": True,
        "verified": True,
        "for_s": 10.0,
        "load": None,
        "unused_because": None,
    } | more


def service(model: str, layers: list[int] | None = None) -> Json:
    return {"model": model, "precision": "fp8", "context": 32768, "layers": layers}
