"""Speculative decoding in the simulator: it agrees with the performance model, and with chance."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.engines.limits import EngineLimits, Speculation
from atoll.perf.batch import Batch
from atoll.perf.step import analytic, step_seconds
from atoll.plan.problem import Problem
from atoll.sim.api import simulate
from atoll.sim.sim_options import SimOptions
from tests.sim.builders import CATALOG, problem, requests, whole

NO_WAY = SimOptions(coordinator_s=0.0)


def guessing(*right: float, method: str = "eagle3") -> Problem:
    """A model that guesses tokens, so many of which are right."""
    guess = {
        "method": method,
        "num_speculative_tokens": len(right),
        "acceptance": right,
        "model": None if method == "ngram" else "org/head",
    }
    return problem().with_engine_limits(EngineLimits(speculative=Speculation.parse(guess)))


def step_s(own: Problem, sequences: int, context: float) -> float:
    node = CATALOG.node("A100-80:1")
    spec = CATALOG.model("llama-3.1-8b").llm
    model = analytic(spec, node, engine=own.engine_of(own.services[0]))
    return step_seconds(model, Batch.decode(sequences, context), 0, 32)


@pytest.mark.parametrize("method", ["eagle3", "ngram"])
def test_steps_take_what_the_performance_model_says(method: str) -> None:
    # All three are always right: 40 tokens after the first one take 10 steps of four.
    own = guessing(1.0, 1.0, 1.0, method=method)
    found = simulate(whole(own), own, CATALOG, requests([0.0], 300, 41), NO_WAY)
    took = float(found.requests.e2e_s[0] - found.requests.ttft_s[0])
    expected = sum(step_s(own, 1, 301 + 4 * k) for k in range(10))
    assert took == pytest.approx(expected, rel=1e-9)
    assert found.nodes[0].steps == 11


def test_the_mean_step_makes_what_it_should() -> None:
    own = guessing(0.7, 0.5, 0.3)
    work = requests([0.0] * 32, 64, 801)
    found = simulate(whole(own), own, CATALOG, work, NO_WAY)
    # 32 times 800 tokens at 2.5 a step: the mean is known to 0.5 %, and no answer is far from it.
    took = found.requests.e2e_s - found.requests.ttft_s
    mean = step_s(own, 32, 64 + 400) * 800 / 2.5
    assert float(np.mean(took)) == pytest.approx(mean, rel=0.03)
    assert 0.02 < float(np.std(took) / np.mean(took)) < 0.06
    assert found.nodes[0].kv_peak <= 1.0
    again = simulate(whole(own), own, CATALOG, work, NO_WAY)
    assert np.array_equal(again.requests.e2e_s, found.requests.e2e_s)
    other = simulate(whole(own), own, CATALOG, work, SimOptions(coordinator_s=0.0, seed=1))
    assert not np.array_equal(other.requests.e2e_s, found.requests.e2e_s)
