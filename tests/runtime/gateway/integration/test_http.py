"""What clients can do wrong, slowly or too much of: always an answer in OpenAI's shape, never a 5xx."""

from __future__ import annotations

import asyncio
import gc
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.gateway.attempt import Attempts
from atoll.runtime.gateway.relay import Relay
from atoll.runtime.gateway.settings import GatewayLimits
from tests.runtime.gateway.engine import Fault, ScriptedEngine
from tests.runtime.gateway.harness import (
    CHAT,
    COMPLETIONS,
    QUICK,
    Reply,
    chat,
    read_reply,
    running,
)
from tests.seeds import examples

STAND_IN = "small instead of large"
EMBEDDINGS = "/v1/embeddings"


def assert_error(reply: Reply, status: int) -> None:
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/json"
    error = reply.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]


PICTURE = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/x"}}
BAD_BODIES: list[tuple[str, Any, int, str | None]] = [
    (CHAT, b"", 400, None),
    (CHAT, b"{", 400, None),
    (CHAT, b"null", 400, None),
    (CHAT, b"[]", 400, None),
    (CHAT, b"{}", 400, None),
    (CHAT, b"\xff\xfe", 400, None),
    (CHAT, b"[" * 200_000, 400, None),
    (CHAT, b'{"x":' * 100_000, 400, None),
    (CHAT, b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}', 400, None),
    (CHAT, b'{"model":"m","unread":"\xff","messages":[{"role":"user","content":"x"}]}', 400, None),
    (CHAT, b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}', 400, None),
    (CHAT, chat(n=-1), 400, "n"),
    (CHAT, chat(n=0), 400, "n"),
    (CHAT, chat(max_tokens=-5), 400, "max_tokens"),
    (CHAT, chat(max_tokens=10**30), 400, None),
    (CHAT, chat(max_tokens=1.5), 400, "max_tokens"),
    (CHAT, chat(temperature=-1), 400, "temperature"),
    (CHAT, chat(temperature="hot"), 400, "temperature"),
    (CHAT, b'{"model":"m","messages":[{"role":"user"}],"temperature":NaN}', 400, None),
    (CHAT, b'{"model":"m","messages":[{"role":"user"}],"temperature":1e999}', 400, None),
    (CHAT, chat(top_p=1.1), 400, "top_p"),
    (CHAT, chat(stream="yes"), 400, "stream"),
    (CHAT, chat(stop=[1]), 400, None),
    (CHAT, chat(stop=["x"] * 100_000), 400, "stop"),
    (CHAT, chat(stop="x" * 100_000), 400, "stop"),
    (CHAT, chat(stop_token_ids=list(range(100_000))), 400, "stop_token_ids"),
    (CHAT, chat(logit_bias={str(n): 1 for n in range(10_000)}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"1": 1e300}), 400, "logit_bias[...]"),
    (CHAT, chat(functions="f"), 400, "functions"),
    (CHAT, chat(function_call=1), 400, "function_call"),
    (CHAT, chat(modalities=["text", "smell"]), 400, "modalities[1]"),
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(messages="hi"), 400, "messages"),
    (CHAT, chat(messages=[{"content": "no role"}]), 400, None),
    (CHAT, chat(messages=[{"role": "narrator", "content": "x"}]), 400, "messages[0].role"),
    (CHAT, chat(model="nope"), 404, "model"),
    (CHAT, chat(model=""), 400, "model"),
    (CHAT, chat(model=7), 400, "model"),
    (COMPLETIONS, {"model": "m"}, 400, None),
    (COMPLETIONS, {"model": "m", "prompt": {"a": 1}}, 400, "prompt"),
    (EMBEDDINGS, {"model": "m", "input": []}, 400, "input"),
    (EMBEDDINGS, {"model": "m", "input": [-1]}, 400, "input[0]"),
    ("/tokenize", {"prompt": "ab"}, 400, None),
    ("/tokenize", {"model": "other", "prompt": "ab"}, 404, "model"),
    ("/tokenize", {"model": "m", "messages": [{"role": "user", "content": [PICTURE]}]}, 400, None),
    ("/detokenize", {"model": "m"}, 400, None),
    ("/detokenize", {"model": "m", "tokens": [-1]}, 400, None),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD_BODIES)
async def test_bad_bodies(path: str, body: Any, status: int, param: str | None) -> None:
    async with running([ScriptedEngine()]) as bench:
        reply = await bench.post(path, body)
        assert_error(reply, status)
        assert bench.engines[0].seen == []
        assert bench.records == []
        if param is not None:
            assert reply.json["error"]["param"] == param
        if status == 404:
            assert reply.json["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"GET /tokenize HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"POST /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", 405),
        (b"DELETE /health HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"DELETE /metrics HTTP/1.1\r\nhost: x\r\n\r\n", 403),
    ],
)
async def test_bad_requests(raw: bytes, status: int) -> None:
    """What is wrong with a request for any server is listed with `HandlerServer`."""
    async with running([ScriptedEngine()], limits=GatewayLimits(body_bytes=1000)) as bench:
        reply = await bench.ask(raw)
        assert_error(reply, status)
        assert ("allow" in reply.headers) == (status == 405)


async def test_slow_request_is_cut_off() -> None:
    """A byte now and then keeps nothing alive."""
    async with running([ScriptedEngine()], deadlines=replace(QUICK, body_s=0.2)) as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")

        async def drip() -> None:
            while True:
                await asyncio.sleep(0.02)
                writer.write(b"a")

        dripping = asyncio.create_task(drip())
        assert_error(await asyncio.wait_for(read_reply(reader), 60), 408)
        dripping.cancel()
        writer.close()
        async with asyncio.timeout(60):
            while bench.gateway.connections:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("full", [{"limits": GatewayLimits(requests=1)}, {"max_inflight": 1}])
async def test_full_gateway_says_when_to_come_back(full: dict[str, Any]) -> None:
    async with running([ScriptedEngine()], attempts=1, deadlines=QUICK, **full) as bench:
        bench.engines[0].faults = [Fault("stall_before")]
        first = asyncio.create_task(bench.post(CHAT, chat()))
        await asyncio.sleep(0.1)
        reply = await bench.post(CHAT, chat())
        assert_error(reply, 503)
        assert int(reply.headers["retry-after"]) >= 1
        # The first ran into its deadline; its place is free again.
        await first
        assert (await bench.post(CHAT, chat())).status == 200


async def test_too_many_connections() -> None:
    async with running([ScriptedEngine()], limits=GatewayLimits(connections=1)) as bench:
        one = await asyncio.open_connection("127.0.0.1", bench.port)
        await asyncio.sleep(0.05)
        reply = await bench.get("/health")
        assert reply.status == 503
        one[1].close()
        await asyncio.sleep(0.05)
        assert (await bench.get("/health")).status == 200


async def test_requests_may_follow_each_other_without_waiting() -> None:
    async with running([ScriptedEngine()]) as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
        body = json.dumps(chat("one")).encode()
        asked = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (
            CHAT.encode(),
            len(body),
            body,
        )
        writer.write(
            asked
            + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
            + asked
            + b"GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n"
        )
        assert [(await read_reply(reader)).status for _ in range(4)] == [200, 200, 200, 404]
        writer.write(asked + b"garbage\r\n\r\n")
        assert (await read_reply(reader)).status == 200
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_http_1_0(stream: bool) -> None:
    async with running([ScriptedEngine()]) as bench:
        body = json.dumps(chat(stream=stream)).encode()
        raw = b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)
        reply = await bench.ask(raw)
        assert reply.status == 200
        assert "transfer-encoding" not in reply.headers
        assert reply.text if stream else reply.json["choices"]


async def test_ids_and_traces_travel() -> None:
    async with running([ScriptedEngine()]) as bench:
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        given = f"X-Request-Id: abc-1\r\nTraceparent: {trace}\r\nTraceState: a=b\r\n"
        given += "Authorization: Bearer secret\r\n"
        reply = await bench.post(CHAT, chat(), given)
        assert reply.headers["x-request-id"] == "abc-1"
        (seen,) = bench.engines[0].seen
        assert seen.headers["x-request-id"] == "abc-1"
        assert seen.headers["tracestate"] == "a=b"
        version, found, span, flags = seen.headers["traceparent"].split("-")
        assert (version, found, flags) == ("00", trace[3:35], "01")
        assert span != trace[36:52]
        # A client's key is for the gateway, not for engines.
        assert "authorization" not in seen.headers
        assert bench.records[0].request_id == "abc-1"
        for bad in (
            "X-Request-Id: a b\r\n",
            "X-Request-Id: " + "a" * 200 + "\r\n",
            "Traceparent: 00-0-0-0\r\n",
        ):
            reply = await bench.post(CHAT, chat(), bad)
            assert reply.headers["x-request-id"].startswith("req-")
            assert len(bench.engines[0].seen[-1].headers["traceparent"]) == 55


async def test_drain_lets_requests_end_and_takes_no_more() -> None:
    async with running([ScriptedEngine()]) as bench:
        bench.engines[0].step_s = 0.01
        asking = asyncio.create_task(bench.post(CHAT, chat(stream=True)))
        await asyncio.sleep(0.1)
        assert await bench.gateway.drain(5)
        assert (await asking).events[-1] == "[DONE]"
        with pytest.raises(ConnectionError):
            await bench.get("/health")


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["m", "user"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = [
    "model",
    "messages",
    "prompt",
    "input",
    "stream",
    "n",
    "max_tokens",
    "temperature",
    "stop",
    "stream_options",
    "logit_bias",
    "response_format",
    "tools",
    "seed",
    "echo",
]


@examples(12)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([CHAT, COMPLETIONS, EMBEDDINGS]),
            st.dictionaries(st.sampled_from(FIELDS), values),
            st.binary(max_size=4),
        ),
        min_size=8,
        max_size=8,
    )
)
async def test_no_body_is_answered_with_a_5xx(
    cases: list[tuple[str, dict[str, Any], bytes]],
) -> None:
    async with running([ScriptedEngine()]) as bench:
        for path, fields, noise in cases:
            good = chat(prompt="x", input="x", max_tokens=3) | fields
            raw = json.dumps(good).encode()
            for body in (raw, raw[: len(raw) // 2] + noise + raw[len(raw) // 2 :]):
                reply = await bench.post(path, body)
                assert reply.status < 500, (body, reply.body)
                if reply.status >= 400:
                    assert_error(reply, reply.status)


async def test_a_request_that_ended_leaves_nothing_for_the_garbage_collector() -> None:
    async with running([ScriptedEngine(), ScriptedEngine()]) as bench:
        gc.collect()
        gc.disable()
        try:
            for stream in (False, True):
                # So that one of them fails over.
                bench.engines[0].faults = [Fault("die", 2)]
                for _ in range(3):
                    assert (await bench.post(CHAT, chat(stream=stream))).status == 200
            await bench.settled()
            left = [o for o in gc.get_objects() if type(o) in (Relay, Attempts)]
        finally:
            gc.enable()
        assert left == []


@pytest.mark.parametrize("affinity", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_of_weights_that_stand_in_say_so(affinity: bool, stream: bool) -> None:
    told = {"stand_in": STAND_IN}
    async with running([ScriptedEngine()], metadata=told, affinity=affinity) as bench:
        reply = await bench.post(CHAT, chat(stream=stream))
        assert reply.status == 200
        assert reply.headers["x-atoll-stand-in"] == STAND_IN
    async with running([ScriptedEngine()], affinity=affinity) as bench:
        reply = await bench.post(CHAT, chat(stream=stream))
        assert "x-atoll-stand-in" not in reply.headers
