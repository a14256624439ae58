"""Fit `benchmarks.performance.server_fit` on measured servers: `python -m tools.fit_servers`.

With `--write` they are kept for `benchmarks.servers`, each series of servers left out in turn. Those of the
record were fitted on every third row (`--every 3`). Errors of times per token and to the first are taken
as linear in the constants about those that ship, which three simulations of every row with one of them moved
tell. Robust errors are minimised, a series counting by the root of its rows, and a constant that rows say
little of stays where tables have it. What ships is copied by hand from what this prints: `SGLANG_HOST_TIME`,
and `SERVED_EXPERTS` and `SERVED_MEMORY` of `tools/fit_constants.py`; a test compares them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
from numpy.typing import NDArray

from atoll.catalog import Catalog
from benchmarks.performance.server_fit import ServedConstants, write
from benchmarks.performance.server_rows import ServerRow, read_rows, simulate_row

Array = NDArray[np.float64]
UNFITTED = (1e-6, 1.0, 1.0)
"""The constants as tables and vLLM have them."""
_SEQUENCE_S = 10e-6
"""What a step of one costs of the first constant; the others are logarithms."""
_MOVES = np.array([2.0, -0.1, -0.15])
_STIFFNESS = np.array([0.003, 1.0, 1.0])
"""How much moving each from `UNFITTED` costs."""
_FIRST_TOKENS = 0.4
"""Weight of an error of the time to the first token beside one of the time per token."""
_ROBUST = 0.05
"""Error from which on it counts by its size and no longer by its square."""


def place(served: ServedConstants | tuple[float, float, float]) -> Array:
    """Return constants as they are fitted."""
    sequence_s, memory, experts = served if isinstance(served, tuple) else astuple(served)
    return np.array([sequence_s / _SEQUENCE_S, np.log(memory), np.log(experts)])


def constants_at(x: Array) -> ServedConstants:
    """Return the constants of a place, shares at most 1."""
    sequence_s = max(UNFITTED[0], float(x[0]) * _SEQUENCE_S)
    memory, experts = np.minimum(1.0, np.exp(x[1:]))
    return ServedConstants(
        float(f"{sequence_s:.3g}"), round(float(memory), 3), round(float(experts), 3)
    )


def errors(rows: Sequence[ServerRow], served: ServedConstants, catalog: Catalog) -> Array:
    """Return log(predicted / measured) of both times of every row, weighted; nan where one does not fit."""
    found = []
    for row in rows:
        times = simulate_row(row, catalog, served=served)
        if times is None:
            found.append((np.nan, np.nan))
        else:
            tpot, ttft = times.tpot_ms / row.tpot_ms, times.ttft_ms / row.ttft_ms
            found.append((np.log(tpot), _FIRST_TOKENS * np.log(ttft)))
    return np.array(found)


def solve(start: Array, off: Array, slopes: Array, weights: Array) -> Array:
    """Return the place with the least robust error: off (rows, 2), slopes (rows, 2, constants)."""
    e = (off * weights[:, None]).ravel()
    a = (slopes * weights[:, None, None]).reshape(len(e), -1)
    scale = np.repeat(weights, 2)
    x = start
    for _ in range(50):
        left = e + a @ (x - start)
        trust = 1.0 / np.sqrt(1.0 + (left / scale / _ROBUST) ** 2)
        normal = a.T @ (a * trust[:, None]) + np.diag(_STIFFNESS)
        pull = a.T @ (trust * (e - a @ start)) - _STIFFNESS * place(UNFITTED)
        x = np.asarray(-np.linalg.solve(normal, pull), dtype=np.float64)
    return x


def main() -> None:
    """Fit and print, with all series and without each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep them for benchmarks.servers")
    parser.add_argument("--every", type=int, default=1, help="take one of so many rows")
    arguments = parser.parse_args()
    rows, catalog = read_rows()[:: arguments.every], Catalog.default()
    shipped = ServedConstants.shipped()
    start = place(shipped)
    off = errors(rows, shipped, catalog)
    slopes = np.zeros((*off.shape, len(start)))
    for at, move in enumerate(_MOVES):
        moved = start.copy()
        moved[at] += move
        slopes[:, :, at] = (errors(rows, constants_at(moved), catalog) - off) / move
    known = np.asarray(~np.isnan(slopes).any(axis=(1, 2)), dtype=np.bool_)
    series = np.array([", ".join(row.series) for row in rows])
    counts = Counter(series[known])
    weights = np.array([counts[name] ** -0.5 if counts[name] else 0.0 for name in series])
    weights /= weights[known].mean()

    def fit(used: NDArray[np.bool_]) -> ServedConstants:
        return constants_at(solve(start, off[used], slopes[used], weights[used]))

    fitted = fit(known)
    print(f"shipped {shipped}\nfitted  {fitted}")
    left_out = {}
    for row in rows:
        if row.series not in left_out:
            own = fit(known & (series != ", ".join(row.series)))
            left_out[row.series] = own
            print(f"without {', '.join(row.series):60s} {astuple(own)}")
    if arguments.write:
        write(fitted, left_out)


if __name__ == "__main__":
    main()
