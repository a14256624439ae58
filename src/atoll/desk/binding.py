"""What binds a plan, and what loosening it is worth: a job, since it takes planning again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.api.plan import FleetPlan
from atoll.desk.worker import Report, Said
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem

if TYPE_CHECKING:
    from atoll.solve.explain.explanation import Constraint

_DEADLINE_S = 60.0
_MOST_BINDS = 24


def find_binds(arguments: Said, report: Report) -> Said:
    """Return `binds` of a plan (`worker.Job`); takes the JSON text of `problem` and `plan`."""
    report({"text": "planning again", "share": None})
    problem = Problem.from_json(arguments["problem"])
    plan = FleetPlan.of(Plan.from_json(arguments["plan"]), problem)
    found = plan.explain(repairs=False, deadline_s=_DEADLINE_S)
    return {"binds": [describe_bind(one) for one in found.constraints[:_MOST_BINDS]]}


def describe_bind(constraint: Constraint) -> dict[str, str | None]:
    """Return a constraint as `{"what", "price"}`; the price is None where nobody asked for it."""
    what = constraint.model_copy(update={"worth": None}).text
    if constraint.worth is None:
        return {"what": what, "price": None}
    return {"what": what, "price": f"{constraint.loosened} would {constraint.worth.text}"}
