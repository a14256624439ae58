"""Requests to services that are no models: `/services/NAME/...` goes to a node that has NAME, as it is.

Nothing is known of such a service, so nothing can be continued: another node is tried only while no answer
has begun, and only if the first one was never reached or the method may be repeated. With keys, what it used
is written down (`ServiceMeter`).
"""

from __future__ import annotations

import math
import re
import time
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote

from atoll.runtime.gateway import faults
from atoll.runtime.gateway.attempt import AttemptContext, Attempts, share_of
from atoll.runtime.gateway.gateway_metrics import GatewayMetrics
from atoll.runtime.gateway.requirements import policies_of
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.http.http_server import Connection, Request
from atoll.runtime.http.upstream import RequestTemplate
from atoll.runtime.openai import ApiError, Usage, loose_usage
from atoll.runtime.pool.member import Member
from atoll.telemetry.usage_record import Attempt, UsageRecord

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Accounts, Grant

_JSON_BYTES = 2**20
"""Longest answer in JSON (bytes) that is looked through for its `usage`; a longer one is not kept."""
_TAIL_BYTES = 16 * 2**10
"""Last bytes of a stream of events that are looked through for its `usage`."""
_NOTHING = Usage()


class ServiceMeter:
    """Counts what one request used: bytes, seconds, and tokens if its answer says so.

    It has a slot of the journal like a request for a model, so it is in the ledger once, whatever dies. Bytes
    are those of bodies, as the client sent and received them. Times are of the loop's clock, in seconds, but
    for `started_s` of the record.
    """

    def __init__(
        self,
        accounts: Accounts,
        grant: Grant,
        request_id: str,
        service: str,
        sent_bytes: int,
        now_s: float,
    ) -> None:
        self._accounts = accounts
        self._grant = grant
        self._request_id = request_id
        self._service = service
        self._endpoint = f"/services/{service}"
        self._sent_bytes = sent_bytes
        self._received_bytes = 0
        self._began_s = now_s
        self._first_s: float | None = None
        self._attempts: tuple[Attempt, ...] = ()
        self._kind = ""
        self._kept: bytearray = bytearray()
        self._slot: int | None = accounts.opened(grant, request_id, service, self._endpoint)
        accounts.passed(self._slot, sent_bytes, 0)

    def begin(self, status: int, content_type: bytes, now_s: float) -> None:
        """Note that an answer begins."""
        self._first_s = now_s - self._began_s
        kind = content_type.partition(b";")[0].strip().lower()
        if status == 200 and kind in (b"application/json", b"text/event-stream"):
            self._kind = "json" if kind == b"application/json" else "events"

    def take(self, data: bytes) -> None:
        """Note a piece of the answer that the client is about to have."""
        self._received_bytes += len(data)
        if self._slot is not None:
            self._accounts.passed(self._slot, self._sent_bytes, self._received_bytes)
        if self._kind == "json":
            # Too long to be looked through: what was kept of it is let go.
            if self._received_bytes > _JSON_BYTES:
                self._kind = ""
                self._kept = bytearray()
            else:
                self._kept += data
        elif self._kind == "events":
            self._kept += data
            # Cut at twice the size: cutting at every piece would move the bytes each time.
            if len(self._kept) > 2 * _TAIL_BYTES:
                del self._kept[:-_TAIL_BYTES]

    def leave(self, member: Member | None, outcome: str, began_s: float, now_s: float) -> None:
        """Note what became of the request at a node."""
        if member is not None:
            self._attempts += (share_of(member, self._service, 0, now_s - began_s, outcome),)

    def close(self, status: int, outcome: str, backends: list[str], now_s: float) -> Usage:
        """Write the request down; a second time does nothing."""
        slot, self._slot = self._slot, None
        if slot is None:
            return _NOTHING
        # Only a whole answer says what it used.
        usage = self._read_usage() if outcome == "ok" else _NOTHING
        seconds = now_s - self._began_s
        record = UsageRecord(
            request_id=self._request_id,
            model=self._service,
            endpoint=self._endpoint,
            stream=self._kind == "events",
            status=status,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            estimated=False,
            backends=tuple(backends),
            started_s=time.time() - seconds,
            seconds=seconds,
            first_token_s=self._first_s,
            outcome=outcome,
            key_id=self._grant.key_id,
            attempts=self._attempts,
            audio_seconds=usage.audio_seconds,
            speech_seconds=usage.speech_seconds,
            image_pixels=usage.image_pixels,
            bytes_in=self._sent_bytes,
            bytes_out=self._received_bytes,
        )
        self._accounts.closed(slot, self._grant, record)
        return usage

    def _read_usage(self) -> Usage:
        data = bytes(self._kept)
        if self._kind == "events":
            events = data.replace(b"\r\n", b"\n").split(b"\n\n")
            said = [e for e in events if b'"usage"' in e and e.startswith(b"data:")]
            data = said[-1].removeprefix(b"data:") if said else b""
        return (b'"usage"' in data and loose_usage(data)) or _NOTHING


_PREFIX = b"/services/"
_ENDPOINT = "/services"
"""As metrics call all of them."""
# Methods that do no harm when they are asked twice.
_REPEATED = frozenset({b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE"})
_METHODS = frozenset({*_REPEATED, b"POST", b"PATCH"})
_DOTS = re.compile(rb"/(\.|%2e){1,2}(/|%2f|\\|$)", re.IGNORECASE)
_NO_BODY = frozenset({204, 304})
_PASSED = (b"accept", b"accept-language", b"range", b"if-none-match", b"tracestate")


class ProxyContext(AttemptContext, Protocol):
    """Part of a gateway that a service proxy needs."""

    settings: GatewaySettings
    metrics: GatewayMetrics
    accounts: Accounts | None

    def end_proxy(self, proxy: ServiceProxy) -> None:
        """Forget a request that ended."""


class ServiceProxy:
    """One request to a service."""

    def __init__(
        self,
        context: ProxyContext,
        client: Connection,
        sent: Request,
        service: str,
        grant: Grant | None = None,
    ) -> None:
        if sent.method not in _METHODS:
            raise ApiError(405, "this method is not passed on", allow="GET, POST, PUT, DELETE")
        self._context = context
        self._client = client
        self._sent = sent
        self._service = service
        self._grant = grant
        self._policies = policies_of(grant, sent.headers)
        self.body = sent.body
        headers = sent.headers
        rest = sent.path[len(_PREFIX) :].partition(b"/")[2]
        if _DOTS.search(b"/" + rest):
            # It would lead out of what the service is to serve.
            raise ApiError(400, "a path with . or .. in it is not passed on")
        passed = b"x-request-id: %b\r\ntraceparent: %b\r\n" % (sent.id, sent.trace.encode())
        for name in _PASSED:
            if name in headers:
                passed += b"%b: %b\r\n" % (name, headers[name])
        # The answer to HEAD looks as if a body came: it is asked for, and left out.
        method = b"GET" if sent.method == b"HEAD" else sent.method
        self.attempts = Attempts(
            context,
            b"/" + rest + (b"?" + sent.query if sent.query else b""),
            passed,
            RequestTemplate(method, headers.get(b"content-type", b"application/octet-stream")),
        )
        self._begun = self._paused = False
        self._status = 0
        self._began_s = self._heard_s = context.loop.time()
        self._first_s: float | None = None
        self._meter: ServiceMeter | None = None
        if context.accounts is not None and grant is not None:
            self._meter = ServiceMeter(
                context.accounts, grant, sent.id.decode(), service, len(self.body), self._began_s
            )

    @staticmethod
    def service_of(path: bytes) -> str:
        """Return the name of the service that a path is about."""
        name = path[len(_PREFIX) :].partition(b"/")[0].decode("ascii", "replace")
        return unquote(name)

    # Which node

    def choose(self, now_s: float) -> Member | None:
        """Return the node to try next, or None: all there are have failed."""
        self._heard_s = now_s
        avoid = self.attempts.avoid
        allow = self._allow if self._policies else None
        member = self._context.pool.pick_service(self._service, avoid, now_s, allow)
        # The pool squeezes in those that failed already rather than nobody; here they are not tried again.
        return None if member is None or member.name in avoid else member

    def _allow(self, member: Member) -> bool:
        offer = member.offer(self._service)
        return all(policy.refusal(offer) is None for policy in self._policies)

    def on_nobody(self, now_s: float) -> None:
        """Tell the client why no node serves the request."""
        del now_s
        ring = self._context.pool.services.get(self._service)
        members = [] if ring is None else ring.members
        key = None if self._grant is None else self._grant.policy
        refusals = [None if key is None else key.refusal(m.offer(self._service)) for m in members]
        if not members or any(map(self._allow, members)):
            error = faults.unreachable(self._service)
        elif None not in refusals:
            reasons = ", ".join(sorted(set(filter(None, refusals))))
            error = faults.forbidden(self._service, reasons)
        else:
            error = faults.not_allowed(self._service, "the policy asks for others", trusted=False)
        self._fail(error)

    # When a node fails

    def on_unreachable(self, reason: str) -> None:
        """Try another node: this one has not seen the request."""
        self._fail_over(reason, reached=False)

    def member_down(self, reason: str) -> None:
        """Leave a node that is known to be dead."""
        self._fail_over(reason)

    def _fail_over(self, reason: str, *, reached: bool = True) -> None:
        """Give a node up and try another, as long as that does no harm."""
        context, attempts = self._context, self.attempts
        now_s = context.loop.time()
        if self._meter is not None:
            self._meter.leave(attempts.member, "failed", attempts.began_s, now_s)
        attempts.give_up(reason, now_s, blame=True)
        if self._begun:
            # The client sees that the answer is cut off.
            self._end(self._status, "truncated")
            self._client.abort()
        elif len(attempts.avoid) < context.settings.attempts and (
            not reached or self._sent.method in _REPEATED
        ):
            attempts.attempt(self)
        else:
            self._fail(faults.attempt_failed(reason, late=False))

    def _fail(self, error: ApiError) -> None:
        """Tell the client that it did not work."""
        self._end(error.status, "error")
        self._client.respond_error(error)

    def _end(self, status: int, outcome: str) -> None:
        context, attempts, meter = self._context, self.attempts, self._meter
        now_s = context.loop.time()
        prompt = completion = 0
        if meter is not None:
            meter.leave(attempts.member, outcome, attempts.began_s, now_s)
            usage = meter.close(status, outcome, attempts.backends, now_s)
            prompt, completion = usage.prompt_tokens, usage.completion_tokens
        tally = context.metrics.tally(self._service, _ENDPOINT, status)
        tally.add(now_s - self._began_s, self._first_s, prompt, completion)
        attempts.drop()
        context.end_proxy(self)

    # What the node says

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        """Begin to answer the client."""
        self._heard_s = now_s = self._context.loop.time()
        self._status = status
        self._first_s = now_s - self._began_s
        if self._meter is not None:
            self._meter.begin(status, content_type, now_s)
        extra = b"retry-after: %b\r\n" % retry_after if retry_after else b""
        # Without a body there is nothing to begin: the whole answer goes out at the end.
        if status not in _NO_BODY and self._sent.method != b"HEAD":
            self._begun = True
            self._client.begin(status, content_type or b"application/octet-stream", extra)

    def on_body(self, data: bytes) -> None:
        """Pass a piece on."""
        self._heard_s = self._context.loop.time()
        if self._begun and data:
            if self._meter is not None:
                self._meter.take(data)
            self._client.send(data)

    def on_end(self) -> None:
        """End the answer as the node did, and count a success."""
        self.attempts.upstream = None
        member = self.attempts.member
        if member is not None:
            self._context.pool.note_success(member, self._context.loop.time() - self._began_s)
        self._end(self._status, "ok")
        if self._begun:
            self._client.end_stream(b"")
        else:
            self._client.respond(self._status, b"")

    def on_lost(self, reason: str, *, unused: bool) -> None:
        """Try another node, or give up."""
        self.attempts.upstream = None
        member = self.attempts.member
        if unused and member is not None and not member.node:
            self.attempts.reopen(self, member)
        else:
            self._fail_over(reason, reached=not unused)

    # What the client and the clock say

    def cancel(self) -> None:
        """Stop: the client is gone."""
        self._end(499, "cancelled")

    def pause(self) -> None:
        """Take nothing from the node until the client keeps up."""
        self._paused = True
        self.attempts.pause()

    def resume(self) -> None:
        """Take the rest: the client keeps up again."""
        self._paused = False
        self._heard_s = self._context.loop.time()
        self.attempts.resume()

    @property
    def progress_s(self) -> float:
        """When its node sent something last, in the loop's time; -inf: it has sent nothing."""
        return self._heard_s if self._begun else -math.inf

    def uses(self, member: Member) -> bool:
        """Whether the request is at a node now."""
        return self.attempts.member is member

    def tick(self, now_s: float) -> None:
        """Give up what is overdue."""
        deadlines = self._context.settings.deadlines
        connecting = self.attempts.connecting is not None
        max_s = deadlines.client_s if self._paused else deadlines.answer_s
        if connecting:
            max_s = deadlines.connect_s
        overdue = now_s - self._heard_s > max_s
        if overdue and self._paused:
            self._client.abort()
        elif overdue:
            self._fail_over(f"no answer for {max_s:g} s", reached=not connecting)
