"""`atoll status`: how fleets stand: those brought up from here, and those that this machine serves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.console_client import (
    CONSOLE_HELP,
    CONSOLE_VARIABLE,
    ConsoleClient,
    fleet_path,
)
from atoll.cli.fleet_status import draw_fabric, draw_fleet_status, read_fabric
from atoll.cli.shared_options import AsJson
from atoll.control.operation.options import STATE_HELP
from atoll.core.errors import AtollError
from atoll.core.units import format_duration, format_elapsed
from atoll.engines.table import find_engine
from atoll.report.terminal import console, emit, table

if TYPE_CHECKING:
    from rich.console import Group

    from atoll.control.operation.fleet_status import FleetStatus
    from atoll.runtime.local.fleet_state import EndpointState, FleetState

app = typer.Typer(add_completion=False)
Live = dict[str, Any]
"""Reports of the gateway (under "gateway") and of each instance (by id) about themselves."""


@app.command()
def status(
    name: Annotated[
        str | None,
        typer.Argument(metavar="FLEET", help="Name or file of a fleet; none: all of them."),
    ] = None,
    state: Annotated[Path | None, typer.Option("--state", help=STATE_HELP)] = None,
    fabric: Annotated[
        str | None,
        typer.Option(
            "--fabric", help="Show the instances that this fabric knows: token, @FILE or open://..."
        ),
    ] = None,
    console_url: Annotated[
        str | None,
        typer.Option("--console", envvar=CONSOLE_VARIABLE, metavar="URL", help=CONSOLE_HELP),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show fleets that were brought up from here, on whatever target, and those that `atoll serve` runs.

    Of an operated fleet: instances, how and since when they stand, why, and what they cost; who operates it;
    what is wrong, in a line each. With --fabric, from anywhere: what members of the fabric carry as labels.
    """
    if fabric is not None:
        rows = read_fabric(fabric)
        rows = [row for row in rows if name is None or row["fleet"] == name]
        emit(rows, as_json, lambda: draw_fabric(rows))
        return
    now_s = time.time()
    served, operated = _ask_console(name, state, console_url)
    if as_json:
        emit([*served, *({"operated": each} for each in operated)], True)
        return
    for each in operated:
        emit(None, False, draw_fleet_status(_read_status(each), now_s))
    for one in served:
        emit(None, False, draw_fleet(_read_state(one["fleet"]), one["live"]))
    if not served and not operated:
        console().print(
            "no fleet is up here (`atoll up FLEET` brings one up, `atoll serve PLAN` serves a plan on this "
            "machine; `atoll nodes` shows a fabric)",
            soft_wrap=True,
        )


def _ask_console(
    name: str | None, state: Path | None, url: str | None
) -> tuple[list[Live], list[Live]]:
    """Return the fleets that are meant: the one that is named, up or not, else all that are up.

    Those that are served have their state (`fleet`) and what they say (`live`).
    """
    client = ConsoleClient.find_fleets(url, state)
    served: list[Live] = []
    operated: list[Live] = []
    for fleet in _list_names(client, name, state, url):
        said = client.ask("GET", fleet_path(fleet))
        if state is None:
            served += said["served"]
        if said["status"] is not None:
            operated.append(said["status"])
        elif errors := said.get("errors"):
            raise AtollError(errors[0])
    return served, operated


def _list_names(
    client: ConsoleClient, name: str | None, state: Path | None, url: str | None
) -> list[str]:
    if url is not None:
        if name is not None:
            return [name]
        fleets = client.ask("GET", "/atoll/v1/fleets")["fleets"]
        return [each["name"] for each in fleets if each.get("up")]
    from atoll.control.operation.fleet_home import find_home, list_homes
    from atoll.runtime.local.fleet_state import list_running_fleets

    served = [] if state is not None else [fleet.name for fleet in list_running_fleets()]
    if name is None and state is None:
        records = [home.read() for home in list_homes()]
        up = [record.name for record in records if record is not None and record.up]
        return list(dict.fromkeys((*up, *served)))
    if name in served:
        return [name]
    return [find_home(name, state)[1].name]


def _read_status(said: Live) -> FleetStatus:
    import msgspec

    from atoll.control.operation.fleet_status import FleetStatus

    return msgspec.convert(said, FleetStatus)


def _read_state(said: Live) -> FleetState:
    from atoll.runtime.local.fleet_state import FleetState

    return FleetState.parse(said)


def draw_fleet(fleet: FleetState, live: Live | None) -> Group:
    """Return a fleet as tables; without `live`, only what never changes."""
    from rich.console import Group
    from rich.text import Text

    known = live or {}
    backends = {b["id"]: b for b in known.get("gateway", {}).get("backends", ())}
    rows = []
    for endpoint in fleet.endpoints:
        backend = backends.get(endpoint.id)
        rows.append(
            (
                endpoint.service,
                endpoint.id,
                endpoint.kind,
                endpoint.url,
                len(endpoint.nodes),
                *(
                    ()
                    if live is None
                    else (
                        backend["state"] if backend else "no answer",
                        backend["inflight"] if backend else None,
                        backend["requests"] if backend else None,
                    )
                ),
            )
        )
    more = () if live is None else ("state", "running", "requests")
    up = "" if live is None else f", up {format_elapsed(time.time() - fleet.started_s)}"
    instances = table(
        ("model", "instance", "engine", "address", "nodes", *more),
        rows,
        title=f"{fleet.name} at {fleet.url} (process {fleet.pid}{up})",
        right=("nodes", "running", "requests"),
    )
    node_rows = [row for e in fleet.endpoints for row in _node_rows(e, known.get(e.id), live)]
    held = _holding(fleet)
    shown: tuple[str, ...] = ("node", "type", held)
    if live is not None:
        shown = (*shown, "state", "running", "waiting", "KV used", "tokens", "busy")
    stand_ins = sorted({f"{e.service} is {e.stand_in}" for e in fleet.endpoints if e.stand_in})
    return Group(
        *(Text(f"STAND-IN: {each}", style="bold red") for each in stand_ins),
        instances,
        table(
            shown, node_rows, right=("layers", "running", "waiting", "KV used", "tokens", "busy")
        ),
    )


def _holding(fleet: FleetState) -> str:
    """Return what the nodes of a fleet hold: layers, the parts of any-to-any models, or both."""
    kinds = {bool(node.holds) for endpoint in fleet.endpoints for node in endpoint.nodes}
    return {(True,): "parts", (False, True): "layers or parts"}.get(tuple(sorted(kinds)), "layers")


def _node_rows(
    endpoint: EndpointState, status: Live | None, live: Live | None
) -> list[tuple[object, ...]]:
    known = {node["name"]: node for node in (status or {}).get("nodes", ())}
    known |= {
        executor["id"]: {"alive": executor["connected"]}
        for executor in (status or {}).get("executors", ())
    }
    rows: list[tuple[object, ...]] = []
    for node in endpoint.nodes:
        held = node.holds or f"[{node.start}, {node.end})"
        row: tuple[object, ...] = (node.process, node.node_type, held)
        if live is not None:
            node_status = known.get(node.process)
            stats = (node_status or {}).get("stats") or {}
            state = "no answer" if find_engine(endpoint.kind).has_status else "-"
            if node_status is not None:
                state = "up" if node_status["alive"] else "silent"
            used = stats.get("blocks_used", 0) / max(1, stats.get("blocks", 1))
            row += (
                state,
                stats.get("running"),
                stats.get("waiting"),
                f"{used:.0%}" if stats else None,
                stats.get("tokens"),
                format_duration(stats["busy_s"]) if stats else None,
            )
        rows.append(row)
    return rows
