"""Who asks: what a page shows after a login."""

from __future__ import annotations

from atoll.runtime.gateway.console.route import ANY, ConsoleCall, ConsoleRoute, show
from atoll.runtime.http.handlers import Response


def show_me(call: ConsoleCall) -> Response:
    """Say who the caller is, and whether this gateway has keys."""
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


ROUTES = (ConsoleRoute("GET", "me", ANY, "Who asks", show_me),)
