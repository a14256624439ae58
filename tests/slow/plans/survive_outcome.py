"""What is found of one case of `benchmarks.survive`, whichever family it is of."""

from __future__ import annotations

from dataclasses import dataclass, field

CHEAPER = 0.02
"""Share by which a plan must be cheaper to count."""
DEADLINE_S = 120.0
FAULTS = (
    "does_not_survive",
    "dearer",
    "bound_false",
    "refused_wrongly",
    "sharer_below",
    "spot_below",
    "link_false",
    "shortage_below",
)


@dataclass
class Outcome:
    """What was found of a case: `faults` in words by name, and the share that surviving costs more."""

    seed: int
    kind: str
    status: str = ""
    usd_per_hour: float | None = None
    bound: float | None = None
    enumerated: bool = True
    price: float | None = None
    cpu_s: float | None = None
    plain_cpu_s: float | None = None
    faults: dict[str, list[str]] = field(default_factory=dict)

    def fault(self, name: str, text: str) -> None:
        """Note that something is false."""
        self.faults.setdefault(name, []).append(text)
