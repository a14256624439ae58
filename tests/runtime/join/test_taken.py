"""An engine is not started where something else listens, whatever that speaks."""

from __future__ import annotations

import asyncio

import pytest

from atoll.core.errors import UsageError
from atoll.runtime.join.engine_start import refuse_taken


async def test_a_port_where_anything_listens_is_taken() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(UsageError, match=f"something answers at http://127.0.0.1:{port} already"):
        await refuse_taken(f"http://127.0.0.1:{port}")
    server.close()
    await server.wait_closed()
    await refuse_taken(f"http://127.0.0.1:{port}")
