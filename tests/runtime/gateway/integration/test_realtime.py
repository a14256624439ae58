"""`/v1/realtime` through the gateway, asked by OpenAI's SDK over real WebSockets."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("websockets", reason="needs the extra 'serve'")

import websockets
from websockets.typing import Origin

from atoll.runtime.accounts.accounts import Accounts
from atoll.runtime.accounts.api_keys import NewKey
from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.cors import CorsSettings
from atoll.runtime.gateway.settings import GatewaySettings, HealthSettings
from atoll.runtime.pool.member import Backend
from atoll.runtime.pool.pool import BackendPool
from atoll.runtime.realtime.realtime_limits import RealtimeLimits
from tests.runtime.gateway.graph_server import TEXT, ScriptedGraphServer
from tests.runtime.gateway.harness import running

HELLO: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}


def sdk_at(port: int, key: str = "x") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)


async def one_answer(sdk: openai.AsyncOpenAI) -> tuple[list[str], Any]:
    """Ask for one answer in words; returns the kinds of events, and the answer."""
    kinds = []
    async with sdk, sdk.realtime.connect(model="m") as session:
        await session.conversation.item.create(item=HELLO)
        await session.response.create(response={"output_modalities": ["text"]})
        async for event in session:
            kinds.append(event.type)
            if event.type == "response.done":
                return kinds, event.response
    raise AssertionError(kinds)


async def test_an_answer_of_a_session_is_a_request_like_any_other() -> None:
    async with running([ScriptedGraphServer()]) as bench:
        kinds, response = await one_answer(sdk_at(bench.port))
        assert kinds[:3] == ["session.created", "conversation.item.added", "conversation.item.done"]
        assert kinds.count("response.output_text.delta") == len(TEXT)
        assert response.status == "completed"
        assert response.output[0].content[0].text == "".join(TEXT)
        await bench.settled()
        (record,) = bench.records
        assert record.completion_tokens == response.usage.output_tokens > 0
        # The connection is of use to nobody else, and gone.
        async with asyncio.timeout(20):
            while bench.gateway.connections:
                await asyncio.sleep(0.01)


async def test_keys_and_their_limits_hold(tmp_path: Path) -> None:
    async with AsyncExitStack() as until:
        server = ScriptedGraphServer()
        until.push_async_callback(server.stop)
        pool = BackendPool()
        pool.add(Backend(id="e0", url=await server.start(), models=("m",), kind=server.kind))
        url = f"sqlite:///{tmp_path}/keys.db"
        books = await Accounts.open(url, journal=tmp_path / "journal", refresh_s=60)
        until.push_async_callback(books.close)
        text, _ = await books.database.create_key(
            NewKey.parse({"name": "n", "requests_per_min": 1})
        )
        await books.sync()
        settings = GatewaySettings(port=0, health=HealthSettings(enabled=False), admin_socket="")
        gateway = Gateway(pool, settings, accounts=books)
        until.push_async_callback(gateway.close)
        _, port = await gateway.start()
        with pytest.raises(websockets.exceptions.InvalidStatus) as caught:
            await one_answer(sdk_at(port, "sk-none"))
        assert caught.value.response.status_code == 401
        _, response = await one_answer(sdk_at(port, text))
        assert response.status == "completed"
        # An answer is a request: the next is told that there are too many, and the session goes on.
        _, response = await one_answer(sdk_at(port, text))
        assert response.status == "failed"
        assert "limit" in response.status_details.error.code, response


async def test_what_is_no_session_is_refused() -> None:
    limits = RealtimeLimits(sessions=1, message_bytes=2000)
    cors = CorsSettings(origins=("https://app.example",))
    async with running([ScriptedGraphServer()], realtime=limits, cors=cors) as bench:
        url = f"ws://127.0.0.1:{bench.port}/v1/realtime"
        shake = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        key = "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        wrong = [
            ("/v1/realtime?model=m", "connection: upgrade\r\nupgrade: h2c\r\n", 400),
            ("/v1/models", shake + key, 400),
            ("/v1/realtime?model=m", shake, 400),
            ("/v1/realtime", shake + key, 400),
            ("/v1/realtime?model=m", shake + key + "origin: https://evil.example\r\n", 403),
        ]
        for path, headers, status in wrong:
            assert (await bench.get(path, headers)).status == status, (path, headers)
        async with websockets.connect(
            f"{url}?model=m", origin=Origin("https://app.example")
        ) as first:
            assert json.loads(await first.recv())["type"] == "session.created"
            with pytest.raises(websockets.exceptions.InvalidStatus) as caught:
                await websockets.connect(f"{url}?model=m")
            assert caught.value.response.status_code == 503
            assert caught.value.response.headers["retry-after"]
            # Fragments are one message, within its limit; beyond it the session ends.
            await first.send(["{", '"type": "input_audio_buffer.clear"', "}"])
            assert json.loads(await first.recv())["type"] == "input_audio_buffer.cleared"
            await first.send("x" * 3000)
            with pytest.raises(websockets.exceptions.ConnectionClosedError) as closed:
                await first.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009


async def test_a_gateway_that_stops_tells_its_sessions() -> None:
    async with (
        running([ScriptedGraphServer()]) as bench,
        websockets.connect(f"ws://127.0.0.1:{bench.port}/v1/realtime?model=m") as client,
    ):
        await client.recv()
        await bench.gateway.drain(5.0)
        with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
            await client.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
