"""Caller and answerer over a net that exists only in memory, under a clock that jumps."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from atoll.fabric.tunnel.tunnel_frames import TunnelRequest
from atoll.fabric.tunnel.tunnel_server import IncomingCall
from atoll.fabric.tunnel.tunnel_settings import TunnelSettings
from tests.fabric.tunnel.harness import (
    LATENCY_S,
    FakeFabric,
    Log,
    Net,
    Pair,
    echo,
    paced,
    request,
    run,
    tokens,
)

if TYPE_CHECKING:
    from atoll.fabric.transport.fabric import Peer

SETTINGS = TunnelSettings()


def test_a_request_and_its_answer() -> None:
    seen: list[IncomingCall] = []

    def handle(incoming: IncomingCall) -> None:
        seen.append(incoming)
        echo(incoming)

    async def main() -> None:
        pair = Pair(handle)
        log = await pair.ask(TunnelRequest(b"PUT", b"/a?b=c", ((b"h", b"v"),), b"hello"))
        assert (log.status, bytes(log.data), log.ended, log.lost) == (200, b"hello", True, None)
        assert pair.answerer.running == 0
        await pair.close()

    run(main())
    (got,) = seen
    assert (got.method, got.path, got.headers) == (b"PUT", b"/a?b=c", ((b"h", b"v"),))
    assert (got.caller_name, got.caller_provider, got.verified) == ("site0", "provider0", False)


@pytest.mark.parametrize(
    "size",
    [0, 1, 32_768, 32_769, 1_000_000, pytest.param(32 * 2**20, marks=pytest.mark.slow)],
)
def test_bodies_of_any_size_both_ways(size: int) -> None:
    async def main() -> None:
        pair = Pair(echo, worker_settings=replace(SETTINGS, unsent_bytes=64 * 2**20))
        body = random.Random(1).randbytes(size)
        log = await pair.ask(request(body))
        assert log.lost is None
        assert bytes(log.data) == body
        await pair.close()

    run(main())


def test_what_is_said_on_the_way_is_sealed() -> None:
    async def main() -> None:
        pair = Pair(echo)
        await pair.ask(request(b"a secret prompt", b"/secret"))
        assert len(pair.net.puts) >= 2
        assert not any(b"secret" in payload for _, payload in pair.net.puts)
        await pair.close()

    run(main())


def test_streams_of_one_turn_share_packets() -> None:
    async def main() -> None:
        pair = Pair(paced(20, 0.01))
        await pair.ask()
        before = len(pair.net.puts)
        logs = await asyncio.gather(*(pair.ask() for _ in range(50)))
        assert all(bytes(log.data) == tokens(20) for log in logs)
        assert len(pair.net.puts) - before < 40
        await pair.close()

    run(main())


def test_a_long_prefill_is_bridged_by_signs_of_life() -> None:
    async def main() -> None:
        def handle(incoming: IncomingCall) -> None:
            asyncio.get_running_loop().call_later(300.0, echo, incoming)

        pair = Pair(handle)
        log = await pair.ask(request(b"x"))
        assert log.ended
        assert asyncio.get_running_loop().time() > 300
        await pair.close()

    run(main())


def test_a_worker_that_vanishes_is_left_soon() -> None:
    async def main() -> None:
        pair = Pair(paced(1000, 0.01))
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, pair.net.kill, pair.worker)
        log = await pair.ask()
        assert log.lost == "the worker is gone"
        assert 1.0 < loop.time() < 1.35
        assert bytes(log.data) == tokens(1000)[: len(log.data)]
        await pair.close()

    run(main())


def test_a_worker_that_falls_silent_is_left_after_the_stall_time() -> None:
    async def main() -> None:
        pair = Pair(paced(1000, 0.01))
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, lambda: pair.net.kill(pair.worker, tell=False))
        log = await pair.ask()
        assert log.lost is not None
        assert "silent" in log.lost
        assert 2.4 < loop.time() < 2.9
        await pair.close()

    run(main())


@pytest.mark.parametrize("told", [False, True], ids=["silent", "said to be gone"])
def test_a_worker_that_waits_for_a_core_is_slow_and_not_gone(told: bool) -> None:
    """What it says comes later and later; once it was late, it is waited for, also if its token drops."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stops_s = [(1.0, 2.2), (3.0, 5.3), (6.0, 9.5)]

        def fate(key: str, payload: bytes) -> list[float]:
            now_s = loop.time()
            until_s = next((end_s for start_s, end_s in stops_s if start_s <= now_s < end_s), now_s)
            # Longer than other messages take: those that were held come in their order.
            return [LATENCY_S if until_s == now_s else until_s - now_s]

        pair = Pair(paced(900, 0.01), net=Net(fate))
        if told:
            loop.call_later(3.5, pair.net.tell, "down", pair.worker.sid)
        log = await pair.ask()
        assert log.lost is None
        assert bytes(log.data) == tokens(900)
        await pair.close()

    run(main())


def test_a_far_worker_that_was_idle_is_given_time_to_answer() -> None:
    async def main() -> None:
        pair = Pair(paced(20, 0.1), net=Net(lambda key, payload: [0.4]))
        for _ in range(5):
            log = await pair.ask()
            assert log.lost is None
            assert bytes(log.data) == tokens(20)
            await asyncio.sleep(7.03)
        assert pair.caller.stats()["channels"] == 1
        await pair.close()

    run(main())


def test_keys_do_not_grow_old() -> None:
    async def main() -> None:
        pair = Pair(paced(20, 0.1), caller_settings=replace(SETTINGS, fresh_s=5.0))
        logs = [await pair.ask() for _ in range(10)]
        assert all(bytes(log.data) == tokens(20) for log in logs)
        assert 3 <= pair.caller.stats()["channels"] <= 5
        await asyncio.sleep(SETTINGS.idle_s + 1)
        assert pair.answerer.stats()["open_channels"] == 0
        await pair.close()

    run(main())


def test_a_worker_nobody_answers_for_is_given_up() -> None:
    async def main() -> None:
        pair = Pair(echo)
        pair.net.kill(pair.worker, tell=False)
        log = await pair.ask()
        assert log.lost == "cannot open a channel: no answer"
        assert asyncio.get_running_loop().time() < 3.5
        await pair.close()

    run(main())


def test_a_worker_that_never_takes_the_request_is_given_up() -> None:
    async def main() -> None:
        pair = Pair(echo)

        # It keeps saying that it lives, but the request never arrives.
        def fate(key: str, payload: bytes) -> list[float]:
            return [] if "/in/" in key and payload[0] == 0 else [LATENCY_S]

        pair.net.fate = fate
        log = await pair.ask()
        assert log.lost is not None
        assert asyncio.get_running_loop().time() < SETTINGS.accept_s + 1
        await pair.close()

    run(main())


def test_a_lost_hub_costs_time_but_no_token() -> None:
    async def main() -> None:
        pair = Pair(paced(150, 0.02))
        loop = asyncio.get_running_loop()

        def fate(key: str, payload: bytes) -> list[float]:
            return [] if 1.0 <= loop.time() < 2.2 else [LATENCY_S]

        pair.net.fate = fate
        logs = await asyncio.gather(*(pair.ask() for _ in range(3)))
        for log in logs:
            assert log.lost is None
            assert bytes(log.data) == tokens(150)
        gap_s = max(b - a for a, b in zip(logs[0].at_s, logs[0].at_s[1:], strict=False))
        assert 1.1 < gap_s < 1.5
        await pair.close()

    run(main())


def test_a_caller_without_a_hub_waits_longer() -> None:
    async def main() -> None:
        for away_s, lost in ((5.0, False), (20.0, True)):
            pair = Pair(paced(300, 0.01))
            loop = asyncio.get_running_loop()
            await pair.ask()
            start_s = loop.time()

            def cut(now: bool, pair: Pair = pair) -> None:
                pair.gateway.connected = not now
                pair.net.fate = (lambda *_: []) if now else (lambda *_: [LATENCY_S])
                if now:
                    for listener in pair.gateway.listeners:
                        listener("down", cast("Peer", SimpleNamespace(sid=pair.worker.sid)))

            loop.call_later(1.0, cut, True)
            loop.call_later(1.0 + away_s, cut, False)
            log = await pair.ask()
            assert (log.lost is not None) is lost
            assert loop.time() - start_s < 10
            if not lost:
                assert bytes(log.data) == tokens(300)
            await pair.close()

    run(main())


@pytest.mark.parametrize("side", ["worker", "gateway"])
def test_streams_go_on_while_a_session_is_renewed(side: str) -> None:
    async def main() -> None:
        pair = Pair(paced(300, 0.01))
        loop = asyncio.get_running_loop()
        member: FakeFabric = getattr(pair, side)
        for at_s in (0.5, 1.5):
            loop.call_later(at_s, member.renew)
        log = await pair.ask()
        assert bytes(log.data) == tokens(300)
        assert (await pair.ask()).ended
        await pair.close()

    run(main())


def test_a_cancelled_call_stops_the_worker_and_is_silent() -> None:
    stopped: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def handle(incoming: IncomingCall) -> None:
            paced(1000, 0.01)(incoming)
            inner = incoming.on_cancel

            def stop() -> None:
                assert inner is not None
                inner()
                stopped.append(loop.time())

            incoming.on_cancel = stop

        pair = Pair(handle)
        log = Log()
        call = pair.caller.call(pair.worker.sid, request(), log)
        await asyncio.sleep(1.0)
        call.cancel()
        size = len(log.data)
        await asyncio.sleep(1.0)
        assert len(log.data) == size > 0
        assert not log.done.is_set()
        assert pair.answerer.running == 0
        # Before there is a channel, too.
        other = pair.caller.call("m001-" + "0" * 16, request(), log)
        other.cancel()
        await asyncio.sleep(10.0)
        assert not log.done.is_set()
        await pair.close()

    run(main())
    assert 1.0 < stopped[0] < 1.01


def test_a_caller_that_vanishes_stops_its_streams() -> None:
    async def main() -> None:
        for tell in (True, False):
            pair = Pair(paced(10**6, 0.01))
            pair.caller.call(pair.worker.sid, request(), Log())
            await asyncio.sleep(1.0)
            assert pair.answerer.running == 1
            pair.net.kill(pair.gateway, tell=tell)
            await asyncio.sleep(0.4 if tell else SETTINGS.caller_gone_s + 0.5)
            assert pair.answerer.running == 0
            await pair.close()

    run(main())


def test_closing_ends_everything() -> None:
    async def main() -> None:
        pair = Pair(paced(1000, 0.01))
        logs = [Log() for _ in range(3)]
        for log in logs:
            pair.caller.call(pair.worker.sid, request(), log)
        await asyncio.sleep(0.1)
        await pair.answerer.close()
        await asyncio.sleep(0.1)
        assert {log.lost for log in logs} == {"the worker closed the channel"}
        waiting = Log()
        pair.caller.call(pair.worker.sid, request(), waiting)
        await pair.caller.close()
        assert waiting.lost == "the tunnel is closed"
        late = Log()
        pair.caller.call(pair.worker.sid, request(), late)
        assert late.lost is None
        await asyncio.sleep(0.01)
        assert late.lost == "the tunnel is closed"

    run(main())
