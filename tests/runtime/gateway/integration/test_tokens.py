"""/tokenize and /detokenize through a gateway, whatever kind of backend is behind it."""

from __future__ import annotations

import pytest

from tests.runtime.gateway.engine import Fault, ScriptedEngine
from tests.runtime.gateway.harness import running


@pytest.mark.parametrize("kind", ["atoll", "vllm", "sglang", "llamacpp"])
async def test_there_and_back(kind: str) -> None:
    async with running([ScriptedEngine(kind=kind)]) as bench:
        found = await bench.post("/tokenize", {"model": "m", "prompt": "ab"})
        assert found.status == 200, found.body
        assert (found.json["count"], found.json["tokens"]) == (2, [97, 98])
        back = await bench.post("/detokenize", {"model": "m", "tokens": [97, 98]})
        assert back.json == {"prompt": "ab"}
    # Nothing was generated, and nothing is a guess.
    for record in bench.records:
        assert (record.prompt_tokens, record.completion_tokens, record.estimated) == (
            0,
            0,
            False,
        )
    assert [record.endpoint for record in bench.records] == ["/tokenize", "/detokenize"]


async def test_a_conversation_goes_to_whoever_can() -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "ab"}]}
    async with running([ScriptedEngine(kind="llamacpp"), ScriptedEngine(kind="vllm")]) as bench:
        for _ in range(4):
            found = await bench.post("/tokenize", asked)
            assert found.json["count"] == len("<user>ab<assistant>")
    async with running([ScriptedEngine(kind="llamacpp")]) as bench:
        found = await bench.post("/tokenize", asked)
        assert (found.status, found.json["error"]["param"]) == (400, "messages")
        assert not bench.gateway.relays
        assert bench.engines[0].seen == []


async def test_another_is_asked_when_one_fails() -> None:
    engines = [
        ScriptedEngine(kind="llamacpp", faults=[Fault("die_before_head"), Fault("500")] * 2),
        ScriptedEngine(kind="vllm"),
    ]
    async with running(engines) as bench:
        for _ in range(4):
            found = await bench.post("/tokenize", {"model": "m", "prompt": "ab"})
            assert found.json["tokens"] == [97, 98]
