"""Inputs of components in a form that can be compared: equal forms are the same bits.

Numbers of different types differ (1, 1.0, True), and so do 0.0 and -0.0; a NaN equals itself. Placeholders
are told apart by position, not by what they stand for. Keys of dictionaries have no order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from hashlib import blake2b
from typing import Any, TypeAlias

from atoll.core.errors import InputError, UsageError
from atoll.tasks.pending import Pending, PendingStream, ValueBook
from atoll.tasks.values import Handle

Form: TypeAlias = object
"""Hashable plain data: texts, numbers and nested tuples."""
_DEEPEST = 64
UNCHANGING = frozenset({str, int, bool, float, bytes, type(None), Handle})
"""Types of values that nobody can change: the same object is the same value."""


def form_of(value: Any) -> Form:
    """Return the form of a snapshot."""
    kind = type(value)
    if kind is Pending or kind is PendingStream:
        return (Pending, value._number, *value._path)
    if kind is bool:
        return (bool, value)
    if kind is float:
        return (float, value.hex())
    if kind is list:
        return (list, *[form_of(item) for item in value])
    if kind is dict:
        return (dict, *[(key, form_of(value[key])) for key in sorted(value)])
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):  # an array, where all is one process
        digest = blake2b(value.tobytes(), digest_size=16).digest()
        return ("array", str(value.dtype), tuple(value.shape), digest)
    return value


def snapshot(value: Any, book: ValueBook, found: list[Pending], depth: int = 0) -> Any:
    """Return a copy as plain data, which no later change of lists and dictionaries reaches.

    Placeholders stay, and are added to `found`. Raises InputError for what no component can be handed.
    """
    kind = type(value)
    if kind in UNCHANGING:
        return value
    if kind is Pending or kind is PendingStream:
        check_origin(value, book)
        found.append(value)
        return value
    if depth >= _DEEPEST:
        raise InputError(f"values nested deeper than {_DEEPEST} are not passed on")
    depth += 1
    if kind is list or kind is tuple:
        return [snapshot(item, book, found, depth) for item in value]
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise InputError(f"keys must be texts, not {type(key).__name__}")
        return {key: snapshot(item, book, found, depth) for key, item in value.items()}
    if isinstance(value, str | int | float | bytes):
        return _plain(value)
    if isinstance(value, list | tuple | dict):
        return snapshot(_plain(value), book, found, depth)
    if is_dataclass(value) and not isinstance(value, type):
        return snapshot(_by_name(value), book, found, depth)
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        return value
    raise InputError(f"a {kind.__name__} cannot be handed to a component")


def check_origin(pending: Pending, book: ValueBook) -> None:
    """Raise UsageError for a placeholder of another request."""
    if pending._book is not book:
        raise UsageError(
            "a placeholder of another request was passed on",
            hint="keep nothing on the task between requests",
        )


def copy_value(value: Any) -> Any:
    """Return a copy of what a component gave: new lists and dictionaries, all else as it is."""
    if type(value) is list:
        return [copy_value(item) for item in value]
    if type(value) is dict:
        return {key: copy_value(item) for key, item in value.items()}
    return value


def _plain(value: Any) -> Any:
    """Return an instance of a subclass of a plain type as the plain type."""
    kind: Any
    for kind in (str, int, float, bytes):
        if isinstance(value, kind):
            return kind.__new__(kind, value)
    for kind in (list, tuple, dict):
        if isinstance(value, kind):
            return kind(value)
    return value


def _by_name(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def fill(value: Any, known: Callable[[Pending], Any]) -> Any:
    """Return a snapshot with every placeholder replaced by what is known of it."""
    kind = type(value)
    if kind is Pending or kind is PendingStream:
        return known(value)
    if kind is list:
        return [fill(item, known) for item in value]
    if kind is dict:
        return {key: fill(item, known) for key, item in value.items()}
    return value


def fill_answer(value: Any, known: Callable[[Pending], Any]) -> Any:
    """Return an answer with every placeholder replaced; dataclasses stay what they are."""
    kind = type(value)
    if kind is Pending or kind is PendingStream:
        return known(value)
    if kind is list:
        return [fill_answer(item, known) for item in value]
    if kind is dict:
        return {key: fill_answer(item, known) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [fill_answer(item, known) for item in value]
        return kind(*items) if hasattr(value, "_fields") else tuple(items)
    if is_dataclass(value) and not isinstance(value, type) and kind is not Handle:
        parts = {
            field.name: fill_answer(getattr(value, field.name), known)
            for field in fields(value)
            if field.init
        }
        return replace(value, **parts)
    return value


def answer_parts(
    value: Any, path: tuple[str | int, ...] = ()
) -> list[tuple[tuple[str | int, ...], Any]]:
    """Return the leaves of an answer with their paths: placeholders, plain values and empty containers."""
    kind = type(value)
    if kind is Pending or kind is PendingStream or kind is Handle:
        return [(path, value)]
    inner: list[tuple[str | int, Any]] = []
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        inner = list(zip(value._fields, value, strict=True))
    elif isinstance(value, list | tuple):
        inner = list(enumerate(value))
    elif isinstance(value, dict):
        inner = [(key if type(key) is int else str(key), item) for key, item in value.items()]
    elif is_dataclass(value) and not isinstance(value, type):
        inner = list(_by_name(value).items())
    if not inner:
        return [(path, value)]
    return [part for key, item in inner for part in answer_parts(item, (*path, key))]


def show_form(form: Form, max_letters: int = 60) -> str:
    """Return a form as people would write it, of at most about `max_letters` characters."""
    text = _show(form)
    return text if len(text) <= max_letters else f"{text[: max_letters - 3]}..."


def _show(form: Form) -> str:
    if isinstance(form, tuple) and form:
        kind, *rest = form
        if kind is Pending:
            return f"#{rest[0]}{''.join(f'[{key!r}]' for key in rest[1:])}"
        if kind is bool:
            return repr(rest[0])
        if kind is float:
            return repr(float.fromhex(str(rest[0])))
        if kind is list:
            return f"[{', '.join(map(_show, rest))}]"
        if kind is dict:
            return "{" + ", ".join(f"{pair[0]!r}: {_show(pair[1])}" for pair in _pairs(rest)) + "}"
    return repr(form)


def _pairs(items: list[Any]) -> list[tuple[str, Form]]:
    return [(key, form) for key, form in items]
