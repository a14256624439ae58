"""The gateway: what stands between clients and the instances of a plan."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable
from email.utils import formatdate
from itertools import islice
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from atoll.runtime.gateway.attempt import Attempts
from atoll.runtime.gateway.chooser import BackendChooser
from atoll.runtime.gateway.health import HealthMonitor
from atoll.runtime.gateway.metrics import GatewayMetrics
from atoll.runtime.gateway.pages import Pages
from atoll.runtime.gateway.relay import Relay
from atoll.runtime.gateway.requirements import SPECIAL
from atoll.runtime.gateway.series import Series
from atoll.runtime.gateway.service_proxy import ServiceProxy
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.http.server import Connection, Request
from atoll.runtime.http.upstream import HttpUpstreamPool, UpstreamPool
from atoll.runtime.openai import REQUESTS, AnyRequest, ApiError, Usage, read_request
from atoll.runtime.pool.pool import BackendPool, Member
from atoll.telemetry.logs import JsonLog, Log, SilentLog
from atoll.telemetry.trace import child_of, new_trace
from atoll.telemetry.usage import OnUsage, UsageRecord

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Accounts, Grant
    from atoll.runtime.federation import Federation
    from atoll.telemetry.recording import Recorder
    from atoll.telemetry.spans import Spans

_TICK_S = 0.1
_BACKLOG = 2048
_WOKEN = 16
"""Waiting requests that try again when one ends."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_ENDPOINTS = {path.encode(): path for path in REQUESTS}


class Gateway:
    """Serves a pool of backends on one port.

    `on_usage` is called exactly once for every request that reached the point of being sent to a
    backend, when it ends. `accounts` lets requests in and writes down what they used, `federation` brings
    the nodes of a fabric, `recorder` and `spans` keep traces. Runs on any asyncio loop; uvloop's makes it
    fast.
    """

    def __init__(
        self,
        pool: BackendPool,
        settings: GatewaySettings | None = None,
        *,
        on_usage: OnUsage | None = None,
        log: Log | None = None,
        accounts: Accounts | None = None,
        federation: Federation | None = None,
        recorder: Recorder | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.pool = pool
        self.accounts = accounts
        self.federation = federation
        self.recorder = recorder
        self.spans = spans
        self.log: Log = log or SilentLog()
        self.configure(settings or GatewaySettings())
        self.metrics = GatewayMetrics(pool)
        self.connections: set[Connection] = set()
        self.relays: set[Relay] = set()
        self.passages: set[ServiceProxy] = set()
        self.waiting: dict[Attempts, None] = {}
        """Requests for which no backend has room, those that came first first."""
        self._waking = False
        self.buffered = 0
        self.draining = False
        self.date = b""
        self.started_s = time.time()
        self.loop: asyncio.AbstractEventLoop
        self._on_usage = on_usage
        self._links: dict[Member, UpstreamPool] = {}
        self.chooser = BackendChooser(self)
        self.series = Series(self)
        self.metrics.more = self.series.read
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
        self.detailed = any((self.accounts, self.federation, self.spans))
        """Whether anybody wants to know what each backend did for a request."""
        self._all_special = self.detailed or self.recorder is not None or settings.affinity

    # Life

    async def start(self) -> tuple[str, int]:
        """Listen, and return the host and port listened on."""
        self.loop = asyncio.get_running_loop()
        self.pool.listeners.append(self._changed)
        self._tick()
        self._server = await self.loop.create_server(
            lambda: Connection(self), self.settings.host, self.settings.port, backlog=_BACKLOG
        )
        self._watch = self.loop.create_task(HealthMonitor(self).run())
        if self.federation is not None:
            self.federation.attach(self)
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
        while (self.relays or self.passages) and self.loop.time() < until_s:
            await asyncio.sleep(_TICK_S)
        return not self.relays and not self.passages

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
        if self.federation is not None:
            self.federation.detach()
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
        if self.spans is not None and given is None:
            request.trace = self.spans.sampled(request.trace)
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
            elif request.path.startswith(b"/services/"):
                self._pass(connection, request)
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
        if self.accounts is not None:
            # Before anything is read that a stranger sent.
            self.accounts.authenticate(request.headers.get(b"authorization"))
        parsed = read_request(endpoint, request.body)
        if len(self.relays) >= self.limits.requests or self.draining:
            raise self._full()
        extra = b"x-request-id: %b\r\ntraceparent: %b\r\n" % (request.id, request.trace.encode())
        state = request.headers.get(b"tracestate")
        if state is not None:
            extra += b"tracestate: %b\r\n" % state
        relay = Relay(self, connection, request, parsed, extra)
        if (
            self._all_special
            or parsed.model not in self.pool.rings
            or parsed.models is not None
            or not SPECIAL.isdisjoint(request.headers)
        ):
            self._wish(relay, request, parsed, endpoint)
        connection.exchange = relay
        self.relays.add(relay)
        relay.attempt()

    def _wish(self, relay: Relay, request: Request, parsed: AnyRequest, endpoint: str) -> None:
        """Find out what is special about a request, and whether its key lets it in."""
        accounts = self.accounts
        grant: Grant | None = None
        if accounts is not None:
            grant = accounts.admit(request.headers.get(b"authorization"), parsed.model)
        relay.wish = self.chooser.wish(request, parsed, grant)
        if accounts is not None and grant is not None:
            relay.slot = accounts.opened(grant, request.id.decode(), parsed.model, endpoint)

    def _pass(self, connection: Connection, request: Request) -> None:
        """Send a request on to a service that is no model."""
        if len(self.passages) >= self.limits.requests or self.draining:
            raise self._full()
        name = ServiceProxy.service_of(request.path)
        grant: Grant | None = None
        if self.accounts is not None:
            grant = self.accounts.admit(request.headers.get(b"authorization"), name)
        if name not in self.pool.services:
            raise ApiError(404, f"there is no service {name[:200]!r}", code="not_found")
        passage = ServiceProxy(self, connection, request, name, grant)
        connection.exchange = passage
        self.passages.add(passage)
        passage.attempt()

    def _full(self) -> ApiError:
        return ApiError(
            503,
            "the gateway is full" if not self.draining else "the gateway is shutting down",
            kind="server_error",
            code="overloaded",
            retry_after_s=1,
        )

    def links(self, member: Member) -> UpstreamPool:
        """Return the connections to a backend."""
        found = self._links.get(member)
        if found is None:
            if member.node and self.federation is not None:
                found = self.federation.ways(member)
            else:
                found = HttpUpstreamPool(member, self.loop)
            self._links[member] = found
        return found

    def freed(self) -> None:
        """Let those that wait try again: a backend has room."""
        if not self._waking:
            self._waking = True
            self.loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._waking = False
        for relay in list(islice(self.waiting, _WOKEN)):
            relay.attempt()

    def delivered(self, slot: int, tokens: int) -> None:
        """Write down how many tokens the client of a request is about to have."""
        if self.accounts is not None:
            self.accounts.delivered(slot, tokens)

    def is_there(self, member: Member) -> bool:
        """Whether a node is still in the fabric; of other backends nobody knows."""
        return self.federation is None or not member.node or self.federation.has(member)

    def failed_over(self, relay: Attempts, member: Member, reason: str, *, begun: bool) -> None:
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
        if self._on_usage is not None or self._all_special:
            grant = relay.wish.grant if relay.wish is not None else None
            key = None if grant is None else grant.key_id
            self._written(relay, UsageRecord(*fields, key, relay.attempts), grant)

    def _written(self, relay: Relay, record: UsageRecord, grant: Grant | None) -> None:
        """Hand the record of a request to whoever keeps it."""
        for attempt in record.attempts:
            self.series.tokens(attempt.provider, attempt.tokens)
        if self.accounts is not None and relay.slot is not None and grant is not None:
            self.accounts.closed(relay.slot, grant, record)
        if self._on_usage is not None:
            self._guarded(self._on_usage, record)
        if grant is not None and not grant.track:
            return
        if self.recorder is not None:
            self.recorder.record(
                record.started_s,
                record.model,
                relay.sent.body,
                record.prompt_tokens,
                record.completion_tokens,
            )
        if self.spans is not None:
            given = relay.sent.headers.get(b"traceparent")
            trace = None if given is None else given.decode("latin-1")
            self.spans.request(record, relay.sent.trace, trace)

    def _guarded(self, call: Callable[[UsageRecord], None], record: UsageRecord) -> None:
        try:
            call(record)
        except Exception as error:  # noqa: BLE001 - another's code must not break the request
            self.log.event("usage.lost", id=record.request_id, error=repr(error))

    # The pool and the clock

    def _changed(self, event: str, member: Member) -> None:
        if event == "removed" and member.node:
            self.chooser.gone(member.backend.models)
        elif event in ("added", "up", "changed", "restored") and self.waiting:
            self.freed()
        self.log.event(
            f"backend.{event}", backend=member.name, state=member.state, reason=member.reason
        )
        links = self._links.get(member)
        if event == "down":
            if links is not None:
                links.drop_idle()
            for relay in [r for r in self.relays if r.uses(member)]:
                relay.member_down(f"backend down: {member.reason}")
            for passage in [p for p in self.passages if p.uses(member)]:
                passage.member_down(f"backend down: {member.reason}")
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
        for passage in list(self.passages):
            passage.tick(now_s)
        if self.pool.ending:
            self.chooser.hand_over(now_s)
        for connection in list(self.connections):
            connection.tick(now_s)
        for member, links in list(self._links.items()):
            links.tick(now_s)
            if member.removed and not links.open and not member.inflight:
                del self._links[member]
        self.pool.tick(now_s)
        self.log.flush()


def _access_line() -> Any:
    """Return the type of a line of the log: a request that ended, its trace, the fields of its record."""
    names = UsageRecord._fields[: UsageRecord._fields.index("outcome") + 1]
    hints = get_type_hints(UsageRecord)
    fields = [("time", float), ("trace", str), ("id", str), *((n, hints[n]) for n in names[1:])]
    return msgspec.defstruct("AccessLine", fields, tag_field="event", tag="request", gc=False)


_AccessLine = _access_line()
_encode = msgspec.json.Encoder().encode
