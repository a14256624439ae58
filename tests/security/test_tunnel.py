"""What a worker tries against a gateway through the tunnel, and a gateway against a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from atoll.fabric.tunnel import handshake
from atoll.fabric.tunnel.channel import Channel, PacketCipher
from atoll.fabric.tunnel.tunnel_frames import (
    DATA,
    PACKET,
    AnswerHead,
    TunnelError,
    TunnelRequest,
    decode_answer,
    encode,
)
from atoll.fabric.tunnel.tunnel_server import IncomingCall
from atoll.fabric.tunnel.tunnel_settings import TunnelSettings
from tests.fabric.tunnel.harness import Log, Pair, echo, paced, request, run

SETTINGS = TunnelSettings()


@pytest.mark.parametrize(
    ("kind", "retry"),
    [
        (b"text/plain\r\nset-cookie: a=b", b""),
        (b"text/plain\r\n\r\nHTTP/1.1 200 OK", b""),
        (b"text/plain", b"1\r\ncontent-length: 0"),
        (b"a\nb", b""),
        (b"a\0b", b""),
        (b"a" * 300, b""),
        (b"\xff", b""),
    ],
)
def test_a_worker_cannot_write_headers_of_its_own(kind: bytes, retry: bytes) -> None:
    with pytest.raises(TunnelError):
        decode_answer(encode(AnswerHead(200, kind, retry)))

    def handle(incoming: IncomingCall) -> None:
        incoming.head(200, kind, retry)
        incoming.end()

    async def main() -> None:
        pair = Pair(handle)
        log = await pair.ask()
        assert log.status == 0
        assert log.lost is not None
        await pair.close()

    run(main())


@pytest.mark.parametrize("number", [-1, 2**64, 2**70])
def test_a_channel_that_cannot_be_is_refused_and_calls_hear_of_it(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., Any] = handshake.Welcome

    def forged(refusal: str, endpoint: str = "", channel: int = 0, *rest: Any) -> Any:
        return real(refusal, endpoint, number if endpoint else channel, *rest)

    async def main() -> None:
        pair = Pair(echo)
        welcome = handshake.welcome

        def lie(*args: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(handshake, "Welcome", forged)
                return welcome(*args)

        monkeypatch.setattr("atoll.fabric.tunnel.tunnel_server.welcome", lie)
        if number >= 2**64:
            # Not even the forger can write it down.
            with pytest.raises(OverflowError):
                lie(*_hello(pair), 1)
        else:
            log = await pair.ask()
            assert log.lost is not None
            assert "not a channel" in log.lost
        await pair.close()

    run(main())


def _hello(pair: Pair) -> tuple[Any, ...]:
    gateway, worker = pair.gateway, pair.worker
    opening = handshake.ClientHandshake(
        gateway.identity, "open", gateway.sid, worker.sid, f"{gateway.identity.slot}-{'0' * 16}"
    )
    hello, person, said = handshake.read_hello(opening.hello, worker.verifier, worker.sid)
    return worker.identity, hello, person, said, f"{worker.identity.slot}-{'0' * 16}"


def test_empty_packets_that_come_early_are_bounded() -> None:
    key = bytes(32)
    box = PacketCipher(key, key)
    channel = Channel(1, box, replace(SETTINGS, channel_window=64 * 1024), 0.0)
    for number in range(1, 5000):
        header = PACKET.pack(DATA, 1, number, 0)
        assert channel.receive(header + box.seal(header, b""), 0.0) == []
    assert len(channel._early) <= 64 * 1024 // 256


def test_bodies_that_never_end_are_bounded_by_what_they_announced() -> None:
    async def main() -> None:
        settings = replace(SETTINGS, bodies_bytes=1_000_000, quiet_s=5.0)
        held: list[IncomingCall] = []
        pair = Pair(held.append, worker_settings=settings)
        logs = [Log() for _ in range(5)]
        for log in logs:
            pair.caller.call(
                pair.worker.sid, TunnelRequest(b"POST", b"/x", (), b"x" * 300_000), log
            )
        await asyncio.sleep(1.0)
        # All of a body is here and nobody has answered it: it counts until somebody does.
        assert len(held) == 3
        assert [log.lost for log in logs].count("too many large requests of this caller") == 2
        for incoming in held:
            incoming.head(200, b"text/plain")
            incoming.end()
        await asyncio.sleep(1.0)
        log = Log()
        pair.caller.call(pair.worker.sid, TunnelRequest(b"POST", b"/x", (), b"x" * 300_000), log)
        await asyncio.sleep(1.0)
        assert len(held) == 4
        await pair.close()

    run(main())


def test_handshakes_of_one_slot_leave_room_for_others() -> None:
    async def main() -> None:
        settings = replace(SETTINGS, slot_handshakes_per_s=5)
        pair = Pair(echo, worker_settings=settings)
        key = next(iter(pair.worker.queryables))
        crook = _other(pair)
        opening = handshake.ClientHandshake(
            crook.identity, "open", crook.sid, pair.worker.sid, f"{crook.identity.slot}-{'0' * 16}"
        )
        answers = [await crook.query(key, opening.hello, 1.0) for _ in range(50)]
        assert sum(b"busy" in answer for answer in answers) >= 40
        for _ in range(100):
            await crook.query(key, b"junk", 1.0)
        assert (await pair.ask()).ended
        await pair.close()

    run(main())


def _other(pair: Pair) -> Any:
    from atoll.fabric.identity.identity import Identity, Verifier
    from tests.fabric.tunnel.harness import FakeFabric

    identity = Identity.self_made("m009", "crook", "crook", "worker")
    return FakeFabric(pair.net, identity, Verifier("open", None), 99)


@pytest.mark.parametrize("side", ["worker", "caller"])
def test_what_runs_ends_when_the_other_side_is_revoked(side: str) -> None:
    async def main() -> None:
        stopped: list[float] = []
        loop = asyncio.get_running_loop()
        handler = paced(1000, 0.1)

        def handle(incoming: IncomingCall) -> None:
            handler(incoming)
            stop = incoming.on_cancel
            assert stop is not None

            def cancelled() -> None:
                stop()
                stopped.append(loop.time())

            incoming.on_cancel = cancelled

        pair = Pair(handle)
        log = Log()
        pair.caller.call(pair.worker.sid, request(), log)
        await asyncio.sleep(2.0)
        assert log.data
        here, there = (
            (pair.gateway, pair.worker) if side == "worker" else (pair.worker, pair.gateway)
        )
        here.verifier.revoke([here.verifier.person(there.identity.certificate).serial])
        await asyncio.sleep(2.0)
        assert stopped
        assert log.lost is not None
        assert not log.ended
        assert pair.answerer.running == 0
        again = await pair.ask()
        assert again.lost is not None
        assert "revoked" in again.lost
        await pair.close()

    run(main())
