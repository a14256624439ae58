"""Where a gateway is administered: a Unix socket of its user, and a port for Prometheus if one is named.

Who asks on the public port says nothing about where they are: a proxy on this machine asks for strangers.
So the admin API and metrics are there only for those who show the admin token or a key; whoever may open the
socket (mode 0600) needs none, and no web page and no proxy that was not told to can.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from atoll.runtime.gateway.gateway_pages import Pages
from atoll.runtime.gateway.settings import GatewaySettings, split_address
from atoll.runtime.http.http_server import (
    Application,
    Connection,
    ConnectionDeadlines,
    ConnectionLimits,
    Request,
)
from atoll.runtime.http.listen_address import own_socket
from atoll.runtime.openai import ApiError

_BACKLOG = 64
"""Connections that may wait to be accepted: few people and programs ask here."""
_REQUEST_ID = b"admin"


class AdminListener(Application):
    """A listener beside the public port; what it is asked goes to `answer`. It serves while draining."""

    def __init__(
        self,
        answer: Callable[[Connection, Request], None],
        on_refused: Callable[[ApiError], None],
        settings: GatewaySettings,
    ) -> None:
        super().__init__(settings.limits, settings.deadlines)
        self._answer = answer
        self._on_refused = on_refused

    def handle(self, connection: Connection, request: Request) -> None:
        """Answer a request of an administrator; it needs no id of its own."""
        request.id = _REQUEST_ID
        self._answer(connection, request)

    def refused(self, error: ApiError) -> None:
        """Note a request that could not be read."""
        self._on_refused(error)


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
            # Of those that share a port, each is administered by itself.
            name = f"{port}-{os.getpid()}" if settings.share_port else port
            path = own_socket("gateway", name) if socket_setting is None else Path(socket_setting)
            await listener.listen_on_socket(
                path,
                backlog=_BACKLOG,
                field="admin_socket",
                taken=f"another gateway is administered at {path}",
                hint='name a path that can be written, or "" for no socket',
            )
            self.socket = path
        if metrics is not None:
            listener = self._add(self._pages.answer_metrics, settings)
            host, number = split_address(metrics)
            self.metrics_address = await listener.listen(
                host, int(number), backlog=_BACKLOG, field="metrics"
            )

    def _add(
        self, answer: Callable[[Connection, Request], None], settings: GatewaySettings
    ) -> AdminListener:
        def handle(connection: Connection, request: Request) -> None:
            try:
                answer(connection, request)
            except Exception as error:  # noqa: BLE001 - the edge: whatever is wrong is told
                self._refuse(connection, request, error)

        listener = AdminListener(handle, self._on_refused, settings)
        self._listeners.append(listener)
        return listener

    def configure(self, limits: ConnectionLimits, deadlines: ConnectionDeadlines) -> None:
        """Take other limits and deadlines."""
        for listener in self._listeners:
            listener.limits, listener.deadlines = limits, deadlines

    def tick(self, now_s: float, date: bytes) -> None:
        """Close connections that are overdue."""
        for listener in self._listeners:
            listener.tick_connections(now_s, date)

    def close(self) -> None:
        """Stop at once."""
        for listener in self._listeners:
            listener.stop_listening()
            listener.abort_connections()
