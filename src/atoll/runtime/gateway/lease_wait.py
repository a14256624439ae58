"""A request of a strict key that waits until this gateway's part of a limit is settled with the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.runtime.http.http_server import Connection


class LeaseWait:
    """Looks again, once, when limits were settled; nothing of it is left if the client goes away before."""

    def __init__(
        self, connection: Connection, settled: asyncio.Future[None], again: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._settled = settled
        connection.exchange = self
        settled.add_done_callback(lambda done: None if done.cancelled() else self._go_on(again))

    def _go_on(self, again: Callable[[], None]) -> None:
        self._connection.exchange = None
        again()

    def cancel(self) -> None:
        """Wait no more: the client is gone."""
        self._settled.cancel()

    def pause(self) -> None:
        """Nothing is sent yet that a client could be too slow for."""

    def resume(self) -> None:
        """See `pause`."""
