"""The backend of measured tables: a CSV or Parquet file with one row per measured step.

Columns: `model`, `node` (GPU:N), `tp`, `phase` (prefill or decode), `tokens` (prompt tokens in the step;
sequences for decode), `context` (tokens cached per sequence before the step), `layer_us` (one layer),
and where measured `embedding_us`, `head_us`, `host_us`, and `kind` (0 for the model's first kind of
layer, 1 for its second; layers of all kinds count as kind 0 where only that is measured).
Each phase must form a full grid of tokens x context. Between grid points the logarithm of time is
linear in the logarithms of both. Only the sum of prompt tokens counts, not how many prompts they are.
Beyond the grid the last slope continues, for at most a factor of 4.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from atoll.catalog.nodes import NodeType
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import InputError, MissingDependencyError, UnknownNameError
from atoll.core.files import read_text_limited
from atoll.core.ids import Phase, parse_node_type
from atoll.engines.limits import HostTime
from atoll.engines.profile import EngineProfile
from atoll.perf.batch import Batch
from atoll.perf.layers import LayerKind, layer_kinds
from atoll.perf.operators import Array, Num
from atoll.perf.step import StepParts, check_tp, engine_limit

_MAX_BYTES = 64 * 2**20
_REACH = 4.0
_REQUIRED = ("model", "node", "phase", "tokens", "context", "layer_us")
_TIMES = ("layer_us", "embedding_us", "head_us", "host_us")

Key = tuple[str, str, int]
Row = Mapping[str, str]


@dataclass(frozen=True)
class Surface:
    """Seconds over a grid of tokens x context, linear in logarithms."""

    tokens: Array
    context: Array
    seconds: Array

    @cached_property
    def _log(self) -> tuple[Array, Array, Array]:
        # Context 0 is common and has no logarithm: count from one.
        return np.log(self.tokens), np.log1p(self.context), np.log(self.seconds)

    def at(self, tokens: Array, context: Array) -> Array:
        """Return seconds at these sizes; far outside the measured grid is an error."""
        x, y, z = self._log
        self._check("tokens", tokens, self.tokens)
        self._check("context", context, self.context)
        i, u = _place(x, np.log(tokens))
        j, v = _place(y, np.log1p(context))
        i1, j1 = np.minimum(i + 1, len(x) - 1), np.minimum(j + 1, len(y) - 1)
        low = z[i, j] * (1 - u) + z[i1, j] * u
        high = z[i, j1] * (1 - u) + z[i1, j1] * u
        return np.asarray(np.exp(low * (1 - v) + high * v))

    @staticmethod
    def _check(name: str, requested: Array, known: Array) -> None:
        top = float(np.max(requested, initial=0.0))
        if top > known[-1] * _REACH + 64.0:
            raise InputError(
                f"{top:g} is far beyond the {known[-1]:g} measured",
                field=name,
                hint="measure larger batches, or use the analytic backend",
            )


def _place(grid: Array, at: Array) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], Array]:
    """Return the cell and the share within it; shares outside 0..1 extrapolate above, clamp below."""
    if len(grid) == 1:
        return np.zeros(at.shape, dtype=np.int64), np.zeros(at.shape)
    cell = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, len(grid) - 2)
    share = (at - grid[cell]) / (grid[cell + 1] - grid[cell])
    return cell.astype(np.int64), np.maximum(share, 0.0)


@dataclass(frozen=True)
class TableStepModel:
    """Step times interpolated in measured tables.

    Mixed steps add the kernel times of both phases, and pay the larger of their host times.
    """

    spec: TransformerSpec
    node: NodeType
    tp: int
    engine: EngineProfile
    surfaces: Mapping[tuple[Phase, str, int], Surface]
    provenance: str

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct kinds of layer of the model."""
        return tuple(dict.fromkeys(layer_kinds(self.spec)))

    def parts(self, batch: Batch[Num]) -> StepParts[Num]:
        """Return the pieces of a step with this batch."""
        return StepParts(
            host=self._host(batch, self.engine.host),
            embedding=_like(batch, self._both("embedding_us", 0, batch)),
            layers=tuple(
                _like(batch, self._both("layer_us", kind, batch)) for kind in range(len(self.kinds))
            ),
            head=_like(batch, self._both("head_us", 0, batch)),
            stage_host=self._host(batch, self.engine.of_stage().host),
        )

    def largest_batch(self, phase: Phase) -> float:
        """Return the largest batch that was measured."""
        surface = self._surface(phase, "layer_us", 0)
        assert surface is not None
        return min(engine_limit(self.engine, phase), float(surface.tokens[-1]))

    def measures_host(self, phase: Phase) -> bool:
        """Return whether the table holds host times of a phase."""
        return (phase, "host_us", 0) in self.surfaces

    def _host(self, batch: Batch[Num], expected: HostTime) -> Num | float:
        """One step, so one preparation: the larger of both phases where both are in the batch."""
        assumed = expected.seconds(batch.outputs)
        if not any(map(self.measures_host, (Phase.PREFILL, Phase.DECODE))):
            return assumed
        larger = np.maximum.reduce(self._phases("host_us", 0, batch))
        # 0: the phase in the batch was not measured.
        return _like(batch, np.where(larger > 0.0, larger, assumed))

    def _both(self, column: str, kind: int, batch: Batch[Num]) -> Array:
        prefill, decode = self._phases(column, kind, batch)
        return prefill + decode

    def _phases(self, column: str, kind: int, batch: Batch[Num]) -> tuple[Array, Array]:
        """Seconds of the prefill part and of the decode part, 0 where empty or not measured."""
        prefill = np.atleast_1d(np.asarray(batch.prefill_tokens, dtype=np.float64))
        decode = np.atleast_1d(np.asarray(batch.decode_sequences, dtype=np.float64))
        before = np.atleast_1d(np.asarray(batch.prefill_context, dtype=np.float64))
        cached = np.atleast_1d(np.asarray(batch.decode_context, dtype=np.float64))
        shape = np.broadcast_shapes(prefill.shape, decode.shape)
        out = np.zeros(shape), np.zeros(shape)
        for seconds, phase, tokens, context in (
            (out[0], Phase.PREFILL, prefill, before),
            (out[1], Phase.DECODE, decode, cached),
        ):
            busy = tokens > 0.0
            if not busy.any():
                continue
            surface = self._surface(phase, column, kind)
            if surface is not None:
                seconds[busy] = surface.at(tokens[busy], context[busy])
        return out

    def _surface(self, phase: Phase, column: str, kind: int) -> Surface | None:
        # Kinds of layers that were not measured have the times of the first.
        surface = self.surfaces.get((phase, column, kind)) or self.surfaces.get((phase, column, 0))
        if surface is None and column == "layer_us":
            raise InputError(
                f"no measurements of {phase.value} for {self.node.id}",
                field="phase",
                hint="measure it, or use the analytic backend",
            )
        return surface


def _like(batch: Batch[Num], values: Array) -> Num:
    """Return floats for a batch of floats."""
    if isinstance(batch.prefill_tokens, float):
        return float(values[0])
    return values


class TableFile:
    """A file of measured tables for any number of models and nodes."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._rows: dict[Key, list[tuple[int, Row]]] = {}
        for line, row in _read(self._path):
            missing = [name for name in _REQUIRED if not row.get(name)]
            if missing:
                raise InputError("empty", path=self._path, line=line, field=missing[0])
            tp = int(_number(self._path, line, row, "tp")) if row.get("tp") else 0
            try:
                node = str(parse_node_type(row["node"]))
            except InputError as error:
                raise error.locate(path=self._path, line=line, field="node") from None
            self._rows.setdefault((row["model"], node, tp), []).append((line, row))

    def keys(self) -> tuple[Key, ...]:
        """Return (model, node type, tensor-parallel size) of everything measured."""
        return tuple(sorted(self._rows))

    def step_model(
        self,
        model: str,
        spec: TransformerSpec,
        node: NodeType,
        *,
        tp: int | None = None,
        engine: EngineProfile | None = None,
    ) -> TableStepModel:
        """Return the step model of a measured model on a measured node."""
        size = check_tp(node, tp, spec)
        rows = self._rows.get((model, node.id, size))
        # Rows without a tp are of all GPUs of the node.
        if rows is None and size == node.count:
            rows = self._rows.get((model, node.id, 0))
        if rows is None:
            known = [f"{m} on {n} tp {t or 'all'}" for m, n, t in self._rows]
            raise UnknownNameError("measured table", f"{model} on {node.id} tp {size}", known)
        profile = engine if engine is not None else EngineProfile("measured")
        source = f"measured ({self._path.name}, {len(rows)} points)"
        return TableStepModel(spec, node, size, profile, self._surfaces(rows), source)

    def _surfaces(
        self, rows: Iterable[tuple[int, Row]]
    ) -> Mapping[tuple[Phase, str, int], Surface]:
        cells: dict[tuple[Phase, str, int], dict[tuple[float, float], float]] = {}
        lines: dict[tuple[str, int, float, float], int] = {}
        for line, row in rows:
            if row["phase"] not in ("prefill", "decode"):
                raise InputError(
                    f"{row['phase']!r} is not prefill or decode",
                    path=self._path,
                    line=line,
                    field="phase",
                )
            tokens = _number(self._path, line, row, "tokens")
            context = _number(self._path, line, row, "context", zero=True)
            kind = int(_number(self._path, line, row, "kind", zero=True)) if row.get("kind") else 0
            first = lines.setdefault((row["phase"], kind, tokens, context), line)
            if first != line:
                raise InputError(
                    f"the same sizes as line {first}",
                    path=self._path,
                    line=line,
                    hint="keep one row for every model, node, tp, phase, kind, tokens and context",
                )
            for column in _TIMES:
                if row.get(column):
                    seconds = _number(self._path, line, row, column) * 1e-6
                    key = (Phase(row["phase"]), column, kind)
                    cells.setdefault(key, {})[tokens, context] = seconds
        return {key: self._grid(key, values) for key, values in cells.items()}

    def _grid(
        self, key: tuple[Phase, str, int], values: dict[tuple[float, float], float]
    ) -> Surface:
        tokens = sorted({t for t, _ in values})
        context = sorted({c for _, c in values})
        for t in tokens:
            for c in context:
                if (t, c) not in values:
                    raise InputError(
                        f"{key[0].value} has no row with tokens {t:g} and context {c:g}",
                        path=self._path,
                        field=key[1],
                        hint="measure a full grid of tokens x context",
                    )
        seconds = np.array([[values[t, c] for c in context] for t in tokens])
        return Surface(np.array(tokens), np.array(context), seconds)


def _read(path: Path) -> Iterable[tuple[int, Row]]:
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise MissingDependencyError("pyarrow", "aic") from error
        try:
            table = parquet.read_table(path)
        except (OSError, ValueError) as error:
            raise InputError(f"not a readable Parquet file: {error}", path=path) from error
        rows = (
            {name: "" if value is None else str(value) for name, value in row.items()}
            for row in table.to_pylist()
        )
        header = table.column_names
        numbered: Iterable[tuple[int, Row]] = enumerate(rows, start=1)
    else:
        reader = csv.DictReader(io.StringIO(read_text_limited(path, _MAX_BYTES)))
        try:
            header = list(reader.fieldnames or ())
            numbered = [(reader.line_num, row) for row in reader]
        except csv.Error as error:
            raise InputError(
                f"not readable as CSV: {error}", path=path, line=reader.line_num + 1
            ) from error
    missing = [name for name in _REQUIRED if name not in header]
    if missing:
        raise InputError(
            f"no column {', '.join(missing)}",
            path=path,
            hint="a table of measured steps has the columns " + ", ".join(_REQUIRED),
        )
    return numbered


def _number(path: Path, line: int, row: Row, name: str, *, zero: bool = False) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = float("nan")
    # NaN fails these comparisons, too.
    if not (0.0 < value < 1e15 or (zero and value == 0.0)):
        raise InputError(
            f"{row[name]!r} is not a {'number of 0 or more' if zero else 'positive number'}",
            path=path,
            line=line,
            field=name,
        )
    return value
