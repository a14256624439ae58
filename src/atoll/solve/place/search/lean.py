"""Parts that count no references to arrays."""

from __future__ import annotations

from typing import Any

from atoll.core.compiling import Function, part


def lean_part(function: Function) -> Function:
    """Compile a part that makes no arrays: those it is given belong to whoever calls the entry.

    Numba counts who uses an array, with two locked instructions and a page of code for every field taken
    out of a tuple. An entry holds all it was given until it ends, so its parts need not.
    Here take arrays out of named tuples by name, not by number, which numba does by a function of its own.
    """
    made: Any = part(function)
    made.targetoptions["_nrt"] = False
    kept: Function = made
    return kept
