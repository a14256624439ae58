"""How functions of the event loop are compiled, and how they see the arrays of a run.

Passing dozens of arrays from function to function costs more than the functions do, in time to compile as in
time to run. So compiled code is handed one pointer: to a list with the address and the shape of every array.
`z.unit` there is the array of units, `z.unit[u]` one of them and `z.unit[u].busy` a number in it, read and
written in place; `z.step[LENGTH]` is a row of numbers and `z.edge["weight"][low:high]` part of a column.
Whoever starts the loop keeps the arrays alive.

Numba's own arrays and records would do, but take several times as long to compile: their types list all
fields, and every access builds an array first. Unlike theirs, indices here count from the start only: -1 is
not the last, and nothing checks them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import (
    AbstractTemplate,
    AttributeTemplate,
    infer_getattr,
    infer_global,
    signature,
)
from numba.extending import (
    intrinsic,
    lower_builtin,
    lower_getattr_generic,
    lower_setattr_generic,
    models,
    register_model,
)
from numba.np.numpy_support import from_dtype

from atoll.core.compiling import part
from atoll.sim.sim_arrays import LAYOUT, WORDS, Longs

Layout = Mapping[str, tuple[np.dtype[Any], int]]
kernel = part
_BYTES = ir.IntType(8).as_pointer()
_LONG = ir.IntType(64)


def table_of(sim: Any, layout: Layout = LAYOUT) -> Longs:
    """Return the addresses and shapes of the arrays of a run, which must outlive the table."""
    table = np.zeros((len(layout), WORDS), np.int64)
    for at, (name, (dtype, dimensions)) in enumerate(layout.items()):
        array = getattr(sim, name)
        if array.dtype != dtype or array.ndim != dimensions or not array.flags.c_contiguous:
            raise TypeError(f"{name} is {array.dtype}, {array.ndim} dimensions")
        table[at, 0] = array.ctypes.data
        table[at, 1 : 1 + dimensions] = array.shape
    return table.reshape(-1)


class SimType(types.Type):  # type: ignore[misc]
    """The type of a run in compiled code: a pointer to the list of its arrays.

    `prefix` tells arrays of one simulator from those of another that have the same name.
    """

    def __init__(self, name: str, layout: Layout, prefix: str = "") -> None:
        super().__init__(name=name)
        self.tables = {
            field: TableType(f"{prefix}{field}", at, dtype, dimensions)
            for at, (field, (dtype, dimensions)) in enumerate(layout.items())
        }


class RecordType(types.Type):  # type: ignore[misc]
    """The type of one record: a pointer to it."""

    def __init__(self, name: str, dtype: np.dtype[Any]) -> None:
        super().__init__(name=f"Record({name})")
        self.dtype = dtype
        self.fields = {
            field: (from_dtype(kind), offset)
            for field, (kind, offset, *_) in (dtype.fields or {}).items()
        }


class TableType(types.Type):  # type: ignore[misc]
    """The type of an array of a run, of records or of numbers: a pointer to the list of all arrays."""

    def __init__(self, name: str, at: int, dtype: np.dtype[Any], dimensions: int) -> None:
        super().__init__(name=f"Table({name})")
        self.at = at
        self.dimensions = dimensions
        self.item_bytes = dtype.itemsize
        self.item = RecordType(name, dtype) if dtype.fields else from_dtype(dtype)


class ColumnType(types.Type):  # type: ignore[misc]
    """The type of a field over all records of an array: a pointer to the list of all arrays."""

    def __init__(self, table: TableType, field: str) -> None:
        super().__init__(name=f"{table.name}[{field}]")
        self.table = table
        item, offset = table.item.fields[field]
        self.item = item
        self.offset: int = offset


class StretchType(types.Type):  # type: ignore[misc]
    """The type of some numbers at equal distances in memory: a pointer to the first, and how many."""

    def __init__(self, item: types.Type, stride: int) -> None:
        super().__init__(name=f"Stretch({item}, {stride})")
        self.item = item
        self.stride = stride


for _kind in (SimType, RecordType, TableType, ColumnType):
    register_model(_kind)(models.OpaqueModel)


@register_model(StretchType)
class StretchModel(models.StructModel):  # type: ignore[misc]
    """How a stretch is laid out."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, [("data", types.voidptr), ("size", types.int64)])


# Types of what is written in the source.


@infer_getattr
class SimAttributes(AttributeTemplate):  # type: ignore[misc]
    """`z.unit`."""

    key = SimType

    def generic_resolve(self, sim: Any, name: str) -> Any:
        """Return the type of an array."""
        return sim.tables.get(name)


@infer_getattr
class TableAttributes(AttributeTemplate):  # type: ignore[misc]
    """`z.site.shape`."""

    key = TableType

    def resolve_shape(self, table: Any) -> Any:
        """Return the type of the sizes."""
        return types.UniTuple(types.int64, table.dimensions)


@infer_getattr
class RecordAttributes(AttributeTemplate):  # type: ignore[misc]
    """`z.unit[u].busy`."""

    key = RecordType

    def generic_resolve(self, record: Any, name: str) -> Any:
        """Return the type of a field."""
        return record.fields[name][0] if name in record.fields else None


def _item(array: Any, index: Any) -> tuple[Any, Any] | None:
    """The type of `array[index]` and that of the index; None: it is not for this module to say."""
    if isinstance(array, StretchType) and isinstance(index, types.Integer):
        return array.item, types.int64
    if isinstance(array, ColumnType) and isinstance(index, types.SliceType):
        return StretchType(array.item, array.table.item_bytes), index
    if not isinstance(array, TableType):
        return None
    if isinstance(index, types.StringLiteral):
        return ColumnType(array, index.literal_value), index
    if isinstance(index, types.SliceType) and array.dimensions == 1:
        return StretchType(array.item, array.item_bytes), index
    given = index if isinstance(index, types.BaseTuple) else (index,)
    if not all(isinstance(one, types.Integer) for one in given):
        return None
    kind = types.int64 if given[0] is index else types.UniTuple(types.int64, len(given))
    if len(given) == array.dimensions:
        return array.item, kind
    if len(given) == array.dimensions - 1:
        return StretchType(array.item, array.item_bytes), kind
    return None


@infer_global(operator.getitem)
class GetItem(AbstractTemplate):  # type: ignore[misc]
    """`array[index]`."""

    prefer_literal = True

    def generic(self, args: Any, _kws: Any) -> Any:
        """Return the types of it."""
        found = _item(*args)
        return signature(found[0], args[0], found[1]) if found else None


@infer_global(operator.setitem)
class SetItem(AbstractTemplate):  # type: ignore[misc]
    """`array[index] = value`."""

    def generic(self, args: Any, _kws: Any) -> Any:
        """Return the types of it."""
        found = _item(*args[:2])
        return signature(types.none, args[0], found[1], found[0]) if found else None


@infer_global(len)
class Length(AbstractTemplate):  # type: ignore[misc]
    """`len(array)`."""

    def generic(self, args: Any, _kws: Any) -> Any:
        """Return the types of it."""
        if isinstance(args[0], TableType | StretchType):
            return signature(types.int64, args[0])
        return None


# The code that is made of it.


def _word(builder: Any, tables: Any, at: int, kind: Any) -> Any:
    """Read a number of the list of arrays, which never changes while compiled code runs."""
    words = builder.bitcast(tables, kind.as_pointer())
    read = builder.load(builder.gep(words, [ir.Constant(_LONG, at)], inbounds=True))
    read.set_metadata("invariant.load", builder.module.add_metadata([]))
    return read


def _place(builder: Any, kind: TableType, tables: Any, index: list[Any]) -> Any:
    """The address of an item, or of the first item of a row where the last index is left out."""
    base = kind.at * WORDS
    flat = index[0]
    for axis in range(1, kind.dimensions):
        flat = builder.mul(flat, _word(builder, tables, base + 1 + axis, _LONG))
        if axis < len(index):
            flat = builder.add(flat, index[axis])
    offset = builder.mul(flat, ir.Constant(_LONG, kind.item_bytes))
    return builder.gep(_word(builder, tables, base, _BYTES), [offset], inbounds=True)


def _read(context: Any, builder: Any, kind: Any, place: Any) -> Any:
    if isinstance(kind, RecordType):
        return place
    model = context.data_model_manager[kind]
    typed = builder.bitcast(place, model.get_data_type().as_pointer())
    return model.from_data(builder, builder.load(typed))


def _write(context: Any, builder: Any, kind: Any, place: Any, value: Any) -> None:
    if isinstance(kind, RecordType):
        cgutils.raw_memcpy(
            builder, place, value, ir.Constant(_LONG, 1), kind.dtype.itemsize, align=8
        )
        return
    model = context.data_model_manager[kind]
    typed = builder.bitcast(place, model.get_data_type().as_pointer())
    builder.store(model.as_data(builder, value), typed)


def _stretch(context: Any, builder: Any, kind: Any, first: Any, size: Any) -> Any:
    made = cgutils.create_struct_proxy(kind)(context, builder)
    made.data = first
    made.size = size
    return made._getvalue()


def _stretch_place(context: Any, builder: Any, kind: StretchType, value: Any, index: Any) -> Any:
    data = cgutils.create_struct_proxy(kind)(context, builder, value=value).data
    offset = builder.mul(index, ir.Constant(_LONG, kind.stride))
    return builder.gep(data, [offset], inbounds=True)


def _indices(builder: Any, kind: Any, value: Any) -> list[Any]:
    return cgutils.unpack_tuple(builder, value) if isinstance(kind, types.BaseTuple) else [value]


def opener_of(sim: SimType) -> Any:
    """Return the compiled function that makes a run of a table of its arrays."""

    @intrinsic
    def sim_at(_typing: Any, table: Any) -> Any:
        def codegen(context: Any, builder: Any, given: Any, args: Any) -> Any:
            array = context.make_array(given.args[0])(context, builder, args[0])
            return builder.bitcast(array.data, cgutils.voidptr_t)

        return sim(table), codegen

    return sim_at


sim_at = opener_of(SimType("Sim", LAYOUT))


@lower_getattr_generic(SimType)
def _read_sim(_context: Any, _builder: Any, _kind: Any, value: Any, _name: str) -> Any:
    return value


@lower_getattr_generic(TableType)
def _read_shape(context: Any, builder: Any, kind: Any, value: Any, _name: str) -> Any:
    sizes = [
        _word(builder, value, kind.at * WORDS + 1 + axis, _LONG) for axis in range(kind.dimensions)
    ]
    return context.make_tuple(builder, types.UniTuple(types.int64, kind.dimensions), sizes)


@lower_getattr_generic(RecordType)
def _read_field(context: Any, builder: Any, kind: Any, value: Any, name: str) -> Any:
    field, offset = kind.fields[name]
    place = builder.gep(value, [ir.Constant(_LONG, offset)], inbounds=True)
    return _read(context, builder, field, place)


@lower_setattr_generic(RecordType)
def _write_field(context: Any, builder: Any, given: Any, args: Any, name: str) -> None:
    field, offset = given.args[0].fields[name]
    place = builder.gep(args[0], [ir.Constant(_LONG, offset)], inbounds=True)
    _write(context, builder, field, place, args[1])


@lower_builtin(operator.getitem, TableType, types.Any)
def _read_item(context: Any, builder: Any, given: Any, args: Any) -> Any:
    kind, index = given.args
    if isinstance(index, types.StringLiteral):
        return args[0]
    if isinstance(index, types.SliceType):
        return _slice(context, builder, given, args, kind, 0)
    place = _place(builder, kind, args[0], _indices(builder, index, args[1]))
    if isinstance(given.return_type, StretchType):
        size = _word(builder, args[0], kind.at * WORDS + kind.dimensions, _LONG)
        return _stretch(context, builder, given.return_type, place, size)
    return _read(context, builder, kind.item, place)


@lower_builtin(operator.getitem, ColumnType, types.SliceType)
def _read_column(context: Any, builder: Any, given: Any, args: Any) -> Any:
    column = given.args[0]
    return _slice(context, builder, given, args, column.table, column.offset)


def _slice(context: Any, builder: Any, given: Any, args: Any, table: TableType, offset: int) -> Any:
    cut = context.make_helper(builder, given.args[1], args[1])
    place = _place(builder, table, args[0], [cut.start])
    first = builder.gep(place, [ir.Constant(_LONG, offset)], inbounds=True)
    return _stretch(context, builder, given.return_type, first, builder.sub(cut.stop, cut.start))


@lower_builtin(operator.setitem, TableType, types.Any, types.Any)
def _write_item(context: Any, builder: Any, given: Any, args: Any) -> Any:
    kind, index, _ = given.args
    place = _place(builder, kind, args[0], _indices(builder, index, args[1]))
    _write(context, builder, kind.item, place, args[2])
    return context.get_dummy_value()


@lower_builtin(operator.getitem, StretchType, types.int64)
def _read_stretch(context: Any, builder: Any, given: Any, args: Any) -> Any:
    place = _stretch_place(context, builder, given.args[0], args[0], args[1])
    return _read(context, builder, given.args[0].item, place)


@lower_builtin(operator.setitem, StretchType, types.int64, types.Any)
def _write_stretch(context: Any, builder: Any, given: Any, args: Any) -> Any:
    place = _stretch_place(context, builder, given.args[0], args[0], args[1])
    _write(context, builder, given.args[0].item, place, args[2])
    return context.get_dummy_value()


@lower_builtin(len, TableType)
def _count_items(_context: Any, builder: Any, given: Any, args: Any) -> Any:
    return _word(builder, args[0], given.args[0].at * WORDS + 1, _LONG)


@lower_builtin(len, StretchType)
def _count_stretch(context: Any, builder: Any, given: Any, args: Any) -> Any:
    return cgutils.create_struct_proxy(given.args[0])(context, builder, value=args[0]).size
