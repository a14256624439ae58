"""Engines' own argument parsers take the commands that plans become, where the engines are installed."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.catalog.catalog import Catalog
from atoll.core.ids import Phase
from atoll.deploy.commands.instance_member import fill_in
from atoll.deploy.commands.meeting import MemberAddress
from atoll.engines.engine import Engine, EngineLayout, ServedModel, ServerHost
from atoll.engines.limits import EngineLaunch, Scheduling
from atoll.engines.llamacpp import ENGINE as LLAMACPP
from atoll.engines.sglang import ENGINE as SGLANG
from atoll.engines.vllm import ENGINE as VLLM
from atoll.engines.vllm_omni import ENGINE as OMNI
from atoll.engines.vllm_omni import OmniExecutor
from tools.own_parsers import HANDOVERS, ReadCommand, read_commands
from tools.real_engines import UnavailableError, find_parser

LAYOUTS = (
    EngineLayout("one", 1, 1, 1, (30,)),
    EngineLayout("two", 1, 2, 2, (30,)),
)


MEMBERS = {
    "n0": MemberAddress(host="10.0.0.8", ports=(4100, 4200)),
    "n1": MemberAddress(host="10.0.0.9", ports=(4300, 4400)),
}
SCHEDULINGS: tuple[Scheduling | None, ...] = (None, "sync", "async")


def launches() -> list[EngineLaunch]:
    """Launches that say every option, with the parsers of all models."""
    said = [
        EngineLaunch(max_model_len=4096, prefix_caching=caching, scheduling=scheduling)
        for caching in (True, False)
        for scheduling in SCHEDULINGS
    ]
    said += [
        EngineLaunch(
            max_num_seqs=64,
            gpu_memory_utilization=0.85,
            max_model_len=8192,
            kv_cache_dtype=kv,
            dtype="fp16",
            quantization="fp8",
        )
        for kv in ("fp8", "bf16")
    ]
    models = Catalog.default().models.values()
    parsers = {(model.tool_parser, model.reasoning_parser) for model in models}
    said += [
        EngineLaunch(max_model_len=2048, tool_parser=tool, reasoning_parser=reasoning)
        for tool, reasoning in sorted(parsers, key=str)
    ]
    return said


# `make test-full` installs the engines; loading one takes as long as a thousand other tests.
@pytest.mark.slow
@pytest.mark.parametrize("engine", [VLLM, SGLANG, LLAMACPP], ids=lambda engine: engine.name)
def test_its_own_parser_reads_what_a_plan_says(engine: Engine) -> None:
    commands, expected = [], []
    ways = [EngineLaunch(max_model_len=4096, handover=way) for way in HANDOVERS[engine.name]]
    for layout in LAYOUTS:
        for launch in (*launches(), *ways):
            if engine is LLAMACPP and launch.kv_cache_dtype == "fp8":
                continue  # which it refuses
            if launch.handover is not None:
                layout = replace(layout, phase=Phase(launch.handover.partition("-")[0]))
            served = ServedModel("org/model", ("chat",), launch)
            command = engine.command(layout, served, ServerHost("8000", "python3"))
            settled = engine.settle(launch)
            commands.append(command.arguments)
            said = "" if launch.handover is None else HANDOVERS[engine.name][launch.handover]
            expected.append(
                ReadCommand(layout.tp, settled.max_model_len, settled.max_num_batched_tokens, said)
            )
    if engine is not LLAMACPP:
        row = EngineLayout("row", 2, 2, 1, (20, 10))
        served = ServedModel("org/model", ("chat",), EngineLaunch(max_model_len=4096))
        whole = engine.command(row, served, ServerHost("8000", "python3"))
        tokens = engine.settle(EngineLaunch()).max_num_batched_tokens
        for rank in range(2):
            ranked = engine.rank_command(whole, rank, ("n0", "n1"))
            commands.append(tuple(fill_in(ranked.arguments, MEMBERS)))
            place = f"{rank} of 2 at 10.0.0.8:4100"
            expected.append(ReadCommand(2, 4096, tokens, stages=2, place=place))
    unknown = (*commands[0], "--no-such-option", "5")
    try:
        *read, refused = read_commands(engine.name, [*commands, unknown])
    except UnavailableError as error:
        pytest.skip(f"{engine.title} is not here to ask: {error}")
    assert read == expected
    assert "--no-such-option" in refused.refusal


def test_vllm_omni_reads_the_stages_of_its_command() -> None:
    """Its own reader of stages takes them, and settings of a stage have all names; nothing is imported."""
    try:
        real = find_parser("vllm-omni", build=False)
    except UnavailableError as error:
        pytest.skip(f"vLLM-Omni is not here to ask: {error}")
    package = Path(real.environment["PYTHONPATH"], "vllm_omni")
    weights = {"vision": 0.02, "audio": 0.02, "llm": 0.19, "talker": 0.03, "vocoder": 0.01}
    executors = [
        OmniExecutor("think", ("vision", "audio", "llm"), "m", (0, 1), 2, 0.9, weights),
        OmniExecutor("sound", ("talker", "vocoder"), "m", (2,), 1, 0.9, weights),
    ]
    made = OMNI.deploy("qwen2.5-omni-7b", executors)
    words = OMNI.serve(made, ServedModel("o/m", ("a",)), ServerHost("8000", "python3")).arguments
    cli = (package / "entrypoints/cli/serve.py").read_text("utf-8")
    assert all(f'"{flag}"' in cli for flag in ("--omni", "--stage-overrides"))
    tree = ast.parse((package / "entrypoints/utils.py").read_text("utf-8"))
    names: dict[str, Any] = {"json": json, "Any": Any}
    (reader,) = (each for each in tree.body if getattr(each, "name", "") == "parse_stage_overrides")
    exec(compile(ast.Module([reader], []), "utils.py", "exec"), names)
    read = names["parse_stage_overrides"]
    assert read(words[words.index("--stage-overrides") + 1]) == made.stages
    with pytest.raises(ValueError, match="stage ids"):
        read('{"one": {}}')
    tree = ast.parse((package / "config/stage_config.py").read_text("utf-8"))
    (settings,) = (each for each in tree.body if getattr(each, "name", "") == "StageDeployConfig")
    assert isinstance(settings, ast.ClassDef)
    known = {ast.unparse(each.target) for each in settings.body if isinstance(each, ast.AnnAssign)}
    assert all(stage.keys() <= known for stage in made.stages.values())
    pipeline = (package / "model_executor/models/qwen2_5_omni/pipeline.py").read_text("utf-8")
    whole = pipeline.partition("QWEN2_5_OMNI_THINKER_ONLY_PIPELINE")[0]
    assert whole.count("StagePipelineConfig(") == len(made.stages)
