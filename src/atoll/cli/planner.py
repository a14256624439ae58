"""`atoll planner`: the planning service over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atoll.cli.options import VerbSettings, json_field, verb
from atoll.core.errors import InputError, UsageError
from atoll.core.extras import require_extras
from atoll.core.options import option
from atoll.report.terminal import console, note

if TYPE_CHECKING:
    from atoll.planner.planner_server import PlannerAddress

app = typer.Typer(add_completion=False)


class PlannerSettings(VerbSettings):
    """Options of `atoll planner`."""

    fleets: tuple[Path, ...] = option(
        (), "A fleet file that can be asked about; repeatable.", "--fleet", metavar="FILE"
    )
    states: tuple[Path, ...] = option(
        (),
        "The folder of a fleet that is operated with --state; repeatable.",
        "--state",
        metavar="DIR",
    )
    socket: Path | None = option(
        None, "Unix socket to listen on; default: one in the runtime folder."
    )
    port: int | None = option(
        None, "Port of this machine instead, with a token; 0: any.", ge=0, le=65535
    )
    token: str | None = option(
        None,
        "The token of the port, $ATOLL_DESK_TOKEN; default: a new one, printed.",
        env="ATOLL_DESK_TOKEN",
        min_length=16,
        max_length=200,
        pattern=r"^[!-~]+$",
        repr=False,
    )
    with_parent: bool = option(False, "End when its input ends: with the process that started it.")
    as_json: bool = json_field("Print where it listens as JSON.")


@verb(app, PlannerSettings)
def planner(options: PlannerSettings) -> None:
    """Answer what pages and programs ask about plans: fleets, history, what-if, traces, simulations.

    Fleets are those that are operated from here, examples, and files that are named. It answers on a Unix
    socket that only you can open, or on a port of this machine to whoever shows its token.
    """
    require_extras("serve")
    if options.port is not None and options.socket is not None:
        raise UsageError("a socket or a port, not both", field="--port", hint="leave out one")
    for path in options.fleets:
        if not path.is_file():
            raise InputError("there is no such file", path=path, hint="name a fleet file")
    from atoll.planner.planner_server import PlannerOptions, serve
    from atoll.runtime.http.program import run

    asked = PlannerOptions(
        options.fleets, options.states, options.socket, options.port, options.token
    )
    if options.with_parent:
        threading.Thread(target=_end_with_input, daemon=True).start()
    run(serve(asked, lambda address: _ready(address, as_json=options.as_json)))
    if not options.with_parent:
        note("stopped")


def _end_with_input() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _ready(address: PlannerAddress, *, as_json: bool) -> None:
    if as_json:
        said = {"socket": address.socket, "url": address.url, "token": address.token}
        sys.stdout.write(json.dumps(said) + "\n")
    elif address.socket is not None:
        console().print(f"answers at {address.socket} until Ctrl-C", soft_wrap=True)
        example = f"curl --unix-socket {address.socket} http://planner/atoll/v1/fleets"
        console().print(f"\n  {example}\n", soft_wrap=True)
    else:
        console().print(f"answers at {address.url} until Ctrl-C", soft_wrap=True)
        example = f"curl -H 'authorization: Bearer {address.token}' {address.url}/atoll/v1/fleets"
        console().print(f"\n  {example}\n", soft_wrap=True)
    sys.stdout.flush()
