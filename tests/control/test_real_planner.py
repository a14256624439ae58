"""The loop with Atoll's own planner in place of the toy one."""

from __future__ import annotations

import time

import pytest

from atoll.control.decision.control_view import TrafficSeen, TrafficWindow, recall
from atoll.control.decision.decide import DrainInstance, StartInstance
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.solve.registry import solve
from tests.control.world import Loop, World
from tests.plan.builders import problem


@pytest.fixture(autouse=True)
def planning_is_timed_by_its_own_work_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", time.process_time)


def plan_and_check(asked: Problem) -> Plan:
    found = solve(asked)
    assert not validate(found, asked)
    return found


def traffic(chat: float, mini: float) -> tuple[TrafficSeen, ...]:
    return tuple(
        TrafficSeen(name, *(TrafficWindow(rate),) * 3)
        for name, rate in (("chat", chat), ("mini", mini))
    )


@pytest.mark.slow
def test_a_fleet_follows_its_demand_up_and_down_and_survives_a_restart() -> None:
    asked = problem()
    world = World(asked, tuple(asked.offers), traffic=traffic(10.0, 5.0))
    loop = Loop(world, plan=plan_and_check)
    loop.settle(120)
    small = sum(one.usd_per_hour for one in world.ready())
    assert all(seen.id == seen.instance.id for seen in world.observed.values())
    world.traffic = traffic(30.0, 20.0)
    grown = loop.settle(120)
    assert any(isinstance(action, StartInstance) for action in grown)
    large = sum(one.usd_per_hour for one in world.ready())
    again = Loop(world, recall(world.view()), plan=plan_and_check)
    assert not [a for a in again.settle(120) if isinstance(a, StartInstance | DrainInstance)]
    world.traffic = traffic(10.0, 5.0)
    for _ in range(80):
        again.tick()
    assert small < large
    # Not always as much as before: what stood then was kept as demand rose to it, and here machines that cost
    # nothing are free again.
    assert sum(one.usd_per_hour for one in world.ready()) < large
    assert world.lanes()["chat/llm/prefill"] >= 5120.0
    assert world.lanes()["mini/llm/both"] >= 5.0
