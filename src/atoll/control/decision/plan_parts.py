"""Parts of a new plan, service by service: what one needs is no reason to change what another has.

Where services share nothing but machines on offer, each service's part is judged by itself, beside what the
others have by then; those that do not pay stay out. Where limits bind services together a plan is judged
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from atoll.control.decision.machine_pool import MachinePool, rent_of
from atoll.control.decision.outlook import Outlook
from atoll.control.decision.plan_judge import Verdict, judge
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Problem


def judge_parts(
    problem: Problem,
    new: Plan,
    in_force: Plan,
    living: Sequence[Instance],
    outlook: Outlook,
    dips_to: Callable[[Plan], float],
) -> tuple[Plan, Verdict] | None:
    """Return a plan with the parts of a new one that are worth it, and why; None: it has to be judged whole.

    `living` are the instances of the plan in force that stand or can be started at once, `dips_to` says which
    share of its demand a lane would lose at worst on the way to a plan.
    """
    names = [service.name for service in problem.services]
    before, after = _by_service(names, in_force.instances), _by_service(names, new.instances)
    changed = [name for name in names if _ids(before[name]) != _ids(after[name])]
    shared = any(one.guests for one in (*in_force.instances, *new.instances))
    if len(changed) < 2 or shared or not _are_apart(problem) or not all(before.values()):
        return None
    chosen, adopted = dict(before), frozenset[str]()
    reasons: list[tuple[str, Verdict]] = []
    alive = _by_service(names, living)
    for name in changed:
        here = {**chosen, name: after[name]}
        candidate = _compose(problem, new, in_force, here, adopted | {name})
        stands = [one for each in names for one in (alive if each == name else here)[each]]
        verdict = judge(problem, candidate, stands, outlook, partial(dips_to, candidate))
        reasons.append((name, verdict))
        if verdict.adopt:
            chosen, adopted = here, adopted | {name}
    verdict = Verdict(bool(adopted), _describe(reasons))
    if len(adopted) == len(changed):
        return new, verdict
    plan = _compose(problem, new, in_force, chosen, adopted)
    if not _fits(problem, plan, living):
        return None
    return plan, verdict


def _describe(verdicts: Sequence[tuple[str, Verdict]]) -> str:
    """Return why parts are taken or not; which is which only where some are."""
    some = any(verdict.adopt for _, verdict in verdicts)
    return "; ".join(
        f"{name}{(' changed' if verdict.adopt else ' kept') if some else ''}: {verdict.reason}"
        for name, verdict in verdicts
    )


def _by_service(names: Sequence[str], instances: Sequence[Instance]) -> dict[str, list[Instance]]:
    found: dict[str, list[Instance]] = {name: [] for name in names}
    for one in instances:
        if one.service in found:
            found[one.service].append(one)
    return found


def _ids(instances: Sequence[Instance]) -> set[str]:
    return {one.id for one in instances}


def _are_apart(problem: Problem) -> bool:
    """Whether services share nothing but the machines on offer."""
    limits = problem.limits
    return (
        limits.budget_usd_per_hour is None
        and limits.spot_share is None
        and limits.max_nodes is None
        and limits.spread == 1
        and not limits.survival.lost
        and not problem.choices
    )


def _compose(
    problem: Problem,
    new: Plan,
    in_force: Plan,
    chosen: Mapping[str, Sequence[Instance]],
    adopted: frozenset[str],
) -> Plan:
    """Return a plan with these instances; routes of adopted services are the new plan's, others stay.

    So are paths over just the executors that the new plan has.
    """
    planned = _by_service(list(chosen), new.instances)
    as_new = {name for name, here in chosen.items() if _ids(here) == _ids(planned[name])}
    instances = tuple(one for some in chosen.values() for one in some)
    return new.model_copy(
        update={
            "instances": instances,
            "routes": tuple(
                sorted(
                    (
                        *(route for route in new.routes if route.service in adopted),
                        *(route for route in in_force.routes if route.service not in adopted),
                    ),
                    key=lambda route: (route.service, route.instances),
                )
            ),
            "paths": tuple(
                sorted(
                    (
                        *(path for path in new.paths if path.service in as_new),
                        *(path for path in in_force.paths if path.service not in as_new),
                    ),
                    key=lambda path: (path.service, path.klass),
                )
            ),
            "usd_per_hour": rent_of(problem.offers, instances),
            # Proven of the whole new plan alone.
            "status": "feasible" if new.status == "optimal" else new.status,
            "objective": None,
            "bound": None,
            "gap": None,
            "capacity_bound": None,
            "promises": tuple(one for one in new.promises if one.service in adopted),
        }
    )


def _fits(problem: Problem, plan: Plan, living: Sequence[Instance]) -> bool:
    """Return whether the machines of a plan can be had all at once."""
    stands = {one.id for one in living}
    pool = MachinePool(problem.offers, (one for one in plan.instances if one.id in stands))
    for one in plan.instances:
        if one.id not in stands:
            if not pool.has_room(one):
                return False
            pool.take(one)
    return True
