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
    "min_charged",
    "by_throughput",
    "observe",
    "next_hop",
    "close",
    "walk",
    "reservation",
    "mask_full",
    "share_run",
    "free_slot",
    "urgency",
)
"""Callees before their callers."""


def _compile() -> dict[str, Callable[..., Any]]:
    compiled: dict[str, Callable[..., Any]] = {}
    for name in NAMES:
        plain: FunctionType = getattr(decisions, name)
        bound = FunctionType(plain.__code__, plain.__globals__ | compiled, name)
        bound.__module__ = __name__
        bound.__qualname__ = name
        compiled[name] = part(bound)
    return compiled


_compiled = _compile()

round_robin = _compiled["round_robin"]
draw = _compiled["draw"]
by_weight = _compiled["by_weight"]
least_loaded = _compiled["least_loaded"]
min_charged = _compiled["min_charged"]
by_throughput = _compiled["by_throughput"]
observe = _compiled["observe"]
next_hop = _compiled["next_hop"]
close = _compiled["close"]
walk = _compiled["walk"]
reservation = _compiled["reservation"]
mask_full = _compiled["mask_full"]
share_run = _compiled["share_run"]
free_slot = _compiled["free_slot"]
urgency = _compiled["urgency"]
