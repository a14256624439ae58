"""The planner that the controller asks: promises kept by simulation, with little effort."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.control.decision.decide import MakePlan
from atoll.control.decision.names import name_instances
from atoll.control.decision.path import CapacityDip, PathQuestion, foresee
from atoll.control.decision.restate import restate_demand
from atoll.control.decision.view import ControlPolicy, Memory, View
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Problem


def make_planner(deadline_s: float = 60.0) -> MakePlan:
    """Return a planner that takes the best plan it has found after so many seconds.

    What it spends does not depend on the clock unless the deadline comes first. Likely errors of the
    performance model are not looked at: they change no plan.
    """

    def plan(problem: Problem) -> Plan:
        from atoll.prove.plan import plan as make_plan
        from atoll.solve.effort import LEVELS, Effort

        return make_plan(
            problem,
            effort=Effort(work=LEVELS["low"]),
            deadline_s=deadline_s,
            rank=False,
            error_bars=False,
        )

    return plan


def pin_plan(plan: Plan) -> MakePlan:
    """Return a planner that always answers with one plan: somebody has chosen it."""
    return lambda _problem: plan


def force_plan(plan: Plan, view: View) -> Memory:
    """Return the memory of a controller that has a plan in force because somebody said so.

    What runs keeps its name where the plan has its like.
    """
    running = {
        seen.id: seen.instance
        for seen in view.instances
        if seen.standing.state in ("starting", "ready")
    }
    named = name_instances(plan, running, view.time_s, [seen.id for seen in view.instances])
    return Memory(
        asked=view.problem,
        plan=named,
        plan_hash=named.content_hash()[:16],
        planned_s=view.time_s,
        bands=tuple((service.name, service.rate_per_s) for service in view.problem.services),
        offers=view.offers,
    )


def foresee_dips(
    wanted: Sequence[Instance], view: View, policy: ControlPolicy
) -> tuple[CapacityDip, ...]:
    """Return the dips on the whole way from what stands to these instances."""
    problem = restate_demand(view, {}, policy)
    return foresee(PathQuestion(problem, view.instances, wanted, view.time_s, policy)).dips


def put_phases_together(problem: Problem) -> Problem:
    """Return a problem whose services run both phases together unless they ask for phases apart.

    Together is what every engine does; apart needs Atoll's own, and somebody who says so.
    """
    return problem.replace(
        services=tuple(
            service.model_copy(update={"phases": "together"})
            if service.phases == "auto"
            else service
            for service in problem.services
        )
    )
