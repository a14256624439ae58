"""Values that are still to come: passed on freely, and looked at only when they are there."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from atoll.core.errors import InputError

Path = tuple[str | int, ...]
"""A part of a value: keys and positions, from the outside in."""


class RoundOver(BaseException):
    """The code looked at a value that is not there yet. No `Exception`, so that nobody catches it."""


class ValueBook(Protocol):
    """Who knows the values behind placeholders."""

    running: bool
    """Whether the code of a task is running on it."""

    def look(self, number: int) -> Any:
        """Return what entry `number` gave, or end the round."""
        ...


class Pending:
    """Future result of an invocation, or a part of it.

    It may be stored, passed on and returned. `pending["text"]` is a part of it, and pending too. Everything
    else looks at it: truth, length, comparing, iterating, str(), arithmetic, isinstance(), attributes.
    """

    __slots__ = ("_book", "_number", "_part", "_parts", "_path")

    def __init__(self, book: ValueBook, number: int, path: Path = ()) -> None:
        self._book = book
        self._number = number
        self._path = path
        self._part: Pending | None = None
        """The part that was asked for first: mostly there is one, and no dictionary is needed."""
        self._parts: dict[str | int, Pending] | None = None

    def __getitem__(self, key: Any) -> Any:
        kind = type(key)
        if kind is not str and kind is not int:
            return look_at(self)[key]
        # The same part is the same object, in later rounds too: replays compare by identity first.
        part = self._part
        if part is None:
            path = self._path
            part = Pending(self._book, self._number, (*path, key) if path else (key,))
            self._part = part
            return part
        if part._path[-1] == key:
            return part
        return self._find_part(key)

    def _find_part(self, key: str | int) -> Pending:
        parts = self._parts
        if parts is None:
            parts = self._parts = {}
        part = parts.get(key)
        if part is None:
            part = parts[key] = Pending(self._book, self._number, (*self._path, key))
        return part

    def __getattr__(self, name: str) -> Any:
        if not self._book.running:
            raise AttributeError(f"{describe(self)} has no {name!r}: it is a placeholder")
        return getattr(look_at(self), name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # What isinstance() asks, which would otherwise quietly say no.
        return type(look_at(self)) if self._book.running else type(self)

    def __copy__(self) -> Pending:
        # A copy would stand for the same value and be another object, and replays compare by identity.
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> Pending:
        return self

    def __repr__(self) -> str:
        return repr(look_at(self)) if self._book.running else f"<pending {describe(self)}>"

    def __str__(self) -> str:
        return str(look_at(self))

    def __format__(self, spec: str) -> str:
        return format(look_at(self), spec)

    def __iter__(self) -> Iterator[Any]:
        return iter(look_at(self))

    def __contains__(self, item: Any) -> bool:
        return item in look_at(self)

    def __hash__(self) -> int:
        return hash(look_at(self))

    def __eq__(self, other: object) -> bool:
        return bool(look_at(self) == open_up(other))

    def __ne__(self, other: object) -> bool:
        return bool(look_at(self) != open_up(other))

    def __round__(self, digits: int | None = None) -> Any:
        return round(look_at(self), digits)


class PendingStream(Pending):
    """A stream that will come: passed on piece by piece, looked at as a whole."""

    __slots__ = ()


def is_pending(value: object) -> bool:
    """Return whether a value is a placeholder, without looking at it."""
    kind = type(value)
    return kind is Pending or kind is PendingStream


def describe(pending: Pending) -> str:
    """Return which value it stands for, as "#3['text']"."""
    return f"#{pending._number}{''.join(f'[{key!r}]' for key in pending._path)}"


def look_at(pending: Pending) -> Any:
    """Return the value behind a placeholder, or end the round."""
    value = pending._book.look(pending._number)
    for key in pending._path:
        value = value[key]
    return value


def open_up(value: Any) -> Any:
    """Return a value, or what is behind it if it is a placeholder; may end the round."""
    return look_at(value) if is_pending(value) else value


def project(value: Any, pending: Pending) -> Any:
    """Return the part of `value` that a placeholder names; InputError if there is no such part."""
    try:
        for key in pending._path:
            value = value[key]
    except (KeyError, IndexError, TypeError) as error:
        raise InputError(
            f"there is no such part: {type(error).__name__} {error}", field=describe(pending)
        ) from error
    return value


def _looking(function: Callable[..., Any]) -> Callable[..., Any]:
    def look(self: Pending, *others: Any) -> Any:
        return function(look_at(self), *map(open_up, others))

    return look


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    def look(self: Pending, other: Any) -> Any:
        return function(other, look_at(self))

    return look


_UNARY: dict[str, Callable[..., Any]] = {
    "bool": bool,
    "len": len,
    "int": int,
    "float": float,
    "complex": complex,
    "bytes": bytes,
    "reversed": reversed,
    "index": operator.index,
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": operator.abs,
    "invert": operator.invert,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_BINARY: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "divmod": divmod,
    "pow": pow,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "matmul": operator.matmul,
}
for _name, _function in _UNARY.items():
    setattr(Pending, f"__{_name}__", _looking(_function))
for _name, _function in _BINARY.items():
    setattr(Pending, f"__{_name}__", _looking(_function))
    setattr(Pending, f"__r{_name}__", _reflected(_function))
