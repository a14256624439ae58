"""Everything the gateway answers by itself: models, health, its own description; metrics and its backends.

The last two are for those who run it: on the public port they ask for the admin token, and without one
they are not there at all (`admin` has other places for them).
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Sized
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

import msgspec

from atoll.core.errors import AtollError
from atoll.runtime.gateway.chooser import BackendChooser
from atoll.runtime.gateway.dialects import shown_key
from atoll.runtime.gateway.dialects.messages import models
from atoll.runtime.gateway.metrics import GatewayMetrics
from atoll.runtime.gateway.openapi import document
from atoll.runtime.gateway.permitted import PermittedModels
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.gateway.traffic import TrafficTally
from atoll.runtime.http.server import Connection, Request
from atoll.runtime.openai import FORMS, REQUESTS, ApiError
from atoll.runtime.pool.member import ConfiguredBackend
from atoll.runtime.pool.pool import BackendPool
from atoll.runtime.pool.routes import MOST_BYTES, RoutesTold
from atoll.telemetry.logs import Log
from atoll.telemetry.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Accounts

_ADMIN = "/atoll/v1/"
_METRICS = "/metrics"
_PRIVATE = (_ADMIN.encode(), _METRICS.encode())
_PAGES = ("/health", "/ready", _METRICS, "/openapi.json", "/v1/models")


class FabricView(Protocol):
    """A fabric, for people."""

    def snapshot(self) -> dict[str, object]:
        """Return the nodes as this gateway sees them."""
        ...


class PagesContext(Protocol):
    """What the pages show of a gateway."""

    pool: BackendPool
    settings: GatewaySettings
    chooser: BackendChooser
    metrics: GatewayMetrics
    traffic: TrafficTally
    log: Log
    loop: asyncio.AbstractEventLoop
    accounts: Accounts | None
    draining: bool
    started_s: float

    @property
    def relays(self) -> Sized:
        """Requests that run."""
        ...

    @property
    def connections(self) -> Sized:
        """Connections of clients."""
        ...

    @property
    def federation(self) -> FabricView | None:
        """The fabric, if there is one."""
        ...


class Pages:
    """The gateway's own pages."""

    def __init__(self, context: PagesContext) -> None:
        self._context = context
        self._permitted = PermittedModels(context.pool, context.chooser)

    def answer(self, connection: Connection, request: Request) -> None:
        """Answer what came on the public port and needs no backend."""
        path = _path(request)
        if is_private(request.path):
            self.authorize(request)
        self._answer(connection, request, path)

    def answer_admin(self, connection: Connection, request: Request) -> None:
        """Answer what came on the admin socket, which only those who may ask can open."""
        self._answer(connection, request, _path(request))

    def answer_metrics(self, connection: Connection, request: Request) -> None:
        """Answer what came on the port for Prometheus."""
        path = _path(request)
        if path not in (_METRICS, "/health", "/ready"):
            raise _nothing_at(path)
        self._answer(connection, request, path)

    def authorize(self, request: Request) -> None:
        """Refuse whoever asks on the public port for what is not public, unless with the admin token."""
        token = self._context.settings.admin_token
        if token is None:
            raise ApiError(
                403,
                "this is not served here: ask on the admin socket, or set admin_token",
                kind="permission_error",
            )
        authorization = request.headers.get(b"authorization", b"")
        if not hmac.compare_digest(authorization, b"Bearer " + token.encode()):
            raise ApiError(401, "a valid admin token is needed", kind="authentication_error")

    def _answer(self, connection: Connection, request: Request, path: str) -> None:
        if path.startswith(_ADMIN):
            self._administer(connection, request, path)
        elif path in REQUESTS or path in FORMS:
            raise _not_allowed(request, "POST")
        elif path not in _PAGES and not path.startswith("/v1/models/"):
            raise _nothing_at(path)
        elif request.method not in (b"GET", b"HEAD"):
            raise _not_allowed(request, "GET, HEAD")
        else:
            self._show(connection, request, path)

    def _show(self, connection: Connection, request: Request, path: str) -> None:
        context = self._context
        if path == "/health":
            # Of the gateway itself, whatever its backends do: whoever starts it anew goes by this.
            up = sum(m.state == "up" for m in context.pool.members.values())
            state = "draining" if context.draining else "ok"
            _respond(
                connection,
                503 if context.draining else 200,
                {"status": state, "backends_up": up},
            )
        elif path == "/ready":
            self._show_ready(connection, request)
        elif path == _METRICS:
            page = context.metrics.page(len(context.relays), len(context.connections))
            connection.respond(200, page, CONTENT_TYPE.encode())
        elif path == "/openapi.json":
            _respond(connection, 200, document())
        else:
            self._show_models(connection, request, path)

    def _show_ready(self, connection: Connection, request: Request) -> None:
        """Answer whether every model has a backend; with keys, strangers are not told of which."""
        context = self._context
        missing = context.pool.unserved()
        ready = bool(context.pool.rings) and not missing and not context.draining
        page: dict[str, object] = {"status": "ready" if ready else "not ready"}
        if not ready:
            page["reason"] = (
                "draining"
                if context.draining
                else "these models have no backend that is up"
                if missing
                else "there is no backend"
            )
            page["without_backend"] = missing
            if context.accounts is not None and missing:
                try:
                    context.accounts.authenticate(request.headers.get(b"authorization"))
                except ApiError:
                    page["without_backend"] = len(missing)
        _respond(connection, 200 if ready else 503, page)

    def _show_models(self, connection: Connection, request: Request, path: str) -> None:
        """Answer what there is to ask for; with keys, what the caller's may use."""
        context = self._context
        names = context.chooser.names(hidden=path != "/v1/models")
        if context.accounts is not None:
            grant = context.accounts.authenticate(shown_key(request.path, request.headers))
            visible = context.accounts.visible_models(grant, names)
            names = self._permitted.choose(grant.policy, visible)
        anthropic = models.is_asked(request.headers)
        if path == "/v1/models" and anthropic:
            _respond(connection, 200, models.listing(names, context.started_s))
        elif path == "/v1/models":
            data = [self._describe_model(name) for name in names]
            _respond(connection, 200, {"object": "list", "data": data})
        elif (name := unquote(path.removeprefix("/v1/models/"))) in names and anthropic:
            _respond(connection, 200, models.describe(name, context.started_s))
        elif name in names:
            _respond(connection, 200, self._describe_model(name))
        else:
            raise ApiError(404, f"The model {name[:200]!r} does not exist", code="model_not_found")

    def _describe_model(self, name: str) -> dict[str, object]:
        ring = self._context.pool.rings.get(name)
        # Who stands before this gateway may move streams as Atoll's instances do, if all behind it are.
        by_atoll = ring is not None and all(m.backend.kind == "atoll" for m in ring.members)
        return {
            "id": name,
            "object": "model",
            "created": int(self._context.started_s),
            "owned_by": "atoll" if by_atoll else "atoll-gateway",
        }

    # Administration

    def _administer(self, connection: Connection, request: Request, path: str) -> None:
        what, _, name = path.removeprefix(_ADMIN).partition("/")
        method = request.method.decode()
        if what == "status" and not name:
            if method != "GET":
                raise _not_allowed(request, "GET")
            _respond(connection, 200, self.status())
        elif what == "fabric" and not name and self._context.federation is not None:
            if method != "GET":
                raise _not_allowed(request, "GET")
            _respond(connection, 200, self._context.federation.snapshot())
        elif what == "traffic" and not name:
            if method != "GET":
                raise _not_allowed(request, "GET")
            page = self._context.traffic.page(self._context.loop.time())
            connection.respond(200, page.to_json().encode())
        elif what == "routes" and not name:
            self._change_routes(connection, request, method)
        elif what == "backends":
            self._change_backends(connection, request, method, name)
        else:
            raise _nothing_at(path)

    def status(self) -> dict[str, object]:
        """Return the state of the gateway, for people and for `atoll status`."""
        context = self._context
        return {
            "status": "draining" if context.draining else "serving",
            "uptime_s": round(time.time() - context.started_s, 3),
            "running": len(context.relays),
            "connections": len(context.connections),
            "models": context.pool.models,
            "backends": context.pool.snapshot(),
        }

    def _change_routes(self, connection: Connection, request: Request, method: str) -> None:
        """Take weights and promises of a controller, or show those it told."""
        context = self._context
        if method == "PUT":
            if len(request.body) > MOST_BYTES:
                raise ApiError(413, f"routes take at most {MOST_BYTES} bytes")
            try:
                routes = RoutesTold.from_json(request.body)
            except AtollError as error:
                raise ApiError(400, str(error), param=error.field) from None
            context.pool.route(routes)
            context.chooser.choices.tell(routes.choices)
            context.traffic.promise(routes, context.loop.time())
            instances = {name for told in routes.models.values() for name in told.weights}
            context.log.event(
                "routes.told",
                fleet=routes.fleet,
                models=len(routes.models),
                instances=len(instances),
            )
        elif method != "GET":
            raise _not_allowed(request, "GET, PUT")
        told = context.pool.routes
        shown = {"fleet": "", "models": {}} if told is None else told.model_dump(mode="json")
        hashed = None if told is None else told.content_hash()
        _respond(connection, 200, shown | {"hash": hashed})

    def _change_backends(
        self, connection: Connection, request: Request, method: str, name: str
    ) -> None:
        pool = self._context.pool
        if method == "GET" and not name:
            _respond(connection, 200, {"backends": pool.snapshot()})
        elif method == "DELETE" and name:
            if name not in pool.members:
                raise ApiError(404, f"there is no backend {name[:200]!r}", code="not_found")
            pool.remove(name)
            _respond(connection, 200, {"backends": pool.snapshot()})
        elif method in ("POST", "PUT") and not name:
            try:
                backend = ConfiguredBackend.from_json(request.body)
                if backend.id in pool.members:
                    pool.update(backend)
                else:
                    pool.add(backend)
            except AtollError as error:
                raise ApiError(400, str(error), param=error.field) from None
            _respond(connection, 200, {"backends": pool.snapshot()})
        else:
            raise _not_allowed(request, "DELETE" if name else "GET, POST")


def is_private(path: bytes) -> bool:
    """Whether what is asked for is for those who run the gateway only."""
    return path.startswith(_PRIVATE)


def _path(request: Request) -> str:
    try:
        return request.path.decode("ascii")
    except UnicodeDecodeError:
        raise ApiError(404, "there is nothing here") from None


def _nothing_at(path: str) -> ApiError:
    return ApiError(404, f"there is nothing at {path[:200]}", code="not_found")


def _not_allowed(request: Request, allowed: str) -> ApiError:
    method = request.method.decode(errors="replace")
    return ApiError(
        405,
        f"{method} is not allowed here; use {allowed}",
        code="method_not_allowed",
        allow=allowed,
    )


def _respond(connection: Connection, status: int, data: Any) -> None:
    connection.respond(status, msgspec.json.encode(data))
