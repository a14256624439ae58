"""Engines' own argument parsers, asked whether they take a command, where the engines are installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from atoll.core.files import atomic_write
from atoll.core.paths import cache_dir
from atoll.engines.limits import Handover
from tools.real_engines import RealEngine, UnavailableError, find_parser

_ASK_S = 1200.0
_VLLM = """
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
def read(words):
    found = parser.parse_args(words[2:])
    validate_parsed_serve_args(found)
    way = found.kv_transfer_config
    said = "" if way is None else f"{way.kv_connector} {way.kv_role}"
    place = f"{found.node_rank} of {found.nnodes} at {found.master_addr}:{found.master_port}"
    return [
        *(found.tensor_parallel_size, found.max_model_len, found.max_num_batched_tokens, said),
        *(found.pipeline_parallel_size, place if found.nnodes > 1 else ""),
    ]
"""
_SGLANG = """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
def read(words):
    found = parser.parse_args(words[3:])
    said = found.disaggregation_mode.removeprefix("null")
    place = f"{found.node_rank} of {found.nnodes} at {found.dist_init_addr}"
    return [
        *(found.tp_size, found.context_length, found.chunked_prefill_size, said),
        *(found.pp_size, place if found.nnodes > 1 else ""),
    ]
"""
_PARSERS = {"vllm": _VLLM, "sglang": _SGLANG}
_LLAMA_SERVER = "llama-server"
NAMES = (*_PARSERS, "llamacpp")
HANDOVERS: dict[str, dict[Handover, str]] = {
    "vllm": {
        "prefill": "NixlConnector kv_producer",
        "decode": "NixlConnector kv_consumer",
        "prefill-push": "NixlPushConnector kv_producer",
        "decode-push": "NixlPushConnector kv_consumer",
    },
    "sglang": {"prefill": "prefill", "decode": "decode"},
    "llamacpp": {},
}
"""Words in which parsers read that KV cache travels, by engine."""
_READ_ALL = """
import contextlib, io, json, sys
answers = []
for words in json.load(sys.stdin):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            answers.append(read(words))
    except SystemExit:
        answers.append((said.getvalue().strip().splitlines() or ["it ended"])[-1])
    except Exception as error:
        answers.append(repr(error))
print("READ" + json.dumps(answers))
"""


@dataclass(frozen=True, slots=True)
class ReadCommand:
    """A command as the engine's parser read it: GPUs that split a layer, tokens of a request and of a step.

    `handover` is how it says that KV cache travels, "": both phases run together. `stages` are those of a
    pipeline, `place` is its place among several machines ("1 of 2 at 10.0.0.8:4100"), "": there is one.
    `refusal` says what the parser says instead; "": it took the command.
    """

    tp: int = 0
    max_model_len: int | None = None
    max_tokens: int | None = None
    handover: str = ""
    stages: int = 1
    place: str = ""
    refusal: str = ""


def read_commands(engine: str, commands: Sequence[Sequence[str]]) -> list[ReadCommand]:
    """Have an engine's parser read commands; UnavailableError where it is not here to ask.

    The same version reads the same commands alike, and takes ten seconds to import: answers are kept.
    """
    if engine not in _PARSERS:
        return _read_llama_server(commands)
    real = find_parser(engine, build=False)
    program, words = _PARSERS[engine] + _READ_ALL, [list(each) for each in commands]
    asked = [real.version, real.python, program, words]
    kept = cache_dir() / "parsers" / f"{engine}.json"
    known = json.loads(kept.read_text("utf-8")) if kept.is_file() else {}
    if known.get("asked") != asked:
        known = {"asked": asked, "answers": _ask_parser(real, program, words)}
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(kept, json.dumps(known))
    return [
        ReadCommand(refusal=each) if isinstance(each, str) else ReadCommand(*each)
        for each in known["answers"]
    ]


def _ask_parser(real: RealEngine, program: str, commands: list[list[str]]) -> list[Any]:
    environment = {**os.environ, **real.environment}
    # The engine's own environment has its bytecode; elsewhere all of torch would be compiled anew.
    environment.pop("PYTHONPYCACHEPREFIX", None)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [real.python, "-c", program],
            input=json.dumps(commands),
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=True,
        )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("READ")]
    answers: list[Any] = json.loads(line.removeprefix("READ"))
    return answers


def _read_llama_server(commands: Sequence[Sequence[str]]) -> list[ReadCommand]:
    """Look whether `llama-server --help` lists all options; it has no way to parse and not to load."""
    program = shutil.which(_LLAMA_SERVER)
    if program is None:
        raise UnavailableError(f"{_LLAMA_SERVER} is not on the path")
    done = subprocess.run(
        [program, "--help"], capture_output=True, text=True, timeout=_ASK_S, check=True
    )
    listed = set(re.findall(r"--[a-z][a-z0-9-]*", done.stdout + done.stderr))
    read = []
    for words in commands:
        said = {a: b for a, b in pairwise((*words, "")) if a.startswith("--")}
        unknown = sorted(said.keys() - listed)
        if unknown:
            read.append(ReadCommand(refusal=f"it does not list {', '.join(unknown)}"))
            continue
        gpus = len(said.get("--tensor-split", "1").split(","))
        longest = int(said["--ctx-size"]) // int(said["--parallel"])
        read.append(ReadCommand(gpus, longest, int(said["--batch-size"])))
    return read
