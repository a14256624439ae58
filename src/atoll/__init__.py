"""Atoll: one service for many models on a pile of different GPUs.

    from atoll import Fleet

    fleet = Fleet.load("fleet.yaml")
    plan = fleet.plan()
    report = plan.simulate(seed=1)

Everything named here is loaded when it is first used: importing `atoll` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from atoll.core.version import __version__

if TYPE_CHECKING:
    from atoll.api.diff import FleetDiff
    from atoll.api.explanation import FleetExplanation
    from atoll.api.fleet import Fleet
    from atoll.api.plan import FleetPlan
    from atoll.api.report import FleetReport
    from atoll.catalog.catalog import Catalog
    from atoll.core.errors import AtollError
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.sim.result import SimReport
    from atoll.solve.effort import Effort
    from atoll.solve.progress import Progress

_HOME = {
    "AtollError": "atoll.core.errors",
    "Catalog": "atoll.catalog.catalog",
    "Effort": "atoll.solve.effort",
    "Fleet": "atoll.api.fleet",
    "FleetDiff": "atoll.api.diff",
    "FleetExplanation": "atoll.api.explanation",
    "FleetPlan": "atoll.api.plan",
    "FleetReport": "atoll.api.report",
    "Plan": "atoll.plan.plan",
    "Problem": "atoll.plan.problem",
    "Progress": "atoll.solve.progress",
    "SimReport": "atoll.sim.result",
}

__all__ = [
    "AtollError",
    "Catalog",
    "Effort",
    "Fleet",
    "FleetDiff",
    "FleetExplanation",
    "FleetPlan",
    "FleetReport",
    "Plan",
    "Problem",
    "Progress",
    "SimReport",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
