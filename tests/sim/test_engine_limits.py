"""What engines are started with counts in the simulator as it does in the performance model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.engines.limits import EngineLimits, HostTime
from atoll.perf.batch import Batch
from atoll.perf.constants import default_constants, sample_constants
from atoll.perf.step import analytic, step_seconds
from atoll.plan.problem import Problem
from atoll.sim.api import simulate
from atoll.sim.sim_options import SimOptions
from atoll.workload.requests import PrefixBlocks
from tests.sim.builders import CATALOG, problem, requests, service, whole

NO_WAY = SimOptions(coordinator_s=0.0)
LIMITS = [
    EngineLimits(scheduling="sync"),
    EngineLimits(host=HostTime(step_s=3e-3, sequence_s=1e-3)),
    EngineLimits(gpu_memory_utilization=0.6),
]


def later_s(own: Problem, sequences: int, **more: object) -> float:
    """Seconds of all decode steps of requests of 300 and 20 tokens that run side by side."""
    node = CATALOG.node("A100-80:1")
    model = analytic(
        CATALOG.model("llama-3.1-8b").llm,
        node,
        engine=own.engine_of(own.services[0]).on(node.gpu),
        **more,  # type: ignore[arg-type]
    )
    return sum(step_seconds(model, Batch.decode(sequences, 300 + k), 0, 32) for k in range(1, 20))


@pytest.mark.parametrize("limits", LIMITS, ids=lambda limits: next(iter(limits.given)))
def test_host_time_counts_for_every_sequence(limits: EngineLimits) -> None:
    own = problem().with_engine_limits(limits)
    arrivals = requests([0.0, 1e-9, 1e-9], [1, 300, 300], [1, 20, 20])
    found = simulate(whole(own), own, CATALOG, arrivals, NO_WAY).requests
    assert found.e2e_s[1] - found.ttft_s[1] == pytest.approx(later_s(own, 2), rel=1e-12)


def test_launching_a_short_prompt_takes_its_time() -> None:
    # The stage engine has no graphs for layers of this kind.
    spec = CATALOG.model("gemma-3-4b").llm
    model = analytic(spec, CATALOG.node("A100-80:1"), engine="atoll")
    own = problem(service(model="gemma-3-4b"), engine="atoll")
    found = simulate(whole(own), own, CATALOG, requests([0.0], 8, 1), NO_WAY).requests
    expected = step_seconds(model, Batch.prefill(8), 0, spec.layers) + model.engine.request_s
    assert found.ttft_s[0] == pytest.approx(expected, abs=1e-5)
    assert expected > spec.layers * 0.4e-3 + model.engine.request_s
    plain = CATALOG.model("llama-3.2-3b").llm
    quick = analytic(plain, CATALOG.node("A100-80:1"), engine="atoll")
    assert step_seconds(quick, Batch.prefill(8), 0, plain.layers) < plain.layers * 0.4e-3


def test_no_more_sequences_run_than_the_engine_takes() -> None:
    arrivals = requests([0.0] * 12, 100, 30)
    one, all_ = (
        simulate(whole(own), own, CATALOG, arrivals, NO_WAY)
        for own in (problem().with_engine_limits(EngineLimits(max_num_seqs=1)), problem())
    )
    # One after the other: as many steps as there are tokens.
    assert one.nodes[0].steps == 12 * 30
    assert all_.nodes[0].steps < 12 * 30 / 4


def test_constants_of_ones_own() -> None:
    own = problem()
    drawn = sample_constants(default_constants(), np.random.default_rng(4))
    options = SimOptions(coordinator_s=0.0, constants=drawn)
    found = simulate(whole(own), own, CATALOG, requests([0.0], 300, 20), options).requests
    expected = later_s(own, 1, constants=drawn)
    assert found.e2e_s[0] - found.ttft_s[0] == pytest.approx(expected, rel=1e-12)
    assert expected != pytest.approx(later_s(own, 1), rel=1e-3)


def test_engines_started_without_prefix_caching_compute_every_prompt() -> None:
    blocks = PrefixBlocks(np.array([0, 4, 8]), np.array([1, 2, 3, 4] * 2), 32)
    twice = replace(requests([0.0, 60.0], 130, 4), prefix=blocks)
    computed = {}
    for caching in (None, True, False):
        own = problem().with_engine_limits(EngineLimits(prefix_caching=caching))
        found = simulate(whole(own), own, CATALOG, twice, NO_WAY)
        computed[caching] = sum(node.prompt_tokens for node in found.nodes)
    assert computed[None] == computed[True] < computed[False] == 260
    # The run's own setting counts for all.
    off = problem().with_engine_limits(EngineLimits(prefix_caching=False))
    options = SimOptions(coordinator_s=0.0, prefix_caching=True)
    found = simulate(whole(off), off, CATALOG, twice, options)
    assert sum(node.prompt_tokens for node in found.nodes) == computed[True]
