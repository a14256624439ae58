"""How much a connection accepts, and how long its client may take: what the server asks of an application."""

from __future__ import annotations

from typing import Protocol


class ConnectionLimits(Protocol):
    """How much of everything a connection accepts."""

    @property
    def body_bytes(self) -> int:
        """Of one request; more is answered with 413."""
        ...

    def body_limit(self, path: bytes) -> int:
        """Return `body_bytes`, or how many more a request to this path may have."""
        ...

    @property
    def header_bytes(self) -> int:
        """Of the first line and headers of a request together; more is answered with 431."""
        ...

    @property
    def headers(self) -> int:
        """Of one request; more are answered with 431."""
        ...

    @property
    def connections(self) -> int:
        """At the same time; more are answered with 503."""
        ...

    @property
    def buffered_bytes(self) -> int:
        """What clients have sent and is held in memory at the same time; more is answered with 503."""
        ...


class ConnectionDeadlines(Protocol):
    """How long a client may take over anything, in seconds."""

    @property
    def header_s(self) -> float:
        """From the first byte of a connection or request to the end of its headers."""
        ...

    @property
    def body_s(self) -> float:
        """From the headers of a request to the end of its body."""
        ...

    @property
    def idle_s(self) -> float:
        """Between two requests of a connection."""
        ...

    @property
    def client_s(self) -> float:
        """For a client that has stopped reading its answer."""
        ...
