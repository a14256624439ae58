"""Streamed answers as clients take them in, event by event, and what is wrong with them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

_CLOSE = 1e-3
"""Log-probabilities that differ by less are the same."""


class BrokenAnswerError(Exception):
    """An answer that is not as it should be; `kind` is the counter it goes to."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


class StreamBusyError(OSError):
    """Another gateway has the stream."""


@dataclass
class ChoiceReader:
    """One of the answers of a stream."""

    text: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[object]] = field(default_factory=dict)
    """All that is listed for each token, by its name; numbers are kept apart."""
    numbers: list[float] = field(default_factory=list, repr=False)
    """Log-probabilities, whose last digits depend on what else was computed at the time."""
    finish: list[str] = field(default_factory=list)
    roles: int = 0

    def add(self, choice: dict[str, Any]) -> None:
        """Take in what a chunk says of it."""
        delta = choice.get("delta") or choice
        self.text += delta.get("text") or delta.get("content") or ""
        self.roles += "role" in delta
        for call in delta.get("tool_calls") or ():
            made = self.calls.setdefault(call["index"], ["", ""])
            made[0] += call["function"].get("name") or ""
            made[1] += call["function"].get("arguments") or ""
        self.token_ids += choice.get("token_ids") or ()
        for name, listed in (choice.get("logprobs") or {}).items():
            told = [self._take_numbers(each) for each in listed or ()]
            self.logprobs.setdefault(name, []).extend(told)
        if choice["finish_reason"]:
            self.finish.append(choice["finish_reason"])

    def _take_numbers(self, value: object) -> object:
        """Return what is listed for a token without its numbers, which are kept."""
        if isinstance(value, float):
            self.numbers.append(value)
            return "number"
        if isinstance(value, dict):
            return {name: self._take_numbers(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._take_numbers(each) for each in value]
        return value


@dataclass
class AnswerReader:
    """Takes in the events of a stream, whoever sends them."""

    choices: dict[int, ChoiceReader] = field(default_factory=dict)
    names: set[tuple[object, ...]] = field(default_factory=set)
    """Id, time and model of its chunks: one each."""
    usage: list[tuple[int, int]] = field(default_factory=list)
    """Tokens of prompt and answer, once."""
    done: bool = False
    last_id: str = ""
    """Of the last event that came whole."""
    _rest: bytes = b""

    @property
    def text(self) -> str:
        """Text of all its answers."""
        return "".join(self.choices[index].text for index in sorted(self.choices))

    @property
    def token_ids(self) -> list[int]:
        """Tokens of all its answers."""
        return [token for index in sorted(self.choices) for token in self.choices[index].token_ids]

    @property
    def tokens(self) -> int:
        """How many these are."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def feed(self, data: bytes) -> int:
        """Take in bytes of the body; returns how many tokens came with them."""
        before = self.tokens
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            lines = dict(line.split(b": ", 1) for line in event.split(b"\n"))
            if b"id" in lines:
                self._follow(lines[b"id"].decode())
            if lines.get(b"data") == b"[DONE]":
                self.done = True
            elif b"data" in lines:
                self._chunk(json.loads(lines[b"data"]))
        return self.tokens - before

    def reconnect(self) -> None:
        """Begin with another connection: half an event comes again."""
        self._rest = b""

    def _follow(self, event_id: str) -> None:
        stream, _, number = event_id.partition("-")
        last, _, before = self.last_id.partition("-")
        if last and (stream != last or int(number) != int(before) + 1):
            raise BrokenAnswerError("token_mismatch", f"event {event_id} after {self.last_id}")
        self.last_id = event_id

    def _chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise BrokenAnswerError("errors", json.dumps(chunk)[:300])
        self.names.add(tuple(chunk.get(key) for key in ("id", "created", "model")))
        for choice in chunk["choices"]:
            self.choices.setdefault(choice.get("index", 0), ChoiceReader()).add(choice)
        if used := chunk.get("usage"):
            self.usage.append((used.get("prompt_tokens", 0), used["completion_tokens"]))

    def check_end(self, tokens: int) -> None:
        """See that it has all of one answer of so many tokens; BrokenAnswerError says what it lacks."""
        finish = [choice.finish for choice in self.choices.values()]
        if not self.done or self.tokens != tokens or finish != [["length"]]:
            raise BrokenAnswerError("truncated", f"{self.tokens} of {tokens} tokens, {finish}")

    @property
    def answer(self) -> tuple[object, ...]:
        """What is compared, but for log-probabilities."""
        each = [str(self.choices[index]) for index in sorted(self.choices)]
        return (*each, len(self.names), tuple(self.usage))

    @property
    def numbers(self) -> list[float]:
        """Log-probabilities of all its answers."""
        return [x for index in sorted(self.choices) for x in self.choices[index].numbers]

    def difference(self, other: AnswerReader) -> str | None:
        """Return how it differs from what it should be; None: it does not."""
        if self.answer != other.answer:
            pairs = zip(self.answer, other.answer, strict=False)
            return "; ".join(_differ(str(a), str(b)) for a, b in pairs if a != b) or "more answers"
        off = [abs(a - b) for a, b in zip(self.numbers, other.numbers, strict=True)]
        return f"log-probabilities by {max(off)}" if max(off, default=0.0) > _CLOSE else None


def _differ(got: str, want: str) -> str:
    """Return both from where they differ."""
    at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), len(want))
    part = slice(max(0, at - 20), at + 40)
    return f"{got[part]!r} for {want[part]!r}"


async def read_head(source: asyncio.StreamReader) -> None:
    """Read the head of a streamed answer; whatever else it is, is an error."""
    head = await source.readuntil(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 409"):
        raise StreamBusyError("the stream is busy")
    if not head.startswith(b"HTTP/1.1 200"):
        body = await source.read(600)
        raise BrokenAnswerError("errors", (head.split(b"\r\n", 1)[0] + b" " + body).decode())
    if b"transfer-encoding: chunked" not in head.lower():
        raise BrokenAnswerError("errors", "the answer is no stream")


async def read_piece(source: asyncio.StreamReader) -> bytes:
    """Read a chunk of the body; the last one is empty."""
    size = int(await source.readuntil(b"\r\n"), 16)
    return (await source.readexactly(size + 2))[:size]


async def complete(url: str, body: dict[str, Any], max_s: float) -> AnswerReader:
    """Ask for a completion, streamed, and return what came; BrokenAnswerError where that is an error."""
    from atoll.runtime.http.http_client import FetchError, fetch

    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        status, answer = await fetch(f"{url}/v1/completions", body=asked, timeout_s=max_s)
    except FetchError as error:
        hung = isinstance(error.__cause__, TimeoutError)
        raise BrokenAnswerError("hung" if hung else "errors", str(error)) from error
    if status != 200:
        raise BrokenAnswerError("errors", f"status {status}: {answer[-300:].decode()}")
    reader = AnswerReader()
    reader.feed(answer)
    return reader
