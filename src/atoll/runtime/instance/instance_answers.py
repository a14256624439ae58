"""The engine's tokens, as OpenAI's answers: whole, or chunk by chunk.

Every chunk carries the ids of its tokens (`token_ids`, as vLLM names it), so that an answer that breaks off
can be resumed elsewhere exactly where it was.
"""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from atoll.engine.prompt_reading import PromptReading
from atoll.engine.scheduler_core import TokenEvent
from atoll.engine.text import AnswerText, TextCodec
from atoll.runtime.instance.choice_request import ChoiceRequest, ParsedRequest
from atoll.runtime.instance.tools.call_answer import CallAnswer, ShownAnswer
from atoll.runtime.instance.tools.parser import AnswerDelta

Logprob = dict[str, Any]


@dataclass(slots=True)
class ChoiceDelta:
    """New part of the answer of one choice."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Pieces of calls, as OpenAI writes them in a stream."""


class ChoiceText:
    """Turns the tokens of one choice into pieces of text and calls; stop strings end it."""

    def __init__(self, index: int, request: ChoiceRequest, codec: TextCodec) -> None:
        self.index = index
        self._codec = codec
        self._request = request
        self._answer: AnswerText | CallAnswer
        given = (codec, request.sampling, request.stop, request.generated)
        if request.calls is None:
            self._answer = AnswerText(*given, request.shown)
        else:
            shown = ShownAnswer(request.shown, request.shown_calls)
            self._answer = CallAnswer(request.calls, *given, shown)
        self._pending: list[int] = []
        self._logprobs: list[Logprob] = []

    @property
    def completion_tokens(self) -> int:
        """Tokens so far, those generated elsewhere included."""
        return self._answer.tokens

    @property
    def finish(self) -> str | None:
        """Why the answer is over, if it is."""
        return self._answer.finish

    def owed(self) -> ChoiceDelta:
        """Return the end of an answer that was over elsewhere: what the client has not seen of it."""
        if isinstance(self._answer, CallAnswer):
            owed = self._answer.take_owed()
            return ChoiceDelta(self.index, owed.text, finish=self.finish, calls=self._written(owed))
        return ChoiceDelta(self.index, self._answer.owed, finish=self.finish)

    def add(self, event: TokenEvent) -> ChoiceDelta | None:
        """Take an event; returns what there is to say, None if that has to wait."""
        if event.token is not None:
            self._pending.append(event.token)
            if event.logprob is not None:
                self._logprobs.append(self._logprob(event))
        new = self._answer.add(event.token, event.finish_reason)
        text, calls = (new, []) if isinstance(new, str) else (new.text, self._written(new))
        finish = self._answer.finish
        if not text and not calls and finish is None and not self._logprobs:
            return None
        piece = ChoiceDelta(self.index, text, self._pending, self._logprobs, finish, calls)
        self._pending, self._logprobs = [], []
        return piece

    def echo(self, request: ChoiceRequest, reading: PromptReading | None) -> ChoiceDelta:
        """Return the prompt, shown before the answer, with how likely its tokens are if that was read."""
        entries: list[Logprob] = []
        if reading is not None:
            scored = zip(request.prompt, reading.logprobs, reading.top, strict=True)
            for token, logprob, top in scored:
                entry = self._entry(token, logprob or 0.0)
                if logprob is None:
                    entries.append(entry | {"logprob": None, "top_logprobs": None})
                else:
                    shown = [self._entry(other, p) for other, p in top]
                    entries.append(entry | {"top_logprobs": shown})
        return ChoiceDelta(self.index, request.echo or "", logprobs=entries)

    def _written(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        form = self._request.calls
        assert form is not None
        written = []
        for call in delta.calls:
            entry: dict[str, Any] = {"index": call.index}
            function = {"arguments": call.arguments}
            if call.name is not None:
                id_ = form.call_id(self._request.prompt, self.index, call.index)
                entry |= {"id": id_, "type": "function"}
                function = {"name": call.name} | function
            written.append(entry | {"function": function})
        return written

    def _logprob(self, event: TokenEvent) -> Logprob:
        assert event.token is not None
        return self._entry(event.token, event.logprob or 0.0) | {
            "top_logprobs": [self._entry(token, p) for token, p in event.top]
        }

    def _entry(self, token: int, logprob: float) -> Logprob:
        text = self._codec.token_text(token)
        value = logprob if math.isfinite(logprob) else -9999.0
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


class ResponseWriter:
    """Writes the answer to one request."""

    def __init__(self, parsed: ParsedRequest, prompt_tokens: int) -> None:
        self._parsed = parsed
        self._prompt_tokens = prompt_tokens
        kind = "chat.completion" if parsed.is_chat else "text_completion"
        self._object = f"{kind}.chunk" if parsed.is_chat and parsed.stream else kind
        prefix = "chatcmpl" if parsed.is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": self._object,
            "created": int(time.time()),
            "model": parsed.model,
        }
        self._greeting = "" if parsed.choices[0].calls is None else None
        self._offsets: dict[int, int] = {}
        self._made = [len(choice.generated) for choice in parsed.choices]

    def usage(self, completion_tokens: int) -> dict[str, int]:
        """Return what the request used."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
        }

    def roles(self) -> bytes:
        """Return the first chunk of each choice of a chat."""
        if not self._parsed.is_chat:
            return b""
        return b"".join(
            self._event(
                [
                    {
                        "index": index,
                        "delta": {"role": "assistant", "content": self._greeting},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ],
                **self._counts(index),
            )
            for index in range(len(self._parsed.choices))
        )

    def chunk(self, piece: ChoiceDelta) -> bytes:
        """Return a piece as an event."""
        choice: dict[str, Any] = {"index": piece.index}
        if self._parsed.is_chat:
            silent = bool(piece.finish or piece.calls) and not piece.text
            choice["delta"] = {} if silent else {"content": piece.text}
            if piece.calls:
                choice["delta"]["tool_calls"] = piece.calls
        else:
            choice["text"] = piece.text
        choice["logprobs"] = self._logprobs(piece.index, piece.logprobs)
        choice["finish_reason"] = piece.finish
        choice["token_ids"] = piece.tokens
        self._made[piece.index] += len(piece.tokens)
        return self._event([choice], **self._counts(piece.index))

    def _counts(self, index: int) -> dict[str, object]:
        return {"usage": self.usage(self._made[index])} if self._parsed.counts else {}

    def end(self, completion_tokens: int) -> bytes:
        """Return the last events: the usage, if asked for, and the end."""
        usage = b""
        if self._parsed.include_usage:
            usage = self._event([], usage=self.usage(completion_tokens))
        return usage + b"data: [DONE]\n\n"

    def whole(self, choices: list[list[ChoiceDelta]], completion_tokens: int) -> bytes:
        """Return the answer in one piece."""
        written = []
        for index, pieces in enumerate(choices):
            text = "".join(piece.text for piece in pieces)
            choice: dict[str, Any] = {"index": index}
            if self._parsed.is_chat:
                choice["message"] = self._message(text, pieces)
            else:
                choice["text"] = text
            logprobs = [entry for piece in pieces for entry in piece.logprobs]
            choice["logprobs"] = self._logprobs(index, logprobs)
            choice["finish_reason"] = pieces[-1].finish
            choice["token_ids"] = [token for piece in pieces for token in piece.tokens]
            written.append(choice)
        body = self._head | {"choices": written, "usage": self.usage(completion_tokens)}
        return msgspec.json.encode(body)

    def _message(self, text: str, pieces: list[ChoiceDelta]) -> dict[str, Any]:
        calls: list[dict[str, Any]] = []
        for entry in (entry for piece in pieces for entry in piece.calls):
            if entry["index"] == len(calls):
                calls.append({"id": entry["id"], "type": "function", "function": {"arguments": ""}})
            function = calls[entry["index"]]["function"]
            more = entry["function"]
            calls[entry["index"]]["function"] = {
                "name": function.get("name", "") + more.get("name", ""),
                "arguments": function["arguments"] + more["arguments"],
            }
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return message

    def _event(self, choices: list[dict[str, Any]], **more: object) -> bytes:
        data = msgspec.json.encode(self._head | {"choices": choices} | more)
        return b"data: " + data + b"\n\n"

    def _logprobs(self, index: int, entries: list[Logprob]) -> dict[str, Any] | None:
        if not self._parsed.logprobs:
            return None
        if self._parsed.is_chat:
            return {"content": entries, "refusal": None}
        offsets = []
        at = self._offsets.get(index, 0)
        for entry in entries:
            offsets.append(at)
            at += len(entry["token"])
        self._offsets[index] = at
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                None
                if entry["top_logprobs"] is None
                else {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
                for entry in entries
            ],
            "text_offset": offsets,
        }


def keep_best(
    answers: list[list[ChoiceDelta]], best_of: int, count: int
) -> list[list[ChoiceDelta]]:
    """Return, of every `best_of` answers in a row, the `count` whose tokens are likeliest on average."""
    if best_of <= count:
        return answers
    kept = []
    for start in range(0, len(answers), best_of):
        group = sorted(answers[start : start + best_of], key=_likelihood, reverse=True)
        kept += group[:count]
    return kept


def _likelihood(pieces: list[ChoiceDelta]) -> float:
    # A prompt that is shown first has no tokens of the answer.
    values = [entry["logprob"] for piece in pieces if piece.tokens for entry in piece.logprobs]
    return sum(values) / len(values) if values else float("-inf")
