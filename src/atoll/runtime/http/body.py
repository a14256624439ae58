"""The body of a request while it comes: as it is if it comes whole, else in one buffer.

A piece of two bytes is an object of 35, and a client decides how many pieces there are. So pieces are
folded into one buffer before there are many of them: what is held is what was said, and an eighth more.
"""

from __future__ import annotations

_MOST_PIECES = 64


class IncomingBody:
    """Takes the pieces of one body after another. `append` is what a parser calls, without any Python."""

    __slots__ = ("_folded", "_pieces", "append")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._folded: bytearray | None = None
        self.append = self._pieces.append

    def fold(self) -> None:
        """Make one buffer of many pieces. Call after each read: between two, there are few."""
        if len(self._pieces) > _MOST_PIECES:
            if self._folded is None:
                self._folded = bytearray()
            self._folded += b"".join(self._pieces)
            self._pieces.clear()

    def take(self) -> bytes:
        """Return the body, and begin with the next."""
        pieces, folded = self._pieces, self._folded
        if folded is None:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        else:
            self._folded = None
            folded += b"".join(pieces)
            body = bytes(folded)
        pieces.clear()
        return body

    def clear(self) -> None:
        """Forget what came."""
        self._pieces.clear()
        self._folded = None

    def __len__(self) -> int:
        return sum(map(len, self._pieces)) + (0 if self._folded is None else len(self._folded))
