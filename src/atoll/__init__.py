"""Atoll: one service for many models on a pile of different GPUs.

    from atoll import Fleet

    fleet = Fleet.load("fleet.yaml")
    plan = fleet.plan()
    report = plan.simulate(seed=1)

A fleet can be built of typed objects too, the sections of a fleet file: `Fleet.of(name, services, pool=...)`.
Everything named here is loaded when it is first used: importing `atoll` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from atoll.core.version import __version__

if TYPE_CHECKING:
    from atoll.api.fleet import Fleet
    from atoll.api.fleet_diff import FleetDiff
    from atoll.api.fleet_explanation import FleetExplanation
    from atoll.api.fleet_plan import FleetPlan
    from atoll.api.fleet_report import FleetReport
    from atoll.api.running import FleetOperations, RunningFleet
    from atoll.api.served_plan import ServedPlan, ServeOptions
    from atoll.catalog.catalog import Catalog
    from atoll.control.operation.options import OperationListener, OperationOptions
    from atoll.core.errors import AtollError
    from atoll.core.listener import Listener
    from atoll.plan.files.choice_schema import GridSpec, ObjectiveSpec, VariantSpec
    from atoll.plan.files.class_schema import ImageSpec, ImagesSpec, RequestClassSpec, VideoSpec
    from atoll.plan.files.fleet_schema import (
        CloudSpec,
        ClusterSpec,
        EngineSpec,
        LengthsSpec,
        LimitsSpec,
        LinkSpec,
        MachinesSpec,
        OfferSpec,
        OwnedSpec,
        PoolSpec,
        RiskSpec,
        ServiceSpec,
        SettingsSpec,
    )
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.sim.sim_result import SimReport
    from atoll.solve.effort import Effort
    from atoll.solve.solve_progress import Progress

_HOME = {
    "AtollError": "atoll.core.errors",
    "Catalog": "atoll.catalog.catalog",
    "CloudSpec": "atoll.plan.files.fleet_schema",
    "ClusterSpec": "atoll.plan.files.fleet_schema",
    "Effort": "atoll.solve.effort",
    "EngineSpec": "atoll.plan.files.fleet_schema",
    "Fleet": "atoll.api.fleet",
    "FleetDiff": "atoll.api.fleet_diff",
    "FleetExplanation": "atoll.api.fleet_explanation",
    "FleetOperations": "atoll.api.running",
    "FleetPlan": "atoll.api.fleet_plan",
    "FleetReport": "atoll.api.fleet_report",
    "GridSpec": "atoll.plan.files.choice_schema",
    "ImageSpec": "atoll.plan.files.class_schema",
    "ImagesSpec": "atoll.plan.files.class_schema",
    "LengthsSpec": "atoll.plan.files.fleet_schema",
    "LimitsSpec": "atoll.plan.files.fleet_schema",
    "LinkSpec": "atoll.plan.files.fleet_schema",
    "Listener": "atoll.core.listener",
    "MachinesSpec": "atoll.plan.files.fleet_schema",
    "ObjectiveSpec": "atoll.plan.files.choice_schema",
    "OfferSpec": "atoll.plan.files.fleet_schema",
    "OperationListener": "atoll.control.operation.options",
    "OperationOptions": "atoll.control.operation.options",
    "OwnedSpec": "atoll.plan.files.fleet_schema",
    "Plan": "atoll.plan.plan",
    "PoolSpec": "atoll.plan.files.fleet_schema",
    "Problem": "atoll.plan.problem",
    "Progress": "atoll.solve.solve_progress",
    "RequestClassSpec": "atoll.plan.files.class_schema",
    "RiskSpec": "atoll.plan.files.fleet_schema",
    "RunningFleet": "atoll.api.running",
    "ServeOptions": "atoll.api.served_plan",
    "ServedPlan": "atoll.api.served_plan",
    "ServiceSpec": "atoll.plan.files.fleet_schema",
    "SettingsSpec": "atoll.plan.files.fleet_schema",
    "SimReport": "atoll.sim.sim_result",
    "VariantSpec": "atoll.plan.files.choice_schema",
    "VideoSpec": "atoll.plan.files.class_schema",
}

__all__ = [
    "AtollError",
    "Catalog",
    "CloudSpec",
    "ClusterSpec",
    "Effort",
    "EngineSpec",
    "Fleet",
    "FleetDiff",
    "FleetExplanation",
    "FleetOperations",
    "FleetPlan",
    "FleetReport",
    "GridSpec",
    "ImageSpec",
    "ImagesSpec",
    "LengthsSpec",
    "LimitsSpec",
    "LinkSpec",
    "Listener",
    "MachinesSpec",
    "ObjectiveSpec",
    "OfferSpec",
    "OperationListener",
    "OperationOptions",
    "OwnedSpec",
    "Plan",
    "PoolSpec",
    "Problem",
    "Progress",
    "RequestClassSpec",
    "RiskSpec",
    "RunningFleet",
    "ServeOptions",
    "ServedPlan",
    "ServiceSpec",
    "SettingsSpec",
    "SimReport",
    "VariantSpec",
    "VideoSpec",
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
