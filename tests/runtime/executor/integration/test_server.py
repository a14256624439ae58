from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.runtime.executor.arrays import open_handle
from atoll.runtime.executor.executor_client import (
    ExecutorClient,
    ExecutorLostError,
    InvocationError,
)
from atoll.runtime.executor.executor_messages import (
    VERSION,
    CallerHello,
    Finished,
    Invoke,
    StreamPiece,
)
from atoll.runtime.executor.executor_server import DoorLimits
from atoll.runtime.executor.executor_wire import encode_frame
from atoll.tasks.values import Handle
from tests.runtime.executor.integration.harness import TOKEN, Running, serving
from tests.runtime.executor.toys import Doubler, NumberStream, Passer
from tests.runtime.waiting import until

_BIG = 5000


async def test_arrays_go_in_and_come_out_by_handle(tmp_path: Path) -> None:
    async with serving(tmp_path, Doubler) as running:
        client = await running.connect()
        assert (client.name, client.components) == ("e1", ("doubler",))
        numbers = np.arange(_BIG, dtype=np.float32)
        given = running.store.put(numbers, "tester", 60.0)
        finished = await client.call("doubler", {"array": given})
        handle = finished.value["array"]
        assert isinstance(handle, Handle)
        assert not handle.is_inline
        assert finished.value["writable"] is False
        assert np.array_equal(await client.fetch(handle), numbers * 2)
        # The result is the input of the next, and small ones travel in the message.
        again = await client.call("doubler", {"array": handle})
        assert np.array_equal(open_handle(again.value["array"]), numbers * 4)
        small = running.store.put(numbers[:5], "tester", 60.0)
        assert (await client.call("doubler", {"array": small})).value["array"].is_inline
        await client.release([handle, again.value["array"], given])
        await until(lambda: len(running.store) == 0)
        await client.close()


async def test_what_cannot_be_done_says_whose_fault_it_is(tmp_path: Path) -> None:
    async with serving(tmp_path, Doubler) as running:
        client = await running.connect()

        async def fail(**inputs: Any) -> InvocationError:
            with pytest.raises(InvocationError) as caught:
                await client.call("doubler", inputs)
            return caught.value

        error = await fail(array="text")
        assert (error.code, error.param) == ("bad_input", "array")
        error = await fail(broken=True)
        assert (error.code, error.message) == ("failed", "ValueError: broken as asked")
        lost = running.store.put(np.zeros(_BIG, np.float32), "tester", 60.0)
        running.store.release([lost.id], "tester")
        error = await fail(array=[lost])
        assert (error.code, error.handle) == ("lost_handle", lost.id)
        with pytest.raises(InvocationError, match="does not run 'other'") as caught:
            await client.call("other", {})
        assert caught.value.code == "bad_input"
        with pytest.raises(InvocationError) as caught:
            await client.fetch(lost)
        assert caught.value.code == "lost_handle"
        await client.close()


async def test_one_that_breaks_does_not_harm_its_batch(tmp_path: Path) -> None:
    async with serving(tmp_path, Doubler) as running:
        client = await running.connect()
        given = running.store.put(np.ones(4, np.float32), "tester", 60.0)
        first = asyncio.create_task(client.call("doubler", {"array": given, "sleep_s": 0.05}))
        await until(lambda: running.server.workers["doubler"].running == 1)
        calls = [client.call("doubler", {"array": given, "broken": n == 1}) for n in range(3)]
        found = await asyncio.gather(first, *calls, return_exceptions=True)
        batches = [item.batch if isinstance(item, Finished) else str(item) for item in found]
        assert batches == [1, 3, "ValueError: broken as asked", 3]
        await client.close()


async def test_streams_give_pieces_and_an_end(tmp_path: Path) -> None:
    async with serving(tmp_path, NumberStream) as running:
        client = await running.connect()
        answers = [a async for a in client.stream("counter", {"to": 3, "size": 30_000})]
        pieces, end = answers[:-1], answers[-1]
        assert all(isinstance(piece, StreamPiece) for piece in pieces)
        arrays = [await client.fetch(piece.value["array"]) for piece in pieces]
        assert [array[-1] for array in arrays] == [0, 1, 2]
        assert isinstance(end, Finished)
        assert end.value == {"count": 3}
        with pytest.raises(InvocationError, match="out of numbers") as caught:
            await client.call("counter", {"to": 3, "breaks_at": 1})
        assert caught.value.code == "failed"
        await client.close()


async def test_who_leaves_early_ends_the_work(tmp_path: Path) -> None:
    async with serving(tmp_path, NumberStream, Doubler) as running:
        client = await running.connect()
        left = NumberStream.left
        stream = client.stream("counter", {"to": 10**9, "pause_s": 0.001})
        assert isinstance(await anext(stream), StreamPiece)
        await stream.aclose()
        await until(lambda: NumberStream.left == left + 1)

        # Of three that wait, the second is cancelled: it never runs, and its result is not kept.
        given = running.store.put(np.zeros(_BIG, np.float32), "tester", 60.0)
        worker = running.server.workers["doubler"]
        sleeps = [0.2, 0.0, 0.0]
        calls = [
            asyncio.create_task(client.call("doubler", {"array": given, "sleep_s": s, "key": n}))
            for n, s in enumerate(sleeps)
        ]
        await until(lambda: worker.running == 1 and worker.waiting == 2)
        calls[1].cancel()
        await until(lambda: worker.waiting == 1)
        # One that runs already runs to its end, but nothing of it is kept.
        calls[0].cancel()
        finished = await calls[2]
        await until(lambda: worker.running == 0 and running.server.in_flight == 0)
        assert len(running.store) == 2
        assert running.store.get(finished.value["array"].id) is not None
        await client.close()
        await until(lambda: not running.server.connections)


async def test_deadlines(tmp_path: Path) -> None:
    async with serving(tmp_path, Doubler) as running:
        client = await running.connect()
        with pytest.raises(InvocationError, match=r"longer than 0\.02 s") as caught:
            await client.call("doubler", {"sleep_s": 0.2}, deadline_s=0.02)
        assert caught.value.code == "deadline"
        for wrong in (-1.0, float("nan")):
            with pytest.raises(InvocationError) as caught:
                await client.call("doubler", {}, lease_s=wrong)
            assert caught.value.code == "bad_input"
        await client.close()


async def test_too_many_are_refused(tmp_path: Path) -> None:
    limits = DoorLimits(in_flight=6, input_bytes=100_000)
    async with serving(tmp_path, Doubler, max_waiting=4, limits=limits) as running:
        client, other = await running.connect("a"), await running.connect("b")

        async def ask(client: ExecutorClient, **inputs: Any) -> str:
            try:
                await client.call("doubler", {"sleep_s": 0.1, **inputs})
            except InvocationError as error:
                return error.code + (" by the door" if "under way" in error.message else "")
            return "ok"

        first = asyncio.create_task(ask(client))
        await until(lambda: running.server.workers["doubler"].running == 1)
        codes = await asyncio.gather(*(ask(client) for _ in range(9)))
        # One ran and four waited; one was beyond the queue, and four beyond the connection's share.
        assert codes.count("bad_input") == 4
        assert codes.count("overloaded") == 1
        assert codes.count("overloaded by the door") == 4
        assert await first == "bad_input"
        assert await ask(other, long="x" * 200_000) == "overloaded"
        assert await ask(other) == "bad_input"
        await client.close()
        await other.close()


async def test_a_full_store_refuses(tmp_path: Path) -> None:
    async with serving(tmp_path, Doubler, store_bytes=3 * 4 * _BIG) as running:
        client = await running.connect()
        given = running.store.put(np.zeros(_BIG, np.float32), "tester", 60.0)
        held = [await client.call("doubler", {"array": given}) for _ in range(2)]
        with pytest.raises(InvocationError, match="do not fit") as caught:
            await client.call("doubler", {"array": given})
        assert caught.value.code == "overloaded"
        await client.release([held[0].value["array"]])
        await client.call("doubler", {"array": given})
        assert running.store.used_bytes == running.store.max_bytes
        await client.close()


async def test_leases_outlive_the_connection_and_then_run_out(tmp_path: Path) -> None:
    now_s = [0.0]

    async with serving(tmp_path, Doubler, clock=lambda: now_s[0]) as running:
        client = await running.connect("graph-server")
        given = running.store.put(np.ones(_BIG, np.float32), "tester", 1000.0)
        results = [await client.call("doubler", {"array": given}, lease_s=30.0) for _ in "ab"]
        kept, gone = (result.value["array"] for result in results)
        await client.close()
        await until(lambda: not running.server.connections)
        now_s[0] = 20.0
        again = await running.connect("graph-server")
        await again.renew([kept], 30.0)
        assert await again.ask_queues() == {"doubler": 0}
        now_s[0] = 31.0
        await until(lambda: running.store.get(gone.id) is None)
        assert running.store.get(kept.id) is not None
        await again.close()
        now_s[0] = 51.0
        await until(lambda: running.store.get(kept.id) is None)


def _far(handle: Handle) -> Handle:
    """Return a handle as it would come from another host."""
    return replace(handle, host="elsewhere", path="/nowhere")


async def test_arrays_of_other_hosts_are_fetched_once(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, name="maker") as maker,
        serving(tmp_path, Doubler, name="taker") as taker,
    ):
        client = await taker.connect()
        numbers = np.arange(700_000, dtype=np.float32)
        far = _far(maker.store.put(numbers, "tester", 60.0))
        calls = [client.call("doubler", {"array": far}) for _ in range(3)]
        results = await asyncio.gather(*calls)
        for result in results:
            assert np.array_equal(open_handle(result.value["array"]), numbers * 2)
        # Its owner has no other copy to give: the second time it is here already.
        maker.store.release([far.id], "tester")
        await client.call("doubler", {"array": far})
        other = _far(maker.store.put(numbers[:9000], "tester", 60.0))
        damaged = replace(other, crc32=other.crc32 ^ 1)
        nobody = replace(other, id="b" * 32, address="127.0.0.1:1")
        for wrong in (damaged, nobody, replace(other, id="c" * 32), replace(other, address="")):
            with pytest.raises(InvocationError) as caught:
                await client.call("doubler", {"array": wrong})
            assert (caught.value.code, caught.value.handle) == ("lost_handle", wrong.id)
        # A client fetches over the wire as well, and sums up what comes.
        maker_client = await maker.connect()
        assert np.array_equal(await maker_client.fetch(other), numbers[:9000])
        with pytest.raises(InvocationError, match="damaged"):
            await maker_client.fetch(damaged)
        await maker_client.close()
        await client.close()


async def _say(running: Running, data: bytes) -> bytes:
    """Send something to the door, and return what it says until it hangs up."""
    host, port = running.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        async with asyncio.timeout(30.0):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_strangers_are_turned_away(tmp_path: Path) -> None:
    limits = DoorLimits(hello_s=0.1, connections=3)
    async with serving(tmp_path, Passer, limits=limits) as running:
        hello = encode_frame(CallerHello(VERSION, TOKEN, "x"))
        for data in (
            b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
            b"\0" * 5000,
            hello[:20],
            b"",
            encode_frame(CallerHello(VERSION, "wrong", "x")),
            encode_frame(CallerHello(VERSION, "", "x")),
            encode_frame(CallerHello(VERSION + 1, TOKEN, "x")),
            encode_frame(CallerHello(VERSION, TOKEN, "")),
            encode_frame(CallerHello(VERSION, TOKEN, "(cache)")),
            encode_frame(CallerHello(VERSION, TOKEN * 400, "x")),
            encode_frame(Invoke(1, "passer", {})),
        ):
            assert await _say(running, data) == b"", data[:40]
        # Those who know the token and then talk nonsense hear no more than the welcome.
        for data in (b"garbage" * 9, encode_frame(CallerHello(VERSION, TOKEN, "x"))):
            assert b"garbage" not in await _say(running, hello + data)
        wrong = ExecutorClient(running.address, "no", "x")
        with pytest.raises(ExecutorLostError):
            await wrong.connect()
        clients = [await running.connect(str(number)) for number in range(3)]
        with pytest.raises(ExecutorLostError):
            await running.connect("one too many")
        for client in clients:
            assert (await client.call("passer", {"a": 1})).value == {"a": 1}
            await client.close()


async def test_draining_refuses_what_is_new_and_finishes_what_runs(tmp_path: Path) -> None:
    async with serving(tmp_path, Doubler) as running:
        client = await running.connect()
        given = running.store.put(np.ones(3, np.float32), "tester", 60.0)
        runs = asyncio.create_task(client.call("doubler", {"array": given, "sleep_s": 0.2}))
        await until(lambda: running.server.workers["doubler"].running == 1)
        assert await client.ask_queues() == {"doubler": 1}
        closing = asyncio.create_task(running.server.close(30.0))
        await until(lambda: running.server.draining)
        with pytest.raises(InvocationError) as caught:
            await client.call("doubler", {"array": given})
        assert caught.value.code == "draining"
        assert (await runs).batch == 1
        await closing
        await until(lambda: not client.is_connected)
        with pytest.raises(ExecutorLostError):
            await client.call("doubler", {"array": given})
