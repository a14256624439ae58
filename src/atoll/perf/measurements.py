"""Measured operator and layer times: reading CSV files of them, and setting some aside for tests."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import InputError, UsageError
from atoll.core.files import unreadable
from atoll.perf.operators import Array

MAX_BYTES = 256 * 2**20
"""Largest file that is read, uncompressed."""


@dataclass(frozen=True, slots=True)
class Schema:
    """One kind of measurement: the columns that identify a point and those that name its group."""

    kind: str
    sizes: tuple[str, ...]
    labels: tuple[str, ...] = ()
    describe: str = ""


SCHEMAS: tuple[Schema, ...] = (
    Schema("experts", ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size"),
           ("moe_dtype",), "routed experts of one layer"),
    Schema("attention", ("batch_size", "seq_len", "num_heads", "num_key_value_heads", "head_dim"),
           ("kind",), "attention of one layer; kind is prefill or decode"),
    Schema("gemm", ("m", "n", "k"), ("gemm_dtype",), "one matrix product"),
    Schema("allreduce", ("num_gpus", "bytes"), ("kernel_source",), "sum over the GPUs of a node"),
    Schema("layer", ("tokens_in_batch",), ("model", "kind"), "one whole layer"),
)  # fmt: skip

_TIME_COLUMNS = {
    "latency_s": 1.0,
    "latency_ms": 1e-3,
    "latency_us": 1e-6,
    "latency": 1e-3,
    "ms_per_layer": 1e-3,
}
_GROUP_COLUMNS = ("gpu", "system", "machine", "node")
IMPLEMENTATION = "impl"
"""Optional column: which kernel ran. A label of the points only where a file has it."""
ROUTING = "routing"
"""Optional label of experts' points: how tokens chose them. Without it, each token at random."""
BALANCED = "balanced"
"""Tokens choose experts in turn: they touch as many as they can."""
_DEFAULT_LABELS = {"gemm_dtype": "bfloat16", "moe_dtype": "bfloat16", "kernel_source": ""}


@dataclass(frozen=True, slots=True)
class Points:
    """Measurements of one kind, column-wise: sizes as floats, labels as text, times in seconds."""

    schema: Schema
    group: NDArray[np.str_]
    sizes: Mapping[str, Array]
    labels: Mapping[str, NDArray[np.str_]]
    seconds: Array
    skipped: tuple[tuple[int, str], ...] = ()

    def __len__(self) -> int:
        return len(self.seconds)

    def where(self, mask: NDArray[np.bool_]) -> Points:
        """Return the points where the mask is true."""
        return Points(
            self.schema,
            self.group[mask],
            {name: column[mask] for name, column in self.sizes.items()},
            {name: column[mask] for name, column in self.labels.items()},
            self.seconds[mask],
            self.skipped,
        )

    def of(self, group: str | None = None, **labels: str) -> Points:
        """Return the points of one GPU, and of the labels given."""
        mask = np.ones(len(self), dtype=np.bool_)
        if group is not None:
            mask &= self.group == group
        for name, value in labels.items():
            mask &= self.labels[name] == value
        return self.where(mask)

    def fastest(self) -> Points:
        """Return the points without those whose shape another implementation ran faster.

        Shapes that one implementation alone was measured on keep all their points.
        """
        implementations = self.labels.get(IMPLEMENTATION)
        if implementations is None:
            return self
        texts = [self.labels[name].tolist() for name in self.schema.labels]
        sizes = [self.sizes[name].tolist() for name in self.schema.sizes]
        shapes = list(zip(self.group.tolist(), *texts, *sizes, strict=True))
        ran: dict[tuple[object, ...], set[str]] = {}
        best: dict[tuple[object, ...], int] = {}
        for index, shape in enumerate(shapes):
            ran.setdefault(shape, set()).add(str(implementations[index]))
            first = best.setdefault(shape, index)
            if self.seconds[index] < self.seconds[first]:
                best[shape] = index
        kept = [len(ran[shape]) == 1 or best[shape] == i for i, shape in enumerate(shapes)]
        return self.where(np.array(kept, dtype=np.bool_))

    def groups(self) -> tuple[str, ...]:
        """Return the GPU or machine names in the file, sorted."""
        return tuple(sorted(set(self.group.tolist())))

    def held_out(self) -> NDArray[np.bool_]:
        """Return which points are kept from every fit: about half, by a hash of their sizes.

        The choice depends on the sizes alone, so that it is the same in every run, file order and
        GPU, and no point can slip from one side to the other.
        """
        rows = zip(*(self.sizes[name].tolist() for name in self.schema.sizes), strict=True)
        return np.array([_hold_out(row) for row in rows], dtype=np.bool_)

    def split(self) -> tuple[Points, Points]:
        """Return (points to fit on, points to test on)."""
        mask = self.held_out()
        return self.where(~mask), self.where(mask)


def join_measurements(parts: Sequence[Points]) -> Points:
    """Return the points of several files of one kind together, as measurements of the first's GPU.

    Where only some name the implementation, it is empty for the others.
    """
    first = parts[0]
    if any(part.schema is not first.schema for part in parts):
        raise UsageError("measurements of different kinds cannot be joined")
    names = dict.fromkeys(name for part in parts for name in part.labels)
    return Points(
        first.schema,
        np.full(sum(map(len, parts)), first.group[0] if len(first) else ""),
        {name: np.concatenate([p.sizes[name] for p in parts]) for name in first.schema.sizes},
        {
            name: np.concatenate([p.labels.get(name, np.full(len(p), "")) for p in parts])
            for name in names
        },
        np.concatenate([part.seconds for part in parts]),
        tuple(entry for part in parts for entry in part.skipped),
    )


def _hold_out(row: Sequence[float]) -> bool:
    text = ",".join(f"{value:g}" for value in row)
    return hashlib.sha256(text.encode()).digest()[0] >= 128


def read_points(path: str | Path) -> Points:
    """Read a CSV file (or .csv.gz) of measurements; the kind follows from its columns.

    Rows that cannot be read are left out and listed in `skipped` with their line numbers.
    """
    source = Path(path)
    rows = csv.DictReader(io.StringIO(_text(source), newline=""))
    try:
        return _points(source, rows)
    except csv.Error as error:
        line = rows.line_num + 1
        raise InputError(f"not readable as CSV: {error}", path=source, line=line) from error


def _points(source: Path, rows: csv.DictReader[str]) -> Points:
    header = tuple(rows.fieldnames or ())
    schema = _schema(source, header)
    time_column = next((name for name in _TIME_COLUMNS if name in header), None)
    if time_column is None:
        raise InputError(
            "no column with the measured time",
            path=source,
            hint="name it one of " + ", ".join(_TIME_COLUMNS),
        )
    group_column = next((name for name in _GROUP_COLUMNS if name in header), None)
    return _collect(schema, rows, time_column, group_column)


def _text(source: Path) -> str:
    try:
        with source.open("rb") as raw:
            stream = gzip.GzipFile(fileobj=raw) if source.suffix == ".gz" else raw
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise unreadable(error, source) from error
    except (EOFError, zlib.error) as error:
        raise InputError(
            f"cannot read: the archive is damaged ({error})", path=source, hint="copy it again"
        ) from error
    if len(data) > MAX_BYTES:
        raise InputError(f"larger than {MAX_BYTES >> 20} MiB", path=source, hint="split the file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError("not UTF-8 text", path=source) from error


def _schema(source: Path, header: tuple[str, ...]) -> Schema:
    for schema in SCHEMAS:
        if all(name in header for name in schema.sizes):
            return schema
    known = "; ".join(f"{s.kind}: {', '.join(s.sizes)}" for s in SCHEMAS)
    raise InputError(
        f"columns {', '.join(header) or '(none)'} fit no kind of measurement",
        path=source,
        hint=f"give the size columns of one kind ({known}) and a time column",
    )


def _collect(
    schema: Schema, rows: csv.DictReader[str], time_column: str, group_column: str | None
) -> Points:
    sizes: dict[str, list[float]] = {name: [] for name in schema.sizes}
    implementation = (IMPLEMENTATION,) if IMPLEMENTATION in (rows.fieldnames or ()) else ()
    labels: dict[str, list[str]] = {name: [] for name in (*schema.labels, *implementation)}
    group: list[str] = []
    seconds: list[float] = []
    skipped: list[tuple[int, str]] = []
    for row in rows:
        try:
            values = list(_numbers(row, (*schema.sizes, time_column)))
        except ValueError as error:
            skipped.append((rows.line_num, str(error)))
            continue
        for name, value in zip(schema.sizes, values, strict=False):
            sizes[name].append(value)
        for name, column in labels.items():
            column.append(row.get(name) or _DEFAULT_LABELS.get(name, ""))
        seconds.append(values[-1] * _TIME_COLUMNS[time_column])
        group.append((row.get(group_column) if group_column else "") or "")
    return Points(
        schema,
        np.array(group, dtype=np.str_),
        {name: np.array(column) for name, column in sizes.items()},
        {name: np.array(column, dtype=np.str_) for name, column in labels.items()},
        np.array(seconds),
        tuple(skipped),
    )


def _numbers(row: Mapping[str, str | None], names: Sequence[str]) -> Iterator[float]:
    for name in names:
        text = row.get(name)
        try:
            value = float(text or "")
        except ValueError:
            raise ValueError(f"{name}: {text!r} is not a number") from None
        if not (math.isfinite(value) and value > 0.0):
            raise ValueError(f"{name}: {text!r} is not a positive number")
        yield value
