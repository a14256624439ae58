"""How a check ends: its figures in a table and as JSON, and exit code 1 where what must be 0 is not."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from benchmarks.report import Figure, finish


def conclude(figures: list[Figure], **more: object) -> None:
    """Print the figures as benchmarks do; end the process with code 1 if one with a bar of 0 is above it."""
    finish(figures, **more)
    wrong = [
        f"{figure.name} {figure.value:g}"
        for figure in figures
        if figure.bar == 0 and not figure.at_least and figure.value
    ]
    if wrong:
        sys.exit(f"must be 0: {', '.join(wrong)}")


def percentile_s(seconds: Sequence[float], percent: float) -> float | None:
    """Return a percentile of seconds, of nothing if there is nothing."""
    return round(float(np.percentile(seconds, percent)), 4) if seconds else None


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    """Return the same in milliseconds."""
    found = percentile_s(seconds, percent)
    return None if found is None else round(found * 1e3, 1)
