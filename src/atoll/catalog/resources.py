"""Reading the data files that ship inside the package."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import cast

from atoll.catalog.facts import Confidence, Fact, Scalar
from atoll.core.errors import InternalError

Table = dict[str, object]


def data_text(name: str) -> str:
    """The text of one packaged data file."""
    return (files("atoll.catalog") / "data" / name).read_text(encoding="utf-8")


@cache
def data_yaml(name: str) -> Table:
    """One packaged YAML file, parsed once. Treat the result as read-only."""
    import yaml

    # Our own files need no duplicate-key check (a test does that); libyaml is ten times faster.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loaded = yaml.load(data_text(name), Loader=loader)  # noqa: S506  safe either way
    if not isinstance(loaded, dict):
        raise InternalError(f"packaged file {name} is not a mapping")
    return cast(Table, loaded)


def section(table: Mapping[str, object], key: str) -> Table:
    """A sub-mapping, empty where absent."""
    value = table.get(key)
    return cast(Table, value) if isinstance(value, dict) else {}


def fact_of(entry: object, sources: Mapping[str, object]) -> Fact:
    """Expand `[value, source key, confidence]` into a Fact with the source's full text."""
    if not (isinstance(entry, list) and len(entry) == 3):
        raise InternalError(f"packaged fact {entry!r} is not [value, source, confidence]")
    value, key, confidence = entry
    return Fact(cast(Scalar, value), str(sources.get(key, key)), cast(Confidence, confidence))
