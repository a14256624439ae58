"""Values of which nothing is known: code that runs on them is followed down all its ways.

Asking a sketch something (is it true? is it 3? is it a text?) is a fork: the code is run for each answer.
Within one way, the same question has the same answer. Lists have one element.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

MAX_WAYS = 512
"""The most ways that are followed."""
MAX_FORKS = 48
"""The most forks of one way; longer ones are left."""
_KINDS = (list, str, dict)


class LostWayError(Exception):
    """A way with more forks than are followed."""


class Crossroads(Protocol):
    """Who decides, and is told what the code asked about."""

    def decide(self, question: tuple[Any, ...], answers: int) -> int:
        """Return the answer to a question: 0..answers-1, the same for the same question."""
        ...

    def note_look(self, origins: frozenset[int]) -> None:
        """Hear that the code looked at what came of these steps."""
        ...


class Sketch:
    """A value that could be anything. name: where it is from, in words; origins: the steps it came of."""

    __slots__ = ("_name", "_origins", "_streams", "_ways")

    def __init__(
        self,
        ways: Crossroads,
        name: str,
        origins: frozenset[int] = frozenset(),
        streams: bool = False,
    ) -> None:
        self._ways = ways
        self._name = name
        self._origins = origins
        self._streams = streams

    def _part(self, name: str) -> Sketch:
        return Sketch(self._ways, name, self._origins)

    def _ask(self, question: object, answers: int = 2) -> int:
        self._ways.note_look(self._origins)
        return self._ways.decide((self._name, question), answers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "get":
            return lambda key, default=None: self[key]  # noqa: ARG005 - it is there
        if name in ("items", "keys", "values"):
            return getattr({"key": self["key"]}, name)
        return self._part(f"{self._name}.{name}")

    def __getitem__(self, key: Any) -> Any:
        return self._part(f"{self._name}[{key!r}]")

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Return what could come of calling it."""
        origins = self._origins | origins_of(given) | origins_of(named)
        return Sketch(self._ways, f"{self._name}()", origins)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _KINDS[self._ask("kind", len(_KINDS))]

    def __iter__(self) -> Iterator[Any]:
        self._ways.note_look(self._origins)
        yield self[0]

    def __bool__(self) -> bool:
        return self._ask("true") == 0

    def __contains__(self, item: Any) -> bool:
        return self._ask(f"has {_name(item)}") == 0

    def __eq__(self, other: object) -> bool:
        return self._ask(("is", _name(other))) == 0

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._name)

    def __len__(self) -> int:
        self._ways.note_look(self._origins)
        return 1

    def __repr__(self) -> str:
        return f"<{self._name}>"

    def __str__(self) -> str:
        self._ways.note_look(self._origins)
        return f"<{self._name}>"

    def __format__(self, spec: str) -> str:
        return str(self)

    def __int__(self) -> int:
        return len(self)

    def __index__(self) -> int:
        return len(self)

    def __float__(self) -> float:
        return float(len(self))


def _name(value: object) -> str:
    return value._name if type(value) is Sketch else repr(value)


def _computed(function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(self: Sketch, *others: Any) -> Any:
        name = f"{function.__name__}({', '.join(map(_name, (self, *others)))})"
        return Sketch(self._ways, name, self._origins | origins_of(others))

    return compute


def _compared(function: Callable[..., Any]) -> Callable[..., bool]:
    def compare(self: Sketch, other: Any) -> bool:
        return self._ask((function.__name__, _name(other))) == 0

    return compare


for _each in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Sketch, f"__{_each}__", _computed(getattr(operator, _each)))
    setattr(Sketch, f"__r{_each}__", _computed(getattr(operator, _each)))
for _each in ("neg", "abs"):
    setattr(Sketch, f"__{_each}__", _computed(getattr(operator, _each)))
for _each in ("lt", "le", "gt", "ge"):
    setattr(Sketch, f"__{_each}__", _compared(getattr(operator, _each)))


def sketches_in(value: Any) -> Iterable[Sketch]:
    """Yield the sketches in a value, in lists, dictionaries and dataclasses too."""
    if type(value) is Sketch:
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from sketches_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from sketches_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from sketches_in(getattr(value, field.name))


def origins_of(value: Any) -> frozenset[int]:
    """Return the steps that a value came of."""
    return frozenset(origin for sketch in sketches_in(value) for origin in sketch._origins)
