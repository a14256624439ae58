"""Where streams may be cut, so that the next component can begin."""

from __future__ import annotations

from typing import Protocol

from atoll.tasks.values import Value


class Cutter(Protocol):
    """Cuts one stream: remembers what has come and was not given out yet."""

    def feed(self, piece: Value) -> list[Value]:
        """Take the next piece of the stream; return what can be given out by now, in order."""
        ...

    def finish(self) -> list[Value]:
        """Return what is left at the end of the stream."""
        ...
