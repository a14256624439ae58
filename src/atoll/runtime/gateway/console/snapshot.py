"""How a gateway stands, in one page: one pass over its models and members, whoever asks how often.

What does not change with every request (machines, models, prices) is made anew only when it changed, which
`version` says to those who watch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import msgspec

from atoll.runtime.gateway.console.alarms import Alarm, AlarmBoard
from atoll.runtime.gateway.console.shown_machines import (
    ShownMachine,
    ShownPipeline,
    count_machines,
    find_pipelines,
    list_machines,
)
from atoll.runtime.gateway.console.shown_models import ShownModel, list_models, show_promise
from atoll.runtime.gateway.console.view import GatewayView
from atoll.runtime.gateway.traffic_tally import ModelLook
from atoll.telemetry.traffic_page import WindowSums

_FRESH_S = 1.0
"""A page that is younger is shown again: many may ask at once."""
_HOUR_S = 3600.0
_MTOKEN = 1e6


class JudgedRequests(msgspec.Struct, frozen=True):
    """Requests that had a promise, and those of them for which it was kept."""

    judged: int = 0
    kept: int = 0


class SnapshotModel(msgspec.Struct, frozen=True):
    """A model and its traffic: rates of the last minute, times of the last five, in seconds."""

    name: str
    backends: int
    up: int
    running: int
    requests_per_s: float = 0.0
    input_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    first_token_s: float | None = None
    token_s: float | None = None
    usd_per_mtoken: float | None = None
    promise: dict[str, float] | None = None
    now: JudgedRequests = JudgedRequests()
    day: JudgedRequests = JudgedRequests()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway stands, at a Unix time."""

    time_s: float
    status: Literal["draining", "serving"]
    uptime_s: float
    running: int
    connections: int
    version: int
    """Rises when models or machines changed."""
    backends_up: int
    backends: int
    machines_up: int
    machines: int
    usd_per_hour: float | None
    models: list[SnapshotModel]
    alarms: list[Alarm]


class ModelsPage(msgspec.Struct, frozen=True):
    """All models with who serves them."""

    version: int
    models: tuple[ShownModel, ...]


class MachinesPage(msgspec.Struct, frozen=True):
    """All machines, and the pipelines over them."""

    version: int
    machines: tuple[ShownMachine, ...]
    pipelines: tuple[ShownPipeline, ...]


class CachedPage:
    """A page as bytes, good for a while and as long as the version stays."""

    def __init__(self) -> None:
        self._body = b""
        self._version = -1
        self._made_s = 0.0

    def find(self, version: int, now_s: float) -> bytes | None:
        """Return the page if it is still good."""
        fresh = version == self._version and 0.0 <= now_s - self._made_s < _FRESH_S
        return self._body if fresh else None

    def keep(self, body: bytes, version: int, now_s: float) -> bytes:
        """Keep a page, and return it."""
        self._body, self._version, self._made_s = body, version, now_s
        return body


class MachinePrices:
    """Prices of machines per hour (USD), and for which models."""

    def __init__(self, machines: tuple[ShownMachine, ...]) -> None:
        self._priced = [
            (machine.usd_per_hour, tuple({service.model for service in machine.services}))
            for machine in machines
            if machine.usd_per_hour is not None and machine.state != "left"
        ]
        self.usd_per_hour = sum(usd for usd, _ in self._priced) if self._priced else None

    def split(self, tokens: Mapping[str, float]) -> dict[str, float]:
        """Return what each model costs an hour; a machine of several is shared by their tokens."""
        costs: dict[str, float] = {}
        for usd, models in self._priced:
            total = sum(tokens.get(model, 0.0) for model in models)
            for model in models:
                share = tokens.get(model, 0.0) / total if total else 1.0 / len(models)
                costs[model] = costs.get(model, 0.0) + usd * share
        return costs


class GatewaySnapshots:
    """Makes the pages of a gateway: the snapshot, its models, its machines."""

    def __init__(self, view: GatewayView) -> None:
        self._view = view
        self._alarms = AlarmBoard()
        # Over a restart it goes on rising, so that a page that stayed open asks again.
        self._version = int(view.started_s)
        self._seen: tuple[object, ...] | None = None
        self._prices = MachinePrices(())
        self._count = (0, 0)
        self._snapshot, self._machines, self._models = CachedPage(), CachedPage(), CachedPage()
        self.made = 0
        """Snapshots that were made."""

    def check_version(self) -> int:
        """Return a number that rises when models or machines changed."""
        view = self._view
        pool, fabric = view.pool, view.federation
        seen = (
            pool.routes,
            view.settings.aliases,
            view.chooser.choice_table.by_name,
            None if fabric is None else fabric.changes,
            *(
                (m.backend, m.facts, m.well, m.outlier.ejected_until_s is None)
                for m in pool.members.values()
            ),
            # What is drained, and whether something still runs there.
            *((m.name, m.inflight > 0) for m in pool.members.values() if m.drained),
        )
        if seen != self._seen:
            if self._seen is not None:
                self._version += 1
            self._seen = seen
            machines = list_machines(view)
            self._prices = MachinePrices(machines)
            self._count = count_machines(machines)
        return self._version

    def snapshot(self) -> bytes:
        """Return the snapshot as JSON on one line, a second old at most."""
        version, now_s = self.check_version(), self._view.loop.time()
        known = self._snapshot.find(version, now_s)
        return known or self._snapshot.keep(self._make(version, now_s), version, now_s)

    def models(self) -> bytes:
        """Return the models as JSON."""
        version, now_s = self.check_version(), self._view.loop.time()
        known = self._models.find(version, now_s)
        if known is not None:
            return known
        models = list_models(self._view, list_machines(self._view), now_s)
        body = msgspec.json.encode(ModelsPage(version, models))
        return self._models.keep(body, version, now_s)

    def machines(self) -> bytes:
        """Return the machines and the pipelines over them as JSON."""
        version, now_s = self.check_version(), self._view.loop.time()
        known = self._machines.find(version, now_s)
        if known is not None:
            return known
        machines = list_machines(self._view)
        shown = MachinesPage(version, machines, find_pipelines(machines))
        return self._machines.keep(msgspec.json.encode(shown), version, now_s)

    def _make(self, version: int, now_s: float) -> bytes:
        self.made += 1
        view = self._view
        pool = view.pool
        told = () if pool.routes is None else pool.routes.models
        names = dict.fromkeys((*pool.rings, *told))
        looks = {name: view.traffic.look(name, now_s) for name in names}
        tokens = {
            name: look.traffic.hour.input_sum + look.traffic.hour.output_sum
            for name, look in looks.items()
            if look is not None
        }
        costs = self._prices.split(tokens)
        running = Counter(relay.model for relay in view.relays)
        return msgspec.json.encode(
            Snapshot(
                time_s=round(time.time(), 3),
                status="draining" if view.draining else "serving",
                uptime_s=round(time.time() - view.started_s, 1),
                running=len(view.relays),
                connections=len(view.connections),
                version=version,
                backends_up=sum(m.serves for m in pool.members.values()),
                backends=len(pool.members),
                machines_up=self._count[0],
                machines=self._count[1],
                usd_per_hour=_round(self._prices.usd_per_hour),
                models=[
                    self._show_model(name, look, running[name], costs.get(name))
                    for name, look in looks.items()
                ],
                alarms=self._alarms.look(view, looks),
            )
        )

    def _show_model(
        self, name: str, look: ModelLook | None, running: int, usd_per_hour: float | None
    ) -> SnapshotModel:
        ring = self._view.pool.rings.get(name)
        members = [] if ring is None else ring.members
        up = sum(member.serves for member in members)
        if look is None:
            return SnapshotModel(name, len(members), up, running)
        minute, recent, hour = look.traffic.minute, look.traffic.five_minutes, look.traffic.hour
        return SnapshotModel(
            name,
            len(members),
            up,
            running,
            requests_per_s=_round(minute.arrivals / minute.seconds) or 0.0,
            input_tokens_per_s=_round(minute.input_sum / minute.seconds) or 0.0,
            output_tokens_per_s=_round(minute.output_sum / minute.seconds) or 0.0,
            first_token_s=_round(_ratio(recent.first_sum_s, recent.firsts)),
            token_s=_round(_ratio(recent.rest_sum_s, recent.rest_tokens)),
            usd_per_mtoken=_usd_per_mtoken(usd_per_hour, hour),
            promise=show_promise(look.promise),
            now=JudgedRequests(recent.judged, recent.kept),
            day=JudgedRequests(look.judged_day, look.kept_day),
        )


def _usd_per_mtoken(usd_per_hour: float | None, hour: WindowSums) -> float | None:
    tokens = hour.input_sum + hour.output_sum
    if usd_per_hour is None or not tokens:
        return None
    return _round(usd_per_hour * hour.seconds / _HOUR_S / tokens * _MTOKEN)


def _ratio(total: float, count: int) -> float | None:
    return total / count if count else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
