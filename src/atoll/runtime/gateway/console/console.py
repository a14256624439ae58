"""The table of all that is asked under `/atoll/v1/`, and the way of such a request to its answer.

To add a request, write a handler (`route`: it takes a `ConsoleCall`, with the caller and the gateway's
`PagesContext`, and returns a `Response`, an `EventStream`, or a coroutine of either) and one line of a table,

    ROUTES = (ConsoleRoute("GET", "machines", "viewer", show_machines, "Nodes", gives=MachinesPage),)

in its module, which stands in `TABLE` here. Roles, 404, 405, errors, the log, a client that goes away or
stops reading, and the line in `/openapi.json` are seen to. What handlers share (a feed of events, say)
belongs to the gateway: give `PagesContext` a field for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from atoll.runtime.gateway.console import (
    administration,
    history_requests,
    key_requests,
    request_requests,
    usage_requests,
    watching,
)
from atoll.runtime.gateway.console.console_caller import ADMIN, Caller, find_caller, lower
from atoll.runtime.gateway.console.gate import DatabaseGate
from atoll.runtime.gateway.console.live_feed import LiveAnswer
from atoll.runtime.gateway.console.route import (
    ConsoleCall,
    ConsoleRoute,
    PagesContext,
)
from atoll.runtime.http.api_route import RouteTable
from atoll.runtime.http.handlers import Answer, HandlerCall, Response, send_response
from atoll.runtime.http.http_server import Connection, ConnectionDeadlines, Request
from atoll.runtime.openai import ApiError

TABLE: tuple[ConsoleRoute, ...] = (
    *administration.ROUTES,
    *watching.ROUTES,
    *key_requests.ROUTES,
    *usage_requests.ROUTES,
    *history_requests.ROUTES,
    *request_requests.ROUTES,
)


class Console:
    """Answers under `/atoll/v1/` (`atoll.runtime.http.handlers.HandlerHost` for what takes time)."""

    def __init__(self, context: PagesContext, table: tuple[ConsoleRoute, ...] = TABLE) -> None:
        self._context = context
        self._gate = DatabaseGate()
        self.running: set[HandlerCall] = set()
        self._table = RouteTable(table)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where the gateway runs."""
        return self._context.loop

    @property
    def deadlines(self) -> ConnectionDeadlines:
        """How long clients may take."""
        return self._context.settings.deadlines

    def find_caller(self, request: Request) -> Caller:
        """Return who asks on the public port for what is not public, or raise 400, 401 or 403."""
        context = self._context
        return find_caller(request.headers, context.settings.admin_token, context.accounts)

    def find_admin(self, request: Request) -> Caller:
        """Return who asks on the admin socket: an admin, or whom that one speaks for."""
        return lower(ADMIN, request.headers)

    def check(self, request: Request, caller: Caller) -> tuple[ConsoleRoute, str]:
        """Return what answers a request and the id in its path, or raise 403, 404 or 405."""
        route, names = self._table.find(request.method, request.path, caller.role)
        return route, next(iter(names.values()), "")

    def answer(self, connection: Connection, request: Request, caller: Caller) -> None:
        """Answer a request of a caller, now or later, or raise an error that nobody was told."""
        route, name = self.check(request, caller)
        call = ConsoleCall(request, caller, self._context, self._gate, name)
        answer = route.handler(call)
        if isinstance(answer, Response):
            send_response(connection, answer)
        elif isinstance(answer, LiveAnswer):
            answer.feed.join(connection, answer.allowed, answer.who)
        else:
            self.answer_later(connection, request, answer)

    def answer_later(
        self, connection: Connection, request: Request, answer: Answer | Awaitable[Answer]
    ) -> None:
        """Answer a request when its answer is there."""
        HandlerCall(self, connection, request, lambda request: self._wait(request, answer))

    async def _wait(self, request: Request, answer: Answer | Awaitable[Answer]) -> Answer:
        """Return an answer that takes time; what goes wrong is noted as elsewhere."""
        context = self._context
        try:
            return await answer if isinstance(answer, Awaitable) else answer
        except ApiError as error:
            context.refused(error, request)
            raise
        except Exception as error:  # noqa: BLE001 - the edge: it is told to the log only
            context.metrics.rejected(500)
            context.log.event("request.bug", id=request.id.decode(), error=repr(error))
            raise ApiError(500, "internal error", kind="server_error") from None

    def tick(self, now_s: float) -> None:
        """Give up on clients that stopped reading."""
        for call in list(self.running):
            call.tick(now_s)
