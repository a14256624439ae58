"""Where a gateway is administered: a Unix socket of its user, and a port for Prometheus if one is named.

Who asks on the public port says nothing about where they are: a proxy on this machine asks for strangers.
So the admin API and metrics are there only for those who show the admin token or a key; whoever may open the
socket (mode 0600) needs none, and no web page and no proxy that was not told to can.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from atoll.core.paths import runtime_dir
from atoll.runtime.gateway.gateway_pages import Pages
from atoll.runtime.gateway.settings import GatewaySettings, split_address
from atoll.runtime.http.http_server import (
    Connection,
    ConnectionDeadlines,
    ConnectionLimits,
    Request,
)
from atoll.runtime.http.listen_address import bind_private, cannot_listen, is_listening
from atoll.runtime.openai import ApiError

_BACKLOG = 64
"""Connections that may wait to be accepted: few people and programs ask here."""
_REQUEST_ID = b"admin"


def default_socket(port: int) -> Path:
    """Return where a gateway on a port is administered unless it is told otherwise.

    What gateways that were killed left in that folder is removed.
    """
    folder = runtime_dir()
    for path in folder.glob("gateway-*.sock"):
        # Whatever else has such a name is not ours, and none of it keeps a gateway from starting.
        with contextlib.suppress(OSError):
            if path.is_socket() and not is_listening(path):
                path.unlink()
    return folder / f"gateway-{port}.sock"


class AdminListener:
    """A listener beside the public port; what it is asked goes to `answer`. It serves while draining."""

    draining = False
    once: frozenset[bytes] = frozenset()

    def __init__(
        self,
        answer: Callable[[Connection, Request], None],
        on_refused: Callable[[ApiError], None],
        limits: ConnectionLimits,
        deadlines: ConnectionDeadlines,
    ) -> None:
        self._answer = answer
        self._on_refused = on_refused
        self.limits = limits
        self.deadlines = deadlines
        self.connections: set[Connection] = set()
        self.buffered = 0
        self.date = b""
        self.loop = asyncio.get_running_loop()
        self._server: asyncio.AbstractServer | None = None
        self._socket: Path | None = None

    async def listen_on_socket(self, path: Path) -> None:
        """Listen on a Unix socket that only this user can open."""
        bound = bind_private(
            path,
            field="admin_socket",
            taken=f"another gateway is administered at {path}",
            hint='name a path that can be written, or "" for no socket',
        )
        self._server = await self.loop.create_unix_server(
            lambda: Connection(self), sock=bound, backlog=_BACKLOG
        )
        self._socket = path

    async def listen_on_port(self, host: str, port: int) -> tuple[str, int]:
        """Listen on a port of this machine; return the address."""
        try:
            server = await self.loop.create_server(lambda: Connection(self), host, port)
        except OSError as error:
            raise cannot_listen(error, host, port, field="metrics") from error
        self._server = server
        address: tuple[str, int] = server.sockets[0].getsockname()[:2]
        return address

    def expect(self, request: Request) -> None:
        """Let every body come: who may open the socket may send one."""

    def handle(self, connection: Connection, request: Request) -> None:
        """Answer a request of an administrator; it needs no id of its own."""
        request.id = _REQUEST_ID
        self._answer(connection, request)

    def refused(self, error: ApiError) -> None:
        """Note a request that could not be read."""
        self._on_refused(error)

    def tick(self, now_s: float, date: bytes) -> None:
        """Close connections that are overdue."""
        self.date = date
        for connection in list(self.connections):
            connection.tick(now_s)

    def close(self) -> None:
        """Stop at once, and remove the socket."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.abort()
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)


class AdminListeners:
    """All the listeners of a gateway beside its public port."""

    def __init__(
        self,
        pages: Pages,
        refuse: Callable[[Connection, Request, Exception], None],
        on_refused: Callable[[ApiError], None],
    ) -> None:
        self._pages = pages
        self._refuse = refuse
        self._on_refused = on_refused
        self._listeners: list[AdminListener] = []
        self.socket: Path | None = None
        """The socket, once it is open."""
        self.metrics_address: tuple[str, int] | None = None

    async def open(self, settings: GatewaySettings, port: int) -> None:
        """Listen for those who run the gateway on a port: on a socket, and on a port for Prometheus."""
        socket_setting, metrics = settings.admin_socket, settings.metrics
        if socket_setting != "":
            listener = self._add(self._pages.answer_admin, settings)
            path = default_socket(port) if socket_setting is None else Path(socket_setting)
            await listener.listen_on_socket(path)
            self.socket = path
        if metrics is not None:
            listener = self._add(self._pages.answer_metrics, settings)
            host, number = split_address(metrics)
            self.metrics_address = await listener.listen_on_port(host, int(number))

    def _add(
        self, answer: Callable[[Connection, Request], None], settings: GatewaySettings
    ) -> AdminListener:
        def handle(connection: Connection, request: Request) -> None:
            try:
                answer(connection, request)
            except Exception as error:  # noqa: BLE001 - the edge: whatever is wrong is told
                self._refuse(connection, request, error)

        listener = AdminListener(handle, self._on_refused, settings.limits, settings.deadlines)
        self._listeners.append(listener)
        return listener

    def configure(self, limits: ConnectionLimits, deadlines: ConnectionDeadlines) -> None:
        """Take other limits and deadlines."""
        for listener in self._listeners:
            listener.limits, listener.deadlines = limits, deadlines

    def tick(self, now_s: float, date: bytes) -> None:
        """Close connections that are overdue."""
        for listener in self._listeners:
            listener.tick(now_s, date)

    def close(self) -> None:
        """Stop at once."""
        for listener in self._listeners:
            listener.close()
