"""The pieces of a stream as they come, for any number of readers: each reads all, from the first."""

from __future__ import annotations

from collections.abc import Callable

from atoll.tasks.values import Value


class PieceFeed:
    """A stream under way. Pieces stay until the request ends, so that readers may begin late.

    Listeners are called after every change, from where the change was made.
    """

    __slots__ = ("closed", "error", "listeners", "pieces")

    def __init__(self) -> None:
        self.pieces: list[Value] = []
        self.closed = False
        self.error: BaseException | None = None
        self.listeners: list[Callable[[], None]] = []

    def put(self, piece: Value) -> None:
        """Add a piece."""
        self.pieces.append(piece)
        self._tell()

    def close(self) -> None:
        """Say that all pieces are there."""
        self.closed = True
        self._tell()

    def fail(self, error: BaseException) -> None:
        """Say that no more pieces come, and why."""
        if not self.closed and self.error is None:
            self.error = error
            self._tell()

    def _tell(self) -> None:
        for listener in tuple(self.listeners):
            listener()
