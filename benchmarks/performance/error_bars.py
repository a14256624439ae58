"""Whether stated error bars cover what servers took that they were not made for (`server_rows`).

Every server is simulated with draws of the constants, the host and the links, as plans draw them. What is
left to a term that a whole server shares is calibrated on all servers but those of one GPU, one family of
models or one engine, each in turn, so that 90 % of the others are inside their 90 %; then it is counted how
many of those left out are. Figures are means over all that were left out, a server counting once each time.
`server_error` and `first_token_error` are the terms calibrated on all of them, beside those that draws use
(`SERVER_ERROR`, `FIRST_TOKEN_ERROR`). `width_median` is the upper end of a stated 90 % of the time per token
over the lower end. With `--quick` every 32nd row is taken, else every eighth.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.catalog import Catalog
from atoll.core.errors import MissingDependencyError
from atoll.core.rng import stream
from atoll.perf.constants import (
    FIRST_TOKEN_ERROR,
    SERVER_ERROR,
    default_constants,
    sample_constants,
)
from atoll.perf.layers import ground_constants
from benchmarks.performance.server_rows import ServerRow, read_rows, simulate_row
from benchmarks.report import Figure, finish, leave_out, options

DRAWS = 12
COVERED = 0.9
_REACH = 1.645
"""Standard deviations that hold 90 % of a normal distribution."""
_TERMS = np.linspace(0.0, 2.0, 401)
"""Terms of a whole server that are tried, as standard deviations of logarithms."""
_KEYS = ("coverage_dense", "coverage_moe", "coverage_ttft", "width_median")
LEFT_OUT: dict[str, Callable[[ServerRow], str]] = {
    "GPU": lambda row: row.gpu,
    "family": lambda row: row.model,
    "engine": lambda row: row.engine,
}


@dataclass(frozen=True, slots=True)
class Interval:
    """A row as it was drawn: by how much it is off and how far draws spread, as logarithms."""

    row: ServerRow
    off: float
    spread: float

    def covers(self, term: float) -> bool:
        """Whether 90 % of draws hold what was measured, with a term that a whole server shares."""
        return abs(self.off) <= _REACH * math.hypot(self.spread, term)


def draw(rows: Sequence[ServerRow], catalog: Catalog) -> tuple[list[Interval], list[Interval]]:
    """Return the intervals of time per token and to the first token, without the terms of whole servers."""
    tpot: list[Interval] = []
    ttft: list[Interval] = []
    for row in rows:
        gpu, spec = catalog.gpu(row.gpu), catalog.model(row.name).llm
        table = ground_constants(default_constants(), [spec], [gpu])
        luck = stream(0, "error bars")
        seen = []
        for _ in range(DRAWS):
            drawn = sample_constants(table, luck, server_error=0.0, first_token_error=0.0)
            times = simulate_row(row, catalog, drawn)
            if times is not None:
                seen.append((times.tpot_ms / row.tpot_ms, times.ttft_ms / row.ttft_ms))
        if not seen:
            continue
        logs = np.log(np.array(seen))
        for at, found in enumerate((tpot, ttft)):
            found.append(Interval(row, float(logs[:, at].mean()), float(logs[:, at].std(ddof=1))))
    return tpot, ttft


def coverage(intervals: Sequence[Interval], term: float) -> float:
    """Return the share of servers inside their intervals; one with several rows counts by its share."""
    servers: dict[tuple[str, ...], list[bool]] = defaultdict(list)
    for one in intervals:
        servers[one.row.server].append(one.covers(term))
    return float(np.mean([np.mean(inside) for inside in servers.values()]))


def calibrate(intervals: Sequence[Interval]) -> float:
    """Return the smallest term of a whole server with which 90 % of servers are covered."""
    return float(next((t for t in _TERMS if coverage(intervals, t) >= COVERED), _TERMS[-1]))


def left_out(intervals: Sequence[Interval]) -> float:
    """Return the coverage of servers that the term was not calibrated on, leaving out groups in turn."""
    found: list[tuple[float, int]] = []
    for kind, group_of in LEFT_OUT.items():
        for group in sorted({group_of(one.row) for one in intervals}):
            out = [one for one in intervals if group_of(one.row) == group]
            rest = [one for one in intervals if group_of(one.row) != group]
            if not rest:
                continue
            share, servers = coverage(out, calibrate(rest)), len({one.row.server for one in out})
            print(f"  without {kind} {group:18s} {servers:4d} servers, {share:.2f} covered")
            found.append((share, servers))
    return sum(share * n for share, n in found) / sum(n for _, n in found)


def sd_of(term: float) -> float:
    """Return the relative standard deviation of a log-normal factor, of that of its logarithm."""
    return math.sqrt(math.expm1(term**2))


def main() -> None:
    """Draw, calibrate and print."""
    arguments = options(__doc__ or "")
    try:
        rows = read_rows()[:: 32 if arguments.quick else 8]
    except MissingDependencyError as error:
        leave_out(str(error))
        finish([Figure(name, None) for name in _KEYS])
        return
    tpot, ttft = draw(rows, Catalog.default())
    dense = [one for one in tpot if one.row.dense]
    experts = [one for one in tpot if not one.row.dense]
    parts = {"coverage_dense": dense, "coverage_moe": experts, "coverage_ttft": ttft}
    figures = []
    for name, part in parts.items():
        print(name)
        figures.append(Figure(name, left_out(part), 0.85, "and at most 0.97", at_least=True))
    shipped = {"tpot": math.sqrt(math.log1p(SERVER_ERROR**2))}
    shipped["ttft"] = math.hypot(shipped["tpot"], math.sqrt(math.log1p(FIRST_TOKEN_ERROR**2)))
    widths = [math.exp(2.0 * _REACH * math.hypot(one.spread, shipped["tpot"])) for one in tpot]
    firsts = [math.exp(2.0 * _REACH * math.hypot(one.spread, shipped["ttft"])) for one in ttft]
    figures += [
        Figure("width_median", float(np.median(widths)), note="TPOT, upper over lower end"),
        Figure("width_ttft_median", float(np.median(firsts))),
        Figure("shipped_dense", coverage(dense, shipped["tpot"]), note="with the errors that ship"),
        Figure("shipped_moe", coverage(experts, shipped["tpot"])),
        Figure("shipped_ttft", coverage(ttft, shipped["ttft"])),
        Figure("server_error", sd_of(calibrate(tpot)), note=f"draws use {SERVER_ERROR:g}"),
        Figure(
            "first_token_error", sd_of(calibrate(ttft)), note=f"draws use {FIRST_TOKEN_ERROR:g}"
        ),
    ]
    for engine in sorted({one.row.engine for one in tpot}):
        own = [[one for one in some if one.row.engine == engine] for some in (tpot, ttft)]
        figures.append(Figure(f"{engine}_server_error", sd_of(calibrate(own[0]))))
        figures.append(Figure(f"{engine}_first_token_error", sd_of(calibrate(own[1]))))
    finish(figures, rows=len(tpot))


if __name__ == "__main__":
    main()
