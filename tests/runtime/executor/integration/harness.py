"""Executors with toy components: in this loop, or as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.components.base import LoadedComponent, Setup
from atoll.runtime.executor.executor_client import ExecutorClient
from atoll.runtime.executor.executor_config import ExecutorConfig
from atoll.runtime.executor.executor_server import DoorLimits, ExecutorServer
from atoll.runtime.executor.nixl_wire import NixlWire
from atoll.runtime.executor.store import ArrayStore
from atoll.runtime.executor.workers import make_worker

ROOT = Path(__file__).parents[4]
TOKEN = "0123456789abcdef"
TOYS = "tests.runtime.executor.toys"
_PATIENCE_S = 60.0


@dataclass
class Running:
    """An executor in this loop."""

    server: ExecutorServer
    store: ArrayStore
    address: str

    async def connect(self, holder: str = "tester", wire: NixlWire | None = None) -> ExecutorClient:
        client = ExecutorClient(self.address, TOKEN, holder, wire=wire)
        await client.connect()
        return client


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    *components: type[LoadedComponent],
    name: str = "e1",
    max_waiting: int = 64,
    limits: DoorLimits | None = None,
    store_bytes: int = 64 * 2**20,
    clock: Callable[[], float] = time.monotonic,
    wire: NixlWire | None = None,
) -> AsyncIterator[Running]:
    """Run an executor in this loop."""
    store = ArrayStore(folder / name, store_bytes, owner=name, clock=clock)
    threads = ThreadPoolExecutor(4)
    workers = {
        kind.name: make_worker(kind.name, kind.load(Setup()), max_waiting, threads)
        for kind in components
    }
    server = ExecutorServer(name, TOKEN, store, workers, limits, wire=wire)
    for worker in workers.values():
        await worker.start()
    host, port = await server.start("127.0.0.1", 0)
    try:
        yield Running(server, store, f"{host}:{port}")
    finally:
        await server.close()
        for worker in workers.values():
            await worker.close()
        threads.shutdown()
        store.close()


@dataclass
class Process:
    """An executor as a process."""

    popen: subprocess.Popen[bytes]
    config: ExecutorConfig
    folder: Path

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.folder / "ready").read_text())
        return report

    @property
    def address(self) -> str:
        return str(self.report["address"])

    @property
    def health(self) -> str:
        return f"http://{self.report['health']}"

    def files(self) -> list[Path]:
        """Arrays in its store."""
        return list(Path(self.config.store).glob("*"))

    def wait_until_ready(self) -> None:
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError, ValueError):
                if self.report["pid"] == self.popen.pid:
                    return
            assert self.popen.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.01)
        raise AssertionError("not ready in time")

    def rss_bytes(self) -> int:
        """Memory that it has in use now."""
        pages = Path(f"/proc/{self.popen.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def launch(folder: Path, components: Mapping[str, Mapping[str, Any]], **changes: Any) -> Process:
    """Start an executor; it is not ready yet."""
    (folder / "token").write_text(TOKEN + "\n")
    config = ExecutorConfig(
        **{
            "name": "e1",
            "components": {f"{TOYS}:{name}": dict(o) for name, o in components.items()},
            "address": "127.0.0.1:0",
            "health_port": 0,
            "store": str(folder / "store"),
            "token_file": str(folder / "token"),
            "ready_file": str(folder / "ready"),
            "drain_s": 20.0,
            **changes,
        }
    )
    path = folder / "config.json"
    path.write_text(config.to_json())
    with (folder / "log").open("ab") as log:
        popen = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "atoll.runtime.executor.executor_process",
                "--config",
                str(path),
            ],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            stdout=log,
            stderr=log,
        )
    return Process(popen, config, folder)


@contextlib.contextmanager
def process(
    folder: Path, components: Mapping[str, Mapping[str, Any]], **changes: Any
) -> Iterator[Process]:
    """Run an executor as a process, ready to be asked."""
    started = launch(folder, components, **changes)
    try:
        started.wait_until_ready()
        yield started
    finally:
        if started.popen.poll() is None:
            started.popen.send_signal(signal.SIGKILL)
        started.popen.wait()
