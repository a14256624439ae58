"""What the gateway costs: CPU a request and a token, and added latency, beside nginx and LiteLLM.

All stand in front of the same fake engine on loopback, one worker each, and get the same requests from the
same client: 64 connections that ask one request after the other, and 64 streams of 100 tokens. They take
turns in many short rounds, so that whatever else runs on the machine meets all of them alike, and the
median round of each counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.report import Figure, finish, leave_out, options
from benchmarks.serving.fake_engine import MODEL, TEXT
from benchmarks.serving.gateway_peers import (
    KEY,
    Proxy,
    UnavailableError,
    engine,
    gateway,
    litellm,
    nginx,
)

CONNECTIONS = 64
TOKENS = 100
_SLOW_ROUNDS = 2


class Client(asyncio.Protocol):
    """Sends the same request `count` times over one connection, each after the answer before."""

    def __init__(self, request: bytes, count: int, stream: bool) -> None:
        self.request = request
        self.left = count
        self.stream = stream
        self.seconds: list[float] = []
        self.first_s: list[float] = []
        self.tokens = 0
        self.done = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport
        self.parts: list[bytes] = []
        self.sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._ask()

    def _ask(self) -> None:
        self.parts.clear()
        self.sent = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        parts = self.parts
        if not parts:
            self.first_s.append(time.perf_counter() - self.sent)
        parts.append(data)
        if self.stream:
            if not b"".join(parts[-2:]).endswith(b"0\r\n\r\n"):
                return
        elif not _complete(b"".join(parts)):
            return
        self.seconds.append(time.perf_counter() - self.sent)
        answer = b"".join(parts)
        if not answer.startswith(b"HTTP/1.1 200"):
            self._end(RuntimeError(f"not an answer: {answer[:300]!r}"))
            return
        self.tokens += answer.count(TEXT.encode() + b'"')
        self.left -= 1
        if self.left:
            self._ask()
        else:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionError("closed before the answer"))

    def _end(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
        self.transport.close()


def _complete(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return False
    lower = head.lower()
    at = lower.find(b"content-length:")
    if at < 0:
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= int(lower[at + 15 :].split(b"\r\n", 1)[0])


def request_bytes(stream: bool) -> bytes:
    message = {"role": "user", "content": "Hello there, how are you today?"}
    fields = {"model": MODEL, "messages": [message], "max_tokens": TOKENS, "stream": stream}
    body = json.dumps(fields, separators=(",", ":")).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\naccept: application/json\r\n"
        b"content-type: application/json\r\nauthorization: Bearer %b\r\nuser-agent: benchmark\r\n"
        b"content-length: %d\r\n\r\n%b" % (KEY.encode(), len(body), body)
    )


@dataclass
class Load:
    """What one round of requests took."""

    requests: int
    tokens: int
    cpu_s: float
    wall_s: float
    seconds: list[float] = field(repr=False)
    first_s: list[float] = field(repr=False)


async def load(proxy: Proxy, *, stream: bool, connections: int, count: int) -> Load:
    """Send `count` requests over each of so many connections and wait for all answers."""
    loop = asyncio.get_running_loop()
    raw = request_bytes(stream)
    cpu_s, wall_s = proxy.cpu_s(), time.perf_counter()
    made = [
        (await loop.create_connection(lambda: Client(raw, count, stream), "127.0.0.1", proxy.port))[
            1
        ]
        for _ in range(connections)
    ]
    await asyncio.wait_for(asyncio.gather(*(c.done for c in made)), 300)
    return Load(
        connections * count,
        sum(c.tokens for c in made),
        proxy.cpu_s() - cpu_s,
        time.perf_counter() - wall_s,
        sorted(s for c in made for s in c.seconds),
        sorted(s for c in made for s in c.first_s),
    )


def at(ordered: list[float], share: float) -> float:
    """Return the value below which so much of the list lies."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Result:
    """The rounds of one proxy."""

    plain: list[Load] = field(default_factory=list)
    streams: list[Load] = field(default_factory=list)
    light: list[float] = field(default_factory=list)

    def rps_per_cpu(self) -> float:
        return statistics.median(r.requests / r.cpu_s for r in self.plain)

    def tokens_per_cpu_s(self) -> float:
        return statistics.median(r.tokens / r.cpu_s for r in self.streams)


async def measure(proxies: list[Proxy], rounds: int, scale: int) -> dict[str, Result]:
    """Let the proxies take turns."""
    results = {proxy.name: Result() for proxy in proxies}
    for number in range(rounds + 1):
        for proxy in proxies:
            # LiteLLM is so much slower that far fewer requests and rounds say as much.
            slow = proxy.name == "litellm"
            if slow and number > _SLOW_ROUNDS:
                continue
            count = max(2, scale // 20) if slow else scale
            plain = await load(proxy, stream=False, connections=CONNECTIONS, count=count)
            streams = await load(proxy, stream=True, connections=CONNECTIONS, count=1)
            # Few at a time: what is added to one request, not how long the queue is.
            light = await load(proxy, stream=False, connections=2, count=max(20, scale // 2))
            if number:  # the first round warms up
                results[proxy.name].plain.append(plain)
                results[proxy.name].streams.append(streams)
                results[proxy.name].light += light.seconds
            if streams.tokens != CONNECTIONS * TOKENS:
                raise RuntimeError(f"{proxy.name} lost tokens: {streams.tokens}")
    return results


def main() -> None:
    """Start everyone, measure, compare."""
    arguments = options(__doc__ or "")
    reasons: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)

        def started(name: str, start: Callable[[Path], Proxy]) -> Proxy:
            (folder / name).mkdir()
            proxy = start(folder / name)
            stack.callback(proxy.stop)
            return proxy

        direct = started("direct", engine)
        proxies = [direct, started("gateway", lambda f: gateway(f, direct.port))]
        for name, peer in (("nginx", nginx), ("litellm", litellm)):
            try:
                proxies.append(started(name, lambda f, peer=peer: peer(f, direct.port)))  # type: ignore[misc]
            except UnavailableError as error:
                reasons[name] = str(error)
                leave_out(str(error))
        rounds, scale = (5, 30) if arguments.quick else (15, 60)
        results = uvloop.run(measure(proxies, rounds, scale))
    report(results, reasons)


def report(results: dict[str, Result], reasons: dict[str, str]) -> None:
    """Print a table and the figures."""
    print(
        f"\n  {'':10s} {'req/CPU-s':>10s} {'us/req':>8s} {'tokens/CPU-s':>13s} {'us/token':>9s}"
        f" {'p50 ms':>8s} {'p99 ms':>8s} {'stream first ms':>16s}"
    )
    for name, result in results.items():
        light = sorted(result.light)
        first = sorted(s for r in result.streams for s in r.first_s)
        rps, tps = result.rps_per_cpu(), result.tokens_per_cpu_s()
        print(
            f"  {name:10s} {rps:10.0f} {1e6 / rps:8.1f} {tps:13.0f} {1e6 / tps:9.2f}"
            f" {at(light, 0.5) * 1e3:8.2f} {at(light, 0.99) * 1e3:8.2f} {at(first, 0.5) * 1e3:16.2f}"
        )
    ours, light, direct = (
        results["gateway"],
        sorted(results["gateway"].light),
        sorted(results["direct"].light),
    )
    rps, tps = ours.rps_per_cpu(), ours.tokens_per_cpu_s()

    def of(name: str, value: Callable[[Result], float]) -> float | None:
        return value(results[name]) if name in results else None

    def over(value: float | None, own: float) -> float | None:
        return None if value is None else value / own

    rps_nginx, rps_litellm = of("nginx", Result.rps_per_cpu), of("litellm", Result.rps_per_cpu)
    tps_nginx, tps_litellm = (
        of("nginx", Result.tokens_per_cpu_s),
        of("litellm", Result.tokens_per_cpu_s),
    )
    finish(
        [
            Figure("added_ms_p50", (at(light, 0.5) - at(direct, 0.5)) * 1e3),
            Figure("added_ms_p99", (at(light, 0.99) - at(direct, 0.99)) * 1e3),
            Figure("rps_per_cpu", rps),
            Figure("rps_per_cpu_litellm", rps_litellm, note=reasons.get("litellm", "")),
            Figure("rps_per_cpu_nginx", rps_nginx, note=reasons.get("nginx", "")),
            Figure("rps_litellm_over_gateway", over(rps_litellm, rps), 0.1),
            Figure("rps_nginx_over_gateway", over(rps_nginx, rps), 3),
            Figure("tokens_per_cpu_s", tps),
            Figure("tokens_per_cpu_s_litellm", tps_litellm),
            Figure("tokens_per_cpu_s_nginx", tps_nginx),
            Figure("tokens_litellm_over_gateway", over(tps_litellm, tps), 0.1),
            Figure("tokens_nginx_over_gateway", over(tps_nginx, tps), 3),
        ],
    )


if __name__ == "__main__":
    main()
