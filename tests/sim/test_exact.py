"""Without queueing a run takes exactly what the performance model says."""

from __future__ import annotations

import pytest

from atoll.perf.batch import Batch
from atoll.perf.step import analytic, step_seconds
from atoll.sim.api import simulate
from atoll.sim.sim_options import SimOptions
from tests.sim.builders import (
    CATALOG,
    READ_S,
    TOKENIZE_S,
    cluster_plan,
    cluster_problem,
    laid_out,
    problem,
    requests,
    service,
    whole,
)

NO_WAY = SimOptions(coordinator_s=0.0)
"""No latency between coordinator and node; what is left is the time to send a few bytes."""


def _steps(
    model: str, node: str, prompt: int, answer: int, low: int, high: int
) -> tuple[float, float]:
    """Seconds of the prompt step and of all decode steps of a request alone."""
    own = analytic(CATALOG.model(model).llm, CATALOG.node(node))
    first = step_seconds(own, Batch.prefill(prompt), low, high)
    later = sum(step_seconds(own, Batch.decode(1, prompt + k), low, high) for k in range(1, answer))
    return first, later


@pytest.mark.parametrize(
    ("model", "node"),
    [
        ("llama-3.1-8b", "A100-80:1"),
        ("qwen3-32b", "L40S:4"),
        ("gpt-oss-20b", "H100:1"),
        ("deepseek-v3", "H200:8"),
        ("qwen3-next-80b-a3b", "H100:4"),
        ("llama-4-scout", "H100:4"),
    ],
)
def test_one_request_on_one_node_takes_what_the_performance_model_says(
    model: str, node: str
) -> None:
    own = problem(service(model=model), nodes=(node,))
    first, later = _steps(model, node, 700, 50, 0, CATALOG.model(model).llm.layers)

    found = simulate(whole(own, node=node), own, CATALOG, requests([0.0], 700, 50), NO_WAY)

    # Beside the steps it is read, and 700 tokens of 4 bytes go over the gateway's link.
    assert found.requests.ttft_s[0] == pytest.approx(READ_S + 700 * TOKENIZE_S + first, abs=1e-5)
    assert found.requests.e2e_s[0] - found.requests.ttft_s[0] == pytest.approx(later, rel=1e-12)


def test_sequences_that_start_together_share_every_step() -> None:
    own = problem()
    model = analytic(CATALOG.model("llama-3.1-8b").llm, CATALOG.node("A100-80:1"))
    batch = Batch(600.0, 2.0, 0.0, 0.0, 0.0, 1.0)
    first = step_seconds(model, batch, 0, 32)
    later = sum(step_seconds(model, Batch.decode(2, 300 + k), 0, 32) for k in range(1, 20))

    found = simulate(whole(own), own, CATALOG, requests([0.0, 0.0], 300, 20), NO_WAY)

    # The second came while the first was in its prompt step, and waits for it and for the step after it.
    alone = step_seconds(model, Batch.prefill(300), 0, 32)
    prepared = step_seconds(model, Batch.decode(1, 301), 0, 32)
    shared = step_seconds(model, Batch(300.0, 1.0, 0.0, 1.0, 302.0, 1.0), 0, 32)
    read = READ_S + 300 * TOKENIZE_S
    assert found.requests.ttft_s == pytest.approx(
        [read + alone, read + alone + prepared + shared], abs=1e-5
    )
    both = simulate(
        whole(own), own, CATALOG, requests([0.0, 1e-9, 1e-9], [1, 300, 300], [1, 20, 20]), NO_WAY
    )
    assert both.requests.e2e_s[1] - both.requests.ttft_s[1] == pytest.approx(later, rel=1e-12)
    # Nothing was prepared while the prompt of one token ran, which ends with it.
    one = step_seconds(model, Batch.prefill(1), 0, 32)
    assert both.requests.ttft_s[1] == pytest.approx(READ_S + one + first, abs=2e-5)


def test_a_long_prompt_is_cut_to_the_token_budget() -> None:
    own = problem()
    model = analytic(CATALOG.model("llama-3.1-8b").llm, CATALOG.node("A100-80:1"))
    pieces = [Batch.prefill(512, context=512.0 * k) for k in range(3)]
    pieces.append(Batch.prefill(164, context=1536.0))
    expected = sum(step_seconds(model, piece, 0, 32) for piece in pieces)

    options = SimOptions(coordinator_s=0.0, token_budget=512)
    found = simulate(whole(own), own, CATALOG, requests([0.0], 1700, 1), options)

    assert found.requests.ttft_s[0] == pytest.approx(
        READ_S + 1700 * TOKENIZE_S + expected, abs=1e-5
    )
    assert found.nodes[0].steps == 4


def test_a_pipeline_adds_its_stages_and_its_links() -> None:
    own = problem(service(model="qwen3-32b"), nodes=("L40S:2",))
    plan = laid_out(own, (0, 40, ("L40S:2",)), (40, 64, ("L40S:2",)))
    one, two = (_steps("qwen3-32b", "L40S:2", 900, 30, *held) for held in ((0, 40), (40, 64)))
    link = CATALOG.links.between("here", "here", "L40S:2", "L40S:2")
    size = CATALOG.model("qwen3-32b").llm.hidden * 2.0 + 4.0

    found = simulate(plan, own, CATALOG, requests([0.0], 900, 30), NO_WAY)

    # It is read once: what goes from stage to stage, and round again, is not.
    expected = READ_S + 900 * TOKENIZE_S + one[0] + two[0] + link.time_s(900 * size)
    assert found.requests.ttft_s[0] == pytest.approx(expected, abs=1e-5)
    later = one[1] + two[1] + 29 * link.time_s(size)
    assert found.requests.e2e_s[0] - found.requests.ttft_s[0] == pytest.approx(later, abs=1e-5)


def test_a_node_runs_only_the_layers_a_request_still_needs() -> None:
    own = cluster_problem((1e4, 1e4), latency_s=0.0, bytes_per_s=1e15)
    flows = [("source", "n0", 1.0), ("n0", "n1", 1.0), ("n1", "sink", 1.0)]
    plan = cluster_plan(own, [(0, 50), (30, 80)], flows, partial=True)

    found = simulate(plan, own, CATALOG, requests([0.0], 100, 1), SimOptions())

    assert found.requests.ttft_s[0] == pytest.approx(100 * 80 / 1e4, rel=1e-6)
    # 100 tokens of 30 of the 50 layers it holds.
    assert found.nodes[1].kv_peak * 1e6 == pytest.approx(60.0)


def test_requests_that_come_in_at_different_layers_share_the_step_from_there() -> None:
    own = cluster_problem((1e4, 1e4, 1e4), latency_s=0.0, bytes_per_s=1e15)
    flows = [
        ("source", "n0", 1.0),
        ("source", "n1", 1.0),
        ("n0", "n2", 1.0),
        ("n1", "n2", 1.0),
        ("n2", "sink", 2.0),
    ]
    plan = cluster_plan(own, [(0, 40), (0, 60), (40, 80)], flows, partial=True)

    found = simulate(plan, own, CATALOG, requests([0.0, 0.0], 10, 1), SimOptions())

    # 10 tokens: 40 layers then 40 more; 60 layers, then 20 after the other has left.
    assert found.requests.ttft_s[0] == pytest.approx(0.08, rel=1e-6)
    assert found.requests.ttft_s[1] == pytest.approx(0.10, rel=1e-6)
