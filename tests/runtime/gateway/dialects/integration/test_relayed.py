"""Dialects through a gateway: broken streams go on, keys and errors are as everywhere, tokens are counted."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.runtime.accounts import schema
from atoll.runtime.gateway.settings import GatewayLimits
from tests.runtime.accounts.test_gateway import place
from tests.runtime.gateway.dialects.reading import Json, events_of, read_message, read_response
from tests.runtime.gateway.dialects.script import (
    USAGE,
    ScriptedAnswer,
    ScriptedCall,
    ScriptedTalker,
)
from tests.runtime.gateway.engine import Fault, ScriptedEngine, expected
from tests.runtime.gateway.harness import CHAT, QUICK, Bench, Reply, chat, read_reply, running

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEXT_AND_CALLS = ScriptedAnswer(
    text=["I", " look", "."],
    calls=[ScriptedCall(), ScriptedCall("go", ("{", "}"), "call_2")],
    reason="tool_calls",
)


def body_of(path: str, text: str = "hello", **more: Any) -> Json:
    if path == RESPONSES:
        return {"model": "m", "input": text, "temperature": 0} | more
    turn = {"role": "user", "content": text}
    return {"model": "m", "messages": [turn], "max_tokens": 1000, "temperature": 0} | more


def run(path: str, *engines: ScriptedEngine, **more: Any) -> tuple[Reply, Bench]:
    async def go() -> tuple[Reply, Bench]:
        async with running(engines) as bench:
            reply = await bench.post(path, body_of(path, **more))
            await bench.settled()
            return reply, bench

    return asyncio.run(go())


def text_of(path: str, stream: bytes) -> str:
    if path == RESPONSES:
        (item,) = read_response(stream)["output"]
        return str(item["content"][0]["text"])
    (block,) = read_message(stream)["content"]
    return str(block["text"])


def tokens_of(path: str, stream: bytes) -> tuple[int, int]:
    read = read_response if path == RESPONSES else read_message
    usage = read(stream)["usage"]
    return usage["input_tokens"], usage["output_tokens"]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("atoll", Fault("die", 5)),
        ("vllm", Fault("die_in_event", 4)),
        ("openai", Fault("die", 3)),
        ("atoll", Fault("die_before_usage")),
        ("vllm", Fault("error_event", 2)),
        ("atoll", Fault("die_before_head")),
    ],
)
def test_a_stream_outlives_its_backend(path: str, kind: str, fault: Fault) -> None:
    engines = [ScriptedEngine(kind=kind, faults=[fault]), ScriptedEngine(kind=kind)]
    reply, bench = run(path, *engines, stream=True)
    answer = expected(CHAT, chat(max_tokens=1000))
    assert reply.status == 200
    assert text_of(path, reply.body) == answer.text
    counts = (answer.usage["prompt_tokens"], answer.usage["completion_tokens"])
    assert tokens_of(path, reply.body) == counts
    (record,) = bench.records
    assert (record.prompt_tokens, record.completion_tokens) == counts
    assert (record.endpoint, record.outcome, record.stream) == (path, "ok", True)
    assert record.backends == ("e0", "e1")
    assert {seen.path for engine in engines for seen in engine.seen} == {CHAT}


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("after", [3, 6, 8, 11])
def test_calls_outlive_their_backend(path: str, after: int) -> None:
    """In the text, in the middle of arguments, between calls, before the usage."""

    def talker(*faults: Fault) -> ScriptedTalker:
        return ScriptedTalker(faults=list(faults), answers=[TEXT_AND_CALLS])

    reply, bench = run(path, talker(Fault("die", after)), talker(), stream=True)
    assert bench.records[0].backends == ("e0", "e1")
    assert bench.records[0].completion_tokens == USAGE["completion_tokens"]
    if path == RESPONSES:
        said, *called = read_response(reply.body)["output"]
        assert said["content"][0]["text"] == "I look."
        assert [(c["call_id"], c["name"], c["arguments"]) for c in called] == [
            ("call_1", "look", '{"what":"sea"}'),
            ("call_2", "go", "{}"),
        ]
    else:
        message = read_message(reply.body)
        assert message["stop_reason"] == "tool_use"
        assert message["content"] == [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "call_1", "name": "look", "input": {"what": "sea"}},
            {"type": "tool_use", "id": "call_2", "name": "go", "input": {}},
        ]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_stream_that_cannot_go_on_ends_with_an_error(path: str) -> None:
    engines = [
        ScriptedEngine(kind="openai", faults=[Fault("die", 3)]),
        ScriptedEngine(kind="openai"),
    ]
    reply, bench = run(path, *engines, stream=True, temperature=1)
    assert reply.status == 200
    if path == RESPONSES:
        response = read_response(reply.body)
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
        assert events_of(reply.body)[-2]["code"] == "stream_interrupted"
    else:
        assert read_message(reply.body)["error"]["type"] == "api_error"
    assert bench.records[0].outcome == "truncated"
    assert bench.records[0].completion_tokens == 3


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_whole_answers_say_the_same_as_chat(path: str) -> None:
    reply, bench = run(path, ScriptedEngine(faults=[Fault("500")]), ScriptedEngine())
    answer = expected(CHAT, chat(max_tokens=1000))
    assert reply.status == 200
    content = reply.json["output"][0]["content"] if path == RESPONSES else reply.json["content"]
    assert content[0]["text"] == answer.text
    assert bench.records[0].completion_tokens == answer.usage["completion_tokens"]
    assert bench.records[0].endpoint == path


@pytest.mark.parametrize(
    ("fault", "status", "kind"),
    [
        ("bad_request", 400, "invalid_request_error"),
        ("429", 429, "rate_limit_error"),
        ("503", 503, "overloaded_error"),
        ("500", 502, "api_error"),
        ("stall_before", 504, "timeout_error"),
    ],
)
def test_errors_have_the_shape_of_the_dialect(fault: str, status: int, kind: str) -> None:
    async def go() -> tuple[Reply, Reply, Reply]:
        engines = [ScriptedEngine(faults=[Fault(fault)] * 3)]
        late = replace(QUICK, first_token_s=0.1, answer_s=0.1) if "stall" in fault else None
        async with running(engines, attempts=1, deadlines=late) as bench:
            of_messages = await bench.post(MESSAGES, body_of(MESSAGES))
            of_responses = await bench.post(RESPONSES, body_of(RESPONSES))
            return of_messages, of_responses, await bench.post(CHAT, chat())

    of_messages, of_responses, of_chat = asyncio.run(go())
    assert of_messages.status == of_responses.status == of_chat.status == status
    assert of_messages.json["type"] == "error"
    assert of_messages.json["error"]["type"] == kind
    assert of_messages.json["error"]["message"] == of_chat.json["error"]["message"]
    assert of_messages.json["request_id"] == of_messages.headers["request-id"]
    assert of_responses.json == of_chat.json
    for reply in (of_messages, of_responses):
        assert reply.headers.get("retry-after") == of_chat.headers.get("retry-after")


async def test_who_is_let_in_and_what_is_counted(tmp_path: Path) -> None:
    answer = expected(CHAT, chat(max_tokens=1000))
    async with place(
        tmp_path,
        ScriptedEngine(kind="atoll", faults=[Fault("die", 4)]),
        ScriptedEngine(kind="atoll"),
        ScriptedEngine(model="other"),
    ) as it:
        key = await it.key(models=("m",), requests_per_min=3)
        stream = body_of(MESSAGES, stream=True)

        async def ask(path: str, headers: str, **more: Any) -> Reply:
            return await it.bench.post(path, body_of(path, **more), headers)

        for headers in ("", "x-api-key: sk-other\r\n", "authorization: Bearer sk-other\r\n"):
            refused = await ask(MESSAGES, headers)
            assert refused.status == 401
            assert refused.json["error"]["type"] == "authentication_error"
            assert (await ask(RESPONSES, headers)).status == 401
        # Of a stranger not even mistakes are read.
        assert (await it.bench.post(MESSAGES, b"{")).status == 401
        # Nor is its body waited for.
        head = f"POST {MESSAGES} HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n{{"
        early = await it.bench.ask(head.encode())
        assert (early.status, early.json["type"]) == (401, "error")
        assert early.json["error"]["type"] == "authentication_error"
        with_key = f"x-api-key: {key}\r\n"
        # Who stands before the gateway may have read the other of two keys.
        for both in (
            f"{with_key}authorization: Bearer sk-other\r\n",
            f"x-api-key: sk-other\r\nauthorization: Bearer {key}\r\n",
        ):
            two = await ask(MESSAGES, both)
            assert (two.status, two.json["error"]["type"]) == (400, "invalid_request_error")
            two = await it.bench.ask(head.replace("host: x\r\n", f"host: x\r\n{both}").encode())
            assert (two.status, two.json["type"]) == (400, "error")
        same = await it.bench.post(MESSAGES, b"{", f"{with_key}authorization: Bearer {key}\r\n")
        assert same.status == 400
        assert "JSON" in same.json["error"]["message"]
        # Elsewhere only one of them is a key.
        assert (await it.bench.post(CHAT, chat(), with_key)).status == 401
        chats = head.replace(MESSAGES, CHAT).replace("host: x\r\n", f"host: x\r\n{with_key}")
        assert (await it.bench.ask(chats.encode())).status == 401
        assert (await it.bench.post(MESSAGES, b"{", with_key)).status == 400
        forbidden = await ask(MESSAGES, with_key, model="other")
        assert (forbidden.status, forbidden.json["error"]["type"]) == (403, "permission_error")
        listing = "GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        listed = await it.bench.ask(f"{listing}{with_key}\r\n".encode())
        assert [model["id"] for model in listed.json["data"]] == ["m"]
        assert (await it.bench.ask(f"{listing}\r\n".encode())).status == 401
        streamed = await it.bench.post(MESSAGES, stream, with_key)
        assert text_of(MESSAGES, streamed.body) == answer.text
        asked = await ask(RESPONSES, f"authorization: Bearer {key}\r\n")
        assert asked.json["output"][0]["content"][0]["text"] == answer.text
        assert (await ask(MESSAGES, with_key)).status == 200
        slower = await ask(MESSAGES, with_key)
        assert (slower.status, slower.json["error"]["type"]) == (429, "rate_limit_error")
        assert int(slower.headers["retry-after"]) > 0
        rows = await it.rows(schema.operations)
        usage = answer.usage
        assert sorted(row.endpoint for row in rows) == [MESSAGES, MESSAGES, RESPONSES]
        for row in rows:
            assert row.prompt_tokens == usage["prompt_tokens"]
            assert row.completion_tokens == usage["completion_tokens"]


async def test_other_names_policies_and_other_methods() -> None:
    async with running([ScriptedEngine()], aliases={"claude-sonnet-4-5": "m"}) as bench:
        named = await bench.post(MESSAGES, body_of(MESSAGES, model="claude-sonnet-4-5"))
        assert (named.status, named.json["model"]) == (200, "m")
        unknown = await bench.post(MESSAGES, body_of(MESSAGES, model="none"))
        assert (unknown.status, unknown.json["error"]["type"]) == (404, "not_found_error")
        barred = "x-atoll-providers: ETH\r\n"
        refused = await bench.post(MESSAGES, body_of(MESSAGES), barred)
        assert (refused.status, refused.json["error"]["type"]) == (503, "overloaded_error")
        for path in (MESSAGES, RESPONSES):
            wrong = await bench.get(path)
            assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
        asked = await bench.post(MESSAGES, body_of(MESSAGES), "x-request-id: mine\r\n")
        assert asked.headers["request-id"] == asked.headers["x-request-id"] == "mine"
        # Pictures are checked as those of chat are.
        picture = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        turn = {"role": "user", "content": [picture]}
        fetched = await bench.post(MESSAGES, body_of(MESSAGES, messages=[turn]))
        assert fetched.status == 400
        assert "not fetched" in fetched.json["error"]["message"]


async def test_tokens_are_counted_as_the_tokenizer_of_the_model_does() -> None:
    tool = {"name": "look", "input_schema": {"type": "object"}}
    body = {"model": "m", "messages": [{"role": "user", "content": "a b c"}], "tools": [tool]}
    engine = ScriptedTalker(kind="vllm", faults=[Fault("500"), Fault("none"), Fault("404")])
    async with running([engine], attempts=1) as bench:
        path = f"{MESSAGES}/count_tokens"
        counted = await bench.post(path, body | {"system": "Be brief."})
        assert (counted.status, counted.json["error"]["type"]) == (502, "api_error")
        counted = await bench.post(path, body | {"system": "Be brief."})
        (seen,) = engine.seen[1:]
        words = len(str(seen.body["messages"] + seen.body["tools"]).split())
        assert (counted.status, counted.json) == (200, {"input_tokens": words})
        assert seen.path == "/tokenize"
        assert [turn["role"] for turn in seen.body["messages"]] == ["system", "user"]
        missing = await bench.post(path, body)
        assert (missing.status, missing.json["error"]["type"]) == (404, "not_found_error")
        wrong = await bench.post(path, body | {"max_tokens": 5})
        assert (wrong.status, wrong.json["type"]) == (400, "error")
        await bench.settled()
        assert {record.endpoint for record in bench.records} == {path}
        assert sum(record.completion_tokens for record in bench.records) == 0


async def test_memory_of_large_requests_is_counted() -> None:
    """What translating takes counts, too; nothing is counted any more at the end."""

    limits = GatewayLimits(buffered_bytes=7 * 2**19)
    async with running([ScriptedEngine()], limits=limits) as bench:
        body = body_of(MESSAGES, "x" * 2 * 2**19, max_tokens=1)
        assert (await bench.post(MESSAGES, body)).status == 200
        body = body_of(MESSAGES, "x" * 3 * 2**19, max_tokens=1)
        # It would not fit if nobody else were there.
        full = await bench.post(MESSAGES, body)
        assert (full.status, full.json["error"]["type"]) == (413, "request_too_large")
        await bench.settled()
        assert bench.gateway.buffered == 0


async def test_a_connection_is_kept_and_a_client_that_leaves_is_noticed() -> None:
    engine = ScriptedEngine(step_s=0.005)
    async with running([engine]) as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
        for number in range(2):
            raw = b'{"model":"m","input":"q","stream":true,"max_output_tokens":3}'
            head = b"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(raw) + raw)
            if number == 0:
                first = await read_reply(reader)
                assert read_response(first.body)["status"] == "incomplete"
        await reader.readuntil(b"response.created")
        writer.transport.abort()
        await bench.settled()
        assert [record.outcome for record in bench.records] == ["ok", "cancelled"]


@pytest.mark.parametrize("kind", ["atoll", "vllm", "sglang", "llamacpp"])
def test_a_message_begins_with_what_its_prompt_took(kind: str) -> None:
    reply, bench = run(MESSAGES, ScriptedEngine(kind=kind), stream=True)
    begun, *_, ended, _ = events_of(reply.body)
    assert begun["type"] == "message_start"
    told = begun["message"]["usage"]["input_tokens"]
    assert told == bench.records[0].prompt_tokens == ended["usage"]["input_tokens"] > 0
    assert "timings" not in reply.body.decode()


def test_a_message_begins_without_where_nobody_says() -> None:
    reply, _ = run(MESSAGES, ScriptedEngine(kind="openai"), stream=True)
    begun, *_, ended, _ = events_of(reply.body)
    assert begun["message"]["usage"]["input_tokens"] == 0 < ended["usage"]["input_tokens"]


async def test_functions_of_before_reach_other_engines() -> None:
    asked: Json = {"functions": [{"name": "look"}], "function_call": {"name": "look"}}
    async with running([ScriptedEngine(kind="openai")]) as bench:
        assert (await bench.post(CHAT, chat(**asked))).status == 200
        sent = bench.engines[0].seen[0].body
        assert {key: sent[key] for key in asked} == asked
