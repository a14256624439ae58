"""Queues whose waiting times have a closed form, and flows that have a proven limit."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.sim.api import simulate
from atoll.sim.sim_options import SimOptions
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.from_problem import flow_instance, placement_of
from atoll.solve.place.place_to_plan import Placed, plan_of
from atoll.workload.requests import Requests
from tests.sim.builders import CATALOG, cluster_plan, cluster_problem, requests

COUNT = 100_000
MEAN_TOKENS = 20_000


def _mean_wait(lengths: np.ndarray, load: float) -> tuple[float, float]:
    """Mean wait before service on one node that takes prompts one by one, and the mean service time."""
    # Speed such that a mean prompt takes one second.
    own = cluster_problem(
        (MEAN_TOKENS * 80.0,), kv_tokens=1e12, latency_s=0.0, bytes_per_s=1e18, mean=(100.0, 1.0)
    )
    plan = cluster_plan(own, [(0, 80)], [("source", "n0", 1.0), ("n0", "sink", 1.0)])
    random = np.random.default_rng(7)
    arrival = np.cumsum(random.exponential(1.0 / load, COUNT))
    work = Requests.of(arrival, lengths, np.ones(COUNT, np.int32))
    options = SimOptions(batching="best-effort", high_water=1.0)
    found = simulate(plan, own, CATALOG, work, options)
    took = lengths / MEAN_TOKENS
    return float((found.requests.ttft_s - took)[COUNT // 10 :].mean()), float(took.mean())


@pytest.mark.parametrize("load", [0.5, pytest.param(0.7, marks=pytest.mark.slow)])
def test_fixed_service_times_wait_as_in_m_d_1(load: float) -> None:
    wait, mean = _mean_wait(np.full(COUNT, MEAN_TOKENS, np.int32), load)
    assert mean == 1.0
    assert wait == pytest.approx(load / (2.0 * (1.0 - load)), rel=0.02)


def test_exponential_service_times_wait_as_in_m_m_1() -> None:
    random = np.random.default_rng(11)
    lengths = np.maximum(1, random.exponential(MEAN_TOKENS, COUNT)).astype(np.int32)
    wait, mean = _mean_wait(lengths, 0.5)
    load = 0.5 * mean
    assert wait == pytest.approx(load / (1.0 - load) * mean, rel=0.02)


@pytest.mark.parametrize(
    ("speeds", "ranges"),
    [
        ((4000.0, 2000.0, 3000.0), [(0, 80), (0, 30), (30, 80)]),
        ((4000.0, 2500.0, 3000.0, 2000.0), [(0, 40), (0, 40), (40, 80), (40, 80)]),
        (
            (3000.0, 2000.0, 2500.0, 1000.0, 3500.0),
            [(0, 40), (0, 30), (40, 80), (30, 40), (40, 80)],
        ),
    ],
)
def test_under_saturation_the_largest_flow_is_reached_and_never_exceeded(
    speeds: tuple[float, ...], ranges: list[tuple[int, int]]
) -> None:
    own = cluster_problem(speeds, latency_s=1e-4)
    instance = flow_instance(own, CATALOG, own.services[0])
    placement = placement_of(instance, ranges)
    flows = max_flow(instance, placement)
    placed = Placed(own.services[0], instance, placement, flows)
    plan = plan_of(own, CATALOG, [placed], goal="max-flow", bound=None, solver="test")
    until = 600.0

    found = simulate(
        plan,
        own,
        CATALOG,
        requests([0.0] * 20_000, 64, 16),
        SimOptions(
            batching="best-effort",
            first_token=False,
            feed="closed",
            concurrency=200,
            feed_delay_s=0.001,
            until_s=until,
        ),
    )

    prompts = 64 * np.count_nonzero(np.isfinite(found.requests.ttft_s))
    passed = prompts / until + found.tokens_per_s
    assert passed <= flows.value * (1 + 1e-9)
    assert passed >= 0.97 * flows.value
