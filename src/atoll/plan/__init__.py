"""The waist of Atoll: `Problem -> Plan`, and everything that reads the two.

    problem     services with promises and demand, offers of nodes, limits: what a planner is given
    plan        instances with layer ranges and flows, routes, cost, proven bound: what it returns
    cluster     machines that are there and the network between them, instead of offers
    files/      the YAML a person writes, and other systems' formats, turned into a problem
    capacities  what one node carries of a service, as solvers and the validator both count it
    validate/   whether a plan keeps what it says, without trusting the solver that made it
    proof       what is known of how good a plan is, in words that everybody shares
    request_groups, kept_groups  which requests of a service keep promises of their own, and whether they do
    plan_diff, cost  what changes from one plan to the next, and where the money goes

Start reading at `problem` and `plan`; they are the waist between solvers and everything else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.plan.cost import CostReport, cost_report
    from atoll.plan.files.fleet_file import load_fleet
    from atoll.plan.plan import Flow, Instance, Market, Node, Plan, Route
    from atoll.plan.plan_diff import PlanDiff
    from atoll.plan.problem import Lengths, Limits, Offer, Problem, Service, Settings
    from atoll.plan.validate.check import InvalidPlanError, Violation, check

# Loaded on first use: reading a plan should not cost NumPy and the performance model.
_HOME = {
    "CostReport": "cost",
    "Flow": "plan",
    "Instance": "plan",
    "InvalidPlanError": "validate.violation",
    "Lengths": "problem",
    "Limits": "problem",
    "Market": "plan",
    "Node": "plan",
    "Offer": "problem",
    "Plan": "plan",
    "PlanDiff": "plan_diff",
    "Problem": "problem",
    "Route": "plan",
    "Service": "problem",
    "Settings": "problem",
    "Violation": "validate.violation",
    "check": "validate.check",
    "cost_report": "cost",
    "load_fleet": "files.fleet_file",
}

__all__ = [
    "CostReport",
    "Flow",
    "Instance",
    "InvalidPlanError",
    "Lengths",
    "Limits",
    "Market",
    "Node",
    "Offer",
    "Plan",
    "PlanDiff",
    "Problem",
    "Route",
    "Service",
    "Settings",
    "Violation",
    "check",
    "cost_report",
    "load_fleet",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"atoll.plan.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
