"""How far predictions are off on measured servers (`server_rows`), as shipped and with each left out.

Every row is simulated in a closed loop with the scheduler, version and limits that it had: with the constants
that ship (`dense_tpot_median`), and with those fitted without its series (`dense_tpot_left_out`,
`server_fit`). Errors are |predicted / measured - 1| in per cent, medians over rows. `gpu_ratio` compares what
one GPU is over another on the same model, engine and load, for all pairs: what a planner chooses by.
`_unseen` figures are of every second series in order of their names: how servers were started, and what
SGLang's interval between looks at prompts takes, was last settled on the other half alone.
`spread_` figures are of servers whose experts are spread over GPUs, which count in nothing else. With
`--quick` every eighth row is taken; without, the table is kept in `benchmarks/results/servers.csv` for
docs/fidelity.md.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations

import numpy as np

from atoll.catalog import Catalog
from atoll.core.errors import MissingDependencyError
from benchmarks.performance.server_fit import ServedConstants, read_left_out
from benchmarks.performance.server_rows import ServerRow, Times, read_rows, simulate_row
from benchmarks.report import ROOT, Figure, finish, leave_out, options

Compared = tuple[ServerRow, Times]
_EVERY = 8
"""Of so many rows one is taken where it has to be quick."""
COLUMNS = (
    *("engine", "version", "model", "format", "gpu", "rows"),
    *("tpot", "tpot_bias", "tpot_p95", "ttft", "ttft_bias", "tpot_left_out", "ttft_left_out"),
)
KEPT = ROOT / "benchmarks" / "results" / "servers.csv"
BARS = {"dense_tpot": 6.0, "moe_tpot": 10.0, "ttft": 15.0, "gpu_ratio": 10.0}


def compare(
    rows: list[ServerRow],
    catalog: Catalog,
    served: Mapping[tuple[str, ...], ServedConstants] | None = None,
) -> list[Compared]:
    """Simulate rows, with constants by their series or as shipped; those that no node has room for go."""
    found = (
        (row, simulate_row(row, catalog, served=served.get(row.series) if served else None))
        for row in rows
    )
    return [(row, times) for row, times in found if times is not None]


def tpot_error(one: Compared) -> float:
    """Per cent by which the predicted time per token is above the measured one."""
    return 100.0 * (one[1].tpot_ms / one[0].tpot_ms - 1.0)


def ttft_error(one: Compared) -> float:
    """The same of the time to the first token."""
    return 100.0 * (one[1].ttft_ms / one[0].ttft_ms - 1.0)


def ratio_errors(compared: list[Compared]) -> list[float]:
    """Per cent by which the ratio of two servers' times per token is off, for all pairs of a load."""
    loads: dict[tuple[object, ...], list[Compared]] = defaultdict(list)
    for one in compared:
        loads[one[0].load].append(one)
    return [
        100.0 * abs((1.0 + tpot_error(a) / 100.0) / (1.0 + tpot_error(b) / 100.0) - 1.0)
        for some in loads.values()
        for a, b in combinations(some, 2)
        if a[0].gpu != b[0].gpu
    ]


def middle(values: list[float]) -> float | None:
    """The median, None of nothing."""
    return float(np.median(values)) if values else None


def tabulate(compared: list[Compared], left_out: list[Compared]) -> list[tuple[str, ...]]:
    """Return a line for each engine, version, model, number format and GPU, as `COLUMNS` says."""
    groups: dict[tuple[str, ...], list[Compared]] = defaultdict(list)
    apart: dict[tuple[str, ...], list[Compared]] = defaultdict(list)
    for found, some in ((groups, compared), (apart, left_out)):
        for one in some:
            row = one[0]
            # The file calls all formats of 4 bits one name; gpt-oss has its own.
            dtype = "mxfp4" if row.model == "gpt-oss-120b" else row.dtype
            found[row.engine, row.version or "-", row.model, dtype, row.gpu].append(one)
    lines = []
    for key, some in sorted(groups.items()):
        tpot = np.array([tpot_error(one) for one in some])
        ttft = np.array([ttft_error(one) for one in some])
        errors = (
            *(np.median(abs(tpot)), np.median(tpot), np.percentile(abs(tpot), 95)),
            *(np.median(abs(ttft)), np.median(ttft)),
            np.median([abs(tpot_error(one)) for one in apart[key]]),
            np.median([abs(ttft_error(one)) for one in apart[key]]),
        )
        lines.append((*key, str(len(some)), *(f"{error:.1f}" for error in errors)))
    return lines


def show(lines: list[tuple[str, ...]]) -> None:
    """Print the lines of `tabulate`."""
    for line in (COLUMNS, *lines):
        print(f"{' '.join(line[:5]):60s}" + "".join(f"{cell:>14s}" for cell in line[5:]))


def figures(compared: list[Compared], kind: str = "median") -> list[Figure]:
    """Return the medians over all rows, and those of each engine; `kind` ends their names."""
    found: list[Figure] = []

    def medians(some: list[Compared], prefix: str) -> None:
        dense = [abs(tpot_error(one)) for one in some if one[0].dense]
        experts = [abs(tpot_error(one)) for one in some if not one[0].dense]
        parts = {
            "dense_tpot": middle(dense),
            "moe_tpot": middle(experts),
            "ttft": middle([abs(ttft_error(one)) for one in some]),
            "gpu_ratio": middle(ratio_errors(some)),
        }
        for name, value in parts.items():
            found.append(Figure(f"{prefix}{name}_{kind}", value, None if prefix else BARS[name]))

    medians(compared, "")
    for engine in sorted({one[0].engine for one in compared}):
        medians([one for one in compared if one[0].engine == engine], f"{engine}_")
    return found


def unseen(compared: list[Compared]) -> list[Figure]:
    """Return the medians of the series that the last choices were not made on."""
    out = set(sorted({one[0].series for one in compared})[1::2])
    rows = [one for one in compared if one[0].series in out]
    return [one for one in figures(rows, "unseen") if one.name.removesuffix("_unseen") in BARS]


def main() -> None:
    """Simulate all rows and print the tables."""
    arguments = options(__doc__ or "")
    try:
        rows, spread = read_rows(), read_rows(spread=True)
    except MissingDependencyError as error:
        leave_out(str(error))
        finish([Figure(f"{name}_left_out", None, bar) for name, bar in BARS.items()])
        return
    rows, catalog = rows[:: _EVERY if arguments.quick else 1], Catalog.default()
    compared, left_out = compare(rows, catalog), compare(rows, catalog, read_left_out())
    lines = tabulate(compared, left_out)
    show(lines)
    if not arguments.quick:
        with KEPT.open("w", encoding="utf-8", newline="") as stream:
            csv.writer(stream, lineterminator="\n").writerows([COLUMNS, *lines])
    apart = compare(spread[:: _EVERY if arguments.quick else 1], Catalog.default())
    of_spread = [
        Figure("spread_tpot_median", middle([abs(tpot_error(one)) for one in apart])),
        Figure("spread_ttft_median", middle([abs(ttft_error(one)) for one in apart])),
    ]
    finish(
        [*figures(left_out, "left_out"), *figures(compared), *unseen(left_out), *of_spread],
        rows=len(compared),
        spread_rows=len(apart),
    )


if __name__ == "__main__":
    main()
