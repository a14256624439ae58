"""Rate curves from files."""

from __future__ import annotations

import csv

import numpy as np

from atoll.core.errors import InputError
from atoll.workload.arrival_rates import RateCurve
from atoll.workload.trace_reading import line_blocks

_MAX_LEVELS = 100_000


def read_curve(path: str) -> RateCurve:
    """Return the curve in a CSV of `t_s,rate`: times in even steps from 0, rates in any unit.

    It repeats after the last step; only how rates compare matters, not their size.
    """
    rows: list[tuple[float, float]] = []
    header: list[str] | None = None
    for first, lines in line_blocks(path):
        for number, cells in enumerate(csv.reader(lines), first):
            if not cells:
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                if header != ["t_s", "rate"]:
                    raise InputError("the columns are not t_s,rate", path=path, line=number)
                continue
            try:
                at, level = (float(cell) for cell in cells)
            except ValueError:
                raise InputError("not a time and a rate", path=path, line=number) from None
            if not (np.isfinite(at) and 0.0 <= level < 1e12):
                raise InputError("a rate is 0 or more", path=path, line=number)
            rows.append((at, level))
            if len(rows) > _MAX_LEVELS:
                raise InputError(f"more than {_MAX_LEVELS:,} rates", path=path, line=number)
    if len(rows) < 2:
        raise InputError("a curve needs two rates or more", path=path)
    times = np.array([at for at, _ in rows])
    step = float(times[1] - times[0])
    if times[0] != 0.0 or step <= 0.0 or not np.allclose(np.diff(times), step, rtol=1e-3):
        raise InputError("the times do not go up from 0 in even steps", path=path)
    return RateCurve(tuple(level for _, level in rows), step * len(rows))
