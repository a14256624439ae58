"""The engine as a component: its own answers, whole and in pieces, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'engine'")
pytest.importorskip("zmq", reason="needs the extra 'engine'")

from atoll.components.base import BadInputError, Done, Setup
from atoll.components.component_registry import find_component
from atoll.core.errors import AtollError, UsageError
from atoll.engine.engine_errors import EngineError
from atoll.runtime.executor.smollm2 import SmolLm2
from atoll.runtime.openai import join_calls
from tests.engine.chatting import TinyChat

pytestmark = pytest.mark.engine

QUESTION = [{"role": "user", "content": "the word or two"}]
GREEDY = {"messages": QUESTION, "temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyChat:
    return TinyChat(tmp_path_factory.mktemp("chat"))


@asynccontextmanager
async def serving(model: TinyChat, **options: Any) -> AsyncIterator[SmolLm2]:
    """The component, started, and closed whatever happens."""
    more = {"model": str(model.folder), "kv_bytes": 2**20} | options
    component = await asyncio.to_thread(SmolLm2.load, Setup(options=more))
    await component.start()
    try:
        yield component
    finally:
        await component.close()


async def ask(component: SmolLm2, inputs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the pieces and the end of an answer."""
    *pieces, done = [piece async for piece in component.stream(inputs)]
    assert isinstance(done, Done)
    assert not any(isinstance(piece, Done) for piece in pieces)
    return pieces, done.value


def joined(pieces: list[Any]) -> tuple[str, list[int]]:
    return "".join(p["text"] for p in pieces), [t for p in pieces for t in p["token_ids"]]


async def test_it_answers_as_the_model_does_whatever_else_is_asked(model: TinyChat) -> None:
    async with serving(model) as component:
        assert find_component("smollm2") is SmolLm2
        codec = component.engine.codec
        assert (await ask(component, dict(component.example())))[1]["completion_tokens"] == 1
        questions = [[{"role": "user", "content": text}] for text in ("the", "word", "or the", "")]
        answers = await asyncio.gather(
            *(ask(component, GREEDY | {"messages": q, "stop": []}) for q in questions)
        )
        for question, (pieces, whole) in zip(questions, answers, strict=True):
            prompt = codec.chat(question)
            tokens = model.answer(prompt, 12)
            if codec.eos[0] in tokens:
                tokens = tokens[: tokens.index(codec.eos[0]) + 1]
            assert joined(pieces) == (codec.decode(tokens), tokens)
            assert whole == {
                "text": codec.decode(tokens),
                "finish_reason": "length" if len(tokens) == 12 else "stop",
                "prompt_tokens": len(prompt),
                "completion_tokens": len(tokens),
            }


@pytest.mark.slow
async def test_vectors_of_its_own_tokens_are_as_good_as_text(model: TinyChat) -> None:
    async with serving(model) as component:
        codec = component.engine.codec
        inner = codec.encode("word the or", special=False)
        pieces = (
            codec.encode("<|user|>the ", special=False)
            + inner
            + codec.encode(" word<|end|><|assistant|>", special=False)
        )
        content = [
            {"type": "text", "text": "the "},
            {"type": "embeds", "embeds": model.own_rows(inner)},
            {"type": "text", "text": " word"},
        ]
        messages = [{"role": "user", "content": content}]
        said, whole = await ask(component, GREEDY | {"messages": messages})
        assert joined(said)[1] == model.answer(pieces, 12)
        assert whole["prompt_tokens"] == len(pieces)
        # Two pictures, at the very ends of a message and one after another; then others.
        for seed in (1, 2):
            rows = np.random.default_rng(seed).normal(0, 0.3, (5, component.engine.codec.width))
            parts = [{"type": "embeds", "embeds": r.astype(np.float16)} for r in (rows, 2 * rows)]
            asked = GREEDY | {"messages": [{"role": "user", "content": parts}]}
            first, again = await ask(component, asked), await ask(component, asked)
            assert first == again
            assert first[1]["prompt_tokens"] == 10 + 3
            assert first[1]["text"] != whole["text"]
            whole = first[1]


@pytest.mark.slow
async def test_an_answer_goes_on_from_anywhere_as_if_it_had_never_stopped(model: TinyChat) -> None:
    async with serving(model) as component:
        for sampling in ({}, {"temperature": 1.0, "seed": 7, "frequency_penalty": 0.5}):
            inputs = GREEDY | sampling
            pieces, whole = await ask(component, inputs)
            for cut in (0, 1, len(pieces) // 2, len(pieces)):
                text, tokens = joined(pieces[:cut])
                rest, again = await ask(
                    component, inputs | {"resume": {"text": text, "token_ids": tokens}}
                )
                assert again == whole
                assert text + joined(rest)[0] == whole["text"]
                assert tokens + joined(rest)[1] == joined(pieces)[1]
        # By text alone it goes on too, from where the text ends.
        pieces, _ = await ask(component, GREEDY)
        text = joined(pieces[:2])[0]
        rest, again = await ask(component, GREEDY | {"resume": {"text": text, "token_ids": []}})
        assert again["text"].startswith(text)
        assert again["text"] == text + joined(rest)[0]


async def test_a_stop_string_ends_the_answer_and_is_never_shown(model: TinyChat) -> None:
    async with serving(model) as component:
        _, whole = await ask(component, GREEDY)
        stop = whole["text"][4:6]
        pieces, ended = await ask(component, GREEDY | {"stop": [stop]})
        assert ended["finish_reason"] == "stop"
        assert ended["text"] == joined(pieces)[0] == whole["text"][: whole["text"].index(stop)]


@pytest.fixture(scope="module")
def caller(model: TinyChat, tmp_path_factory: pytest.TempPathFactory) -> TinyChat:
    """The same model with a template that knows calls, and tells of tools in few words."""
    folder = tmp_path_factory.mktemp("caller") / "model"
    shutil.copytree(model.folder, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    told = "{% if tools %}{{ tools[0].function.name }}<tool_call>{% endif %}"
    path.write_text(json.dumps(settings | {"chat_template": told + settings["chat_template"]}))
    again = copy.copy(model)
    again.folder = folder
    return again


async def test_it_obeys_forms_tools_and_logprobs_and_goes_on_with_them(caller: TinyChat) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    word = {"enum": ["or", "two"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": word}}
    look = {"type": "function", "function": {"name": "look", "parameters": schema}}
    plain = {**GREEDY, "max_tokens": 100}
    async with serving(caller) as component:
        pieces, whole = await ask(component, plain | {"response_format": form})
        assert json.loads(whole["text"]) in ("or", "two")
        assert joined(pieces)[0] == whole["text"]
        inputs = plain | {"tools": [look], "tool_choice": "required", "parallel_tool_calls": False}
        pieces, whole = await ask(component, inputs)
        (call,) = join_calls([c for piece in pieces for c in piece.get("tool_calls", ())])
        assert call["function"]["name"] == "look"
        assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
        assert (whole["text"], whole["finish_reason"]) == ("", "tool_calls")
        assert whole["prompt_tokens"] < 40, "no more than the template tells"
        # A loss in the middle of a call repeats nothing of it and leaves nothing out.
        for cut in (1, len(pieces) // 2, len(pieces) - 1):
            text, tokens = joined(pieces[:cut])
            rest, again = await ask(
                component, inputs | {"resume": {"text": text, "token_ids": tokens}}
            )
            told = [c for piece in [*pieces[:cut], *rest] for c in piece.get("tool_calls", ())]
            assert join_calls(told) == [call]
            assert again == whole
        # What the call gave is read, and answered.
        result = {"role": "tool", "tool_call_id": call["id"], "content": "or"}
        told = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
        assert (await ask(component, GREEDY | {"messages": told}))[1]["completion_tokens"]
        pieces, _ = await ask(component, GREEDY | {"logprobs": True, "top_logprobs": 2})
        named = [entry for piece in pieces for entry in piece["logprobs"]]
        assert len(named) == len(joined(pieces)[1])
        assert all(e["logprob"] == e["top_logprobs"][0]["logprob"] for e in named)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"response_format": {"type": "xml"}}, "response_format.type"),
            ({"tools": [{"type": "x"}]}, "tools[0].type"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"top_logprobs": 2}, "top_logprobs"),
        ]
        for change, param in wrong:
            with pytest.raises(BadInputError) as caught:
                await ask(component, GREEDY | change)
            assert caught.value.param == param


async def test_leaving_early_frees_its_room(model: TinyChat) -> None:
    async with serving(model) as component:
        long = GREEDY | {"max_tokens": 200, "messages": [{"role": "user", "content": "or the"}]}
        stream = component.stream(long)
        async with contextlib.aclosing(stream):  # type: ignore[type-var]
            async for _ in stream:
                break
        deadline_s = time.monotonic() + 60.0
        while True:
            stats = component.engine.stats()
            if stats is not None and stats.steps and not stats.blocks_used:
                break
            assert time.monotonic() < deadline_s, "leaving left blocks behind"
            await asyncio.sleep(0.05)
        assert stats.tokens < 200


async def test_what_cannot_be_read_is_the_clients_fault(model: TinyChat) -> None:
    def vectors(count: int, width: int) -> Any:
        rows = np.zeros((count, width), np.float32)
        return [{"role": "user", "content": [{"type": "embeds", "embeds": rows}]}]

    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"messages": vectors(2, 31)}, "messages[0].content", "31 wide, the model 32"),
        ({"messages": vectors(65, 32)}, "messages", "65 vectors are more than 64"),
        ({"messages": vectors(62, 32)}, "messages", "65 tokens and the model takes 64"),
        ({"messages": [{"role": "user", "content": "x" * 70}]}, "messages", "takes 64"),
        ({"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages", "characters"),
        ({"resume": {"token_ids": [264]}}, "resume.token_ids", "below 264"),
    ]
    async with serving(model, max_length=64) as component:
        assert component.engine.max_length == 64
        for change, param, message in wrong:
            with pytest.raises(BadInputError, match=message) as caught:
                await ask(component, GREEDY | change)
            assert caught.value.param == param
        assert (await ask(component, GREEDY))[1]["completion_tokens"] == 12


async def test_room_for_kv_bounds_the_length(model: TinyChat) -> None:
    async with serving(model, kv_bytes=48 * 512) as component:
        # 4 layers of 2 heads of 8 numbers, keys and values, 4 bytes: 512 bytes a position.
        assert component.engine.max_length == 48
        _, whole = await ask(component, GREEDY | {"max_tokens": None, "stop": None})
        assert whole["completion_tokens"] + whole["prompt_tokens"] <= 48


async def test_a_broken_engine_is_said_and_nobody_waits_for_it(model: TinyChat) -> None:
    async with serving(model) as component:

        def fall_over() -> bool:
            raise ZeroDivisionError("no such number")

        component.engine._node.core.step = fall_over  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(EngineError, match="broke: ZeroDivisionError: no such number"):
                await ask(component, GREEDY)


def test_options_are_checked(model: TinyChat) -> None:
    with pytest.raises(UsageError, match="unknown option 'modle'"):
        SmolLm2.load(Setup(options={"modle": "x"}))
    with pytest.raises(UsageError, match="max_length: no answer fits 1 position"):
        SmolLm2.load(Setup(options={"model": str(model.folder), "max_length": 1}))
    with pytest.raises(AtollError, match="dtype"):
        SmolLm2.load(Setup(options={"model": str(model.folder), "dtype": "int3"}))
    with pytest.raises(AtollError, match="no such model"):
        SmolLm2.load(Setup(options={"model": "/no/such"}))


def test_closing_without_having_begun_gives_everything_back(model: TinyChat) -> None:
    component = SmolLm2.load(Setup(options={"model": str(model.folder), "kv_bytes": 2**20}))
    asyncio.run(component.close())
    assert component.engine._context.closed


@pytest.mark.slow
async def test_smollm2_itself_reads_text_and_vectors_alike(tmp_path: Path) -> None:
    """The real model: an answer known to be right, from text and from vectors of that text."""

    try:
        component = await asyncio.to_thread(SmolLm2.load, Setup())
    except AtollError as error:
        pytest.skip(f"the model cannot be fetched: {error}")
    await component.start()
    try:
        codec = component.engine.codec
        text = "What is the capital of France?"
        asked = {"temperature": 0.0, "max_tokens": 16}
        plain = await ask(component, asked | {"messages": [{"role": "user", "content": text}]})
        assert "Paris" in plain[1]["text"]
        import torch

        from atoll.engine.model_stage import StageModel

        stage = component.engine._node.core.stage
        assert isinstance(stage, StageModel)
        embed = stage.embed
        assert embed is not None

        with torch.inference_mode():
            rows = embed(torch.tensor(codec.encode(text, special=False))).numpy()
        parts = [{"type": "embeds", "embeds": rows}]
        seen = await ask(component, asked | {"messages": [{"role": "user", "content": parts}]})
        assert seen == plain
    finally:
        await component.close()
