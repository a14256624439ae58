"""Requests to services that are no models: `/services/NAME/...` goes to a node that has NAME, as it is.

Nothing is known of such a service, so nothing can be continued: another node is tried only while no answer
has begun, and only if the first one was never reached or the method may be repeated. With keys, what it used
is written down (`service_meter`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote

from atoll.runtime.gateway import faults
from atoll.runtime.gateway.attempt import AttemptContext, Attempts
from atoll.runtime.gateway.metrics import GatewayMetrics
from atoll.runtime.gateway.requirements import policies_of
from atoll.runtime.gateway.service_meter import ServiceMeter
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.http.server import Connection, Request
from atoll.runtime.http.upstream import RequestTemplate
from atoll.runtime.openai import ApiError
from atoll.runtime.pool.member import Member

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Accounts, Grant

_PREFIX = b"/services/"
_ENDPOINT = "/services"
"""As metrics call all of them."""
_REPEATED = frozenset({b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE"})
_METHODS = frozenset({*_REPEATED, b"POST", b"PATCH"})
_NO_BODY = frozenset({204, 304})
_PASSED = (b"accept", b"accept-language", b"range", b"if-none-match", b"tracestate")


class ProxyContext(AttemptContext, Protocol):
    """What a service proxy needs of a gateway."""

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

    def uses(self, member: Member) -> bool:
        """Whether the request is at a node now."""
        return self.attempts.member is member

    def tick(self, now_s: float) -> None:
        """Give up what is overdue."""
        deadlines = self._context.settings.deadlines
        connecting = self.attempts.connecting is not None
        most_s = deadlines.client_s if self._paused else deadlines.answer_s
        if connecting:
            most_s = deadlines.connect_s
        overdue = now_s - self._heard_s > most_s
        if overdue and self._paused:
            self._client.abort()
        elif overdue:
            self._fail_over(f"no answer for {most_s:g} s", reached=not connecting)
