"""Recording of a gateway's history: every ten seconds what models were asked and how busy machines are.

It is written and read by one thread beside the loop. Where a Prometheus is named nothing is written: it has
read the same from `/metrics`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prometheus_client.core import Metric

from atoll.core.errors import InputError
from atoll.core.paths import state_dir
from atoll.runtime.gateway.console.shown_machines import ShownLoad, ShownMachine, list_machines
from atoll.runtime.gateway.console.snapshot import MachinePrices
from atoll.runtime.gateway.console.view import GatewayView
from atoll.runtime.gateway.prometheus_history import PrometheusHistory
from atoll.runtime.pool.member import Member
from atoll.telemetry.history import (
    LEVELS,
    HistoryChange,
    HistoryStore,
    HistoryTable,
    Kind,
    MachineSums,
    ModelSums,
)
from atoll.telemetry.metrics import make_counter, make_gauge

_STEP_S = float(LEVELS[0].step_s)
_MAX_CHANGES = 100
"""Of one step: more are of a fleet that comes up or goes down, and the last ones say that."""
_CHANGES = {
    "added": "machine {} joined",
    "removed": "machine {} left",
    "down": "machine {} is down",
    "up": "machine {} is up",
    "drained": "machine {} was drained",
    "returned": "machine {} was taken back",
}


def describe_change(event: str, member: Member) -> str | None:
    """Return a change of a backend in words, by the name that it has on pages; None: none that is noted."""
    text = _CHANGES.get(event)
    return None if text is None else text.format(member.backend.metadata.get("node", member.name))


class HistoryRecorder:
    """See the module."""

    def __init__(self, view: GatewayView) -> None:
        self._view = view
        self._next_s = view.loop.time() + _STEP_S
        self._since_s = view.loop.time()
        self._routes: object = view.pool.routes
        self._changes: list[str] = []
        self._store: HistoryStore | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._writing: asyncio.Future[None] | None = None
        self.totals: dict[str, ModelSums] = {}
        """What models were asked since the gateway started, by model: what Prometheus reads."""
        self._machines: tuple[ShownMachine, ...] = ()
        self._prometheus = PrometheusHistory.of(view.settings.history)

    @property
    def is_kept(self) -> bool:
        """Whether anybody keeps the history."""
        return self._view.settings.history != ""

    def follow(self, event: str, member: Member) -> None:
        """Note a change of a backend (`pool.listeners`)."""
        text = describe_change(event, member)
        if text is not None and len(self._changes) < _MAX_CHANGES:
            self._changes.append(text)

    def tick(self, now_s: float) -> None:
        """Record the step that is over, if one is."""
        if now_s < self._next_s or not self.is_kept:
            return
        seconds = now_s - self._since_s
        self._next_s, self._since_s = now_s + _STEP_S, now_s
        view = self._view
        self._machines = machines = list_machines(view)
        models = self._sum_models(machines, now_s, seconds)
        for name, sums in models.items():
            before = self.totals.get(name)
            grown = sums if before is None else map(float.__add__, _floats(before), _floats(sums))
            self.totals[name] = ModelSums(*grown)
        if view.pool.routes is not self._routes:
            self._routes = view.pool.routes
            self._changes.append("another plan is in force")
        if self._prometheus is not None or (self._writing and not self._writing.done()):
            return
        changes, self._changes = self._changes, []
        # Processes behind a backend are as busy as that, as far as is known here.
        shown = {
            m.name: sum_machine(m, seconds)
            for m in machines
            if m.role != "hub" and (m.can_drain or m.load != ShownLoad())
        }
        self._writing = self._do(lambda: self._write(time.time(), models, shown, changes))

    def _sum_models(
        self, machines: tuple[ShownMachine, ...], now_s: float, seconds: float
    ) -> dict[str, ModelSums]:
        view = self._view
        told = () if view.pool.routes is None else view.pool.routes.models
        found = {name: ModelSums(seconds) for name in (*view.pool.rings, *told)}
        found |= {
            name: ModelSums(seconds, *sums) for name, sums in view.traffic.take(now_s).items()
        }
        tokens = {name: s.input_tokens + s.output_tokens for name, s in found.items()}
        costs = MachinePrices(machines).split(tokens)
        return {
            name: sums._replace(usd=costs.get(name, 0.0) * seconds / 3600.0)
            for name, sums in found.items()
        }

    def _do(self, work: Callable[[], None]) -> asyncio.Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="history")
        return self._view.loop.run_in_executor(self._thread, work)

    def _open(self) -> HistoryStore:
        if self._store is None:
            self._store = HistoryStore(
                find_path(
                    self._view.settings.history,
                    # One file for each process.
                    0 if self._view.settings.share_port else self._view.settings.port,
                )
            )
        return self._store

    def _write(
        self,
        at_s: float,
        models: Mapping[str, ModelSums],
        machines: Mapping[str, MachineSums],
        changes: Iterable[str],
    ) -> None:
        try:
            self._open().add(at_s, models, machines, changes)
        except (InputError, sqlite3.Error) as error:
            # What is asked and answered does not wait for a disk.
            self._view.log.event("history.failed", error=str(error))

    async def read(
        self, kind: Kind, since_s: float, until_s: float, points: int
    ) -> tuple[HistoryTable, list[HistoryChange]]:
        """Return the curves of models or machines, and what changed."""
        if self._prometheus is not None:
            return await self._prometheus.read(kind, since_s, until_s, points), []
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="history")
        read = lambda: (  # noqa: E731
            self._open().read(kind, since_s, until_s, points),
            self._open().changes(since_s, until_s),
        )
        return await self._view.loop.run_in_executor(self._thread, read)

    def close(self) -> None:
        """Let go of the file when what is being written is there."""
        if self._thread is not None:
            if self._store is not None:
                self._thread.submit(self._store.close)
            self._thread.shutdown(wait=False)

    def series(self) -> Iterator[Metric]:
        """Return what a Prometheus must have read to know the history."""
        for name, help_text, field in _COUNTERS:
            rows = [((model,), getattr(sums, field)) for model, sums in self.totals.items()]
            yield make_counter(name, help_text, ("model",), rows)
        for figure, help_text in _GAUGES:
            rows = [
                ((m.name,), float(value))
                for m in self._machines
                if (value := read_figure(m, figure)) is not None
            ]
            yield make_gauge(f"atoll_machine_{figure}", help_text, ("machine",), rows)


_COUNTERS = (
    ("atoll_model_requests_total", "Requests that came.", "requests"),
    ("atoll_model_input_tokens_total", "Tokens of prompts that were answered.", "input_tokens"),
    ("atoll_model_output_tokens_total", "Tokens of answers.", "output_tokens"),
    ("atoll_model_streams_total", "Streams whose first token was timed.", "firsts"),
    ("atoll_model_first_token_seconds_total", "Their seconds to it.", "first_sum_s"),
    ("atoll_model_further_tokens_total", "Their further tokens.", "rest_tokens"),
    ("atoll_model_further_seconds_total", "The seconds of those.", "rest_sum_s"),
    ("atoll_model_judged_total", "Requests that had a promise and ended.", "judged"),
    ("atoll_model_kept_total", "Those that kept it.", "kept"),
    ("atoll_model_usd_total", "What the model's machines cost, in US dollars.", "usd"),
)
_GAUGES = (
    ("running", "Requests running on a machine."),
    ("load", "Share of the requests that it takes at once."),
    ("kv_share", "Share of its KV cache in use."),
    ("gpu_share", "Share of the time that its GPUs compute."),
    ("memory_share", "Share of the memory of its GPUs in use."),
)


def find_path(setting: str | None, port: int) -> Path | None:
    """Return the file of a gateway's history: the one that is named, else one by its port; None: memory.

    A gateway on any free port has no history that somebody would look for again.
    """
    if setting:
        return Path(setting)
    return state_dir() / "history" / f"gateway-{port}.db" if port else None


def read_figure(machine: ShownMachine, figure: str) -> float | None:
    """Return a figure of a machine as it is now, None where nobody says."""
    load = machine.load
    if figure == "load":
        return None if not load.capacity else min(1.0, load.running / load.capacity)
    found: float | None = getattr(load, figure)
    return found


def sum_machine(machine: ShownMachine, seconds: float) -> MachineSums:
    """Return how busy a machine is as sums over so many seconds."""
    pairs: list[float] = []
    for figure in ("load", "kv_share", "gpu_share", "memory_share"):
        value = read_figure(machine, figure)
        pairs += (0.0, 0.0) if value is None else (seconds, value * seconds)
    return MachineSums(seconds, machine.load.running * seconds, *pairs)


def _floats(sums: ModelSums) -> list[float]:
    return [float(value) for value in sums]
