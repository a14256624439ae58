"""Looking names up the way people write them: any case, with or without spaces and hyphens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from atoll.core.errors import UnknownNameError

T = TypeVar("T")


def fold(name: str) -> str:
    """The form names are compared in: "RTX 3090", "rtx-3090" and "RTX3090" are one name."""
    return name.lower().translate(_DROP)


_DROP = str.maketrans("", "", " -_\t")


def printable(name: object) -> str:
    """A key of a file as it may stand in a one-line error."""
    text = str(name)
    return text if text.isprintable() else repr(text)


def index_names(entries: Iterable[tuple[str, Iterable[str]]]) -> dict[str, str]:
    """Map the folded form of every name and alias to its canonical name.

    Canonical names win over aliases, and an earlier entry's alias wins over a later one's.
    """
    pairs = [(name, tuple(aliases)) for name, aliases in entries]
    index = {fold(name): name for name, _ in pairs}
    for name, aliases in pairs:
        for alias in aliases:
            index.setdefault(fold(alias), name)
    return index


def find(name: str, table: Mapping[str, T], index: Mapping[str, str]) -> T | None:
    """The entry called `name` in any spelling, None if there is none."""
    canonical = name if name in table else index.get(fold(name))
    return None if canonical is None else table[canonical]


def look_up(kind: str, name: str, table: Mapping[str, T], index: Mapping[str, str]) -> T:
    """The entry called `name`, else UnknownNameError suggesting the nearest known names."""
    found = find(name, table, index)
    if found is None:
        raise UnknownNameError(kind, name, table)
    return found
