"""What the tunnel costs: delay a token, time to the first, tokens a second, beside plain HTTP.

All ways lead to the same engine on loopback, which gives every stream a token each step and writes into
it when: `direct`, through a lean HTTP `proxy`, and (`tunnel`) through a fabric with certificates as users run
it: `atoll gateway`, a hub and `atoll join`, each its own process. They take turns in short rounds, so that
whatever else runs on the machine meets all of them alike; the median round of each counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import uvloop

from atoll.fabric.identity.authority import Authority
from atoll.runtime.http.listen_address import free_ports
from benchmarks.process_cpu import listens, running, wait_until
from benchmarks.report import ROOT, Figure, finish, options
from benchmarks.serving.fake_engine import MODEL
from benchmarks.serving.gateway import at, request_bytes
from benchmarks.serving.gateway_peers import Proxy

STREAMS = (1, 16, 64)
TOKENS = 100
STEP_MS = 5.0
_STAMP = re.compile(rb'"t":(\d{16})')
_START_S = 120.0
_MEMBERS = (("join", "worker"), ("gateway", "gateway"))


class Client(asyncio.Protocol):
    """Asks for `count` streams, one after the other, and notes how old each token is."""

    def __init__(self, request: bytes, count: int) -> None:
        self.request = request
        self.left = count
        self.delays_s: list[float] = []
        self.first_s: list[float] = []
        self.done = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport
        self._carry = b""
        self._sent_s = 0.0
        self._first = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._ask()

    def _ask(self) -> None:
        self._first = True
        self._carry = b""
        self._sent_s = time.monotonic()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now_us = time.monotonic_ns() // 1000
        data = self._carry + data
        end = 0
        for match in _STAMP.finditer(data):
            if self._first:
                self._first = False
                self.first_s.append(now_us / 1e6 - self._sent_s)
            self.delays_s.append((now_us - int(match[1])) / 1e6)
            end = match.end()
        self._carry = data[max(end, len(data) - 32) :]
        if data.endswith(b"0\r\n\r\n"):
            self.left -= 1
            if self.left:
                self._ask()
            elif not self.done.done():
                self.done.set_result(None)
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("closed before the end"))


@dataclass
class Round:
    """What one round over one way took."""

    p50_ms: float
    p99_ms: float
    first_ms: float
    tokens_per_s: float
    cpu_us: dict[str, float] = field(repr=False)
    """CPU a token, microseconds, of each process on the way."""


@dataclass
class Way:
    """A way to the engine, and the processes on it."""

    name: str
    port: int
    parts: list[Proxy]


async def load(way: Way, streams: int, count: int) -> Round:
    """Run so many streams at once, each `count` times."""
    loop = asyncio.get_running_loop()
    raw = request_bytes(stream=True)
    before, start_s = [part.cpu_s() for part in way.parts], time.perf_counter()
    made = [
        (await loop.create_connection(lambda: Client(raw, count), "127.0.0.1", way.port))[1]
        for _ in range(streams)
    ]
    await asyncio.wait_for(asyncio.gather(*(c.done for c in made)), 120)
    took_s = time.perf_counter() - start_s
    delays = sorted(d for c in made for d in c.delays_s)
    if len(delays) != streams * count * TOKENS:
        raise RuntimeError(f"{way.name} lost tokens: {len(delays)}")
    cpu = {
        part.name: (part.cpu_s() - was) / len(delays) * 1e6
        for part, was in zip(way.parts, before, strict=True)
    }
    first = sorted(s for c in made for s in c.first_s)
    return Round(
        at(delays, 0.5) * 1e3,
        at(delays, 0.99) * 1e3,
        at(first, 0.5) * 1e3,
        len(delays) / took_s,
        cpu,
    )


async def measure(ways: list[Way], rounds: int) -> dict[tuple[str, int], list[Round]]:
    """Let the ways take turns."""
    results: dict[tuple[str, int], list[Round]] = {}
    for number in range(rounds + 1):
        for streams in STREAMS:
            for way in ways:
                done = await load(way, streams, 2 if streams > 1 else 4)
                if number:  # the first round warms up
                    results.setdefault((way.name, streams), []).append(done)
    return results


class Starter:
    """Starts processes and ends them all."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def start(self, name: str, *command: str, port: int | None) -> Proxy:
        """Start a process, and wait until it listens."""
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        started = running([sys.executable, "-m", *command], log=log, cwd=ROOT)
        process = self._stack.enter_context(started)
        if port is not None:
            wait_until(lambda: listens(port), _START_S, name, process)
        return Proxy(name, port or 0, process)


def _knows_model(gateway: Proxy) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{gateway.port}/v1/models") as answer:
        return MODEL in answer.read().decode()


def ways_to(folder: Path, stack: contextlib.ExitStack) -> list[Way]:
    """Start everything."""
    starter, parts = Starter(folder, stack), "benchmarks.federation.tunnel_parts"
    hub_port, port, proxy_port, gateway_port = free_ports(4)
    engine = starter.start(
        "engine", parts, "engine", f"--port={port}", f"--tokens={TOKENS}", f"--step-ms={STEP_MS}",
        port=port,
    )  # fmt: skip
    to_engine = f"--engine={port}"
    proxy = starter.start(
        "proxy", parts, "proxy", f"--port={proxy_port}", to_engine, port=proxy_port
    )
    authority = Authority.create(folder / "fabric", "bench", [f"127.0.0.1:{hub_port}"])
    token = f"@{folder / 'fabric' / 'hub-h0.token'}"
    hub = starter.start(
        "hub", "atoll", "hub", token, f"--listen=127.0.0.1:{hub_port}",
        port=hub_port,
    )  # fmt: skip
    for name, role in _MEMBERS:
        (folder / name).write_text(authority.issue(name, "bench", role).pack())
    join = starter.start(
        "join", "atoll", "join", f"--fabric=@{folder / 'join'}", f"--url=http://127.0.0.1:{port}",
        "--name=node", port=None,
    )  # fmt: skip
    gateway = starter.start(
        "gateway", "atoll", "gateway", f"--fabric=@{folder / 'gateway'}", f"--port={gateway_port}",
        "--open", port=gateway_port,
    )  # fmt: skip
    wait_until(lambda: _knows_model(gateway), _START_S, "the node behind the gateway")
    return [
        Way("direct", engine.port, [engine]),
        Way("proxy", proxy.port, [engine, proxy]),
        Way("tunnel", gateway.port, [engine, gateway, hub, join]),
    ]


def main() -> None:
    """Start everything, measure, compare."""
    arguments = options(__doc__ or "")
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        try:
            ways = ways_to(Path(temporary), stack)
            results = uvloop.run(measure(ways, 5 if arguments.quick else 15))
        except (RuntimeError, OSError):
            for log in Path(temporary).glob("*.log"):
                print(f"{log.name}: {log.read_text()[-1000:]}")
            raise
    report(results)


def report(results: dict[tuple[str, int], list[Round]]) -> None:
    """Print a table and the figures."""
    print(
        f"\n  {'way':8s} {'streams':>7s} {'p50 ms':>8s} {'p99 ms':>8s} {'first ms':>9s}"
        f" {'tokens/s':>9s}  CPU us/token"
    )

    def median(name: str, streams: int, value: Callable[[Round], float]) -> float:
        return statistics.median(value(r) for r in results[name, streams])

    for (name, streams), rounds in results.items():
        cpu = " ".join(
            f"{part} {statistics.median(r.cpu_us[part] for r in rounds):.0f}"
            for part in rounds[0].cpu_us
        )
        print(
            f"  {name:8s} {streams:7d} {median(name, streams, lambda r: r.p50_ms):8.2f}"
            f" {median(name, streams, lambda r: r.p99_ms):8.2f}"
            f" {median(name, streams, lambda r: r.first_ms):9.2f}"
            f" {median(name, streams, lambda r: r.tokens_per_s):9.0f}  {cpu}"
        )

    def p50(name: str, streams: int) -> float:
        return median(name, streams, lambda r: r.p50_ms)

    def rate(name: str) -> float:
        return median(name, 64, lambda r: r.tokens_per_s)

    finish(
        [
            Figure("added_ms_per_token_p50_c16", p50("tunnel", 16) - p50("direct", 16), 1.5),
            Figure(
                "tokens_ratio_vs_direct_c64",
                rate("tunnel") / rate("direct"),
                0.8,
                f"of {64e3 / STEP_MS:.0f} tokens/s the engine gives",
                at_least=True,
            ),
            Figure("added_ms_per_token_p50_c1", p50("tunnel", 1) - p50("direct", 1)),
            Figure("added_ms_per_token_p50_c64", p50("tunnel", 64) - p50("direct", 64)),
            Figure("added_ms_per_token_p50_c16_proxy", p50("proxy", 16) - p50("direct", 16)),
            Figure("tokens_ratio_vs_direct_c64_proxy", rate("proxy") / rate("direct")),
            Figure("first_ms_p50_c1", median("tunnel", 1, lambda r: r.first_ms)),
            Figure("first_ms_p50_c64", median("tunnel", 64, lambda r: r.first_ms)),
        ],
    )


if __name__ == "__main__":
    main()
