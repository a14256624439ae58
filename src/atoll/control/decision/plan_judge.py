"""Whether a new plan takes the place of the one in force.

Needed changes are made at once: more of what is asked is served, now or (`limits.survive`) after any loss
that is to be survived, or what stands exceeds the fleet's limits or is where its service may not stand. All
others must pay for what they start (`start_price`) while what they save lasts (`outlook`), and must not leave
a lane short on the way. A plan that serves less than what
stands is refused, whatever it saves: that there is no better one may be the planner's fault, or pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from atoll.control.decision.control_view import ControlPolicy
from atoll.control.decision.lane_capacity import (
    ROUNDING,
    CarriedLoad,
    Lanes,
    demand_by_lane,
    find_mixed,
    is_short,
)
from atoll.control.decision.machine_pool import rent_of
from atoll.control.decision.outlook import Outlook
from atoll.control.decision.start_price import price_starts
from atoll.core.units import format_price
from atoll.plan.losses import losses
from atoll.plan.plan import Instance, Plan, count_machines
from atoll.plan.problem import Problem

MIN_SHARE_GAIN = 0.01
"""By how much the worst served share must rise for a change that takes from others."""
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a plan is adopted, and why or why not."""

    adopt: bool
    reason: str


def judge(
    problem: Problem,
    new: Plan,
    living: Sequence[Instance],
    outlook: Outlook,
    dips: Callable[[], float],
) -> Verdict:
    """Return whether a plan is better than what lives of the one in force.

    `problem` has the demand and the offers as they are, `living` are the instances that stand or can be
    started at once, `outlook` is on what is asked now and later, and `dips` says which share of its demand a
    lane would lose at worst on the way to the new plan.
    """
    if new.status == "infeasible" or (not new.instances and living):
        why = new.reasons[0] if new.reasons else "no reason given"
        return Verdict(False, f"no plan serves this, what runs goes on: {why}")
    rerated = _rate_anew(living, new.instances)
    mixed = find_mixed(problem, (*rerated, *new.instances))
    pressing, policy = outlook.pressing(problem), outlook.policy
    demand = demand_by_lane(pressing, mixed)
    now = CarriedLoad(pressing, mixed, rerated).lanes()
    then = CarriedLoad(pressing, mixed, new.instances).lanes()
    # Before anything is weighed: no saving is worth a service that ends.
    emptied = _find_emptied(problem, rerated, new.instances)
    if emptied:
        return Verdict(False, f"refused: it would leave nothing of {', '.join(emptied)}")
    if not living:
        return Verdict(True, "nothing runs yet")
    # A fleet beyond its limits is changed even where less is served then.
    exceeded = _exceeds(problem, rerated)
    if exceeded:
        return Verdict(True, f"what runs exceeds the fleet's {exceeded}")
    # What other services stand on is changed with their part of a plan.
    still = _find_forbidden(problem, new.instances)
    forbidden = [kind for kind in _find_forbidden(problem, living) if kind not in still]
    if forbidden:
        return Verdict(True, f"what runs is on {', '.join(forbidden)}, which the fleet rules out")
    worst_now, worst_then = _worst_share(now, demand), _worst_share(then, demand)
    losing = _loses(now, then, demand)
    if worst_then > worst_now + (MIN_SHARE_GAIN if losing else ROUNDING):
        text = f"serves {worst_then:.1%} of the demand instead of {worst_now:.1%}"
        return _weigh_dips(text, worst_then - worst_now, policy, dips)
    if losing:
        return Verdict(False, f"refused: {', '.join(losing)} would carry less than now")
    gains = {
        lane: (min(demand[lane], then[lane]) - now[lane]) / demand[lane]
        for lane in sorted(demand)
        if is_short(now[lane], min(demand[lane], then[lane]))
    }
    if gains:
        text = f"more is served of {', '.join(gains)}"
        return _weigh_dips(text, max(gains.values()), policy, dips)
    if problem.limits.survival.lost:
        left_now = _worst_after_loss(pressing, mixed, rerated, demand)
        left_then = _worst_after_loss(pressing, mixed, new.instances, demand)
        if left_then > left_now + MIN_SHARE_GAIN:
            text = f"after a loss serves {left_then:.1%} of the demand instead of {left_now:.1%}"
            return _weigh_dips(text, left_then - left_now, policy, dips)
        if left_then < left_now - MIN_SHARE_GAIN:
            text = f"serve {left_then:.1%} of the demand after a loss, not {left_now:.1%}"
            return Verdict(False, f"refused: it would {text}")
    return _weigh_cost(problem, new, rerated, outlook, dips)


def _weigh_dips(
    text: str, gain: float, policy: ControlPolicy, dips: Callable[[], float]
) -> Verdict:
    """Weigh the share of demand served more until the next plan against the share lost on the way there."""
    lost = dips()
    # Both sides are shares of demand times seconds.
    if gain * policy.epoch_s <= lost * (policy.startup_s + policy.drain_s):
        return Verdict(False, f"{text}, but {lost:.0%} would be lost on the way: not worth it")
    return Verdict(True, text)


def _weigh_cost(
    problem: Problem,
    new: Plan,
    living: Sequence[Instance],
    outlook: Outlook,
    dips: Callable[[], float],
) -> Verdict:
    """Weigh what a change saves, for as long as that lasts, against what its starts cost."""
    names = {instance.id for instance in living}
    if names == {instance.id for instance in new.instances}:
        # The plan in force may have more, which cannot be started, and as it turns out need not be.
        return Verdict(True, "what runs is enough")
    before = rent_of(problem.offers, living)
    saving = before - rent_of(problem.offers, new.instances)
    if saving <= ROUNDING * before:
        return Verdict(False, "what runs serves the demand and no plan is cheaper")
    policy = outlook.policy
    price = price_starts((one for one in new.instances if one.id not in names), policy)
    # What is given up and will be asked for again has to be started again.
    until_s, missed = _find_end(problem, new, living, outlook)
    price += price_starts(missed, policy)
    lasts_s = min(policy.payback_s, until_s - outlook.time_s)
    text = (
        f"keeping costs {format_price(saving)} more until {_clock(outlook.time_s + lasts_s)}, "
        f"changing {price.describe()}"
    )
    if saving * lasts_s / _HOUR_S <= (1.0 + policy.margin) * price.usd:
        return Verdict(False, f"{text}: not worth it")
    # Asked last: the way there is walked only where all else speaks for the plan.
    if dips() > 0.0:
        return Verdict(
            False, f"{text}, but there is no room to do it without serving less meanwhile"
        )
    return Verdict(True, text)


def _find_end(
    problem: Problem, new: Plan, living: Sequence[Instance], outlook: Outlook
) -> tuple[float, list[Instance]]:
    """Return when a service is expected to need what a plan takes from it, and what would be started then."""
    every = frozenset(service.name for service in problem.services)
    now = CarriedLoad(problem, every, living)
    then = CarriedLoad(problem, every, new.instances)
    stays = {one.id for one in new.instances}
    until_s, missed = math.inf, []
    for service in problem.services:
        name = service.name
        left = then.of_service(name)[name]
        if left >= now.of_service(name)[name] * (1.0 - ROUNDING):
            continue
        end_s = outlook.suffices_until_s(service, left)
        if end_s is not None:
            until_s = min(until_s, end_s)
            missed += [one for one in living if name in one.services and one.id not in stays]
    return until_s, missed


def _clock(time_s: float) -> str:
    """Write a time of day."""
    return f"{datetime.fromtimestamp(time_s, UTC):%H:%M} UTC"


def _rate_anew(living: Sequence[Instance], new: Sequence[Instance]) -> tuple[Instance, ...]:
    """Return what lives with the throughput that the new plan gives its like: lengths may have changed."""
    known = {one.placement_key: (one.throughput_per_s, one.guests) for one in new}
    rated = []
    for one in living:
        rate, guests = known.get(one.placement_key, (one.throughput_per_s, one.guests))
        same = (rate, guests) == (one.throughput_per_s, one.guests)
        update = {"throughput_per_s": rate, "guests": guests}
        rated.append(one if same else one.model_copy(update=update))
    return tuple(rated)


def _find_emptied(
    problem: Problem, living: Sequence[Instance], new: Sequence[Instance]
) -> tuple[str, ...]:
    """Return the services that run now, are asked for, and have no place in the new plan."""
    asked = {service.name for service in problem.services if service.rate_per_s > 0.0}
    old, kept = ({name for one in some for name in one.services} for some in (living, new))
    return tuple(sorted((asked & old) - kept))


def _worst_share(carried: Lanes, demand: Lanes) -> float:
    """Return the least share of its demand that any lane carries, 1 at most."""
    shares = [min(1.0, carried[lane] / need) for lane, need in demand.items() if need > 0.0]
    return min(shares, default=1.0)


def _worst_after_loss(
    problem: Problem, mixed: frozenset[str], instances: Sequence[Instance], demand: Lanes
) -> float:
    """Return the least share of its demand that any lane carries after any loss, no more than must be kept.

    Of services that must be kept. A machine is lost with all that stands on it, a place with all of its
    machines.
    """
    survival = problem.limits.survival
    every = CarriedLoad(problem, mixed)
    covered = {
        lane
        for s in problem.services
        if survival.covers(s.name)
        for lane in every.of_service(s.name)
    }
    demand = {lane: need for lane, need in demand.items() if lane in covered}
    left = [
        CarriedLoad(problem, mixed, [one for one in instances if one.id not in loss.instances])
        for loss in losses(instances, survival)
    ]
    return min((min(survival.keep, _worst_share(one.lanes(), demand)) for one in left), default=0.0)


def _loses(now: Lanes, then: Lanes, demand: Lanes) -> tuple[str, ...]:
    """Return the lanes that would carry less than they do now and than is asked."""
    return tuple(
        sorted(lane for lane in demand if is_short(then[lane], min(demand[lane], now[lane])))
    )


def _exceeds(problem: Problem, living: Sequence[Instance]) -> str | None:
    """Return which limit what runs exceeds."""
    budget, most = problem.limits.budget_usd_per_hour, problem.limits.max_nodes
    if budget is not None and rent_of(problem.offers, living) > budget * (1.0 + ROUNDING):
        return "budget"
    if most is not None and count_machines(living).total() > most:
        return "number of machines"
    return None


def _find_forbidden(problem: Problem, living: Sequence[Instance]) -> list[str]:
    """Return the kinds of nodes that services stand on and may not, as after `only` was changed."""
    services = {service.name: service for service in problem.services}
    return sorted(
        {
            node.kind
            for one in living
            for node in one.nodes
            if one.service in services and not services[one.service].allows(node.kind)
        }
    )
