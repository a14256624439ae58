"""The stage engine on this machine's cores, free and paced: clients that always want a next answer.

Node processes of SmolLM2, one thread each, pinned as `atoll serve` pins them: one core for each of two
stages, shared cores where there are more stages than cores. Both ways of running stand side by side and take
short turns: free, paced, paced, free. Cores of a virtual machine change speed within a minute; ratios are
those of such blocks, in which a steady change meets both ways alike, and the middle of them counts. Each
client waits for its answer and asks again, for answers of different lengths, so that sequences do not travel
together because they began together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from atoll.core.rng import stream
from benchmarks.process_cpu import read_cpu_s
from benchmarks.stage_engine.engine_cpu import LAYERS, nodes

if TYPE_CHECKING:
    from atoll.engine.scheduler import Scheduler

Cuts = tuple[tuple[int, int], ...]

ENGINE_LAYOUTS: dict[str, Cuts] = {
    "2stage": ((0, 17), (17, 30)),
    "2stage_uneven": ((0, 25), (25, 30)),
    "3stage": ((0, 12), (12, 22), (22, 30)),
    "4stage": ((0, 9), (9, 17), (17, 24), (24, 30)),
}
WAYS = {"free": "free", "paced": "auto"}
CLIENTS = 8
PROMPT = 16
ANSWER = (24, 56)
WARM_UP_S = 2.0
TURNS = ("free", "paced", "paced", "free")
_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class EngineRound:
    """What was seen in a stretch of time: mean seconds between tokens of a sequence, and tokens/s of all.

    Tokens per CPU-second of all nodes say how well steps were filled, whatever else the machine did.
    """

    tpot_s: float
    tokens_per_s: float
    tokens_per_cpu_s: float


class Crowd:
    """Clients in front of one set of node processes."""

    def __init__(self, ready: list[dict[str, Any]]) -> None:
        from atoll.engine.pipeline_routes import LayerRouter
        from atoll.engine.scheduler import NodeSpec, Scheduler

        specs = [NodeSpec(**{k: r[k] for k in ("name", "endpoint", "start", "end")}) for r in ready]
        self._pids = [int(r["pid"]) for r in ready]
        self.scheduler: Scheduler = Scheduler(specs, LayerRouter(LAYERS), max_length=1024)

    async def run(self, seconds: float, seed: int) -> EngineRound:
        """Keep every client busy for so long, and a little longer at first, which does not count."""
        begun_s = time.monotonic()
        from_s, until_s = begun_s + WARM_UP_S, begun_s + WARM_UP_S + seconds
        gaps: list[float] = []
        tokens = 0

        async def client(number: int) -> None:
            nonlocal tokens
            random = stream(seed, f"client-{number}")
            await asyncio.sleep(number * 0.07)
            while time.monotonic() < until_s:
                last_s = None
                prompt = tuple(random.integers(1000, 40_000, PROMPT).tolist())
                async for now_s in self._answer(prompt, int(random.integers(*ANSWER))):
                    if from_s <= now_s < until_s:
                        tokens += 1
                        if last_s is not None:
                            gaps.append(now_s - last_s)
                    last_s = now_s

        async def work() -> float:
            await asyncio.sleep(from_s - time.monotonic())
            before_s = read_cpu_s(self._pids)
            await asyncio.sleep(until_s - time.monotonic())
            return read_cpu_s(self._pids) - before_s

        clients = (client(number) for number in range(CLIENTS))
        measured = asyncio.create_task(work())
        await asyncio.gather(*clients)
        cpu_s = await measured
        return EngineRound(float(np.mean(gaps)), tokens / seconds, tokens / cpu_s)

    async def _answer(self, prompt: tuple[int, ...], count: int) -> Any:
        from atoll.core.request_parameters import SamplingParams
        from atoll.engine.scheduler import GenerateRequest

        sampling = SamplingParams(max_tokens=count, ignore_eos=True)
        async for event in self.scheduler.generate(GenerateRequest(prompt, sampling)):
            if event.token is not None:
                yield time.monotonic()


async def take_turns(
    ready: dict[str, list[dict[str, Any]]], blocks: int, seconds: float
) -> dict[str, list[EngineRound]]:
    """Run both sets of processes in turn; returns the mean of the turns that each has in a block."""
    crowds = {way: Crowd(said) for way, said in ready.items()}
    for crowd in crowds.values():
        await crowd.scheduler.start()
        await crowd.scheduler.ready(60.0)
        # Steps must be known before batches are paced by them.
        await crowd.run(seconds, 0)
    found: dict[str, list[EngineRound]] = {way: [] for way in crowds}
    for number in range(blocks):
        turns: dict[str, list[EngineRound]] = {way: [] for way in crowds}
        for way in TURNS:
            # What is asked for is the same both ways.
            seed = 1 + 2 * number + len(turns[way])
            turns[way].append(await crowds[way].run(seconds, seed))
        for way, some in turns.items():
            found[way].append(mean_round(some))
    for crowd in crowds.values():
        await crowd.scheduler.close()
    return found


def mean_round(some: Sequence[EngineRound]) -> EngineRound:
    """Return the mean of every figure."""
    return EngineRound(
        *(float(np.mean([getattr(one, f.name) for one in some])) for f in fields(EngineRound))
    )


def engine_rounds(
    folder: Path, cuts: Cuts, blocks: int, seconds: float
) -> dict[str, list[EngineRound]]:
    """Return the blocks of a layout, free and paced."""
    from atoll.runtime.local.cores import assign_cores, usable_cores

    work = {str(i): float(end - start) for i, (start, end) in enumerate(cuts)}
    cores = assign_cores(work, usable_cores()[: len(cuts)])
    with ExitStack() as stack:
        ready = {
            way: stack.enter_context(
                nodes(
                    folder,
                    cuts,
                    [{"max_in_flight": limit, "cpus": cores[name]} for name in work],
                )
            )
            for way, limit in WAYS.items()
        }
        return asyncio.run(take_turns(ready, blocks, seconds))


class CpuTimedStage:
    """A stage of real weights whose steps take as long as the CPU-seconds they use."""

    def __init__(self, folder: Path, start: int, end: int) -> None:
        from atoll.engine.model_stage import StageModel

        self._model = StageModel(folder, start, end, blocks=_BLOCKS, block_size=16)
        self.blocks, self.place, self.took_s = _BLOCKS, 0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Any) -> Any:
        begun_s = time.process_time()
        found = self._model.forward(batch)
        self.took_s = time.process_time() - begun_s
        return found


def cpu_timed_ratio(folder: Path, cuts: Cuts, seconds: float) -> float:
    """TPOT paced over free of real node cores and real steps, each stage on a core that nobody else uses.

    One process runs all nodes in virtual time, where a step takes the CPU-seconds it used: how long other
    processes hold it up does not count.
    """
    import torch

    from tests.engine.virtual_pipeline import VirtualPipeline

    torch.set_num_threads(1)
    tpot_s = {}
    stages = [CpuTimedStage(folder, start, end) for start, end in cuts]
    for way in WAYS:
        limit: Literal["auto", "free"] = "free" if way == "free" else "auto"
        pipeline = VirtualPipeline(stages, limit, hop_s=0.0005)
        for number in range(CLIENTS):
            pipeline.open(number, 0.07 * number)
        pipeline.run(seconds)
        tpot_s[way] = pipeline.mean_tpot_s(seconds / 3.0)
    return tpot_s["paced"] / tpot_s["free"]
