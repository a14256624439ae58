"""Writing to a client: whole answers, and answers in pieces, in the framing it understands."""

from __future__ import annotations

import asyncio
import socket
import struct
from abc import abstractmethod
from http import HTTPStatus
from typing import Protocol

from atoll.runtime.http.http_request import Request
from atoll.runtime.openai import ApiError

_TCP_INFO_BYTES = 256
_ACKNOWLEDGED, _ACKNOWLEDGED_AT = struct.Struct("@Q"), 120
"""`tcpi_bytes_acked` of Linux: what the other side has acknowledged since the connection was made."""
STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


class AnsweringContext(Protocol):
    """Part of an application that an answer needs."""

    date: bytes
    draining: bool


class AnswerWriter(asyncio.Protocol):
    """Writes the answer to the request being served on a connection."""

    __slots__ = ("_app_state", "_begun", "_serving", "transport", "written")

    transport: asyncio.Transport
    _app_state: AnsweringContext
    _serving: Request | None
    _begun: bool
    """Whether the client has a part of the answer."""
    written: int
    """Bytes, since the connection was made."""

    def write(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.written += len(data)
        self.transport.write(data)

    def read_bytes(self) -> int:
        """Return how much of what was written the client's machine has acknowledged, if that is known.

        What lies there unread counts as read; what waits here, or in the kernel, does not.
        """
        known = self.transport.get_extra_info("socket")
        try:
            raw = known.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            acknowledged: int = _ACKNOWLEDGED.unpack_from(raw, _ACKNOWLEDGED_AT)[0]
        except (AttributeError, OSError, struct.error):
            # No TCP, or no Linux.
            return self.written
        return min(acknowledged, self.written)

    @abstractmethod
    def _finish_serving(self) -> None:
        """Go on with what follows: the answer is written."""

    def head(
        self, status: int, content_type: bytes, extra: bytes = b"", length: int | None = None
    ) -> bytes:
        """Return the first line and headers of the answer to the request being served.

        Without a length the body follows in chunks, or to the end of the connection.
        """
        request = self._serving
        assert request is not None
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        else:
            framing = b"" if request.old else b"transfer-encoding: chunked\r\n"
        if not request.keep_alive or self._app_state.draining:
            framing += b"connection: close\r\n"
        return b"%bdate: %b\r\nx-request-id: %b\r\ncontent-type: %b\r\n%b%b%b\r\n" % (
            STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status,
            self._app_state.date,
            request.id,
            content_type,
            framing,
            request.extra,
            extra,
        )

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        extra: bytes = b"",
    ) -> None:
        """Answer the request being served, completely."""
        request = self._serving
        head = self.head(status, content_type, extra, len(body))
        if status == 304 or (request is not None and request.method == b"HEAD"):
            # The length is said that it would have.
            body = b""
        self.write(head + body)
        self._finish_serving()

    def respond_error(self, error: ApiError) -> None:
        """Answer the request being served with an error."""
        self.respond(error.status, error.body(), extra=headers_of(error))

    def begin_stream(self, headers: bytes = b"") -> None:
        """Begin a stream of events as the answer to the request being served; `headers` are added."""
        self._begun = True
        extra = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n" + headers
        self.write(self.head(200, b"text/event-stream; charset=utf-8", extra))

    def begin(self, status: int, content_type: bytes, extra: bytes) -> None:
        """Begin an answer whose pieces follow."""
        self._begun = True
        self.write(self.head(status, content_type, extra))

    def send(self, data: bytes) -> None:
        """Send a piece of the stream."""
        serving = self._serving
        if serving is not None and serving.old:
            self.write(data)
        else:
            self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self, data: bytes) -> None:
        """Send the last piece of the stream and end it."""
        serving = self._serving
        if not data:
            if serving is None or not serving.old:
                self.write(b"0\r\n\r\n")
        elif serving is not None and serving.old:
            self.write(data)
        else:
            self.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        self._finish_serving()


def headers_of(error: ApiError) -> bytes:
    """Return the headers that belong to an error, with their line ends."""
    extra = b""
    if error.retry_after_s is not None:
        extra += b"retry-after: %d\r\n" % error.retry_after_s
    if error.allow is not None:
        extra += b"allow: %b\r\n" % error.allow.encode()
    return extra
