"""Byte streams through the tunnel, for protocols that are not HTTP: as if there were a connection.

What comes back is the answer to one call that stays open; what is sent goes as calls of its own, one after
the other, each answered once it has been passed on. So both directions have the credits of the tunnel: who
does not read is not sent to. Readers and writers are asyncio's.

    door = StreamDoor(lambda: ("127.0.0.1", 7000))           the far end: its node serves the tunnel
    TunnelServer(fabric, door.handle, accept="self", callers=CALLERS)
    reader, writer = await dial(TunnelClient(fabric), sid)   on any other node
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from atoll.fabric.tunnel.call import Call
from atoll.fabric.tunnel.incoming import IncomingCall
from atoll.fabric.tunnel.tunnel_client import TunnelClient
from atoll.fabric.tunnel.tunnel_frames import TunnelRequest

CALLERS = ("worker", "gateway", "operator")
"""Roles that may open streams, where the node takes them: those of its own provider, say."""
PATH = b"/stream/"
_OPEN, _WRITE = b"GET", b"PUT"
_READ_BYTES = 2**16
_WRITE_BYTES = 2**20
"""No call carries more than this."""
_HIGH_BYTES = 2**18
"""Who has so much unsent is asked to wait."""
_PLAIN = b"application/octet-stream"


class TunnelledStreamError(ConnectionError):
    """A stream through the tunnel cannot be opened, or has broken."""


async def dial(client: TunnelClient, sid: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a stream to a session whose node has a `StreamDoor`; `TunnelledStreamError` where that fails."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_READ_BYTES, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport = _TunnelTransport(client, sid, protocol, loop)
    try:
        await transport.opened
    except asyncio.CancelledError:
        transport.abort()
        raise
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class _StreamReceiver:
    """Receiver of the answer to a call: its end is a future, and what comes goes to `take`."""

    def __init__(self, future: asyncio.Future[None], take: Callable[[bytes], None] | None) -> None:
        self._future, self._take = future, take

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        del content_type, retry_after
        if status != 200:
            self._end(TunnelledStreamError(f"the other end answered with status {status}"))
        elif self._take is not None:
            self._end(None)

    def on_body(self, data: bytes) -> None:
        if self._take is not None:
            self._take(data)

    def on_end(self) -> None:
        self._end(None)

    def on_lost(self, reason: str, *, unused: bool) -> None:
        del unused
        self._end(TunnelledStreamError(reason))

    def _end(self, error: TunnelledStreamError | None) -> None:
        if self._future.done():
            return
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)


class _Downlink(_StreamReceiver):
    """Receiver of all that the other end sends."""

    def __init__(self, transport: _TunnelTransport) -> None:
        super().__init__(transport.opened, transport.take)
        self._transport = transport

    def on_end(self) -> None:
        self._transport.lost(None)

    def on_lost(self, reason: str, *, unused: bool) -> None:
        super().on_lost(reason, unused=unused)
        self._transport.lost(TunnelledStreamError(reason))


class _TunnelTransport(asyncio.Transport):
    """The near end of a stream."""

    def __init__(
        self,
        client: TunnelClient,
        sid: str,
        protocol: asyncio.StreamReaderProtocol,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__()
        self._client, self._sid, self._protocol, self._loop = client, sid, protocol, loop
        self._path = PATH + secrets.token_hex(16).encode()
        self._unsent = bytearray()
        self._closing = self._over = self._waiting = self._paused = False
        self._sending: asyncio.Task[None] | None = None
        self.opened: asyncio.Future[None] = loop.create_future()
        protocol.connection_made(self)
        self._down: Call = client.call(sid, self._request(_OPEN, b""), _Downlink(self))

    # What comes

    def take(self, data: bytes) -> None:
        """Give the reader what came."""
        self._protocol.data_received(data)

    def pause_reading(self) -> None:
        """Take no more; the other end stops when its credit is used up."""
        self._paused = True
        self._down.pause()

    def resume_reading(self) -> None:
        """Take more, from the next turn of the loop on: who asks is not ready for it yet."""
        self._paused = False
        self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        if not self._paused:
            self._down.resume()

    def lost(self, error: Exception | None) -> None:
        """Tell the reader that no more will come."""
        if self._over:
            return
        self._over = self._closing = True
        self._down.cancel()
        if self._sending is not None and self._sending is not asyncio.current_task():
            self._sending.cancel()
        self._loop.call_soon(self._protocol.connection_lost, error)

    # What goes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, after what was written before."""
        if self._closing:
            return
        self._unsent += data
        if not self._waiting and len(self._unsent) > _HIGH_BYTES:
            self._waiting = True
            self._protocol.pause_writing()
        self._send_on()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes the other end has not taken."""
        return len(self._unsent)

    def is_closing(self) -> bool:
        """Whether nothing more is sent."""
        return self._closing

    def close(self) -> None:
        """Send what was written, then end."""
        self._closing = True
        if self._unsent:
            self._send_on()
        else:
            self.lost(None)

    def abort(self) -> None:
        """End at once."""
        self.lost(None)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return nothing: there is no socket."""
        del name
        return default

    def _send_on(self) -> None:
        if not self._over and (self._sending is None or self._sending.done()):
            self._sending = self._loop.create_task(self._send())

    async def _send(self) -> None:
        """Send what is there, and what is written meanwhile, call by call."""
        try:
            if not self.opened.done():
                await asyncio.wait({self.opened})
            while self._unsent and not self._over:
                piece = bytes(self._unsent[:_WRITE_BYTES])
                answered: asyncio.Future[None] = self._loop.create_future()
                self._client.call(
                    self._sid, self._request(_WRITE, piece), _StreamReceiver(answered, None)
                )
                await answered
                del self._unsent[: len(piece)]
                if self._waiting and len(self._unsent) <= _HIGH_BYTES // 2:
                    self._waiting = False
                    self._protocol.resume_writing()
        except TunnelledStreamError as error:
            self.lost(error)
        if self._closing:
            self.lost(None)

    def _request(self, method: bytes, body: bytes) -> TunnelRequest:
        return TunnelRequest(method, self._path, (), body)


class StreamDoor:
    """The far end: passes streams on to one address of this node's, which `target` names; None: not now."""

    def __init__(self, target: Callable[[], tuple[str, int] | None]) -> None:
        self._target = target
        self._writers: dict[tuple[str, bytes], asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, call: IncomingCall) -> None:
        """Take a call (`TunnelServer`)."""
        if not call.path.startswith(PATH) or call.method not in (_OPEN, _WRITE):
            call.head(404, _PLAIN)
            call.end()
            return
        # Nobody but who opened a stream may write to it.
        key = (call.caller_name, call.path)
        work = self._pass_on(call, key) if call.method == _OPEN else self._write(call, key)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all streams."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pass_on(self, call: IncomingCall, key: tuple[str, bytes]) -> None:
        """Open a connection, and send what comes from it until it ends or nobody listens."""
        target = self._target()
        try:
            if target is None or key in self._writers:
                raise OSError("nobody is there")
            reader, writer = await asyncio.open_connection(*target)
        except OSError:
            call.head(503, _PLAIN)
            call.end()
            return
        self._writers[key] = writer
        writable = asyncio.Event()
        call.on_writable = writable.set
        # Its end ends the loop below.
        call.on_cancel = writer.transport.abort
        try:
            call.head(200, _PLAIN)
            while not call.ended and (data := await reader.read(_READ_BYTES)):
                call.send(data)
                while not call.writable and not call.ended:
                    writable.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(writable.wait(), 1.0)
        except OSError as error:
            call.fail(str(error))
        finally:
            del self._writers[key]
            call.end()
            await close_writer(writer)

    async def _write(self, call: IncomingCall, key: tuple[str, bytes]) -> None:
        writer = self._writers.get(key)
        try:
            if writer is None:
                raise ConnectionError("there is no such stream")
            writer.write(call.body)
            await writer.drain()
        except OSError:
            call.head(410, _PLAIN)
        else:
            call.head(200, _PLAIN)
        call.end()


async def close_writer(writer: asyncio.StreamWriter) -> None:
    """Close a connection, however it stands."""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def join_streams(
    one: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    other: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Pass on what comes from either to the other, until one of them ends."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                writer.write(data)
                await writer.drain()

    ways: list[Awaitable[None]] = [pump(one[0], other[1]), pump(other[0], one[1])]
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(close_writer(one[1]), close_writer(other[1]))
