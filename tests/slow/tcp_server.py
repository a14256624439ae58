"""Servers and relays of a few lines, which can be closed as if their process had died."""

from __future__ import annotations

import asyncio
import contextlib

HOST = "127.0.0.1"


class TcpServer:
    """Listens on a port of this machine and answers each connection by `handle`."""

    def __init__(self) -> None:
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Listen: on any port at first, on the same one after that."""
        self._server = await asyncio.start_server(self._serve, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stop listening and reset every connection."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            # Python 3.11 takes a connection's task that is cancelled for one that failed, and says so.
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self.handle(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a connection until it ends."""
        raise NotImplementedError


class Relay(TcpServer):
    """Passes bytes on to another port and back."""

    def __init__(self, target: int) -> None:
        super().__init__()
        self._target = target

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect, and copy both ways until one of them breaks."""
        ends = {writer}
        try:
            back, there = await asyncio.open_connection(HOST, self._target)
            ends.add(there)
            self._writers.add(there)
            await self.begin(reader, there)
            await asyncio.gather(self._copy(reader, there), self._copy(back, writer))
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def begin(self, reader: asyncio.StreamReader, there: asyncio.StreamWriter) -> None:
        """Do what is to be done before bytes are passed on as they come: nothing."""

    def end(self, writer: asyncio.StreamWriter) -> None:
        """Pass on that one side has ended."""
        writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        self.end(writer)
