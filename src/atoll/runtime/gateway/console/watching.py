"""Requests of those who watch a gateway, and machines taken out of service."""

from __future__ import annotations

from typing import TypedDict

from atoll.core.roles import Role
from atoll.runtime.gateway.console.draining import DrainRequest, drain, take_back
from atoll.runtime.gateway.console.live_feed import LiveAnswer
from atoll.runtime.gateway.console.route import (
    NO_STORE,
    ConsoleCall,
    ConsoleRoute,
    show,
)
from atoll.runtime.gateway.console.shown_machines import ShownMachine
from atoll.runtime.gateway.console.snapshot import MachinesPage, ModelsPage, Snapshot
from atoll.runtime.http.api_route import EVENTS
from atoll.runtime.http.handlers import Response
from atoll.runtime.openai import ApiError


class ShownCaller(TypedDict):
    """Who asks, and whether the gateway has keys, and needs them for models."""

    id: str | None
    name: str
    owner: str
    role: Role
    keys_needed: bool
    accounts: bool


def show_snapshot(call: ConsoleCall) -> Response:
    """Return how the gateway stands."""
    return Response(call.context.snapshots.snapshot(), headers=NO_STORE)


def listen(call: ConsoleCall) -> LiveAnswer:
    """Return how the gateway stands now and from now on, for as long as the caller's key is good."""
    accounts, shown = call.context.accounts, call.request.headers.get(b"authorization")
    if accounts is None or call.caller.key_id is None:
        return LiveAnswer(call.context.live)

    def is_allowed() -> bool:
        try:
            return accounts.identify(shown) is not None
        except ApiError:
            return False

    return LiveAnswer(call.context.live, is_allowed, call.caller.key_id)


def show_models(call: ConsoleCall) -> Response:
    """Return models with who serves them."""
    return Response(call.context.snapshots.models(), headers=NO_STORE)


def show_machines(call: ConsoleCall) -> Response:
    """Return nodes and backends, and pipelines over them."""
    return Response(call.context.snapshots.machines(), headers=NO_STORE)


def drain_machine(call: ConsoleCall) -> Response:
    """Take a machine out of service."""
    machine = drain(call.context, call.name, call.request.body, call.caller.label)
    return show(machine)


def take_machine_back(call: ConsoleCall) -> Response:
    """Take a machine back into service."""
    machine = take_back(call.context, call.name, call.caller.label)
    return show(machine)


def show_me(call: ConsoleCall) -> Response:
    """Say who the caller is, and whether this gateway has keys: a page shows it after a login."""
    caller, accounts = call.caller, call.context.accounts
    return show(
        ShownCaller(
            id=caller.key_id,
            name=caller.name,
            owner=caller.owner,
            role=caller.role,
            keys_needed=accounts is not None and accounts.required,
            accounts=accounts is not None,
        )
    )


_DRAIN = "machines/{id:path}/drain"
ROUTES = (
    ConsoleRoute("GET", "me", "viewer", show_me, "Who asks", gives=ShownCaller),
    ConsoleRoute(
        *("GET", "snapshot", "viewer", show_snapshot, "How the gateway stands"), gives=Snapshot
    ),
    ConsoleRoute(
        *("GET", "live", "viewer", listen, "How the gateway stands, as events"), makes=(EVENTS,)
    ),
    ConsoleRoute(
        *("GET", "models", "viewer", show_models, "Models with who serves them"), gives=ModelsPage
    ),
    ConsoleRoute(
        *("GET", "machines", "viewer", show_machines, "Nodes, backends and pipelines over them"),
        gives=MachinesPage,
    ),
    ConsoleRoute(
        *("POST", _DRAIN, "operator", drain_machine, "Take a machine out of service"),
        takes=DrainRequest,
        gives=ShownMachine,
    ),
    ConsoleRoute(
        *("DELETE", _DRAIN, "operator", take_machine_back, "Take a machine back into service"),
        gives=ShownMachine,
    ),
)
