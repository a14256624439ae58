"""Tokens in a step: fewer where whoever decodes would wait for prompts, and only where it is left open."""

from __future__ import annotations

import pytest

from atoll.api.fleet import Fleet
from atoll.core.ids import Phase
from atoll.engines.limits import EngineLaunch, EngineLimits
from atoll.engines.vllm import ENGINE as VLLM
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.prove import step_tokens
from atoll.prove.kept import simulate_kept
from atoll.prove.step_tokens import carry_less, fit_steps, with_step_tokens
from atoll.solve.effort import Effort

FLEET = """
services:
  chat: {model: llama-3.1-8b, ttft: 10s, tpot: 100ms, rate: 30/min, lengths: {input: 1500, output: 100}}
cluster:
  nodes: {room: {"T4:1": 4}}
  links: [{between: ["*", "*"], bandwidth: 10Gbit/s, latency: 100us}]
"""
OTHER_SEED = 7
REQUESTS = 500
QUICK = Effort(work=0.02)
"""What is placed does not matter, only that it is in pipelines."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    path = tmp_path_factory.mktemp("steps") / "room.yaml"
    path.write_text(FLEET, encoding="utf-8")
    return Fleet.load(path)


@pytest.fixture(scope="module")
def placed(fleet: Fleet) -> Plan:
    """Two pipelines of two slow machines, for capacity alone."""
    made = fleet.plan(effort=QUICK, capacity_only=True, rank=False)
    assert all(one.phase is Phase.BOTH and len(one.nodes) > 1 for one in made.instances)
    return made


def kept(plan: Plan, problem: Problem, fleet: Fleet) -> float:
    return simulate_kept(plan, problem, fleet.catalog, OTHER_SEED, requests=REQUESTS)["chat"].both


def limited(problem: Problem, **limits: int) -> Problem:
    (service,) = problem.services
    return problem.replace(
        services=(service.model_copy(update={"engine_limits": EngineLimits(**limits)}),)
    )


def test_short_steps_keep_promises_that_long_ones_break(
    fleet: Fleet, placed: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_tokens, "_REQUESTS", REQUESTS)
    fitted = fit_steps(placed, fleet.problem, fleet.catalog)
    tokens = fitted.engines["chat"].max_num_batched_tokens
    assert tokens is not None
    assert tokens < 1024
    assert kept(placed, fleet.problem, fleet) < 0.95 <= kept(fitted, fleet.problem, fleet)
    assert f"chat takes {tokens} tokens in a step" in fitted.notes
    assert validate(fitted, fleet.problem, fleet.catalog) == []
    assert fitted == fit_steps(placed, fleet.problem, fleet.catalog)


def test_flows_are_what_nodes_carry_in_short_steps() -> None:
    text = FLEET.replace("T4:1", "A100-40:1").replace(
        "input: 1500, output: 100", "input: 500, output: 400"
    )
    fleet = Fleet.read(text)
    placed = fleet.plan(effort=QUICK, capacity_only=True, rank=False)
    short = with_step_tokens(placed, {"chat": 128})
    assert {v.rule for v in validate(short, fleet.problem, fleet.catalog)} == {"node-capacity"}
    lower = carry_less(short, fleet.problem, fleet.catalog)
    assert validate(lower, fleet.problem, fleet.catalog) == []
    assert 0.0 < (lower.objective or 0.0) < (placed.objective or 0.0)
    assert carry_less(placed, fleet.problem, fleet.catalog) is placed


def test_the_simulator_runs_what_the_plan_carries(fleet: Fleet, placed: Plan) -> None:
    carried = with_step_tokens(placed, {"chat": 256})
    told = limited(fleet.problem, max_num_batched_tokens=256)
    assert kept(carried, fleet.problem, fleet) == kept(placed, told, fleet)
    # What the fleet says counts before what a plan carries.
    assert kept(carried, limited(fleet.problem, max_num_batched_tokens=2048), fleet) == kept(
        placed, fleet.problem, fleet
    )


def test_what_the_fleet_sets_is_left_alone(fleet: Fleet, placed: Plan) -> None:
    asked = limited(fleet.problem, max_num_batched_tokens=2048)
    assert fit_steps(placed, asked, fleet.catalog) is placed


def test_a_service_that_keeps_enough_is_left_alone(fleet: Fleet, placed: Plan) -> None:
    (service,) = fleet.problem.services
    patient = fleet.problem.replace(services=(service.model_copy(update={"tpot_s": 5.0}),))
    assert fit_steps(placed, patient, fleet.catalog) is placed


def test_sequences_never_exceed_the_tokens_of_a_step(fleet: Fleet, placed: Plan) -> None:
    asked = limited(fleet.problem, max_num_seqs=200)
    plan = placed.model_copy(update={"engines": asked.launches()})
    short = with_step_tokens(plan, {"chat": 64})
    assert short.engines["chat"].max_num_seqs == 64
    (service,) = asked.started_as(short.engines).services
    assert service.engine_limits == EngineLimits(max_num_batched_tokens=64, max_num_seqs=64)
    assert asked.started_as(plan.engines) is asked


@pytest.mark.parametrize(
    ("tokens", "sequences"), [(64, "64"), (512, "256"), (2048, None), (None, None)]
)
def test_vllm_is_never_told_of_more_sequences_than_tokens(
    tokens: int | None, sequences: str | None
) -> None:
    flags = VLLM.flags(EngineLaunch(max_num_batched_tokens=tokens))
    found = flags[flags.index("--max-num-seqs") + 1] if "--max-num-seqs" in flags else None
    assert found == sequences
