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

from atoll.engine.answer import AnswerText
from atoll.engine.prompt_reading import PromptReading
from atoll.engine.scheduler_core import TokenEvent
from atoll.engine.text import TextCodec
from atoll.runtime.instance.requests import ChoiceRequest, ParsedRequest

Logprob = dict[str, Any]


@dataclass(slots=True)
class ChoiceDelta:
    """What is new in the answer of one choice."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish: str | None = None


class ChoiceText:
    """Turns the tokens of one choice into pieces of text; stop strings end it."""

    def __init__(self, index: int, request: ChoiceRequest, codec: TextCodec) -> None:
        self.index = index
        self._codec = codec
        self._answer = AnswerText(
            codec, request.sampling, request.stop, request.generated, request.shown
        )
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

    @property
    def owed(self) -> str:
        """Text of the tokens generated elsewhere that the client has not seen yet."""
        return self._answer.owed

    def add(self, event: TokenEvent) -> ChoiceDelta | None:
        """Take an event; returns what there is to say, None if that has to wait."""
        if event.token is not None:
            self._pending.append(event.token)
            if event.logprob is not None:
                self._logprobs.append(self._logprob(event))
        text = self._answer.add(event.token, event.finish_reason)
        finish = self._answer.finish
        if not text and finish is None and not self._logprobs:
            return None
        piece = ChoiceDelta(self.index, text, self._pending, self._logprobs, finish)
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
        self._offsets: dict[int, int] = {}

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
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ]
            )
            for index in range(len(self._parsed.choices))
        )

    def chunk(self, piece: ChoiceDelta) -> bytes:
        """Return a piece as an event."""
        choice: dict[str, Any] = {"index": piece.index}
        if self._parsed.is_chat:
            choice["delta"] = {"content": piece.text} if piece.text or not piece.finish else {}
        else:
            choice["text"] = piece.text
        choice["logprobs"] = self._logprobs(piece.index, piece.logprobs)
        choice["finish_reason"] = piece.finish
        choice["token_ids"] = piece.tokens
        return self._event([choice])

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
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            logprobs = [entry for piece in pieces for entry in piece.logprobs]
            choice["logprobs"] = self._logprobs(index, logprobs)
            choice["finish_reason"] = pieces[-1].finish
            choice["token_ids"] = [token for piece in pieces for token in piece.tokens]
            written.append(choice)
        body = self._head | {"choices": written, "usage": self.usage(completion_tokens)}
        return msgspec.json.encode(body)

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
