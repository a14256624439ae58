"""How requests get KV cache: admission by prompts, chunks in pipelines, prefixes that are kept, means."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.engines.limits import EngineLimits
from atoll.perf.batch import Batch
from atoll.perf.step import analytic, step_seconds
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.sim.api import simulate
from atoll.sim.event_loop import run
from atoll.sim.sim_arrays import Sim
from atoll.sim.sim_build import build
from atoll.sim.sim_kernel import table_of
from atoll.sim.sim_options import Order, SimOptions
from atoll.sim.sim_result import SimReport
from atoll.workload.requests import PrefixBlocks, Requests
from tests.sim.builders import (
    CATALOG,
    READ_S,
    TOKENIZE_S,
    cluster_plan,
    cluster_problem,
    laid_out,
    poisson,
    problem,
    requests,
    service,
    whole,
)

SPEED = 1e5
"""Token-layers per second of each node, whatever the batch."""
TOKEN_S = 80 / SPEED
"""Seconds of a token on a node with all layers."""


def _one_node(kv_tokens: float) -> tuple[Problem, Plan]:
    own = cluster_problem((SPEED,), kv_tokens=kv_tokens, latency_s=0.0, bytes_per_s=1e15)
    return own, cluster_plan(own, [(0, 80)], [("source", "n0", 1.0), ("n0", "sink", 1.0)])


def _finish(own: Problem, plan: Plan, work: Requests, options: SimOptions) -> tuple[Sim, SimReport]:
    built = build(plan, own, CATALOG, work, options)
    table = table_of(built.sim)
    while not run(table, 1000):
        pass
    return built.sim, SimReport.of(built, own, options, 0.0)


def test_the_youngest_gives_way_and_is_first_in_the_queue() -> None:
    own, plan = _one_node(400.0)
    # Two prompts fit and two answers do not; the third waits since two may run.
    work = requests([0.0, 0.001, 0.002], [100, 100, 50], [150, 150, 5])
    eager = SimOptions(admission="prompts", max_sequences=2)

    sim, found = _finish(own, plan, work, eager)

    assert found.requests.retries.tolist() == [0, 1, 0]
    first, last = sim.request["first_s"], sim.request["last_s"]
    # The third would have had room all along, but comes after the one that was sent back.
    assert first[2] > last[0]
    booked = simulate(plan, own, CATALOG, work, replace(eager, admission="booked"))
    assert booked.retries == 0 or booked.requests.ttft_s[2] < found.requests.ttft_s[2]


def test_prompts_alone_let_more_requests_in_than_booked_answers_do() -> None:
    own = problem(service().model_copy(update={"model": "llama-3.1-8b"}))
    work = requests([0.0] * 400, 2000, 400)
    plan = whole(own)
    peak = {
        admission: simulate(
            plan, own, CATALOG, work, SimOptions(admission=admission, known_outputs=True)
        )
        .nodes[0]
        .mean_sequences
        for admission in ("prompts", "booked")
    }
    assert peak["prompts"] > peak["booked"]


def test_each_engine_has_its_own_admission_and_order() -> None:
    assert SimOptions().admits_by_prompts("vllm")
    assert SimOptions().admits_by_prompts("sglang")
    assert not SimOptions().admits_by_prompts("atoll")
    assert not SimOptions(batching="best-effort").admits_by_prompts("vllm")
    assert not SimOptions(admission="booked").admits_by_prompts("vllm")
    assert SimOptions().order_of("vllm") == "arrival"
    assert SimOptions(order="slack").order_of("vllm") == "slack"


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_no_more_sequences_run_than_are_asked_for(limit: int) -> None:
    own = problem()
    work = requests([0.0] * 12, 100, 20)
    found = simulate(whole(own), own, CATALOG, work, SimOptions(max_sequences=limit))
    assert found.finished == 12
    assert 0.5 * limit < found.nodes[0].mean_sequences <= limit


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    own = cluster_problem((SPEED, SPEED / 2), latency_s=0.0, bytes_per_s=1e15)
    flows = [("source", "n0", 1.0), ("n0", "n1", 1.0), ("n1", "sink", 1.0)]
    plan = cluster_plan(own, [(0, 40), (40, 80)], flows)
    work = requests([0.0], 1000, 1)

    cut = simulate(plan, own, CATALOG, work, SimOptions(token_budget=100))
    once = simulate(plan, own, CATALOG, work, SimOptions(token_budget=1000))

    fast, slow = 100 * 40 / SPEED, 100 * 80 / SPEED
    assert cut.requests.ttft_s[0] == pytest.approx(fast + 10 * slow, rel=1e-6)
    assert once.requests.ttft_s[0] == pytest.approx(10 * (fast + slow), rel=1e-6)
    assert [node.steps for node in cut.nodes] == [10, 10]
    assert [node.prompt_tokens for node in cut.nodes] == [1000, 1000]


def test_a_cut_prompt_takes_what_the_performance_model_says() -> None:
    own = problem(service(model="qwen3-32b"), nodes=("L40S:2",))
    plan = laid_out(own, (0, 40, ("L40S:2",)), (40, 64, ("L40S:2",)))
    model = analytic(CATALOG.model("qwen3-32b").llm, CATALOG.node("L40S:2"))
    link = CATALOG.links.between("here", "here", "L40S:2", "L40S:2")
    size = CATALOG.model("qwen3-32b").llm.hidden * 2.0 + 4.0
    one, two = 0.0, 0.0
    for begin in range(0, 5000, 1024):
        piece = min(1024, 5000 - begin)
        batch = Batch.prefill(piece, context=float(begin))
        one += step_seconds(model, batch, 0, 40)
        two = max(two, one + link.time_s(piece * size)) + step_seconds(model, batch, 40, 64)

    options = SimOptions(coordinator_s=0.0, token_budget=1024)
    found = simulate(plan, own, CATALOG, requests([0.0], 5000, 1), options)

    assert found.requests.ttft_s[0] == pytest.approx(READ_S + 5000 * TOKENIZE_S + two, abs=5e-5)


def _prefixed(arrival_s: list[float], prompt: int, blocks: list[list[int]], size: int) -> Requests:
    offsets = np.cumsum([0, *map(len, blocks)]).astype(np.int64)
    ids = np.array([b for some in blocks for b in some], np.int64)
    return replace(requests(arrival_s, prompt, 1), prefix=PrefixBlocks(offsets, ids, size))


REUSE = SimOptions(prefix_caching=True)


def test_an_equal_prefix_is_computed_once() -> None:
    own, plan = _one_node(1e5)
    same = _prefixed([0.0, 100.0, 200.0], 2148, [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 9, 4]], 512)

    sim, found = _finish(own, plan, same, REUSE)

    assert found.requests.ttft_s[0] == pytest.approx(2148 * TOKEN_S, rel=1e-6)
    assert found.requests.ttft_s[1] == pytest.approx(100 * TOKEN_S, rel=1e-6)
    # What comes after a block that differs is another prompt.
    assert found.requests.ttft_s[2] == pytest.approx((2148 - 1024) * TOKEN_S, rel=1e-6)
    assert found.services[0].reused_share == pytest.approx((2048 + 1024) / (3 * 2148))
    assert int(sim.unit["prompt_tokens"][0]) == 3 * 2148 - 2048 - 1024
    without = simulate(plan, own, CATALOG, same, SimOptions())
    assert without.services[0].reused_share == 0.0
    assert without.requests.ttft_s[1] == pytest.approx(2148 * TOKEN_S, rel=1e-6)


def test_prefixes_are_kept_as_the_engine_is_started() -> None:
    work = _prefixed([0.0, 100.0], 2148, [[1, 2, 3, 4]] * 2, 512)
    shares = {}
    for on in (None, False, True):
        own = problem().with_engine_limits(EngineLimits(prefix_caching=on))
        found = simulate(whole(own), own, CATALOG, work, SimOptions())
        shares[on] = found.services[0].reused_share
    assert shares == {None: 2048 / 4296, False: 0.0, True: 2048 / 4296}


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    own, plan = _one_node(1e5)
    same = _prefixed([0.0, 100.0], 2048, [[1, 2, 3, 4], [1, 2, 3, 4]], 512)
    found = simulate(plan, own, CATALOG, same, REUSE)
    assert found.requests.ttft_s[1] == pytest.approx(512 * TOKEN_S, rel=1e-6)


def test_what_has_no_room_is_forgotten_the_min_recently_used_first() -> None:
    # Room for five blocks of 100: two prompts of two, and one token each.
    own, plan = _one_node(500.0)
    blocks = [[1, 2], [3, 4], [5, 6], [1, 2], [5, 6]]
    work = _prefixed([0.0, 10.0, 20.0, 30.0, 40.0], 201, blocks, 100)
    found = simulate(plan, own, CATALOG, work, REUSE)
    # The third drives out the first, of which the last block went before the first one; the fourth finds
    # nothing or one block, and the third is still there for the fifth.
    assert found.requests.ttft_s[3] > found.requests.ttft_s[4]
    assert found.requests.ttft_s[4] == pytest.approx(1 * TOKEN_S, rel=1e-6)


def test_blocks_that_run_side_by_side_are_held_once() -> None:
    own, plan = _one_node(3000.0)
    # Each needs 1101 tokens, four of them far more than there is room for; 1000 they share.
    work = _prefixed([0.0, 0.001, 0.002, 0.003], 1101, [[7, 8]] * 4, 500)
    long = replace(work, output=np.full(4, 20, np.int32))
    options = replace(REUSE, admission="prompts")
    sim, found = _finish(own, plan, long, options)
    assert found.retries == 0
    assert 1000 + 4 * 101 < sim.unit["peak"][0] <= 1000 + 4 * (101 + 20)
    alone, _ = _finish(own, plan, long, SimOptions(admission="prompts"))
    assert alone.unit["peak"][0] > 2 * 1101


def test_chunks_begin_after_what_is_found() -> None:
    own = cluster_problem((SPEED, SPEED), latency_s=0.0, bytes_per_s=1e15)
    flows = [("source", "n0", 1.0), ("n0", "n1", 1.0), ("n1", "sink", 1.0)]
    plan = cluster_plan(own, [(0, 40), (40, 80)], flows)
    work = _prefixed([0.0, 100.0], 1000, [[1, 2, 3], [1, 2, 3]], 250)
    found = simulate(plan, own, CATALOG, work, replace(REUSE, token_budget=125))
    # Eight chunks and then two, and one more step for the last to pass the second stage.
    chunk_s = 125 * 40 / SPEED
    assert found.requests.ttft_s[0] == pytest.approx(9 * chunk_s, rel=1e-6)
    assert found.requests.ttft_s[1] == pytest.approx(3 * chunk_s, rel=1e-6)


def test_kv_and_queue_are_means_over_the_whole_run() -> None:
    own, plan = _one_node(1000.0)
    # Both come at once: the second waits for the first one's step of 100 tokens.
    work = requests([0.0, 0.0, 50.0], 100, 1)
    found = simulate(plan, own, CATALOG, work, SimOptions(output_ratio=0.0))
    step_s = 100 * TOKEN_S
    assert found.clock_s == pytest.approx(50.0 + step_s, rel=1e-6)
    (node,) = found.nodes
    assert node.queue_mean * found.clock_s == pytest.approx(step_s, rel=1e-6)
    assert node.kv_mean * 1000.0 * found.clock_s == pytest.approx(3 * 100 * step_s, rel=1e-6)


def test_the_mean_queue_keeps_littles_law() -> None:
    own, plan = _one_node(1e6)
    work = poisson(2000, 0.8 / (64 * TOKEN_S), 5, prompt=64, answer=1)
    sim, found = _finish(own, plan, work, SimOptions())
    waited = float(np.sum(sim.request["start_s"] - sim.request["arrival_s"]))
    assert waited > 10.0
    assert found.nodes[0].queue_mean * found.clock_s == pytest.approx(waited, rel=1e-4)
    bins = found.series.queue[:, 0].mean() * found.series.bin_s * len(found.series.queue)
    assert bins == pytest.approx(waited, rel=0.05)


def test_requests_that_wait_for_a_way_are_counted() -> None:
    own, plan = _one_node(150.0)
    # One has room at a time, so the second waits at the coordinator until the first is done.
    work = requests([0.0, 0.0], 100, 10)
    options = SimOptions(known_outputs=True)
    sim, found = _finish(own, plan, work, options)
    waits_s = float(sim.request["last_s"][0])
    assert found.services[0].waiting_mean * found.clock_s == pytest.approx(waits_s, rel=1e-3)
    assert found.nodes[0].queue_mean == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("order", ["slack", "shortest"])
def test_a_prompt_that_cannot_be_in_time_lets_others_go_first(order: Order) -> None:
    own, plan = _one_node(1e6)
    # Promised are 5 s. The first runs when the others come; the second takes 6.4 s and is late in any case.
    work = requests([0.0, 0.01, 0.02, 0.03], [100, 8000, 500, 400], 1)
    early = simulate(plan, own, CATALOG, work, SimOptions(order="arrival"))
    found = simulate(plan, own, CATALOG, work, SimOptions(order=order))
    assert early.requests.met_ttft.tolist() == [True, False, False, False]
    assert found.requests.met_ttft.tolist() == [True, False, True, True]
    waits = 100 + (500 if order == "slack" else 400)
    first = 2 if order == "slack" else 3
    assert found.requests.ttft_s[first] + work.arrival_s[first] == pytest.approx(waits * TOKEN_S)


@pytest.mark.parametrize("order", ["slack", "shortest"])
def test_no_prompt_waits_for_good(order: Order) -> None:
    own, plan = _one_node(1e6)
    # Short ones come as fast as they can be served, one always waits, and a long one is late from the start.
    count = 400
    arrivals = np.maximum(0.0, np.arange(count) - 2) * 400 * TOKEN_S
    work = requests([*arrivals, 0.001], [*[400] * count, 8000], 1)
    found = simulate(plan, own, CATALOG, work, SimOptions(order=order))
    waited = float(found.requests.ttft_s[np.argmax(found.requests.input)])
    # Ten times the promise of 5 s, what then ran, and itself.
    assert 50.0 < waited - 8000 * TOKEN_S <= 50.0 + 400 * TOKEN_S + 1e-3


def test_chunks_stay_in_order_where_prompts_do_not() -> None:
    own = cluster_problem((SPEED, SPEED / 4), latency_s=0.0, bytes_per_s=1e15)
    flows = [("source", "n0", 1.0), ("n0", "n1", 1.0), ("n1", "sink", 1.0)]
    plan = cluster_plan(own, [(0, 40), (40, 80)], flows)
    work = requests([0.0, 0.001], [1000, 100], 1)
    found = simulate(plan, own, CATALOG, work, SimOptions(token_budget=100, order="shortest"))
    # The short one passes the chunks of the long one that wait at the slow second stage.
    assert found.requests.ttft_s[1] < found.requests.ttft_s[0]
    chunk_s = 100 * 40 / SPEED
    assert found.requests.ttft_s[0] == pytest.approx(chunk_s + 11 * 4 * chunk_s, rel=1e-6)
