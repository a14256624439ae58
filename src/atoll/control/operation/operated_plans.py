"""Plans of a fleet that is operated: the planner its controller asks, and which models answer its choices.

Shares of models (`MixSettler`) are planned once, and gateways send requests by them. What is operated is the
fleet that the shares leave: plain services, whose demand is counted by the model that answers. Shares stay
until somebody plans the fleet anew, or its file says something else of its choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from atoll.control.decision.control_view import ControlPolicy, Memory, View, list_mixes
from atoll.control.decision.decide import MakePlan
from atoll.control.decision.instance_names import name_instances
from atoll.control.decision.path import CapacityDip, PathQuestion, foresee
from atoll.control.decision.restate import restate_demand
from atoll.core.errors import InfeasibleError
from atoll.plan.choice import ModelMix
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Problem


def make_planner(deadline_s: float = 60.0) -> MakePlan:
    """Return a planner that takes the best plan it has found after so many seconds.

    What it spends does not depend on the clock unless the deadline comes first. Likely errors of the
    performance model are not looked at: they change no plan.
    """

    def plan(problem: Problem) -> Plan:
        from atoll.prove.planning import plan as make_plan
        from atoll.solve.effort import LEVELS, Effort
        from atoll.solve.plan_request import PlanRequest

        effort = Effort(work=LEVELS["low"])
        return make_plan(
            problem,
            PlanRequest(effort=effort, deadline_s=deadline_s, rank=False, error_bars=False),
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
        if seen.status.state in ("starting", "ready")
    }
    named = name_instances(plan, running, view.time_s, [seen.id for seen in view.instances])
    return Memory(
        asked=view.problem,
        plan=named,
        plan_hash=named.content_hash()[:16],
        planned_s=view.time_s,
        bands=tuple((service.name, service.rate_per_s) for service in view.problem.services),
        mixes=list_mixes(view.problem),
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


class MixSettler:
    """Keeps the mixes of a fleet's choices; `plan` is asked for others where the known ones do not fit."""

    def __init__(self, known: Iterable[ModelMix], plan: MakePlan) -> None:
        self.mixes = tuple(known)
        self._plan = plan

    def settle(self, problem: Problem) -> Problem:
        """Return the problem of plain services that the mixes leave."""
        if problem.is_settled:
            self.mixes = ()
            return problem
        fitting = problem.fit_mixes(self.mixes)
        if fitting is None:
            fitting = self._plan(problem).mixes
            if {mix.name for mix in fitting} != set(problem.variants):
                raise InfeasibleError(
                    f"no plan says which models answer for {problem.name}",
                    hint="`atoll plan` says why; allow more error, or give it more machines",
                )
        self.mixes = fitting
        return problem.settled(fitting)
