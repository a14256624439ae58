"""A language model behind somebody's OpenAI-compatible server, as a component."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

import msgspec

from atoll.components.base import BadInputError, Done, Inputs, Output, Setup, StreamComponent
from atoll.components.chat_inputs import ChatInputs, parts_of, read_chat
from atoll.core.errors import AtollError, UsageError
from atoll.core.request_parameters import COMPONENT_PARAMETERS
from atoll.runtime.http.http_client import StatusError, stream_lines
from atoll.runtime.instance.vectors import write_vectors
from atoll.runtime.openai import usage_of

EmbedsForm = Literal["atoll", "vllm"]
_OPTIONS = ("url", "model", "api_key_env", "embeds", "source", "timeout_s")
_FAULTS = frozenset({400, 413, 422})
"""Statuses by which a server says that the request itself is wrong."""


class ServerAnswerError(Exception):
    """A server's answer broke off, or cannot be gone on with; another server may do better."""


@dataclass(slots=True)
class _Question:
    """Request that is sent, and how its answer is read.

    before: tokens of the answer so far that the server counts as prompt. repeats: whether the server
    begins at the start again, so that the text so far is to be left out of what it says. mute: the answer
    was as long as it may be, and only the count of the prompt is wanted.
    """

    path: str
    body: dict[str, Any]
    shown: str = ""
    before: int = 0
    repeats: bool = False
    mute: bool = False

    def go_on_after(self, tokens: int) -> None:
        """Take the tokens of the answer so far off the limit."""
        self.before = tokens
        most = self.body.get("max_tokens")
        if most is not None:
            self.mute = tokens >= most
            self.body["max_tokens"] = max(1, most - tokens)


@dataclass(slots=True)
class _Answer:
    """Parts of an answer that have come."""

    said: list[str] = field(default_factory=list)
    tokens: int = 0
    finish: str | None = None
    usage: dict[str, Any] | None = None


class OpenAiChat(StreamComponent):
    """Asks any OpenAI-compatible server.

    Options: url ("http://host:port/v1"), model, api_key_env (the name of an environment variable that
    holds the key), timeout_s (the longest silence). embeds says how the server takes vectors in messages:
    "atoll" (an instance of the stage engine), "vllm" (`prompt_embeds` of /v1/completions, where the whole
    prompt is vectors, so that `source` must name the model's folder; its embedding layer must be a plain
    table), or not at all.

    An answer that began elsewhere is gone on with exactly by "atoll", by text at "vllm", and elsewhere by
    asking again, where the same question gives the same answer (temperature 0 or a seed).
    """

    name: ClassVar[str] = "openai-chat"

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        embeds: EmbedsForm | None = None,
        whole: WholePrompt | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._model, self._api_key = model, api_key
        self._embeds, self._whole, self._timeout_s = embeds, whole, timeout_s

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Check the options; the server is not asked yet."""
        unknown = sorted(set(setup.options or {}) - set(_OPTIONS))
        if unknown:
            raise _wrong(f"unknown option {unknown[0]!r}", f"use {', '.join(_OPTIONS)}")
        url, model = setup.option("url"), setup.option("model")
        if not isinstance(url, str) or urlsplit(url).scheme not in ("http", "https"):
            raise _wrong("no url of a server", "write http://HOST:PORT/v1")
        if not isinstance(model, str) or not model:
            raise _wrong("no model", "name the model as the server does")
        embeds, source = setup.option("embeds"), setup.option("source")
        if embeds not in (None, "atoll", "vllm"):
            raise _wrong(f"unknown form of embeds {embeds!r}", "use atoll or vllm")
        if embeds == "vllm" and not source:
            raise _wrong("vectors for vLLM need the model's folder", "give it as source")
        variable = setup.option("api_key_env")
        key = None if variable is None else os.environ.get(variable)
        if variable is not None and not key:
            raise _wrong(f"the environment has no {variable}", "set it to the server's key")
        return cls(
            url,
            model,
            api_key=key,
            embeds=embeds,
            whole=WholePrompt(source) if embeds == "vllm" else None,
            timeout_s=float(setup.option("timeout_s", 120.0)),
        )

    def example(self) -> Inputs:
        """Return a question of a word, to be answered with one token."""
        return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}

    async def stream(self, inputs: Inputs) -> AsyncIterator[Output | Done]:
        """Yield {"text", "token_ids"} as the answer grows, then the whole."""
        question = await self._ask(read_chat(inputs))
        answer = _Answer([question.shown])
        left = question.shown if question.repeats else ""
        lines = stream_lines(
            f"{self._url}{question.path}",
            body=question.body,
            timeout_s=self._timeout_s,
            api_key=self._api_key,
        )
        try:
            async with contextlib.aclosing(lines):
                async for line in lines:
                    for text, tokens in _read_line(line, answer):
                        new, left = _leave_out(text, left)
                        if question.mute:
                            continue
                        # Tokens without text count once everything known has been repeated.
                        if new or (tokens and not left):
                            answer.said.append(new)
                            yield {"text": new, "token_ids": tokens}
        except StatusError as error:
            raise _refusal(error) from error
        # Text that was to be repeated is missing: the server answered with less than before.
        if answer.finish is None or left:
            raise ServerAnswerError(f"the answer of {self._url} broke off")
        yield Done(_summary(question, answer))

    async def _ask(self, asked: ChatInputs) -> _Question:
        if asked.has_embeds and self._embeds is None:
            raise BadInputError("this server reads text only", "messages")
        if asked.has_embeds and self._whole is not None:
            return await asyncio.to_thread(self._whole.ask, asked, self._common(asked))
        body = self._common(asked) | {"messages": [_message(m) for m in asked.messages]}
        if asked.max_tokens is not None:
            body["max_tokens"] = asked.max_tokens
        question = _Question("/chat/completions", body)
        before = asked.resume
        if before is not None:
            question.shown = before.text
            if self._embeds == "atoll":
                state: dict[str, Any] = {"text": before.text}
                if before.token_ids is not None:
                    state["token_ids"] = before.token_ids
                body["atoll"] = {"resume": state}
            elif self._embeds == "vllm":
                body["messages"].append({"role": "assistant", "content": before.text})
                body |= {"add_generation_prompt": False, "continue_final_message": True}
                question.go_on_after(len(before.token_ids or ()))
            elif asked.temperature == 0.0 or asked.seed is not None:
                question.repeats = True
            else:
                raise ServerAnswerError("this server cannot go on with an answer drawn at random")
        return question

    def _common(self, asked: ChatInputs) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for each in COMPONENT_PARAMETERS:
            value = getattr(asked, each.name)
            # The limit depends on the endpoint; values that change nothing need not be said.
            if each.name != "max_tokens" and value is not None and value not in each.use.neutral:
                body[each.name] = value
        return body


class WholePrompt:
    """Conversations as nothing but vectors, as vLLM takes them: the model's own for text."""

    def __init__(self, source: str) -> None:
        from atoll.engine.text import TextCodec
        from atoll.engine.weights.reader import WeightReader
        from atoll.engine.weights.sources import resolve

        folder = resolve(source)
        self._codec = TextCodec(folder)
        self._table = WeightReader(folder).read("model.embed_tokens.weight")

    def ask(self, asked: ChatInputs, body: dict[str, Any]) -> _Question:
        """Return the question with a prompt of vectors; an answer so far is part of them."""
        import torch

        from atoll.engine.prompts import chat_prompt

        asked.check_width(self._codec.width)
        try:
            most = self._codec.max_length
            tokens, embeds = chat_prompt(self._codec, asked.messages, max_tokens=most)
        except AtollError as error:
            raise BadInputError(str(error), "messages") from error
        before: list[int] = []
        if asked.resume is not None:
            known = asked.resume.token_ids
            text = asked.resume.text
            before = self._codec.encode(text, special=False) if known is None else list(known)
        if max(before, default=0) >= self._codec.vocabulary:
            raise BadInputError(f"tokens are below {self._codec.vocabulary}", "resume.token_ids")
        room = most - len(tokens)
        if room < 1:
            raise BadInputError(
                f"the prompt has {len(tokens)} tokens and the model takes {most}", "messages"
            )
        # The model's own vectors for all tokens; those that were given replace some of them.
        rows = self._table[torch.tensor([*tokens, *before])].float()
        if embeds is not None:
            rows[torch.tensor(embeds.positions)] = torch.tensor(embeds.rows)
        body |= {"prompt_embeds": _saved(rows), "max_tokens": min(asked.max_tokens or room, room)}
        shown = "" if asked.resume is None else asked.resume.text
        question = _Question("/completions", body, shown)
        question.go_on_after(len(before))
        return question


def _saved(rows: Any) -> str:
    import base64
    import io

    import torch

    written = io.BytesIO()
    torch.save(rows, written)
    return base64.b64encode(written.getvalue()).decode()


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, str):
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "embeds", "embeds": write_vectors(part)}
            for part in parts_of(message)
        ]
    return {"role": message["role"], "content": content}


def _read_line(line: bytes, answer: _Answer) -> Iterator[tuple[str, list[int]]]:
    """Yield the text and the tokens of a line of the stream, and note what else it says."""
    data = line.strip()
    if not data.startswith(b"data:"):
        return
    data = data[5:].strip()
    if data == b"[DONE]":
        return
    try:
        chunk = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ServerAnswerError(f"a chunk of the answer is not JSON: {error}") from error
    if not isinstance(chunk, dict):
        raise ServerAnswerError("a chunk of the answer is not an object")
    if chunk.get("error"):
        raise ServerAnswerError(f"the server gave up: {_error_text(chunk)}")
    if isinstance(chunk.get("usage"), dict):
        answer.usage = chunk["usage"]
    choices = chunk.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    text = text if isinstance(text, str) else ""
    tokens = [token for token in choice.get("token_ids") or () if isinstance(token, int)]
    answer.finish = choice.get("finish_reason") or answer.finish
    # A server that names no tokens: each piece of text counts as one.
    answer.tokens += len(tokens) or bool(text)
    if text or tokens:
        yield text, tokens


def _leave_out(text: str, left: str) -> tuple[str, str]:
    """Return the text without what is known of it, and what is still to be left out."""
    shared = min(len(text), len(left))
    if text[:shared] != left[:shared]:
        raise ServerAnswerError("the server answered otherwise when asked again")
    return text[shared:], left[shared:]


def _summary(question: _Question, answer: _Answer) -> dict[str, Any]:
    usage = usage_of(answer.usage or {"completion_tokens": answer.tokens})
    new = 0 if question.mute else usage.completion_tokens
    return {
        "text": "".join(answer.said),
        "finish_reason": "length" if question.mute else answer.finish,
        "prompt_tokens": max(0, usage.prompt_tokens - question.before),
        "completion_tokens": new + question.before,
    }


def _refusal(error: StatusError) -> Exception:
    if error.status not in _FAULTS:
        return error
    try:
        answered = msgspec.json.decode(error.body)
    except (msgspec.DecodeError, RecursionError):
        answered = None
    found = answered.get("error") if isinstance(answered, dict) else None
    param = found.get("param") if isinstance(found, dict) else None
    return BadInputError(
        _error_text(answered) or str(error), param if isinstance(param, str) else None
    )


def _error_text(answered: Any) -> str:
    """Return the message of an error, in whichever of the usual shapes it came."""
    found = answered.get("error") if isinstance(answered, dict) else None
    message = found.get("message") if isinstance(found, dict) else found
    return str(message)[:1000] if message else ""


def _wrong(message: str, hint: str) -> UsageError:
    return UsageError(message, field=OpenAiChat.name, hint=hint)
