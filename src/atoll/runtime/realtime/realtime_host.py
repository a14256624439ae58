"""Sessions of `/v1/realtime` on one server: who may open one, how many there are, and their ear."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from atoll.components.base import Setup
from atoll.core.errors import MissingDependencyError
from atoll.runtime.http.http_client import stream_lines
from atoll.runtime.http.websocket import GOING_AWAY, WebSocket
from atoll.runtime.openai import ApiError
from atoll.runtime.realtime.realtime_limits import RealtimeLimits
from atoll.runtime.realtime.realtime_session import RealtimeSession

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from typing import Any

    from atoll.components.silero import SileroVad, VoiceStream
    from atoll.runtime.http.http_server import Connection, Request

_LOG = logging.getLogger(__name__)
REALTIME = b"/v1/realtime"
_SILENT_S = 120.0
"""So long an answer may bring nothing."""
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class RealtimeHost:
    """Sessions of a server, which asks itself for their answers."""

    def __init__(self, limits: RealtimeLimits) -> None:
        self.limits = limits
        self._url = ""
        self._sessions: dict[asyncio.Task[None], WebSocket] = {}
        self._ear: asyncio.Future[SileroVad] | None = None

    def listens_at(self, host: str, port: int) -> None:
        """Note where the server is asked."""
        host = _ANY.get(host, host)
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1/chat/completions"

    def open(self, connection: Connection, request: Request) -> None:
        """Begin a session on a connection; ApiError where there cannot be one."""
        model = (parse_qs(request.query.decode("latin-1")).get("model") or [""])[0]
        if not 1 <= len(model) <= 200:
            raise ApiError(400, "model: name it in the address, ?model=NAME", param="model")
        if len(self._sessions) >= self.limits.sessions:
            raise ApiError(
                503,
                f"there are {self.limits.sessions} sessions, and no more are taken",
                kind="server_error",
                code="overloaded",
                retry_after_s=5,
            )
        try:
            socket = WebSocket(
                connection, request, max_bytes=self.limits.message_bytes, subprotocol="realtime"
            )
        except MissingDependencyError as error:
            raise ApiError(501, str(error), kind="server_error") from error
        key = request.headers.get(b"authorization", b"").decode("latin-1")
        bearer = key[7:].strip() if key[:7].lower() == "bearer " else None

        def ask(body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
            return stream_lines(self._url, body=body, timeout_s=_SILENT_S, api_key=bearer)

        session = RealtimeSession(socket, ask, self._listen, model, self.limits)
        task = asyncio.create_task(session.run())
        self._sessions[task] = socket
        task.add_done_callback(self._ended)

    def close(self) -> None:
        """Tell all clients that the server goes away."""
        for socket in list(self._sessions.values()):
            socket.close(GOING_AWAY, "the server stops")

    def _ended(self, task: asyncio.Task[None]) -> None:
        socket = self._sessions.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("a session failed", exc_info=error)
            socket.close(1011, "internal error")
        else:
            socket.close()

    async def _listen(self) -> VoiceStream:
        """Return an ear of its own for a session; the model is loaded once, when it is first needed."""
        from atoll.components.silero import SileroVad

        if self._ear is None or (self._ear.done() and self._ear.exception() is not None):
            loading = asyncio.to_thread(SileroVad.load, Setup())
            self._ear = asyncio.ensure_future(loading)
        # Whoever waits may leave; the others go on waiting.
        return (await asyncio.shield(self._ear)).listen()
