"""Everything the gateway answers by itself: models, health, metrics, its own description, its backends."""

from __future__ import annotations

import hmac
import ipaddress
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

from atoll.core.errors import AtollError
from atoll.runtime.gateway.openapi import document
from atoll.runtime.http.server import Connection, Request
from atoll.runtime.openai import REQUESTS, ApiError
from atoll.runtime.pool.pool import Backend
from atoll.telemetry.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from atoll.runtime.gateway.app import Gateway

_ADMIN = "/atoll/v1/"
_FORWARDED = frozenset(
    {b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"}
)
_PAGES = ("/health", "/metrics", "/openapi.json", "/v1/models")


class Pages:
    """The gateway's own pages."""

    def __init__(self, app: Gateway) -> None:
        self._app = app

    def handle(self, connection: Connection, request: Request) -> None:
        """Answer a request that no backend is needed for."""
        try:
            path = request.path.decode("ascii")
        except UnicodeDecodeError:
            raise ApiError(404, "there is nothing here") from None
        if path.startswith(_ADMIN):
            self._admin(connection, request, path)
            return
        if path in REQUESTS:
            raise _not_allowed(request, "POST")
        if path not in _PAGES and not path.startswith("/v1/models/"):
            raise ApiError(404, f"there is nothing at {path[:200]}", code="not_found")
        if request.method not in (b"GET", b"HEAD"):
            raise _not_allowed(request, "GET, HEAD")
        self._page(connection, request, path)

    def _page(self, connection: Connection, request: Request, path: str) -> None:
        app = self._app
        if path == "/health":
            up = sum(m.state == "up" for m in app.pool.members.values())
            status = 200 if up and not app.draining else 503
            state = "draining" if app.draining else "ok" if up else "no backend is up"
            _answer(connection, status, {"status": state, "backends_up": up})
        elif path == "/metrics":
            page = app.metrics.page(len(app.relays), len(app.connections))
            connection.respond(200, page, CONTENT_TYPE.encode())
        elif path == "/openapi.json":
            _answer(connection, 200, document())
        else:
            self._models(connection, request, path)

    def _models(self, connection: Connection, request: Request, path: str) -> None:
        """Answer what there is to ask for; with keys, what the caller's may use."""
        app = self._app
        names = app.chooser.names()
        if app.accounts is not None:
            grant = app.accounts.authenticate(request.headers.get(b"authorization"))
            names = list(app.accounts.visible_models(grant, names))
        if path == "/v1/models":
            data = [self._model(name) for name in names]
            _answer(connection, 200, {"object": "list", "data": data})
            return
        name = unquote(path.removeprefix("/v1/models/"))
        if name not in names:
            raise ApiError(404, f"The model {name[:200]!r} does not exist", code="model_not_found")
        _answer(connection, 200, self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        ring = self._app.pool.rings.get(name)
        # Who stands before this gateway may move streams as Atoll's instances do, if all behind it are.
        own = ring is not None and all(m.backend.kind == "atoll" for m in ring.members)
        return {
            "id": name,
            "object": "model",
            "created": int(self._app.started_s),
            "owned_by": "atoll" if own else "atoll-gateway",
        }

    # Administration

    def _admin(self, connection: Connection, request: Request, path: str) -> None:
        self._authorize(connection, request)
        what, _, name = path.removeprefix(_ADMIN).partition("/")
        method = request.method.decode()
        if what == "status" and not name:
            if method != "GET":
                raise _not_allowed(request, "GET")
            _answer(connection, 200, self.status())
        elif what == "fabric" and not name and self._app.federation is not None:
            if method != "GET":
                raise _not_allowed(request, "GET")
            _answer(connection, 200, self._app.federation.snapshot())
        elif what == "backends":
            self._backends(connection, request, method, name)
        else:
            raise ApiError(404, f"there is nothing at {path[:200]}", code="not_found")

    def _authorize(self, connection: Connection, request: Request) -> None:
        token = self._app.settings.admin_token
        if token is not None:
            given = request.headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + token.encode()):
                raise ApiError(401, "a valid admin token is needed", kind="authentication_error")
        elif not _is_local(connection) or not _asked_locally(request):
            raise ApiError(
                403,
                "without an admin token only this machine may ask",
                kind="permission_error",
            )

    def status(self) -> dict[str, object]:
        """Return the state of the gateway, for people and for `atoll status`."""
        app = self._app
        return {
            "status": "draining" if app.draining else "serving",
            "uptime_s": round(time.time() - app.started_s, 3),
            "running": len(app.relays),
            "connections": len(app.connections),
            "models": app.pool.models,
            "backends": app.pool.snapshot(),
        }

    def _backends(self, connection: Connection, request: Request, method: str, name: str) -> None:
        pool = self._app.pool
        if method == "GET" and not name:
            _answer(connection, 200, {"backends": pool.snapshot()})
        elif method == "DELETE" and name:
            if name not in pool.members:
                raise ApiError(404, f"there is no backend {name[:200]!r}", code="not_found")
            pool.remove(name)
            _answer(connection, 200, {"backends": pool.snapshot()})
        elif method in ("POST", "PUT") and not name:
            try:
                backend = Backend.from_json(request.body)
            except AtollError as error:
                raise ApiError(400, str(error), param=error.field) from None
            if backend.id in pool.members:
                pool.update(backend)
            else:
                pool.add(backend)
            _answer(connection, 200, {"backends": pool.snapshot()})
        else:
            raise _not_allowed(request, "DELETE" if name else "GET, POST")


def _is_local(connection: Connection) -> bool:
    peer = connection.transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return True
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _asked_locally(request: Request) -> bool:
    """Return whether neither a proxy nor a web page on this machine can be behind a request.

    Pages cannot send JSON elsewhere without being allowed to, and a page whose name was made to point
    here gives itself away by that name.
    """
    if not _FORWARDED.isdisjoint(request.headers):
        # A proxy on this machine asks for somebody elsewhere.
        return False
    kind = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if request.body and kind != b"application/json":
        return False
    host = request.headers.get(b"host", b"").decode("latin-1")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return b"origin" not in request.headers


def _not_allowed(request: Request, allowed: str) -> ApiError:
    method = request.method.decode(errors="replace")
    return ApiError(
        405,
        f"{method} is not allowed here; use {allowed}",
        code="method_not_allowed",
        allow=allowed,
    )


def _answer(connection: Connection, status: int, data: Any) -> None:
    connection.respond(status, msgspec.json.encode(data))
