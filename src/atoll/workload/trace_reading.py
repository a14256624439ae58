"""Reading trace files line by line: compressed or not, limited in size, with every bad row accounted for."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from atoll.core.errors import InputError, shorten
from atoll.core.files import unreadable

BLOCK_BYTES = 4 * 2**20
MAX_LINE_BYTES = 2**20
MAX_BYTES = 64 * 2**30
"""Most bytes of text that a trace may hold, once unpacked."""
MAX_ROWS = 1_000_000_000
BAD_LIMIT = 1_000
"""Bad rows after which reading stops: the file is probably not what it seems."""
_EXAMPLES = 20
_UTC_ZONES = frozenset(("Z", "+00:00", "-00:00", "+0000", "-0000"))


@dataclass(slots=True)
class RowReport:
    """Rows of a trace: read, bad (with examples), left out on purpose, reordered.

    `rows` counts data rows; `reasons` counts bad rows by what is wrong; `examples` holds the first bad
    rows as (line, what is wrong). `left_out` counts rows that are no requests, such as failed ones. `zones`
    has the time zones of dates with the line of the first, "" for those that state none.
    """

    path: str
    strict: bool = False
    bad_limit: int = BAD_LIMIT
    rows: int = 0
    bad: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    examples: list[tuple[int, str]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    reordered: int = 0
    zones: dict[str, int] = field(default_factory=dict)
    ignored_columns: tuple[str, ...] = ()

    def bad_row(self, line: int, column: str, what: str, text: str = "") -> None:
        """Count a bad row; the first is an error if `strict`, and so is one too many."""
        shown = f"{shorten(text)!r} {what}" if text else what
        detail = f"{column}: {shown}" if column else shown
        if self.strict:
            raise InputError(shown, path=self.path, line=line, field=column or None)
        self.bad += 1
        reason = f"{column}: {what}" if column else what
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append((line, detail))
        if self.bad > self.bad_limit:
            first_line, first = self.examples[0]
            raise InputError(
                f"more than {self.bad_limit:,} bad rows; the first is at line {first_line}: {first}",
                path=self.path,
                line=line,
                hint="check the format, or raise the limit on bad rows",
            )

    def leave_out(self, reason: str, count: int = 1) -> None:
        """Count rows that are well formed and still no requests."""
        if count:
            self.left_out[reason] = self.left_out.get(reason, 0) + count

    def note_zones(self, zones: dict[str, int]) -> None:
        """Take the time zones of some dates, by line; an error if only some of the dates state theirs."""
        for zone, line in zones.items():
            self.zones.setdefault(zone, line)
        if "" in self.zones and len(self.zones) > 1:
            zone = next(name for name in self.zones if name)
            raise InputError(
                f"some times state their time zone ({zone} at line {self.zones[zone]}) and others do not "
                f"(line {self.zones['']})",
                path=self.path,
                hint="state it in all rows, such as 2026-11-30T12:00:00+02:00, or in none",
            )

    @property
    def is_mixed(self) -> bool:
        """Whether dates were of several time zones; they were all converted to UTC."""
        return len({"Z" if zone in _UTC_ZONES else zone for zone in self.zones}) > 1

    @property
    def accepted(self) -> int:
        """Rows that became requests."""
        return self.rows - self.bad - sum(self.left_out.values())


def line_blocks(path: str | os.PathLike[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of a UTF-8 text file, `.gz` or plain, as (number of the first, lines).

    Line ends are taken off. Limits: 64 GiB of text, 1 MiB a line.
    """
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
            yield from _blocks(stream, path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            "the compressed file is damaged or cut short", path=path, hint="fetch it again"
        ) from error
    except OSError as error:
        raise unreadable(error, path) from error


def _blocks(stream: BinaryIO, path: str | os.PathLike[str]) -> Iterator[tuple[int, list[str]]]:
    number, rest, total = 1, b"", 0
    while block := stream.read(BLOCK_BYTES):
        total += len(block)
        if total > MAX_BYTES:
            raise InputError(
                f"the trace holds more than {MAX_BYTES} bytes", path=path, hint="split it"
            )
        whole, newline, tail = block.rpartition(b"\n")
        if newline:
            lines = _decode(rest + whole, path, number)
            yield number, lines
            number, rest = number + len(lines), tail
        else:
            rest += tail
        if len(rest) > MAX_LINE_BYTES:
            raise _too_long(path, number)
    if rest:
        yield number, _decode(rest, path, number)


def _too_long(path: str | os.PathLike[str], number: int) -> InputError:
    hint = "check that it is a trace, one request a line"
    return InputError(
        f"a line of more than {MAX_LINE_BYTES} bytes", path=path, line=number, hint=hint
    )


def _decode(data: bytes, path: str | os.PathLike[str], number: int) -> list[str]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = number + data.count(b"\n", 0, error.start)
        raise InputError(
            "the file is not UTF-8 text", path=path, line=line, hint="save it as UTF-8"
        ) from error
    if "\r" in text:
        text = text.replace("\r\n", "\n").removesuffix("\r")
    lines = text.split("\n")
    if number == 1:
        lines[0] = lines[0].removeprefix("\ufeff")
    if max(map(len, lines)) > MAX_LINE_BYTES:
        raise _too_long(path, number)
    return lines
