"""Fixtures of the tunnel's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.fabric.transport.site import Site


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """A fabric with certificates and one hub in this process."""
    made = Site(tmp_path, 1)
    try:
        await made.hub()
        yield made
    finally:
        await made.close()
