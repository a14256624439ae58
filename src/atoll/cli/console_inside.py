"""What runs inside the console: the table of the one API, and the planner, loaded while pages are shown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.core.roles import Role
    from atoll.dashboard.console_api import ConsoleApi
    from atoll.planner.planner_api import PlannerApi
    from atoll.runtime.http.handlers import Answer
    from atoll.runtime.http.http_request import Request


def load_api() -> ConsoleApi:
    """Return the table of all that is managed, whoever answers it."""
    from atoll.dashboard.console_api import ConsoleApi
    from atoll.planner.planner_api import ROUTES
    from atoll.runtime.gateway.console.console import TABLE
    from atoll.runtime.gateway.openapi import describe_models

    return ConsoleApi(TABLE, ROUTES, *describe_models())


class PlannerInside:
    """The planner of a console (`dashboard.services.PlansFleets`): its modules take a while to load."""

    def __init__(self, files: tuple[Path, ...] = (), states: tuple[Path, ...] = ()) -> None:
        self._files, self._states = files, states
        self._loading: asyncio.Task[PlannerApi] | None = None

    def start(self) -> None:
        """Begin to load it, before anybody asks."""
        self._loading = asyncio.create_task(self._begin())

    async def answer(self, request: Request, role: Role, owner: str = "") -> Answer:
        """Answer a request; see `PlannerApi.answer`."""
        return await (await self._load()).answer(request, role, owner)

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """Yield events; see `PlannerApi.listen`."""
        planner = await self._load()
        async with contextlib.aclosing(planner.listen()) as pieces:
            async for piece in pieces:
                yield piece

    async def close(self) -> None:
        """End it, if it was ever loaded."""
        if self._loading is not None:
            await (await self._loading).close()

    async def _load(self) -> PlannerApi:
        if self._loading is None:
            self.start()
        assert self._loading is not None
        # Whoever goes away meanwhile takes nobody's planner along.
        return await asyncio.shield(self._loading)

    async def _begin(self) -> PlannerApi:
        planner = await asyncio.to_thread(self._make)
        await planner.planner.start()
        return planner

    def _make(self) -> PlannerApi:
        from atoll.planner.planner_api import PlannerApi
        from atoll.planner.planner_service import PlanningService

        return PlannerApi(PlanningService(self._files, self._states))
