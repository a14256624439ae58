"""A plan that is served while an event loop does something else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from atoll.api.served_plan import ServedPlan, ServeOptions

if TYPE_CHECKING:
    from atoll.api.fleet_plan import FleetPlan
    from atoll.core.listener import Listener

_DRAIN_S = 5.0


@contextlib.asynccontextmanager
async def serve_beside(
    plan: FleetPlan, listener: Listener | None = None
) -> AsyncIterator[ServedPlan]:
    """Serve a plan at any free port while the block runs; nothing of it is left afterwards."""
    options = ServeOptions(port=0, drain=_DRAIN_S)
    starting = asyncio.create_task(asyncio.to_thread(plan.serve, options, listener=listener))
    try:
        # Whoever leaves meanwhile waits until it is up: only then can it be stopped.
        yield await asyncio.shield(starting)
    finally:
        served = await starting
        await asyncio.to_thread(served.stop)
