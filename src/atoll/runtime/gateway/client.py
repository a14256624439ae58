"""Who a relay answers: a connection, or whoever stands before one and speaks another dialect."""

from __future__ import annotations

from typing import Protocol

from atoll.runtime.http.server import Responder
from atoll.runtime.openai import ApiError


class AnsweredClient(Protocol):
    """What a relay does with its client (`http.server.Connection` says what each of these means)."""

    exchange: Responder | None
    """Whoever answers, as long as it does."""

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        extra: bytes = b"",
    ) -> None:
        """Answer completely."""

    def respond_error(self, error: ApiError) -> None:
        """Answer with an error."""

    def begin_stream(self, headers: bytes = b"") -> None:
        """Begin a stream of events."""

    def send(self, data: bytes) -> None:
        """Send whole events of the stream."""

    def end_stream(self, data: bytes) -> None:
        """Send the last events of the stream and end it."""

    def abort(self) -> None:
        """Close without another word."""
