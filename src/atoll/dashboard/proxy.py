"""Requests of pages, passed on to a service with the credentials of the session, and answered as they come.

Nothing of an answer that is streamed is kept: a page that reads slowly has the service wait, and one that
goes away has the service stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from urllib.parse import unquote

import msgspec

from atoll.dashboard.console_api import Service
from atoll.dashboard.headers import select_answered, select_sent
from atoll.dashboard.services import (
    ADMIN_PATH,
    ServiceCall,
    ServiceDirectory,
    at_public_port,
    own,
    reaching_gateway,
)
from atoll.dashboard.sessions import LoginSession, SessionKey
from atoll.dashboard.sharing import SHARED, SharedAnswers
from atoll.runtime.http.api_route import PREFIX
from atoll.runtime.http.handlers import Answer, ByteStream, EventStream, Response, with_beats
from atoll.runtime.http.http_client import FetchError, StreamedResponse
from atoll.runtime.http.http_server import Request
from atoll.runtime.openai import ApiError

_LOG = logging.getLogger(__name__)
METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE"})
READING = frozenset({b"GET", b"HEAD"})
_KEY_LASTS_S = 12 * 3600.0
_WHOLE_BYTES = 256 * 2**10
"""An answer of this length or less is read before it is passed on."""
_JSON = "application/json"
API = PREFIX.encode()
"""Before every path of the one API; models are asked under `/v1/`, as at a gateway."""
_MODELS = b"/v1/"
_QUESTIONS = frozenset({"whatif", "simulate", "traces"})
"""Questions that keep the planner busy for long."""
_MAX_QUESTIONS = 4
"""Of one person at the same time: the planner has room for a few more."""
_WORKED_ON = 2
"""How many of them the planner is given, which works on three: others need not wait for one person's."""
_UNBUFFERED = ("x-accel-buffering", "no")
"""For proxies in between: events are passed on as they come."""
_SILENCE_S = 600.0
_BEAT_S = 2.0
"""How often a page that waits for events is sent a comment: one that has gone away is noticed by it."""


def is_api(path: bytes) -> bool:
    """Whether a path is one of the API, not a page."""
    return path.startswith((API, _MODELS))


class SessionOverError(Exception):
    """The gateway no longer knows the key of a session."""


class _KeyMade(msgspec.Struct):
    key: str
    id: str = ""


class _Asking:
    """The questions of one person that wait or are worked on."""

    def __init__(self) -> None:
        self.count = 0
        self.turn = asyncio.Semaphore(_WORKED_ON)


class ServiceForwarder:
    """Passes requests on."""

    def __init__(
        self, services: ServiceDirectory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._services = services
        self.shared = SharedAnswers(clock)
        self._asking: dict[tuple[str, str], _Asking] = {}

    async def forward(self, request: Request, session: LoginSession, service: Service) -> Answer:
        """Answer a request of the API; SessionOverError where the session's key is no longer good."""
        if request.method not in METHODS:
            raise ApiError(405, "this method is not known here", allow="GET, POST, PATCH, DELETE")
        if request.path.startswith(_MODELS):
            rest = request.path.removeprefix(_MODELS).decode("latin-1")
            return await self._ask_model(
                request, session, f"/v1/{_read_target(rest, request.query)}"
            )
        rest = request.path.removeprefix(API).decode("latin-1")
        if service == "planner":
            return await self._ask_planner(request, session, rest)
        target = _read_target(rest, request.query)
        call = self._services.call_gateway(session)
        if request.method == b"GET" and target in SHARED:
            answer: Answer = await self._share(target, session, call)
        else:
            answer = await self._pass_on(request, call, f"{ADMIN_PATH}/{target}")
            if request.method not in READING:
                self.shared.forget()
        if session.kind == "key" and _status(answer) == 401:
            raise SessionOverError
        return answer

    async def _ask_planner(self, request: Request, session: LoginSession, path: str) -> Answer:
        """Have the planner answer, with the rights of a session."""
        planner = self._services.need_planner()
        stack = contextlib.AsyncExitStack()
        if request.method not in READING and path in _QUESTIONS:
            await stack.enter_async_context(self._take_turn(session.who))
        try:
            answer = await planner.answer(request, session.role, session.owner or "")
        except BaseException:
            await stack.aclose()
            raise
        if isinstance(answer, EventStream):
            # The turn ends with the stream.
            return EventStream(_hold(answer.pieces, stack), (*answer.headers, _UNBUFFERED))
        await stack.aclose()
        return answer

    async def _share(self, path: str, session: LoginSession, call: ServiceCall) -> Response:
        """Answer with what all pages of a role are told alike."""
        async with reaching_gateway():
            answer = await self.shared.get(
                path, session, lambda: call.ask("GET", f"{ADMIN_PATH}/{path}")
            )
        kind = answer.headers.get("content-type", _JSON)
        return Response(answer.body, answer.status, kind, select_answered(answer.headers))

    @contextlib.asynccontextmanager
    async def _take_turn(self, who: tuple[str, str]) -> AsyncIterator[None]:
        """Wait until the planner may be given another question of somebody; 429 where too many wait."""
        asking = self._asking.setdefault(who, _Asking())
        if asking.count >= _MAX_QUESTIONS:
            raise ApiError(
                429,
                f"{_MAX_QUESTIONS} questions of yours are being worked on: wait for one of them",
                kind="rate_limit_error",
                code="too_many_questions",
                retry_after_s=5,
            )
        asking.count += 1
        try:
            async with asking.turn:
                yield
        finally:
            asking.count -= 1
            if not asking.count:
                del self._asking[who]

    async def _ask_model(self, request: Request, session: LoginSession, target: str) -> Answer:
        """Ask the gateway's public port; who has no key of his own gets one for the purpose."""
        if session.role == "viewer" and request.method not in READING:
            raise ApiError(
                403,
                "viewers look, and do not ask models",
                kind="permission_error",
                code="role_forbids",
            )
        address = self._services.need_gateway()
        key = session.key or await self._make_key(session)
        answer = await self._pass_on(request, at_public_port(address, key), target)
        if _status(answer) != 401:
            return answer
        if session.kind == "key":
            raise SessionOverError
        # It was revoked, or the gateway has other accounts by now.
        session.made = None
        session.keys_needed = True
        key = await self._make_key(session)
        return await self._pass_on(request, at_public_port(address, key), target)

    async def _make_key(self, session: LoginSession) -> str | None:
        """Return the key that stands for a session without one, made now if need be."""
        if not session.keys_needed:
            return None
        async with session.making:
            if session.made is not None:
                return session.made.text
            call = own(self._services.need_gateway())
            # Enough to ask models, whatever else the session may do.
            role = "viewer" if session.role == "viewer" else "member"
            expires_s = time.time() + _KEY_LASTS_S
            wanted = {"name": "dashboard", "role": role, "expires_s": expires_s}
            if session.owner:
                wanted["owner"] = session.owner
            async with reaching_gateway():
                answer = await call.ask("POST", f"{ADMIN_PATH}/keys", wanted)
            if answer.status not in (200, 201):
                raise ApiError(
                    502,
                    f"the gateway made no key to ask with (status {answer.status})",
                    kind="server_error",
                    code="no_key",
                )
            made = msgspec.json.decode(answer.body, type=_KeyMade)
            session.made = SessionKey(made.id, made.key)
            if session.ended:
                await self.revoke(session)
            return made.key

    async def revoke(self, session: LoginSession) -> None:
        """Revoke the key that was made for a session, if there is one; it ends by itself otherwise."""
        made, session.made = session.made, None
        gateway = self._services.gateway
        if made is None or gateway is None:
            return
        try:
            answer = await own(gateway).ask("DELETE", f"{ADMIN_PATH}/keys/{made.id}")
        except (FetchError, ApiError) as error:
            _LOG.warning("key %s of the dashboard could not be revoked: %s", made.id, error)
            return
        if answer.status >= 300:
            _LOG.warning("key %s of the dashboard was not revoked: %d", made.id, answer.status)

    async def _pass_on(
        self,
        request: Request,
        call: ServiceCall,
        target: str,
    ) -> Answer:
        """Pass a request on to the gateway."""
        method = request.method.decode("latin-1")
        stack = contextlib.AsyncExitStack()
        try:
            async with reaching_gateway():
                opened = call.open(method, target, request.body, select_sent(request.headers))
                answer = await stack.enter_async_context(opened)
                if _comes_whole(answer, method):
                    body = b"".join([piece async for piece in answer.pieces(60.0)])
                    await stack.aclose()
                    kind = answer.headers.get("content-type", _JSON)
                    return Response(body, answer.status, kind, select_answered(answer.headers))
        except BaseException:
            await stack.aclose()
            raise
        headers = (*select_answered(answer.headers), _UNBUFFERED)
        kind = answer.headers.get("content-type", "application/octet-stream")
        return ByteStream(_relay(answer, stack), kind, headers)


async def _hold(
    pieces: AsyncGenerator[bytes, None], stack: contextlib.AsyncExitStack
) -> AsyncGenerator[bytes, None]:
    """Yield pieces, and let go of what is held once there are no more."""
    async with stack, contextlib.aclosing(with_beats(pieces, _BEAT_S)) as told:
        async for piece in told:
            yield piece


async def _relay(
    answer: StreamedResponse, stack: contextlib.AsyncExitStack
) -> AsyncGenerator[bytes, None]:
    is_events = answer.headers.get("content-type", "").startswith("text/event-stream")
    beat_s = _BEAT_S if is_events else None
    async with stack:
        # The headers go out before there is a first piece.
        yield b""
        between = True
        try:
            async with contextlib.aclosing(answer.pieces(_SILENCE_S, beat_s)) as pieces:
                async for piece in pieces:
                    if piece:
                        between = piece.endswith(b"\n\n")
                        yield piece
                    elif between:
                        yield b": still here\n\n"
        except FetchError as error:
            # Cut short for the page, too: it must not take this for the whole.
            raise ConnectionError(str(error)) from error


def _comes_whole(answer: StreamedResponse, method: str) -> bool:
    if answer.status != 200 or method == "HEAD":
        return True
    length = answer.headers.get("content-length", "")
    return length.isdigit() and int(length) <= _WHOLE_BYTES


def _status(answer: Answer) -> int:
    return answer.status if isinstance(answer, Response) else 200


def _read_target(rest: str, query: bytes) -> str:
    """Return the path and query to ask for; one that climbs out of the service's own is refused."""
    plain = unquote(rest)
    if (
        not rest.isascii()
        or not rest.isprintable()
        or not plain.isprintable()
        or "\\" in plain
        or any(c in rest for c in ' "<>{}|^`#')
        or any(part in (".", "..") for part in plain.split("/"))
    ):
        raise ApiError(400, "the path is none", code="bad_path")
    asked = query.decode("latin-1")
    if not asked:
        return rest
    if not asked.isascii() or not asked.isprintable() or " " in asked:
        raise ApiError(400, "the query is none", code="bad_path")
    return f"{rest}?{asked}"
