"""Serve one model on one GPU with vLLM and with Atoll's own engine, for `benchmarks.gpu_engine`.

Anywhere, with Atoll's planner (some seconds; FOLDER gets plans and arrivals, a few hundred kB):

    python -m benchmarks.gpu_engine_serve plan FOLDER

Where the GPU is, with vLLM on the PATH, one command for each part, in this order:

    python -m benchmarks.gpu_engine_serve vllm FOLDER OUT     vLLM: starts, three loads, ends    (7 minutes)
    python -m benchmarks.gpu_engine_serve atoll FOLDER OUT    the stage engine, compiling anew   (6 minutes)
    python -m benchmarks.gpu_engine_serve again FOLDER OUT    with kernels of the start before    (1 minute)
    python -m benchmarks.gpu_engine_serve cut FOLDER OUT      in two stages on halves of the GPU (3 minutes)

The first part writes 16 GB of weights below FOLDER, which all load; `again` needs the FOLDER of `atoll` on
the same machine. Each writes `gpu_engine_PART.csv` (what every client saw) and `.json` (date, versions,
counters) to OUT: put them into `benchmarks/results`, where `python -m benchmarks.gpu_engine` joins them.
`plan FOLDER --seconds 20` makes loads that short; `plan FOLDER --device cpu` plans a trial of the whole on
cores, with tiny shapes, a few requests, and the stage engine in vLLM's place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from atoll.core.ids import Phase
from benchmarks.hardware.gpu_fleet import (
    Arrival,
    GpuFleet,
    Served,
    Stages,
    draw_arrivals,
    lay_out,
    read_arrivals,
    summarise,
    write_arrivals,
    write_served,
)
from benchmarks.hardware.gpu_promise_cases import SERVICE, Case, write_model, write_weights

LOADS = ("8", "16", "saturated")
"""Names of the loads: requests/s, then twice what vLLM is planned to carry."""
PARTS = {"vllm": LOADS, "atoll": LOADS, "again": (), "cut": LOADS[:1]}
"""Parts of the measurement, with the loads of each."""
MODEL = "llama-3.1-8b"
CUT = (0, 16, 32)
TOKENS = "vllm:generation_tokens_total"
"""Counter of both engines."""
COMPILED = "compiled_after_ready"
"""What the name of the stage engine's counter of late compilations holds."""
_WARM_UP_S = 8.0
_FULL = (1 / 3, 1.0)
"""Shares of a saturated run between which its tokens count: by then requests wait."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How long and on what it is measured; on cores with tiny shapes and a hundredth of the rates."""

    seconds: float = 60.0
    device: Literal["cpu", "cuda"] = "cuda"
    port: int = 18080

    @property
    def tiny(self) -> bool:
        """Whether it is a trial."""
        return self.device == "cpu"

    @property
    def lengths(self) -> str:
        """Lengths of prompts and answers."""
        return "64x8" if self.tiny else "azure-conv"

    @property
    def model(self) -> str:
        """Name of the shapes."""
        return "tiny" if self.tiny else MODEL

    def case(self, name: str) -> Case:
        """Return the fleet of a part."""
        engine = "vllm" if name == "vllm" and not self.tiny else "atoll"
        ours = {"again": "atoll"}.get(name, name)
        shares, rate = (2, 4.0) if ours == "cut" else (1, 16.0)
        return Case(*(ours, MODEL, 500, 20, rate, "azure-conv", ours), engine=engine, shares=shares)

    def fleet(self, name: str, folder: Path) -> GpuFleet:
        """Return the fleet of a part where it is served."""
        case = self.case(name)
        return GpuFleet(folder, case.name, case.server, SERVICE, self.port, self.device)


def plan(folder: Path, setup: Setup) -> None:
    """Plan the fleets of all parts, and draw the arrivals of all loads."""
    from atoll import Fleet

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "setup.json").write_text(json.dumps(asdict(setup)))
    limit, fits_per_s = 0, 0.0
    for case in (setup.case(name) for name in ("vllm", "atoll", "cut")):
        (folder / f"{case.name}.yaml").write_text(case.fleet)
        fleet = Fleet.load(folder / f"{case.name}.yaml")
        planned = fleet.plan()
        if case.name == "vllm":
            limit = planned.engines[SERVICE].max_model_len or 0
            fits_per_s = sum(instance.throughput_per_s for instance in planned.instances)
        if case.name == "cut":
            stages = Stages("chat-both-0", Phase.BOTH, ((CUT[0], CUT[1]), (CUT[1], CUT[2])))
            planned = lay_out(planned, fleet, [stages])
        planned.save(folder / f"{case.name}.json")
    slower = 8.0 if setup.tiny else 1.0
    for seed, (load, rate) in enumerate(zip(LOADS, (8.0, 16.0, 2.0 * fits_per_s), strict=True)):
        drawn = draw_arrivals(rate / slower, setup.lengths, setup.seconds, seed, limit=limit)
        write_arrivals(folder / f"arrivals-{load}.csv", drawn)
    print(f"{fits_per_s:.2f} requests/s fit vLLM as planned; {folder} is ready to be served")


def serve(part: str, folder: Path, out: Path) -> None:
    """Bring up what a part serves, load it, and write what was seen."""
    setup = Setup(**json.loads((folder / "setup.json").read_text()))
    fleet = setup.fleet(part, folder)
    model, kept = folder / "model", folder / "cache"
    write_model(setup.model, model)
    weights = write_weights(model)
    if part == "atoll":
        shutil.rmtree(kept, ignore_errors=True)
    note: dict[str, Any] = {"part": part, **asdict(setup), "weights_gb": round(weights / 1e9, 2)}
    note["kernels_kept"] = kept.is_dir()
    rows: list[tuple[Any, ...]] = []
    try:
        note |= fleet.up(model, {"ATOLL_CACHE": str(kept)})
        print(part, "ready after", note["ready_s"], "s, weights", note["weights_s"], flush=True)
        if PARTS[part]:
            arrivals = read_arrivals(folder / f"arrivals-{LOADS[0]}.csv")
            warming = [each for each in arrivals if each.arrival_s < _WARM_UP_S]
            asyncio.run(fleet.send(warming, 7_000_000))
        for number, load in enumerate(PARTS[part], 1):
            arrivals = read_arrivals(folder / f"arrivals-{load}.csv")
            if load == "saturated":
                found, note[load] = asyncio.run(_saturate(fleet, arrivals, number, setup.seconds))
            else:
                found = asyncio.run(fleet.send(arrivals, number))
            rows += [(load, *row) for row in found]
            print(part, load, summarise(found), note.get(load, ""), flush=True)
            write_served(out / f"gpu_engine_{part}.csv", "load", rows)
        counted = fleet.metrics()
        late = [count for name, count in counted.items() if f"{COMPILED}_total" in name]
        note[COMPILED] = sum(late) if late else None
        note["metrics"] = {
            name: value
            for name, value in sorted(counted.items())
            if name.endswith(("_total", "_sum", "_count")) and "python" not in name
        }
    finally:
        # Also of a part that broke off: what there is says why.
        (out / f"gpu_engine_{part}.json").write_text(json.dumps(note, indent=1) + "\n")
        fleet.down()


async def _saturate(
    fleet: GpuFleet, arrivals: Sequence[Arrival], seed: int, seconds: float
) -> tuple[list[Served], dict[str, float]]:
    """Send more than fits, until it ends; returns also how many tokens/s came once requests waited."""
    sending = asyncio.create_task(fleet.send(arrivals, seed, end_s=seconds))
    marks: list[tuple[float, float]] = []
    begun_s = time.monotonic()
    for share in _FULL:
        await asyncio.sleep(begun_s + share * seconds - time.monotonic())
        counted = await asyncio.to_thread(fleet.metrics)
        marks.append((time.monotonic(), counted.get(TOKENS, 0.0)))
    (from_s, before), (to_s, after) = marks
    seen = {"window_s": to_s - from_s, "tokens_per_s": (after - before) / (to_s - from_s)}
    return await sending, seen


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("plan", *PARTS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=Path())
    parser.add_argument("--seconds", type=float, default=60.0, help="plan: of each load")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="plan: on what")
    parser.add_argument("--port", type=int, default=18080, help="plan: of the gateway")
    given = parser.parse_args()
    folder = given.folder.absolute()
    if given.verb == "plan":
        plan(folder, Setup(given.seconds, given.device, given.port))
    else:
        given.out.mkdir(parents=True, exist_ok=True)
        serve(given.verb, folder, given.out)


if __name__ == "__main__":
    main()
