"""The text of one answer while its tokens come."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.engine.messages import SamplingParams
from atoll.engine.text import TextCodec


class AnswerText:
    """Turns the tokens of an answer into text; stop strings end it.

    `generated` are tokens that came elsewhere and `shown` is their text as far as the client has it.
    """

    def __init__(
        self,
        codec: TextCodec,
        sampling: SamplingParams,
        stop: Sequence[str] = (),
        generated: Sequence[int] = (),
        shown: str = "",
    ) -> None:
        self.tokens = len(generated)
        """How many there are so far."""
        self.finish: str | None = None
        """Why the answer is over, if it is."""
        self._ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else codec.eos)}
        self._stream = codec.stream(stop)
        steps = [self._stream.push(token) for token in generated]
        text = "".join(step.text for step in steps)
        self.owed = text[len(shown) :]
        """Text of the tokens generated elsewhere that the client has not seen yet."""
        if any(step.stopped for step in steps) or (generated and generated[-1] in self._ends):
            self.finish = "stop"
        elif self.tokens >= sampling.max_tokens:
            self.owed += self._stream.finish()
            self.finish = "length"

    def add(self, token: int | None, finish: str | None) -> str:
        """Take the next token, or the end without one; returns the text there is to show."""
        text, stopped = "", False
        if token is not None:
            self.tokens += 1
            step = self._stream.push(token)
            text, stopped = step.text, step.stopped
        self.finish = "stop" if stopped else finish
        if finish is not None and not stopped:
            text += self._stream.finish()
        text, self.owed = self.owed + text, ""
        return text
