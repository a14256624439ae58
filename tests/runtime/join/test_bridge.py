"""Between tunnel and engine: bytes pass, back-pressure and cancellation too, and nothing else does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.join.bridge import Bridge, reachable
from tests.runtime.gateway.engine import Fault, ScriptedEngine, expected
from tests.runtime.waiting import until

BODY = {"model": "m", "prompt": "x", "max_tokens": 30, "stream": True}
WHOLE = expected("/v1/completions", BODY).text


@dataclass
class FakeIncoming:
    method: bytes = b"POST"
    path: bytes = b"/v1/completions"
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)
    body: bytes = field(default_factory=lambda: json.dumps(BODY).encode())
    room: int = 1 << 30
    sent: bytes = b""
    begun: tuple[int, bytes, bytes] | None = None
    over: str | None = None
    on_cancel: Callable[[], None] | None = None
    on_writable: Callable[[], None] | None = None

    @property
    def writable(self) -> bool:
        return len(self.sent) < self.room

    def head(self, status: int, content_type: bytes, retry_after: bytes = b"") -> None:
        assert self.begun is None
        self.begun = (status, content_type, retry_after)

    def send(self, data: bytes) -> None:
        assert self.over is None
        self.sent += data

    def end(self) -> None:
        assert self.over is None
        self.over = "end"

    def fail(self, reason: str) -> None:
        assert self.over is None
        self.over = reason

    @property
    def text(self) -> str:
        events = [e[6:] for e in self.sent.decode().split("\n\n") if e.startswith("data: {")]
        choices = [json.loads(event)["choices"] for event in events]
        return "".join(choice[0]["text"] for choice in choices if choice)


def bridged(
    work: Callable[[ScriptedEngine, Bridge], Awaitable[None]],
    faults: tuple[Fault, ...] = (),
    step_s: float = 0.0,
    **more: Any,
) -> None:
    async def run() -> None:
        engine = ScriptedEngine(faults=list(faults), step_s=step_s)
        bridge = Bridge(await engine.start(), **more)
        bridge.open = True
        try:
            await work(engine, bridge)
        finally:
            await bridge.close()
            await engine.stop()
        assert bridge.inflight == 0

    asyncio.run(run())


def test_answers_pass_byte_for_byte_over_kept_connections() -> None:
    async def work(engine: ScriptedEngine, bridge: Bridge) -> None:
        for _ in range(3):
            incoming = FakeIncoming(
                headers=(
                    (b"content-type", b"application/json"),
                    (b"x-request-id", b"r1"),
                    (b"authorization", b"Bearer of-the-client"),
                    (b"x-forwarded-for", b"1.2.3.4"),
                    (b"accept", b"a\r\nevil: yes"),
                )
            )
            bridge.handle(incoming)
            await until(lambda: incoming.over is not None)  # noqa: B023
            assert incoming.over == "end"
            assert incoming.begun == (200, b"text/event-stream", b"")
            assert incoming.text == WHOLE
        seen = engine.seen[-1]
        assert seen.body == BODY
        assert seen.headers["x-request-id"] == "r1"
        assert seen.headers["authorization"] == "Bearer engine-key"
        assert not {"x-forwarded-for", "evil"} & set(seen.headers)
        assert bridge._links.open == 1

    bridged(work, api_key="engine-key")


def test_a_caller_that_leaves_cancels_the_engine() -> None:
    async def work(engine: ScriptedEngine, bridge: Bridge) -> None:
        incoming = FakeIncoming()
        bridge.handle(incoming)
        await until(lambda: len(incoming.sent) > 200)
        assert incoming.on_cancel is not None
        incoming.on_cancel()
        assert bridge.inflight == 0
        await until(lambda: engine.cancelled == 1)
        assert incoming.over is None

    bridged(work, step_s=0.01)


def test_a_slow_caller_stops_the_engine_and_loses_nothing() -> None:
    async def work(engine: ScriptedEngine, bridge: Bridge) -> None:
        incoming = FakeIncoming(room=500)
        bridge.handle(incoming)
        await until(lambda: len(incoming.sent) >= 500)
        stuck = len(incoming.sent)
        assert stuck < 1000
        await asyncio.sleep(0.15)
        assert len(incoming.sent) == stuck
        assert incoming.over is None
        incoming.room = 1 << 30
        assert incoming.on_writable is not None
        incoming.on_writable()
        await until(lambda: incoming.over is not None)
        assert incoming.text == WHOLE
        # The connection is as good as new.
        again = FakeIncoming()
        bridge.handle(again)
        await until(lambda: again.over == "end")
        assert bridge._links.open == 1

    bridged(work, step_s=0.003)


def test_a_connection_paused_at_its_last_byte_is_read_again() -> None:
    async def work(engine: ScriptedEngine, bridge: Bridge) -> None:
        first = FakeIncoming(room=1)
        bridge.handle(first)
        for _ in range(50):
            if first.over is not None:
                break
            assert first.on_writable is not None
            first.on_writable()
            await asyncio.sleep(0.01)
        assert first.over == "end"
        again = FakeIncoming()
        bridge.handle(again)
        await until(lambda: again.over == "end")
        assert again.text == first.text

    bridged(work)


@pytest.mark.parametrize("what", ["die", "die_before_head", "garbage", "die_in_event"])
def test_an_engine_that_fails_fails_the_stream(what: str) -> None:
    troubles: list[None] = []

    async def work(engine: ScriptedEngine, bridge: Bridge) -> None:
        incoming = FakeIncoming()
        bridge.handle(incoming)
        await until(lambda: incoming.over is not None)
        assert incoming.over is not None
        assert incoming.over.startswith("the engine failed")
        assert troubles

    bridged(work, (Fault(what, 2),), on_trouble=lambda: troubles.append(None))


async def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    served = ended = 0

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served, ended
        served += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            # The second request on a connection meets its end.
            await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        ended += 1

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    bridge = Bridge(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    bridge.open = True
    for _ in range(2):
        incoming = FakeIncoming()
        bridge.handle(incoming)
        await until(lambda: incoming.over is not None)  # noqa: B023
        assert (incoming.over, incoming.sent) == ("end", b"ok")
    assert served == 2
    await bridge.close()
    server.close()
    await until(lambda: ended == 2)


def test_an_engine_that_is_not_there_is_a_trouble() -> None:
    troubles: list[None] = []

    async def work(engine: ScriptedEngine, bridge: Bridge) -> None:
        incoming = FakeIncoming()
        bridge.handle(incoming)
        await until(lambda: incoming.over == "end")
        await engine.stop()
        late = FakeIncoming()
        bridge.handle(late)
        await until(lambda: late.over is not None)
        assert late.over is not None
        assert "the engine" in late.over
        assert troubles

    bridged(work, on_trouble=lambda: troubles.append(None))


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    async def work(engine: ScriptedEngine, bridge: Bridge) -> None:
        running = FakeIncoming()
        bridge.handle(running)
        await until(lambda: len(running.sent) > 100)
        draining = asyncio.create_task(bridge.drain(5.0))
        await asyncio.sleep(0)
        late = FakeIncoming()
        bridge.handle(late)
        assert late.begun == (503, b"application/json", b"1")
        assert await draining == 0
        assert running.over == "end"

    bridged(work, step_s=0.005)


def test_what_is_not_finished_in_time_is_failed() -> None:
    async def work(engine: ScriptedEngine, bridge: Bridge) -> None:
        running = FakeIncoming()
        bridge.handle(running)
        await until(lambda: engine.running == 1)
        assert await bridge.drain(0.02) == 1
        bridge.abandon("the node leaves")
        assert running.over == "the node leaves"
        assert bridge.inflight == 0

    bridged(work, (Fault("stall"),))


def test_a_full_node_sends_requests_elsewhere() -> None:
    async def work(engine: ScriptedEngine, bridge: Bridge) -> None:
        first, second = FakeIncoming(), FakeIncoming()
        bridge.handle(first)
        bridge.handle(second)
        assert second.begun is not None
        assert second.begun[0] == 503
        assert json.loads(second.sent)["error"]["message"] == "this node is full"
        await until(lambda: first.over == "end")

    bridged(work, max_inflight=1)


PATHS = {
    b"/v1/chat/completions": True,
    b"/v1/models": True,
    b"/v1/embeddings?x=1": True,
    b"/health": True,
    b"/metrics": True,
    b"/admin": False,
    b"/v1": False,
    b"/v1/../admin": False,
    b"/v1/%2e%2e/admin": False,
    b"/v1/..%2fadmin": False,
    b"/v1//admin": False,
    b"/v1/\\..\\admin": False,
    b"/v1/load_lora_adapter": False,
    b"/v1/x HTTP/1.1\r\nhost: y": False,
    b"http://169.254.169.254/v1/x": False,
    b"": False,
}


@pytest.mark.parametrize(("path", "may"), PATHS.items())
def test_only_the_api_can_be_reached(path: bytes, may: bool) -> None:
    assert (reachable(b"GET", path, generic=False)) is may


def test_methods() -> None:
    assert not reachable(b"DELETE", b"/v1/models", generic=False)
    assert not reachable(b"POST", b"/health", generic=False)
    assert reachable(b"POST", b"/tokenize", generic=False)
    assert reachable(b"POST", b"/detokenize", generic=False)
    assert not reachable(b"GET", b"/tokenize", generic=False)
    assert reachable(b"DELETE", b"/any/thing?x=/../y", generic=True)
    assert not reachable(b"CONNECT", b"/x", generic=True)
    assert not reachable(b"GET", b"/a/../b", generic=True)


@given(st.binary(max_size=40), st.booleans())
def test_no_path_breaks_out_of_the_request_line(path: bytes, generic: bool) -> None:
    if reachable(b"GET", path, generic=generic):
        assert path.startswith(b"/")
        assert not set(path) & set(b" \r\n\0")


def test_a_path_out_of_reach_never_gets_to_the_engine() -> None:
    async def work(engine: ScriptedEngine, bridge: Bridge) -> None:
        incoming = FakeIncoming(path=b"/v1/unload_lora_adapter")
        bridge.handle(incoming)
        assert incoming.begun is not None
        assert incoming.begun[0] == 404
        assert bridge.refused == 1
        assert not engine.seen

    bridged(work)
