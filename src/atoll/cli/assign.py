"""`atoll assign`: have a node that waits serve a model."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.progress import live_line
from atoll.cli.serving import need_fabric
from atoll.core.errors import AtollError, InputError, UnknownNameError, UsageError
from atoll.core.units import parse_duration
from atoll.report.terminal import emit, note

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from atoll.fabric.transport.fabric import Fabric, Peer
    from atoll.runtime.join.assignment import Assignment, Reply

app = typer.Typer(add_completion=False)
_ANSWER_S = 10.0


@app.command()
def assign(
    node: Annotated[str, typer.Argument(help="Name or session id of a node.")],
    model: Annotated[
        str, typer.Option("--model", help="org/name, pypi://..., or a path the node allows.")
    ] = "",
    engine: Annotated[
        str, typer.Option("--engine", help="vllm, sglang, llamacpp or atoll.")
    ] = "vllm",
    name: Annotated[str, typer.Option("--name", help="What requests ask for.")] = "",
    arg: Annotated[
        list[str] | None,
        typer.Option("--arg", help="SETTING=VALUE of the engine: max-model-len=8192."),
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End what the node serves.")] = False,
    wait: Annotated[
        str, typer.Option("--wait", help="How long to wait until it serves; 0s: not at all.")
    ] = "0s",
    fabric: Annotated[
        str | None,
        typer.Option(
            "--fabric",
            envvar="ATOLL_FABRIC",
            show_envvar=True,
            help="An operator's token, @FILE that holds it, or open://host:port.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Have a node serve a model: one that joined without a command, or with --accept-assignments.

    Needs an operator's certificate (`atoll fabric issue NAME --role operator`). The node starts one of the
    engines it knows; no command is ever sent.
    """
    need_fabric()
    from atoll.runtime.join.assignment import ENGINES, Assignment, check

    if stop == bool(model):
        raise UsageError("give either --model or --stop", field="--model")
    if engine not in ENGINES:
        raise UnknownNameError("engine", engine, ENGINES, field="--engine")
    chosen = next(known for known in ENGINES if known == engine)
    order = Assignment(engine=chosen, model=model, name=name, settings=_settings(arg or []))
    # What may lie below the node's own folder only the node knows.
    check(order, models="/" if model.startswith("/") else None)
    wait_s = parse_duration(wait, field="--wait")
    with live_line(f"asking {node}") as say:
        found = asyncio.run(_assign(fabric, node, order, wait_s, say))
    emit(found, as_json, lambda: f"{found['node']} {found['state']}")


def _settings(texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key or not value:
            raise InputError(f"cannot read {text!r}", field="--arg", hint="write SETTING=VALUE")
        found[key.removeprefix("--")] = value
    return found


async def _assign(
    token: str | None, node: str, order: Assignment, wait_s: float, say: Callable[[str], None]
) -> dict[str, Any]:
    import dataclasses

    from atoll.fabric.identity.access import Access
    from atoll.fabric.registry.records import Metadata
    from atoll.fabric.transport.fabric import Fabric

    access = Access.open(token)
    if access.is_open:
        access = dataclasses.replace(access, open_role="operator")
    identity = access.identity
    if identity.role != "operator":
        raise UsageError(
            f"this token is a {identity.role}'s; only an operator may assign",
            field="--fabric",
            hint="atoll fabric issue NAME --role operator",
        )
    metadata = Metadata(name="assign", provider=identity.provider, role="operator")
    fabric = await Fabric.connect(access, metadata)
    try:
        peer = find_node(fabric.peers(), node)
        reply = await send_order(fabric, peer.sid, order)
        if not reply.accepted:
            raise AtollError(f"{peer.name} refused: {reply.message}")
        state = "accepted"
        if wait_s > 0 and order.model:
            say(f"waiting until {peer.name} serves {order.served}")
            await _served_names(fabric, peer, order.served, wait_s)
            state = f"serves {order.served}"
        return {"node": peer.name, "sid": peer.sid, "state": state, "model": order.served}
    finally:
        await fabric.close()


async def send_order(fabric: Fabric, sid: str, order: Assignment) -> Reply:
    """Sign an order, send it to a session and return what it says."""
    from atoll.fabric.identity import keys
    from atoll.runtime.join.assignment import read_reply, write_order

    payload = write_order(order, fabric.identity, fabric.access.fabric_id, sid, time.time())
    try:
        return read_reply(await fabric.query(keys.assign(sid), payload, _ANSWER_S))
    except TimeoutError as error:
        raise AtollError(
            "the node did not answer",
            hint="it takes assignments only if it joined without a command or with"
            " --accept-assignments",
        ) from error


def find_node(peers: Sequence[Peer], wanted: str) -> Peer:
    """Return the live node of that session id or name; the last part of a name will do."""
    live = [peer for peer in peers if peer.alive and peer.metadata.role != "hub"]
    exact = [peer for peer in live if wanted in (peer.sid, peer.name)]
    found = exact or [peer for peer in live if peer.name.rpartition("/")[2] == wanted]
    if not found:
        raise UnknownNameError("node", wanted, [peer.name for peer in live])
    if len(found) > 1:
        sids = ", ".join(sorted(peer.sid for peer in found)[:8])
        raise UsageError(f"{len(found)} nodes are called {wanted!r}", hint=f"name one of {sids}")
    return found[0]


async def _served_names(fabric: Fabric, peer: Peer, model: str, wait_s: float) -> None:
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s:
        # It may take a new session on the way.
        if any(_serves(other, model) for other in fabric.peers() if _same_node(other, peer)):
            return
        await asyncio.sleep(0.2)
    note(f"{peer.name} may still be loading; see 'atoll nodes'")
    raise AtollError(f"{peer.name} did not serve {model} in time", hint="give a longer --wait")


def _same_node(a: Peer, b: Peer) -> bool:
    return (a.name, a.slot) == (b.name, b.slot)


def _serves(peer: Peer, model: str) -> bool:
    return peer.routable and any(service.model == model for service in peer.metadata.services)
