"""The compiled simulator does what the plain one does, request by request."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.sim.tasks.simulate_tasks import Routing, simulate_tasks
from atoll.sim.tasks.task_demand import Arrivals, Demand, draw_demand
from atoll.sim.tasks.task_fleet import TaskFleet
from atoll.sim.tasks.task_result import TaskResult
from tests.seeds import examples
from tests.sim.tasks.builders import random_fleet
from tests.sim.tasks.reference import Reference

REQUESTS = 40


def compare(
    fleet: TaskFleet,
    demand: Demand,
    routing: Routing,
    query_s: float = 0.0,
    until_s: float | None = None,
) -> TaskResult:
    plain = Reference(fleet, demand, routing, query_s, seed=3)
    plain.run(until_s or math.inf)
    found = simulate_tasks(
        fleet, demand=demand, routing=routing, query_s=query_s, seed=3, duration_s=until_s
    )
    columns = found.columns
    came = plain.requests[: found.arrived]
    for name, expected in (
        ("e2e_s", [r.end_s - r.arrival_s for r in came]),
        ("ttft_s", [r.first_text_s - r.arrival_s for r in came]),
        ("first_audio_s", [r.first_audio_s - r.arrival_s for r in came]),
        ("image_s", [r.image_s - r.arrival_s for r in came]),
    ):
        np.testing.assert_allclose(getattr(columns, name), expected, rtol=1e-9, atol=1e-9)
    assert columns.retries.tolist() == [r.retries for r in came]
    for executor, theirs in zip(found.executors, plain.executors, strict=True):
        for part, unit in zip(executor.parts, theirs.units, strict=True):
            assert part.part == unit.name
            if until_s is None:
                worked_s = part.utilisation * found.clock_s
                assert worked_s == pytest.approx(unit.busy_s, rel=1e-9, abs=1e-9)
                last_s = came[-1].arrival_s
                before_s = sum(min(end, last_s) - min(begin, last_s) for begin, end in unit.spans)
                assert part.busy * last_s == pytest.approx(before_s, rel=1e-9, abs=1e-9)
            assert part.busy <= 1.0 + 1e-9
            assert part.kv_peak <= 1.0
    return found


@examples(25)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["dealt", "static", "dynamic"]),
    st.booleans(),
    st.sampled_from([0.0, 0.01]),
)
def test_random_fleets_agree(seed: int, routing: Routing, at_once: bool, query_s: float) -> None:
    fleet = random_fleet(seed)
    arrivals = Arrivals(cv=1.0, at_once=at_once)
    demand = draw_demand(fleet, arrivals, requests=REQUESTS, duration_s=None, seed=seed)
    found = compare(fleet, demand, routing, query_s=query_s)
    assert found.finished == found.arrived == REQUESTS


@examples(10)
@given(st.integers(0, 10**6), st.floats(4.0, 9.0))
def test_random_fleets_agree_when_stopped(seed: int, until_s: float) -> None:
    fleet = random_fleet(seed)
    demand = draw_demand(fleet, Arrivals(), requests=None, duration_s=until_s, seed=seed)
    found = compare(fleet, demand, "dealt", until_s=until_s)
    assert found.finished + found.in_flight == found.arrived == len(demand.klass)
