"""Many connections and streams at gateways of one address: 50,000 idle and 5,000 that stream, on one machine.

Four gateways share a port. Idle connections ask for the list of models once and are kept; streams get a
token every two seconds, with the time at which it was sent, from an engine that does nothing else. Engine and
clients are processes of their own; clients come from several loopback addresses, as one has 28,000 ports. At
the end a tenth of the idle connections asks again. Memory is what gateways and kernel take more than before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import uvloop

from atoll.runtime.http.listen_address import free_ports
from benchmarks.process_cpu import read_cpu_s, running, wait_until
from benchmarks.report import ROOT

GATEWAYS = 4
IDLE, ACTIVE = 50_000, 5_000
IDLE_CLIENTS, ACTIVE_CLIENTS = 4, 2
PACE_S = 2.0
TOKENS = 24
SPREAD_S = 10.0
"""Over which streams begin."""
_WHEEL = 40
_AT_ONCE = 256
"""Connections that one client opens at a time."""
_REST_S = 10.0
_WAIT_S = 600.0
_STAMP = re.compile(rb'"content":" ([0-9.]+)"')
_ASK = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
_BODY = json.dumps(
    {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
).encode()
_STREAM = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % len(_BODY)
) + _BODY
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _chunk(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    data = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    event = f"data: {json.dumps(data | {'choices': [choice]}, separators=(',', ':'))}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


# The engine


class Stream(asyncio.Protocol):
    """A connection of a gateway to the engine, and the stream on it."""

    def __init__(self, wheel: list[set[Stream]], tokens: int) -> None:
        self._wheel, self._tokens = wheel, tokens
        self._spoke: set[Stream] = set()
        self._buffer = b""
        self.left = 0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._spoke.discard(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._buffer.endswith(_BODY[-8:]):
            return
        self._buffer = b""
        self.transport.write(_HEAD + _chunk({"role": "assistant", "content": ""}))
        self.left = self._tokens
        self._spoke = min(self._wheel, key=len)
        self._spoke.add(self)


async def serve_engine(tokens: int) -> None:
    """Give every stream a token each `PACE_S`, a part of them at a time."""
    wheel: list[set[Stream]] = [set() for _ in range(_WHEEL)]
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stream(wheel, tokens), "127.0.0.1", 0, backlog=4096)
    _say(port=server.sockets[0].getsockname()[1])
    begun_s, turn = loop.time(), 0
    while True:
        turn += 1
        await asyncio.sleep(max(0.0, begun_s + turn * PACE_S / _WHEEL - loop.time()))
        spoke = wheel[turn % _WHEEL]
        for stream in list(spoke):
            if stream.left:
                stream.left -= 1
                stream.transport.write(_chunk({"content": f" {time.monotonic():.6f}"}))
            else:
                stream.transport.write(_chunk({}, "length") + _LAST)
                spoke.discard(stream)


# Clients


class Asker(asyncio.Protocol):
    """A connection that asks for something small when told, and stays."""

    def __init__(self, lost: list[int]) -> None:
        self._lost = lost
        self._answered: asyncio.Future[bool] | None = None
        self._got = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._lost[0] += 1
        self._settle(False)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, found, body = self._got.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: ([0-9]+)", head)
        if found and length is not None and len(body) >= int(length[1]):
            self._settle(self._got.startswith(b"HTTP/1.1 200"))
            self._got = b""

    def _settle(self, fine: bool) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(fine)

    async def ask(self) -> bool:
        self._answered = asyncio.get_running_loop().create_future()
        self.transport.write(_ASK)
        fine = await self._answered
        self._answered = None
        return fine


class Reader(asyncio.Protocol):
    """A stream, and how late its tokens are."""

    def __init__(self, delays: list[float], tokens: int) -> None:
        self._delays, self._tokens = delays, tokens
        self._seen = 0
        self._tail = b""
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(_STREAM)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if not self.done.done():
            self.done.set_result(False)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        data = self._tail + data
        at = 0
        for found in _STAMP.finditer(data):
            self._delays.append(now_s - float(found[1]))
            self._seen += 1
            at = found.end()
        self._tail = data[max(at, len(data) - 64) :]
        if b"[DONE]" in data and not self.done.done():
            self.done.set_result(self._seen == self._tokens)


async def hold_idle(port: int, count: int, address: str) -> None:
    """Open connections, keep them, and have a tenth ask again when told."""
    loop, lost, slots = asyncio.get_running_loop(), [0], asyncio.Semaphore(_AT_ONCE)
    held: list[Asker] = []

    async def open_one() -> bool:
        async with slots:
            try:
                _, asker = await loop.create_connection(
                    lambda: Asker(lost), "127.0.0.1", port, local_addr=(address, 0)
                )
            except OSError:
                return False
            held.append(asker)
            return await asker.ask()

    async def again(asker: Asker) -> bool:
        async with slots:
            return await asker.ask()

    _say(well=sum(await asyncio.gather(*(open_one() for _ in range(count)))))
    await _told()
    fine = await asyncio.gather(*(again(asker) for asker in held[::10]))
    _say(well=sum(fine), asked=len(fine), lost=lost[0])
    await _told()


async def read_streams(port: int, count: int, address: str, tokens: int) -> None:
    """Read streams that begin spread over some time."""
    loop = asyncio.get_running_loop()
    delays: list[float] = []
    readers: list[Reader] = []

    async def one(number: int) -> bool:
        await asyncio.sleep(SPREAD_S * number / count)
        try:
            _, reader = await loop.create_connection(
                lambda: Reader(delays, tokens), "127.0.0.1", port, local_addr=(address, 0)
            )
        except OSError:
            return False
        readers.append(reader)
        return await reader.done

    running = asyncio.gather(*(one(number) for number in range(count)))
    await asyncio.sleep(SPREAD_S)
    while len(readers) < count and not running.done():
        await asyncio.sleep(0.2)
    at_once = sum(not reader.done.done() for reader in readers)
    fine = await running
    delays.sort()
    _say(well=sum(fine), at_once=at_once, delays=delays[:: max(1, len(delays) // 2000)])
    await _told()


def _say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def _told() -> None:
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


# What measures


class Helper:
    """A process of this module, and what it says."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving.scale_streams", *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a helper of the benchmark has ended")
        said: dict[str, Any] = json.loads(line)
        return said

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def started_gateways(folder: Path, count: int, backend: str) -> Iterator[tuple[int, list[int]]]:
    """Run gateways at one address; gives the port and their process ids."""
    (port,) = free_ports(1)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    patient = dict.fromkeys(("header_s", "first_token_s", "between_tokens_s", "retry_s"), 300.0)
    settings = {
        "port": port,
        "share_port": True,
        "access_log": False,
        "history": "",
        "health": {"enabled": False},
        "limits": {"connections": min(files, 60_000), "requests": 10_000},
        "deadlines": patient | {"idle_s": 3600.0, "client_s": 300.0, "connect_s": 60.0},
        "backends": [{"id": "e", "url": backend, "models": ["m"], "kind": "vllm"}],
    }
    config = folder / "gateway.json"
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "atoll.runtime.gateway", "--config", str(config)]
    with contextlib.ExitStack() as stack:
        started = []
        for number in range(count):
            log = stack.enter_context((folder / f"log{number}").open("wb"))
            started.append(stack.enter_context(running(command, log=log, cwd=ROOT)))
        logs = [folder / f"log{number}" for number in range(count)]
        wait_until(
            lambda: all("gateway.start" in log.read_text() for log in logs), _WAIT_S, "a gateway"
        )
        yield port, [process.pid for process in started]


def _memory_kb(pids: list[int]) -> float:
    """Return what processes have in memory, in KB."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") / 1000


def _kernel_kb() -> float:
    """Return what the kernel has in buffers of TCP, in KB; of the whole machine."""
    text = Path("/proc/net/sockstat").read_text()
    found = re.search(r"^TCP:.* mem (\d+)", text, re.MULTILINE)
    return 0.0 if found is None else int(found[1]) * os.sysconf("SC_PAGE_SIZE") / 1000


def _share(of: list[float], share: float) -> float | None:
    return 1000 * of[min(len(of) - 1, int(share * len(of)))] if of else None


def measure(idle: int, active: int, gateways: int, tokens: int) -> dict[str, float | None]:
    """Run it all; return the figures."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:

        def start(*words: object) -> Helper:
            helper = Helper(*map(str, words))
            stack.callback(helper.process.wait)
            stack.callback(helper.process.kill)
            return helper

        engine = start("engine", "--tokens", tokens)
        url = f"http://127.0.0.1:{engine.hear()['port']}"
        port, pids = stack.enter_context(started_gateways(Path(name), gateways, url))
        before_kb, kernel_kb = _memory_kb(pids), _kernel_kb()
        holders = [
            start("idle", "--port", port, "--count", n, "--address", f"127.0.0.{2 + at}")
            for at, n in enumerate(_split(idle, IDLE_CLIENTS))
        ]
        opened = sum(holder.hear()["well"] for holder in holders)
        idle_kb, idle_kernel_kb = _memory_kb(pids), _kernel_kb()
        cpu_s = read_cpu_s(pids)
        time.sleep(_REST_S)
        rest_cores = (read_cpu_s(pids) - cpu_s) / _REST_S
        cpu_s = read_cpu_s(pids)
        readers = [
            start(
                *("active", "--port", port, "--count", n, "--tokens", tokens),
                *("--address", f"127.0.1.{2 + at}"),
            )
            for at, n in enumerate(_split(active, ACTIVE_CLIENTS))
        ]
        time.sleep(SPREAD_S + PACE_S * tokens / 2)
        busy_kb = _memory_kb(pids)
        read = [reader.hear() for reader in readers]
        active_cpu_s = read_cpu_s(pids) - cpu_s
        for holder in holders:
            holder.go_on()
        kept = [holder.hear() for holder in holders]
    delays = sorted(delay for one in read for delay in one["delays"])
    well = sum(one["well"] for one in read)
    failed = (idle - opened) + (active - well) + sum(one["asked"] - one["well"] for one in kept)
    return {
        "streams_active": float(well if sum(one["at_once"] for one in read) >= well else 0),
        "streams_idle": float(opened - sum(one["lost"] for one in kept)),
        "streams_errors": float(failed + sum(one["lost"] for one in kept)),
        "streams_idle_kb": (idle_kb - before_kb) / max(1, opened),
        "streams_idle_kernel_kb": (idle_kernel_kb - kernel_kb) / max(1, opened),
        "streams_active_kb": (busy_kb - idle_kb) / max(1, active),
        "streams_idle_cores": rest_cores,
        "streams_delay_ms_p50": _share(delays, 0.5),
        "streams_delay_ms_p99": _share(delays, 0.99),
        "streams_cpu_us_per_token": 1e6 * active_cpu_s / max(1, well * tokens),
        "streams_cpu_s": active_cpu_s,
    }


def _split(count: int, among: int) -> list[int]:
    return [len(range(at, count, among)) for at in range(among)]


_NOTES = {
    "streams_active": "at the same time, to their ends",
    "streams_idle": "kept to the end, all the while",
    "streams_errors": "not opened, cut, incomplete or unanswered",
    "streams_idle_kb": "of a gateway, a connection",
    "streams_idle_kernel_kb": "buffers of TCP on the machine, both ends",
    "streams_active_kb": "of a gateway, a stream with both its connections",
    "streams_idle_cores": "all gateways, while nobody asks",
    "streams_delay_ms_p50": "from engine to client, a token",
    "streams_delay_ms_p99": "client and engine on the same cores",
    "streams_cpu_us_per_token": "all gateways, beginnings and idle ones included",
    "streams_cpu_s": "of all gateways, for the streams",
}


def run(quick: bool) -> dict[str, float | None]:
    """Measure; print the table and return the figures."""
    if quick:
        figures = measure(idle=4000, active=500, gateways=2, tokens=5)
    else:
        figures = measure(IDLE, ACTIVE, GATEWAYS, TOKENS)
    for name, value in figures.items():
        shown = "        -" if value is None else f"{value:10.2f}"
        print(f"  {name:28s} {shown}  {_NOTES[name]}")
    return figures


def main() -> None:
    """Be the engine, or a client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("engine", "idle", "active"))
    for name in ("--port", "--count", "--tokens"):
        parser.add_argument(name, type=int, default=TOKENS)
    parser.add_argument("--address", default="127.0.0.1")
    given = parser.parse_args()
    if given.role == "engine":
        uvloop.run(serve_engine(given.tokens))
    elif given.role == "idle":
        uvloop.run(hold_idle(given.port, given.count, given.address))
    else:
        uvloop.run(read_streams(given.port, given.count, given.address, given.tokens))


if __name__ == "__main__":
    main()
