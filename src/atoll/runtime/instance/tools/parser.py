"""Calls, read out of an answer while its text comes.

The grammar of a format has every answer be a text, then calls and nothing else. So it is enough to know where
calls begin, what stands before a name and after it, and that arguments are a JSON object.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Text around the parts of calls.

    mark: begins the calls; without one, calls begin with the answer, at `first`. opener: right before a
    name. closer: right after it; arguments follow.
    """

    mark: str = ""
    first: str = ""
    opener: str = '"name": "'
    closer: str = '"'


@dataclass(slots=True)
class CallDelta:
    """New part of one call: its name where it begins, and more of its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class AnswerDelta:
    """New part of an answer: text, and pieces of calls in order, one a call."""

    text: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def begin(self, index: int, name: str) -> None:
        """Add a call that begins."""
        self.calls.append(CallDelta(index, name))

    def extend(self, index: int, arguments: str) -> None:
        """Add more arguments of a call."""
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(CallDelta(index))
        self.calls[-1].arguments += arguments


class CallParser:
    """Splits the text of one answer into what is said and what is called.

    With `tokens`, a mark is a token of its own (`mark`), and letters that look like it are text.
    """

    def __init__(self, syntax: CallSyntax, *, tokens: bool = False) -> None:
        self._syntax = syntax
        self._tokens = tokens
        self._state = "start"
        self._held = ""
        self._depth = 0
        self._quoted = self._escaped = False
        self.calls = 0
        """Calls that have begun: their names are known."""

    @property
    def between(self) -> bool:
        """Whether no call is unfinished."""
        return self._state in ("start", "text", "before")

    def feed(self, text: str) -> AnswerDelta:
        """Take more text and return what there is to show of it."""
        delta = AnswerDelta()
        while text:
            text = getattr(self, f"_in_{self._state}")(text, delta)
        return delta

    def mark(self, text: str) -> AnswerDelta:
        """Take a token that stands for a mark."""
        if self._state in ("start", "text") and text == self._syntax.mark:
            # What was held back is text after all: the mark itself is a token.
            delta = AnswerDelta(self.finish())
            self._state = "before"
            self.feed(text)
            return delta
        return self.feed(text)

    def finish(self) -> str:
        """Return text that was held back because a mark might have begun with it."""
        held, self._held = (self._held, "") if self._state in ("start", "text") else ("", "")
        return held

    def _in_start(self, text: str, _delta: AnswerDelta) -> str:
        first = self._syntax.first
        self._state = "before" if first and text.startswith(first) else "text"
        return text

    def _in_text(self, text: str, delta: AnswerDelta) -> str:
        mark = self._syntax.mark
        if self._tokens or not mark:
            delta.text += text
            return ""
        text = self._held + text
        at = text.find(mark)
        if at >= 0:
            delta.text += text[:at]
            self._state, self._held = "before", ""
            return text[at:]
        # The end of the text may begin a mark: it waits until more has come.
        keep = beginning_of(mark, text)
        delta.text += text[: len(text) - keep]
        self._held = text[len(text) - keep :]
        return ""

    def _in_before(self, text: str, _delta: AnswerDelta) -> str:
        return self._skip(text, self._syntax.opener, "name")

    def _in_name(self, text: str, delta: AnswerDelta) -> str:
        text = self._held + text
        at = text.find(self._syntax.closer)
        if at < 0:
            self._held = text
            return ""
        delta.begin(self.calls, text[:at])
        self.calls += 1
        self._state, self._held = "gap", ""
        return text[at + len(self._syntax.closer) :]

    def _in_gap(self, text: str, _delta: AnswerDelta) -> str:
        at = text.find("{")
        if at < 0:
            return ""
        self._state, self._depth = "arguments", 0
        return text[at:]

    def _in_arguments(self, text: str, delta: AnswerDelta) -> str:
        # Brackets in strings do not count, and an escaped quote ends no string.
        for at, letter in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._quoted = False
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    delta.extend(self.calls - 1, text[: at + 1])
                    self._state = "before"
                    return text[at + 1 :]
        delta.extend(self.calls - 1, text)
        return ""

    def _skip(self, text: str, until: str, then: str) -> str:
        text = self._held + text
        at = text.find(until)
        if at < 0:
            # Of what is skipped only the part that may begin it is kept.
            self._held = text[len(text) - beginning_of(until, text) :]
            return ""
        self._state, self._held = then, ""
        return text[at + len(until) :]


def beginning_of(mark: str, text: str) -> int:
    """Return the length of the longest end of `text` that begins `mark`."""
    # A whole mark would have been found before.
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
