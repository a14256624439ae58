"""Engines' own argument parsers take the commands that plans become, where the engines are installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from atoll.catalog.catalog import Catalog
from atoll.engines.engine import Engine, EngineLayout, ServedModel, ServerHost
from atoll.engines.limits import EngineLaunch, Scheduling
from atoll.engines.sglang import ENGINE as SGLANG
from atoll.engines.vllm import ENGINE as VLLM
from tools.real_engines import UnavailableError, find_engine

READ_VLLM = """
import json, sys
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
read = []
for words in json.load(sys.stdin):
    found = parser.parse_args(words[2:])
    validate_parsed_serve_args(found)
    read.append([found.tensor_parallel_size, found.max_model_len, found.max_num_batched_tokens])
print("READ" + json.dumps(read))
"""
READ_SGLANG = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
read = []
for words in json.load(sys.stdin):
    found = parser.parse_args(words[3:])
    read.append([found.tensor_parallel_size, found.context_length, found.chunked_prefill_size])
print("READ" + json.dumps(read))
"""
PROGRAMS = {VLLM.name: READ_VLLM, SGLANG.name: READ_SGLANG}
LAYOUTS = (
    EngineLayout("one", 1, 1, 1, (30,)),
    EngineLayout("two", 1, 2, 2, (30,)),
)


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
        for tool, reasoning in parsers
    ]
    return said


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
def test_its_own_parser_reads_what_a_plan_says(engine: Engine, tmp_path: Path) -> None:
    try:
        real = find_engine(engine.name, build=False)
    except UnavailableError as error:
        pytest.skip(f"{engine.title} is not here to ask: {error}")
    commands, expected = [], []
    for layout in LAYOUTS:
        for launch in launches():
            served = ServedModel("org/model", ("chat",), launch)
            command = engine.command(layout, served, ServerHost("8000", "python3"))
            settled = engine.settle(launch)
            commands.append(command.arguments)
            expected.append([layout.tp, settled.max_model_len, settled.max_num_batched_tokens])
    done = subprocess.run(
        [real.python, "-c", PROGRAMS[engine.name]],
        input=json.dumps(commands),
        env={**os.environ, **real.environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("READ")]
    assert json.loads(line.removeprefix("READ")) == expected
