"""Turning lines of a trace into requests, a block at a time; what is wrong goes to the report."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import InputError, shorten
from atoll.workload.formats import Columns, dates, detect, numbers, zones
from atoll.workload.requests import (
    MAX_NAMES,
    MAX_TOKENS,
    TEXT,
    Floats,
    Longs,
    PrefixBlocks,
    Requests,
    Small,
    join_requests,
)
from atoll.workload.synthetic import IMAGE
from atoll.workload.trace_reading import MAX_ROWS, RowReport, line_blocks

HELD = 4096
"""Rows that may come out of order: one that belongs more than this many rows earlier is bad."""
Flags = NDArray[np.bool_]
_MAX_ITEMS = 10_000
_LONGEST_NAME = 200
_MOONCAKE_TOKENS = 512
"""Of a prefix block, where a trace does not say."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Some requests, and the line that each came from."""

    requests: Requests
    lines: Longs


class Names:
    """Names in order of first appearance."""

    def __init__(self, *known: str) -> None:
        self._places = {name: at for at, name in enumerate(known)}

    def indices(self, names: Sequence[str]) -> Small:
        """Return the index of each name; new names are added."""
        places = self._places
        indices = np.array([places.setdefault(name, len(places)) for name in names], np.int64)
        if len(places) > MAX_NAMES:
            raise InputError(
                f"the trace names more than {MAX_NAMES:,} models or classes",
                hint="check its columns, or merge some",
            )
        return indices.astype(np.int16)

    @property
    def all(self) -> tuple[str, ...]:
        """Every name so far."""
        return tuple(self._places)


def read_blocks(path: str, kind: str | None, report: RowReport) -> Iterator[RowBlock]:
    """Yield the requests of a trace in order of arrival, with their lines."""
    return _in_order(_parse(path, kind, report), report)


def _parse(path: str, kind: str | None, report: RowReport) -> Iterator[RowBlock]:
    parse: Callable[[Sequence[str], Longs], RowBlock | None] | None = None
    for first_line, lines in line_blocks(path):
        numbered = np.arange(first_line, first_line + len(lines))
        full = [at for at, line in enumerate(lines) if line and not line.isspace()]
        if len(full) < len(lines):
            lines, numbered = [lines[at] for at in full], numbered[full]
        if not lines:
            continue
        if parse is None:
            columns = detect(lines[0], kind, path)
            if columns is None:
                parse = _Mooncake(report)
            else:
                report.ignored_columns = columns.ignored
                parse = _Csv(columns, report)
                lines, numbered = lines[1:], numbered[1:]
        report.rows += len(lines)
        if report.rows > MAX_ROWS:
            raise InputError(
                f"the trace holds more than {MAX_ROWS:,} rows", path=path, hint="split it"
            )
        block = parse(lines, numbered) if lines else None
        if block is not None and len(block.requests):
            yield block
    if parse is None:
        raise InputError("the trace is empty", path=path, hint="name one with requests")


class _Csv:
    """Reads the rows of a CSV trace."""

    def __init__(self, columns: Columns, report: RowReport) -> None:
        self._at, self._report = columns, report
        self._models, self._classes = Names(), Names()
        self._start_s: float | None = None

    def __call__(self, lines: Sequence[str], numbered: Longs) -> RowBlock | None:
        at = self._at
        rows = [_cells(line) for line in lines]
        width = len(at.header)
        whole = [len(row) == width for row in rows]
        if not all(whole):
            for row, line, fits in zip(rows, numbered, whole, strict=True):
                if not fits:
                    self._report.bad_row(int(line), "", f"not {width} fields", f"{len(row)} fields")
            rows = [row for row, fits in zip(rows, whole, strict=True) if fits]
            numbered = numbered[np.array(whole)]
        if not rows:
            return None
        cells = list(zip(*rows, strict=True))
        times, good = self._times(cells, numbered)
        tokens = {place: numbers(cells[place]) for place in (at.input, at.output)}
        # Before the lengths are checked, which would call these rows bad.
        if at.format.failed_if_no_output:
            failed = good & (tokens[at.output] == 0)
            self._report.leave_out("failed requests (no answer)", int(failed.sum()))
            good &= ~failed
        for place, values in tokens.items():
            good &= self._check(values, 1, MAX_TOKENS, place, cells[place], numbered, good)
        items = None
        if at.items is not None:
            items = numbers(cells[at.items])
            good &= self._check(items, 0, _MAX_ITEMS, at.items, cells[at.items], numbered, good)
        prefix = None
        if at.prefix is not None:
            good, prefix = self._prefix(cells[at.prefix], numbered, good)
        keep = np.flatnonzero(good)
        requests = self._requests(cells, keep, times, tokens, items, prefix)
        return RowBlock(requests, numbered[keep])

    def _requests(
        self,
        cells: Sequence[Sequence[str]],
        keep: Longs,
        times: Floats,
        tokens: dict[int, Floats],
        items: Floats | None,
        prefix: PrefixBlocks | None,
    ) -> Requests:
        at = self._at
        if at.format.time_kind == "date" and len(keep):
            if self._start_s is None:
                # Later blocks count from the start of the first one, too.
                self._start_s = float(times[keep].min())
            times = times - self._start_s
        kept_items = None if items is None else items[keep].astype(np.int16)
        models = [""] * len(keep)
        if at.model is not None:
            column = cells[at.model]
            models = [column[row].strip()[:_LONGEST_NAME] for row in keep]
        if at.klass is not None:
            column = cells[at.klass]
            classes = [column[row].strip()[:_LONGEST_NAME] or TEXT for row in keep]
        elif kept_items is not None:
            classes = [IMAGE if count else TEXT for count in kept_items.tolist()]
        else:
            classes = [TEXT] * len(keep)
        model, klass = self._models.indices(models), self._classes.indices(classes)
        return Requests(
            times[keep],
            model,
            klass,
            tokens[at.input][keep].astype(np.int32),
            tokens[at.output][keep].astype(np.int32),
            self._models.all or ("",),
            self._classes.all or (TEXT,),
            kept_items,
            None if prefix is None else prefix.take(keep),
        )

    def _times(self, cells: Sequence[Sequence[str]], numbered: Longs) -> tuple[Floats, Flags]:
        at = self._at
        if at.time is None:
            return np.zeros(len(numbered)), np.ones(len(numbered), np.bool_)
        dated = at.format.time_kind == "date"
        texts = cells[at.time]
        times = dates(texts) if dated else numbers(texts)
        if dated:
            found = zones(texts)
            self._report.note_zones({zone: int(numbered[row]) for zone, row in found.items()})
        good = np.isfinite(times) & (times >= 0.0)
        what = f"is not {'a date and time' if dated else 'a time of 0 s or more'}"
        for row in np.flatnonzero(~good).tolist():
            self._report.bad_row(int(numbered[row]), at.header[at.time], what, texts[row] or " ")
        return times, good

    def _check(
        self,
        values: Floats,
        min_value: int,
        max_value: int,
        column: int,
        texts: Sequence[str],
        numbered: Longs,
        so_far: Flags,
    ) -> Flags:
        # NaN, for what is no number, fails every comparison.
        good: Flags = (values >= min_value) & (values <= max_value) & (values == np.floor(values))
        # A row is reported once, for the first thing that is wrong with it.
        for row in np.flatnonzero(~good & so_far).tolist():
            what = f"is not a whole number from {min_value} to {max_value:,}"
            self._report.bad_row(
                int(numbered[row]), self._at.header[column], what, texts[row] or " "
            )
        return good

    def _prefix(
        self,
        texts: Sequence[str],
        numbered: Longs,
        so_far: Flags,
    ) -> tuple[Flags, PrefixBlocks]:
        good = so_far.copy()
        ids: list[list[int]] = []
        for row, text in enumerate(texts):
            block_ids = _block_ids(text.split())
            if block_ids is None and good[row]:
                name = self._at.header[self._at.prefix or 0]
                self._report.bad_row(int(numbered[row]), name, "is not a list of block ids", text)
                good[row] = False
            ids.append(block_ids or [])
        return good, _prefixes(ids, self._at.block_tokens)


def _cells(line: str) -> list[str]:
    # Splitting is ten times faster than the csv module, and the same where nothing is quoted.
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader((line,)))
    except csv.Error:  # a field beyond the module's limit
        return []


def _block_ids(texts: Sequence[object]) -> list[int] | None:
    try:
        values = [int(text) for text in texts]  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return None
    return values if all(-(2**63) <= value < 2**63 for value in values) else None


def _prefixes(ids: Sequence[Sequence[int]], block_tokens: int) -> PrefixBlocks:
    offsets = np.concatenate(([0], np.cumsum([len(row_ids) for row_ids in ids]))).astype(np.int64)
    flat = np.array([value for row_ids in ids for value in row_ids], np.int64)
    return PrefixBlocks(offsets, flat, block_tokens)


class _Mooncake:
    """Reads JSON lines of `timestamp` (ms), `input_length`, `output_length` and `hash_ids`.

    Recordings of a gateway also have `model` and `block_tokens` (512 where it is not given).
    """

    def __init__(self, report: RowReport) -> None:
        self._report = report
        self._models = Names()
        self._block_tokens: int | None = None

    def __call__(self, lines: Sequence[str], numbered: Longs) -> RowBlock | None:
        kept: list[tuple[float, int, int, list[int], str, int]] = []
        for line, number in zip(lines, numbered.tolist(), strict=True):
            read = self._row(line, number)
            if read is not None:
                kept.append((*read, number))
        if not kept:
            return None
        times, prompts, answers, ids, names, line_numbers = zip(*kept, strict=True)
        requests = Requests.of(
            np.array(times) / 1000.0, np.array(prompts, np.int32), np.array(answers, np.int32)
        )
        prefix = _prefixes(ids, self._block_tokens or _MOONCAKE_TOKENS) if any(ids) else None
        model = self._models.indices(names)
        whole = Requests(
            requests.arrival_s, model, requests.klass, requests.input, requests.output,
            self._models.all, prefix=prefix,
        )  # fmt: skip
        return RowBlock(whole, np.array(line_numbers, np.int64))

    def _row(self, line: str, number: int) -> tuple[float, int, int, list[int], str] | None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            self._report.bad_row(number, "", "not a JSON object", shorten(line))
            return None
        time = row.get("timestamp")
        if not (_is_number(time) and 0 <= time < 1e15):
            self._report.bad_row(number, "timestamp", "is not a time of 0 ms or more", repr(time))
            return None
        lengths = []
        for name in ("input_length", "output_length"):
            tokens = row.get(name)
            if not (_is_number(tokens) and 1 <= tokens <= MAX_TOKENS and tokens == int(tokens)):
                what = f"is not a whole number from 1 to {MAX_TOKENS:,}"
                self._report.bad_row(number, name, what, repr(tokens))
                return None
            lengths.append(int(tokens))
        blocks = row.get("hash_ids") or []
        ids = _block_ids(blocks) if isinstance(blocks, list) else None
        if ids is None:
            self._report.bad_row(number, "hash_ids", "is not a list of block ids", repr(blocks))
            return None
        if ids and not self._same_blocks(row.get("block_tokens", _MOONCAKE_TOKENS), number):
            return None
        model = row.get("model", "")
        if not isinstance(model, str):
            self._report.bad_row(number, "model", "is not a name", repr(model))
            return None
        return float(time), lengths[0], lengths[1], ids, model.strip()[:_LONGEST_NAME]

    def _same_blocks(self, tokens: object, number: int) -> bool:
        """Whether blocks are as long as in the rows before."""
        known = self._block_tokens
        if known is None and type(tokens) is int and 1 <= tokens <= MAX_TOKENS:
            self._block_tokens = known = tokens
        if tokens != known:
            what = "is not a number of tokens, the same in all rows"
            self._report.bad_row(number, "block_tokens", what, repr(tokens))
        return tokens == known


def _is_number(value: object) -> TypeGuard[int | float]:
    # In Python True and False are ints.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _in_order(blocks: Iterator[RowBlock], report: RowReport) -> Iterator[RowBlock]:
    """Sort rows that came a little late; those that came too late are bad."""
    held: RowBlock | None = None
    latest = -np.inf
    for block in blocks:
        if held is not None:
            block = RowBlock(
                join_requests((held.requests, block.requests)),
                np.concatenate((held.lines, block.lines)),
            )
        times = block.requests.arrival_s
        # What was handed out can no longer be sorted: nothing may come before it.
        late = np.flatnonzero(times < latest)
        for row in late:
            what = f"comes more than {HELD:,} rows too late"
            report.bad_row(int(block.lines[row]), "arrival", what)
        if len(late) or np.any(np.diff(times) < 0):
            good = np.flatnonzero(times >= latest)
            order = good[np.argsort(times[good], kind="stable")]
            report.reordered += int(np.sum(np.diff(times[good]) < 0))
            block = RowBlock(block.requests.take(order), block.lines[order])
        # The last rows are held back: others may come that belong before them.
        cut = len(block.requests) - HELD
        if cut > 0:
            out = RowBlock(block.requests.take(slice(0, cut)), block.lines[:cut])
            latest = float(out.requests.arrival_s[-1])
            yield out
            block = RowBlock(block.requests.take(slice(cut, None)), block.lines[cut:])
        held = block
    if held is not None and len(held.requests):
        yield held
