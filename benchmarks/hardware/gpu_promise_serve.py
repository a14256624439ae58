"""Serve the cases of `benchmarks.gpu_promise` on a machine with a GPU, and note what clients see.

    python -m benchmarks.gpu_promise_serve plan FOLDER              (anywhere: plans, arrivals)
    python -m benchmarks.gpu_promise_serve up CASE FOLDER OUT       (where the GPU is: `atoll up`)
    python -m benchmarks.gpu_promise_serve load CASE FOLDER OUT
    python -m benchmarks.gpu_promise_serve steps CASE FOLDER OUT    (times of single steps)
    python -m benchmarks.gpu_promise_serve down CASE FOLDER OUT

`up` and `load` need vLLM, Atoll and nothing to plan or simulate with. A program called `vllm` before the real
one on the PATH adds that weights are random ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.hardware.gpu_promise_cases import (
    CASES,
    SECONDS,
    SERVICE,
    SHARES,
    SYSTEM_TOKENS,
    Case,
    write_model,
)
from benchmarks.hardware.gpu_step_times import StepTime, measure_steps
from benchmarks.simulation.streaming import draw_prompt, stream_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

COLUMNS = ("share", "arrival_s", "input", "output", "ttft_ms", "tpot_ms", "error")
_PORT = 18080
_GATEWAY = f"http://127.0.0.1:{_PORT}"
_WARM_UP_S = 8.0
_PROBES = 40
_METRIC = re.compile(
    r"^vllm:(?P<name>(?:request_queue_time|request_prefill_time|request_decode_time|time_to_first_token|"
    r"inter_token_latency|request_time_per_output_token|iteration_tokens_total|prompt_tokens|prefix_cache_hits)\w*?"
    r"(?:_sum|_count|_total))\{[^}]*\} (?P<value>[-+.e0-9]+)$",
    re.MULTILINE,
)


def plan(folder: Path) -> None:
    """Plan every case, and draw the arrivals of its runs."""
    from atoll import Fleet
    from atoll.workload.requests import collect
    from atoll.workload.spec import workload_of

    folder.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        (folder / f"{name}.yaml").write_text(case.fleet)
        planned = Fleet.load(folder / f"{name}.yaml").plan()
        planned.save(folder / f"{name}.json")
        limit = planned.engines[SERVICE].max_model_len or 0
        for share in SHARES:
            rate = f"{case.rate_per_s * share:g}/s"
            spec = f"poisson:{rate} lengths={case.lengths} for={SECONDS:g}s"
            drawn = collect(workload_of(spec), seed=round(100 * share))
            with (folder / f"{name}-{share:g}.csv").open("w", newline="") as stream:
                rows = csv.writer(stream)
                rows.writerow(("arrival_s", "input", "output"))
                columns = zip(drawn.arrival_s, drawn.input, drawn.output, strict=True)
                for at, own, answer in columns:
                    prompt = own + (SYSTEM_TOKENS if case.systems else 0)
                    if prompt + answer <= limit:  # a server refuses longer ones
                        rows.writerow((f"{at:.4f}", prompt, answer))


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
    write_model(case.model, folder / f"model-{case.server}")
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    begun_s = time.monotonic()
    command = [
        *(sys.executable, "-m", "atoll", "up", str(folder / f"{case.name}.json")),
        *("--fleet", str(folder / f"{case.name}.yaml"), "--state", str(_state(case, folder))),
        *("--model", f"{SERVICE}={folder / f'model-{case.server}'}"),
        *("--yes", "--port", str(_PORT), "--wait", "8min", "--on", "local"),
    ]
    subprocess.run(command, env=environment, check=True)
    note: dict[str, Any] = {
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "ready_s": round(time.monotonic() - begun_s, 1),
        "server": next(iter(_servers().values())),
        "servers": list(_servers().values()),
        "versions": {name: _version(name) for name in ("torch", "triton")},
        "python": sys.version.split()[0],
        "gpu": _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
    }
    with urllib.request.urlopen(f"{_engines()[0]}/version", timeout=10.0) as answer:
        note["versions"]["vllm"] = json.load(answer)["version"]
    (out / f"gpu_promise_server_{case.server}.json").write_text(json.dumps(note, indent=1))


def _state(case: Case, folder: Path) -> Path:
    return folder / f"state-{case.server}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _servers() -> dict[str, str]:
    """Return the commands of all servers by their ports; programs before them have longer ones."""
    found: dict[str, str] = {}
    for line in _said("pgrep", "-af", "vllm.* serve .*--port").splitlines():
        command = line.partition(" ")[2]
        for port in re.findall(r"--port (\d+)", command)[:1] if "pgrep" not in line else ():
            found[port] = min(command, found.get(port, command), key=len)
    return dict(sorted(found.items()))


def _engines() -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in _servers()]


def load(case: Case, folder: Path, out: Path) -> None:
    """Send the arrivals of every run, and write what came back."""
    asyncio.run(_warm_up(case, folder))
    note: dict[str, Any] = {"case": case.name}
    if not case.apart:  # one that runs one phase answers nobody alone
        note["gateway"] = asyncio.run(_compare(_engines()[0]))
    rows = []
    for share in SHARES:
        before = _metrics()
        found = asyncio.run(_run(case, _arrivals(folder, case, share), seed=round(1000 * share)))
        after = _metrics()
        rows += [(f"{share:g}", *row) for row in found]
        note[f"metrics_{share:g}"] = {name: after[name] - before.get(name, 0.0) for name in after}
        print(case.name, share, _summary(found), flush=True)
        _write(out / f"gpu_promise_{case.name}.csv", rows)
        (out / f"gpu_promise_{case.name}.json").write_text(json.dumps(note, indent=1))


def _write(path: Path, rows: Sequence[tuple[Any, ...]]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)


def _arrivals(folder: Path, case: Case, share: float) -> list[tuple[float, int, int]]:
    with (folder / f"{case.name}-{share:g}.csv").open() as stream:
        return [
            (float(row["arrival_s"]), int(row["input"]), int(row["output"]))
            for row in csv.DictReader(stream)
        ]


async def _warm_up(case: Case, folder: Path) -> None:
    # Kernels compile at their first use: prompts and batches of all sizes come before what counts.
    arrivals = [row for row in _arrivals(folder, case, 1.0) if row[0] < _WARM_UP_S]
    await _run(case, arrivals, seed=7_000_000)


async def _run(
    case: Case, arrivals: Sequence[tuple[float, int, int]], seed: int
) -> list[tuple[Any, ...]]:
    begun_s = time.monotonic() + 0.5

    async def later(at: int) -> tuple[Any, ...]:
        arrival_s, prompt, answer = arrivals[at]
        system = case.system(at)
        begin = () if system is None else draw_prompt(system, SYSTEM_TOKENS)
        await asyncio.sleep(max(0.0, begun_s + arrival_s - time.monotonic()))
        try:
            found = await asyncio.wait_for(
                stream_answer(_GATEWAY, SERVICE, seed * 100_000 + at, prompt, answer, begin=begin),
                120.0,
            )
        except (SystemExit, OSError, TimeoutError, ValueError) as error:
            return (arrival_s, prompt, answer, "", "", type(error).__name__)
        ttft_s, tpot_s = found.latency
        return (arrival_s, prompt, answer, f"{1e3 * ttft_s:.2f}", f"{1e3 * tpot_s:.3f}", "")

    return list(await asyncio.gather(*(later(at) for at in range(len(arrivals)))))


async def _compare(engine: str) -> dict[str, float]:
    """Return the median ms to the first token of short prompts, through the gateway and past it."""
    taken: dict[str, list[float]] = {_GATEWAY: [], engine: []}
    for at in range(_PROBES):
        for other, (url, seen) in enumerate(taken.items()):
            found = await stream_answer(url, SERVICE, 900_000 + 2 * at + other, 128, 8)
            seen.append(1e3 * found.latency.ttft_s)
    through, past = (statistics.median(taken[url]) for url in (_GATEWAY, engine))
    return {"through_ms": through, "past_ms": past, "added_ms": through - past}


def _metrics() -> dict[str, float]:
    """Return what all servers have counted, added up."""
    total: dict[str, float] = {}
    for engine in _engines():
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{engine}/metrics", timeout=10.0) as answer,
        ):
            for found in _METRIC.finditer(answer.read().decode()):
                name = found["name"]
                total[name] = total.get(name, 0.0) + float(found["value"])
    return total


def _summary(rows: Sequence[tuple[Any, ...]]) -> str:
    ttft = sorted(float(row[3]) for row in rows if not row[5])
    tpot = sorted(float(row[4]) for row in rows if not row[5])
    if not ttft:
        return "nothing came back"
    return (
        f"{len(rows)} requests, {len(rows) - len(ttft)} errors, TTFT mean {statistics.fmean(ttft):.1f} "
        f"p95 {ttft[int(0.95 * len(ttft))]:.1f} ms, TPOT mean {statistics.fmean(tpot):.2f} "
        f"p95 {tpot[int(0.95 * len(tpot))]:.2f} ms"
    )


def steps(case: Case, folder: Path, out: Path) -> None:
    """Measure the times of the server's steps, past the gateway."""
    asyncio.run(_warm_up(case, folder))
    found = asyncio.run(measure_steps(_engines()[0], SERVICE))
    with (out / f"gpu_steps_{case.server}.csv").open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(StepTime._fields)
        writer.writerows((*step[:-1], f"{step.ms:.3f}") for step in found)
    print(case.server, *(f"{s.sequences}+{s.prompt}:{s.ms:.2f}" for s in found), flush=True)


def down(case: Case, folder: Path) -> None:
    """End what `up` began."""
    command = [*(sys.executable, "-m", "atoll", "down"), *("--state", str(_state(case, folder)))]
    subprocess.run([*command, "--yes"], check=True)


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("plan", "up", "load", "steps", "down"))
    parser.add_argument("case", nargs="?", choices=sorted(CASES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=Path())
    given = parser.parse_args()
    folder = given.folder.absolute()
    if given.verb == "plan":
        plan(folder)
        return
    case = CASES[given.case]
    if given.verb == "down":
        down(case, folder)
    else:
        {"up": up, "load": load, "steps": steps}[given.verb](case, folder, given.out)


if __name__ == "__main__":
    main()
