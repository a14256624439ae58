"""Streams that say they are still there."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from atoll.runtime.graph_server.graph_server import HEARTBEAT, with_heartbeats


async def _gated(gate: asyncio.Event, ended: list[str]) -> AsyncGenerator[bytes, None]:
    try:
        yield b"first"
        await gate.wait()
        yield b"second"
    finally:
        ended.append("closed")


def test_silence_is_filled_with_comments_and_pieces_stay_whole() -> None:
    async def collect() -> tuple[list[bytes], list[str]]:
        gate, ended, got = asyncio.Event(), list[str](), list[bytes]()
        async for piece in with_heartbeats(_gated(gate, ended), every_s=0.0):
            got.append(piece)
            if got.count(HEARTBEAT) == 2:
                gate.set()
        return got, ended

    got, ended = asyncio.run(collect())
    assert got[0] == b"first"
    assert got[1:3] == [HEARTBEAT, HEARTBEAT]
    assert [piece for piece in got if piece != HEARTBEAT] == [b"first", b"second"]
    assert ended == ["closed"]


def test_left_in_the_middle_it_closes_what_it_reads() -> None:
    async def leave() -> list[str]:
        gate, ended = asyncio.Event(), list[str]()
        stream = with_heartbeats(_gated(gate, ended), every_s=0.0)
        assert await anext(stream) == b"first"
        assert await anext(stream) == HEARTBEAT
        await stream.aclose()
        return ended

    assert asyncio.run(leave()) == ["closed"]


def test_errors_come_through() -> None:
    async def broken() -> AsyncGenerator[bytes, None]:
        yield b"first"
        raise ValueError("broken")

    async def collect() -> None:
        async for _ in with_heartbeats(broken(), every_s=10.0):
            pass

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(collect())
