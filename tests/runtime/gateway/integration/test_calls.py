"""Backends that die in the middle of calls and forced forms, and clients that do not notice."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs the extra 'engine'")
pytest.importorskip("llguidance", reason="needs the extra 'engine'")

from atoll.engine.text import TextCodec
from tests.runtime.gateway.calling import CallingEngine
from tests.runtime.gateway.engine import Fault
from tests.runtime.gateway.harness import CHAT, Json, Reply, chat, running
from tests.runtime.instance.tool_models import TOOLS, WEATHER, write_tool_model
from tests.seeds import slow_except

GREEDY: Json = {}
SEEDED: Json = {"temperature": 0.8, "seed": 11}
SAMPLED: Json = {"temperature": 1}
FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "pair",
        "schema": {
            "type": "object",
            "properties": {"a": {"enum": ["left", "right"]}, "b": {"enum": [1, 22, 333]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return write_tool_model(tmp_path_factory.mktemp("calls"), "hermes")


def asked(**more: Any) -> Json:
    return chat(stream=True, stream_options={"include_usage": True}, **more)


def ask(
    codec: TextCodec, kind: str, body: Json, deaths: Sequence[int]
) -> tuple[Reply, list[CallingEngine]]:
    async def go() -> tuple[Reply, list[CallingEngine]]:
        engines = [
            CallingEngine(kind=kind, codec=codec, faults=[Fault("die", after)]) for after in deaths
        ]
        engines.append(CallingEngine(kind=kind, codec=codec))
        async with running(engines) as bench:
            reply = await bench.post(CHAT, body)
            await bench.settled()
            return reply, engines

    return asyncio.run(go())


def calls_of(reply: Reply) -> list[Json]:
    """The calls as a client puts them together."""
    calls: list[Json] = []
    for choice in (choice for chunk in reply.chunks for choice in chunk["choices"]):
        for piece in choice["delta"].get("tool_calls", ()):
            if "id" in piece:
                assert piece["index"] == len(calls)
                calls.append({"id": piece["id"], "arguments": ""} | {"name": ""})
            call = calls[piece["index"]]
            call["name"] += piece["function"].get("name", "")
            call["arguments"] += piece["function"].get("arguments", "")
    return calls


def ending(reply: Reply) -> tuple[str | None, Json]:
    chunks = reply.chunks
    return chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]


@pytest.mark.parametrize(
    ("sampling", "deaths"),
    slow_except(
        [(GREEDY, (45,)), (SEEDED, (3, 50)), (SAMPLED, (50, 5, 3))],
        itertools.product((GREEDY, SEEDED, SAMPLED), ((45,), (3, 50), (50, 5, 3))),
    ),
)
def test_calls_survive_their_engine(
    codec: TextCodec, sampling: Json, deaths: Sequence[int]
) -> None:
    body = asked(tools=[WEATHER], tool_choice="required", **sampling)
    reply, engines = ask(codec, "atoll", body, deaths)
    calls = calls_of(reply)
    assert ending(reply)[0] == "tool_calls"
    assert all(isinstance(json.loads(call["arguments"]), dict) for call in calls)
    assert calls
    resumed = [s.body["atoll"]["resume"] for e in engines for s in e.seen if "atoll" in s.body]
    assert any(state["calls"] for state in resumed)
    ids = [t for c in reply.chunks for choice in c["choices"] for t in choice.get("token_ids", ())]
    assert ids in [engine.answers[-1] for engine in engines if engine.answers]
    assert ending(reply)[1]["completion_tokens"] == len(ids)
    if sampling != SAMPLED:
        alone, _ = ask(codec, "atoll", body, [])
        assert calls == calls_of(alone)
        assert ending(reply) == ending(alone)


@pytest.mark.parametrize("kind", ["vllm", "openai"])
def test_engines_that_know_no_tokens_repeat_their_calls_by_a_seed(
    codec: TextCodec, kind: str
) -> None:
    body = asked(tools=[WEATHER], tool_choice="required", temperature=1)
    reply, (first, second) = ask(codec, kind, body, [50])
    seeds = {seen.body["seed"] for engine in (first, second) for seen in engine.seen}
    assert len(seeds) == 1
    assert first.answers == second.answers
    assert ending(reply)[0] == "tool_calls"
    for call in calls_of(reply):
        json.loads(call["arguments"])


def test_what_text_can_continue_gets_no_seed(codec: TextCodec) -> None:
    for more in ({}, {"tools": TOOLS, "temperature": 0}, {"tools": TOOLS, "seed": None}):
        _, (engine,) = ask(codec, "vllm", asked() | {"temperature": 1} | more, [])
        assert engine.seen[0].body.get("seed") is None
    named_so = {"type": "function", "function": {"name": "seed"}}
    for tools in (TOOLS, [named_so]):
        _, (engine,) = ask(codec, "vllm", asked(tools=tools) | {"temperature": 1}, [])
        assert isinstance(engine.seen[0].body["seed"], int)


@pytest.mark.parametrize(
    ("sampling", "after"),
    slow_except(
        [(GREEDY, 1), (SEEDED, 7), (SAMPLED, 14)],
        itertools.product((GREEDY, SEEDED, SAMPLED), (1, 7, 14)),
    ),
)
def test_a_forced_form_survives_its_engine(codec: TextCodec, sampling: Json, after: int) -> None:
    body = asked(response_format=FORM, **sampling)
    reply, engines = ask(codec, "atoll", body, [after])
    found = json.loads(reply.text)
    assert found["a"] in ("left", "right")
    assert found["b"] in (1, 22, 333)
    assert ending(reply)[0] == "stop"
    assert [len(engine.seen) for engine in engines] == [1, 1]
    if sampling != SAMPLED:
        alone, _ = ask(codec, "atoll", body, [])
        assert reply.text == alone.text
