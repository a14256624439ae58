"""Arrays by NIXL between executors on loopback: with agents that stand in for it, and by NIXL itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.runtime.executor.arrays import open_handle
from atoll.runtime.executor.executor_client import ExecutorClient, InvocationError
from atoll.runtime.executor.executor_server import DoorLimits
from atoll.runtime.executor.nixl_wire import NixlWire
from atoll.runtime.executor.store import ArrayStore
from atoll.tasks.values import Handle
from tests.runtime.executor.fake_nixl import FakeAgent
from tests.runtime.executor.integration.harness import TOKEN, TOYS, Running, process, serving
from tests.runtime.waiting import until

_NUMBERS = np.random.default_rng(37).integers(0, 255, 2**20, np.uint8)


def _far(handle: Handle) -> Handle:
    """Return a handle as it would come from another host."""
    return replace(handle, host="elsewhere", path="/nowhere")


@asynccontextmanager
async def _lending(
    folder: Path,
    fault: str = "",
    *,
    room_bytes: int = 2**22,
    only: bool = False,
    limits: DoorLimits | None = None,
) -> AsyncIterator[tuple[Running, ExecutorClient, FakeAgent, NixlWire, Handle]]:
    """Yield an executor that lends, a client whose agent has a fault, and an array's handle."""
    agent = FakeAgent("reader", fault)
    with (
        closing(NixlWire(lambda: FakeAgent("lender"), room_bytes=room_bytes)) as lender,
        closing(NixlWire(lambda: agent, only=only)) as reader,
    ):
        async with serving(folder, wire=lender, limits=limits) as maker:
            client = await maker.connect(wire=reader)
            yield maker, client, agent, lender, _far(maker.store.put(_NUMBERS, "tester", 60.0))
            await client.close()


async def test_an_array_is_read_and_no_more_lent(tmp_path: Path) -> None:
    async with _lending(tmp_path) as (_, client, agent, lender, handle):
        for reads in (1, 2):
            assert np.array_equal(await client.fetch(handle), _NUMBERS)
            assert agent.reads == reads
            await until(lambda: lender.taken_bytes == 0)
        with pytest.raises(InvocationError) as caught:
            await client.fetch(replace(handle, id="c" * 32))
        assert caught.value.code == "lost_handle"


@pytest.mark.parametrize("fault", ["raise", "error", "other"])
async def test_what_cannot_be_read_is_sent(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with _lending(tmp_path, fault) as (_, client, agent, lender, handle):
            assert np.array_equal(await client.fetch(handle), _NUMBERS)
            assert agent.reads == 1
            await until(lambda: lender.taken_bytes == 0)
    assert "now over the connection" in caplog.text


async def test_what_there_is_no_room_for_is_sent(tmp_path: Path) -> None:
    async with _lending(tmp_path, room_bytes=2**19) as (_, client, agent, _, handle):
        assert np.array_equal(await client.fetch(handle), _NUMBERS)
        assert agent.reads == 0


async def test_what_must_go_by_nixl_does_or_fails(tmp_path: Path) -> None:
    async with _lending(tmp_path / "a", only=True) as (_, client, agent, _, handle):
        assert np.array_equal(await client.fetch(handle), _NUMBERS)
        agent.fault = "error"
        with pytest.raises(InvocationError, match="ERR"):
            await client.fetch(handle)
        agent.fault = ""
        assert np.array_equal(await client.fetch(handle), _NUMBERS)
    async with _lending(tmp_path / "b", only=True, room_bytes=2**19) as (_, client, _, _, handle):
        with pytest.raises(InvocationError, match="does not lend"):
            await client.fetch(handle)


async def test_a_reader_that_goes_leaves_nothing_lent(tmp_path: Path) -> None:
    async with _lending(tmp_path, "never") as (maker, client, agent, lender, handle):
        fetching = asyncio.create_task(client.fetch(handle))
        await until(lambda: agent.reads == 1)
        assert lender.taken_bytes > 0
        fetching.cancel()
        await until(lambda: lender.taken_bytes == 0)
        # One that hangs up says nothing any more.
        other = await maker.connect("other", wire=client._wire)
        fetching = asyncio.create_task(other.fetch(handle))
        await until(lambda: agent.reads == 2)
        fetching.add_done_callback(lambda task: task.exception())
        assert other._writer is not None
        other._writer.transport.abort()
        await until(lambda: lender.taken_bytes == 0)


async def test_a_loan_ends_by_itself(tmp_path: Path) -> None:
    limits = DoorLimits(silent_s=0.2)
    async with _lending(tmp_path, "never", limits=limits) as (_, client, agent, lender, handle):
        fetching = asyncio.create_task(client.fetch(handle))
        await until(lambda: agent.reads == 1)
        await until(lambda: lender.taken_bytes == 0)
        fetching.cancel()


async def test_each_side_may_lack_it(tmp_path: Path) -> None:
    async with _lending(tmp_path / "a") as (maker, _, _, _, handle):
        plain = await maker.connect()
        assert np.array_equal(await plain.fetch(handle), _NUMBERS)
        await plain.close()
    with closing(NixlWire(lambda: FakeAgent("reader"))) as reader:
        async with serving(tmp_path / "b") as maker:
            client = await maker.connect(wire=reader)
            far = _far(maker.store.put(_NUMBERS, "tester", 60.0))
            assert np.array_equal(await client.fetch(far), _NUMBERS)
            await client.close()


def test_executors_hand_over_by_nixl_itself(tmp_path: Path) -> None:
    """One makes an array, the other takes it as from another machine, and may not have it sent."""
    pytest.importorskip("nixl", reason="needs the extra 'nixl'")
    doubler = f"{TOYS}:Doubler"

    async def hand_over(maker: str, taker: str) -> None:
        clients = [ExecutorClient(address, TOKEN, "tester") for address in (maker, taker)]
        for client in clients:
            await client.connect()
        store = ArrayStore(tmp_path / "ours", 2**24, owner="tester")
        numbers = _NUMBERS.astype(np.float32)
        given = store.put(numbers, "tester", 600.0)
        made = (await clients[0].call(doubler, {"array": given})).value["array"]
        taken = await clients[1].call(doubler, {"array": _far(made)})
        assert np.array_equal(open_handle(taken.value["array"]), 4 * numbers)
        for client in clients:
            await client.close()
        store.close()

    for name in ("maker", "taker"):
        (tmp_path / name).mkdir()
    with (
        process(tmp_path / "maker", {"Doubler": {}}, name="maker", nixl="always") as maker,
        process(tmp_path / "taker", {"Doubler": {}}, name="taker", nixl="always") as taker,
    ):
        asyncio.run(hand_over(maker.address, taker.address))
