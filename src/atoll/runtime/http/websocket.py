"""WebSocket on a connection of the server: the handshake, messages in and out, and their limits.

The protocol is that of the package `websockets`, without its sockets: bytes go in, frames come out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from atoll.core.errors import MissingDependencyError
from atoll.runtime.openai import ApiError

if TYPE_CHECKING:
    from atoll.runtime.http.http_request import Request
    from atoll.runtime.http.http_server import Connection

GOING_AWAY, POLICY, INTERNAL = 1001, 1008, 1011
"""Codes of a close: the server stops; a limit was passed; the server failed."""
_DRAINED_S = 30.0
"""So long a client may read nothing before it is given up."""


class WebSocket:
    """One WebSocket. Iterate over its messages; they end when either side closes."""

    def __init__(
        self, connection: Connection, request: Request, *, max_bytes: int, subprotocol: str
    ) -> None:
        """Answer the handshake; ApiError where it is none. max_bytes: of one message."""
        try:
            from websockets.http11 import Request as Handshake
            from websockets.server import ServerProtocol
        except ImportError as error:
            raise MissingDependencyError("websockets", "serve", needed_for="realtime") from error

        def choose(protocol: object, offered: Any) -> Any:
            del protocol
            return subprotocol if subprotocol in offered else None

        self._protocol = ServerProtocol(max_size=max_bytes, select_subprotocol=choose)
        self._connection = connection
        self._messages: asyncio.Queue[str | None] = asyncio.Queue()
        self._writable = asyncio.Event()
        self._writable.set()
        self._parts: list[bytes] = []
        self._ended = False
        self._max_bytes = max_bytes
        self._waiting = 0
        """Characters of messages that were not taken yet; beyond `max_bytes` the client has to wait."""
        lines = [b"GET " + request.path + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in request.headers.items()]
        self._protocol.receive_data(b"\r\n".join([*lines, b"", b""]))
        asked = [e for e in self._protocol.events_received() if isinstance(e, Handshake)]
        response = self._protocol.accept(asked[0]) if asked else None
        if response is None or response.status_code != 101:
            raise ApiError(400, "this is no handshake of a WebSocket")
        self._protocol.send_response(response)
        connection.upgrade(self)
        self._flush()

    def __aiter__(self) -> AsyncIterator[str]:
        """Yield messages as they come."""
        return self._read()

    async def _read(self) -> AsyncIterator[str]:
        while (message := await self._messages.get()) is not None:
            self._waiting -= len(message)
            if self._waiting <= self._max_bytes and not self._ended:
                self._connection.transport.resume_reading()
            yield message

    async def send(self, text: str) -> None:
        """Send a message, once the client has read enough of those before."""
        if self._ended:
            return
        self._protocol.send_text(text.encode())
        self._flush()
        if not self._writable.is_set():
            try:
                async with asyncio.timeout(_DRAINED_S):
                    await self._writable.wait()
            except TimeoutError:
                self._connection.abort()

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Close in good order; the client is given a moment to answer."""
        if self._ended:
            return
        self._protocol.send_close(code, reason[:100])
        self._flush()
        self._end()
        self._connection.linger()

    # What the connection says

    def receive(self, data: bytes) -> None:
        """Take bytes that came."""
        from websockets.frames import Frame, Opcode

        self._protocol.receive_data(data)
        for frame in self._protocol.events_received():
            if not isinstance(frame, Frame):
                continue
            if frame.opcode in (Opcode.TEXT, Opcode.CONT):
                self._parts.append(bytes(frame.data))
                if frame.fin:
                    self._take(b"".join(self._parts))
                    self._parts.clear()
            elif frame.opcode is Opcode.BINARY:
                self.close(1003, "messages are text here")
        self._flush()
        if self._protocol.close_expected():
            self._end()
            self._connection.linger()

    def cancel(self) -> None:
        """End: the client is gone."""
        self._end()
        self._writable.set()

    def pause(self) -> None:
        """Send no more for now: the client does not keep up."""
        self._writable.clear()

    def resume(self) -> None:
        """Send again after `pause`."""
        self._writable.set()

    def _take(self, data: bytes) -> None:
        try:
            message = data.decode()
        except UnicodeDecodeError:
            self.close(1007, "a message is not UTF-8")
            return
        self._messages.put_nowait(message)
        self._waiting += len(message)
        if self._waiting > self._max_bytes:
            self._connection.transport.pause_reading()

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data and not self._connection.transport.is_closing():
                self._connection.write(data)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._messages.put_nowait(None)
