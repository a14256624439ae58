"""API keys over HTTP."""

from __future__ import annotations

from atoll.runtime.gateway.console.route import ConsoleRoute

ROUTES: tuple[ConsoleRoute, ...] = ()
