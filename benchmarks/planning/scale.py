"""How far planning and serving scale: placement and renting, members of a fabric, streams of a gateway.

Each part is a module with `run(quick) -> dict[str, float | None]`, the figures by key, that prints its own
table.
"""

from __future__ import annotations

import argparse
import importlib
import resource
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.report import Figure, finish

Figures = dict[str, float | None]
"""The figures of a part by JSON key."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A key that a part always has, and what it is held against (None: reported only)."""

    name: str
    bar: float | None
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the benchmark: the module that measures it, and its keys."""

    module: str
    bars: tuple[Bar, ...]


PARTS = {
    "placement": Part(
        "benchmarks.planning.scale_placement",
        (
            Bar("n200_gap", 5.0),
            Bar("n200_cpu_s", 20.0),
            Bar("n1000_gap", 5.0),
            Bar("n1000_cpu_s", 120.0),
            Bar("n10000_gap", 10.0),
            Bar("n10000_cpu_s", 600.0),
            Bar("n10000_mb", 8000.0),
        ),
    ),
    "rent": Part(
        "benchmarks.planning.scale_rent",
        (
            Bar("rent200_gap", 2.0),
            Bar("rent200_cpu_s", 120.0),
            Bar("rent200_starved_gap", 2.0),
            Bar("rent200_starved_cpu_s", 120.0),
            Bar("rent200_deadline_overrun_s", 2.0),
        ),
    ),
    "members": Part("benchmarks.federation.scale_members", (Bar("members10000_mb", None),)),
    "streams": Part(
        "benchmarks.serving.scale_streams", (Bar("streams_active", 5000.0, at_least=True),)
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases, under three minutes")
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="this part alone (repeatable)"
    )
    args = parser.parse_args()
    figures: list[Figure] = []
    for name in args.only or PARTS:
        part = PARTS[name]
        print(f"== {name}")
        run: Callable[[bool], Figures] = importlib.import_module(part.module).run
        found = {bar.name: None for bar in part.bars} | run(args.quick)
        bars = {bar.name: bar for bar in part.bars}
        for key, value in found.items():
            bar = bars.get(key, Bar(key, None))
            # A quick run asks for less: what must be at least so much is not.
            most = None if args.quick and bar.at_least else bar.bar
            figures.append(Figure(key, value, most, at_least=bar.at_least))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    finish(figures, peak_mb=round(peak_mb))


if __name__ == "__main__":
    main()
