"""A request of a client: as it comes, as it was read, what answers it later, how much of it is taken."""

from __future__ import annotations

import re
from dataclasses import dataclass
from io import BytesIO
from typing import Annotated, Protocol

from pydantic import Field

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
"""Form of a client's request id; others are replaced."""
TRACE_STATE = re.compile(rb"[ -~]{1,512}")
"""Form of a client's trace state that is passed on; the rest is left out."""


class Request:
    """One request of a client, complete."""

    __slots__ = (
        "body",
        "extra",
        "headers",
        "held",
        "id",
        "keep_alive",
        "method",
        "old",
        "path",
        "peer",
        "query",
        "trace",
        "upgrade",
    )

    def __init__(
        self, method: bytes, path: bytes, headers: dict[bytes, bytes], query: bytes = b""
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = b""
        self.id = b""
        self.trace = ""
        self.keep_alive = True
        self.old = False
        """HTTP/1.0: no chunks, one request a connection."""
        self.upgrade = False
        """Whether a WebSocket is asked for, on a path that takes one."""
        self.extra = b""
        """Headers of whatever answers it, with their line ends."""
        self.peer = ""
        """Address of who is connected, where the application keeps it; "" for a Unix socket."""
        self.held = 0
        """Bytes of memory that count as taken until it is answered."""


class Responder(Protocol):
    """Answers a request later."""

    def cancel(self) -> None:
        """Stop: the client is gone."""

    def pause(self) -> None:
        """Send no more for now: the client does not keep up."""

    def resume(self) -> None:
        """Send again after `pause`: the client keeps up."""


class Upgraded(Responder, Protocol):
    """Takes what comes on a connection that speaks another protocol from now on."""

    def receive(self, data: bytes) -> None:
        """Take bytes that came."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How much of everything a connection accepts."""

    body_bytes: Count = 32 * 2**20
    """Of one request; more is answered with 413."""
    header_bytes: Count = 64 * 2**10
    """Of the first line and headers of a request together; more is answered with 431."""
    headers: Count = 100
    """Of one request; more are answered with 431."""
    connections: Count = 10_000
    """At the same time; more are answered with 503."""
    buffered_bytes: Count = 2**30
    """Bytes from clients held in memory at the same time; more is answered with 503."""

    def body_limit(self, path: bytes) -> int:
        """Return `body_bytes`, or how many more a request to this path may have."""
        del path
        return self.body_bytes


@dataclass(frozen=True, slots=True)
class ConnectionDeadlines:
    """How long a client may take over anything, in seconds."""

    header_s: Seconds = 10.0
    """From the first byte of a connection or request to the end of its headers."""
    body_s: Seconds = 60.0
    """From the headers of a request to the end of its body."""
    idle_s: Seconds = 75.0
    """Between two requests of a connection."""
    client_s: Seconds = 60.0
    """For a client that has stopped reading its answer."""


class IncomingBody:
    """The body of a request while it comes: as it is if it comes whole, else in one buffer.

    `append` is what a parser calls, without any Python. A piece of two bytes is an object of 35, and a client
    decides how many pieces there are. So pieces go into one buffer after every read: what is held is what was
    said, and an eighth more while it grows.
    """

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
