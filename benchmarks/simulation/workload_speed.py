"""How fast workloads are drawn and traces read: requests per CPU-second on one core."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from atoll.workload.builtin import NAMES
from atoll.workload.requests import Requests
from atoll.workload.spec import workload_of
from atoll.workload.writing import write_trace
from benchmarks.report import Figure, finish, options

BAR = 2e6
"""Requests per second that must be generated."""
SPECS = {
    "poisson": "poisson:1000/s lengths=1024x128",
    "poisson_lognormal": "poisson:1000/s lengths=lognormal:1024/1.2x128/0.9",
    "gamma_normal": "gamma:1000/s cv=3 lengths=normal:1024/0.3x128/0.2",
    "weibull_day_curve": "weibull:1000/s cv=2 lengths=azure-conv curve=day",
    "two_models": "azure-conv@1000/s models=a:0.7,b:0.3",
    "mix_of_two": "azure-conv@1000/s model=a + azure-code@500/s model=b",
    **{name.replace("-", "_"): name for name in NAMES},
}


def main() -> None:
    """Time every kind of workload, then reading what one of them wrote."""
    arguments = options(__doc__ or "")
    count = 1_000_000 if arguments.quick else 5_000_000
    rates = {}
    for name, spec in SPECS.items():
        parts = spec.split(" + ")
        own = " + ".join(f"{part} n={count // len(parts)}" for part in parts)
        workload = workload_of(own)
        next(workload.chunks(1))  # tables are made once, on first use
        best = 0.0
        for seed in range(3):
            best = max(best, _rate(workload.chunks(seed)))
        rates[name] = best
        print(f"  {name:20s} {best / 1e6:6.2f} million requests per CPU-second   {spec}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        rows = count // 5
        write_trace(path, workload_of(f"azure-conv@1000/s n={rows}").chunks(0))
        read = max(_rate(workload_of(str(path)).chunks()) for _ in range(3))
    print(f"  {'read plain csv':20s} {read / 1e6:6.2f} million requests per CPU-second")
    slowest = min(rates, key=lambda name: rates[name])
    # `finish` takes a bar from above, so what must be large is shown as seconds per request.
    finish(
        [
            Figure("generate_us_per_request_max", 1e6 / rates[slowest], 1e6 / BAR, slowest),
            Figure("requests_per_cpu_s_min", rates[slowest]),
            Figure("read_csv_rows_per_cpu_s", read),
        ],
        requests_per_cpu_s=rates,
    )


def _rate(chunks: Iterator[Requests]) -> float:
    start = time.process_time()
    count = sum(len(chunk) for chunk in chunks)
    return count / (time.process_time() - start)


if __name__ == "__main__":
    main()
