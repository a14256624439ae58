"""What a hop between executors costs: time a call, and bytes a second through shared memory.

A hop is a call whose input and whose output is a 1 MB handle, of a component that does nothing. Counted: the
message there and back, the input mapped, the output copied into the store, the batch and its thread. Not
counted: what the caller does before and after (putting the input, giving up both). The executor is a process
of its own, on loopback; both ends run the event loop they run when they serve. `cpu_ms_per_hop` is CPU time
of both processes, all that the executor does included.

Bytes are counted from an array of 32 MiB in one process to its sum in another: copied into a store by the
one, named over a pipe, mapped and added up by the other, every byte read. Files are used again, as always
in a store; the first two rounds, which make them, are not counted. `cpu_s_per_gb_shm` is CPU time of both
processes. Neither the store nor a reader on the same host sums bytes up (`atoll.runtime.executor.arrays`).

CPU time is given beside the time that passed, since it tells less of what else the machine does.
"""

from __future__ import annotations

import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar, Self

import msgspec
import numpy as np

from atoll.components.base import BatchComponent, Inputs, Output, Setup
from atoll.runtime.executor.arrays import open_handle
from atoll.runtime.executor.executor_client import ExecutorClient
from atoll.runtime.executor.executor_config import ExecutorConfig
from atoll.runtime.executor.store import ArrayStore, default_store_root, remove_stale_stores
from atoll.runtime.http.program import run
from atoll.tasks.values import Handle
from benchmarks.process_cpu import read_cpu_s, running, wait_until

HANDLE_BYTES = 2**20
HOPS = 1000
WARM_UP = 50
BULK_BYTES = 32 * 2**20
BULK_ROUNDS = 40
_BULK_WARM_UP = 2
STORE_BYTES = 512 * 2**20
_READY_S = 60.0


class DoNothing(BatchComponent):
    """Gives back the array it got."""

    name: ClassVar[str] = "do-nothing"

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Load nothing."""
        del setup
        return cls()

    def example(self) -> Inputs:
        """Return nothing."""
        return {}

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output]:
        """Return the inputs."""
        return [dict(inputs) for inputs in batch]


@contextmanager
def run_executor(folder: Path, component: str) -> Iterator[tuple[str, str, int]]:
    """Run an executor of one component in a process; yields its address, its token and its process."""
    token = secrets.token_hex(16)
    (folder / "token").write_text(token, encoding="ascii")
    store = default_store_root(folder, STORE_BYTES) / f"atoll-hops-{secrets.token_hex(8)}"
    config = ExecutorConfig(
        name="hops",
        components={component: {}},
        address="127.0.0.1:0",
        health_port=0,
        store=str(store),
        store_bytes=STORE_BYTES,
        token_file=str(folder / "token"),
        ready_file=str(folder / "ready"),
        log_level="WARNING",
    )
    path = folder / "executor.json"
    path.write_text(config.to_json(), encoding="utf-8")
    module = "atoll.runtime.executor.executor_process"
    with running([sys.executable, "-m", module, "--config", str(path)]) as process:
        wait_until((folder / "ready").exists, _READY_S, "the executor", process)
        report = json.loads((folder / "ready").read_text(encoding="utf-8"))
        yield report["address"], token, process.pid


async def _hop(address: str, token: str, store: ArrayStore, hops: int) -> tuple[list[float], float]:
    """Return how long each of some calls took, in seconds, and CPU seconds of the caller for all of them."""
    client = ExecutorClient(address, token, "benchmark")
    await client.connect()
    (component,) = client.components
    seconds = []
    busy_s = 0.0
    numbers = np.arange(HANDLE_BYTES // 4, dtype=np.float32)
    try:
        for _ in range(hops + WARM_UP):
            given = store.put(numbers, "benchmark", 60.0)
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            finished = await client.call(component, {"array": given})
            seconds.append(time.perf_counter() - began_s)
            busy_s += time.process_time() - began_cpu_s
            await client.release([finished.value["array"]])
            store.release([given.id], "benchmark")
    finally:
        await client.close()
    return seconds[WARM_UP:], busy_s


def _run_hops(address: str, token: str, store: ArrayStore, hops: int) -> tuple[list[float], float]:
    found: list[tuple[list[float], float]] = []

    async def main() -> None:
        found.append(await _hop(address, token, store, hops))

    run(main())
    return found[0]


def _consume(pipe: Connection) -> None:
    """Add up every array that is named, and answer with the sum."""
    while data := pipe.recv_bytes():
        handle = msgspec.msgpack.decode(data, type=Handle)
        pipe.send_bytes(msgspec.msgpack.encode(int(open_handle(handle).sum())))


def _move(store: ArrayStore) -> tuple[float, float]:
    """Return bytes a second from an array here to its sum in another process, the median; CPU s per GB."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    consumer = context.Process(target=_consume, args=(theirs,))
    consumer.start()
    rates = []
    busy_s = before_s = 0.0
    try:
        for number in range(BULK_ROUNDS):
            numbers = np.arange(BULK_BYTES // 8, dtype=np.int64) + np.int64(number)
            if number == _BULK_WARM_UP:
                busy_s, before_s = 0.0, read_cpu_s([consumer.pid or 0])
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            handle = store.put(numbers, "consumer", 60.0)
            ours.send_bytes(msgspec.msgpack.encode(handle))
            total = msgspec.msgpack.decode(ours.recv_bytes())
            rates.append(BULK_BYTES / (time.perf_counter() - began_s))
            busy_s += time.process_time() - began_cpu_s
            assert total == int(numbers.sum())
            store.release([handle.id], "consumer")
        busy_s += read_cpu_s([consumer.pid or 0]) - before_s
    finally:
        ours.send_bytes(b"")
        consumer.join(30.0)
    gigabytes = (BULK_ROUNDS - _BULK_WARM_UP) * BULK_BYTES / 1e9
    return statistics.median(rates[_BULK_WARM_UP:]), busy_s / gigabytes


def measure_hops(hops: int = HOPS) -> dict[str, float]:
    """Return `overhead_ms_per_hop` (median), its 99th percentile, and `bytes_per_s_shm`, with CPU times."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = default_store_root(folder, STORE_BYTES)
        remove_stale_stores(root)
        place = root / f"atoll-hops-{secrets.token_hex(8)}"
        store = ArrayStore(place, STORE_BYTES, owner="benchmark")
        try:
            with run_executor(folder, "benchmarks.any_to_any.task_hops:DoNothing") as (
                address,
                token,
                pid,
            ):
                before_s = read_cpu_s([pid])
                seconds, busy_s = _run_hops(address, token, store, hops)
                busy_s += read_cpu_s([pid]) - before_s
            seconds.sort()
            rate, bulk_cpu_s = _move(store)
        finally:
            store.close()
    return {
        "overhead_ms_per_hop": round(1e3 * statistics.median(seconds), 3),
        "overhead_ms_per_hop_p99": round(1e3 * seconds[int(0.99 * len(seconds))], 3),
        "cpu_ms_per_hop": round(1e3 * busy_s / (hops + WARM_UP), 3),
        "bytes_per_s_shm": round(rate),
        "cpu_s_per_gb_shm": round(bulk_cpu_s, 3),
    }
