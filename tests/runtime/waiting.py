"""Waiting until something is so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(is_so: Callable[[], object], seconds: float = 60.0) -> None:
    """Look again and again; a condition that does not come in time is an error."""
    async with asyncio.timeout(seconds):
        while not is_so():
            await asyncio.sleep(0.005)
