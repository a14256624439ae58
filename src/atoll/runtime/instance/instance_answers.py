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
from atoll.runtime.openai import join_calls

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
    stop_reason: str | int | None = None
    """The stop string, or token that the client named, that ended it."""
    prompt_logprobs: list[dict[str, Logprob] | None] | None = None
    """How likely each token of the prompt is, by its id."""


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
        self.cached = 0
        """Tokens of the prompt that were not computed anew."""

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
            text, calls = owed.text, self._written(owed)
        else:
            text, calls = self._answer.owed, []
        stop = self._answer.stop_reason
        return ChoiceDelta(self.index, text, finish=self.finish, calls=calls, stop_reason=stop)

    def add(self, event: TokenEvent) -> ChoiceDelta | None:
        """Take an event; returns what there is to say, None if that has to wait."""
        # Of an answer that goes on, the prompt was computed where it began.
        self.cached = 0 if self._request.generated else event.cached
        if event.token is not None:
            self._pending.append(event.token)
            if event.logprob is not None:
                self._logprobs.append(self._logprob(event))
        new = self._answer.add(event.token, event.finish_reason)
        text, calls = (new, []) if isinstance(new, str) else (new.text, self._written(new))
        finish = self._answer.finish
        if not text and not calls and finish is None and not self._logprobs:
            return None
        stop = self._answer.stop_reason
        piece = ChoiceDelta(self.index, text, self._pending, self._logprobs, finish, calls, stop)
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
                    shown = [self._entry(other, p) for other, p in top[: request.sampling.logprobs]]
                    entries.append(entry | {"top_logprobs": shown})
        return ChoiceDelta(self.index, request.echo or "", logprobs=entries)

    def tell_prompt(
        self, request: ChoiceRequest, reading: PromptReading | None
    ) -> list[ChoiceDelta]:
        """Return what was asked about the prompt itself."""
        if request.prompt_logprobs is None:
            return [self.echo(request, reading)]
        scores = self._score_prompt(request, reading)
        return [scores] if request.echo is None else [scores, self.echo(request, reading)]

    def _score_prompt(self, request: ChoiceRequest, reading: PromptReading | None) -> ChoiceDelta:
        """Return how likely the tokens of a prompt are, as vLLM says it."""
        scores: list[dict[str, Logprob] | None] = []
        if reading is not None:
            for token, logprob, top in zip(
                request.prompt, reading.logprobs, reading.top, strict=True
            ):
                if logprob is None:
                    scores.append(None)
                    continue
                likely = {other: rank for rank, (other, _) in enumerate(top, 1)}
                shown = dict(top[: request.prompt_logprobs]) | {token: logprob}
                scores.append(
                    {str(t): self._score(t, value, likely.get(t)) for t, value in shown.items()}
                )
        return ChoiceDelta(self.index, prompt_logprobs=scores)

    def _score(self, token: int, logprob: float, rank: int | None) -> Logprob:
        entry = self._entry(token, logprob)
        return {"logprob": entry["logprob"], "rank": rank, "decoded_token": entry["token"]}

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

    cached_tokens = 0
    """Of the prompts, not computed anew; set before anything is written."""

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
        # Whoever goes on with an answer has told of its prompt.
        self._unnamed = {
            index
            for index, choice in enumerate(parsed.choices)
            if parsed.prompt_ids and not (choice.generated or choice.shown)
        }
        self._offsets: dict[int, int] = {}
        self._made = [len(choice.generated) for choice in parsed.choices]

    def usage(self, completion_tokens: int) -> dict[str, Any]:
        """Return what the request used."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
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
                **self._prompt_ids(index),
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
            if piece.calls and self._parsed.legacy:
                choice["delta"]["function_call"] = piece.calls[0]["function"]
            elif piece.calls:
                choice["delta"]["tool_calls"] = piece.calls
        else:
            choice |= {"text": piece.text, **self._prompt_ids(piece.index)}
        choice["logprobs"] = self._logprobs(piece.index, piece.logprobs)
        choice["finish_reason"] = self._finish(piece)
        choice["stop_reason"] = piece.stop_reason
        choice["token_ids"] = piece.tokens
        self._made[piece.index] += len(piece.tokens)
        return self._event([choice], **self._counts(piece.index))

    def _finish(self, piece: ChoiceDelta) -> str | None:
        is_call = self._parsed.legacy and piece.finish == "tool_calls"
        return "function_call" if is_call else piece.finish

    def _prompt_ids(self, index: int) -> dict[str, object]:
        """Return the tokens of the prompt where they are asked for; once."""
        if index not in self._unnamed:
            return {}
        self._unnamed.discard(index)
        return {"prompt_token_ids": self._parsed.choices[index].prompt}

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
        more: dict[str, Any] = {}
        for index, pieces in enumerate(choices):
            of_prompt = self._prompt_ids(index)
            scores = next(
                (p.prompt_logprobs for p in pieces if p.prompt_logprobs is not None), None
            )
            if scores is not None:
                of_prompt["prompt_logprobs"] = scores
            text = "".join(piece.text for piece in pieces)
            choice: dict[str, Any] = {"index": index}
            if self._parsed.is_chat:
                choice["message"] = self._message(text, pieces)
                # vLLM has it beside the choices here, and in each of them below.
                more = of_prompt | more
            else:
                choice |= {"text": text, **of_prompt}
            logprobs = [entry for piece in pieces for entry in piece.logprobs]
            choice["logprobs"] = self._logprobs(index, logprobs)
            choice["finish_reason"] = self._finish(pieces[-1])
            choice["stop_reason"] = pieces[-1].stop_reason
            choice["token_ids"] = [token for piece in pieces for token in piece.tokens]
            written.append(choice)
        body = self._head | {"choices": written, "usage": self.usage(completion_tokens)} | more
        return msgspec.json.encode(body)

    def _message(self, text: str, pieces: list[ChoiceDelta]) -> dict[str, Any]:
        calls = join_calls(entry for piece in pieces for entry in piece.calls)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls and self._parsed.legacy:
            message |= {"content": text or None, "function_call": calls[0]["function"]}
        elif calls:
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
                # With the token itself, as OpenAI and vLLM have it: one more than was asked for, at most.
                else {e["token"]: e["logprob"] for e in (*entry["top_logprobs"], entry)}
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
