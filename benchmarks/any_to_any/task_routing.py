"""Cost of asking for queues: a graph server that assigns paths against one that asks before every invocation.

A request is a chain of four invocations over two components, each of which two executors run and which takes
a fixed CPU time. Both graph servers, processes of their own, stand before the same executors and take turns:
a few seconds each, again and again, so that what else the machine does meets them alike. Clients ask again
as soon as they are answered, and there are enough of them that some invocation always waits. Cores are what
is scarce, and graph servers use them, too.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from atoll.components.base import BatchComponent, Inputs, Output, Setup
from atoll.runtime.executor.executor_config import ExecutorConfig
from atoll.runtime.executor.store import default_store_root
from atoll.runtime.graph_server.graph_config import ExecutorAddress, GraphServerConfig, GraphService
from atoll.runtime.http.http_client import FetchError, request
from atoll.runtime.http.listen_address import free_ports
from atoll.tasks.library.shapes import EmbeddingOrder, Embeddings
from atoll.tasks.task import Task, UnitTask
from benchmarks.process_cpu import read_cpu_s, running, wait_until

HERE = "benchmarks.any_to_any.task_routing"
SERVERS = ("static", "dynamic")
SERVICE = "chain"
CPU_S = 0.002
STEPS = 4
COPIES = 2
CLIENTS = 16
BLOCK_S = 2.0
REPEATS = 5
_STORE_BYTES = 16 * 2**20
_READY_S = 60.0


class First(BatchComponent):
    """Takes a fixed CPU time for each invocation; gives a small vector."""

    name: ClassVar[str] = "first"
    max_batch: ClassVar[int] = 1

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Load nothing."""
        del setup
        return cls()

    def example(self) -> Inputs:
        """Return a text."""
        return {"text": "a"}

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output]:
        """Work for every invocation."""
        numbers = np.ones(512, np.float32)
        for _ in batch:
            until_s = time.thread_time() + CPU_S
            while time.thread_time() < until_s:
                numbers = numbers * np.float32(0.5)
        return [{"embedding": np.zeros(4, np.float32), "tokens": 1} for _ in batch]


class Second(First):
    """The second component."""

    name: ClassVar[str] = "second"


class WorkChain(Task[EmbeddingOrder, Embeddings]):
    """The two components in turn, each on what the one before gave."""

    def setup(self) -> None:
        """Name the components."""
        self.units = [UnitTask(f"{HERE}:{place}") for place in ("First", "Second")]

    def invoke(self, request: EmbeddingOrder) -> Embeddings:
        """Return what the last of the chain gives."""
        found: Any = {"tokens": 0}
        for step in range(STEPS):
            found = self.units[step % 2](text=request.texts[0], before=found["tokens"])
        return Embeddings([found["embedding"]], 1)


class RoutingBench:
    """Executors, and graph servers before all of them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._store = default_store_root(folder, 8 * _STORE_BYTES) / f"atoll-r-{folder.name}"
        self._store.mkdir(mode=0o700, parents=True, exist_ok=True)
        stack.callback(shutil.rmtree, self._store, ignore_errors=True)
        self._token = folder / "token"
        self._token.write_text(secrets.token_hex(16), encoding="ascii")
        self.executors: list[ExecutorAddress] = []
        self.pids: list[int] = []
        self.urls: dict[str, str] = {}
        self.server_pids: dict[str, int] = {}

    def _start(self, module: str, name: str, config: ExecutorConfig | GraphServerConfig) -> int:
        path = self._folder / f"{name}.json"
        path.write_text(config.to_json(), encoding="utf-8")
        command = [sys.executable, "-m", module, "--config", str(path)]
        return self._stack.enter_context(running(command)).pid

    def start_executors(self) -> None:
        """Start as many executors of each component as there are copies."""
        for place in ("First", "Second"):
            for copy in range(COPIES):
                name = f"{place.lower()}-{copy}"
                address = f"127.0.0.1:{free_ports(1)[0]}"
                ready = self._folder / f"{name}.ready"
                config = ExecutorConfig(
                    name=name,
                    components={f"{HERE}:{place}": {}},
                    address=address,
                    health_port=0,
                    store=str(self._store / name),
                    store_bytes=_STORE_BYTES,
                    token_file=str(self._token),
                    ready_file=str(ready),
                    drain_s=1.0,
                    log_level="WARNING",
                )
                module = "atoll.runtime.executor.executor_process"
                self.pids.append(self._start(module, name, config))
                wait_until(ready.exists, _READY_S, name)
                self.executors.append(
                    ExecutorAddress(id=name, address=address, components=(f"{HERE}:{place}",))
                )

    async def start_server(self, name: str) -> None:
        """Start a graph server that routes so, and wait until it answers."""
        (port,) = free_ports(1)
        config = GraphServerConfig(
            name=name,
            port=port,
            services=(GraphService(name=SERVICE, tasks={"embeddings": f"{HERE}:WorkChain"}),),
            executors=tuple(self.executors),
            store=str(self._store / name),
            store_bytes=_STORE_BYTES,
            token_file=str(self._token),
            routing="dynamic" if name == "dynamic" else "static",
            log_level="WARNING",
        )
        module = "atoll.runtime.graph_server.graph_server_process"
        self.server_pids[name] = self._start(module, name, config)
        self.urls[name] = f"http://127.0.0.1:{port}"
        until_s = time.monotonic() + _READY_S
        while time.monotonic() < until_s:
            try:
                if (await request(f"{self.urls[name]}/health")).status == 200:
                    return
            except FetchError:
                pass
            await asyncio.sleep(0.05)
        raise RuntimeError(f"{name} did not start")

    async def load(self, server: str, seconds: float) -> dict[str, float]:
        """Let clients ask for so long; return requests/s, and CPU milliseconds per request."""
        url = f"{self.urls[server]}/v1/embeddings"
        body = {"model": SERVICE, "input": "a", "encoding_format": "base64"}
        ends: list[float] = []
        own = [self.server_pids[server]]
        began_s, cpu_s, server_s = time.perf_counter(), read_cpu_s(self.pids), read_cpu_s(own)
        until_s = began_s + seconds

        async def ask() -> None:
            while time.perf_counter() < until_s:
                answer = await request(url, body=body, timeout_s=30.0)
                if answer.status != 200:
                    raise RuntimeError(f"{server}: {answer.status} {answer.body[:200]!r}")
                ends.append(time.perf_counter())

        await asyncio.gather(*(ask() for _ in range(CLIENTS)))
        server_s = read_cpu_s(own) - server_s
        return {
            "per_s": len(ends) / (max(ends) - began_s),
            "cpu_ms": 1e3 * (read_cpu_s(self.pids) - cpu_s + server_s) / len(ends),
            "server_cpu_ms": 1e3 * server_s / len(ends),
        }


async def _measure(repeats: int, block_s: float) -> dict[str, list[dict[str, float]]]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        bench = RoutingBench(Path(name), stack)
        bench.start_executors()
        for server in SERVERS:
            await bench.start_server(server)
            await bench.load(server, min(0.5, block_s))
        found: dict[str, list[dict[str, float]]] = {server: [] for server in SERVERS}
        for repeat in range(repeats):
            # Each repeat begins with the other one, so that neither always comes first.
            for server in SERVERS if repeat % 2 else SERVERS[::-1]:
                found[server].append(await bench.load(server, block_s))
        return found


def measure_routing(repeats: int = REPEATS, block_s: float = BLOCK_S) -> dict[str, Any]:
    """Return medians by server, and `static_vs_dynamic`: the ratio of requests/s, with its spread."""
    measured = asyncio.run(_measure(repeats, block_s))
    rows: dict[str, Any] = {
        server: {
            key: round(statistics.median(block[key] for block in blocks), 3) for key in blocks[0]
        }
        for server, blocks in measured.items()
    }
    pairs = zip(measured["static"], measured["dynamic"], strict=True)
    ratios = sorted(static["per_s"] / dynamic["per_s"] for static, dynamic in pairs)
    rows["static_vs_dynamic"] = {
        "median": round(statistics.median(ratios), 3),
        "least": round(ratios[0], 3),
        "most": round(ratios[-1], 3),
    }
    return rows
