"""Rates of a run are over the time in which requests came, not over the run-out after it."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.report.simulation.simulation_tables import describe_run
from atoll.sim.api import simulate
from atoll.sim.sim_options import SimOptions
from atoll.workload.requests import Requests
from tests.sim.builders import CATALOG, problem, requests, whole

RATE, COUNT = 12.0, 240
"""Requests/s, and how many: 20 s of them."""


def even(answer: int | list[int], count: int = COUNT, rate: float = RATE) -> Requests:
    return requests([(k + 1) / rate for k in range(count)], 64, answer)


def test_as_many_as_come_are_kept_however_long_the_last_ones_take() -> None:
    own = problem()
    # The last request alone runs on for longer than all others came.
    work = even([16] * (COUNT - 1) + [4000])
    found = simulate(whole(own), own, CATALOG, work)
    (service,) = found.services
    assert found.clock_s > 2.0 * COUNT / RATE
    assert found.window_s == pytest.approx(COUNT / RATE)
    assert service.attainment == 1.0
    assert service.goodput_requests_per_s == pytest.approx(RATE)
    assert service.requests_per_s == pytest.approx(RATE, rel=0.05)
    # Of 16 tokens each; those of the last one are made in the run-out.
    assert service.tokens_per_s == pytest.approx(16 * RATE, rel=0.05)
    assert "(the last came after 20" in describe_run(found)


def test_a_node_is_as_busy_as_it_was_while_requests_came() -> None:
    own = problem()
    steady = simulate(whole(own), own, CATALOG, even(16, count=40, rate=2.0))
    tail = simulate(whole(own), own, CATALOG, even([16] * 39 + [4000], count=40, rate=2.0))
    (calm,), (late,) = steady.nodes, tail.nodes
    assert calm.busy == pytest.approx(calm.utilisation, rel=0.05)
    assert late.busy == pytest.approx(calm.busy, rel=0.05)
    # In the run-out a single request keeps it at work all the time.
    assert late.utilisation > 1.3 * late.busy


def test_more_than_a_node_carries_is_not_carried() -> None:
    own = problem()
    found = simulate(whole(own), own, CATALOG, even(256, count=3000, rate=300.0))
    (service,) = found.services
    assert found.clock_s > 1.5 * found.window_s
    assert service.finished == 3000
    assert service.requests_per_s < 0.7 * 300.0
    assert service.tokens_per_s < 0.7 * 300.0 * 256
    assert found.nodes[0].busy > 0.95


def test_a_run_that_is_cut_and_one_of_requests_that_come_at_once() -> None:
    own = problem()
    work = even(16)
    cut = simulate(whole(own), own, CATALOG, work, SimOptions(until_s=10.0, from_s=2.0))
    assert cut.window_s == pytest.approx(8.0)
    assert cut.services[0].goodput_requests_per_s == pytest.approx(RATE, rel=0.05)
    at_once = simulate(whole(own), own, CATALOG, requests([0.0] * 50, 64, 16))
    assert at_once.window_s == at_once.clock_s
    assert at_once.services[0].requests_per_s == pytest.approx(50 / at_once.clock_s)
    assert np.isfinite(at_once.services[0].tokens_per_s)
