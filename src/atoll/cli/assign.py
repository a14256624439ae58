"""`atoll assign`: have a node that waits serve a model."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import typer

from atoll.cli.options import VerbSettings, json_field, verb
from atoll.cli.progress import live_line
from atoll.core.errors import AtollError, UnknownNameError, UsageError
from atoll.core.extras import require_extras
from atoll.core.options import option
from atoll.core.quantities import Duration
from atoll.report.terminal import emit, note

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from atoll.fabric.transport.fabric import Fabric, Peer
    from atoll.runtime.join.assignment import Assignment
    from atoll.runtime.join.signed_orders import OrderReply

app = typer.Typer(add_completion=False)
_ANSWER_S = 10.0


class AssignSettings(VerbSettings):
    """Options of `atoll assign`."""

    node: str = option(..., "Name or session id of a node.", argument=True)
    model: str = option("", "org/name, pypi://..., or a path the node allows.")
    engine: str = option("vllm", "vllm, sglang, llamacpp, ...")
    name: str = option("", "What requests ask for.")
    settings: dict[str, str] = option(
        {}, "SETTING=VALUE of the engine: max-model-len=8192.", "--arg", metavar="SETTING=VALUE"
    )
    stop: bool = option(False, "End what the node serves.")
    wait: Duration = option("0s", "How long to wait until it serves; 0s: not at all.")
    fabric: str | None = option(
        None,
        "An operator's token, @FILE that holds it, or open://host:port.",
        env="ATOLL_FABRIC",
        repr=False,
    )
    as_json: bool = json_field("Print the outcome as JSON.")


@verb(app, AssignSettings)
def assign(options: AssignSettings) -> None:
    """Have a node serve a model: one that joined without a command, or with --accept-assignments.

    Needs an operator's certificate (`atoll fabric issue NAME --role operator`). The node starts one of the
    engines it knows; no command is ever sent.
    """
    require_extras("fabric")
    from atoll.engines.table import find_launched
    from atoll.runtime.join.assignment import Assignment, check

    if options.stop == bool(options.model):
        raise UsageError(
            "either --model or --stop is needed", field="--model", hint="give one of them"
        )
    order = Assignment(
        engine=find_launched(options.engine, field="--engine").name,
        model=options.model,
        name=options.name,
        settings={key.removeprefix("--"): value for key, value in options.settings.items()},
    )
    # What may lie below the node's own folder only the node knows.
    check(order, models="/" if order.model.startswith("/") else None)
    with live_line(f"asking {options.node}") as say:
        outcome = asyncio.run(_assign(options.fabric, options.node, order, options.wait, say))
    emit(outcome, options.as_json, lambda: f"{outcome['node']} {outcome['state']}")


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


async def send_order(fabric: Fabric, sid: str, order: Assignment) -> OrderReply:
    """Sign an order, send it to a session and return what it says."""
    from atoll.fabric.identity import fabric_keys as keys
    from atoll.runtime.join.assignment import write_order
    from atoll.runtime.join.signed_orders import read_reply

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
    matching = exact or [peer for peer in live if peer.name.rpartition("/")[2] == wanted]
    if not matching:
        raise UnknownNameError("node", wanted, [peer.name for peer in live])
    if len(matching) > 1:
        sids = ", ".join(sorted(peer.sid for peer in matching)[:8])
        raise UsageError(f"{len(matching)} nodes are called {wanted!r}", hint=f"name one of {sids}")
    return matching[0]


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
