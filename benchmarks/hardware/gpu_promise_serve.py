"""Serve the cases of `benchmarks.gpu_promise` on a machine with a GPU, and note what clients see.

    python -m benchmarks.gpu_promise_serve plan FOLDER              (anywhere: plans, arrivals)
    python -m benchmarks.gpu_promise_serve up CASE FOLDER OUT       (where the GPU is: `atoll up`)
    python -m benchmarks.gpu_promise_serve load CASE FOLDER OUT
    python -m benchmarks.gpu_promise_serve profile CASE FOLDER OUT  (`atoll profile --server`)
    python -m benchmarks.gpu_promise_serve down CASE FOLDER OUT

`up` and `load` need vLLM, Atoll and nothing to plan or simulate with. A program called `vllm` before the real
one on the PATH adds that weights are random ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.hardware.gpu_fleet import (
    GpuFleet,
    Served,
    draw_arrivals,
    read_arrivals,
    summarise,
    write_arrivals,
    write_served,
)
from benchmarks.hardware.gpu_promise_cases import (
    CASES,
    SECONDS,
    SERVICE,
    SHARES,
    SYSTEM_TOKENS,
    Case,
    write_model,
)
from benchmarks.simulation.streaming import stream_answer

COLUMNS = ("share", *Served._fields)
_WARM_UP_S = 8.0
_PROBES = 40
_METRIC = re.compile(
    r"vllm:(?P<name>(?:request_queue_time|request_prefill_time|request_decode_time|time_to_first_token|"
    r"inter_token_latency|request_time_per_output_token|iteration_tokens_total|prompt_tokens|prefix_cache_hits)\w*?"
    r"(?:_sum|_count|_total))"
)


def plan(folder: Path, names: Sequence[str], shares: Sequence[float]) -> None:
    """Plan cases, and draw the arrivals of their runs."""
    from atoll import Fleet

    folder.mkdir(parents=True, exist_ok=True)
    for name, case in ((name, CASES[name]) for name in names):
        (folder / f"{name}.yaml").write_text(case.fleet)
        planned = Fleet.load(folder / f"{name}.yaml").plan()
        planned.save(folder / f"{name}.json")
        for share in shares:
            arrivals = draw_arrivals(
                *(case.rate_per_s * share, case.lengths, SECONDS, round(100 * share)),
                more=SYSTEM_TOKENS if case.systems else 0,
                limit=planned.engines[SERVICE].max_model_len or 0,  # a server refuses longer ones
            )
            write_arrivals(folder / f"{name}-{share:g}.csv", arrivals)


def _fleet(case: Case, folder: Path) -> GpuFleet:
    return GpuFleet(folder, case.name, case.server, SERVICE, case.port)


def up(case: Case, folder: Path, out: Path) -> None:
    """Bring the case up as a user would."""
    programs = folder / f"bin-{case.server}"
    programs.mkdir(parents=True, exist_ok=True)
    real = shutil.which("vllm")
    if real is None:
        raise SystemExit("vllm is not on the PATH")
    options = shlex.join(("--load-format", "dummy", *case.options))
    script = programs / "vllm"
    script.write_text(f'#!/bin/bash\nexec {shlex.quote(real)} "$@" {options}\n')
    script.chmod(0o755)
    model = folder / f"model-{case.server}"
    write_model(case.model, model)
    note = _fleet(case, folder).up(model, {"PATH": f"{programs}:{os.environ['PATH']}"})
    (out / f"gpu_promise_server_{case.server}.json").write_text(json.dumps(note, indent=1))


def load(case: Case, folder: Path, out: Path) -> None:
    """Send the arrivals of every run, and write what came back."""
    fleet = _fleet(case, folder)
    _warm_up(case, folder)
    note: dict[str, Any] = {"case": case.name}
    if not case.apart:  # one that runs one phase answers nobody alone
        note["gateway"] = asyncio.run(_compare(fleet.url, fleet.engines()[0]))
    rows: list[tuple[Any, ...]] = []
    for share in _planned(case, folder):
        before = _metrics(fleet)
        arrivals = read_arrivals(folder / f"{case.name}-{share:g}.csv")
        found = asyncio.run(fleet.send(arrivals, round(1000 * share), begin=case.begin))
        after = _metrics(fleet)
        rows += [(f"{share:g}", *row) for row in found]
        note[f"metrics_{share:g}"] = {name: after[name] - before.get(name, 0.0) for name in after}
        print(case.name, share, summarise(found), flush=True)
        write_served(out / f"gpu_promise_{case.name}.csv", COLUMNS[0], rows)
        (out / f"gpu_promise_{case.name}.json").write_text(json.dumps(note, indent=1))


def _planned(case: Case, folder: Path) -> list[float]:
    """Return the rates whose arrivals were drawn, as shares of the planned one."""
    return [share for share in SHARES if (folder / f"{case.name}-{share:g}.csv").is_file()]


def _warm_up(case: Case, folder: Path) -> None:
    # Kernels compile at their first use: prompts and batches of all sizes come before what counts.
    whole = read_arrivals(folder / f"{case.name}-{_planned(case, folder)[-1]:g}.csv")
    arrivals = [each for each in whole if each.arrival_s < _WARM_UP_S]
    asyncio.run(_fleet(case, folder).send(arrivals, 7_000_000, begin=case.begin))


async def _compare(gateway: str, engine: str) -> dict[str, float]:
    """Return the median ms to the first token of short prompts, through the gateway and past it."""
    taken: dict[str, list[float]] = {gateway: [], engine: []}
    for at in range(_PROBES):
        for other, (url, seen) in enumerate(taken.items()):
            found = await stream_answer(url, SERVICE, 900_000 + 2 * at + other, 128, 8)
            seen.append(1e3 * found.latency.ttft_s)
    through, past = (statistics.median(taken[url]) for url in (gateway, engine))
    return {"through_ms": through, "past_ms": past, "added_ms": through - past}


def _metrics(fleet: GpuFleet) -> dict[str, float]:
    counted = fleet.metrics().items()
    return {found["name"]: value for name, value in counted if (found := _METRIC.fullmatch(name))}


def profile(case: Case, folder: Path, out: Path) -> None:
    """Measure the server as a user would, and keep the overlay that this makes."""
    overlay = out / f"gpu_promise_profile_{case.server}.yaml"
    overlay.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "atoll", "profile", "--server", _fleet(case, folder).engines()[0]),
        *("--name", case.model, "--as", case.node, "-o", str(overlay)),
    ]
    begun_s = time.monotonic()
    subprocess.run(command, check=True)
    print(case.server, f"profiled in {time.monotonic() - begun_s:.0f} s", flush=True)


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("plan", "up", "load", "profile", "down"))
    parser.add_argument("case", nargs="?", choices=sorted(CASES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=Path())
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--shares", nargs="+", type=float, choices=SHARES, default=SHARES)
    given = parser.parse_args()
    folder = given.folder.absolute()
    if given.verb == "plan":
        plan(folder, given.cases, given.shares)
        return
    case = CASES[given.case]
    if given.verb == "down":
        _fleet(case, folder).down()
    else:
        verbs = {"up": up, "load": load, "profile": profile}
        verbs[given.verb](case, folder, given.out)


if __name__ == "__main__":
    main()
