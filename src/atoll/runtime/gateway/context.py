"""What the gateway's own pages and its console see of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from typing import TYPE_CHECKING, Protocol

from atoll.runtime.gateway.chooser import BackendChooser
from atoll.runtime.gateway.metrics import GatewayMetrics
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.gateway.traffic import TrafficTally
from atoll.runtime.http.request import Request
from atoll.runtime.openai import ApiError
from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.logs import Log

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Accounts


class FabricView(Protocol):
    """A fabric, for people."""

    def snapshot(self) -> dict[str, object]:
        """Return the nodes as this gateway sees them."""
        ...


class PagesContext(Protocol):
    """What the pages show of a gateway."""

    pool: BackendPool
    settings: GatewaySettings
    chooser: BackendChooser
    metrics: GatewayMetrics
    traffic: TrafficTally
    log: Log
    loop: asyncio.AbstractEventLoop
    accounts: Accounts | None
    draining: bool
    started_s: float

    @property
    def relays(self) -> Sized:
        """Requests that run."""
        ...

    @property
    def connections(self) -> Sized:
        """Connections of clients."""
        ...

    @property
    def federation(self) -> FabricView | None:
        """The fabric, if there is one."""
        ...

    def refused(self, error: ApiError, request: Request | None = None) -> None:
        """Note a request that is answered with an error."""
        ...
