"""Whether an engine's own figures reach the registry: what runs, what waits, how full its KV cache is."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from tests.real.features import CHAT, COUNT, chat
from tests.real.fleet import Fleet, Stream

RUNNING, WAITING, KV = "metrics read: running", "metrics read: waiting", "metrics read: KV use"
_STREAMS = 8
"""Twice what the engines are told to run at a time."""
_TOKENS = 900
_LOOK_S = 60.0


def read_loads(fleet: Fleet, node: str) -> dict[str, Mapping[str, str]]:
    """Keep a node busy and return which figures the registry gets to see."""
    streams = [fleet.door(node).stream(CHAT, chat(COUNT, _TOKENS)) for _ in range(_STREAMS // 2)]
    late = [threading.Thread(target=_ask, args=(fleet, node, streams)) for _ in range(_STREAMS // 2)]
    for thread in late:
        thread.start()
    seen = {RUNNING: False, WAITING: False, KV: False}
    told = False
    until_s = time.monotonic() + _LOOK_S
    while time.monotonic() < until_s and not all(seen.values()):
        load = fleet.load(node)
        seen[RUNNING] |= (load.get("running") or 0) > 1
        seen[WAITING] |= (load.get("waiting") or 0) > 0
        seen[KV] |= (load.get("kv_used") or 0) > 0
        told |= load.get("kv_used") is not None
        if told and seen[RUNNING] and not load.get("running"):
            break
    for stream in streams:
        stream.close()
    for thread in late:
        thread.join()
    return {name: {"word": "yes"} if found else _lack(name, told) for name, found in seen.items()}


def _ask(fleet: Fleet, node: str, streams: list[Stream]) -> None:
    # An engine that is full lets a request wait for its first byte, and a node that is full refuses.
    stream = fleet.door(node).stream(CHAT, chat(COUNT, _TOKENS))
    streams.append(stream)
    stream.close()


def _lack(name: str, told: bool) -> Mapping[str, str]:
    if name == KV and not told:
        return {"word": "no", "why": "not published"}
    return {"word": "no", "why": "never seen in the registry"}
