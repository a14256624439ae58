"""What stands before a client's connection and changes what it is told: translations, numbers of events."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from atoll.runtime.http.http_server import Connection, Responder

C = TypeVar("C", bound="Connection | FrontClient[Any]")


class FrontClient(Generic[C]):
    """Passes on what it does not change to a connection, or to another that stands before one."""

    def __init__(self, connection: C) -> None:
        self._connection: C = connection

    def hold(self, size: int) -> None:
        """Count bytes of memory that the request takes besides its body, or refuse it (ApiError)."""
        self._connection.hold(size)

    @property
    def exchange(self) -> Responder | None:
        """Whoever answers the request."""
        return self._connection.exchange

    @exchange.setter
    def exchange(self, exchange: Responder | None) -> None:
        self._connection.exchange = exchange

    @property
    def written(self) -> int:
        """Bytes that were sent on the connection."""
        return self._connection.written

    def read_bytes(self) -> int:
        """Return how many of them the client's machine has."""
        return self._connection.read_bytes()

    def abort(self) -> None:
        """Close without another word."""
        self._connection.abort()
