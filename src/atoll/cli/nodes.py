"""`atoll nodes`: who is in the fabric, with what, and which of them has what one needs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import typer

from atoll.cli.console_client import CONSOLE_VARIABLE, ConsoleClient
from atoll.cli.options import VerbSettings, json_field, verb
from atoll.core.errors import UsageError
from atoll.core.extras import require_extras
from atoll.core.options import option
from atoll.core.quantities import Bytes
from atoll.core.units import format_bytes, format_elapsed, format_price
from atoll.report.terminal import console, emit, table, to_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Group

    from atoll.fabric.registry.peers import Load, Peer
    from atoll.fabric.registry.queries import Query
    from atoll.fabric.registry.records import Gpu, Metadata, NodeService
    from atoll.fabric.transport.fabric import Fabric
    from atoll.runtime.federation.fabric_view import FabricView

app = typer.Typer(add_completion=False)
_FABRIC = "/atoll/v1/fabric"
_LOAD_WAIT_S = 1.1
_REDRAW_S = 0.5
_SHOWN_MODELS = 3


class NodesSettings(VerbSettings):
    """Options of `atoll nodes`; filters are named as in `Query`."""

    names: tuple[str, ...] = option((), "Names or session ids; none: all.", argument=True)
    gpus: tuple[str, ...] = option((), "GPU class: A100 also means A100-80G.", "--gpu")
    min_vram_bytes: Bytes = option(0.0, "Memory of one GPU: 40GB.", "--min-vram")
    min_gpus: int = option(0, "GPUs of that kind together.", ge=0)
    models: tuple[str, ...] = option((), "Model or alias; * stands for anything.", "--model")
    precisions: tuple[str, ...] = option((), "Of what it serves: bf16, fp8.", "--precision")
    providers: tuple[str, ...] = option((), "Who runs it.", "--provider")
    regions: tuple[str, ...] = option((), "Region: eu also means eu-west-1.", "--region")
    sites: tuple[str, ...] = option((), "Site.", "--site")
    states: tuple[str, ...] = option((), "join, serving, down or silent.", "--state")
    engines: tuple[str, ...] = option((), "vllm, sglang, llamacpp, ...", "--engine")
    min_stability: str = option(
        "", "At least this: spot, batch, standard or reserved.", "--stability"
    )
    roles: tuple[str, ...] = option((), "hub, worker, gateway or operator.", "--role")
    fabric: str | None = option(
        None,
        "A token, @FILE that holds it, its folder, or open://host:port.",
        env="ATOLL_FABRIC",
        repr=False,
    )
    console: str | None = option(
        None,
        "Without --fabric: ask the dashboard at this URL, with an admin's API key in $ATOLL_KEY.",
        env=CONSOLE_VARIABLE,
        metavar="URL",
    )
    watch: bool = option(False, "Stay, and redraw on change.")
    as_json: bool = json_field("Print JSON, in base units; with --watch a line each.")


@verb(app, NodesSettings)
def nodes(options: NodesSettings) -> None:
    """Show the nodes of a fabric; options narrow, several values of one option mean any of them.

    Reads along with any certificate of the fabric and leaves no trace in it.
    """
    require_extras("fabric")
    from atoll.fabric.registry.queries import Query

    query = Query(**{field.name: getattr(options, field.name) for field in fields(Query)})
    if options.console is not None and options.fabric is None:
        if options.watch:
            raise UsageError(
                "a dashboard is asked once", field="--watch", hint="leave it out, or give --fabric"
            )
        peers, loads = read_view(ConsoleClient.find(options.console).ask("GET", _FABRIC))
        _show(peers, loads, query, options.as_json)
        return
    asyncio.run(_nodes(options.fabric, query, options.watch, options.as_json))


async def _nodes(token: str | None, query: Query, watch: bool, as_json: bool) -> None:
    from atoll.fabric.identity.access import Access
    from atoll.fabric.registry.records import Metadata
    from atoll.fabric.transport.fabric import Fabric

    access = Access.open(token)
    identity = access.identity
    if identity.role == "hub":
        raise UsageError(
            "this token is a hub's", field="--fabric", hint="atoll fabric issue NAME for yourself"
        )
    metadata = Metadata(name="nodes", provider=identity.provider, role="worker")
    fabric = await Fabric.connect(access, metadata, observe=True)
    try:
        await _first_loads(fabric)
        if watch:
            await _watch(fabric, query, as_json)
        else:
            _show(fabric.peers(), fabric.loads, query, as_json)
    finally:
        await fabric.close()


def _show(peers: Sequence[Peer], loads: Mapping[str, Load], query: Query, as_json: bool) -> None:
    chosen = choose(peers, query)
    emit(
        [describe(peer, loads.get(peer.sid)) for peer in chosen],
        as_json,
        lambda: draw_nodes(chosen, loads, time.time(), len(peers)),
    )


def read_view(view: FabricView) -> tuple[list[Peer], dict[str, Load]]:
    """Return the members that a gateway sees, and their loads by session."""
    import msgspec

    from atoll.fabric.registry.peers import Load, Peer
    from atoll.fabric.registry.records import Metadata, SessionState

    peers, loads = [], {}
    for shown in (*view["hubs"], *view["nodes"]):
        said = {name: each for name, each in shown.items() if name in Metadata.__struct_fields__}
        metadata = msgspec.convert(said, Metadata)
        peers.append(
            Peer(
                sid=shown["sid"],
                slot="",
                name=metadata.name,
                provider=metadata.provider,
                verified=shown["verified"],
                state=SessionState[shown["state"].upper()],
                metadata=metadata,
                alive=shown["alive"],
                since_s=time.time() - shown["for_s"],
            )
        )
        if shown["load"] is not None:
            loads[shown["sid"]] = Load(**shown["load"])  # type: ignore[arg-type]
    return peers, loads


async def _first_loads(fabric: Fabric) -> None:
    """Loads are not kept anywhere: wait a moment until every serving node has said its own."""
    until_s = time.monotonic() + _LOAD_WAIT_S
    while time.monotonic() < until_s:
        serving = (peer for peer in fabric.peers() if peer.routable and peer.metadata.services)
        if all(peer.sid in fabric.loads for peer in serving):
            return
        await asyncio.sleep(0.02)


async def _watch(fabric: Fabric, query: Query, as_json: bool) -> None:
    if as_json:
        await _watch_lines(fabric, query)
        return
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    def view() -> Group:
        peers = fabric.peers()
        sheet = draw_nodes(choose(peers, query), fabric.loads, time.time(), len(peers))
        return sheet if fabric.connected else Group(sheet, Text("no hub answers this moment"))

    with Live(view(), console=console(), auto_refresh=False) as live:
        while True:
            await asyncio.sleep(_REDRAW_S)
            live.update(view(), refresh=True)


async def _watch_lines(fabric: Fabric, query: Query) -> None:
    """Print one JSON object a line: every node that is there, then every change."""
    import json

    happened: asyncio.Queue[tuple[str, Peer]] = asyncio.Queue()
    fabric.listeners.append(lambda kind, peer: happened.put_nowait((kind, peer)))
    for peer in choose(fabric.peers(), query):
        happened.put_nowait(("there", peer))
    while True:
        kind, peer = await happened.get()
        if kind == "left" or query.lacks(peer) is None:
            change = {"event": kind, **describe(peer, fabric.loads.get(peer.sid))}
            typer.echo(json.dumps(json.loads(to_json(change)), ensure_ascii=False))


def choose(peers: Sequence[Peer], query: Query) -> list[Peer]:
    """Return the nodes that have what is asked, hubs first, then by name."""
    matching = [peer for peer in peers if query.lacks(peer) is None]
    return sorted(matching, key=lambda peer: (peer.metadata.role != "hub", peer.name, peer.sid))


def describe(peer: Peer, load: Load | None) -> dict[str, Any]:
    """Return a node as plain data: what it says of itself and what is known of it here."""
    from atoll.fabric.registry.records import as_dict

    metadata = as_dict(peer.metadata)
    del metadata["revoked"]
    known = {
        "sid": peer.sid,
        "state": peer.state.name.lower(),
        "alive": peer.alive,
        "routable": peer.routable,
        "verified": peer.verified,
        "since_s": peer.since_s,
        "load": None
        if load is None
        else {field: getattr(load, field) for field in load.__struct_fields__},
    }
    return {"name": metadata.pop("name"), **known, **metadata}


def draw_nodes(peers: Sequence[Peer], loads: Mapping[str, Load], now_s: float, of: int) -> Group:
    """Return the nodes as a table; `of` is how many the fabric has."""
    from rich.console import Group
    from rich.text import Text

    from atoll.fabric.registry.queries import state_of

    rows = [
        (
            peer.name,
            f"{peer.provider} {'✓' if peer.verified else '(unverified)'}",
            peer.metadata.role,
            state_of(peer),
            _place(peer.metadata),
            _gpus(peer.metadata),
            _models(peer.metadata.services),
            f"{peer.metadata.engine} {peer.metadata.engine_version}".strip() or None,
            _load(loads.get(peer.sid)),
            _ends(peer.metadata, now_s),
            _price(peer.metadata),
        )
        for peer in peers
    ]
    names = ("name", "provider", "role", "state", "place", "hardware", "serves", "engine", "load")
    columns = (*names, "ends in", "price")
    # What nobody says is not shown: terminals are narrow.
    filled = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]
    sheet = table(
        [columns[i] for i in filled],
        [[row[i] for i in filled] for row in rows],
        right=("ends in", "price"),
    )
    everybody = f"{of} node{'' if of == 1 else 's'}"
    if not peers:
        return Group(Text(f"none of {everybody}"))
    return Group(sheet, Text(everybody if len(peers) == of else f"{len(peers)} of {everybody}"))


def _place(metadata: Metadata) -> str | None:
    return "/".join(filter(None, (metadata.region, metadata.site))) or None


def _gpus(metadata: Metadata) -> str | None:
    def describe_gpu(gpu: Gpu) -> str:
        return f"{gpu.count}x{gpu.type} {format_bytes(gpu.memory_bytes)}"

    hardware = metadata.hardware
    if hardware.gpus:
        return ", ".join(describe_gpu(gpu) for gpu in hardware.gpus)
    return f"{hardware.cpus} CPUs {format_bytes(hardware.memory_bytes)}" if hardware.cpus else None


def _models(services: tuple[NodeService, ...]) -> str | None:
    def describe_service(service: NodeService) -> str:
        part = "" if service.layers is None else f"[{service.layers[0]}:{service.layers[1]}]"
        known = "" if service.precision == "unknown" else f" {service.precision}"
        return f"{service.model}{part}{known}"

    shown = [describe_service(service) for service in services[:_SHOWN_MODELS]]
    more = len(services) - _SHOWN_MODELS
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "") or None


def _load(load: Load | None) -> str | None:
    if load is None:
        return None
    room = "" if load.capacity is None else f"/{load.capacity}"
    waiting = f" +{load.waiting}" if load.waiting else ""
    return f"{load.running}{room}{waiting}"


def _ends(metadata: Metadata, now_s: float) -> str | None:
    if metadata.ends_s is None:
        return None
    return format_elapsed(metadata.ends_s - now_s) if metadata.ends_s > now_s else "over"


def _price(metadata: Metadata) -> str | None:
    if metadata.price_usd_per_hour is not None:
        return format_price(metadata.price_usd_per_hour)
    if metadata.usd_per_mtoken_out is not None:
        return f"${metadata.usd_per_mtoken_in or 0:g}/{metadata.usd_per_mtoken_out:g} per Mtoken"
    return None
