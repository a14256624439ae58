"""How commands speak: tables for people, JSON for programs, always on stdout.

Rich is imported when a table is drawn, so a command with `--json` does not pay for it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from os import PathLike, fspath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_PIPED_WIDTH = 200


def console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr; wide when it is no terminal, so rows are not folded.

    Text is shown as it is: "[b]" in a file's name is no markup, and ":gem:" no picture.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPED_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def note(text: str) -> None:
    """Print one line on stderr, never folded; what cannot be shown in it is escaped."""
    line = " ".join(text.split())
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    if getattr(sys, "stderr", None) is not None:
        sys.stderr.write(f"{shown}\n")


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    caption: str | None = None,
    right: Iterable[str] = (),
) -> Table:
    """Return a table of plain text; columns in `right` are right-aligned, None shows as "-"."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    aligned_right = frozenset(right)
    drawn = Table(title=title, caption=caption, box=SIMPLE_HEAD, title_justify="left")
    drawn.caption_justify = "left"
    for name in columns:
        drawn.add_column(name, justify="right" if name in aligned_right else "left")
    for row in rows:
        # Text, not str: a value like "[llm]" is not markup.
        drawn.add_row(*(Text("-" if value is None else str(value)) for value in row))
    return drawn


def tighten(drawn: Table) -> Table:
    """Leave less space between the columns of a table, for those that would not fit a terminal."""
    drawn.padding, drawn.pad_edge = (0, 1, 0, 0), False
    return drawn


def emit(
    data: object,
    as_json: bool,
    human: RenderableType | Callable[[], RenderableType] | None = None,
) -> None:
    """Print `data` as JSON, or for people as `human` (a renderable, or a function that makes one).

    Without `human`, a list of records becomes a table and a record a list of its fields.
    """
    if as_json:
        sys.stdout.write(to_json(data) + "\n")
        return
    drawn = human() if callable(human) else human
    console().print(drawn if drawn is not None else _draw_generic(jsonable(data)))


def to_json(data: object) -> str:
    """Write data as indented JSON text; see `jsonable` for what is understood."""
    return json.dumps(jsonable(data), indent=2, ensure_ascii=False, allow_nan=False)


def jsonable(value: object) -> object:
    """Turn a value into what JSON can hold.

    Understands dataclasses, pydantic models, mappings, sequences, named tuples (as records), sets
    (sorted), enums, paths and NumPy numbers and arrays. Infinities and NaN become null.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return jsonable(value.value)
    if isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return _convert_container(value)


def _convert_container(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(jsonable(key)): jsonable(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return jsonable(value._asdict())
    if isinstance(value, set | frozenset):
        return sorted((jsonable(item) for item in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [jsonable(item) for item in value]
    if isinstance(value, PathLike):
        return fspath(value)
    # Duck-typed, so that neither pydantic nor NumPy is imported to print a table without them.
    for method in ("model_dump", "tolist"):
        convert = getattr(value, method, None)
        if callable(convert):
            return jsonable(convert())
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def _draw_generic(data: object) -> RenderableType:
    if isinstance(data, list) and data and all(isinstance(row, dict) for row in data):
        columns = list(dict.fromkeys(key for row in data for key in row))
        return table(columns, [[_format_cell(row.get(key)) for key in columns] for row in data])
    if isinstance(data, dict):
        return table(
            ("field", "value"), [(key, _format_cell(value)) for key, value in data.items()]
        )
    return "(nothing)" if data in ([], None) else str(data)


def _format_cell(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
