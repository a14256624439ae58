"""Requests of those who watch a gateway, and machines taken out of service."""

from __future__ import annotations

import msgspec

from atoll.runtime.gateway.console.draining import drain, take_back
from atoll.runtime.gateway.console.live_feed import LiveAnswer
from atoll.runtime.gateway.console.route import (
    ANY,
    NO_STORE,
    OPERATORS,
    ConsoleCall,
    ConsoleRoute,
    show,
)
from atoll.runtime.http.handlers import Response
from atoll.runtime.openai import ApiError


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
    return show(msgspec.to_builtins(machine))


def take_machine_back(call: ConsoleCall) -> Response:
    """Take a machine back into service."""
    machine = take_back(call.context, call.name, call.caller.label)
    return show(msgspec.to_builtins(machine))


def show_me(call: ConsoleCall) -> Response:
    """Say who the caller is, and whether this gateway has keys: a page shows it after a login."""
    caller, accounts = call.caller, call.context.accounts
    return show(
        {
            "id": caller.key_id,
            "name": caller.name,
            "owner": caller.owner,
            "role": caller.role,
            "keys_needed": accounts is not None and accounts.required,
            "accounts": accounts is not None,
        }
    )


_DRAIN = "machines/{id}/drain"
ROUTES = (
    ConsoleRoute("GET", "me", ANY, "Who asks", show_me),
    ConsoleRoute("GET", "snapshot", ANY, "How the gateway stands", show_snapshot),
    ConsoleRoute(
        *("GET", "live", ANY, "How the gateway stands, as events", listen),
        makes=("text/event-stream",),
    ),
    ConsoleRoute("GET", "models", ANY, "Models with who serves them", show_models),
    ConsoleRoute("GET", "machines", ANY, "Nodes, backends and pipelines over them", show_machines),
    ConsoleRoute("POST", _DRAIN, OPERATORS, "Take a machine out of service", drain_machine),
    ConsoleRoute(
        "DELETE", _DRAIN, OPERATORS, "Take a machine back into service", take_machine_back
    ),
)
