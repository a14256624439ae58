"""How busy an engine is, by its own figures where it publishes some, else by what came through here."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Mapping

from atoll.engines.table import ENGINES
from atoll.fabric.registry.peers import Load
from atoll.runtime.http.http_client import FetchError, request
from atoll.runtime.join.hardware import GpuUse

_OF = {
    name: figure
    for engine in ENGINES.values()
    for figure, names in engine.metrics.items()
    for name in names
}
"""Figures by the names that engines give them."""
_LINE = re.compile(
    rb"^(%b)(?:\{[^\n]*\})? +(\S+)" % b"|".join(re.escape(name.encode()) for name in _OF),
    re.MULTILINE,
)
_MAX_BYTES = 2 * 2**20
_IDLE_S = 10.0
_GPUS_S = 10.0
"""How often the driver is asked how busy the GPUs are."""
_AGAIN_S = 15.0
"""How often to tell of a load that stays the same: some came later."""
_DEAR = 0.02
"""Share of the time that reading figures may take."""


ReadFigures = Callable[[], Mapping[str, float]]
"""Figures of what this process runs itself, by the names that `read_figures` gives them."""


def read_figures(text: bytes) -> dict[str, float]:
    """Return running, waiting, kv and tokens from Prometheus' text; those an engine does not say are absent.

    Several series of one name (one a model, say) are added; of the cache, the fullest counts.
    """
    figures: dict[str, float] = {}
    for name, number in _LINE.findall(text):
        try:
            value = float(number)
        except ValueError:
            continue
        if not math.isfinite(value) or value < 0:
            continue
        what = _OF[name.decode()]
        if what == "kv":
            figures[what] = max(figures.get(what, 0.0), min(1.0, value))
        else:
            figures[what] = figures.get(what, 0.0) + value
    return figures


class LoadReader:
    """Tells `say` of the load, at most once a second and when it changed, else every 15 seconds.

    An engine is asked every second while it works and every ten while it is idle; more rarely where its
    answer takes long, and never without a `url`. Where this process runs what is offered, `figures` has it.
    `gpu_use` says how busy its GPUs are, and may take its time.
    """

    def __init__(
        self,
        url: str | None,
        inflight: Callable[[], int],
        say: Callable[[Load], None],
        *,
        api_key: str | None = None,
        capacity: int | None = None,
        every_s: float = 1.0,
        figures: ReadFigures | None = None,
        gpu_use: Callable[[], GpuUse | None] = lambda: None,
    ) -> None:
        self._url = None if url is None else f"{url}/metrics"
        self._inflight = inflight
        self._say = say
        self._api_key = api_key
        self._capacity = capacity
        self._every_s = every_s
        self._asked_s = -math.inf
        self._cost_s = 0.0
        self._read_own = figures
        self._read_gpus = gpu_use
        self._gpus: GpuUse | None = None
        self._gpus_s = -math.inf
        self._figures: Mapping[str, float] = {}
        self._tokens: tuple[float, float] | None = None
        self._said: tuple[object, ...] | None = None
        self._said_s = -math.inf

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            await self.step(time.monotonic())
            await asyncio.sleep(self._every_s)

    async def step(self, now_s: float) -> None:
        """Ask the engine if it is time, and tell if there is anything new."""
        inflight = self._inflight()
        busy = inflight or self._figures.get("running") or self._figures.get("waiting")
        pause_s = max(self._every_s * 0.9 if busy else _IDLE_S, self._cost_s / _DEAR)
        if now_s - self._asked_s >= pause_s:
            self._asked_s = now_s
            await self._ask()
        if now_s - self._gpus_s >= _GPUS_S:
            self._gpus_s = now_s
            # The driver may take its time.
            self._gpus = await asyncio.to_thread(self._read_gpus)
            if self._gpus is None:
                # There are none, or nobody who says: that stays so.
                self._gpus_s = math.inf
        self._tell(inflight, now_s)

    async def running(self) -> int | None:
        """Return how many requests the engine says are running or waiting now; None: it does not say."""
        await self._ask()
        if "running" not in self._figures:
            return None
        return int(self._figures["running"] + self._figures.get("waiting", 0))

    async def _ask(self) -> None:
        if self._read_own is not None:
            self._figures = self._read_own()
            return
        if self._url is None:
            return
        begun_s = time.monotonic()
        try:
            answer = await request(
                self._url, timeout_s=2.0, api_key=self._api_key, max_bytes=_MAX_BYTES
            )
            self._figures = read_figures(answer.body) if answer.status == 200 else {}
        except FetchError:
            self._figures = {}
        self._cost_s = time.monotonic() - begun_s

    def _tell(self, inflight: int, now_s: float) -> None:
        figures = self._figures
        # Figures may be older than the last request that came through here.
        running = max(int(figures.get("running", 0)), 0)
        waiting = int(figures.get("waiting", 0))
        running = max(running, inflight - waiting)
        kv = figures.get("kv")
        rate = self._rate(figures.get("tokens"), now_s)
        gpus = self._gpus and GpuUse(*(round(share, 2) for share in self._gpus))
        now = (running, waiting, None if kv is None else round(kv, 2), round(rate, -1), gpus)
        if now == self._said and now_s - self._said_s < _AGAIN_S:
            return
        self._said, self._said_s = now, now_s
        self._say(
            Load(
                running=running,
                waiting=waiting,
                capacity=self._capacity,
                tokens_per_s=rate,
                kv_used=kv,
                at_s=time.time(),
                gpu_used=None if gpus is None else gpus.busy,
                memory_used=None if gpus is None else gpus.memory,
            )
        )

    def _rate(self, tokens: float | None, now_s: float) -> float:
        before, self._tokens = self._tokens, None if tokens is None else (tokens, now_s)
        if before is None or tokens is None or tokens < before[0] or now_s <= before[1]:
            return 0.0
        return round((tokens - before[0]) / (now_s - before[1]), 1)
