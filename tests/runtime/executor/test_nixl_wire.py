"""Arrays by NIXL, with agents that stand in for it: bytes, room, and what becomes of a read that fails."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError, MissingDependencyError
from atoll.runtime.executor import nixl_wire
from atoll.runtime.executor.nixl_room import ALIGN, PieceRoom
from atoll.runtime.executor.nixl_wire import NixlError, NixlWire, open_wire
from tests.runtime.executor.fake_nixl import FakeAgent

_ROOM = 2**20


class _Clock:
    """Seconds, of which each look at them takes `step_s`."""

    def __init__(self) -> None:
        self.now_s = self.step_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@contextmanager
def _pair(fault: str = "") -> Iterator[tuple[NixlWire, NixlWire, FakeAgent, _Clock]]:
    """Yield a wire that lends, one that reads with its agent, and the clock that it looks at."""
    clock, agent = _Clock(), FakeAgent("reader", fault)
    lends = NixlWire(lambda: FakeAgent("lender"), room_bytes=_ROOM, least_bytes=1)
    reads = NixlWire(lambda: agent, room_bytes=_ROOM, least_bytes=1, clock=clock)
    with closing(lends) as lender, closing(reads) as reader:
        yield lender, reader, agent, clock


def _data(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).bytes(nbytes)


@pytest.mark.parametrize("nbytes", [1, ALIGN, ALIGN + 1, _ROOM])
async def test_what_is_lent_is_read_bit_for_bit(nbytes: int) -> None:
    with _pair() as (lender, reader, agent, _):
        data = _data(nbytes)
        lent = await lender.lend(memoryview(data))
        assert lent is not None
        assert lent.crc32 == zlib.crc32(data)
        assert lender.taken_bytes == -(-nbytes // ALIGN) * ALIGN
        for _ in range(2):
            assert await reader.read(lender.metadata, lent.address, nbytes, lent.crc32) == data
        lender.take_back(lent)
        assert (lender.taken_bytes, reader.taken_bytes) == (0, 0)
        # The other agent was made known once, and every transfer was let go.
        assert (agent.known, agent.reads, agent.released) == ({"lender"}, 2, 2)
        reader.forget(lender.metadata)
    assert agent.known == set()


async def test_what_does_not_fit_is_not_lent() -> None:
    with _pair() as (lender, reader, _, _):
        assert await lender.lend(memoryview(bytes(_ROOM + 1))) is None
        assert not reader.may_read(lender.metadata, _ROOM + 1)
        first = await lender.lend(memoryview(bytes(_ROOM // 2 + 1)))
        assert first is not None
        assert await lender.lend(memoryview(bytes(_ROOM // 2))) is None
        lender.take_back(first)
        assert await lender.lend(memoryview(bytes(_ROOM // 2))) is not None


async def test_small_arrays_and_those_of_others_are_not_asked_for() -> None:
    with closing(NixlWire(lambda: FakeAgent("a"), room_bytes=_ROOM)) as wire:
        assert not wire.may_read(wire.metadata, 4097)
        assert wire.may_read(wire.metadata, 2**18)
        assert not wire.may_read(b"", 2**18)
        assert not wire.may_read(bytes(2**16 + 1), 2**18)


@pytest.mark.parametrize(
    ("fault", "said", "lost"),
    [
        ("raise", "REMOTE_DISCONNECT", 0),
        ("error", "ERR", 0),
        ("never", "too long", 0),
        ("stuck", "too long", ALIGN),
    ],
)
async def test_a_read_that_fails_says_so_and_leaves_the_agent_alone_for_a_while(
    fault: str, said: str, lost: int
) -> None:
    with _pair(fault) as (lender, reader, agent, clock):
        data = _data(1000)
        lent = await lender.lend(memoryview(data))
        assert lent is not None
        clock.step_s = 1.0
        with pytest.raises(NixlError, match=said):
            await reader.read(lender.metadata, lent.address, 1000, lent.crc32)
        clock.step_s = 0.0
        # Memory that may still be written to is never used again.
        assert reader.taken_bytes == lost
        assert agent.known == set()
        assert not reader.may_read(lender.metadata, 1000)
        clock.now_s += 60.0
        assert reader.may_read(lender.metadata, 1000)
        agent.fault = ""
        assert await reader.read(lender.metadata, lent.address, 1000, lent.crc32) == data


async def test_other_bytes_are_found() -> None:
    with _pair("other") as (lender, reader, _, _):
        lent = await lender.lend(memoryview(bytes(5000)))
        assert lent is not None
        with pytest.raises(NixlError, match="other bytes"):
            await reader.read(lender.metadata, lent.address, 5000, lent.crc32)


async def test_reads_under_way_end_when_the_wire_is_closed() -> None:
    with _pair("never") as (lender, reader, _, _):
        lent = await lender.lend(memoryview(bytes(5000)))
        assert lent is not None
        reading = asyncio.create_task(reader.read(lender.metadata, lent.address, 5000, lent.crc32))
        await asyncio.sleep(0)
        await asyncio.to_thread(reader.close)
        with pytest.raises(NixlError, match="closed"):
            await reading


def test_an_agent_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        @staticmethod
        def nixl_agent_config(**_: object) -> None:
            raise RuntimeError("no devices")

    monkeypatch.setattr(nixl_wire, "find_spec", lambda _: True)
    monkeypatch.setattr(nixl_wire, "require_extras", lambda *_: None)
    monkeypatch.setattr("importlib.import_module", lambda _: Api)
    assert open_wire("auto", "e1", "10.0.0.1") is None
    with pytest.raises(InputError, match="no devices"):
        open_wire("always", "e1", "10.0.0.1")


def test_it_is_there_where_it_is_installed_and_others_can_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert open_wire("never", "e1", "10.0.0.1") is None
    monkeypatch.setattr(nixl_wire, "find_spec", lambda _: None)
    monkeypatch.setattr("atoll.core.extras.find_spec", lambda _: None)
    assert open_wire("auto", "e1", "10.0.0.1") is None
    with pytest.raises(MissingDependencyError, match="nixl"):
        open_wire("always", "e1", "10.0.0.1")
    monkeypatch.setattr(nixl_wire, "find_spec", lambda _: True)
    for here in ("127.0.0.1", "127.0.3.1", "::1", "localhost"):
        assert open_wire("auto", "e1", here) is None


@given(st.lists(st.tuples(st.integers(0, 5 * ALIGN), st.integers(0, 9)), max_size=40))
def test_pieces_never_overlap_and_all_room_comes_back(
    asked: list[tuple[int, int]],
) -> None:
    room = PieceRoom(12 * ALIGN + 5)
    taken: list[tuple[int, int]] = []
    for nbytes, back in asked:
        if back < 4 and taken:
            room.give_back(taken.pop(back % len(taken))[0])
            continue
        offset = room.take(nbytes)
        size = -(-max(nbytes, 1) // ALIGN) * ALIGN
        if offset is None:
            free = set(range(12)) - {
                p for at, n in taken for p in range(at // ALIGN, at // ALIGN + n)
            }
            runs = "".join("x" if page in free else " " for page in range(12)).split()
            assert all(len(run) * ALIGN < size for run in runs)
            continue
        pages = set(range(offset // ALIGN, (offset + size) // ALIGN))
        assert not pages & {p for at, n in taken for p in range(at // ALIGN, at // ALIGN + n)}
        taken.append((offset, size // ALIGN))
    for offset, _ in taken:
        room.give_back(offset)
    assert room.taken_bytes == 0
    assert room.take(12 * ALIGN) == 0
