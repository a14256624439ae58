"""How nodes of a fleet reach each other: over TCP, and through the fabric's tunnel where that fails.

A node that others may have to reach so passes streams on to one of its addresses (`TunnelEnd`). A process
that is in no fabric itself asks the one beside it, at a socket that $ATOLL_WAY names.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import AtollError
from atoll.runtime.executor.executor_client import Dial
from atoll.runtime.executor.executor_process import split_address

if TYPE_CHECKING:
    from atoll.deploy.commands.meeting import FabricMeeting, MemberAddress

WAY_VARIABLE = "ATOLL_WAY"
_DIRECT_S = 1.5
"""How long a connection over TCP may take: within one network it takes milliseconds."""
_AGAIN_S = 60.0
"""After this TCP is tried again where the tunnel was the only way."""
_MAX_LINE = 300


def reach(other: Dial | None) -> Dial:
    """Return how to reach an address: over TCP, else by the other way there is, if any."""
    if other is None:
        return asyncio.open_connection
    closed: dict[tuple[str, int], float] = {}
    way = other

    async def dial(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        now_s = asyncio.get_running_loop().time()
        if closed.get((host, port), 0.0) > now_s:
            return await way(host, port)
        try:
            async with asyncio.timeout(_DIRECT_S):
                return await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            found = await way(host, port)
        # Only once it was found that the other way leads there.
        closed[host, port] = now_s + _AGAIN_S
        return found

    return dial


def way_beside() -> Dial | None:
    """Return the way of the process beside this one, if it has one."""
    path = os.environ.get(WAY_VARIABLE)
    if not path:
        return None

    async def dial(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(f"{host}:{port}\n".encode())
        return reader, writer

    return dial


class TunnelEnd:
    """A node's end of streams through the tunnel: those to `own`, and those that start here."""

    def __init__(self, place: FabricMeeting, own: MemberAddress) -> None:
        from atoll.fabric.tunnel.byte_streams import CALLERS, StreamDoor
        from atoll.fabric.tunnel.tunnel_client import TunnelClient
        from atoll.fabric.tunnel.tunnel_server import TunnelServer

        self._place = place
        self._client = TunnelClient(place.fabric)
        self._door = StreamDoor(lambda: (own.host, own.ports[0]))
        # Streams are for nodes of the same owner alone; who may do what there, a token says.
        self._server = TunnelServer(place.fabric, self._door.handle, accept="self", callers=CALLERS)
        self._beside: asyncio.Server | None = None

    async def dial(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream to the node that says it is at this address."""
        from atoll.fabric.tunnel.byte_streams import dial

        sid = self._place.session_at(host, port)
        if sid is None:
            raise ConnectionError(f"no node of the fabric is at {host}:{port}")
        return await dial(self._client, sid)

    async def serve_beside(self, path: Path) -> None:
        """Let a process beside this one start streams, at a socket."""
        self._beside = await asyncio.start_unix_server(self._lead, path)

    async def close(self) -> None:
        """End all streams."""
        if self._beside is not None:
            self._beside.close()
        await self._door.close()
        await self._client.close()
        await self._server.close()

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Join a connection from beside with the stream to the address in its first line."""
        from atoll.fabric.tunnel.byte_streams import close_writer, join_streams

        with contextlib.suppress(OSError, AtollError, ValueError, asyncio.IncompleteReadError):
            line = (await reader.readuntil(b"\n"))[:_MAX_LINE]
            far = await self.dial(*split_address(line.decode("ascii").strip()))
            await join_streams((reader, writer), far)
        await close_writer(writer)
