"""The gateway: what stands between clients and the instances of a plan."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable
from email.utils import formatdate

import msgspec

from atoll.runtime.backends import Member, Pool
from atoll.runtime.gateway.admin import Pages
from atoll.runtime.gateway.health import Watch
from atoll.runtime.gateway.http import Connection, Request
from atoll.runtime.gateway.relay import Relay
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.gateway.upstream import Links
from atoll.runtime.metrics import GatewayMetrics
from atoll.runtime.openai import REQUESTS, ApiError, Usage, read_request
from atoll.telemetry.logs import JsonLog, Log, SilentLog
from atoll.telemetry.trace import child_of, new_trace
from atoll.telemetry.usage import OnUsage, UsageRecord

_TICK_S = 0.1
_BACKLOG = 2048
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_ENDPOINTS = {path.encode(): path for path in REQUESTS}


class Gateway:
    """Serves a pool of backends on one port.

    `on_usage` is called exactly once for every request that reached the point of being sent to a
    backend, when it ends. Runs on any asyncio loop; uvloop's makes it fast.
    """

    def __init__(
        self,
        pool: Pool,
        settings: GatewaySettings | None = None,
        *,
        on_usage: OnUsage | None = None,
        log: Log | None = None,
    ) -> None:
        self.pool = pool
        self.log: Log = log or SilentLog()
        self.configure(settings or GatewaySettings())
        self.metrics = GatewayMetrics(pool)
        self.connections: set[Connection] = set()
        self.relays: set[Relay] = set()
        self.buffered = 0
        self.draining = False
        self.date = b""
        self.started_s = time.time()
        self.loop: asyncio.AbstractEventLoop
        self._on_usage = on_usage
        self._links: dict[Member, Links] = {}
        self._pages = Pages(self)
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def configure(self, settings: GatewaySettings) -> None:
        """Take new settings; where to listen stays as it was."""
        self.settings = settings
        self.limits = settings.limits
        self.deadlines = settings.deadlines
        self._access_log = (
            self.log if settings.access_log and isinstance(self.log, JsonLog) else None
        )

    # Life

    async def start(self) -> tuple[str, int]:
        """Listen, and return the host and port listened on."""
        self.loop = asyncio.get_running_loop()
        self.pool.listeners.append(self._changed)
        self._tick()
        self._server = await self.loop.create_server(
            lambda: Connection(self), self.settings.host, self.settings.port, backlog=_BACKLOG
        )
        self._watch = self.loop.create_task(Watch(self).run())
        host, port = self._server.sockets[0].getsockname()[:2]
        self.log.event("gateway.start", host=host, port=port, backends=len(self.pool.members))
        return host, port

    async def drain(self, seconds: float) -> bool:
        """Accept no more and let what runs end; return whether all of it did in time."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.finish_up()
        until_s = self.loop.time() + seconds
        while self.relays and self.loop.time() < until_s:
            await asyncio.sleep(_TICK_S)
        return not self.relays

    async def close(self) -> None:
        """Stop at once; what still runs is cut off."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.abort()
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        if self._timer is not None:
            self._timer.cancel()
        for links in self._links.values():
            links.close()
        if self._changed in self.pool.listeners:
            self.pool.listeners.remove(self._changed)
        await asyncio.sleep(0)
        self.log.event("gateway.stop")
        self.log.flush()

    # Requests

    def handle(self, connection: Connection, request: Request) -> None:
        """Answer a request, now or later."""
        headers = request.headers
        given = headers.get(b"traceparent")
        request.trace = new_trace() if given is None else child_of(given.decode("latin-1"))
        given = headers.get(b"x-request-id")
        if given is not None and _REQUEST_ID.fullmatch(given):
            request.id = given
        else:
            # Without a name of its own a request is called like its trace.
            request.id = b"req-" + request.trace[3:35].encode()
        try:
            endpoint = _ENDPOINTS.get(request.path)
            if endpoint is not None and request.method == b"POST":
                self._relay(connection, request, endpoint)
            else:
                self._pages.handle(connection, request)
        except ApiError as error:
            self.refused(error, request)
            connection.respond_error(error)
        except Exception as error:  # noqa: BLE001 - the edge: whatever is wrong, the client is told
            self.metrics.rejected(500)
            self.log.event("request.bug", id=request.id.decode(), error=repr(error))
            connection.respond_error(ApiError(500, "internal error", kind="server_error"))

    def refused(self, error: ApiError, request: Request | None = None) -> None:
        """Note a request that is answered with an error, or that could not be read (no request)."""
        self.metrics.rejected(error.status)
        if self._access_log is not None:
            self.log.event(
                "request.refused",
                id=request.id.decode() if request is not None else None,
                path=request.path.decode(errors="replace")[:200] if request is not None else None,
                status=error.status,
                error=error.message[:500],
            )

    def _relay(self, connection: Connection, request: Request, endpoint: str) -> None:
        parsed = read_request(endpoint, request.body)
        if parsed.model not in self.pool.rings:
            raise unknown_model(parsed.model)
        if len(self.relays) >= self.limits.requests or self.draining:
            raise ApiError(
                503,
                "the gateway is full" if not self.draining else "the gateway is shutting down",
                kind="server_error",
                code="overloaded",
                retry_after_s=1,
            )
        extra = b"x-request-id: %b\r\ntraceparent: %b\r\n" % (request.id, request.trace.encode())
        state = request.headers.get(b"tracestate")
        if state is not None:
            extra += b"tracestate: %b\r\n" % state
        relay = Relay(self, connection, request, parsed, extra)
        connection.exchange = relay
        self.relays.add(relay)
        relay.attempt()

    def links(self, member: Member) -> Links:
        """Return the connections to a backend."""
        found = self._links.get(member)
        if found is None:
            found = self._links[member] = Links(member, self.loop)
        return found

    def failed_over(self, relay: Relay, member: Member, reason: str, *, begun: bool) -> None:
        """Note that a request leaves a backend that failed it."""
        self.metrics.failed_over(relay.model, begun=begun)
        self.log.event(
            "request.failover",
            id=relay.sent.id.decode(),
            backend=member.name,
            begun=begun,
            reason=reason,
        )

    def finished(self, relay: Relay, status: int, outcome: str, usage: Usage | None) -> None:
        """Write down a request that ended."""
        self.relays.discard(relay)
        seconds = self.loop.time() - relay.started_s
        first_s = None if relay.first_s is None else relay.first_s - relay.started_s
        estimated = usage is None and outcome != "error"
        if usage is None:
            tokens = relay.journal.delivered().tokens
            usage = Usage(0, tokens, tokens)
        endpoint = _ENDPOINTS[relay.endpoint]
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
        self.metrics.tally(relay.model, endpoint, status).add(seconds, first_s, prompt, completion)
        now_s = time.time()
        fields = (
            relay.sent.id.decode(),
            relay.model,
            endpoint,
            relay.stream,
            status,
            prompt,
            completion,
            estimated,
            tuple(relay.backends),
            now_s - seconds,
            seconds,
            first_s,
            outcome,
        )
        if self._access_log is not None:
            line = _AccessLine(now_s, relay.sent.trace[3:35], *fields)
            self._access_log.line(_encode(line) + b"\n")
        if self._on_usage is not None:
            self._guarded(self._on_usage, UsageRecord(*fields))

    def _guarded(self, call: Callable[[UsageRecord], None], record: UsageRecord) -> None:
        try:
            call(record)
        except Exception as error:  # noqa: BLE001 - another's code must not break the request
            self.log.event("usage.lost", id=record.request_id, error=repr(error))

    # The pool and the clock

    def _changed(self, event: str, member: Member) -> None:
        self.log.event(
            f"backend.{event}", backend=member.name, state=member.state, reason=member.reason
        )
        links = self._links.get(member)
        if event == "down":
            if links is not None:
                links.drop_idle()
            for relay in [r for r in self.relays if r.uses(member)]:
                relay.member_down(member.reason)
        elif links is not None and event == "removed":
            links.close()
        elif links is not None and event == "changed":
            if links.url != member.backend.url:
                links.drop_idle()
            links.aim(member)

    def _tick(self) -> None:
        self._timer = self.loop.call_later(_TICK_S, self._tick)
        now_s = self.loop.time()
        self.date = formatdate(usegmt=True).encode()
        for relay in list(self.relays):
            relay.tick(now_s)
        for connection in list(self.connections):
            connection.tick(now_s)
        for member, links in list(self._links.items()):
            links.tick(now_s)
            if member.removed and not links.open and not member.inflight:
                del self._links[member]
        self.pool.tick(now_s)
        self.log.flush()


def unknown_model(name: str) -> ApiError:
    """Return the error for a model that no backend serves."""
    return ApiError(
        404,
        f"The model {name!r} does not exist or you do not have access to it.",
        param="model",
        code="model_not_found",
    )


class _AccessLine(msgspec.Struct, tag_field="event", tag="request", gc=False):
    """A request that ended, as it stands in the log: its trace and the fields of its UsageRecord."""

    time: float
    trace: str
    id: str
    model: str
    endpoint: str
    stream: bool
    status: int
    prompt_tokens: int
    completion_tokens: int
    estimated: bool
    backends: tuple[str, ...]
    started_s: float
    seconds: float
    first_token_s: float | None
    outcome: str


_encode = msgspec.json.Encoder().encode
