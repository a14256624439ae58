"""The text and the calls of one answer while its tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.core.request_parameters import SamplingParams
from atoll.engine.text import TextCodec, stop_token
from atoll.runtime.instance.tools.call_formats import CallFormat
from atoll.runtime.instance.tools.parser import AnswerDelta, CallDelta


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """Answer as a client has it: its text, and the name and arguments of its calls."""

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()


class CallAnswer:
    """Turns the tokens of an answer into text and calls; stop strings end it.

    `generated` are tokens that came elsewhere, of which the client has `shown`.
    """

    def __init__(
        self,
        form: CallFormat,
        codec: TextCodec,
        sampling: SamplingParams,
        stop: Sequence[str] = (),
        generated: Sequence[int] = (),
        shown: ShownAnswer | None = None,
    ) -> None:
        self.tokens = 0
        """How many there are so far."""
        self.finish: str | None = None
        """Why the answer is over, if it is."""
        self.stop_reason: str | int | None = None
        """The stop string, or the token the client named, that ended it."""
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._codec = codec
        self._stop = tuple(stop)
        self._marks = form.marks
        self._parser = form.parser()
        self._stream = codec.stream(self._stop)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else codec.eos)}
        made = self._replay(generated, ends, sampling.max_tokens)
        self._owed = _beyond(made, shown or ShownAnswer())

    def add(self, token: int | None, finish: str | None) -> AnswerDelta:
        """Take the next token, or the end without one; returns what there is to show."""
        delta = self.take_owed()
        _append(delta, self._take(token, finish))
        return delta

    def take_owed(self) -> AnswerDelta:
        """Return what came of the tokens generated elsewhere and was not shown; once."""
        owed, self._owed = self._owed, AnswerDelta()
        return owed

    def _replay(self, generated: Sequence[int], ends: set[int], most: int) -> AnswerDelta:
        """Take the tokens that came elsewhere and return all they say."""
        made = AnswerDelta()
        for number, token in enumerate(generated, 1):
            ended = number == len(generated) and token in ends
            _append(made, self._take(token, "stop" if ended else None))
            if self.finish is not None:
                return made
        if self.tokens >= most:
            _append(made, self._take(None, "length"))
        return made

    def _take(self, token: int | None, finish: str | None) -> AnswerDelta:
        delta, stop = AnswerDelta(), None
        if token is not None:
            self.tokens += 1
            mark = self._marks.get(token)
            if mark is None:
                step = self._stream.push(token)
                delta, stop = self._parser.feed(step.text), step.stop
            else:
                delta = self._parser.feed(self._stream.finish())
                _append(delta, self._parser.mark(mark))
                self._stream = self._codec.stream(self._stop)
        if stop is not None:
            finish = "stop"
        elif finish is not None:
            _append(delta, self._parser.feed(self._stream.finish()))
        if finish is not None:
            delta.text += self._parser.finish()
        self.finish = finish
        if finish == "stop":
            self.stop_reason = stop_token(token, self._stop_ids) if stop is None else stop
        if finish == "stop" and self._parser.calls and self._parser.between:
            self.finish = "tool_calls"
        return delta


def _append(delta: AnswerDelta, more: AnswerDelta) -> None:
    delta.text += more.text
    for call in more.calls:
        if call.name is not None:
            delta.begin(call.index, call.name)
        delta.extend(call.index, call.arguments)


def _beyond(delta: AnswerDelta, shown: ShownAnswer) -> AnswerDelta:
    """Return what the client lacks of an answer."""
    lacking = AnswerDelta(delta.text[len(shown.text) :])
    for call in delta.calls:
        if call.index >= len(shown.calls):
            lacking.calls.append(CallDelta(call.index, call.name, call.arguments))
        elif len(call.arguments) > len(shown.calls[call.index][1]):
            _, known = shown.calls[call.index]
            lacking.calls.append(CallDelta(call.index, None, call.arguments[len(known) :]))
    return lacking
