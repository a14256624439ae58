"""How functions of the event loop are compiled, and how they see the arrays of a run.

Passing dozens of arrays from function to function costs more than the functions do, in time to compile as in
time to run. So compiled code is handed one pointer: to a table with the address and the shape of every array.
`z.unit` there reads the table and is an array again. Whoever starts the loop keeps the arrays alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload_attribute, register_model

from atoll.sim.arrays import LAYOUT, WORDS, Longs, Sim

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """Compile a function that only compiled functions call, which spares code to call it from Python."""
    compiled: Function = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")(
        function
    )
    return compiled


def table_of(sim: Sim) -> Longs:
    """Return the addresses and shapes of the arrays of a run, which must outlive the table."""
    table = np.zeros((len(LAYOUT), WORDS), np.int64)
    for at, (name, (dtype, dimensions)) in enumerate(LAYOUT.items()):
        array = getattr(sim, name)
        if array.dtype != dtype or array.ndim != dimensions or not array.flags.c_contiguous:
            raise TypeError(f"{name} is {array.dtype}, {array.ndim} dimensions")
        table[at, 0] = array.ctypes.data
        table[at, 1 : 1 + dimensions] = array.shape
    return table.reshape(-1)


class SimType(types.Type):  # type: ignore[misc]
    """The type of a run in compiled code."""

    def __init__(self) -> None:
        super().__init__(name="Sim")


SIM = SimType()
register_model(SimType)(models.OpaqueModel)


@intrinsic
def sim_at(_typing: Any, table: Any) -> Any:
    """Return the run whose arrays a table lists."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.bitcast(array.data, cgutils.voidptr_t)

    return SIM(table), codegen


@intrinsic
def _word(_typing: Any, sim: Any, _at: Any) -> Any:
    """Return a number of the table."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        words = builder.bitcast(args[0], ir.IntType(64).as_pointer())
        return builder.load(builder.gep(words, [args[1]]))

    return types.int64(sim, types.int64), codegen


@intrinsic
def _address(_typing: Any, sim: Any, _at: Any) -> Any:
    """Return a number of the table as a pointer."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        words = builder.bitcast(args[0], ir.IntType(64).as_pointer())
        return builder.inttoptr(builder.load(builder.gep(words, [args[1]])), cgutils.voidptr_t)

    return types.voidptr(sim, types.int64), codegen


def _attribute(name: str, at: int, dtype: np.dtype[Any], dimensions: int) -> None:
    """Let compiled code read an array of a run by its name."""
    base = at * WORDS
    one, two, three = base + 1, base + 2, base + 3

    def flat(sim: Any) -> Any:  # noqa: ARG001
        return lambda sim: carray(_address(sim, base), (_word(sim, one),), dtype)

    def square(sim: Any) -> Any:  # noqa: ARG001
        return lambda sim: carray(_address(sim, base), (_word(sim, one), _word(sim, two)), dtype)

    def cube(sim: Any) -> Any:  # noqa: ARG001
        return lambda sim: carray(
            _address(sim, base), (_word(sim, one), _word(sim, two), _word(sim, three)), dtype
        )

    get = (flat, square, cube)[dimensions - 1]
    # Numba compares the signature with that of what it returns, annotations too.
    get.__annotations__ = {}
    overload_attribute(SimType, name)(get)


for _at, (_name, (_dtype, _dimensions)) in enumerate(LAYOUT.items()):
    _attribute(_name, _at, _dtype, _dimensions)
