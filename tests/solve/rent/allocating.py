"""Allocations of cases, each checked."""

from __future__ import annotations

from typing import Any

from atoll.solve.rent.allocation import allocate
from atoll.solve.rent.allocation_types import Allocation, Shortage
from tests.solve.rent.cases import Case, faults


def solve(
    case: Case,
    on_shortage: Shortage = "fraction",
    *,
    gap: float = 1e-7,
    deadline_s: float = 60.0,
    **more: Any,
) -> Allocation:
    """Return what the allocator finds, which must be sound."""
    answer = allocate(
        case.services,
        case.supply,
        case.limits,
        init_penalty=case.init_penalty,
        running=case.running,
        on_shortage=on_shortage,
        gap=gap,
        deadline_s=deadline_s,
        **more,
    )
    assert faults(case, answer) == []
    return answer
