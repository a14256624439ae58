"""What is found of one case of `benchmarks.survive`, whichever family it is of."""

from __future__ import annotations

from dataclasses import dataclass

from tests.slow.plans.case_runs import CaseOutcome

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
class Outcome(CaseOutcome):
    """What was found of a case, and the share that surviving costs more."""

    enumerated: bool = True
    price: float | None = None
    cpu_s: float | None = None
    plain_cpu_s: float | None = None
