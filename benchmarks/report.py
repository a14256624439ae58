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
MISSED, LEFT_OUT = "missed", "left_out"
"""Keys of the last line: figures that missed their bars, and why others were not measured."""

_left_out: list[str] = []


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


def leave_out(why: str) -> None:
    """Say what is not measured, and why; the last line has it, too."""
    if why not in _left_out:
        print(f"left out: {why}", flush=True)
        _left_out.append(why)


def finish(figures: list[Figure], **more: object) -> None:
    """Print the figures against their bars and, as the last line, one JSON object."""
    print()
    for figure in figures:
        value = "-" if figure.value is None else f"{figure.value:.4g}"
        bar = "" if figure.bar is None else f"(bar {figure.bar:g})"
        print(
            f"  {figure.name:32s} {value:>10s}  {bar:12s} {figure.verdict:9s} {figure.note}".rstrip()
        )
    last = {figure.name: figure.value for figure in figures} | more
    missed = [figure.name for figure in figures if figure.verdict == "MISSED"]
    last |= {MISSED: missed} if missed else {}
    last |= {LEFT_OUT: list(_left_out)} if _left_out else {}
    print(json.dumps(last, allow_nan=False))
    sys.stdout.flush()
    _left_out.clear()
