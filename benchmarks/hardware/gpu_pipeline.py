"""Pipelines of unlike stages on shares of one GPU, prefill and decode apart, while node processes are killed.

    python -m benchmarks.gpu_pipeline plan FOLDER               (anywhere with Atoll's planner, some seconds)
    python -m benchmarks.gpu_pipeline serve FOLDER              (where the GPU is; about 6 minutes)
    python -m benchmarks.gpu_pipeline plan FOLDER --device cpu  (then `serve`: tiny, with processes on cores)

`serve` writes a model (6 GB) to FOLDER, brings the plan up with `atoll up --on local`, asks for greedy
answers with nothing in the way, and then for the same again and again while nodes are killed at random
(SIGKILL, a fixed seed), each once all are well. Nobody may get an error or another text.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from atoll.core.ids import Phase
from atoll.core.paths import runtime_dir
from benchmarks.hardware.gpu_fleet import GpuFleet, Stages, lay_out
from benchmarks.hardware.gpu_promise_cases import SERVICE, Case
from benchmarks.hardware.recall_model import RecallModel, write_recall_model
from benchmarks.report import Figure, finish
from benchmarks.simulation.streaming import StreamedAnswer, stream_answer

MODEL = "llama-3.2-3b"
KILLS = 3
SEED = 9
LAYOUTS = {
    "cuda": (
        Stages("chat-prefill-0", Phase.PREFILL, ((0, 10), (10, 28))),
        Stages("chat-prefill-1", Phase.PREFILL, ((0, 18), (18, 28))),
        Stages("chat-decode-0", Phase.DECODE, ((0, 20), (20, 28))),
        Stages("chat-decode-1", Phase.DECODE, ((0, 8), (8, 28))),
    ),
    "cpu": (
        Stages("chat-prefill-0", Phase.PREFILL, ((0, 28),)),
        Stages("chat-decode-0", Phase.DECODE, ((0, 9), (9, 28))),
        Stages("chat-decode-1", Phase.DECODE, ((0, 28),)),
    ),
}
"""Instances by what computes; each stage has a share of the GPU, or a process on cores."""
_PATIENCE_S = 240.0
_HEAL_S = 100.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What is served and asked for: prompts and answers in tokens, and how many clients ask at a time."""

    device: Literal["cpu", "cuda"] = "cuda"
    port: int = 18080
    clients: int = 16
    prompt: int = 400
    answer: int = 200

    @property
    def stages(self) -> Sequence[Stages]:
        """The instances."""
        return LAYOUTS[self.device]

    @property
    def nodes(self) -> int:
        """How many processes hold layers."""
        return sum(len(one.layers) for one in self.stages)

    @property
    def case(self) -> Case:
        """The fleet, with a share of a GPU for each of them."""
        return Case(
            *("pipeline", MODEL, 3000, 30, 1.0, "512x256", "pipeline"),
            engine="atoll",
            shares=self.nodes,
            apart=True,
        )

    def write_model(self, folder: Path) -> RecallModel:
        """Write the weights."""
        if self.device == "cpu":
            return write_recall_model("recall-tiny", folder, firsts=16, each=4)
        return write_recall_model(MODEL, folder, firsts=256, each=32)


@dataclass
class Outcome:
    """What clients saw."""

    requests: int = 0
    errors: int = 0
    mismatches: int = 0
    wrong: int = 0
    gap_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    def note(self, error: object) -> None:
        """Count a request that got no answer."""
        self.errors += 1
        self.notes.append(str(error) or type(error).__name__)


@dataclass(frozen=True, slots=True)
class Kill:
    """A node that was killed, how many seconds into the load, and how long it was gone (None: for good)."""

    node: str
    at_s: float
    gone_s: float | None


def plan(folder: Path, setup: Setup) -> None:
    """Plan the fleet, and lay its instances out."""
    from atoll import Fleet

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "setup.json").write_text(json.dumps(asdict(setup)))
    (folder / "pipeline.yaml").write_text(setup.case.fleet)
    fleet = Fleet.load(folder / "pipeline.yaml")
    lay_out(fleet.plan(), fleet, setup.stages).save(folder / "pipeline.json")
    print(f"{folder} is ready to be served")


def serve(folder: Path) -> None:
    """Bring the plan up, ask, kill, and print what came of it."""
    setup = Setup(**json.loads((folder / "setup.json").read_text()))
    made = setup.write_model(folder / "model")
    fleet = GpuFleet(folder, "pipeline", "pipeline", SERVICE, setup.port, setup.device)
    try:
        note = fleet.up(folder / "model", {"ATOLL_CACHE": str(folder / "cache")})
        print(f"{setup.nodes} nodes are ready after {note['ready_s']} s; {_memory()}", flush=True)
        outcome, kills = asyncio.run(_disturb(fleet, setup, made))
        restarts = fleet.metrics().get("atoll:request_restarts_total")
    finally:
        fleet.down()
    print("killed                         at s  gone s")
    for kill in kills:
        gone = "for good" if kill.gone_s is None else f"{kill.gone_s:.1f}"
        print(f"{kill.node:28s} {kill.at_s:6.1f} {gone:>7s}")
    print(*outcome.notes[:10], sep="\n")
    finish(
        [
            Figure("kills", len(kills), KILLS, at_least=True),
            Figure("errors", outcome.errors, 0.0),
            Figure("mismatches", outcome.mismatches, 0.0, "texts unlike those of undisturbed ones"),
            Figure("wrong", outcome.wrong, 0.0, "undisturbed texts unlike what the weights say"),
            Figure("requests", outcome.requests),
            Figure("stages", setup.nodes, note="processes that hold layers"),
            Figure("restarts", restarts, note="requests that an instance began anew"),
            Figure("gap_s", round(outcome.gap_s, 2), note="longest between two pieces of a text"),
            Figure("ready_s", note["ready_s"], note="s"),
        ],
        device=setup.device,
        date_utc=note["date_utc"],
        versions=note["versions"],
        gpu=note["gpu"],
    )


async def _disturb(fleet: GpuFleet, setup: Setup, made: RecallModel) -> tuple[Outcome, list[Kill]]:
    """Ask for answers in peace, then for the same under fire."""
    prompts = [made.prompt(seed, setup.prompt) for seed in range(2 * setup.clients)]
    outcome, texts = Outcome(), dict[int, str]()

    async def ask(number: int) -> StreamedAnswer | None:
        outcome.requests += 1
        try:
            async with asyncio.timeout(_PATIENCE_S):
                given = prompts[number]
                size = len(given), setup.answer
                return await stream_answer(fleet.url, SERVICE, 0, *size, begin=given)
        except (SystemExit, OSError, TimeoutError, ValueError) as error:
            outcome.note(error)
            return None

    async def calm(numbers: Iterator[int]) -> None:
        for number in numbers:
            found = await ask(number)
            if found is not None:
                texts[number] = found.text
                wanted = made.answer(prompts[number], setup.answer)
                outcome.wrong += found.text.split() != [f"w{token}" for token in wanted]

    # All draw from one list, so that there is always one for whoever is free.
    numbers = iter(range(len(prompts)))
    await asyncio.gather(*(calm(numbers) for _ in range(setup.clients)))
    print(f"{len(texts)} answers undisturbed, {outcome.wrong} of them wrong", flush=True)
    over = asyncio.Event()

    async def go_on(first: int) -> None:
        for number in itertools.count(first):
            if over.is_set() and number >= first + 2:
                return
            found = await ask(number % len(prompts))
            if found is not None:
                gaps = (b - a for a, b in itertools.pairwise(found.came_s))
                outcome.gap_s = max((outcome.gap_s, *gaps))
                outcome.mismatches += found.text != texts.get(number % len(prompts))

    clients = [asyncio.create_task(go_on(2 * at)) for at in range(setup.clients)]
    try:
        kills = await _kill(fleet, setup.nodes)
    finally:
        over.set()
    await asyncio.gather(*clients)
    return outcome, kills


async def _kill(fleet: GpuFleet, nodes: int) -> list[Kill]:
    """Kill nodes one after another, each once all are there and have worked for a while."""
    drawn, begun_s, done = np.random.default_rng(SEED), time.monotonic(), list[Kill]()
    for _ in range(KILLS):
        await asyncio.sleep(float(drawn.uniform(2.0, 5.0)))
        there = find_nodes(fleet)
        if not there:
            break
        name = sorted(there)[int(drawn.integers(len(there)))]
        os.kill(there[name], signal.SIGKILL)
        struck_s = time.monotonic()
        gone_s = None
        while gone_s is None and time.monotonic() - struck_s < _HEAL_S:
            await asyncio.sleep(0.25)
            found = find_nodes(fleet)
            if len(found) == nodes and found[name] != there[name]:
                gone_s = time.monotonic() - struck_s
        done.append(Kill(name, struck_s - begun_s, gone_s))
        print(f"killed {name}, gone for {gone_s or _HEAL_S:.1f} s", flush=True)
    return done


def find_nodes(fleet: GpuFleet, folder: Path | None = None) -> dict[str, int]:
    """Return the processes of a fleet's nodes that are ready, by name."""
    found = {}
    own = fleet.instances()
    for path in (folder or runtime_dir()).glob("run-*/**/*.ready"):
        with contextlib.suppress(OSError, ValueError):
            said = json.loads(path.read_text())
            words = Path(f"/proc/{said['pid']}/cmdline").read_bytes()
            if said["name"].rpartition("/")[0] in own and b"atoll.engine.node" in words:
                found[str(said["name"])] = int(said["pid"])
    return found


def _memory() -> str:
    """Say how much of the GPU is taken."""
    import torch

    if not torch.cuda.is_available():
        return "on cores"
    free, total = torch.cuda.mem_get_info()
    return f"{(total - free) / 1e9:.1f} of {total / 1e9:.1f} GB of the GPU are taken"


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("plan", "serve"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=tuple(LAYOUTS), default="cuda", help="plan: on what")
    parser.add_argument("--port", type=int, default=18080, help="plan: of the gateway")
    given = parser.parse_args()
    folder = given.folder.absolute()
    if given.verb == "serve":
        serve(folder)
    elif given.device == "cpu":
        plan(folder, Setup("cpu", given.port, clients=3, prompt=40, answer=40))
    else:
        plan(folder, Setup(port=given.port))


if __name__ == "__main__":
    main()
