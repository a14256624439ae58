"""Trace formats as tables: which column holds what, and how time is written.

| format | file | time |
|---|---|---|
| azure | `TIMESTAMP,ContextTokens,GeneratedTokens` (2023 and 2024) | date and time; from the first |
| burstgpt | `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type` | seconds |
| plain | `arrival_s,input_tokens,output_tokens`, maybe `model,class,items,prefix_block_ids_512` | seconds |
| mooncake | JSON lines of `timestamp,input_length,output_length,hash_ids` | milliseconds |
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import numpy as np

from atoll.core.errors import InputError, UnknownNameError
from atoll.workload.requests import Floats, Longs

_FRACTION = ".0123456789"
TimeKind = Literal["seconds", "date", "none"]
_PREFIX = re.compile(r"prefix_block_ids_([1-9][0-9]{0,6})")
_UTC = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{1,9})?", re.ASCII)
_DATE = re.compile(
    r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class CsvFormat:
    """Names of the columns of a CSV format; each field lists the names it may have."""

    name: str
    time: tuple[str, ...]
    time_kind: TimeKind
    input: tuple[str, ...]
    output: tuple[str, ...]
    model: tuple[str, ...] = ()
    klass: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    failed_if_no_output: bool = False
    """Whether an answer of 0 tokens is a failed request, left out, rather than a bad row."""


AZURE = CsvFormat("azure", ("TIMESTAMP",), "date", ("ContextTokens",), ("GeneratedTokens",))
BURSTGPT = CsvFormat(
    "burstgpt",
    ("Timestamp",),
    "seconds",
    ("Request tokens",),
    ("Response tokens",),
    model=("Model",),
    also=("Total tokens", "Log Type", "Session ID", "Elapsed time"),
    failed_if_no_output=True,
)
PLAIN = CsvFormat(
    "plain",
    ("arrival_s",),
    "seconds",
    ("input_tokens",),
    ("output_tokens",),
    model=("model",),
    klass=("class",),
    items=("items", "image_count"),
)
CSV_FORMATS = (AZURE, BURSTGPT, PLAIN)
LENGTHS = CsvFormat("lengths", (), "none", ("input_tokens",), ("output_tokens",))
"""Pairs of lengths without arrivals; nothing is taken for it unless asked for by name."""
MOONCAKE = "mooncake"
FORMATS = (*(each.name for each in CSV_FORMATS), MOONCAKE)


@dataclass(frozen=True, slots=True)
class Columns:
    """Where the columns of a format stand in one file; None where absent."""

    format: CsvFormat
    header: tuple[str, ...]
    time: int | None
    input: int
    output: int
    model: int | None
    klass: int | None
    items: int | None
    prefix: int | None
    block_tokens: int

    @property
    def ignored(self) -> tuple[str, ...]:
        """Columns that nothing is read from and that the format does not name."""
        used = {self.time, self.input, self.output, self.model, self.klass, self.items, self.prefix}
        return tuple(
            name
            for at, name in enumerate(self.header)
            if at not in used and name not in self.format.also
        )


def detect(first: str, wanted: str | None, path: str) -> Columns | None:
    """Return the columns of a CSV whose first line is `first`; None for JSON lines."""
    if wanted not in (None, LENGTHS.name, *FORMATS):
        raise UnknownNameError("trace format", str(wanted), FORMATS)
    if wanted == MOONCAKE or (wanted is None and first.lstrip().startswith("{")):
        return None
    header = tuple(name.strip().strip('"') for name in first.split(","))
    formats = [
        each
        for each in (*CSV_FORMATS, LENGTHS)
        if wanted == each.name or (wanted is None and each is not LENGTHS)
    ]
    for each in formats:
        columns = _columns(each, header)
        if columns is not None:
            return columns
    if wanted is None and PLAIN.input[0] in header and PLAIN.output[0] in header:
        raise InputError(
            "there are lengths but no arrivals (no column arrival_s)",
            path=path,
            line=1,
            hint="draw arrivals for them: poisson:10/s lengths=FILE for=10min",
        )
    expected = " or ".join(",".join((*each.time, *each.input, *each.output)) for each in formats)
    raise InputError(
        "the first line names no known columns",
        path=path,
        line=1,
        hint=f"a trace has the columns {expected}, or is JSON lines",
    )


def _columns(csv_format: CsvFormat, header: tuple[str, ...]) -> Columns | None:
    def find(names: tuple[str, ...]) -> int | None:
        return next((header.index(name) for name in names if name in header), None)

    time, prompts, answers = find(csv_format.time), find(csv_format.input), find(csv_format.output)
    if prompts is None or answers is None or (time is None and csv_format.time_kind != "none"):
        return None
    matches = [(at, _PREFIX.fullmatch(name)) for at, name in enumerate(header)]
    prefix, block = next(((at, int(m[1])) for at, m in matches if m is not None), (None, 512))
    return Columns(
        csv_format,
        header,
        time,
        prompts,
        answers,
        find(csv_format.model),
        find(csv_format.klass),
        find(csv_format.items),
        prefix,
        block,
    )


def numbers(texts: Sequence[str]) -> Floats:
    """Read numbers; NaN where the text is none."""
    try:
        return np.array(texts, dtype=np.float64)
    except ValueError:
        return np.array([_number(text) for text in texts])


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def dates(texts: Sequence[str]) -> Floats:
    """Read dates with times into seconds since 1970, UTC unless they say otherwise; NaN where none."""
    plain = [text.removesuffix("+00:00").removesuffix("Z") for text in texts]
    if all(_UTC.fullmatch(text) for text in plain):
        with contextlib.suppress(ValueError):  # a month 13, say, which is looked at one by one
            whole: Longs = np.array(plain, dtype="datetime64[ns]").astype(np.int64)
            return np.multiply(whole, 1e-9, dtype=np.float64)
    return np.array([_date(text) for text in texts])


def zones(texts: Sequence[str]) -> dict[str, int]:
    """Return the time zones that dates end with ("Z", "+02:00", "" for none), each with its first place."""
    found: dict[str, int] = {}
    for at, text in enumerate(texts):
        zone = text[19:].lstrip(_FRACTION)  # what follows the seconds
        if zone not in found and _DATE.fullmatch(text) is not None:
            found[zone] = at
    return found


def _date(text: str) -> float:
    if _DATE.fullmatch(text) is None:
        return float("nan")
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        return float("nan")
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
