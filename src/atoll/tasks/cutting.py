"""Where streams may be cut, so that the next component can begin."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from atoll.core.errors import InputError
from atoll.tasks.values import Value


class Cutter(Protocol):
    """Cuts one stream: remembers what has come and was not given out yet."""

    def feed(self, piece: Value) -> list[Value]:
        """Take the next piece of the stream; return what can be given out by now, in order."""
        ...

    def finish(self) -> list[Value]:
        """Return what is left at the end of the stream."""
        ...


# Quotation marks and stops beyond ASCII are written as escapes: many look like others.
_CLOSERS = "\\)\\]\"'\u201d\u2019\u00bb"
_WIDE_STOPS = "\u3002\uff01\uff1f"
_WIDE_CLOSERS = "\u300d\u300f\uff09\u201d\u2019"
# The end of a sentence, or of a line. A stop counts when space follows (3.14 has none); wide ones need none.
_ENDS = re.compile(
    rf"(?P<stop>[.!?\u2026]+)[{_CLOSERS}]*(?=\s)"
    rf"|[{_WIDE_STOPS}]+[{_WIDE_CLOSERS}]*(?=[^{_WIDE_STOPS}{_WIDE_CLOSERS}])"
    r"|(?=\n)"
)
_ABBREVIATIONS = frozenset(
    (
        *("mr", "mrs", "ms", "dr", "prof", "st", "sr", "jr", "rev", "gen", "col", "capt", "lt"),
        *("sgt", "hon", "vs", "etc", "e.g", "i.e", "cf", "al", "approx", "nos", "vol", "fig"),
        *("eq", "pp", "inc", "ltd", "co", "corp", "dept", "est", "u.s", "u.k", "a.m", "p.m"),
        *("jan", "feb", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec"),
    )
)
_LAST_WORD = re.compile(r"(?:^|[\s(\[\"'\u201c\u2018])([^\s(\[\"'\u201c\u2018]*)$")
_BREAKS = (
    re.compile(r"[,;:](?=\s)|[\u2014\u3001\uff0c\uff1b\uff1a]"),
    re.compile(r"(?=\s)"),
)


class SentenceCutter:
    """Cuts text deltas into sentences of at most `most` characters.

    Pieces are what lies between the ends, without the white space around them; pieces of white space alone
    are left out. No other character is lost, added or moved, and where the text is cut does not depend on how
    it came.
    """

    __slots__ = ("_most", "_text")

    def __init__(self, most: int = 300) -> None:
        if most < 1:
            raise InputError(f"sentences of {most} characters", field="most", hint="1 or more")
        self._most = most
        self._text = ""

    def feed(self, piece: Value) -> list[Value]:
        """Take the next delta; return the sentences that are whole by now."""
        if not isinstance(piece, str):
            raise InputError(f"only texts have sentences, not {type(piece).__name__}")
        self._text += piece
        return self._cut()

    def finish(self) -> list[Value]:
        """Return what is left at the end of the text."""
        # Space after the end shows that the last sentence has ended, and is trimmed.
        self._text += "\n"
        return self._cut()

    def _cut(self) -> list[Value]:
        pieces: list[Value] = []
        while True:
            self._text = self._text.lstrip()
            end = self._find_end()
            if end is None:
                return pieces
            pieces.append(self._text[:end].rstrip())
            self._text = self._text[end:]

    def _find_end(self) -> int | None:
        """Return where the first sentence ends, if that is certain: nothing after `most` matters."""
        # One character more than a piece may have: a stop counts by what follows it.
        window = self._text[: self._most + 1]
        for found in _ENDS.finditer(window):
            if found["stop"] != "." or not _abbreviates(window[: found.start()]):
                return found.end()
        # Short of the limit nothing is certain yet: the end may still come.
        if len(window) <= self._most:
            return None
        # Too long: at the last comma of its second half, else between words, else anywhere.
        for breaks in _BREAKS:
            places = [found.end() for found in breaks.finditer(window)]
            late = [place for place in places if self._most // 2 < place <= self._most]
            if late:
                return late[-1]
        return self._most


def _abbreviates(before: str) -> bool:
    """Return whether a stop after this text belongs to the word before it."""
    found = _LAST_WORD.search(before)
    word = found[1] if found else before
    if len(word) == 1 and word.isalpha() and word.isupper() and word != "I":
        return True  # J. Smith
    # A number that begins a line counts something: "2. Stir."
    return word.lower() in _ABBREVIATIONS or (word.isdigit() and before.strip() == word)


def sentences(most: int = 300) -> Callable[[], Cutter]:
    """Return what cuts texts into sentences: give it to a unit task as its `cut`."""
    # Made once to check `most` here, not when the first stream comes.
    SentenceCutter(most)
    return lambda: SentenceCutter(most)
