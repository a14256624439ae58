"""Chats about pictures by a language model alone: what transformers' whole model answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the extra 'engine'")

from atoll.components.base import BadInputError, Done, Setup
from atoll.components.chat_inputs import read_chat
from atoll.components.component_registry import find_component
from atoll.components.transformers_vision import TransformersVision
from atoll.core.errors import UsageError
from atoll.runtime.executor.transformers_chat import TransformersChat
from tests.components.asking import ask
from tests.components.checkpoints import FAMILIES, picture, write_checkpoint
from tests.components.vl_answers import generate
from tests.seeds import slow_except

pytestmark = pytest.mark.engine
LENGTH = 12
CONTENTS: list[list[Any]] = [
    ["What is ", picture(16, 24, 1), " beside ", picture(32, 16, 2), "?"],
    [picture(40, 24, 3), "the word"],
    ["the word or two"],
]


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[TransformersChat]:
    setup = Setup(options={"model": str(folder), "max_length": 512})
    component = TransformersChat.load(setup)
    await component.start()
    try:
        yield component
    finally:
        await component.close()


async def answer(component: TransformersChat, content: list[Any], **more: Any) -> Any:
    """Return the tokens and the end of an answer."""
    parts = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "embeds", "embeds": part}
        for part in content
    ]
    inputs = {"messages": [{"role": "user", "content": parts}], "temperature": 0.0} | more
    stream = component.stream({"max_tokens": LENGTH} | inputs)
    pieces: list[Any] = [piece async for piece in stream]
    done = pieces.pop()
    assert isinstance(done, Done)
    return [token for piece in pieces for token in piece["token_ids"]], done.value


def seen(vision: TransformersVision, content: list[Any]) -> list[Any]:
    """Return the content with what the encoder gives in place of pictures."""
    return [part if isinstance(part, str) else ask(vision, {"image": part})[0] for part in content]


@pytest.mark.parametrize("family", slow_except(["qwen2_5_vl"], FAMILIES))
async def test_it_answers_as_the_whole_model(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, family)
    vision = TransformersVision.load(Setup(options={"model": str(tmp_path)}))
    expected = [generate(model, tmp_path, content, LENGTH) for content in CONTENTS]
    # Pictures matter to this model, or the rest would show nothing.
    assert len({tuple(tokens) for tokens in expected}) == len(CONTENTS)
    asked = [seen(vision, content) for content in CONTENTS]
    async with serving(tmp_path) as component:
        (example,) = [done async for done in component.stream(component.example())][-1:]
        assert isinstance(example, Done)
        # Alone, then all together: prompts of unlike lengths, some without pictures.
        for content, tokens in zip(asked, expected, strict=True):
            said, whole = await answer(component, content)
            assert said == tokens
            assert whole["completion_tokens"] == len(tokens)
        together = await asyncio.gather(*(answer(component, content) for content in asked))
        assert [said for said, _ in together] == expected
        # An answer that began elsewhere goes on as if it had not moved.
        half = {
            "text": component.engine.codec.decode(expected[0][:5]),
            "token_ids": expected[0][:5],
        }
        said, whole = await answer(component, asked[0], resume=half)
        assert said == expected[0][5:]
        # Drawn with a seed: the same again, beside others.
        drawn = {"temperature": 1.0, "seed": 5}
        (first, _), (again, _), _ = await asyncio.gather(
            answer(component, asked[0], **drawn),
            answer(component, asked[0], **drawn),
            answer(component, asked[1], **drawn),
        )
        assert first == again


async def test_pictures_of_another_models_encoder_are_refused(tmp_path: Path) -> None:
    assert find_component("transformers-chat") is TransformersChat
    write_checkpoint(tmp_path, "qwen3_vl")
    vision = TransformersVision.load(Setup(options={"model": str(tmp_path)}))
    (right,) = ask(vision, {"image": picture(16, 24)})
    bare = {"embeds": right["embeds"]}
    wrong: list[tuple[Any, str]] = [
        (right["embeds"], "needs the grid"),
        (bare | {"grid": [1, 2, 2]}, "a grid of 1 x 2 x 2 patches is not"),
        (bare | {"grid": right["grid"]}, "needs deepstack of 3 layers"),
        (right | {"embeds": right["embeds"][:, :8]}, "have to be .*, as embeds"),
        (right | {"grid": [1, 0, 4]}, "frames, height and width"),
        (right | {"other": 1}, "known are"),
        (right | {"deepstack": np.zeros(3, np.float32)}, r"\[layers, count, width\]"),
    ]

    async with serving(tmp_path) as component:
        for content, said in wrong:
            with pytest.raises(BadInputError, match=said):
                await answer(component, [content])
        with pytest.raises(BadInputError, match="mark of a picture in it"):
            await answer(component, ["<|image_pad|>"])
        # Nothing of that harms others.
        assert len((await answer(component, [right]))[0]) > 0
    # And a model that knows nothing of grids says so, rather than read the picture wrongly.
    part = {"type": "embeds", "embeds": right}
    with pytest.raises(BadInputError, match="cannot take grid") as caught:
        read_chat({"messages": [{"role": "user", "content": [part]}]})
    assert caught.value.param == "messages[0].content[0].embeds.grid"
    with pytest.raises(UsageError, match="max_batch has to be 1 or more"):
        TransformersChat.load(Setup(options={"model": str(tmp_path), "max_batch": 0}))


@pytest.mark.slow
async def test_answers_that_nobody_waits_for_stop(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gemma3")
    async with serving(tmp_path) as component:
        request = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 400}
        stream = component.stream(request | {"temperature": 0.0})
        assert await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert len((await answer(component, ["word"]))[0]) <= LENGTH
        # Closed while one is asked, whoever waits hears of it.
        waiting = asyncio.ensure_future(answer(component, ["word"], max_tokens=400, seed=1))
        await asyncio.sleep(0)
        await component.close()
        with pytest.raises(Exception, match="engine is closed"):
            await waiting
