"""A language model behind somebody's OpenAI-compatible server, as a component."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

import msgspec

from atoll.components.base import BadInputError, Done, Inputs, Output, Setup, StreamComponent
from atoll.components.chat_inputs import ChatInputs, parts_of, read_chat
from atoll.core.errors import UsageError
from atoll.core.request_parameters import COMPONENT_PARAMETERS
from atoll.runtime.http.http_client import StatusError, stream_lines
from atoll.runtime.instance.vectors import write_vectors
from atoll.runtime.openai import usage_of

EmbedsForm = Literal["atoll"]
_OPTIONS = ("url", "model", "api_key_env", "embeds", "timeout_s")
_FAULTS = frozenset({400, 413, 422})
"""Statuses by which a server says that the request itself is wrong."""


class ServerAnswerError(Exception):
    """A server's answer broke off, or cannot be gone on with; another server may do better."""


@dataclass(slots=True)
class _Question:
    """Request that is sent, and how its answer is read.

    repeats: whether the server begins at the start again, so that the text so far is to be left out of what
    it says.
    """

    body: dict[str, Any]
    shown: str = ""
    repeats: bool = False


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
    holds the key), timeout_s (the longest silence). embeds: "atoll" where the server is an instance of the
    stage engine, which takes vectors in messages; left out, vectors are refused.

    An answer that began elsewhere is gone on with exactly by "atoll", and elsewhere by asking again, where
    the same question gives the same answer (temperature 0 or a seed).
    """

    name: ClassVar[str] = "openai-chat"

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        embeds: EmbedsForm | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._model, self._api_key = model, api_key
        self._embeds, self._timeout_s = embeds, timeout_s

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
        embeds = setup.option("embeds")
        if embeds not in (None, "atoll"):
            hint = "use atoll; for vLLM there is the component vllm-chat"
            raise _wrong(f"unknown form of embeds {embeds!r}", hint)
        variable = setup.option("api_key_env")
        key = None if variable is None else os.environ.get(variable)
        if variable is not None and not key:
            raise _wrong(f"the environment has no {variable}", "set it to the server's key")
        return cls(
            url,
            model,
            api_key=key,
            embeds=embeds,
            timeout_s=float(setup.option("timeout_s", 120.0)),
        )

    def example(self) -> Inputs:
        """Return a question of a word, to be answered with one token."""
        return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}

    async def stream(self, inputs: Inputs) -> AsyncIterator[Output | Done]:
        """Yield {"text", "token_ids"} as the answer grows, then the whole."""
        question = self._ask(read_chat(inputs))
        answer = _Answer([question.shown])
        left = question.shown if question.repeats else ""
        lines = stream_lines(
            f"{self._url}/chat/completions",
            body=question.body,
            timeout_s=self._timeout_s,
            api_key=self._api_key,
        )
        try:
            async with contextlib.aclosing(lines):
                async for line in lines:
                    for text, tokens in _read_line(line, answer):
                        new, left = _leave_out(text, left)
                        # Tokens without text count once everything known has been repeated.
                        if new or (tokens and not left):
                            answer.said.append(new)
                            yield {"text": new, "token_ids": tokens}
        except StatusError as error:
            raise _refusal(error) from error
        # Text that was to be repeated is missing: the server answered with less than before.
        if answer.finish is None or left:
            raise ServerAnswerError(f"the answer of {self._url} broke off")
        yield Done(_summary(answer))

    def _ask(self, asked: ChatInputs) -> _Question:
        if asked.has_embeds and self._embeds is None:
            raise BadInputError("this server reads text only", "messages")
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [_message(m) for m in asked.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for each in COMPONENT_PARAMETERS:
            value = getattr(asked, each.name)
            # Values that change nothing need not be said.
            if value is not None and value not in each.use.neutral:
                body[each.name] = value
        question = _Question(body)
        before = asked.resume
        if before is not None:
            question.shown = before.text
            if self._embeds == "atoll":
                state: dict[str, Any] = {"text": before.text}
                if before.token_ids is not None:
                    state["token_ids"] = before.token_ids
                body["atoll"] = {"resume": state}
            elif asked.temperature == 0.0 or asked.seed is not None:
                question.repeats = True
            else:
                raise ServerAnswerError("this server cannot go on with an answer drawn at random")
        return question


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
    text = delta.get("content") if isinstance(delta, dict) else None
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


def _summary(answer: _Answer) -> dict[str, Any]:
    usage = usage_of(answer.usage or {"completion_tokens": answer.tokens})
    return {
        "text": "".join(answer.said),
        "finish_reason": answer.finish,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
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
