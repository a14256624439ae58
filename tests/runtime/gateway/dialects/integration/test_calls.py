"""Calls of Atoll's own engine in dialects: written by its grammar, continued in the middle of arguments."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs the extra 'engine'")
pytest.importorskip("llguidance", reason="needs the extra 'engine'")

from atoll.engine.text import TextCodec
from tests.runtime.gateway.calling import CallingEngine
from tests.runtime.gateway.dialects.reading import Json, read_message, read_response
from tests.runtime.gateway.engine import Fault
from tests.runtime.gateway.harness import CHAT, Reply, chat, running
from tests.runtime.instance.tool_models import ADD, WEATHER, write_tool_model
from tests.seeds import slow_except

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TOOLS = [WEATHER, ADD]
Calls = list[tuple[str, Any]]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return write_tool_model(tmp_path_factory.mktemp("calls"), "hermes")


def body_of(path: str) -> Json:
    functions: list[Json] = [tool["function"] for tool in TOOLS]
    if path == CHAT:
        return chat(stream=True, tools=TOOLS, tool_choice="required")
    if path == RESPONSES:
        tools: Any = [{"type": "function", **function} for function in functions]
        return {"input": "hello", "tools": tools, "tool_choice": "required"}
    tools = [
        {
            "name": f["name"],
            "description": f.get("description", ""),
            "input_schema": f["parameters"],
        }
        for f in functions
    ]
    turn = {"role": "user", "content": "hello"}
    return {"messages": [turn], "max_tokens": 900, "tools": tools, "tool_choice": {"type": "any"}}


def ask(codec: TextCodec, path: str, kind: str, deaths: list[int]) -> tuple[Reply, int]:
    """Ask engines that die one after the other; return the answer and how many were asked."""

    async def go() -> tuple[Reply, int]:
        engines = [CallingEngine(kind=kind, codec=codec, faults=[Fault("die", d)]) for d in deaths]
        engines.append(CallingEngine(kind=kind, codec=codec))
        body = {"model": "m", "temperature": 0, "stream": True} | body_of(path)
        async with running(engines) as bench:
            reply = await bench.post(path, body)
            await bench.settled()
            return reply, len(bench.records[0].backends)

    return asyncio.run(go())


def calls_of(path: str, reply: Reply) -> Calls:
    if path == RESPONSES:
        items = read_response(reply.body)["output"]
        return [
            (i["name"], json.loads(i["arguments"])) for i in items if i["type"] == "function_call"
        ]
    if path == MESSAGES:
        message = read_message(reply.body)
        assert message["stop_reason"] == "tool_use"
        return [(b["name"], b["input"]) for b in message["content"] if b["type"] == "tool_use"]
    named: dict[int, list[str]] = {}
    for choice in (choice for chunk in reply.chunks for choice in chunk["choices"]):
        for piece in choice["delta"].get("tool_calls", ()):
            said = named.setdefault(piece["index"], ["", ""])
            said[0] += piece["function"].get("name", "")
            said[1] += piece["function"].get("arguments", "")
    return [(name, json.loads(arguments)) for name, arguments in named.values()]


@pytest.mark.parametrize("kind", slow_except(["atoll"], ["atoll", "vllm"]))
def test_calls_are_those_of_chat_wherever_engines_die(codec: TextCodec, kind: str) -> None:
    undisturbed, asked = ask(codec, CHAT, kind, [])
    calls = calls_of(CHAT, undisturbed)
    assert calls
    assert asked == 1
    for path in (RESPONSES, MESSAGES):
        for deaths in ([], [20], [3, 30]):
            reply, asked = ask(codec, path, kind, deaths)
            assert reply.status == 200
            assert calls_of(path, reply) == calls
            assert asked == len(deaths) + 1
