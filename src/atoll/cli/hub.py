"""`atoll hub`: the meeting point of a fabric."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atoll.cli.options import VerbSettings, verb
from atoll.core.errors import UsageError
from atoll.core.extras import require_extras
from atoll.core.options import option
from atoll.report.terminal import note

if TYPE_CHECKING:
    from atoll.fabric.transport.hub import Hub

app = typer.Typer(add_completion=False)


class HubSettings(VerbSettings):
    """Options of `atoll hub`."""

    fabric: str | None = option(
        None, "The hub's token: @hub-h0.token; default: $ATOLL_FABRIC.", argument=True, repr=False
    )
    listen: tuple[str, ...] = option((), "host:port; default: every address, the fabric's port.")
    is_open: bool = option(False, "No certificates: for one machine, to try things out.", "--open")
    peers: tuple[str, ...] = option((), "Address of another hub of an open fabric.", "--peer")
    insecure: bool = option(False, "Let an open fabric listen beyond loopback.")
    revoked: Path | None = option(None, "revoked.json to watch; default: the one beside the token.")
    log: Path | None = option(None, "Where to log, as JSON lines; default: stderr.")


@verb(app, HubSettings)
def hub(options: HubSettings) -> None:
    """Run a hub: the only process of a fabric that listens; everybody else dials out to it.

    One is enough to start; with two or more, any may die. Stops cleanly on SIGTERM and Ctrl-C.
    """
    require_extras("fabric")
    from atoll.fabric.identity.access import ENVIRONMENT
    from atoll.fabric.transport.hub import hub_options, serve
    from atoll.telemetry.logs import JsonLog

    token = options.fabric or os.environ.get(ENVIRONMENT)
    if options.is_open and options.fabric:
        raise UsageError(
            "an open fabric has no token", field="--open", hint="leave one of them out"
        )
    if not options.is_open and not token:
        raise UsageError(
            "which fabric?", hint="give the hub's token, or --open for one without certificates"
        )
    hub_settings = hub_options(
        None if options.is_open else token,
        listen=options.listen,
        insecure=options.insecure,
        revoked=options.revoked,
        peers=options.peers,
    )
    descriptor, log = 2, options.log
    if log is not None:
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UsageError(
                f"cannot write {log}: {error.strerror}", field="--log", hint="name another file"
            ) from error
    asyncio.run(serve(hub_settings, JsonLog(descriptor, service="hub"), _ready))


def _ready(running: Hub) -> None:
    where = ", ".join(running.options.listen)
    kind = "open, no certificates" if running.options.access.is_open else "TLS, certificates"
    typer.echo(f"hub {running.fabric.identity.name} listens at {where} ({kind}); Ctrl-C stops it")
    if running.options.revoked is not None:
        note(f"watching {running.options.revoked}")
