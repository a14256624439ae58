"""The seeded changes of a rollout are ones that a controller makes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from atoll.control.decision.control_view import Memory, ObservedInstance, View
from atoll.control.decision.decide import DrainInstance, StartInstance, StopInstance, decide
from atoll.control.decision.lane_capacity import CarriedLoad, find_mixed
from atoll.deploy.target import InstanceStatus
from tests.seeds import examples
from tests.slow.targets.rollout_changes import SERVICE, AskedOfFleet, seed_changes


def settle(
    asked: AskedOfFleet, memory: Memory, observed: dict[str, ObservedInstance], now_s: float
) -> tuple[Memory, float, float]:
    """Decide until nothing is to be done, all going well; returns the least that was ready meanwhile."""
    from tests.slow.targets.rollout_controller import FLEET, POLICY

    least = float("inf")
    for _ in range(40):
        now_s += 5.0
        view = View(now_s, asked.problem(FLEET), asked.offers(), instances=tuple(observed.values()))
        decision, memory = decide(view, memory, POLICY, asked.plan)
        for action in decision.actions:
            if isinstance(action, StartInstance):
                seen = InstanceStatus(action.instance.id, action.labels, "ready", now_s)
                observed[action.instance.id] = ObservedInstance(seen, action.instance)
            elif isinstance(action, DrainInstance | StopInstance):
                gone = replace(observed[action.id].status, state="gone")
                observed[action.id] = replace(observed[action.id], status=gone)
        ready = [one.instance for one in observed.values() if one.status.state == "ready"]
        problem = asked.problem(FLEET)
        carried = CarriedLoad(problem, find_mixed(problem, ready), ready).lanes()[SERVICE]
        least = min(least, carried)
        if not decision.actions:
            break
    return memory, now_s, least


@examples(20)
@given(st.integers(0, 10**6))
def test_every_seeded_change_is_made_and_never_below_what_is_asked(seed: int) -> None:
    first, changes = seed_changes(5, seed)
    observed: dict[str, ObservedInstance] = {}
    memory, now_s, _ = settle(first, Memory(), observed, 1e6)
    before = first
    for change in changes:
        memory, now_s, least = settle(change.asked, memory, observed, now_s)
        ready = [one.instance for one in observed.values() if one.status.state == "ready"]
        wanted = change.asked.instances()
        assert Counter(one.placement_key for one in ready) == Counter(
            one.placement_key for one in wanted
        ), change
        assert least >= min(before.rate_per_s, change.asked.rate_per_s)
        before = change.asked
