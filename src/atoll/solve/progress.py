"""What is told while something long runs: planning, proving, simulating."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class Progress(NamedTuple):
    """How far something is: its stage in a word, what there is to say, and the share done (None: unknown)."""

    stage: str
    text: str
    share: float | None = None


OnProgress = Callable[[Progress], None]


@dataclass
class SolveStats:
    """What a plan took, filled in by `solve`; kept apart from the plan so that equal plans stay equal.

    `work` counts what the search did, by name: linear programmes, integer nodes, rounds, evaluations.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    work: dict[str, int] = field(default_factory=dict)
