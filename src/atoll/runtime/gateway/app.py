"""The gateway: the server between clients and the backends that serve models.

What happens to a request, in order:

1. It arrives. `http_server` reads it from a connection, within limits and deadlines, and hands it whole to
   `Gateway.handle`, which gives it an id and a trace and looks at its path: a model is asked (2),
   perhaps in another dialect, which is translated at once and on the way back (`dialects`),
   `/services/NAME` goes to a node as it is (`service_proxy`, which shares steps 4 and 5), `/v1/realtime`
   becomes a session, whose answers come back here as requests (`runtime.realtime`), and everything else the
   gateway answers by itself (`gateway_pages`; for those who run it, also through `admin`).
2. It is let in. Its key is checked (`accounts`), its body is read and checked in one pass (`openai`; `form`
   where it brings a file; `content` for what is no text), and a gateway that is full or stopping refuses
   it. From here on it is a `relay.Relay`, or a `media_relay.MediaRelay` if its answer is no text.
3. What it requires is gathered, if anything: the policy of its key and its headers, aliases and fallbacks
   of its model, its conversation (`requirements`, `chooser`), and where several models answer to the name it
   asks for, whose turn it is (`served_choices`). Most requests of a plain gateway skip this.
4. A backend is chosen: by the pool's policy (`pool`), or by `chooser` where there are requirements. If none
   has room the request waits its turn (`queue`), or is told why (`faults`). Where prompts are computed apart,
   a second backend does that first (`prefill_leg`).
5. It is sent (`attempt`) on a kept or a new connection: over HTTP (`http.upstream`), or to a node of a
   fabric, through the tunnel or straight (`federation.upstreams`).
6. The answer comes back (`relay`). Events of a stream pass to the client as bytes, kept in a journal
   (`events`), without the engine's counts of tokens if nobody asked for these (`token_counts`); the end is
   held back until it is all there (`backend_answer`).
7. If the backend fails, the relay lets go of it and goes back to 4, as often as its `RetryBudget` allows. A
   stream that had begun goes on where it broke off (`resume`), and the client sees one stream. If the
   gateway itself dies, another one goes on with streams that were kept for that (`kept_streams`).
8. It ends: answered, failed or given up by its client. Its backend has room for the next, and what it used
   is written down (`usage_writer`): counters, a line of the log, the ledger, traces. For a controller it was
   counted when it came, and is counted again now: its lengths, and whether a promise was kept
   (`traffic_tally`).

Beside all requests, `health` asks the backends how they are, a fabric brings and takes nodes (`federation`),
and one timer, ten times a second, ends what is overdue.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.open_files import allow_files
from atoll.core.patience import Patience
from atoll.runtime.accounts.grants import NoLeaseError, no_bound_error
from atoll.runtime.gateway import faults
from atoll.runtime.gateway.admin import AdminListeners
from atoll.runtime.gateway.budgets import BudgetWatch
from atoll.runtime.gateway.chooser import BackendChooser
from atoll.runtime.gateway.console.live_feed import LiveFeed
from atoll.runtime.gateway.console.snapshot import GatewaySnapshots
from atoll.runtime.gateway.content import check_content
from atoll.runtime.gateway.cors import CorsHeaders
from atoll.runtime.gateway.dialects import (
    DIALECTS,
    AnsweredClient,
    Dialect,
    TranslatedClient,
    shape_error,
    shown_key,
)
from atoll.runtime.gateway.dialects.kept_responses import KeptResponses
from atoll.runtime.gateway.form import TranscriptionForm, read_form
from atoll.runtime.gateway.gateway_metrics import GatewayMetrics
from atoll.runtime.gateway.gateway_pages import Pages, is_private
from atoll.runtime.gateway.health import HealthMonitor
from atoll.runtime.gateway.history_recorder import HistoryRecorder
from atoll.runtime.gateway.kept_streams import ASKED, LAST, KeptStreams, NumberedClient
from atoll.runtime.gateway.lease_wait import LeaseWait
from atoll.runtime.gateway.media_relay import MEDIA_ENDPOINTS, MediaRelay, MediaRequest
from atoll.runtime.gateway.poison import DeathBook
from atoll.runtime.gateway.prefill_leg import list_private
from atoll.runtime.gateway.queue import RequestQueue
from atoll.runtime.gateway.relay import Relay
from atoll.runtime.gateway.request_kind import kind_of
from atoll.runtime.gateway.request_log import RequestLog
from atoll.runtime.gateway.requirements import SPECIAL, max_tokens_of
from atoll.runtime.gateway.series import Series
from atoll.runtime.gateway.served_choices import AssignedTurn
from atoll.runtime.gateway.service_proxy import ServiceProxy
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.gateway.token_relay import TOKEN_ENDPOINTS, TokenRelay
from atoll.runtime.gateway.traffic_tally import TrafficTally
from atoll.runtime.gateway.usage_writer import ENDPOINTS, UsageWriter, ended_request
from atoll.runtime.http.http_request import TRACE_STATE
from atoll.runtime.http.http_server import REQUEST_ID, Application, Connection, Request
from atoll.runtime.http.process_memory import return_large_memory, return_unused_memory
from atoll.runtime.http.upstream import HttpUpstreamPool, UpstreamPool
from atoll.runtime.openai import (
    FORMS,
    AnyRequest,
    ApiError,
    ChatRequest,
    TokensRequest,
    Usage,
    parsed_bytes,
    read_request,
)
from atoll.runtime.pool.member import Member
from atoll.runtime.pool.pool import BackendPool
from atoll.runtime.realtime.realtime_host import REALTIME, RealtimeHost
from atoll.telemetry.logs import JsonLog, Log, SilentLog
from atoll.telemetry.spans import child_of, new_trace
from atoll.telemetry.usage_record import OnUsage

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Accounts, Grant
    from atoll.runtime.federation import Federation
    from atoll.telemetry.spans import Spans
    from atoll.telemetry.traffic_recording import Recorder

_TICK_S = 0.1
"""Between two looks for what is overdue: so much later than its deadline anything may end."""
_TRIM_S = 5.0
"""So often what large requests left is given back."""
_SPARE_FILES = 256
"""Files beside the connections of clients and one to a backend for every request."""
_BACKLOG = 2048
"""Connections that may wait to be accepted."""
KEPT = frozenset({ASKED, LAST})
"""Headers with which a stream is kept, or goes on."""
_LARGE_BYTES = 64 * 2**10
"""Of a body: what it is read into is counted, too."""


class Gateway(Application):
    """Serves a pool of backends on one port, and is administered beside it.

    `on_usage` is called exactly once for every request that reached the point of being sent to a
    backend, when it ends. `accounts` lets requests in and writes down what they used, `federation` brings
    the nodes of a fabric, `recorder` and `spans` keep traces. Runs on any asyncio loop; uvloop's makes it
    fast.
    """

    upgrades = frozenset({REALTIME})

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
        chosen = settings or GatewaySettings()
        super().__init__(chosen.limits, chosen.deadlines)
        self.pool = pool
        self.accounts = accounts
        self.federation = federation
        self.spans = spans
        self.log: Log = log or SilentLog()
        self.detailed = any((accounts, federation, spans))
        self._recorded = recorder is not None
        self.metrics = GatewayMetrics(pool)
        self.relays: set[Relay] = set()
        self.service_proxies: set[ServiceProxy] = set()
        self.realtime = RealtimeHost(chosen.realtime)
        self.queue = RequestQueue()
        self.deaths = DeathBook()
        self.started_s = time.time()
        self._responses = KeptResponses(chosen.responses)
        self.traffic: TrafficTally
        """Counts of demand and kept promises, once it runs."""
        self.chooser = BackendChooser(pool, accounts, chosen)
        self.series = Series(self)
        self.metrics.more = lambda: (*self.series.read(), *self.history.series())
        self.requests = RequestLog()
        self._usage = UsageWriter(
            self.metrics,
            self.series,
            self.log,
            self.requests,
            on_usage=on_usage,
            accounts=accounts,
            recorder=recorder,
            spans=spans,
        )
        self._patience = Patience(_TICK_S)
        """How late this process was: what others could not say meanwhile is not held against them."""
        self._health = HealthMonitor(
            pool, self.upstreams, chosen.health, self._progress_at, self._patience
        )
        self.budgets = BudgetWatch(lambda: self.settings.budgets, accounts, self.log)
        self.snapshots = GatewaySnapshots(self)
        self.live = LiveFeed(self, self.snapshots.snapshot)
        self.history: HistoryRecorder
        """Made by `start`."""
        self._pages = Pages(self)
        self._admin = AdminListeners(self._pages, self._refuse, self.refused)
        self._upstreams: dict[Member, UpstreamPool] = {}
        self._monitoring: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._trim_s = 0.0
        # Last: it hands the settings to all that is made above.
        self.configure(chosen)

    def configure(self, settings: GatewaySettings) -> None:
        """Take new settings; where to listen stays as it was."""
        self.settings = settings
        self.limits = settings.limits
        self.realtime.limits = settings.realtime
        self._media_limits = settings.media
        self._cors = None if settings.cors is None else CorsHeaders(settings.cors)
        self._streams = None if settings.streams is None else KeptStreams(settings.streams)
        if settings.responses != self._responses.settings:
            self._responses = KeptResponses(settings.responses)
        self.deadlines = settings.deadlines
        self.chooser.configure(settings)
        self._health.settings = settings.health
        # `traffic` is made by `start`.
        if self._server is not None:
            self.traffic.state(settings.promises)
        if self.accounts is not None:
            self.accounts.on_full_disk = settings.on_full_disk
        self._admin.configure(settings.limits, settings.deadlines)
        self._all_special = self.detailed or self._recorded or settings.affinity
        """Whether the requirements of every request are gathered, and its record is kept."""
        self._usage.wanted = self._all_special
        self._usage.access_log = (
            self.log if settings.access_log and isinstance(self.log, JsonLog) else None
        )

    # Start and stop

    async def start(self) -> tuple[str, int]:
        """Listen, and return the host and port listened on."""
        self.loop = asyncio.get_running_loop()
        self.traffic = TrafficTally(
            self.pool, self.chooser, self.loop.time(), self.settings.promises
        )
        self.history = HistoryRecorder(self)
        if self._streams is not None:
            self._streams.prepare()
        self.pool.listeners += (self._follow_pool, self.history.follow)
        return_large_memory()
        limits = self.settings.limits
        wanted = limits.connections + limits.requests + _SPARE_FILES
        if (allowed := allow_files(wanted)) < wanted:
            self.log.event("gateway.few_files", wanted=wanted, allowed=allowed, hint="ulimit -n")
        # Before anything arrives: it sets the date that answers carry, and from here on it keeps itself
        # going.
        self._tick()
        host, port = await self.listen(
            self.settings.host,
            self.settings.port,
            backlog=_BACKLOG,
            share=self.settings.share_port,
        )
        self.realtime.listens_at(host, port)
        try:
            await self._admin.open(self.settings, port)
        except BaseException:
            # Half a gateway is none: what listens already is closed again.
            await self.close()
            raise
        self._monitoring = self.loop.create_task(self._health.run())
        # Last: from here on nodes come into a gateway that runs.
        if self.federation is not None:
            self.federation.attach(self)
        self.log.event(
            "gateway.start",
            host=host,
            port=port,
            backends=len(self.pool.members),
            admin_socket=None if self.admin_socket is None else str(self.admin_socket),
        )
        return host, port

    async def drain(self, seconds: float) -> bool:
        """Accept no more and let what runs end; return whether all of it did in time."""
        self.draining = True
        self.stop_listening()
        self.live.close()
        self.realtime.close()
        # Idle connections close now, the others after the answer they wait for.
        for connection in list(self.connections):
            connection.finish_up()
        until_s = self.loop.time() + seconds
        while (self.relays or self.service_proxies) and self.loop.time() < until_s:
            await asyncio.sleep(_TICK_S)
        return not self.relays and not self.service_proxies

    async def close(self) -> None:
        """Stop at once; what still runs is cut off."""
        self.draining = True
        self.stop_listening()
        self.live.close()
        self._admin.close()
        self.abort_connections()
        if self._monitoring is not None:
            self._monitoring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._monitoring
        if self._timer is not None:
            self._timer.cancel()
        if self.federation is not None:
            self.federation.detach()
        for upstreams in self._upstreams.values():
            upstreams.close()
        if self._follow_pool in self.pool.listeners:
            self.pool.listeners.remove(self._follow_pool)
            self.pool.listeners.remove(self.history.follow)
            self.history.close()
            await self.budgets.close()
        # Aborted connections tell their requests in the next turn of the loop: those end before the log
        # does.
        await asyncio.sleep(0)
        self.log.event("gateway.stop")
        self.log.flush()

    @property
    def admin_socket(self) -> Path | None:
        """Where it is administered, once it runs."""
        return self._admin.socket

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Where Prometheus may ask without a token, once it runs and if it may."""
        return self._admin.metrics_address

    # Requests arrive

    def expect(self, request: Request) -> None:
        """Refuse a request by its headers, so that nothing is held of what a stranger sends."""
        if is_private(request.path):
            self._pages.authorize(request)
            return
        if self._cors is not None:
            self._cors.mark(request)
        try:
            if self.accounts is not None:
                self.accounts.authenticate(shown_key(request.path, request.headers))
            # Told before the body comes. It is looked at again when the request is whole.
            if self.draining or len(self.relays) >= self.settings.limits.requests:
                raise self._full()
        except ApiError as error:
            raise shape_error(error, request.path) from None

    def handle(self, connection: Connection, request: Request) -> None:
        """Answer a request, now or later."""
        headers = request.headers
        parent = headers.get(b"traceparent")
        request.trace = new_trace() if parent is None else child_of(parent.decode("latin-1"))
        # Whoever began a trace has decided whether it is sampled.
        if self.spans is not None and parent is None:
            request.trace = self.spans.mark_sampled(request.trace)
        request_id = headers.get(b"x-request-id")
        # A client's own id is kept only in a form that is safe in headers and logs.
        if request_id is not None and REQUEST_ID.fullmatch(request_id):
            request.id = request_id
        else:
            # Without a name of its own a request is called like its trace.
            request.id = b"req-" + request.trace[3:35].encode()
        if self._cors is not None and not is_private(request.path):
            self._cors.mark(request)
            if self._cors.answer(connection, request):
                return
        self._dispatch(connection, request)

    def _dispatch(self, connection: Connection, request: Request, *, waited: bool = False) -> None:
        """Hand a request to whoever answers it, by its path; `waited`: for its key's part of a limit."""
        try:
            endpoint = ENDPOINTS.get(request.path)
            if endpoint is not None and request.method == b"POST":
                if KEPT.isdisjoint(request.headers):
                    self._relay(connection, request, endpoint)
                else:
                    with self._numbered(connection, request) as kept:
                        self._relay(kept or connection, request, endpoint, kept=kept)
            elif request.path in DIALECTS:
                with self._numbered(connection, request) as kept:
                    self._translate(connection, request, DIALECTS[request.path], kept)
            elif request.upgrade:
                self._open_session(connection, request)
            elif request.path.startswith(b"/services/"):
                self._proxy(connection, request)
            else:
                self._pages.answer(connection, request)
        except NoLeaseError as error:
            if waited or self.accounts is None:
                self._refuse(connection, request, shape_error(error, request.path))
            else:
                again = partial(self._dispatch, connection, request, waited=True)
                LeaseWait(connection, self.accounts.settled(), again)
        except Exception as error:  # noqa: BLE001 - the edge: whatever is wrong, the client is told
            self._refuse(connection, request, error)

    def _refuse(self, connection: AnsweredClient, request: Request, error: Exception) -> None:
        """Answer a request with an error; one that nobody foresaw is told to the log only."""
        if isinstance(error, ApiError):
            self.refused(error, request)
        else:
            self.metrics.rejected(500)
            self.log.event("request.bug", id=request.id.decode(), error=repr(error))
            error = ApiError(500, "internal error", kind="server_error")
        connection.respond_error(error)

    def refused(self, error: ApiError, request: Request | None = None) -> None:
        """Note a request that is answered with an error, or that could not be read (no request)."""
        self.metrics.rejected(error.status)
        if self._usage.access_log is not None:
            self.log.event(
                "request.refused",
                id=request.id.decode() if request is not None else None,
                path=request.path.decode(errors="replace")[:200] if request is not None else None,
                status=error.status,
                error=error.message[:500],
            )

    @contextlib.contextmanager
    def _numbered(
        self, connection: Connection, request: Request
    ) -> Iterator[NumberedClient | None]:
        """Give a client whose stream is kept, or one that goes on with a stream; None: it is not kept."""
        kept = self._number(connection, request)
        try:
            yield kept
        finally:
            # A request that was refused: others may ask for the stream.
            if kept is not None and not kept.in_use:
                kept.stream.close()

    def _number(self, connection: Connection, request: Request) -> NumberedClient | None:
        streams, last = self._streams, request.headers.get(LAST)
        if streams is None or (last is None and request.headers.get(ASKED) != b"1"):
            if last is not None:
                # From the start, the client would have its beginning twice.
                raise faults.stream_gone()
            return None
        if last is not None:
            for relay in list(self.relays):
                # The client is back before its old connection was known to be gone.
                if relay.kept is not None and last.startswith(relay.kept.stream.name):
                    relay.cancel()
                    relay.client.abort()
        return streams.number(connection, request)

    def _translate(
        self,
        connection: Connection,
        request: Request,
        dialect: Dialect,
        kept: NumberedClient | None,
    ) -> None:
        """Let a request in that is asked in another way than it is answered."""
        client = TranslatedClient(kept or connection, dialect, request)
        try:
            owner = None
            if self.accounts is not None:
                # As in `_relay`: before the body is read.
                owner = self.accounts.authenticate(client.show_key()).key_id
            translated = client.translate(self._responses.of(owner))
            self._relay(client, translated, dialect.endpoint, asked=dialect.path, kept=kept)
        except NoLeaseError:
            raise
        except Exception as error:  # noqa: BLE001 - the edge, as in `handle`
            self._refuse(client, request, error)

    def _relay(
        self,
        connection: AnsweredClient,
        request: Request,
        endpoint: str,
        *,
        asked: str = "",
        kept: NumberedClient | None = None,
    ) -> None:
        """Let a request for a model in, and send it on its way."""
        # Before anything is read that a stranger sent.
        self._authenticate(request, kept)
        form: TranscriptionForm | None = None
        parsed: AnyRequest
        if endpoint in MEDIA_ENDPOINTS and endpoint in FORMS:
            form = read_form(request.headers.get(b"content-type", b""), request.body)
            parsed = form.request
        else:
            parsed = self._read(connection, endpoint, request.body)
        now_s = self.loop.time()
        # Known to kill backends: it does not reach another one.
        if self.deaths.guilty and self.deaths.knows(request.body, now_s):
            raise faults.poison()
        turn = None
        if self.chooser.choice_table.by_name:
            aliases = self.settings.aliases
            turn = self.chooser.choice_table.turn(parsed, request.headers, aliases)
        # What a choice is asked for is asked of the model whose turn it is.
        tally = self.traffic.find(parsed.model if turn is None else turn.service, now_s)
        if len(self.relays) >= self.settings.limits.requests or self.draining:
            # A request that is refused for want of room is demand too, which a controller should know of.
            if tally is not None and not self.draining:
                tally.refuse(now_s, kind_of(parsed))
            raise self._full()
        if endpoint in TOKEN_ENDPOINTS:
            # Work for a tokenizer: it says nothing of how much a model is asked.
            tally = None
        relay = self._make_relay(connection, request, parsed, form)
        relay.tally = tally
        if asked:
            relay.endpoint = endpoint = asked
        # Most requests of a plain gateway need none of this: the policy of the pool decides alone.
        if (
            turn is not None
            or self._all_special
            or parsed.model not in self.pool.rings
            or parsed.models is not None
            or not SPECIAL.isdisjoint(request.headers)
        ):
            self._require(relay, request, parsed, endpoint, turn, kept)
        # Not before: a request that `_require` refuses has not arrived.
        if tally is not None:
            tally.arrive(now_s, kind_of(parsed))
        # Known to all before the attempt, which may end the request at once.
        connection.exchange = relay
        self.relays.add(relay)
        if kept is None or not relay.stream:
            relay.attempts.attempt(relay)
        else:
            relay.keep(kept)

    def _authenticate(self, request: Request, kept: NumberedClient | None) -> None:
        """Refuse a caller without a key, or with another than the stream that it wants to go on with."""
        if self.accounts is not None:
            grant = self.accounts.authenticate(request.headers.get(b"authorization"))
            if kept is not None:
                kept.check_key(grant.key_id)

    def _read(self, connection: AnsweredClient, endpoint: str, body: bytes) -> AnyRequest:
        # What a large body is read into takes memory too: it is counted before it is read.
        if len(body) > _LARGE_BYTES:
            connection.hold(parsed_bytes(body))
        parsed = read_request(endpoint, body)
        check_content(parsed, self._media_limits, self.settings.limits.content_parts)
        return parsed

    def _make_relay(
        self,
        connection: AnsweredClient,
        request: Request,
        parsed: AnyRequest,
        form: TranscriptionForm | None,
    ) -> Relay:
        """Return a request on its way, with the headers that pass to backends."""
        if self.pool.hands_over and form is None and (private := list_private(request.body)):
            raise faults.private_field(private[0])
        passed = b"x-request-id: %b\r\ntraceparent: %b\r\n" % (request.id, request.trace.encode())
        state = request.headers.get(b"tracestate")
        if state is not None and TRACE_STATE.fullmatch(state):
            passed += b"tracestate: %b\r\n" % state
        # The usual kind first.
        if type(parsed) is ChatRequest:
            return Relay(self, connection, request, parsed, passed)
        if isinstance(parsed, MediaRequest) and isinstance(connection, Connection):
            return MediaRelay(self, connection, request, parsed, passed, form)
        if isinstance(parsed, TokensRequest):
            return TokenRelay(self, connection, request, parsed, passed)
        return Relay(self, connection, request, parsed, passed)

    def _require(
        self,
        relay: Relay,
        request: Request,
        parsed: AnyRequest,
        endpoint: str,
        turn: AssignedTurn | None,
        kept: NumberedClient | None,
    ) -> None:
        """Find out what a request requires, and whether its key lets it in."""
        accounts, bound = self.accounts, 0
        grant: Grant | None = None
        if accounts is not None:
            # From here on the request counts against the limits of its key.
            authorization = request.headers.get(b"authorization")
            bound = self._bound(accounts, authorization, parsed, request.body)
            grant = accounts.admit(authorization, parsed.model, bound)
        now_s = self.loop.time()
        try:
            relay.requirements = self.chooser.gather_requirements(
                request, parsed, grant, now_s, turn
            )
        except ApiError:
            # A model that a controller told of and that nobody serves just now: it is asked for still.
            if relay.tally is not None and parsed.model not in self.pool.rings:
                relay.tally.refuse(now_s, kind_of(parsed))
            raise
        # In the same turn of the loop as `admit`: no other request comes between the check and the count.
        if accounts is not None and grant is not None:
            stream = None if kept is None or not relay.stream else kept.stream
            settled_in = "" if stream is None else str(stream.folder)
            relay.slot = accounts.opened(
                grant,
                request.id.decode(),
                parsed.model,
                endpoint,
                settled_in=settled_in,
                need=bound,
            )
            if stream is not None:
                stream.operation = accounts.operation(relay.slot)

    def _bound(
        self, accounts: Accounts, authorization: bytes | None, parsed: AnyRequest, body: bytes
    ) -> int:
        """Return how many tokens a request may use at most, where its key has strict limits; else 0."""
        if not accounts.has_strict or not accounts.reserves(accounts.authenticate(authorization)):
            return 0
        bound = max_tokens_of(parsed, body)
        if bound is None:
            raise no_bound_error()
        return bound

    def _proxy(self, connection: Connection, request: Request) -> None:
        """Let a request for a service that is no model in, and send it on its way."""
        if len(self.service_proxies) >= self.settings.limits.requests or self.draining:
            raise self._full()
        name = ServiceProxy.service_of(request.path)
        grant: Grant | None = None
        if self.accounts is not None:
            grant = self.accounts.admit(request.headers.get(b"authorization"), name)
        # After the key was checked: a stranger does not learn which services there are.
        if name not in self.pool.services:
            raise ApiError(404, f"there is no service {name[:200]!r}", code="not_found")
        proxy = ServiceProxy(self, connection, request, name, grant)
        connection.exchange = proxy
        self.service_proxies.add(proxy)
        proxy.attempts.attempt(proxy)

    def _open_session(self, connection: Connection, request: Request) -> None:
        """Begin a session of `/v1/realtime`; every answer of it is a request of its own, with its key."""
        if self.draining:
            raise self._full()
        origin = request.headers.get(b"origin")
        # A browser lets any page open a WebSocket, and does not ask first as it does for requests.
        if origin is not None and (self._cors is None or not self._cors.allows(origin)):
            raise ApiError(403, "pages of this origin may not ask here", code="origin_not_allowed")
        self._authenticate(request, None)
        self.realtime.open(connection, request)

    def _full(self) -> ApiError:
        why = "the gateway is shutting down" if self.draining else "the gateway is full"
        return faults.server_fault(503, why, retry_s=1)

    # What requests need on their way

    def upstreams(self, member: Member) -> UpstreamPool:
        """Return the connections to a backend."""
        upstreams = self._upstreams.get(member)
        if upstreams is None:
            if member.node and self.federation is not None:
                upstreams = self.federation.upstreams(member)
            else:
                upstreams = HttpUpstreamPool(member, self.loop)
            self._upstreams[member] = upstreams
        return upstreams

    def is_present(self, member: Member) -> bool:
        """Whether a node is still in the fabric; of other backends nobody knows."""
        return self.federation is None or not member.node or self.federation.is_present(member)

    def record_delivery(self, slot: int, tokens: int) -> None:
        """Write down how many tokens the client of a request is about to have."""
        if self.accounts is not None:
            self.accounts.delivered(slot, tokens)

    def record_media(self, slot: int, usage: Usage) -> None:
        """Write down which sound and pictures a request has used by now, for its client."""
        if self.accounts is not None:
            self.accounts.used_media(slot, usage)

    def note_prefill(self, model: str, outcome: str) -> None:
        """Count what became of a prompt that another backend was to compute."""
        self.metrics.prefilled(model, outcome)

    def note_failover(self, relay: Relay, member: Member, reason: str) -> None:
        """Count and log that a request leaves a backend that failed it."""
        self.metrics.failed_over(relay.model, begun=relay.begun)
        self.log.event(
            "request.failover",
            id=relay.sent.id.decode(),
            backend=member.name,
            begun=relay.begun,
            reason=reason,
        )

    def end_relay(self, relay: Relay, status: int, outcome: str, usage: Usage | None) -> None:
        """Forget a request that ended, and write it down."""
        self.relays.discard(relay)
        now_s = self.loop.time()
        seconds = now_s - relay.started_s
        self._usage.write(relay, status, outcome, usage, seconds)
        turn = None if relay.requirements is None else relay.requirements.turn
        # A turn counts only where a backend was asked.
        if turn is not None and relay.attempts.backends:
            self.chooser.choice_table.count(turn, relay.model)
        tally = relay.tally
        if tally is None:
            return
        # Lengths are those of whole answers; one of sound or pictures alone has no tokens to tell of.
        if (
            usage is not None
            and outcome == "ok"
            and (usage.completion_tokens or not usage.has_media)
        ):
            first_s, alone = relay.first_s, self._only_instance(relay)
            # Of an answer that is no stream only the end is seen.
            if first_s is None or not relay.stream:
                tally.measure(now_s, usage.prompt_tokens, usage.completion_tokens)
                if alone:
                    self.traffic.pace(alone, now_s)
            else:
                if alone:
                    further = usage.completion_tokens - 1
                    self.traffic.pace(alone, now_s, further, now_s - first_s)
                tally.measure(
                    now_s,
                    usage.prompt_tokens,
                    usage.completion_tokens,
                    first_s - relay.started_s,
                    now_s - first_s,
                )
        if tally.promise is not None:
            tally.judge(now_s, ended_request(relay, status, outcome, usage, seconds))

    def _only_instance(self, relay: Relay) -> str:
        """Return the instance that a request was answered by alone; "" where there were several, or none."""
        asked = relay.attempts.backends
        member = self.pool.members.get(asked[0]) if len(asked) == 1 else None
        return "" if member is None else member.instance

    def end_proxy(self, proxy: ServiceProxy) -> None:
        """Forget a request to a service that ended."""
        self.service_proxies.discard(proxy)

    # The pool and the clock

    def _follow_pool(self, event: str, member: Member) -> None:
        """Do what a change of a backend asks for."""
        # Nodes come and go: a model that has just lost one is away, not unknown.
        if event == "removed" and member.node:
            self.chooser.note_loss(member.backend.models, self.loop.time())
        elif event in ("added", "up", "changed", "restored", "returned"):
            # There may be room now for a request that waits.
            self.queue.wake()
        self.log.event(
            f"backend.{event}", backend=member.name, state=member.state, reason=member.reason
        )
        upstreams = self._upstreams.get(member)
        if event in ("down", "masked"):
            # Both count as a death where a request is suspected (`poison`).
            self.deaths.note(member.name, self.loop.time())
        if event == "down":
            if upstreams is not None:
                # They lead to a process that is gone.
                upstreams.drop_idle()
            for request in self._running():
                if request.uses(member):
                    request.member_down(f"backend down: {member.reason}")
        elif event == "drained":
            self.chooser.vacate(member, self.relays, self.loop.time())
        elif upstreams is not None and event == "removed":
            upstreams.close()
        elif upstreams is not None and event == "changed":
            if upstreams.url != member.backend.url:
                upstreams.drop_idle()
            upstreams.aim(member)

    def _progress_at(self, member: Member) -> float:
        """Return when a backend last sent a part of an answer, in the loop's time; -inf: it runs none."""
        times = (each.progress_s for each in self._running() if each.uses(member))
        return max(times, default=-math.inf)

    def _running(self) -> list[Relay | ServiceProxy]:
        # A copy: requests leave the sets when they end.
        return [*self.relays, *self.service_proxies]

    def _tick(self) -> None:
        """End what is overdue, ten times a second."""
        # Before the work: what goes wrong below does not stop the clock.
        self._timer = self.loop.call_later(_TICK_S, self._tick)
        now_s = self.loop.time()
        self._patience.tick(now_s)
        for request in self._running():
            request.tick(now_s)
        # Only where some node knows its end is there anything to hand over.
        if self.pool.ending:
            self.chooser.hand_over(self.relays, now_s)
        # The date once for all answers until the next tick.
        self.tick_connections(now_s, formatdate(usegmt=True).encode())
        self._admin.tick(now_s, self.date)
        self._pages.tick(now_s)
        self.history.tick(now_s)
        self.budgets.tick(now_s)
        for member, upstreams in list(self._upstreams.items()):
            upstreams.tick(now_s)
            # Kept until the last request and the last connection are gone.
            if member.removed and not upstreams.open and not member.inflight:
                del self._upstreams[member]
        self.pool.tick(now_s)
        self.log.flush()
        if now_s >= self._trim_s:
            self._trim_s = now_s + _TRIM_S
            return_unused_memory()
            if self._streams is not None:
                self.loop.run_in_executor(None, self._streams.sweep)
