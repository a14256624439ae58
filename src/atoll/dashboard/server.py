"""The console: pages, sessions, and the one API, which the gateway and the planner answer behind it.

A request, in order: is it for a host that we are; if it may change something, does it come from a page of
ours; whose session is it; does it show that session's token; then it is answered here, or passed on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from atoll.core.roles import find_role
from atoll.core.version import __version__
from atoll.dashboard.console_api import ConsoleApi, LoginRequest, LoginWays, Service, ShownSession
from atoll.dashboard.headers import (
    DATA_POLICY,
    PAGE_POLICY,
    REPORT_POLICY,
    KnownHosts,
    name_cookie,
    read_bearer,
    read_cookie,
    safety_lines,
    write_cookie,
)
from atoll.dashboard.links import LoginLinks
from atoll.dashboard.live import LiveEvents
from atoll.dashboard.proxy import (
    API,
    READING,
    ServiceForwarder,
    SessionOverError,
    is_api,
)
from atoll.dashboard.services import (
    ADMIN_PATH,
    ServiceDirectory,
    at_public_port,
    own,
    reaching_gateway,
)
from atoll.dashboard.sessions import (
    ABSOLUTE_S,
    LoginLimiter,
    LoginSession,
    ProgramSessions,
    SessionStore,
)
from atoll.dashboard.static import FOLDER, StaticFiles
from atoll.dashboard.trust import ProxyTrust
from atoll.runtime.http.handlers import Answer, EventStream, HandlerServer, Response
from atoll.runtime.http.http_client import FetchError
from atoll.runtime.http.http_server import ConnectionLimits, Request
from atoll.runtime.openai import ApiError

_LOG = logging.getLogger(__name__)
_PAGE = safety_lines(PAGE_POLICY)
_DATA = safety_lines(DATA_POLICY)
_REPORT = safety_lines(REPORT_POLICY)
_SESSION = API + b"session"
_LIVE = API + b"live"
_REPORTS = API + b"reports/"
_STATIC = b"/static/"
_MOVED = {b"/session": _SESSION, b"/live": _LIVE}
"""Where what programs asked for until 0.9 is now; `/api/...` is in `_find_new_place`."""
_PASSED_BYTES = 64 * 2**20 + 2**16
"""Of a body that is passed on: a trace of 64 MiB, or the sound and pictures of a conversation."""
_SINGLE_HEADERS = frozenset({b"origin", b"x-csrf-token"})
_OWN_BYTES = 64 * 2**10
_HELD_BYTES = 384 * 2**20
"""Of all bodies that come at the same time."""
_LOOK_S = 60.0
"""How often sessions are looked through, and keys of open pages are asked about."""
_REFRESH_S = 3.0
"""How long a page waits for the gateway to say who somebody is, before it goes by what was known."""
_KNOWN_S = 10.0
"""How long what a key may do is believed, where it only looks."""
_NO_STORE = ("cache-control", "no-store")
_MAX_KEY = 512
_KEY_OVER = "the key was revoked or has expired"


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """Options of a dashboard; `base_url` is what pages show as the address of models."""

    host: str = "127.0.0.1"
    port: int = 8090
    public_urls: tuple[str, ...] = ()
    base_url: str | None = None
    secure: bool = False
    trust: ProxyTrust = field(default_factory=ProxyTrust)
    static: Path = FOLDER
    follow_static: bool = False
    max_pages: int = 1000


class Asker(msgspec.Struct):
    """Who a gateway takes somebody for (`GET /atoll/v1/me`)."""

    role: str
    id: str | None = None
    name: str | None = None
    owner: str | None = None
    keys_needed: bool = False
    accounts: bool = False


_LOGIN = msgspec.json.Decoder(LoginRequest)
_ASKER = msgspec.json.Decoder(Asker)


class PageLimits(ConnectionLimits):
    """Limits on requests of clients: large bodies only where they are passed on."""

    def body_limit(self, path: bytes) -> int:
        """Return how many bytes the body of a request may have."""
        return _PASSED_BYTES if is_api(path) and path != _SESSION else self.body_bytes


class DashboardListener(HandlerServer):
    """Refuses by its headers what would be refused after its body."""

    def __init__(self, dashboard: Dashboard) -> None:
        super().__init__(
            dashboard.answer, PageLimits(body_bytes=_OWN_BYTES, buffered_bytes=_HELD_BYTES)
        )
        self._dashboard = dashboard
        self.once = dashboard.settings.trust.headers | _SINGLE_HEADERS

    def expect(self, request: Request) -> None:
        """Let a body come only of who is logged in, or logs in."""
        self._dashboard.check_early(request)


class Dashboard:
    """See the module."""

    def __init__(
        self,
        settings: DashboardSettings,
        services: ServiceDirectory,
        links: LoginLinks,
        load_api: Callable[[], ConsoleApi],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve; `load_api` returns the table of all requests, and is called in a thread."""
        self.settings = settings
        self.services = services
        self.links = links
        self._clock = clock
        self.sessions = SessionStore()
        self.limiter = LoginLimiter()
        self._static = StaticFiles(settings.static, follow=settings.follow_static)
        self._forwarder = ServiceForwarder(services, clock)
        self._hosts = KnownHosts(settings.host, settings.port, settings.public_urls)
        self._cookie = name_cookie(settings.port, secure=settings.secure)
        self._tasks: set[asyncio.Task[None]] = set()
        self._programs = ProgramSessions()
        self._load_api = load_api
        self._api: asyncio.Task[ConsoleApi]
        self._owner = LoginSession("link", "this machine", "admin")
        self._socket: HandlerServer | None = None
        self.live: LiveEvents
        self.listener: DashboardListener

    async def start(self) -> tuple[str, int]:
        """Listen, and return the host and port listened on."""
        self._api = asyncio.create_task(asyncio.to_thread(self._load_api))
        self.live = LiveEvents(
            self.services,
            self._is_over,
            self._end_of_key,
            changed=self._forwarder.shared.forget,
            max_pages=self.settings.max_pages,
        )
        self.listener = DashboardListener(self)
        host, port = await self.listener.start(self.settings.host, self.settings.port)
        self._hosts = KnownHosts(self.settings.host, port, self.settings.public_urls)
        self._cookie = name_cookie(port, secure=self.settings.secure)
        self.live.start()
        self._spawn(self._look_after_sessions())
        return host, port

    async def open_socket(self, path: Path) -> None:
        """Listen for programs of the user who runs this, too, who need no login there."""
        limits = ConnectionLimits(body_bytes=_PASSED_BYTES, buffered_bytes=_HELD_BYTES)
        self._socket = HandlerServer(self.answer_owner, limits)
        await self._socket.start_on_socket(path)

    async def close(self) -> None:
        """Stop at once; keys that were made for sessions are revoked."""
        await self.live.close()
        await self.listener.close()
        if self._socket is not None:
            await self._socket.close()
        ending = (*self._tasks, self._api)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.gather(*map(self._forwarder.revoke, (*self.sessions, self._owner)))
        if self.services.planner is not None:
            await self.services.planner.close()

    # Requests

    def check_early(self, request: Request) -> None:
        """Refuse a request whose body is still to come: of another host or page, or of nobody."""
        request.extra = _PAGE
        self._hosts.check_host(request.headers)
        self._check_origin(request)
        if (
            not is_api(request.path)
            or request.path == _SESSION
            or self._find_session(request) is not None
        ):
            return
        # A key that is not known yet is asked about once the body is here: that must be a small one.
        if self._find_key(request) is None:
            raise ApiError(401, "nobody is logged in", kind="authentication_error", code="login")
        length = request.headers.get(b"content-length", b"")
        if not length.isdigit() or int(length) > _OWN_BYTES:
            raise ApiError(
                401,
                "a large body comes after a login: ask for /atoll/v1/session with this key first",
                kind="authentication_error",
                code="login",
            )

    async def answer_owner(self, request: Request) -> Answer:
        """Answer a request on the socket, which only the user who runs this can open: an admin's."""
        request.extra = _DATA
        path = request.path
        if path == b"/openapi.json":
            return await self._show_document(request)
        if path == _SESSION and request.method == b"GET":
            await self._refresh(self._owner)
            return _json(self._describe(request, self._owner))
        if is_api(path) and path != _SESSION:
            return await self._answer_for(request, self._owner)
        if (moved := _find_new_place(request)) is not None:
            return moved
        raise ApiError(404, f"there is nothing at {path.decode('latin-1')[:200]}", code="not_found")

    async def answer(self, request: Request) -> Answer:
        """Answer a request."""
        path = request.path
        request.extra = _DATA if is_api(path) else _PAGE
        if path == b"/healthz":
            # Asked by address, whatever name it has.
            return _json({"status": "ok", "version": __version__})
        self._hosts.check_host(request.headers)
        if path == b"/openapi.json":
            request.extra = _DATA
            return await self._show_document(request)
        if (moved := _find_new_place(request)) is not None:
            return moved
        self._check_origin(request)
        if path == _SESSION:
            return await self._answer_session(request)
        if is_api(path):
            return await self._answer_session_owner(request)
        if request.method not in READING:
            raise ApiError(405, "only looked at", allow="GET, HEAD")
        if path.startswith(_STATIC):
            return self._static.serve(path.removeprefix(_STATIC).decode("latin-1"), request.headers)
        if b"." in path:
            raise ApiError(404, "there is no such page", code="not_found")
        return self._static.serve_index(request.headers)

    def _check_origin(self, request: Request) -> None:
        """Refuse a change that a page of another origin asks for; programs with a key say of none."""
        headers = request.headers
        from_page = b"origin" in headers or b"sec-fetch-site" in headers
        if request.method not in READING and (from_page or self._find_key(request) is None):
            self._hosts.check_origin(headers)

    async def _show_document(self, request: Request) -> Answer:
        if request.method not in READING:
            raise ApiError(405, "only looked at", allow="GET, HEAD")
        return _json((await asyncio.shield(self._api)).document)

    async def _answer_session_owner(self, request: Request) -> Answer:
        key = self._find_key(request)
        if key is not None:
            session = await self._log_in_program(request, key)
            return await self._answer_for(request, session)
        found = self._find_session(request)
        if found is None:
            return self._refuse_login(request)
        if request.path != _LIVE and request.method not in READING:
            found.check_csrf(request.headers.get(b"x-csrf-token"))
        return await self._answer_for(request, found)

    def _find_key(self, request: Request) -> str | None:
        """Return the key that a program shows with a request; where a page's cookie is, that counts alone."""
        if read_cookie(request.headers, self._cookie) is not None:
            return None
        return read_bearer(request.headers)

    async def _log_in_program(self, request: Request, key: str) -> LoginSession:
        """Return the session of a program that shows a key with its request; it has no cookie."""
        known = self._find_session(request)
        if known is not None:
            return known
        client = self.settings.trust.client(request)
        session = await self._try_key(key, client)
        if session is None:
            _LOG.info("a program at %s showed a key that is not good", client)
            raise ApiError(
                401, "this key is not good", kind="authentication_error", code="invalid_api_key"
            )
        text, gone = self.sessions.add(session, self._clock())
        self._programs.keep(key, text)
        for each in gone:
            self._clean_up(each)
        return session

    async def _answer_for(self, request: Request, session: LoginSession) -> Answer:
        if request.path == _LIVE:
            if request.method != b"GET":
                raise ApiError(405, "only listened to", allow="GET")
            return EventStream(await self.live.tell(session))
        service: Service = "gateway"
        if request.path.startswith(API):
            service = (await asyncio.shield(self._api)).find_service(request.method, request.path)
        try:
            if service == "planner":
                await self._check_key(request, session)
            answer = await self._forwarder.forward(request, session, service)
        except SessionOverError:
            self._end_of_key(session)
            return self._refuse_login(request, _KEY_OVER, code="key_over")
        if request.path.startswith(_REPORTS):
            request.extra = _REPORT
        return answer

    async def _answer_session(self, request: Request) -> Answer:
        if request.method == b"GET":
            return await self._show_session(request)
        if request.method == b"POST":
            return await self._log_in(request)
        if request.method == b"DELETE":
            session = self._find_session(request)
            if session is not None:
                if self._find_key(request) is None:
                    session.check_csrf(request.headers.get(b"x-csrf-token"))
                session.over_because = "you are logged out"
                self._end(session)
            cookie = write_cookie(self._cookie, "", max_age_s=0, secure=self._is_secure(request))
            return Response(b"{}", headers=(_NO_STORE, cookie))
        raise ApiError(405, "not with this method", allow="GET, POST, DELETE")

    # Sessions

    async def _show_session(self, request: Request) -> Answer:
        key = self._find_key(request)
        session = (
            self._find_session(request) if key is None else await self._log_in_program(request, key)
        )
        if session is None:
            visitor = self.settings.trust.identify(request)
            if visitor is None:
                return self._describe_nobody(request)
            session = LoginSession("header", visitor.owner, visitor.role, visitor.owner)
            await self._refresh(session)
            _LOG.info("%s is logged in by the proxy, as %s", visitor.owner, visitor.role)
            return self._greet(request, session)
        if not await self._refresh(session):
            self._end_of_key(session)
            return self._describe_nobody(request, _KEY_OVER)
        return _json(self._describe(request, session))

    async def _log_in(self, request: Request) -> Answer:
        if (
            request.headers.get(b"content-type", b"").partition(b";")[0].strip()
            != b"application/json"
        ):
            raise ApiError(415, "JSON is needed, with content-type application/json")
        try:
            login = _LOGIN.decode(request.body)
        except msgspec.DecodeError as error:
            raise ApiError(400, 'write {"key": "..."} or {"token": "..."}') from error
        client = self.settings.trust.client(request)
        if login.token is not None:
            # Nobody guesses one, and whoever runs this must not be locked out by the guesses of others.
            session = self._use_link(login.token)
        else:
            session = await self._try_key(login.key or "", client)
        if session is None:
            _LOG.info("a login from %s failed", client)
            reason = (
                "the link was used before or is too old" if login.token else "this key is not good"
            )
            return self._refuse_login(request, reason, code="invalid_api_key")
        if session.kind == "link":
            await self._refresh(session)
        # Whoever was logged in here before is no more.
        if (before := self._find_session(request)) is not None:
            self._end(before)
        _LOG.info(
            "%s is logged in by %s from %s, as %s", session.name, session.kind, client, session.role
        )
        return self._greet(request, session)

    def _use_link(self, token: str) -> LoginSession | None:
        if not self.links.use(token):
            return None
        return LoginSession("link", "this machine", "admin")

    async def _try_key(self, key: str, client: str) -> LoginSession | None:
        """Return a session for a good key; an address is wrong only so often, also at the same time."""
        self.limiter.try_once(client, self._clock(), key)
        try:
            session = await self._use_key(key)
        except ApiError:
            self.limiter.note_success(client, self._clock())  # who knows
            raise
        if session is not None:
            self.limiter.note_success(client, self._clock(), key)
        return session

    async def _use_key(self, key: str) -> LoginSession | None:
        """Return a session for a key that the gateway knows, or None."""
        if (
            not key
            or len(key) > _MAX_KEY
            or not key.isascii()
            or not key.isprintable()
            or " " in key
        ):
            return None
        call = at_public_port(self.services.need_gateway(), key)
        async with reaching_gateway():
            answer = await call.ask("GET", f"{ADMIN_PATH}/me")
        if answer.status in (401, 403):
            return None
        if answer.status != 200:
            raise ApiError(
                502, f"the gateway answers with status {answer.status}", code="gateway_down"
            )
        session = LoginSession("key", "", "viewer", key=key)
        _note_asker(session, answer.body)
        return session

    async def _check_key(self, request: Request, session: LoginSession) -> None:
        """Find out what a key may do now, before the planner is asked: of keys only the gateway knows."""
        if session.kind != "key":
            return
        old_s = self._clock() - session.checked_s
        if (request.method not in READING or old_s > _KNOWN_S) and not await self._refresh(session):
            raise SessionOverError

    async def _refresh(self, session: LoginSession) -> bool:
        """Ask the gateway who somebody is; returns False where it knows the session's key no more."""
        gateway = self.services.gateway
        if gateway is None or (session.kind != "key" and not gateway.is_owned):
            return True
        try:
            call = self.services.call_gateway(session) if session.kind == "key" else own(gateway)
            answer = await call.ask("GET", f"{ADMIN_PATH}/me", timeout_s=_REFRESH_S)
        except (FetchError, ApiError):
            return True  # not there now; what is known of the session stays
        if answer.status == 200:
            _note_asker(session, answer.body)
            session.checked_s = self._clock()
        return answer.status != 401 or session.kind != "key"

    def _greet(self, request: Request, session: LoginSession) -> Response:
        """Answer with a new session and its cookie."""
        text, gone = self.sessions.add(session, self._clock())
        for each in gone:
            self._clean_up(each)
        cookie = write_cookie(
            self._cookie, text, max_age_s=int(ABSOLUTE_S), secure=self._is_secure(request)
        )
        return _json(self._describe(request, session), headers=(cookie,))

    def _describe(self, request: Request, session: LoginSession) -> ShownSession:
        gateway = self.services.gateway
        url = None if gateway is None else gateway.url
        return ShownSession(
            name=session.name,
            owner=session.owner,
            role=session.role,
            csrf=session.csrf,
            keys_needed=session.keys_needed,
            accounts=session.accounts,
            gateway=url,
            base_url=self.settings.base_url or _base_url(request, url),
            planner=self.services.planner is not None,
            version=__version__,
            login=session.kind,
        )

    def _refuse_login(
        self, request: Request, reason: str = "nobody is logged in", code: str = "login"
    ) -> Response:
        error = {"message": reason, "type": "authentication_error", "param": None, "code": code}
        body = {"error": error, "login": self._list_ways(), "fresh": self.services.gateway is None}
        return _json(body, 401, self._drop_cookie(request))

    def _describe_nobody(self, request: Request, message: str | None = None) -> Response:
        """Answer who is logged in: nobody, which is no error."""
        body = ShownSession(
            role=None,
            message=message,
            login=self._list_ways(),
            fresh=self.services.gateway is None,
        )
        return _json(body, headers=self._drop_cookie(request))

    def _list_ways(self) -> LoginWays:
        gateway = self.services.gateway
        return LoginWays(
            key=gateway is not None and gateway.url is not None,
            link=gateway is None or gateway.is_owned,
            header=self.settings.trust.header is not None,
        )

    def _drop_cookie(self, request: Request) -> tuple[tuple[str, str], ...]:
        """Return the header that takes a cookie away which stands for nobody."""
        if (
            read_cookie(request.headers, self._cookie) is None
            or self._find_session(request) is not None
        ):
            return ()
        return (write_cookie(self._cookie, "", max_age_s=0, secure=self._is_secure(request)),)

    def _find_session(self, request: Request) -> LoginSession | None:
        """Return the session of a request; one by the proxy's word lasts while the proxy says the same."""
        key = self._find_key(request)
        if key is not None:
            return self.sessions.find(self._programs.find(key), self._clock())
        session = self.sessions.find(read_cookie(request.headers, self._cookie), self._clock())
        if session is not None and session.kind == "header":
            visitor = self.settings.trust.identify(request)
            if visitor is None or visitor.owner != session.owner:
                return None
            session.role = visitor.role
        return session

    def _is_secure(self, request: Request) -> bool:
        return self.settings.secure or self.settings.trust.came_by_https(request)

    def _is_over(self, session: LoginSession) -> bool:
        return self.sessions.is_over(session, self._clock())

    def _end(self, session: LoginSession) -> None:
        self.sessions.end(session)
        self._clean_up(session)

    def _end_of_key(self, session: LoginSession) -> None:
        session.over_because = _KEY_OVER
        self._end(session)

    def _clean_up(self, session: LoginSession) -> None:
        self.live.wake(session)
        if session.made is not None:
            self._spawn(self._forwarder.revoke(session))

    async def _look_after_sessions(self) -> None:
        """End what is too old, and what has a key that was revoked while a page only listens."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for session in self.sessions.expire(self._clock()):
                self._clean_up(session)
            for session in self.sessions:
                if session.kind == "key" and session.pages and not await self._refresh(session):
                    self._end_of_key(session)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _note_asker(session: LoginSession, body: bytes) -> None:
    try:
        asker = _ASKER.decode(body)
    except msgspec.DecodeError as error:
        raise ApiError(502, "the gateway does not say who asks", code="gateway_down") from error
    session.keys_needed, session.accounts = asker.keys_needed, asker.accounts
    if session.kind == "key":
        session.name = asker.name or asker.id or "key"
        session.owner = asker.owner
        session.role = find_role(asker.role) or "viewer"


def _find_new_place(request: Request) -> Response | None:
    """Return where to ask for a path of before; None for what has not moved."""
    old = request.path
    new = _MOVED.get(old)
    if new is None and old.startswith(b"/api/"):
        service, _, rest = old.removeprefix(b"/api/").partition(b"/")
        new = {b"gateway": API, b"planner": API, b"v1": b"/v1/"}.get(service)
        new = None if new is None else new + rest
    if new is None:
        return None
    query = b"?" + request.query if request.query else b""
    return Response(b"", 308, headers=(_NO_STORE, ("location", (new + query).decode("latin-1"))))


def _base_url(request: Request, url: str | None) -> str | None:
    """Return where models are asked; a gateway on all addresses is at the one that the page came by."""
    if url is None:
        return None
    parts = urlsplit(url)
    if parts.hostname in ("0.0.0.0", "::"):
        asked = urlsplit("//" + request.headers.get(b"host", b"").decode("latin-1")).hostname
        host = f"[{asked}]" if ":" in (asked or "") else asked
        return f"{parts.scheme}://{host}:{parts.port}/v1"
    return f"{url.rstrip('/')}/v1"


def _json(body: object, status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    return Response(msgspec.json.encode(body), status, headers=(_NO_STORE, *headers))
