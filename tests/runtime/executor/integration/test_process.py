from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import zlib
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
from atoll.runtime.executor.executor_messages import MAX_FRAME_BYTES, VERSION, CallerHello
from atoll.runtime.executor.executor_wire import encode_frame
from atoll.runtime.executor.store import ArrayStore
from atoll.runtime.http.http_client import fetch
from tests.runtime.executor.integration.harness import (
    TOKEN,
    TOYS,
    Process,
    launch,
    process,
)

_DOUBLER = f"{TOYS}:Doubler"
_COUNTER = f"{TOYS}:NumberStream"


async def _client(address: str, holder: str = "tester") -> ExecutorClient:
    client = ExecutorClient(address, TOKEN, holder)
    await client.connect()
    return client


async def check_pages(executor: Process) -> None:
    """What an executor tells of itself after one answer."""

    async def page(path: str) -> tuple[int, bytes]:
        return await fetch(executor.health + path, timeout_s=30.0)

    assert (await page("/health"))[0] == 200
    assert (await page("/nothing"))[0] == 404
    client = await _client(executor.address)
    assert (await client.call(_COUNTER, {"to": 2})).value == {"count": 2}
    await client.close()
    status, body = await page("/atoll/v1/status")
    said = json.loads(body)
    assert status == 200
    assert said["components"][_DOUBLER] == {"queued": 0, "running": 0}
    assert (said["name"], said["ready"], said["draining"]) == ("e1", True, False)
    text = (await page("/metrics"))[1].decode()
    sample = f'atoll:executor_invocations_total{{component="{_COUNTER}",executor="e1",'
    # The example counts as well: it is work as any other.
    assert sample + 'outcome="ok"} 2.0' in text
    assert "atoll:executor_store_bytes" in text
    assert "atoll:executor_batch_size_bucket" in text


def test_a_killed_executor_is_noticed_at_once_and_its_store_is_emptied(tmp_path: Path) -> None:
    ours = ArrayStore(tmp_path / "ours", 2**24, owner="tester")
    given = ours.put(np.ones(5000, np.float32), "tester", 600.0)

    async def work(address: str, kill: Any) -> list[BaseException | Any]:
        client = await _client(address)
        await client.call(_DOUBLER, {"array": given}, lease_s=600.0)
        calls = [client.call(_DOUBLER, {"array": given, "sleep_s": 60.0}) for _ in range(9)]

        async def stream() -> None:
            async for _ in client.stream(_COUNTER, {"to": 10**9, "pause_s": 0.01}):
                pass

        under_way = [asyncio.create_task(call) for call in (*calls, stream())]
        while (await client.ask_queues())[_DOUBLER] < 9:
            await asyncio.sleep(0.01)
        kill()
        async with asyncio.timeout(30.0):
            found = await asyncio.gather(*under_way, return_exceptions=True)
        assert not client.is_connected
        with pytest.raises(ExecutorLostError):
            await client.call(_DOUBLER, {"array": given})
        with pytest.raises(ExecutorLostError):
            await client.connect()
        return found

    with process(tmp_path, {"Doubler": {}, "NumberStream": {}}) as executor:
        asyncio.run(check_pages(executor))
        found = asyncio.run(work(executor.address, executor.popen.kill))
        assert [type(item) for item in found] == [ExecutorLostError] * 10
        assert executor.popen.wait() == -signal.SIGKILL
        assert len(executor.files()) == 1, "nobody could clean up"

    (tmp_path / "ready").unlink()
    with process(tmp_path, {"Doubler": {"factor": 3.0}}) as executor:
        assert executor.files() == []

        async def again() -> None:
            client = await _client(executor.address)
            result = await client.call(_DOUBLER, {"array": given})
            assert open_handle(result.value["array"])[-1] == 3.0
            executor.popen.terminate()
            while client.is_connected:
                await asyncio.sleep(0.01)

        asyncio.run(again())
        assert executor.popen.wait(30) == 0
        assert not Path(executor.config.store).exists(), "nothing is left"
    ours.close()


@pytest.mark.slow
def test_strangers_and_a_flood(tmp_path: Path) -> None:
    with process(tmp_path, {"Doubler": {}, "NumberStream": {}}, max_waiting=8) as executor:
        host, port = executor.address.split(":")

        async def main() -> None:
            # A slow stranger, garbage, and a frame that is too long: all are closed, none does harm.
            slow = socket.create_connection((host, int(port)))
            slow.sendall(b"AX")
            hello = encode_frame(CallerHello(VERSION, TOKEN, "x"))
            long = bytearray(encode_frame(CallerHello(VERSION, "x", "y")))
            long[4:8] = (MAX_FRAME_BYTES + 1).to_bytes(4, "little")
            long[12:16] = zlib.crc32(long[:12]).to_bytes(4, "little")
            for data in (b"\xff" * 10_000, hello + b"\xff" * 10_000, bytes(long), hello + long):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(data)
                async with asyncio.timeout(30.0):
                    with contextlib.suppress(ConnectionResetError):
                        await reader.read()
                writer.close()

            client = await _client(executor.address)
            running = asyncio.create_task(client.call(_DOUBLER, {"sleep_s": 600.0}))
            while (await client.ask_queues())[_DOUBLER] < 1:
                await asyncio.sleep(0.01)
            before = executor.rss_bytes()
            flood = [
                asyncio.create_task(client.call(_DOUBLER, {"bytes": bytes(50_000)}))
                for _ in range(3000)
            ]
            while sum(call.done() for call in flood) < 2992:
                await asyncio.sleep(0.01)
            # 150 MB were sent, and 8 of the calls wait.
            assert executor.rss_bytes() - before < 60 * 2**20
            assert (await client.ask_queues())[_DOUBLER] == 9
            refused = [call.exception() for call in flood if call.done()]
            assert {getattr(error, "code", error) for error in refused} == {"overloaded"}
            for call in (*flood, running):
                call.cancel()
            await asyncio.gather(*flood, running, return_exceptions=True)

            status, body = await fetch(f"{executor.health}/atoll/v1/status", timeout_s=30.0)
            assert status == 200
            assert json.loads(body)["components"][_DOUBLER] == {"queued": 0, "running": 1}
            slow.close()
            await client.close()

        asyncio.run(main())


@pytest.mark.slow
def test_sigterm_finishes_what_runs(tmp_path: Path) -> None:
    with process(tmp_path, {"Doubler": {}}) as executor:

        async def main() -> None:
            client = await _client(executor.address)
            runs = asyncio.create_task(client.call(_DOUBLER, {"sleep_s": 1.5}))
            while (await client.ask_queues())[_DOUBLER] < 1:
                await asyncio.sleep(0.01)
            executor.popen.terminate()
            code = "bad_input"
            while code == "bad_input":
                with pytest.raises(InvocationError) as caught:
                    await client.call(_DOUBLER, {"key": 1}, deadline_s=0.01)
                code = caught.value.code.replace("deadline", "bad_input")
            assert code == "draining"
            assert (await fetch(f"{executor.health}/health", timeout_s=30.0))[0] == 503
            with pytest.raises(InvocationError) as caught:
                await runs
            assert caught.value.code == "bad_input", "it ran to its end"

        asyncio.run(main())
        assert executor.popen.wait(30) == 0


@pytest.mark.slow
def test_a_batch_that_does_not_end_does_not_hold_the_exit_up(tmp_path: Path) -> None:
    with process(tmp_path, {"Doubler": {}}, drain_s=0.1) as executor:

        async def main() -> None:
            client = await _client(executor.address)
            runs = asyncio.create_task(client.call(_DOUBLER, {"sleep_s": 600.0}))
            while (await client.ask_queues())[_DOUBLER] < 1:
                await asyncio.sleep(0.01)
            executor.popen.terminate()
            with pytest.raises(ExecutorLostError):
                await runs

        asyncio.run(main())
        assert executor.popen.wait(30) == 0
        assert not Path(executor.config.store).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("components", "changes", "code", "words"),
    [
        ({"Unable": {}}, {}, 1, "RuntimeError: no weights"),
        ({"Doubler": {}}, {"address": "nowhere"}, 3, "address: 'nowhere' is not host:port"),
        ({"Doubler": {}}, {"token_file": "none"}, 3, "none"),
        ({"Nothing": {}}, {}, 4, "unknown component"),
    ],
)
def test_what_cannot_start_says_why_in_a_line(
    tmp_path: Path, components: Any, changes: dict[str, Any], code: int, words: str
) -> None:
    executor = launch(tmp_path, components, **changes)
    assert executor.popen.wait(60) == code
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last.startswith("error: ")
    assert words in last
    assert not (tmp_path / "ready").exists()
    assert not (tmp_path / "store").exists()
