"""A simulation's requests as CSV or Parquet."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.errors import MissingDependencyError, UsageError
from atoll.core.files import atomic_write

if TYPE_CHECKING:
    from atoll.sim.result import SimReport
    from atoll.sim.tasks.mixed import MixedReport

ENDINGS = (".csv", ".parquet")


def write_requests(result: SimReport | MixedReport, path: Path) -> None:
    """Write the requests of a run, in the format its ending names."""
    kind = path.suffix.lower()
    if kind not in ENDINGS:
        raise UsageError(f"cannot write {path.name}", hint=f"name a {' or '.join(ENDINGS)} file")
    atomic_write(path, _parquet(result) if kind == ".parquet" else _csv(result))


def _csv(result: SimReport | MixedReport) -> str:
    table = result.columns()
    out = io.StringIO()
    out.write(",".join(table) + "\n")
    written = [_format_cell(column) for column in table.values()]
    out.writelines(",".join(row) + "\n" for row in zip(*written, strict=True))
    return out.getvalue()


def _format_cell(column: np.ndarray) -> list[str]:
    if column.dtype.kind == "f":
        return ["" if value != value else f"{value:.6f}" for value in column.tolist()]
    if column.dtype.kind == "b":
        return [str(int(value)) for value in column.tolist()]
    return [str(value) for value in column.tolist()]


def _parquet(result: SimReport | MixedReport) -> bytes:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingDependencyError("pyarrow", "parquet", needed_for="Parquet files") from error
    out = io.BytesIO()
    pq.write_table(pa.table(result.columns()), out)
    return out.getvalue()
