"""The functions of `decisions`, compiled: for the simulator, which makes millions of them.

    from atoll.routing import compiled
    edge = compiled.round_robin(first, target, weight, order, credit, vertex, closed)

numba has to see compiled callees, so each function is compiled in the order of `NAMES` with those before
it in place of the plain ones. They are parts (see `core.compiling`): only compiled functions may call them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from atoll.core.compiling import part
from atoll.routing import decisions

NAMES = (
    "round_robin",
    "draw",
    "by_weight",
    "least_loaded",
    "by_throughput",
    "observe",
    "next_hop",
    "close",
    "walk",
    "reservation",
    "mask_full",
    "share_run",
)
"""Callees before their callers."""


def _compile() -> dict[str, Callable[..., Any]]:
    made: dict[str, Callable[..., Any]] = {}
    for name in NAMES:
        plain: FunctionType = getattr(decisions, name)
        bound = FunctionType(plain.__code__, plain.__globals__ | made, name)
        bound.__module__ = __name__
        bound.__qualname__ = name
        made[name] = part(bound)
    return made


_made = _compile()

round_robin = _made["round_robin"]
draw = _made["draw"]
by_weight = _made["by_weight"]
least_loaded = _made["least_loaded"]
by_throughput = _made["by_throughput"]
observe = _made["observe"]
next_hop = _made["next_hop"]
close = _made["close"]
walk = _made["walk"]
reservation = _made["reservation"]
mask_full = _made["mask_full"]
share_run = _made["share_run"]
