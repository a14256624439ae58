"""What is told while something long runs: planning, proving, simulating."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Progress(NamedTuple):
    """How far something is: its stage in a word, what there is to say, and the share done (None: unknown)."""

    stage: str
    text: str
    share: float | None = None


OnProgress = Callable[[Progress], None]
