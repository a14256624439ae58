"""Progress of long work: planning, proving, simulating."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Progress(NamedTuple):
    """How far something is: its stage in a word, what there is to say, and the share done (None: unknown).

    While a solver searches, the text names its best plan, what is proven and the gap. `work` counts what the
    search has done so far, by name; what is told last goes into `SolveStats`.
    """

    stage: str
    text: str
    share: float | None = None
    work: Mapping[str, int] | None = None


OnProgress = Callable[[Progress], None]


def describe_progress(progress: Progress) -> str:
    """Return progress in a line."""
    share = "" if progress.share is None else f" {progress.share:.0%}"
    return f"{progress.stage}{share}: {progress.text}"


@dataclass
class SolveStats:
    """Work that plans took, added up by `solve`; kept apart from plans so that equal plans stay equal.

    `work` counts what searches did, by name: linear programs, integer nodes, rounds, evaluations.
    `compile_seconds` came before: compiling, once on a machine.
    """

    # Any two are equal: plans that carry them differ only where their fields do.
    seconds: float = field(default=0.0, compare=False)
    cpu_seconds: float = field(default=0.0, compare=False)
    work: dict[str, int] = field(default_factory=dict, compare=False)
    compile_seconds: float = field(default=0.0, compare=False)

    def watch(self, on_progress: OnProgress | None) -> OnProgress:
        """Return a listener that passes progress on and notes the work it tells of."""

        def tell(progress: Progress) -> None:
            if progress.work is not None:
                self.work.update(progress.work)
            if on_progress is not None:
                on_progress(progress)

        return tell

    def add(self, other: SolveStats) -> None:
        """Add what another plan took."""
        self.seconds += other.seconds
        self.cpu_seconds += other.cpu_seconds
        self.compile_seconds += other.compile_seconds
        for name, number in other.work.items():
            self.work[name] = self.work.get(name, 0) + number

    @property
    def text(self) -> str:
        """All of it in a line."""
        counts = "".join(f", {name} {number:,}" for name, number in sorted(self.work.items()))
        return f"{self.seconds:.2f} s, {self.cpu_seconds:.2f} CPU-s{counts}"
