"""How operated fleets stand, drawn for `atoll status`, and what a fabric knows of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from atoll.core.errors import AtollError
from atoll.core.units import format_elapsed, format_price
from atoll.report.terminal import table

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from atoll.control.operation.fleet_status import FleetStatus, InstanceRow, ServiceRow


def draw_fleet_status(fleet: FleetStatus, now_s: float) -> Group:
    """Return an operated fleet as lines and a table."""
    from rich.console import Group
    from rich.text import Text

    ready = sum(row.state == "ready" for row in fleet.instances)
    present = sum(row.state != "gone" for row in fleet.instances)
    unknown = sum(row.state == "unknown" for row in fleet.instances)
    known = f"{ready} of {present} ready" if present or not fleet.silent else "nothing is known"
    if unknown:
        known = f"{ready} of {present - unknown} ready, {unknown} unknown"
    where = f" at {fleet.url}/v1" if fleet.url and fleet.up else ""
    head = (
        f"{fleet.fleet}{where}: {known} on "
        f"{', '.join(fleet.targets)}, {format_price(fleet.usd_per_hour)}, up "
        f"{format_elapsed(now_s - fleet.since_s)}"
        if fleet.up
        else f"{fleet.fleet}: down (`atoll up {fleet.source}`)"
    )
    who = fleet.controller or f"nobody operates it (`atoll operate {fleet.fleet}`)"
    if fleet.operated is None:
        who = "who operates it is not known"
    rows = [
        (
            row.instance,
            row.service,
            row.target,
            row.state,
            format_elapsed(now_s - row.since_s),
            None if row.usd_per_hour is None else format_price(row.usd_per_hour),
            ",".join(row.hosts) or None,
            _say_end(row, now_s) + row.reason,
        )
        for row in fleet.instances
    ]
    columns = ("instance", "model", "target", "state", "for", "cost", "where", "why")
    running = [] if fleet.gateway is None else [_describe_gateway(fleet.gateway, fleet.traffic)]
    return Group(
        Text(head),
        *([Text(f"operated by {who}" if fleet.controller else who)] if fleet.up else []),
        *(Text(line) for line in running),
        *(Text(f"STAND-IN: {each}", style="bold red") for each in fleet.stand_ins if fleet.up),
        *(Text(f"! {line}", style="red") for line in fleet.errors),
        *([table(columns, rows, right=("cost",))] if rows else []),
    )


def _describe_gateway(gateway: dict[str, Any], traffic: tuple[ServiceRow, ...]) -> str:
    backends = [b for b in gateway.get("backends", ()) if isinstance(b, dict)]
    requests = sum(int(backend.get("requests", 0)) for backend in backends)
    last = f"; last 5 min: {'; '.join(row.text() for row in traffic)}" if traffic else ""
    return f"gateway: {requests} requests so far, {gateway.get('running', 0)} running{last}"


def _say_end(row: InstanceRow, now_s: float) -> str:
    return "" if row.ends_s is None else f"ends in {format_elapsed(row.ends_s - now_s)}; "


def read_fabric(token: str) -> list[dict[str, object]]:
    """Return the instances of fleets that a fabric knows of, by the labels of their sessions."""
    return asyncio.run(_read_fabric(token))


async def _read_fabric(token: str) -> list[dict[str, object]]:
    from atoll.deploy.commands.node_commands import read_labels
    from atoll.fabric.identity.access import Access
    from atoll.fabric.registry.queries import state_of
    from atoll.fabric.registry.records import Metadata
    from atoll.fabric.transport.fabric import Fabric

    access = Access.open(token)
    if access.identity.role == "hub":
        raise AtollError("this token is a hub's", hint="atoll fabric issue NAME for yourself")
    metadata = Metadata(name="status", provider=access.identity.provider, role="worker")
    fabric = await Fabric.connect(access, metadata, observe=True)
    try:
        found = []
        for peer in fabric.peers():
            labels = read_labels(peer.metadata.labels)
            if labels is not None:
                found.append(
                    labels.model_dump()
                    | {
                        "sid": peer.sid,
                        "node": peer.metadata.name,
                        "region": peer.metadata.region,
                        "state": state_of(peer),
                        "since_s": peer.since_s,
                        "routable": peer.routable,
                        "models": [service.model for service in peer.metadata.services],
                    }
                )
    finally:
        await fabric.close()
    return sorted(found, key=lambda each: (str(each["fleet"]), str(each["instance"])))


def draw_fabric(rows: list[dict[str, object]]) -> Table:
    """Return what a fabric knows as a table."""
    columns = ("fleet", "instance", "service", "region", "state", "node", "plan")
    return table(columns, [[row[name] for name in columns] for row in rows])
