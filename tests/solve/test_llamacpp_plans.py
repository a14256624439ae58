"""Plans with llama.cpp: for machines that no other engine runs on, and for GGUF weights; nowhere else."""

from __future__ import annotations

import shlex

import pytest

from atoll.catalog.catalog import Catalog
from atoll.cli.plan_commands import write_commands
from atoll.engines.engine import ServerCommand
from atoll.engines.llamacpp import ENGINE as LLAMACPP
from atoll.engines.table import list_planned
from atoll.plan.engine_layout import describe_engine, launch_of
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.sim.sim_options import SimOptions
from atoll.sim.unit_rows import UnitMaker
from atoll.solve.registry import solve

CATALOG = Catalog.default()
FLEET = """\
services:
  chat: {{model: {model}, ttft: {ttft}, tpot: 200ms, rate: 0.02/s, lengths: 512x256}}
pool:
  owned:
    home: {{{owned}}}
"""


def asked(model: str, owned: str, ttft: str = "5s") -> Problem:
    return parse_fleet(FLEET.format(model=model, owned=owned, ttft=ttft))


def plan_of(problem: Problem) -> Plan:
    """A plan that says which models it serves."""
    models = {service.name: service.model for service in problem.services}
    return solve(problem).model_copy(update={"models": models})


def planned(model: str, owned: str, ttft: str = "5s") -> tuple[Problem, Plan, Instance]:
    problem = asked(model, owned, ttft)
    plan = plan_of(problem)
    (instance,) = plan.instances
    assert validate(plan, problem) == []
    return problem, plan, instance


def test_a_mac_alone_serves_with_a_command_to_paste() -> None:
    problem, plan, instance = planned("qwen3-8b@q4_k_m", "M3-Max-36:1: 1")
    assert plan.served_fraction == {"chat": 1.0}
    assert describe_engine(instance, CATALOG) == "llamacpp, tested"
    (made,) = write_commands(plan, CATALOG)
    (line,) = made.lines
    words = shlex.split(line)
    assert words[0] == "llama-server"
    assert words[words.index("--hf-repo") + 1] == "Qwen/Qwen3-8B-GGUF:Q4_K_M"
    parsed = LLAMACPP.parse(ServerCommand(tuple(words), {}))
    assert parsed.served.launch == LLAMACPP.settle(launch_of(plan, instance))
    # As many requests at a time as have room, in the simulator too.
    assert instance.slots is not None
    assert parsed.served.launch is not None
    assert parsed.served.launch.max_num_seqs == instance.slots
    row = UnitMaker(problem, CATALOG, SimOptions()).row(instance, 0)
    assert row.max_sequences == instance.slots


def test_longer_requests_leave_fewer_slots() -> None:
    slots = []
    for lengths in ("512x256", "6000x1000", "24000x2000"):
        text = FLEET.format(model="qwen3-8b@q4_k_m", owned="M3-Max-36:1: 1", ttft="600s")
        plan = solve(parse_fleet(text.replace("512x256", lengths)))
        slots.append(plan.instances[0].slots or 0)
    assert slots[0] == 32
    assert slots[0] > slots[1] > slots[2] >= 1


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-14b@fp8", "qwen3-32b@int4"])
@pytest.mark.parametrize("owned", ["L4:1: 2, RTX4090:1: 1", "A100-80:4: 1", "MI300X:1: 1"])
def test_machines_that_vllm_runs_are_planned_as_without_it(model: str, owned: str) -> None:
    problem = asked(model, owned)
    others = [engine.name for engine in list_planned() if engine.name != LLAMACPP.name]
    assert problem.settings.engines == (*others, LLAMACPP.name)
    without = problem.replace(settings={**dict(problem.settings), "engines": tuple(others)})
    with_it, before = solve(problem), solve(without)
    assert with_it.instances == before.instances
    assert with_it.usd_per_hour == before.usd_per_hour


def test_a_mac_beside_a_gpu_has_weights_of_its_own() -> None:
    text = FLEET.format(model="qwen3-8b", owned="M2-Ultra-64:1: 1, RTX4090:1: 1", ttft="5s")
    plan = plan_of(parse_fleet(text.replace("rate: 0.02/s", "rate: 40/s")))
    lines = {
        one.engine: made.lines[0]
        for one, made in zip(plan.instances, write_commands(plan, CATALOG), strict=True)
    }
    assert "unsloth/Qwen3-8B-GGUF:BF16" in lines.pop("llamacpp")
    (other,) = lines.values()
    assert "Qwen/Qwen3-8B" in other
    assert "GGUF" not in other


def test_a_model_without_gguf_weights_says_so() -> None:
    _, plan, _ = planned("llama-3.1-8b", "M3-Max-36:1: 1")
    (note,) = plan.notes
    assert note == (
        "no GGUF weights of llama-3.1-8b are known: name those of chat with --model chat=FILE.gguf,"
        " or ask for llama-3.1-8b@q4_k_m, or ask for llama-3.1-8b@q8_0"
    )
    (made,) = write_commands(plan, CATALOG)
    assert made.refusal is not None
    assert "needs a GGUF file, not hf://meta-llama/Llama-3.1-8B-Instruct" in made.refusal


def test_what_it_has_no_weights_for_is_not_planned_on_a_mac() -> None:
    plan = solve(asked("qwen3-8b@fp8", "M3-Max-36:1: 1"))
    assert plan.instances == ()


def test_gpus_of_a_machine_hold_the_layers_together() -> None:
    _, plan, instance = planned("llama-3.3-70b@q4_k_m", "RTX3090:2: 1", "30s")
    assert describe_engine(instance, CATALOG) == "llamacpp layers over 2, written"
    (made,) = write_commands(plan, CATALOG)
    assert "--tensor-split 1,1" in made.lines[0]
    # One alone has no room for it.
    assert solve(asked("llama-3.3-70b@q4_k_m", "RTX3090:1: 2", "30s")).instances == ()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"slots": 33}, "33 slots are stated, and 32 have room for the longest request"),
        ({"slots": None}, "no slots are stated, and 32 have room for the longest request"),
        ({"engine": "vllm"}, "vllm has no slots, 32 are stated"),
    ],
)
def test_the_validator_counts_slots(change: dict[str, object], told: str) -> None:
    problem, plan, instance = planned("qwen3-8b@q4_k_m", "M3-Max-36:1: 1")
    wrong = plan.model_copy(update={"instances": (instance.model_copy(update=change),)})
    found = [each.message for each in validate(wrong, problem) if each.rule == "engine"]
    assert told in found


def test_the_validator_refuses_copies_side_by_side() -> None:
    problem, plan, instance = planned("llama-3.2-3b@q4_k_m", "RTX3090:2: 1")
    wide = instance.nodes[0].model_copy(update={"gpu_ids": None, "slot": None, "tp": 1})
    wrong = instance.model_copy(update={"nodes": (wide,)})
    found = validate(plan.model_copy(update={"instances": (wrong,)}), problem)
    assert any("2 copies of its layers" in each.message for each in found)
