"""What every benchmark shares: where data lies, how bars are shown, the last line."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
RESULTS = ROOT / "benchmarks" / "results"
"""Where measurements are kept."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a benchmark and the bar it is held against (None: reported only).

    A bar is the most that a figure may be, or the least where it is `at_least`.
    """

    name: str
    value: float | None
    bar: float | None = None
    note: str = ""
    at_least: bool = False

    @property
    def verdict(self) -> str:
        """Whether the bar is met, in a word."""
        if self.value is None:
            return "not run"
        if self.bar is None:
            return "reported"
        met = self.value >= self.bar if self.at_least else self.value <= self.bar
        return "met" if met else "MISSED"


def options(description: str) -> argparse.Namespace:
    """Read the options every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer cases, under three minutes")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the public data")
    return parser.parse_args()


def finish(figures: list[Figure], **more: object) -> None:
    """Print the figures against their bars and, as the last line, one JSON object."""
    print()
    for figure in figures:
        value = "-" if figure.value is None else f"{figure.value:.4g}"
        bar = "" if figure.bar is None else f"(bar {figure.bar:g})"
        print(
            f"  {figure.name:32s} {value:>10s}  {bar:12s} {figure.verdict:9s} {figure.note}".rstrip()
        )
    print(json.dumps({figure.name: figure.value for figure in figures} | more, allow_nan=False))
    sys.stdout.flush()
