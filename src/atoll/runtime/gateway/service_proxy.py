"""Requests to services that are no models: `/services/NAME/...` goes to a node that has NAME, as it is.

Nothing is known of such a service, so nothing can be continued: another node is tried only while no answer
has begun, and only if the first one was never reached or the method may be repeated.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import unquote

from atoll.runtime.gateway import faults
from atoll.runtime.gateway.requirements import policies_of
from atoll.runtime.http.server import Connection, Request
from atoll.runtime.http.upstream import RequestTemplate, Upstream
from atoll.runtime.openai import ApiError
from atoll.runtime.pool.pool import Member

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Grant
    from atoll.runtime.gateway.app import Gateway

_PREFIX = b"/services/"
_REPEATED = frozenset({b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE"})
_METHODS = frozenset({*_REPEATED, b"POST", b"PATCH"})
_NO_BODY = frozenset({204, 304})
_PASSED = (b"accept", b"accept-language", b"range", b"if-none-match", b"tracestate")


class ServiceProxy:
    """One request to a service."""

    def __init__(
        self,
        app: Gateway,
        client: Connection,
        sent: Request,
        service: str,
        grant: Grant | None = None,
    ) -> None:
        if sent.method not in _METHODS:
            raise ApiError(405, "this method is not passed on", allow="GET, POST, PUT, DELETE")
        self._app = app
        self._client = client
        self._sent = sent
        self._service = service
        self._grant = grant
        self._policies = policies_of(grant, sent.headers)
        rest = sent.path[len(_PREFIX) :].partition(b"/")[2]
        self._path = b"/" + rest + (b"?" + sent.query if sent.query else b"")
        headers = sent.headers
        # The answer to HEAD looks as if a body came: it is asked for, and left out.
        method = b"GET" if sent.method == b"HEAD" else sent.method
        self._ask = RequestTemplate(
            method, headers.get(b"content-type", b"application/octet-stream")
        )
        self._extra = b"x-request-id: %b\r\ntraceparent: %b\r\n" % (sent.id, sent.trace.encode())
        for name in _PASSED:
            if name in headers:
                self._extra += b"%b: %b\r\n" % (name, headers[name])
        self._avoid: frozenset[str] = frozenset()
        self._member: Member | None = None
        self._way: Upstream | None = None
        self._connecting: asyncio.Task[Upstream] | None = None
        self._begun = self._paused = self._done = False
        self._status = 0
        self._began_s = self._heard_s = app.loop.time()

    @staticmethod
    def service_of(path: bytes) -> str:
        """Return the name of the service that a path is about."""
        name = path[len(_PREFIX) :].partition(b"/")[0].decode("ascii", "replace")
        return unquote(name)

    def attempt(self) -> None:
        """Send the request to the next node."""
        app = self._app
        self._heard_s = app.loop.time()
        member = app.pool.pick_service(
            self._service, self._avoid, self._heard_s, self._allow if self._policies else None
        )
        if member is None or member.name in self._avoid:
            self._fail(self._nobody())
            return
        self._member = member
        member.inflight += 1
        member.requests += 1
        ways = app.links(member)
        way = ways.take()
        if way is not None:
            self._send(way)
            return
        task = asyncio.ensure_future(ways.connect())
        self._connecting = task
        task.add_done_callback(self._connected)

    def _allow(self, member: Member) -> bool:
        offer = member.offer(self._service)
        return all(policy.refusal(offer) is None for policy in self._policies)

    def _nobody(self) -> ApiError:
        """Return why no node serves the request."""
        ring = self._app.pool.services.get(self._service)
        members = [] if ring is None else ring.members
        if not members or any(map(self._allow, members)):
            return faults.unreachable(self._service)
        key = None if self._grant is None else self._grant.policy
        refusals = [None if key is None else key.refusal(m.offer(self._service)) for m in members]
        if None not in refusals:
            return faults.forbidden(self._service, ", ".join(sorted(set(filter(None, refusals)))))
        return faults.not_allowed(self._service, "the policy asks for others", trusted=False)

    def _connected(self, task: asyncio.Task[Upstream]) -> None:
        if self._connecting is not task:
            if not task.cancelled() and task.exception() is None:
                task.result().close()
            return
        self._connecting = None
        if task.cancelled() or task.exception() is not None:
            self._failed("cannot connect", reached=False)
        else:
            self._send(task.result())

    def _send(self, way: Upstream) -> None:
        self._way = way
        way.ask(self, self._path, self._sent.body, self._extra, self._ask)
        if self._paused:
            way.pause()

    def _failed(self, reason: str, *, reached: bool = True) -> None:
        member = self._member
        self._drop()
        if member is not None:
            self._app.pool.failed(member, self._app.loop.time(), reason)
            self._avoid |= {member.name}
        if self._begun:
            # The client sees that the answer is cut off.
            self._done = True
            self._app.passages.discard(self)
            self._client.abort()
        elif len(self._avoid) < self._app.settings.attempts and (
            not reached or self._sent.method in _REPEATED
        ):
            self.attempt()
        else:
            self._fail(faults.attempt_failed(reason, late=False))

    def _drop(self) -> None:
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        way, self._way = self._way, None
        if way is not None:
            way.close()
        member, self._member = self._member, None
        if member is not None:
            member.inflight -= 1

    def _fail(self, error: ApiError) -> None:
        self._drop()
        self._end()
        self._client.respond_error(error)

    def _end(self) -> None:
        self._done = True
        self._app.passages.discard(self)

    # What the node says

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        """Begin to answer."""
        self._heard_s = self._app.loop.time()
        self._status = status
        extra = b"retry-after: %b\r\n" % retry_after if retry_after else b""
        if status in _NO_BODY or self._sent.method == b"HEAD":
            return
        self._begun = True
        self._client.begin(status, content_type or b"application/octet-stream", extra)

    def on_body(self, data: bytes) -> None:
        """Pass a piece on."""
        self._heard_s = self._app.loop.time()
        if self._begun and data:
            self._client.send(data)

    def on_end(self) -> None:
        """End the answer."""
        self._way = None
        member = self._member
        if member is not None:
            self._app.pool.succeeded(member, self._app.loop.time() - self._began_s)
        self._drop()
        self._end()
        if self._begun:
            self._client.end_stream(b"")
        else:
            self._client.respond(self._status, b"")

    def on_lost(self, reason: str, *, unused: bool) -> None:
        """Try another node, or give up."""
        self._way = None
        member = self._member
        if unused and member is not None and not member.node:
            self._app.links(member).drop_idle()
            self._drop()
            self.attempt()
        else:
            self._failed(reason, reached=not unused)

    # What the client and the clock say

    def cancel(self) -> None:
        """Stop: the client is gone."""
        self._drop()
        self._end()

    def pause(self) -> None:
        """Take nothing from the node until the client keeps up."""
        self._paused = True
        if self._way is not None:
            self._way.pause()

    def resume(self) -> None:
        """Go on."""
        self._paused = False
        self._heard_s = self._app.loop.time()
        if self._way is not None:
            self._way.resume()

    def uses(self, member: Member) -> bool:
        """Whether the request is at a node now."""
        return self._member is member

    def member_down(self, reason: str) -> None:
        """Leave a node that is known to be dead."""
        self._failed(reason)

    def tick(self, now_s: float) -> None:
        """Give up what is overdue."""
        deadlines = self._app.deadlines
        most_s = deadlines.client_s if self._paused else deadlines.answer_s
        if self._connecting is not None:
            most_s = deadlines.connect_s
        if now_s - self._heard_s <= most_s:
            return
        if self._paused:
            self._client.abort()
        else:
            self._failed(f"no answer for {most_s:g} s", reached=self._connecting is None)
