"""A request of a client as it was read, and what answers it later."""

from __future__ import annotations

import re
from typing import Protocol

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
"""What a client may call its request; other names are replaced."""
TRACE_STATE = re.compile(rb"[ -~]{1,512}")
"""What a client may say of its trace to whom its request is passed on; the rest is left out."""


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
        self.extra = b""
        """Headers of whatever answers it, with their line ends."""
        self.peer = ""
        """Address of who is connected, where the application keeps it; "" for a Unix socket."""
        self.held = 0
        """Bytes of memory that count as taken until it is answered."""


class Responder(Protocol):
    """What answers a request later."""

    def cancel(self) -> None:
        """Stop: the client is gone."""

    def pause(self) -> None:
        """Send no more for now: the client does not keep up."""

    def resume(self) -> None:
        """Send again after `pause`: the client keeps up."""
