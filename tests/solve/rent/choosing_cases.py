"""Random problems of levels and machines, in whole numbers, and their optimum by CP-SAT."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from atoll.solve.rent.allocation_types import AllocationLimits
from atoll.solve.rent.choosing.level_rows import ChoiceRow, LevelRows
from tests.solve.rent.cases import Case, random_case

_WORKER = Path(__file__).parents[2] / "reference" / "choice_cpsat_worker.py"
_MILLI = 1000.0


@dataclass(frozen=True)
class ChoiceCase:
    """What `choose_levels` is given."""

    case: Case
    rows: LevelRows


def random_choices(
    seed: int, *, ways: int = 3, shared: bool = False, running: bool = False, limited: bool = False
) -> ChoiceCase:
    """Choices between a few services, rates and demands in whole numbers of 1/1000."""
    rng = np.random.default_rng(seed + 1000)
    services = ways + (2 if shared else 1)
    case = random_case(seed, services=services, scarce=0.8, running=running, most=5)
    everywhere = np.ones(len(case.supply.kinds), np.bool_)
    case = replace(case, services=tuple(replace(s, allowed=everywhere) for s in case.services))
    choices = []
    own = list(range(ways))
    if shared:
        # Two choices, one way of both.
        middle = ways // 2
        choices.append(_random_choice(rng, "a", own[: middle + 1]))
        choices.append(_random_choice(rng, "b", [*own[middle:], ways]))
    else:
        choices.append(_random_choice(rng, "a", own))
    rows = LevelRows(tuple(choices))
    if not rows.possible:
        rows = LevelRows(tuple(replace(row, max_error=None, floors=()) for row in choices))
    limits = AllocationLimits()
    if limited:
        limits = AllocationLimits(
            budget=None if rng.random() < 0.5 else round(float(rng.uniform(4.0, 12.0)), 2),
            max_nodes=None if rng.random() < 0.5 else int(rng.integers(3, 8)),
            spread=1 if rng.random() < 0.6 else 2,
        )
    return ChoiceCase(_whole(replace(case, limits=limits)), rows)


def _random_choice(rng: np.random.Generator, name: str, ways: Sequence[int]) -> ChoiceRow:
    errors = tuple(int(e) / 1e6 for e in np.sort(rng.integers(5_000, 90_000, len(ways)))[::-1])
    best, worst = min(errors), max(errors)
    max_error: float | None = None
    if rng.random() < 0.8:
        max_error = round(best + float(rng.uniform(0.2, 0.9)) * (worst - best), 6)
    floors: tuple[tuple[tuple[int, ...], float], ...] = ()
    if rng.random() < 0.4:
        floors = (((ways[int(np.argmin(errors))],), 0.1),)
    return ChoiceRow(name, tuple(ways), errors, max_error, floors)


def _whole(case: Case) -> Case:
    """The case with rates and demands rounded to 1/1000, prices to 1/10000."""
    services = []
    for asked in case.services:
        roles = tuple(
            replace(
                role,
                throughput=np.round(role.throughput * _MILLI) / _MILLI,
                demand=round(role.demand * _MILLI) / _MILLI,
            )
            for role in asked.roles
        )
        services.append(replace(asked, roles=roles))
    running = tuple(
        replace(kept, throughput=round(kept.throughput * _MILLI) / _MILLI) for kept in case.running
    )
    supply = replace(case.supply, usd=np.round(case.supply.usd, 4))
    return replace(case, services=tuple(services), supply=supply, running=running)


def describe(given: ChoiceCase) -> dict[str, Any]:
    """Return a case as the worker reads it."""
    case, supply = given.case, given.case.supply
    many = range(len(supply.usd))
    limits = case.limits
    return {
        "regions": len(supply.regions),
        "init_penalty": case.init_penalty,
        "spread": limits.spread,
        "budget": limits.budget,
        "max_nodes": limits.max_nodes,
        "offers": [
            {
                "region": int(supply.region[k]),
                "gpus": int(supply.gpus[k]),
                "usd": float(supply.usd[k]),
                "available": int(supply.available[k]),
                "sizes": [list(size) for size in supply.sizes[k]],
            }
            for k in many
        ],
        "services": [
            {
                "demand": round(asked.roles[0].demand * _MILLI),
                "roles": [
                    {
                        "phase": role.phase,
                        "templates": [
                            (
                                [(int(c), int(role.counts[t, c])) for c in np.flatnonzero(some)],
                                round(float(role.throughput[t]) * _MILLI),
                            )
                            for t, some in enumerate(role.counts)
                            if np.all(asked.allowed[np.flatnonzero(some)])
                        ],
                    }
                    for role in asked.roles
                ],
            }
            for asked in case.services
        ],
        "running": [
            {
                "service": kept.service,
                "phase": kept.phase,
                "region": kept.region,
                "gpus": [list(some) for some in kept.gpus],
                "number": kept.number,
                "rate": round(kept.throughput * _MILLI),
            }
            for kept in case.running
        ],
        "choices": [
            {
                "ways": row.ways,
                "errors": [round(e * 1e6) for e in row.errors],
                "max_error": None if row.max_error is None else round(row.max_error * 1e6),
                "floors": [(ways, round(least * 1e6)) for ways, least in row.floors],
            }
            for row in given.rows.by_choice
        ],
    }


def optima(cases: Sequence[ChoiceCase], work: float = 3.0) -> list[float | None] | None:
    """Return the least costs by CP-SAT, None where ortools is not installed."""
    request = {"cases": [describe(case) for case in cases], "work": work}
    done = subprocess.run(
        [sys.executable, str(_WORKER)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode == 6:
        return None
    assert done.returncode == 0, done.stderr
    found: list[float | None] = json.loads(done.stdout)["optima"]
    return found
