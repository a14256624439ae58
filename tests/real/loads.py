"""Whether an engine's own figures reach the fabric: what runs, what waits, how full its KV cache is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from contextlib import closing, suppress

from atoll.fabric.identity.access import Access
from atoll.fabric.registry.peers import Load
from atoll.fabric.registry.records import Metadata
from atoll.fabric.transport.fabric import Fabric
from tests.real.features import CHAT, COUNT, chat
from tests.real.fleet import Door, Fleet

RUNNING, WAITING, KV = "metrics read: running", "metrics read: waiting", "metrics read: KV use"
_STREAMS = 8
"""Twice what the engines are told to run at a time."""
_TOKENS = 900
_LOOK_S = 60.0
_PAUSE_S = 0.1


def read_loads(fleet: Fleet, node: str) -> dict[str, Mapping[str, str]]:
    """Keep a node busy and return which figures its fabric gets to see."""
    over = threading.Event()
    # They ask again and again: on a busy machine answers may end before anybody hears of a fabric's nodes.
    clients = [
        threading.Thread(target=_ask, args=(fleet.door(node), over)) for _ in range(_STREAMS)
    ]
    for client in clients:
        client.start()
    try:
        loads = asyncio.run(_watch(fleet, node))
    finally:
        over.set()
        for client in clients:
            client.join()
    seen = {
        RUNNING: any(load.running > 1 for load in loads),
        WAITING: any(load.waiting for load in loads),
        KV: any(load.kv_used for load in loads),
    }
    told = any(load.kv_used is not None for load in loads)
    return {name: {"word": "yes"} if found else _lack(name, told) for name, found in seen.items()}


async def _watch(fleet: Fleet, node: str) -> list[Load]:
    """Return what a member of the fabric hears of a node until it has heard all, or for a while."""
    access = Access.open(fleet.fabric)
    metadata = Metadata(name="watcher", provider=access.identity.provider, role="worker")
    fabric = await Fabric.connect(access, metadata, observe=True)
    heard: list[Load] = []
    try:
        async with asyncio.timeout(_LOOK_S):
            while not any(load.running > 1 and load.waiting and load.kv_used for load in heard):
                await asyncio.sleep(0.2)
                sids = {peer.sid for peer in fabric.peers() if peer.name == node}
                heard += [load for sid, load in fabric.loads.items() if sid in sids]
    except TimeoutError:
        pass
    finally:
        await fabric.close()
    return heard


def _ask(door: Door, over: threading.Event) -> None:
    """Ask for one long stream after the other until all is over, and leave then."""
    while not over.wait(_PAUSE_S):
        # An engine that is full lets a request wait for its first byte, and a node that is full refuses.
        with suppress(OSError), closing(door.stream(CHAT, chat(COUNT, _TOKENS))) as stream:
            for _ in stream:
                if over.is_set():
                    break


def _lack(name: str, told: bool) -> Mapping[str, str]:
    if name == KV and not told:
        return {"word": "no", "why": "not published"}
    return {"word": "no", "why": "never heard in the fabric"}
