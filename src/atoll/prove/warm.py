"""Compile all that planning and simulating need, ahead of time: `python -m atoll.prove.warm`.

A first plan or simulation on a machine compiles what it needs and keeps it (see `core.compiling`): beside
the package, else where numba keeps such things at home, or in `NUMBA_CACHE_DIR`. Who installs can have it
done then, beside other work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.core.compiling import CompiledEntry
    from atoll.plan.problem import Family

_RENT = (
    "atoll.perf.capacity_kernel",
    "atoll.solve.templates.template_kernel",
    "atoll.solve.cover",
    "atoll.solve.rent.items",
    "atoll.solve.rent.step_functions",
    "atoll.solve.rent.capped.capped_cover",
    "atoll.solve.rent.fast.fast_kernel",
)
_SIMULATOR = "atoll.sim.event_loop"
_TASKS = "atoll.sim.tasks.task_loop"
_PLACE = (
    "atoll.solve.place.search.anneal",
    "atoll.solve.place.sustained.sustained_kernel",
)
MODULES_OF: Mapping[Family, tuple[str, ...]] = {
    "rent": (*_RENT, _SIMULATOR),
    "graph": (*_RENT, _SIMULATOR, _TASKS),
    "place": (*_PLACE, _SIMULATOR),
}
"""Modules with entries that a first plan needs, by the family of its problem."""
MODULES = (*_RENT, _SIMULATOR, _TASKS, *_PLACE)
"""All of them. The baselines GH and AGH (`solve.joint`) are compiled when they first run."""

_WARM: set[tuple[str, ...]] = set()
"""Modules that this process has looked at: nothing of them is to be compiled any more."""

Progress = Callable[[int, int, str], None]
"""Called with the entries compiled so far, how many there are to compile, and what comes next."""


def entries(modules: Sequence[str] = MODULES) -> list[CompiledEntry]:
    """Return all compiled functions of modules that Python calls, in the order of these."""
    for module in modules:
        import_module(module)
    from atoll.core.compiling import ENTRIES

    own = [one for one in ENTRIES if one.dispatcher.py_func.__module__ in modules]
    return sorted(own, key=lambda one: modules.index(one.dispatcher.py_func.__module__))


def is_warm() -> bool:
    """Return whether a plan and a simulation would find everything compiled."""
    return all(one.is_compiled for one in entries())


def warm(on_progress: Progress | None = None, modules: Sequence[str] = MODULES) -> int:
    """Compile what the cache does not have of modules and return how many functions that were."""
    if tuple(modules) in _WARM:
        # Looking at all sources again takes a tenth of a second, which a what-if would pay for each plan.
        return 0
    missing = [one for one in entries(modules) if not one.is_compiled]
    for done, one in enumerate(missing):
        if on_progress is not None:
            on_progress(done, len(missing), one.what)
        one.compile()
    _WARM.add(tuple(modules))
    return len(missing)


def main() -> None:
    """Compile, with one line about it."""
    begun_s = time.monotonic()
    said = ""

    def tell(_done: int, _total: int, what: str) -> None:
        nonlocal said
        if what != said:
            said = what
            sys.stderr.write(f"compiling {what}, once on this machine ...\n")
            sys.stderr.flush()

    number = warm(tell)
    if number:
        sys.stderr.write(f"compiled, in {time.monotonic() - begun_s:.0f} s\n")


if __name__ == "__main__":
    main()
