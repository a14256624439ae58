"""`atoll hub`: the meeting point of a fabric."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.serving import need_fabric
from atoll.core.errors import UsageError
from atoll.report.terminal import note

if TYPE_CHECKING:
    from atoll.fabric.transport.hub import Hub

app = typer.Typer(add_completion=False)


@app.command()
def hub(
    fabric: Annotated[
        str | None,
        typer.Argument(help="The hub's token: @hub-h0.token; default: $ATOLL_FABRIC."),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option("--listen", help="host:port; default: every address, the fabric's port."),
    ] = None,
    open_fabric: Annotated[
        bool, typer.Option("--open", help="No certificates: for one machine, to try things out.")
    ] = False,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", help="Address of another hub of an open fabric."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let an open fabric listen beyond loopback.")
    ] = False,
    revoked: Annotated[
        Path | None,
        typer.Option("--revoked", help="revoked.json to watch; default: the one beside the token."),
    ] = None,
    log: Annotated[
        Path | None, typer.Option("--log", help="Where to log, as JSON lines; default: stderr.")
    ] = None,
) -> None:
    """Run a hub: the only process of a fabric that listens; everybody else dials out to it.

    One is enough to start; with two or more, any may die. Stops cleanly on SIGTERM and Ctrl-C.
    """
    need_fabric()
    from atoll.fabric.identity.access import ENVIRONMENT
    from atoll.fabric.transport.hub import hub_options, serve
    from atoll.telemetry.logs import JsonLog

    token = fabric or os.environ.get(ENVIRONMENT)
    if open_fabric and fabric:
        raise UsageError(
            "an open fabric has no token", field="--open", hint="leave one of them out"
        )
    if not open_fabric and not token:
        raise UsageError(
            "which fabric?", hint="give the hub's token, or --open for one without certificates"
        )
    options = hub_options(
        None if open_fabric else token,
        listen=listen or (),
        insecure=insecure,
        revoked=revoked,
        peers=peer or (),
    )
    descriptor = 2
    if log is not None:
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UsageError(f"cannot write {log}: {error.strerror}", field="--log") from error
    asyncio.run(serve(options, JsonLog(descriptor, service="hub"), _ready))


def _ready(running: Hub) -> None:
    where = ", ".join(running.options.listen)
    kind = "open, no certificates" if running.options.access.is_open else "TLS, certificates"
    typer.echo(f"hub {running.fabric.identity.name} listens at {where} ({kind}); Ctrl-C stops it")
    if running.options.revoked is not None:
        note(f"watching {running.options.revoked}")
