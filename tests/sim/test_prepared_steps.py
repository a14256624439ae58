"""Engines that prepare the next step when one begins: who joins which step, on nodes of 1 ms a token.

Requests are read for a while (`READ_MS`) before they wait for a step, on servers; times below are worked out
by hand from there, but for the 0.3 ms that 100 tokens take to be made of text.
"""

from __future__ import annotations

import pytest

from atoll.engines.limits import EngineLimits, Scheduling
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem, Settings
from atoll.sim.api import simulate
from atoll.sim.sim_options import SimOptions
from tests.sim.builders import CATALOG, READ_S, cluster_plan, cluster_problem, requests

TOKENS_PER_S = 1000.0
READ_MS = 1e3 * READ_S


def one_node(
    engine: str, scheduling: Scheduling | None = None, prompt_interval: int | None = None
) -> tuple[Problem, Plan]:
    """A node with all layers, which takes one prompt a step."""
    bare = cluster_problem((80 * TOKENS_PER_S,), latency_s=0.0, bytes_per_s=1e15)
    limits = EngineLimits(scheduling=scheduling, prompt_interval=prompt_interval)
    own = bare.model_copy(
        update={
            "settings": Settings(engine=engine),
            "services": (bare.services[0].model_copy(update={"engine_limits": limits}),),
        }
    )
    return own, cluster_plan(own, [(0, 80)], [("source", "n0", 1.0), ("n0", "sink", 1.0)])


@pytest.mark.parametrize(
    ("engine", "scheduling", "first_ms", "second_ms"),
    [
        # Its step ends 100 ms after it was read, that prepared for its next token at 101, that of both 122.
        ("vllm", None, READ_MS + 100.0, READ_MS + 122.0),
        # Sequences wait for prompts: the step of the second is its own.
        ("sglang", "async", READ_MS + 100.0, READ_MS + 121.0),
        # The second has come when the step of both is put together.
        ("vllm", "sync", READ_MS + 100.0, READ_MS + 121.0),
        ("atoll", None, READ_MS + 100.0, READ_MS + 122.0),
        ("atoll", "sync", READ_MS + 100.0, READ_MS + 121.0),
        # Not read, and not prepared whatever is asked for.
        ("llamacpp", "async", 100.0, 121.0),
        ("llamacpp", None, 100.0, 121.0),
        ("none", None, 100.0, 121.0),
    ],
)
def test_a_prompt_waits_for_the_step_that_is_prepared(
    engine: str, scheduling: Scheduling | None, first_ms: float, second_ms: float
) -> None:
    own, plan = one_node(engine, scheduling)
    found = simulate(plan, own, CATALOG, requests([0.0, 0.05], [100, 20], [4, 1])).requests
    came_ms = 1e3 * (found.arrival_s + found.ttft_s)
    assert came_ms == pytest.approx([first_ms, second_ms], abs=0.5)


def test_where_nothing_is_prepared_the_next_step_takes_what_has_come() -> None:
    own, plan = one_node("vllm")
    found = simulate(plan, own, CATALOG, requests([0.0, 0.05], [100, 20], [1, 1])).requests
    assert 1e3 * found.ttft_s[1] == pytest.approx(READ_MS + 100.0 + 20.0 - 50.0, abs=0.5)


def test_a_prompt_that_has_begun_goes_on_in_the_prepared_step() -> None:
    own, plan = one_node("vllm")
    work = requests([0.0, 0.05], [150, 20], [1, 1])
    found = simulate(plan, own, CATALOG, work, SimOptions(token_budget=100)).requests
    # Its second piece ends after 150, and nothing else was prepared.
    came_ms = 1e3 * (found.arrival_s + found.ttft_s) - READ_MS
    assert came_ms == pytest.approx([150.0, 170.0], abs=0.5)


def test_orders_choose_among_those_that_came_before_a_step_was_prepared() -> None:
    own, plan = one_node("vllm")
    # The shortest was read by 100.5 ms, when the step that begins at 101 has been prepared for 0.5 ms.
    work = requests([0.0, 0.02, 0.1005], [100, 50, 5], [10, 1, 1])
    found = simulate(plan, own, CATALOG, work, SimOptions(order="shortest")).requests
    came_ms = 1e3 * (found.arrival_s + found.ttft_s)
    assert came_ms - READ_MS == pytest.approx([100.0, 101.0 + 51.0, 152.0 + 6.0], abs=0.5)


@pytest.mark.parametrize(
    ("engine", "scheduling", "end_ms"),
    [
        # Its KV cache is there 0.5 ms after the other was read; from there steps end at 1, 2 (prepared), 4.
        ("vllm", None, READ_MS + 4.0),
        ("vllm", "sync", READ_MS + 3.0),
        # Asked beside prefill, and not read again: there at 0.5, and steps end at 1, 2 and 4.
        ("sglang", None, 4.0),
        ("atoll", None, READ_MS + 4.0),
    ],
)
def test_kv_cache_that_comes_waits_for_the_prepared_step_as_well(
    engine: str, scheduling: Scheduling | None, end_ms: float
) -> None:
    own, both = one_node(engine, scheduling)
    (instance,) = both.instances
    decodes = instance.model_copy(update={"role": "m/llm/decode"})
    plan = both.model_copy(update={"instances": (decodes,)})
    found = simulate(plan, own, CATALOG, requests([0.0, 0.0005], [100, 100], [10, 2])).requests
    assert 1e3 * (found.arrival_s[1] + found.e2e_s[1]) == pytest.approx(end_ms, abs=0.5)


@pytest.mark.parametrize(
    ("engine", "second_ms", "gap_ms"),
    [
        # Two pieces of 99 tokens and one of 2, each beside a token of the first.
        ("vllm", READ_MS + 303.0, 100.0),
        # Two pieces of 100 tokens; meanwhile nobody decodes.
        ("sglang", READ_MS + 300.0, 201.0),
    ],
)
def test_sequences_wait_for_prompts_where_these_go_first(
    engine: str, second_ms: float, gap_ms: float
) -> None:
    own, plan = one_node(engine, "sync")
    work = requests([0.0, 0.05], [100, 200], [20, 1])
    found = simulate(plan, own, CATALOG, work, SimOptions(token_budget=100)).requests
    came_ms = 1e3 * (found.arrival_s + found.ttft_s)
    assert came_ms == pytest.approx([READ_MS + 100.0, second_ms], abs=0.5)
    assert 1e3 * found.largest_gap_s[0] == pytest.approx(gap_ms, abs=0.5)
    # No token is lost: 19 more of them, and whatever they waited for or ran beside.
    last_ms = 1e3 * (found.arrival_s[0] + found.e2e_s[0])
    assert last_ms == pytest.approx(READ_MS + 100.0 + 200.0 + 19.0, abs=0.5)


@pytest.mark.parametrize(
    ("engine", "answer", "second_ms"),
    [
        # It looks after its own prompt, at 100, and two intervals of 10 steps later.
        ("sglang", 40, 120.0 + 20.0),
        # It takes no notice of the first steps, and waits for 10 from when the prompt is there, at 105: the
        # step that has it has a token of the first.
        ("trtllm", 40, 115.0 + 21.0),
        # It looks in every step.
        ("vllm", 40, 105.0 + 21.0),
        # Nothing else runs: it is not kept waiting.
        ("sglang", 3, 105.0 + 20.0),
        ("trtllm", 3, 105.0 + 20.0),
    ],
)
def test_prompts_wait_for_the_steps_that_look_at_them(
    engine: str, answer: int, second_ms: float
) -> None:
    own, plan = one_node(engine, "sync", prompt_interval=10)
    work = requests([0.0, 0.1047], [100, 20], [answer, 1])
    found = simulate(plan, own, CATALOG, work).requests
    came_ms = 1e3 * (found.arrival_s[1] + found.ttft_s[1]) - READ_MS
    assert came_ms == pytest.approx(second_ms, abs=0.9)


def test_prompts_that_fill_a_step_are_not_kept_waiting() -> None:
    own, plan = one_node("trtllm", "sync", prompt_interval=10)
    work = requests([0.0, 0.1047], [100, 20], [40, 1])
    found = simulate(plan, own, CATALOG, work, SimOptions(token_budget=20)).requests
    soon, _ = one_node("trtllm", "sync")
    at_once = simulate(plan, soon, CATALOG, work, SimOptions(token_budget=20)).requests
    assert found.ttft_s[1] == pytest.approx(at_once.ttft_s[1])
