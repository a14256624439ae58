"""A stream that says now and then that it is still there.

An executor that died may take longer to come back than a gateway waits for the next event. Comments are part
of server-sent events and mean nothing to clients.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

HEARTBEAT = b": waiting\n\n"
EVERY_S = 5.0


async def with_heartbeats(
    pieces: AsyncGenerator[bytes, None], every_s: float = EVERY_S
) -> AsyncGenerator[bytes, None]:
    """Yield the pieces, and after the first one a comment whenever none comes for `every_s` seconds."""
    begun = False
    async with contextlib.aclosing(pieces):
        while True:
            coming = asyncio.create_task(_next(pieces))
            try:
                while not (await asyncio.wait({coming}, timeout=every_s))[0]:
                    if begun:
                        yield HEARTBEAT
            finally:
                # Left in between: what makes the next piece must end before its generator is closed.
                if not coming.done():
                    coming.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await coming
            piece = coming.result()
            if piece is None:
                return
            begun = True
            yield piece


async def _next(pieces: AsyncGenerator[bytes, None]) -> bytes | None:
    try:
        return await anext(pieces)
    except StopAsyncIteration:
        return None
