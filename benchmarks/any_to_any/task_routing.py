"""Cost of asking for queues: graph servers that assign paths against those that ask before every invocation.

A request is a chain of four invocations over two components, each of which two executors run. Graph servers
with either way of routing, processes of their own, stand before the same executors and take turns: a few
seconds each, again and again, so that what else the machine does meets them alike. Clients ask again as
soon as they are answered, and there are enough of them that some invocation always waits (a closed loop at
saturation).

Two kinds of work:

- cpu: an invocation takes a fixed CPU time. Cores are what is scarce, and graph servers use them, too.
- device: an invocation waits for a fixed time, as for a device of the executor's own. Executors are scarce.

Of slow graph servers each question for a queue is answered late, as where a control plane far away is
asked: by as many milliseconds as their names say. They ask all executors at once, so a hand-over is late by
that once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from atoll.components.base import BatchComponent, Inputs, Output, Setup
from atoll.core.files import read_text_limited
from atoll.runtime.executor.executor_config import ExecutorConfig
from atoll.runtime.executor.executor_process import read_token
from atoll.runtime.executor.store import default_store_root
from atoll.runtime.graph_server.executor_links import ExecutorLinks
from atoll.runtime.graph_server.graph_config import ExecutorAddress, GraphServerConfig, GraphService
from atoll.runtime.graph_server.graph_server import TaskGraphServer
from atoll.runtime.http.http_client import FetchError, request
from atoll.runtime.http.listen_address import free_ports
from atoll.tasks.library.shapes import EmbeddingOrder, Embeddings
from atoll.tasks.task import Task, UnitTask
from benchmarks.process_cpu import read_cpu_s

HERE = "benchmarks.any_to_any.task_routing"
CPU_S = 0.002
DEVICE_S = 0.01
STEPS = 4
COPIES = 2
CLIENTS = 16
BLOCK_S = 2.0
REPEATS = 5
_STORE_BYTES = 16 * 2**20
_READY_S = 60.0


@dataclass(frozen=True, slots=True)
class ServerKind:
    """How a graph server routes, and how late questions for queues are answered, in seconds."""

    dynamic: bool = False
    late_s: float = 0.0

    @property
    def module(self) -> str:
        """What is run."""
        return HERE if self.late_s else "atoll.runtime.graph_server.graph_server_process"


SERVERS = {
    "static": ServerKind(),
    "dynamic": ServerKind(dynamic=True),
    "dynamic-20ms": ServerKind(dynamic=True, late_s=0.02),
    "dynamic-100ms": ServerKind(dynamic=True, late_s=0.1),
}


class FixedWork(BatchComponent):
    """Takes a fixed time for each invocation; gives a small vector."""

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
        for _ in batch:
            self._work()
        return [{"embedding": np.zeros(4, np.float32), "tokens": 1} for _ in batch]

    def _work(self) -> None:
        until_s = time.thread_time() + CPU_S
        numbers = np.ones(512, np.float32)
        while time.thread_time() < until_s:
            numbers = numbers * np.float32(0.5)


class FirstCpu(FixedWork):
    """The first component, on a core."""

    name: ClassVar[str] = "first-cpu"


class SecondCpu(FixedWork):
    """The second component, on a core."""

    name: ClassVar[str] = "second-cpu"


class FirstDevice(FixedWork):
    """The first component, on a device of its own."""

    name: ClassVar[str] = "first-device"

    def _work(self) -> None:
        time.sleep(DEVICE_S)


class SecondDevice(FirstDevice):
    """The second component, on a device of its own."""

    name: ClassVar[str] = "second-device"


class WorkChain(Task[EmbeddingOrder, Embeddings]):
    """The two components in turn, each on what the one before gave."""

    def setup(self) -> None:
        """Name the components of the kind of work that the options say."""
        kind = str(self.options["kind"])
        self.units = [UnitTask(f"{HERE}:{place}{kind.title()}") for place in ("First", "Second")]

    def invoke(self, request: EmbeddingOrder) -> Embeddings:
        """Return what the last of the chain gives."""
        found: Any = {"tokens": 0}
        for step in range(STEPS):
            found = self.units[step % 2](text=request.texts[0], before=found["tokens"])
        return Embeddings([found["embedding"]], 1)


class SlowLinks(ExecutorLinks):
    """Executors that take their time to say how long their queues are, `late_s` seconds."""

    late_s = 0.0

    async def queue(self, executor: str, component: str) -> int:
        """Ask, late."""
        await asyncio.sleep(self.late_s)
        return await super().queue(executor, component)


async def _serve_slowly(config: GraphServerConfig) -> None:
    token = read_token(config.token_file)
    links = SlowLinks(config.executors, token, config.name)
    links.late_s = SERVERS[config.name].late_s
    links.start()
    server = TaskGraphServer(config, token, links)
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.close(1.0)
    await links.close()


@contextmanager
def _process(module: str, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", module, "--config", str(path)])
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class RoutingBench:
    """Executors, and graph servers before all of them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._store = default_store_root(folder, 8 * _STORE_BYTES) / f"atoll-r-{folder.name}"
        self._store.mkdir(mode=0o700, parents=True, exist_ok=True)
        stack.callback(_remove, self._store)
        self._token = folder / "token"
        self._token.write_text(secrets.token_hex(16), encoding="ascii")
        self.executors: list[ExecutorAddress] = []
        self.pids: list[int] = []
        self.urls: dict[str, str] = {}
        self.server_pids: dict[str, int] = {}

    def start_executors(self) -> None:
        """Start as many executors of each component as there are copies."""
        ready = []
        for place in ("First", "Second"):
            for copy in range(COPIES):
                name = f"{place.lower()}-{copy}"
                address = f"127.0.0.1:{free_ports(1)[0]}"
                components = tuple(f"{HERE}:{place}{kind}" for kind in ("Cpu", "Device"))
                ready.append(self._folder / f"{name}.ready")
                config = ExecutorConfig(
                    name=name,
                    components={each: {} for each in components},
                    address=address,
                    health_port=0,
                    store=str(self._store / name),
                    store_bytes=_STORE_BYTES,
                    token_file=str(self._token),
                    ready_file=str(ready[-1]),
                    drain_s=1.0,
                    log_level="WARNING",
                )
                path = self._folder / f"{name}.json"
                path.write_text(config.to_json(), encoding="utf-8")
                process = self._stack.enter_context(
                    _process("atoll.runtime.executor.executor_process", path)
                )
                self.pids.append(process.pid)
                self.executors.append(
                    ExecutorAddress(id=name, address=address, components=components)
                )
        until_s = time.monotonic() + _READY_S
        while not all(path.exists() for path in ready):
            if time.monotonic() > until_s:
                raise RuntimeError("an executor did not start")
            time.sleep(0.05)

    async def start_server(self, name: str, kind: ServerKind) -> None:
        """Start a graph server, and wait until it answers."""
        (port,) = free_ports(1)
        config = GraphServerConfig(
            name=name,
            port=port,
            services=tuple(
                GraphService(
                    name=work, tasks={"embeddings": f"{HERE}:WorkChain"}, options={"kind": work}
                )
                for work in ("cpu", "device")
            ),
            executors=tuple(self.executors),
            store=str(self._store / name),
            store_bytes=_STORE_BYTES,
            token_file=str(self._token),
            routing="dynamic" if kind.dynamic else "static",
            log_level="WARNING",
        )
        path = self._folder / f"{name}.json"
        path.write_text(config.to_json(), encoding="utf-8")
        self.server_pids[name] = self._stack.enter_context(_process(kind.module, path)).pid
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

    async def load(self, server: str, kind: str, seconds: float, clients: int) -> dict[str, float]:
        """Let clients ask for so long; return requests/s, and CPU milliseconds per request."""
        url = f"{self.urls[server]}/v1/embeddings"
        body = {"model": kind, "input": "a", "encoding_format": "base64"}
        ends: list[float] = []
        pids = [*self.pids, self.server_pids[server]]
        began_s, cpu_s = time.perf_counter(), read_cpu_s(pids)
        server_s = read_cpu_s([self.server_pids[server]])
        until_s = began_s + seconds

        async def ask() -> None:
            while time.perf_counter() < until_s:
                answer = await request(url, body=body, timeout_s=30.0)
                if answer.status != 200:
                    raise RuntimeError(f"{server}: {answer.status} {answer.body[:200]!r}")
                ends.append(time.perf_counter())

        await asyncio.gather(*(ask() for _ in range(clients)))
        took_s = max(ends) - began_s
        return {
            "per_s": len(ends) / took_s,
            "cpu_ms": 1e3 * (read_cpu_s(pids) - cpu_s) / len(ends),
            "server_cpu_ms": 1e3 * (read_cpu_s([self.server_pids[server]]) - server_s) / len(ends),
        }


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


async def _measure(repeats: int, block_s: float) -> dict[str, dict[str, list[dict[str, float]]]]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        bench = RoutingBench(Path(name), stack)
        bench.start_executors()
        for server, routing in SERVERS.items():
            await bench.start_server(server, routing)
        found: dict[str, dict[str, list[dict[str, float]]]] = {}
        for kind in ("cpu", "device"):
            by_server = found[kind] = {server: [] for server in SERVERS}
            for server in SERVERS:
                await bench.load(server, kind, min(0.5, block_s), CLIENTS)
            for repeat in range(repeats):
                # Each repeat begins with another one, so that none always follows the same.
                first = repeat % len(SERVERS)
                order = [*SERVERS][first:] + [*SERVERS][:first]
                for server in order:
                    by_server[server].append(await bench.load(server, kind, block_s, CLIENTS))
        return found


def measure_routing(repeats: int = REPEATS, block_s: float = BLOCK_S) -> dict[str, Any]:
    """Return throughput by kind of work and server, and ratios of static over dynamic, with their spread."""
    measured = asyncio.run(_measure(repeats, block_s))
    found: dict[str, Any] = {}
    for kind, by_server in measured.items():
        rows: dict[str, Any] = {}
        for server, blocks in by_server.items():
            rows[server] = {
                key: round(statistics.median(block[key] for block in blocks), 3)
                for key in blocks[0]
            }
        for server in [*SERVERS][1:]:
            ratios = [
                static["per_s"] / other["per_s"]
                for static, other in zip(by_server["static"], by_server[server], strict=True)
            ]
            rows[f"static_vs_{server}"] = {
                "median": round(statistics.median(ratios), 3),
                "least": round(min(ratios), 3),
                "most": round(max(ratios), 3),
            }
        found[kind] = rows
    return found | {
        "clients": CLIENTS,
        "executors": 2 * COPIES,
        "invocations_per_request": STEPS,
        "repeats": repeats,
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Be a graph server whose questions are answered late; without a configuration, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path)
    path: Path | None = parser.parse_args().config
    if path is None:
        print(json.dumps(measure_routing(), indent=2))
        return
    config = GraphServerConfig.from_json(read_text_limited(path), path=path)
    logging.basicConfig(level=config.log_level)
    asyncio.run(_serve_slowly(config))


if __name__ == "__main__":
    main()
