"""An answer on its way: its parts, given out as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll.tasks.forms import answer_parts
from atoll.tasks.pending import Path, PendingStream, is_pending
from atoll.tasks.recording import Recording


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """A part of the answer.

    path: which part, as field names and positions; () is the answer itself. For a stream there is an event
    for each piece and then one with `last` and no value; for everything else there is one, with `last`.
    """

    path: Path
    value: Any
    last: bool


class AnswerParts:
    """The parts of an answer that were not given out yet, in the order of the answer."""

    __slots__ = ("_left", "_recording")

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._left = [_AnswerPart(path, value) for path, value in answer_parts(recording.answer)]

    @property
    def are_left(self) -> bool:
        """Whether something is still to come."""
        return bool(self._left)

    def take(self) -> list[AnswerEvent]:
        """Return what has come since."""
        events: list[AnswerEvent] = []
        self._left = [part for part in self._left if not self._take_from(part, events)]
        return events

    def _take_from(self, part: _AnswerPart, events: list[AnswerEvent]) -> bool:
        """Add what has come of a part; return whether that is all."""
        value = part.value
        if not is_pending(value):
            events.append(AnswerEvent(part.path, value, True))
            return True
        entry = self._recording.entries[value._number]
        whole: bool = entry.is_known
        if type(value) is PendingStream and entry.feed is not None:
            pieces = entry.feed.pieces
            events.extend(AnswerEvent(part.path, piece, False) for piece in pieces[part.given :])
            part.given = len(pieces)
            if whole:
                events.append(AnswerEvent(part.path, None, True))
        elif whole:
            events.append(AnswerEvent(part.path, self._recording.value_of(value), True))
        return whole


class _AnswerPart:
    __slots__ = ("given", "path", "value")

    def __init__(self, path: Path, value: Any) -> None:
        self.path = path
        self.value = value
        self.given = 0
