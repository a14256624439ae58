"""Placements on fixed clusters name the engine that they are made for, where it runs them."""

from __future__ import annotations

from functools import cache

import pytest

from atoll.api.fleet import Fleet
from atoll.catalog.catalog import Catalog
from atoll.cli.plan_commands import refuse_missing, write_commands
from atoll.core.errors import InputError
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.report.plan.cluster_tables import list_machines, list_unrun
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve

FLEET = """
services:
  chat: {{model: qwen3-32b, ttft: 5s, tpot: 300ms, rate: 0.2/s, lengths: 512x128}}
cluster:
  nodes: {{here: {{{nodes}}}}}
  links: [{{between: ["*", "*"], bandwidth: 10Gbit/s, latency: 1ms}}]
settings: {{{settings}}}
"""
UNLIKE = '"RTX3090:2": 1, "L40S:1": 1'
NOBODYS = '"RTX3090:2": 1, "MI250:1": 1'
OLD = '"V100-32:1": 3'


def problem_of(nodes: str, settings: str = "") -> Problem:
    return parse_fleet(FLEET.format(nodes=nodes, settings=settings))


@cache
def planned(nodes: str, settings: str = "") -> tuple[Problem, Plan]:
    problem = problem_of(nodes, settings)
    plan = solve(problem, PlanRequest(effort=Effort(work=0.02, cached=False)))
    return problem, plan.model_copy(update={"models": {"chat": "qwen3-32b"}})


def shown(problem: Problem, plan: Plan) -> set[str]:
    return {row.run_by for row in list_machines(plan, problem, problem.catalog())}


def test_what_the_engine_runs_names_it_and_has_a_command() -> None:
    problem, plan = planned('"L40S:1": 2')
    assert {one.engine for one in plan.instances} == {"vllm"}
    assert shown(problem, plan) == {"vllm, tested"}
    assert list_unrun(plan, problem, problem.catalog()) == []
    assert validate(plan, problem, problem.catalog()) == []
    assert refuse_missing(write_commands(plan, Catalog.default())) is None


@pytest.mark.slow
def test_what_no_engine_runs_says_so_and_has_no_command() -> None:
    problem, plan = planned(NOBODYS)
    (instance,) = plan.instances
    assert instance.engine is None
    assert shown(problem, plan) == {"no engine"}
    (line,) = list_unrun(plan, problem, problem.catalog())
    assert line.startswith(
        "chat-both-0: no engine runs it, and its times are those of vllm (vllm: "
    )
    assert "unlike tensor parallel sizes in one pipeline" in line
    assert "atoll: an instance on MI250" in line
    (commands,) = write_commands(plan, Catalog.default())
    assert commands.refusal is not None
    assert "no engine runs chat-both-0" in commands.refusal
    error = refuse_missing([commands])
    assert error is not None
    assert error.exit_code == 8


def test_unlike_tensor_parallel_sizes_in_one_pipeline_have_commands() -> None:
    problem, plan = planned(UNLIKE)
    assert sorted(node.tp for one in plan.instances for node in one.nodes) == [1, 2]
    assert shown(problem, plan) == {"only atoll"}
    (commands,) = write_commands(plan, Catalog.default())
    assert ["stage_node" in each for each in commands.lines] == [True] * 2
    assert refuse_missing([commands]) is None


def test_what_another_engine_runs_is_its_and_planned_for_it_when_asked() -> None:
    problem, plan = planned(OLD)
    assert shown(problem, plan) == {"only atoll"}
    (line,) = list_unrun(plan, problem, problem.catalog())
    assert "only atoll runs it, and its times are those of vllm (vllm: an instance on V100" in line
    assert line.endswith("--engines atoll places with its own.")
    # The command is of the one that runs there.
    (commands,) = write_commands(plan, Catalog.default())
    assert ["stage_node" in each for each in commands.lines] == [True] * 3
    problem, plan = planned(OLD, "engines: [atoll]")
    assert {one.engine for one in plan.instances} == {"atoll"}
    assert shown(problem, plan) == {"atoll, tested"}
    assert validate(plan, problem, problem.catalog()) == []


def test_a_cluster_is_placed_for_one_engine() -> None:
    with pytest.raises(InputError, match="placed for one engine, not for vllm, atoll") as caught:
        problem_of(OLD, "engines: [vllm, atoll]")
    assert "settings.engines" in str(caught.value)
    assert problem_of(OLD, "engines: [atoll]").settings.engine == "atoll"
    assert problem_of(OLD, "engines: [free]").settings.engine == "vllm"
    fleet = Fleet(problem_of(OLD))
    with pytest.raises(InputError, match="placed for one engine"):
        fleet.plan(capacity_only=True, engines=["vllm", "atoll"])
