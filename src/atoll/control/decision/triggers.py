"""When to plan: reasons that what is seen gives to make a plan before its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.control.decision.backoff import Lost
from atoll.control.decision.control_view import ControlPolicy, Memory
from atoll.control.decision.instance_names import hash_place
from atoll.control.decision.lane_capacity import (
    CarriedLoad,
    demand_by_lane,
    find_mixed,
    find_short,
)
from atoll.control.decision.situation import Situation
from atoll.plan.plan import count_machines
from atoll.plan.problem import Offer


def find_triggers(situation: Situation, lost: Sequence[Lost]) -> dict[str, str]:
    """Return why a plan should be made now, in words, by a short name for each reason."""
    view, memory, policy = situation.view, situation.memory, situation.policy
    found: dict[str, str] = {}
    if memory.planned_s is None:
        found["first"] = "no plan is known yet"
    elif view.time_s - memory.planned_s >= policy.epoch_s:
        found["epoch"] = f"{policy.epoch_s:g} s since the last plan"
    if memory.asked is not None and memory.asked != view.problem:
        found["asked"] = "what the fleet asks for has changed"
    for one in lost:
        what = "did not start" if one.starting else "was lost"
        found[f"lost {one.id}"] = f"{one.id} {what}: {one.reason}"
    for name in situation.renewed:
        if name in situation.leaving:
            found[f"ends {name}"] = f"{name} ends soon"
    found |= _demand_triggers(situation)
    found |= _market_triggers(situation)
    for seen in view.promises:
        if seen.requests >= policy.enough_requests and seen.is_broken:
            of = "" if seen.group is None else f" of {seen.group}"
            text = (
                f"{seen.service} keeps its promises for {seen.kept:.1%}{of}, not {seen.target:.1%}"
            )
            found[f"promise {seen.service}{of}"] = text
    return found


def _demand_triggers(situation: Situation) -> dict[str, str]:
    """Return services whose demand or mix has left the band of the plan, and lanes that are short."""
    policy, problem = situation.policy, situation.problem
    bands = dict(situation.memory.bands)
    found: dict[str, str] = {}
    for service in problem.services:
        rate, planned = service.rate_per_s, bands.get(service.name)
        if planned is None:
            continue
        if not planned * (1.0 - policy.band_down) <= rate <= planned * (1.0 + policy.band_up):
            text = f"{service.name} is expected to get {rate:.3g} requests/s, planned {planned:.3g}"
            found[f"demand {service.name}"] = text
        mix = situation.memory.mixes.get(service.name, {})
        for klass in service.classes:
            before = mix.get(klass.name, klass.share)
            if abs(klass.share - before) > policy.mix_moves:
                found[f"mix {service.name}/{klass.name}"] = (
                    f"'{klass.name}' is {klass.share:.0%} of {service.name}'s requests, planned {before:.0%}"
                )
    living, pressing = situation.living(), situation.outlook.pressing(problem)
    mixed = find_mixed(problem, living)
    carried = CarriedLoad(pressing, mixed, living).lanes()
    for lane in find_short(carried, demand_by_lane(pressing, mixed)):
        found[f"short {lane}"] = f"{lane} carries less than is asked with the plan in force"
    running = situation.running()
    for one in situation.wanted:
        if one.id not in running and situation.held.blocks(one):
            # By its place: a name changes with every plan, which would make a new reason of an old one.
            found[f"held {hash_place(one)}"] = f"{one.id} cannot be started there for now"
    return found


def _market_triggers(situation: Situation) -> dict[str, str]:
    """Return offers whose price or count has moved since a plan was made or sought, where that may matter.

    What nobody uses and is dearer, or cannot be had any more, makes no other plan the best.
    """
    policy, found = situation.policy, {}
    used = count_machines(situation.wanted)
    if situation.memory.tried_s is None or situation.memory.offers == situation.view.offers:
        return {}
    before = {offer.key: offer for offer in situation.memory.offers}
    after = {offer.key: offer for offer in situation.view.offers}
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        name = " ".join(key)
        was, now = (0 if offer is None else offer.available for offer in (old, new))
        if key not in used and now <= was and _is_no_cheaper(old, new):
            continue
        # From none to some, and to none, counts however few they are.
        if abs(now - was) > policy.count_moves * max(was, now) or (was == 0) != (now == 0):
            found[f"count {name}"] = f"{name}: {now} can be had, not {was}"
        if old is None or new is None:
            continue
        moved = abs(new.usd_per_hour - old.usd_per_hour)
        if moved > policy.price_moves * max(old.usd_per_hour, new.usd_per_hour):
            text = f"{name} costs ${new.usd_per_hour:.3g}/h, not ${old.usd_per_hour:.3g}/h"
            found[f"price {name}"] = text
    return found


def _is_no_cheaper(old: Offer | None, new: Offer | None) -> bool:
    """Return whether an offer, if it is still there, costs no less than before."""
    return new is None or (old is not None and new.usd_per_hour >= old.usd_per_hour)


def is_due(
    memory: Memory, triggers: Mapping[str, str], now_s: float, policy: ControlPolicy
) -> bool:
    """Return whether to plan: there is a reason that was not planned for a moment ago."""
    if not triggers:
        return False
    if memory.tried_s is None or now_s - memory.tried_s >= policy.retry_s:
        return True
    return not triggers.keys() <= set(memory.tried_for)
