"""The body of a request while it comes: as it is if it comes whole, else in one buffer.

A piece of two bytes is an object of 35, and a client decides how many pieces there are. So pieces go into
one buffer after every read: what is held is what was said, and an eighth more while it grows.
"""

from __future__ import annotations

from io import BytesIO


class IncomingBody:
    """Takes the pieces of one body after another. `append` is what a parser calls, without any Python."""

    __slots__ = ("_buffer", "_pieces", "append")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._buffer: BytesIO | None = None
        self.append = self._pieces.append

    def fold(self) -> int:
        """Put what came into the buffer, and return how many bytes there are of the body by now."""
        if self._buffer is None:
            self._buffer = BytesIO()
        if self._pieces:
            self._buffer.write(b"".join(self._pieces))
            self._pieces.clear()
        return self._buffer.tell()

    def take(self) -> bytes:
        """Return the body, and begin with the next."""
        pieces, buffer = self._pieces, self._buffer
        if buffer is None:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        else:
            self._buffer = None
            buffer.write(b"".join(pieces))
            # The buffer itself, not a copy of it.
            body = buffer.getvalue()
        pieces.clear()
        return body

    def clear(self) -> None:
        """Forget what came."""
        self._pieces.clear()
        self._buffer = None
