"""View of a gateway for the pages that people look at."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sized
from typing import Any, Protocol

from atoll.runtime.gateway.budgets import BudgetWatch
from atoll.runtime.gateway.chooser import BackendChooser
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.gateway.traffic_tally import TrafficTally
from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.logs import Log


class ViewedFabric(Protocol):
    """A fabric, for people."""

    changes: int
    """Rises with everything that happens there, but for loads."""

    def snapshot(self) -> Mapping[str, Any]:
        """Return the nodes as this gateway sees them."""
        ...


class ViewedAccounts(Protocol):
    """Keys and usage, as far as they say how they fare."""

    def stats(self) -> Mapping[str, object]:
        """Return the figures by name."""
        ...


class ViewedRequest(Protocol):
    """A request that runs."""

    model: str


class GatewayView(Protocol):
    """A gateway, as far as it is shown."""

    pool: BackendPool
    settings: GatewaySettings
    chooser: BackendChooser
    traffic: TrafficTally
    log: Log
    loop: asyncio.AbstractEventLoop
    draining: bool
    started_s: float
    budgets: BudgetWatch

    @property
    def accounts(self) -> ViewedAccounts | None:
        """Keys and usage, if there are."""
        ...

    @property
    def relays(self) -> Collection[ViewedRequest]:
        """Requests that run."""
        ...

    @property
    def connections(self) -> Sized:
        """Connections of clients."""
        ...

    @property
    def federation(self) -> ViewedFabric | None:
        """The fabric, if there is one."""
        ...
