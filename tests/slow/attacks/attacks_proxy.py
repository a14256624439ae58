"""A reverse proxy of a few lines, as people put before a gateway: it says who asked, and passes bytes on."""

from __future__ import annotations

import asyncio
import contextlib

from tests.slow.attacks.attacks_wire import HOST


class PlainProxy:
    """Passes the first request of a connection on with X-Forwarded-For, and all that follows as it is."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def open(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._pass, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stop listening and reset every connection."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            other_reader, other = await asyncio.open_connection(HOST, self._target)
            ends = {writer, other}
            self._writers |= ends
            try:
                first = await reader.readuntil(b"\r\n")
                other.write(first + b"x-forwarded-for: 203.0.113.7\r\n")
                await asyncio.gather(_copy(reader, other), _copy(other_reader, writer))
            finally:
                self._writers -= ends
                for end in ends:
                    end.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.write_eof()
