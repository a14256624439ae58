"""Compiling numeric code with numba so that a first run on a machine waits for seconds, not minutes.

Numba compiles every function by itself: it optimises it, makes machine code of it, and then links its IR
into each caller, where all of it is optimised again. A hundred small functions that call each other, ten
deep, are optimised ten times over, and machine code is made a hundred times that nobody calls. So here a
program is made of *parts*, of which there is only IR, and *entries*, which Python calls. An entry is linked
with all parts it needs and optimised once, as a whole; only entries are cached.

    @part
    def twice(x: float) -> float: ...

    @entry("(float64,)")
    def run(x: float) -> float:
        return twice(twice(x))

What else keeps compiling short: a part has one version, where numba makes one for every literal it is
called with; types of operators are found once; parts skip passes for what they do not use (closures, array
expressions). In compiled code, allocating arrays and assigning slices are best avoided: each brings a dozen
functions of numba's own along. Division by zero gives inf or nan, as in NumPy.

That leans on numba's insides (`core.linking`), so it is done with the versions it was tested with; with any
other, numba compiles functions its own way: slower, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar, cast

import numba
from numba import njit
from numba.core.sigutils import normalize_signature

Function = TypeVar("Function", bound=Callable[..., Any])

TESTED = ((0, 65), (0, 69))
"""Versions of numba from and before which parts are linked."""


def _load_linking() -> ModuleType | None:
    """Return what links parts into entries, None where this numba is another than those tested."""
    version = tuple(int(number) for number in numba.__version__.split(".")[:2])
    if not TESTED[0] <= version < TESTED[1]:
        return None
    # Only for versions tested: it reaches into numba's insides, which others may not have.
    from atoll.core import linking

    return linking


LINKING = _load_linking()


def part(function: Function) -> Function:
    """Compile a function that only compiled functions call."""
    if LINKING is None:
        return cast(Function, njit(nogil=True, error_model="numpy")(function))
    return cast(Function, LINKING.link_part(function))


def lean_part(function: Function) -> Function:
    """Compile a part that makes no arrays: those it is given belong to whoever calls the entry.

    Numba counts who uses an array, with two locked instructions and a page of code for every field taken
    out of a tuple. An entry holds all it was given until it ends, so its parts need not.
    Here take arrays out of named tuples by name, not by number, which numba does by a function of its own.
    """
    compiled: Any = part(function)
    if LINKING is not None:
        compiled.targetoptions["_nrt"] = False
    return cast(Function, compiled)


@dataclass(frozen=True)
class CompiledEntry:
    """An entry, the types it is called with, and what people know it as."""

    dispatcher: Any
    arguments: str
    what: str

    @property
    def types(self) -> tuple[Any, ...]:
        """The types it is called with."""
        args, _ = normalize_signature(self.arguments)
        return tuple(args)

    @property
    def is_compiled(self) -> bool:
        """Whether it is in the cache, as its sources are now."""
        return LINKING is not None and bool(LINKING.is_cached(self.dispatcher, self.types))

    def compile(self) -> None:
        """Compile it, unless the cache has it."""
        self.dispatcher.compile(self.types)


ENTRIES: list[CompiledEntry] = []
"""All entries of the modules imported so far."""


def entry(arguments: str) -> Callable[[Function], Function]:
    """Compile a function, or a part, for Python to call; it is cached, and runs without the GIL.

    `arguments` are the types it is called with, as numba writes them: `"(int64[::1], float64)"`. It is
    compiled when first called, or by `CompiledEntry.compile`. People read about it by what its module calls
    `COMPILED_AS`.
    """

    def decorate(function: Function) -> Function:
        # A part may be an entry as well: it is compiled anew from the plain function.
        plain = getattr(function, "py_func", function)
        if LINKING is None:
            compiled = njit(nogil=True, cache=True, error_model="numpy")(plain)
        else:
            compiled = LINKING.link_entry(plain)
        what = str(plain.__globals__.get("COMPILED_AS", plain.__module__))
        ENTRIES.append(CompiledEntry(compiled, arguments, what))
        return cast(Function, compiled)

    return decorate


_READY: set[int] = set()
"""Where in `ENTRIES` those are that `compile_entries` compiled or loaded."""


def compile_entries(module: str) -> None:
    """Compile all entries of a package, or load them: whoever has a deadline does so before it begins."""
    for at, each in enumerate(ENTRIES):
        # With the dot, so that a package does not match another whose name begins like it.
        if at not in _READY and f"{each.dispatcher.__module__}.".startswith(f"{module}."):
            each.compile()
            _READY.add(at)
