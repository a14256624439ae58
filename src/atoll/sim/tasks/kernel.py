"""How compiled code sees the arrays of this simulator: as `sim.kernel`, with other arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, lower_getattr_generic, models, register_model

from atoll.core.compiling import part
from atoll.sim import heap, stepping
from atoll.sim.kernel import TableType
from atoll.sim.tasks.arrays import LAYOUT

kernel = part
# Compiled for whatever has the arrays that they name.
push = cast(Callable[..., None], heap.push)
pop = cast(Callable[..., int], heap.pop)
end_push = cast(Callable[..., None], heap.end_push)
end_remove = cast(Callable[..., int], heap.end_remove)
whole_seconds = cast(Callable[..., float], stepping.whole_seconds)


class TaskSimType(types.Type):  # type: ignore[misc]
    """The type of a run in compiled code: a pointer to the list of its arrays."""

    def __init__(self) -> None:
        super().__init__(name="TaskSim")


TASK_SIM = TaskSimType()
TABLES = {
    name: TableType(f"tasks.{name}", at, dtype, dimensions)
    for at, (name, (dtype, dimensions)) in enumerate(LAYOUT.items())
}
register_model(TaskSimType)(models.OpaqueModel)


@infer_getattr
class TaskSimAttributes(AttributeTemplate):  # type: ignore[misc]
    """`z.unit`."""

    key = TaskSimType

    def generic_resolve(self, _sim: Any, name: str) -> Any:
        """Return the type of an array."""
        return TABLES.get(name)


@lower_getattr_generic(TaskSimType)
def _read_sim(_context: Any, _builder: Any, _kind: Any, value: Any, _name: str) -> Any:
    return value


@intrinsic
def task_sim_at(_typing: Any, table: Any) -> Any:
    """Return the run whose arrays a table lists."""

    def codegen(context: Any, builder: Any, given: Any, args: Any) -> Any:
        array = context.make_array(given.args[0])(context, builder, args[0])
        return builder.bitcast(array.data, cgutils.voidptr_t)

    return TASK_SIM(table), codegen
