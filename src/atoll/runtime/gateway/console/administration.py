"""For those who run the gateway: how it stands, its backends, and what a controller tells and asks."""

from __future__ import annotations

import time
from typing import Literal, TypedDict

from atoll.core.errors import AtollError
from atoll.runtime.federation.fabric_view import FabricView
from atoll.runtime.gateway.console.route import ConsoleCall, ConsoleRoute, show
from atoll.runtime.http.api_route import nothing_at
from atoll.runtime.http.handlers import Response
from atoll.runtime.openai import ApiError
from atoll.runtime.pool.backend_state import BackendState
from atoll.runtime.pool.member import ConfiguredBackend
from atoll.runtime.pool.routes import MAX_BYTES, RoutesTold
from atoll.telemetry.traffic_page import TrafficPage


class BackendList(TypedDict):
    """All backends of the gateway, each as it stands."""

    backends: list[BackendState]


class ShownRoutes(RoutesTold):
    """Weights and promises that a controller told, and what tells them from others (null: none were told)."""

    hash: str | None = None


class GatewayStatus(BackendList):
    """State of the gateway: requests that run, and its backends."""

    status: Literal["draining", "serving"]
    uptime_s: float
    running: int
    connections: int
    models: list[str]


def show_status(call: ConsoleCall) -> Response:
    """Return the state of the gateway, for people and for `atoll status`."""
    context = call.context
    return show(
        GatewayStatus(
            status="draining" if context.draining else "serving",
            uptime_s=round(time.time() - context.started_s, 3),
            running=len(context.relays),
            connections=len(context.connections),
            models=context.pool.models,
            backends=context.pool.snapshot(),
        )
    )


def show_fabric(call: ConsoleCall) -> Response:
    """Return the nodes of the fabric, where there is one."""
    if call.context.federation is None:
        raise nothing_at(call.request.path.decode())
    return show(call.context.federation.snapshot())


def show_traffic(call: ConsoleCall) -> Response:
    """Return what is asked and kept, for a controller."""
    page = call.context.traffic.page(call.context.loop.time())
    return Response(page.to_json().encode())


def show_routes(call: ConsoleCall) -> Response:
    """Return the weights and promises that a controller told."""
    told = call.context.pool.routes
    shown = {"fleet": "", "models": {}} if told is None else told.model_dump(mode="json")
    return show(shown | {"hash": None if told is None else told.content_hash()})


def take_routes(call: ConsoleCall) -> Response:
    """Take weights and promises of a controller."""
    context, body = call.context, call.request.body
    if len(body) > MAX_BYTES:
        raise ApiError(413, f"routes take at most {MAX_BYTES} bytes")
    try:
        routes = RoutesTold.from_json(body)
    except AtollError as error:
        raise ApiError(400, str(error), param=error.field) from None
    context.pool.route(routes)
    context.chooser.tell(routes)
    context.traffic.promise(routes, context.loop.time())
    instances = {name for told in routes.models.values() for name in told.weights}
    context.log.event(
        "routes.told",
        fleet=routes.fleet,
        models=len(routes.models),
        instances=len(instances),
    )
    return show_routes(call)


def show_backends(call: ConsoleCall) -> Response:
    """Return all backends."""
    return show(BackendList(backends=call.context.pool.snapshot()))


def take_backend(call: ConsoleCall) -> Response:
    """Add a backend, or change one with an id that is there."""
    pool = call.context.pool
    try:
        backend = ConfiguredBackend.from_json(call.request.body)
        if backend.id in pool.members:
            pool.update(backend)
        else:
            pool.add(backend)
    except AtollError as error:
        raise ApiError(400, str(error), param=error.field) from None
    return show_backends(call)


def remove_backend(call: ConsoleCall) -> Response:
    """Remove a backend; what runs there may finish there."""
    pool, name = call.context.pool, call.name
    if name not in pool.members:
        raise ApiError(404, f"there is no backend {name[:200]!r}", code="not_found")
    pool.remove(name)
    return show_backends(call)


ROUTES = (
    ConsoleRoute(
        *("GET", "status", "admin", show_status, "Backends, what runs, uptime"), gives=GatewayStatus
    ),
    ConsoleRoute(
        *("GET", "fabric", "admin", show_fabric, "Nodes and hubs of the fabric"), gives=FabricView
    ),
    ConsoleRoute(
        *("GET", "traffic", "admin", show_traffic, "What is asked and kept"), gives=TrafficPage
    ),
    ConsoleRoute(
        *("GET", "routes", "admin", show_routes, "What a controller told"), gives=ShownRoutes
    ),
    ConsoleRoute(
        *("PUT", "routes", "admin", take_routes, "Tell weights and promises"),
        takes=RoutesTold,
        gives=ShownRoutes,
    ),
    ConsoleRoute("GET", "backends", "admin", show_backends, "List backends", gives=BackendList),
    *(
        ConsoleRoute(
            *(method, "backends", "admin", take_backend, "Add or change a backend"),
            takes=ConfiguredBackend,
            gives=BackendList,
        )
        for method in ("POST", "PUT")
    ),
    ConsoleRoute(
        *("DELETE", "backends/{id:path}", "admin", remove_backend, "Remove a backend"),
        gives=BackendList,
    ),
)
