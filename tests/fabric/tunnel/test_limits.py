"""What either side cannot make the other do."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from atoll.fabric.tunnel.tunnel_client import TunnelClient
from atoll.fabric.tunnel.tunnel_frames import CHUNK, HEAD, SUBMIT, TunnelRequest
from atoll.fabric.tunnel.tunnel_server import IncomingCall
from atoll.fabric.tunnel.tunnel_settings import TunnelSettings
from tests.fabric.tunnel.harness import (
    SSE,
    Log,
    Pair,
    echo,
    paced,
    request,
    run,
    tokens,
)

SETTINGS = TunnelSettings()


def test_a_paused_call_stops_only_its_own_stream() -> None:
    async def main() -> None:
        fed: list[IncomingCall] = []

        def handle(incoming: IncomingCall) -> None:
            """Send as fast as the caller takes it."""
            incoming.head(200, SSE)
            fed.append(incoming)
            left = [2 * 2**20]

            def feed() -> None:
                while incoming.writable and left[0] > 0:
                    incoming.send(b"x" * 1000)
                    left[0] -= 1000
                if left[0] <= 0:
                    incoming.end()

            incoming.on_writable = feed
            feed()

        pair = Pair(handle)
        slow = Log()
        call = pair.caller.call(pair.worker.sid, request(), slow)
        call.pause()
        fast = await pair.ask()
        assert fast.ended
        assert len(fast.data) >= 2 * 2**20
        await asyncio.sleep(60.0)
        # What is under way is bounded by the window, on this side and on that.
        assert not slow.data
        assert sum(len(p) for _, p in call._buffer) <= SETTINGS.stream_window
        assert fed[0]._outlet.unsent <= SETTINGS.stream_window
        call.resume()
        await slow.done.wait()
        assert slow.ended
        assert len(slow.data) == len(fast.data)
        await pair.close()

    run(main())


def test_a_call_may_be_paused_from_within() -> None:
    async def main() -> None:
        pair = Pair(paced(50, 0.01))
        loop = asyncio.get_running_loop()

        class Stutter(Log):
            def on_body(self, data: bytes) -> None:
                super().on_body(data)
                call.pause()
                loop.call_later(0.05, call.resume)

        log = Stutter()
        call = pair.caller.call(pair.worker.sid, request(), log)
        await log.done.wait()
        assert log.ended
        assert bytes(log.data) == tokens(50)
        await pair.close()

    run(main())


def test_a_caller_that_never_reads_is_bounded_and_ends() -> None:
    async def main() -> None:
        reasons: list[str] = []

        def handle(incoming: IncomingCall) -> None:
            incoming.head(200, SSE)
            incoming.on_cancel = lambda: reasons.append("cancelled")
            while not incoming.ended:
                incoming.send(b"x" * 10_000)

        pair = Pair(handle)
        log = Log()
        pair.caller.call(pair.worker.sid, request(), log).pause()
        await asyncio.sleep(5.0)
        assert reasons == ["cancelled"]
        assert pair.answerer.running == 0
        await pair.close()

        impatient = replace(SETTINGS, quiet_s=60.0)
        quiet = Pair(paced(1, 0.01), caller_settings=impatient)
        stalled = Log()
        quiet.answerer._handler = lambda incoming: incoming.head(200, SSE)
        quiet.caller.call(quiet.worker.sid, request(), stalled)
        await asyncio.sleep(impatient.quiet_s + 5)
        assert stalled.lost is not None
        assert "nothing" in stalled.lost
        await quiet.close()

    run(main())


def test_a_worker_that_sends_more_than_it_may_loses_that_stream_only() -> None:
    async def main() -> None:
        def handle(incoming: IncomingCall) -> None:
            if incoming.path == b"/flood":
                incoming.head(200, SSE)
                for _ in range(20):
                    incoming._link.line.push(CHUNK, incoming._stream, b"x" * 20_000)
            else:
                paced(100, 0.01)(incoming)

        pair = Pair(handle)
        flooded = Log()
        pair.caller.call(pair.worker.sid, request(path=b"/flood"), flooded).pause()
        log = await pair.ask()
        assert log.ended
        assert flooded.lost == "the worker sends more than it may"
        assert pair.caller.stats()["violations"] == 1
        assert pair.answerer.running == 0
        await pair.close()

    run(main())


def test_frames_out_of_place_end_the_stream() -> None:
    async def main() -> None:
        for frames in (
            [(CHUNK, b"before the head")],
            [(HEAD, b"nonsense")],
            [(99, b"")],
        ):

            def handle(incoming: IncomingCall, frames: list[tuple[int, bytes]] = frames) -> None:
                for kind, payload in frames:
                    incoming._link.line.push(kind, incoming._stream, payload)

            pair = Pair(handle)
            log = await pair.ask()
            assert log.lost is not None
            assert pair.caller.stats()["violations"] == 1
            await pair.close()

    run(main())


def test_a_stream_number_cannot_be_used_twice() -> None:
    async def main() -> None:
        pair = Pair(paced(100, 0.01))
        log = Log()
        pair.caller.call(pair.worker.sid, request(), log)
        await asyncio.sleep(0.1)
        (link,) = pair.caller._lines.values()
        assert link.line is not None
        link.line.push(SUBMIT, 1, b"")
        await log.done.wait()
        assert log.lost == "the worker closed the channel"
        assert pair.answerer.stats()["violations"] == 1
        await pair.close()

    run(main())


def test_limits_are_those_of_the_worker() -> None:
    async def main() -> None:
        strict = replace(SETTINGS, slot_streams=2, body_bytes=100_000, head_bytes=500)
        pair = Pair(paced(100, 0.01), worker_settings=strict)
        logs = await asyncio.gather(*(pair.ask() for _ in range(4)))
        assert (
            sorted(log.lost or "" for log in logs)[2:] == ["too many requests of this caller"] * 2
        )
        assert "larger" in ((await pair.ask(request(b"x" * 100_001))).lost or "")
        assert (await pair.ask()).ended
        long = TunnelRequest(b"GET", b"/" + b"x" * 600, (), b"")
        assert (await pair.ask(long)).lost == "the worker closed the channel"
        await pair.close()

    run(main())


def test_limits_are_those_of_the_caller() -> None:
    async def main() -> None:
        pair = Pair(echo, caller_settings=replace(SETTINGS, channel_streams=3, body_bytes=1000))
        logs = await asyncio.gather(*(pair.ask() for _ in range(5)))
        assert [log.lost for log in logs][3:] == ["too many requests to this worker"] * 2
        assert "larger" in ((await pair.ask(request(b"x" * 1001))).lost or "")
        assert "headers" in (
            (await pair.ask(TunnelRequest(b"GET", b"/" + b"x" * 2**16, (), b""))).lost or ""
        )
        await pair.close()

    run(main())


def test_whose_requests_are_taken_can_change() -> None:
    async def main() -> None:
        pair = Pair(echo, accept="deny:provider0")
        assert "not taken here" in ((await pair.ask()).lost or "")
        pair.answerer.accept = "allow:site0"
        assert (await pair.ask()).ended
        pair.answerer.accept = "self"
        assert "not taken here" in ((await pair.ask()).lost or "")
        serial = pair.worker.verifier.person(pair.gateway.identity.certificate).serial
        pair.answerer.accept = "any"
        assert (await pair.ask()).ended
        pair.worker.verifier.revoke([serial])
        assert "revoked" in ((await pair.ask()).lost or "")
        await pair.close()

    run(main())


def test_forged_and_stray_packets_change_nothing() -> None:
    async def main() -> None:
        pair = Pair(paced(100, 0.01))
        rng = random.Random(5)
        loop = asyncio.get_running_loop()

        def noise() -> None:
            for key, payload in pair.net.puts[-4:]:
                for changed in (
                    payload,
                    payload[:-1],
                    payload[:9] + b"\xff" * 8 + payload[17:],
                    payload[:20] + rng.randbytes(len(payload)),
                    rng.randbytes(40),
                    b"",
                ):
                    pair.net.deliver(key, changed)
            loop.call_later(0.05, noise)

        loop.call_later(0.05, noise)
        log = await pair.ask()
        assert bytes(log.data) == tokens(100)
        assert pair.caller.stats()["forged"] > 0
        assert pair.caller.stats()["strays"] > 0
        await pair.close()

    run(main())


def test_channels_are_bounded_and_idle_ones_are_closed() -> None:
    async def main() -> None:
        pair = Pair(echo, worker_settings=replace(SETTINGS, slot_channels=3))
        callers = [TunnelClient(pair.gateway.as_fabric()) for _ in range(5)]
        for caller in callers:
            log = Log()
            caller.call(pair.worker.sid, request(), log)
            await log.done.wait()
            assert log.ended
        assert pair.answerer.stats()["open_channels"] == 3
        await asyncio.sleep(SETTINGS.idle_s * 1.1)
        assert pair.answerer.stats()["open_channels"] == 0
        assert pair.caller.stats()["open_channels"] == 0
        assert (await pair.ask()).ended
        for caller in callers:
            await caller.close()
        await pair.close()

    run(main())


def test_handshakes_that_lead_nowhere_are_forgotten_and_limited() -> None:
    async def main() -> None:
        pair = Pair(echo)
        hellos: list[bytes] = []
        query = pair.gateway.query

        async def spy(key: str, payload: bytes, timeout_s: float) -> bytes:
            hellos.append(payload)
            return await query(key, payload, timeout_s)

        pair.gateway.query = spy  # type: ignore[method-assign]
        assert (await pair.ask()).ended
        key = next(iter(pair.worker.queryables))
        for _ in range(300):
            await query(key, hellos[0], 1.0)
        assert pair.answerer.stats()["open_channels"] <= SETTINGS.slot_channels
        # The one in use was not crowded out.
        assert (await pair.ask()).ended
        assert len(hellos) == 1
        await asyncio.sleep(SETTINGS.confirm_s + 1)
        assert pair.answerer.stats()["open_channels"] == 1
        await pair.close()

    run(main())


def test_errors_of_a_handler_or_receiver_stay_with_their_stream() -> None:
    async def main() -> None:
        problems: list[object] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: problems.append(context["exception"])
        )

        def handle(incoming: IncomingCall) -> None:
            if incoming.path == b"/bad":
                raise ValueError("a bug")
            paced(20, 0.01)(incoming)

        class Bad(Log):
            def on_body(self, data: bytes) -> None:
                raise ValueError("a bug, too")

        class Worse(Log):
            def on_lost(self, reason: str, *, unused: bool) -> None:
                raise ValueError("a third one")

        pair = Pair(handle)
        good = asyncio.create_task(pair.ask())
        bad = Bad()
        pair.caller.call(pair.worker.sid, request(), bad)
        assert (await pair.ask(request(path=b"/bad"))).lost == "the worker failed"
        assert bytes((await good).data) == tokens(20)
        assert len(problems) == 2
        assert pair.answerer.running == 0
        last = Log()
        for log in (Worse(), last):
            pair.caller.call(pair.worker.sid, request(), log)
        await asyncio.sleep(0.1)
        await pair.answerer.close()
        await asyncio.sleep(0.1)
        assert last.lost == "the worker closed the channel"
        assert len(problems) == 3
        await pair.close()

    run(main())
