"""Fixtures of the transport's tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fabric.transport.site import Scenario, Site


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Scenario:
    """Run a scenario in a fabric with as many hubs as `two_hubs` and the like say."""
    hubs: int = getattr(request, "param", 1)

    @asynccontextmanager
    async def site() -> AsyncIterator[Site]:
        made = Site(tmp_path, hubs)
        try:
            for number in range(hubs):
                await made.hub(number)
            yield made
        finally:
            await made.close()

    def go(scenario: Callable[[Site], Awaitable[None]]) -> None:
        async def inside() -> None:
            async with site() as made:
                await scenario(made)

        asyncio.run(inside())

    return go
