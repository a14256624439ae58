"""Limits of engines: from the fleet file into the problem, capacities, plans and the simulator."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.core.ids import Phase, RoleId
from atoll.engines.limits import EngineLaunch, EngineLimits, HostTime
from atoll.perf.step import Position
from atoll.plan.capacities import memory_model, node_capacity
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem, kv_dtype_of, with_kv_dtype

FLEET = """
services:
  chat: {{model: "{model}", ttft: 2s, tpot: 80ms, rate: 4/s, lengths: 512x128{engine}}}
  search: {{model: llama-3.1-8b, ttft: 2s, tpot: 80ms, rate: 1/s, lengths: 512x128}}
pool: {{owned: {{here: {{"L40S:1": 4}}}}}}
{settings}
"""
LLAMA: dict[str, Any] = {"max_model_len": 2048, "tool_parser": "llama3_json"}
"""What engines are told of the model, and of the longest request where lengths are that short."""


def fleet(engine: str = "", settings: str = "", model: str = "llama-3.1-8b") -> Problem:
    own = f", engine: {{{engine}}}" if engine else ""
    shared = f"settings: {{engine_limits: {{{settings}}}}}" if settings else ""
    return parse_fleet(FLEET.format(engine=own, settings=shared, model=model))


def capacity(problem: Problem, phase: Phase = Phase.DECODE) -> float:
    catalog, service = problem.catalog(), problem.service("chat")
    role = RoleId("chat", "llm", phase)
    return node_capacity(
        problem, catalog, service, role, "L40S:1", 32, 1, Position.WHOLE, region="here"
    )


def test_a_problem_without_limits_is_the_one_it_was() -> None:
    plain = fleet()
    assert "engine_limits" not in plain.to_json()
    assert Problem.from_json(plain.to_json()) == plain
    limited = fleet("max_num_seqs: 8")
    assert limited.content_hash() != plain.content_hash()
    assert Problem.from_json(limited.to_json()) == limited
    empty = plain.with_engine_limits(EngineLimits())
    assert empty.content_hash() == plain.content_hash()


def test_a_service_counts_before_all_of_them() -> None:
    text = "max_num_seqs: 64, scheduling: sync, gpu_memory_utilization: 80%, host: {step: 2ms}"
    problem = fleet("max_num_seqs: 8, prefix_caching: false", text)
    shared = {"gpu_memory_utilization": 0.8, "host": HostTime(step_s=2e-3), "scheduling": "sync"}
    chat, search = problem.service("chat"), problem.service("search")
    assert chat.engine_limits == EngineLimits(max_num_seqs=8, prefix_caching=False, **shared)
    assert search.engine_limits == EngineLimits(max_num_seqs=64, **shared)


@pytest.mark.parametrize(
    ("model", "dtype", "expected"),
    [
        ("llama-3.1-8b", "fp8", "llama-3.1-8b@kv=fp8"),
        ("llama-3.1-8b@int4", "fp8_e4m3", "llama-3.1-8b@int4,kv=fp8"),
        ("llama-3.1-8b@int4,kv=fp8", "bfloat16", "llama-3.1-8b@int4,kv=bf16"),
        ("llama-3.1-8b", "auto", "llama-3.1-8b"),
    ],
)
def test_the_format_of_the_cache_is_part_of_the_models_name(
    model: str, dtype: str, expected: str
) -> None:
    assert with_kv_dtype(model, dtype) == expected
    problem = fleet(f"kv_cache_dtype: {dtype}", model=model)
    assert problem.service("chat").model == expected
    assert kv_dtype_of(expected) == (expected.partition("kv=")[2] or None)
    assert problem.service("search").model == "llama-3.1-8b"


def test_limits_shape_what_a_node_carries() -> None:
    plain = capacity(fleet())
    assert capacity(fleet("max_num_seqs: 4")) < 0.1 * plain
    # Both phases: of decode alone the node's interface takes in no more KV cache anyway.
    both = capacity(fleet(), Phase.BOTH)
    assert capacity(fleet("scheduling: sync"), Phase.BOTH) < both
    assert capacity(fleet("host: {step: 20ms}"), Phase.BOTH) < 0.9 * both
    assert capacity(fleet("max_num_batched_tokens: 32, max_num_seqs: 8"), Phase.PREFILL) < capacity(
        fleet(), Phase.PREFILL
    )


def test_limits_shape_the_memory() -> None:
    def room(problem: Problem) -> int:
        catalog, service = problem.catalog(), problem.service("chat")
        node = catalog.node("L40S:1")
        return memory_model(problem, catalog, service, Phase.DECODE, node, 1).kv_tokens(0, 32)

    plain = room(fleet())
    assert room(fleet("kv_cache_dtype: fp8")) == pytest.approx(2 * plain, rel=1e-3)
    memory = fleet().catalog().gpu("L40S").memory_bytes
    less = (plain - room(fleet("gpu_memory_utilization: 80%"))) * 131072
    assert less == pytest.approx(0.1 * memory, rel=1e-3)


@given(st.integers(1, 512), st.integers(1, 512))
def test_more_sequences_never_carry_less_of_a_phase(a: int, b: int) -> None:
    low, high = sorted((a, b))
    # The logits of a larger batch take memory, too: little on a GPU with plenty.
    small, large = (capacity(fleet(f"max_num_seqs: {n}")) for n in (low, high))
    assert large >= small * 0.98


def test_plans_carry_them_to_the_engines() -> None:
    problem = fleet("max_num_seqs: 8, kv_cache_dtype: fp8")
    ttft_s = problem.service("chat").ttft_s
    assert problem.launches()["chat"] == EngineLaunch(
        max_num_seqs=8, kv_cache_dtype="fp8", promised_ttft_s=ttft_s, **LLAMA
    )
    assert fleet().launches()["chat"] == EngineLaunch(promised_ttft_s=ttft_s, **LLAMA)
    assert set(problem.launches()) == {service.name for service in problem.services}
    plan = Plan(
        problem_hash="x",
        problem_name="x",
        usd_per_hour=0.0,
        status="feasible",
        solver="x",
        engines=problem.launches(),
    )
    assert Plan.from_json(plan.to_json()) == plan
    written = json.loads(plan.to_json())["engines"]
    assert written["chat"] == {
        "max_num_seqs": 8,
        "kv_cache_dtype": "fp8",
        **LLAMA,
        "promised_ttft_s": ttft_s,
    }
    bare = plan.model_copy(update={"engines": {}})
    assert "engines" not in bare.to_json()


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("max_num_seqs: 0", "max_num_seqs"),
        ("max_num_seqs: 64, max_num_batched_tokens: 32", "no room for 64 sequences"),
        ("gpu_memory_utilization: 150%", "gpu_memory_utilization"),
        ("kv_cache_dtype: fp7", r"engine.kv_cache_dtype: .* did you mean fp8"),
        ("scheduling: sometimes", "scheduling"),
        ("host: {step: 2h}", "step"),
    ],
)
def test_what_no_engine_can_do_is_refused(engine: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        fleet(engine)
    assert caught.value.line == 3
