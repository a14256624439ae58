"""Reaching a hub through an HTTP proxy: a local port whose connections leave by CONNECT.

TLS runs through it end to end, so the proxy sees neither certificates' keys nor content.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import urllib.parse
import urllib.request

from atoll.core.errors import InputError
from atoll.fabric.identity.access import is_loopback, split_address

_CHUNK = 64 * 1024
_CONNECT_S = 10.0
_MAX_HEAD_BYTES = 16 * 1024


def proxy_for(hub: str, configured: str | None) -> str | None:
    """Return the proxy to reach a hub through: the given one, or as the environment says."""
    if configured is not None:
        return configured or None
    host, _ = split_address(hub)
    if is_loopback(hub) or urllib.request.proxy_bypass(host):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get("https") or proxies.get("all")


class Forwarder:
    """Listens on loopback and passes each connection through the proxy to one hub."""

    def __init__(self, proxy: str, hub: str) -> None:
        """Check the proxy's address; `start` opens the port."""
        url = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        try:
            port = url.port or 3128
        except ValueError:
            port = 0
        if url.scheme != "http" or not url.hostname or not port:
            raise InputError(
                f"{_without_password(url)!r} is no HTTP proxy",
                field="proxy",
                hint="write http://host:port",
            )
        self._proxy = (url.hostname, port)
        self._hub = hub
        self._authorization = b""
        if url.username is not None:
            pair = (
                f"{urllib.parse.unquote(url.username)}:{urllib.parse.unquote(url.password or '')}"
            )
            basic = base64.b64encode(pair.encode())
            self._authorization = b"Proxy-Authorization: Basic " + basic + b"\r\n"
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.refused = 0
        """Connections the proxy did not let through."""
        self.last_error = ""

    @classmethod
    async def start(cls, proxy: str, hub: str) -> Forwarder:
        """Open the local port."""
        forwarder = cls(proxy, hub)
        forwarder._server = await asyncio.start_server(forwarder._accept, "127.0.0.1", 0)
        return forwarder

    @property
    def address(self) -> str:
        """The local address that stands for the hub."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.closing(writer):
                await self._pass(reader, writer)
        except asyncio.CancelledError:
            pass  # closing; a server's task that ends cancelled would be reported as an error
        finally:
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                far_reader, far_writer = await self._connect()
        except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError) as error:
            self.refused += 1
            self.last_error = str(error) or type(error).__name__
            return
        with contextlib.closing(far_writer):
            await asyncio.wait(
                [
                    asyncio.ensure_future(_copy(reader, far_writer)),
                    asyncio.ensure_future(_copy(far_reader, writer)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self._proxy, limit=_MAX_HEAD_BYTES)
        try:
            hub = self._hub.encode()
            writer.write(
                b"CONNECT %s HTTP/1.1\r\nHost: %s\r\n%s\r\n" % (hub, hub, self._authorization)
            )
            head = await reader.readuntil(b"\r\n\r\n")
            status = head.split(b"\r\n", 1)[0].split(b" ", 2)
            if len(status) < 2 or status[1] != b"200":
                reason = b" ".join(status[1:]).decode("latin-1")
                raise ConnectionRefusedError(f"the proxy answers {reason!r}")
        except BaseException:
            writer.close()
            raise
        return reader, writer


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()


def _without_password(url: urllib.parse.SplitResult) -> str:
    return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
