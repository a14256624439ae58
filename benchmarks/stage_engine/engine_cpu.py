"""Tokens per CPU-second of SmolLM2 on the stage engine: whole, cut into 2 and into 3 stages.

Every layout runs as real processes with one thread each; CPU time is that of all of them together,
the scheduler included, loading not. Beside it transformers' `generate` (one request after another)
and `generate_batch` (continuous batching, started and warm), with one thread too. All make the same
float32 tokens from the same prompts; rounds take turns and the best of each counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.process_cpu import read_cpu_s, running, wait_until
from benchmarks.report import Figure, finish, options

LAYERS = 30
LAYOUTS: dict[str, tuple[tuple[int, int], ...]] = {
    "whole": ((0, 30),),
    "2stage": ((0, 17), (17, 30)),
    "3stage": ((0, 12), (12, 22), (22, 30)),
}
CONCURRENCY = (1, 8)
PROMPT = 64
READY_S = 300.0


def prompts(count: int, round_number: int) -> list[list[int]]:
    """Different tokens in every round, so that no prefix is known already."""
    return [
        [1000 + (7919 * (31 * round_number + i) + 104729 * j) % 40000 for j in range(PROMPT)]
        for i in range(count)
    ]


@contextmanager
def nodes(
    folder: Path, cuts: tuple[tuple[int, int], ...], more: Sequence[dict[str, Any]] = ()
) -> Iterator[list[dict[str, Any]]]:
    """Node processes for the layer ranges; yields what each said when ready.

    `more` is added to the configuration of each.
    """
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        started, ready = [], []
        for number, (start, end) in enumerate(cuts):
            config = {"name": f"n{number}", "model": str(folder), "start": start, "end": end}
            config |= {"ready_file": f"{work}/{number}.ready", "log_level": "WARNING"}
            config |= more[number] if more else {}
            path = Path(work, f"{number}.json")
            path.write_text(json.dumps(config))
            command = [sys.executable, "-m", "atoll.engine.node", "--config", str(path)]
            started.append(stack.enter_context(running(command)))
            ready.append(Path(work, f"{number}.ready"))
        for path in ready:
            wait_until(path.exists, READY_S, "a node", *started)
        yield [json.loads(path.read_text()) for path in ready]


Results = dict[str, dict[int, list[Any]]]
"""By name and concurrency: (CPU-seconds, tokens of every answer) of each round."""


class Layout:
    """A running layout and the scheduler in front of it."""

    def __init__(self, ready: list[dict[str, Any]]) -> None:
        from atoll.engine.pipeline_routes import LayerRouter
        from atoll.engine.scheduler import NodeSpec, Scheduler

        self._pids = [int(r["pid"]) for r in ready]
        specs = [NodeSpec(**{k: r[k] for k in ("name", "endpoint", "start", "end")}) for r in ready]
        self._scheduler = Scheduler(specs, LayerRouter(LAYERS), max_length=1024)

    async def start(self) -> None:
        await self._scheduler.start()
        await self._scheduler.ready(30.0)

    async def run(self, asked: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        """Ask everything at once; returns CPU-seconds and the answers."""
        before = self._used()
        answers = await asyncio.gather(*(self._ask(prompt, new) for prompt in asked))
        return self._used() - before, list(answers)

    async def close(self) -> None:
        await self._scheduler.close()

    async def _ask(self, prompt: list[int], new: int) -> list[int]:
        from atoll.core.request_parameters import SamplingParams
        from atoll.engine.scheduler import GenerateRequest

        sampling = SamplingParams(max_tokens=new, ignore_eos=True)
        events = self._scheduler.generate(GenerateRequest(tuple(prompt), sampling))
        return [event.token async for event in events if event.token is not None]

    def _used(self) -> float:
        return time.process_time() + read_cpu_s(self._pids)


async def serve(
    ready: dict[str, list[dict[str, Any]]], rounds: list[tuple[int, int]], new: int
) -> Results:
    """Run every round (number, concurrency) on every layout in turn."""
    layouts = {name: Layout(said) for name, said in ready.items()}
    for layout in layouts.values():
        await layout.start()
        await layout.run(prompts(1, 99), 4)
    results: Results = {name: {} for name in layouts}
    for number, count in rounds:
        for name, layout in layouts.items():
            found = await layout.run(prompts(count, number), new)
            results[name].setdefault(count, []).append(found)
    for layout in layouts.values():
        await layout.close()
    return results


def transformers_side(rounds: list[tuple[int, int]], new: int) -> None:
    """The peers, in a process of their own; prints one JSON object."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    from atoll.engine.weights.sources import DEFAULT_MODEL, resolve

    torch.set_num_threads(1)
    folder = str(resolve(DEFAULT_MODEL))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    settings = GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=2
    )
    batching = ContinuousBatchingConfig(num_blocks=128, page_size=32, max_batch_tokens=512)

    def batch(asked: list[list[int]]) -> list[list[int]]:
        answers = model.generate_batch(
            inputs=asked,
            generation_config=settings,
            continuous_batching_config=batching,
            persistent_manager=True,
            warmup=False,
        )
        return [list(answer.generated_tokens) for answer in answers.values()]

    def single(asked: list[list[int]]) -> list[list[int]]:
        plain = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=2)
        plain.eos_token_id = None
        return [
            model.generate(torch.tensor([p]), generation_config=plain)[0, len(p) :].tolist()
            for p in asked
        ]

    found: Results = {"generate": {}, "generate_batch": {}}
    # Its cache and batches are sized by the first call.
    batch(prompts(max(CONCURRENCY), 99))
    for number, count in rounds:
        for name, run in (("generate", single), ("generate_batch", batch)):
            if name == "generate" and count > 1:
                continue
            asked = prompts(count, number)
            before = time.process_time()
            answers = run(asked)
            found[name].setdefault(count, []).append((time.process_time() - before, answers))
    print(json.dumps(found), flush=True)
    # The batching thread would keep the process alive.
    os._exit(0)


def peers(rounds: list[tuple[int, int]], new: int) -> Results:
    """Run `transformers_side` and read what it found."""
    code = (
        "from benchmarks.engine_cpu import transformers_side as run\n"
        f"run({[tuple(r) for r in rounds]!r}, {new})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=1800
    )
    if done.returncode:
        raise SystemExit(f"transformers failed: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: {int(c): r for c, r in by.items()} for name, by in found.items()}


def best(results: list[tuple[float, list[list[int]]]]) -> float:
    """Tokens per CPU-second of the best round."""
    return max(sum(map(len, answers)) / seconds for seconds, answers in results)


def main() -> None:
    """Measure, compare and report."""
    chosen = options(__doc__ or "")
    from atoll.engine.weights.sources import DEFAULT_MODEL, resolve

    folder = resolve(DEFAULT_MODEL)
    new, repeats = (32, 2) if chosen.quick else (64, 5)
    rounds = [(number, count) for number in range(repeats) for count in CONCURRENCY]
    with ExitStack() as stack:
        ready = {name: stack.enter_context(nodes(folder, cuts)) for name, cuts in LAYOUTS.items()}
        measured = asyncio.run(serve(ready, rounds, new))
    measured |= peers(rounds, new)
    wanted = measured["generate_batch"][8]
    same = {name: [a for _, a in measured[name][8]] == [a for _, a in wanted] for name in LAYOUTS}
    print(f"  {'':16s}" + "".join(f"{f'at {c}':>12s}" for c in CONCURRENCY) + "   tokens per CPU-s")
    for name, by in measured.items():
        cells = "".join(f"{best(by[c]):12.1f}" if c in by else f"{'-':>12s}" for c in CONCURRENCY)
        print(f"  {name:16s}{cells}")
    report({name: {c: best(r) for c, r in by.items()} for name, by in measured.items()}, same)


def report(rates: dict[str, dict[int, float]], same: dict[str, bool]) -> None:
    """Print the figures."""
    whole, batch = rates["whole"][8], rates["generate_batch"][8]

    figures = [
        Figure("tok_per_cpu_s_whole", whole, batch, "generate_batch", at_least=True),
        *(
            Figure(
                f"tok_per_cpu_s_{name}",
                rates[name][8],
                0.9 * whole,
                "0.9 of the whole",
                at_least=True,
            )
            for name in ("2stage", "3stage")
        ),
        Figure("generate_batch_tok_per_cpu_s", batch),
        *(Figure(f"tok_per_cpu_s_{name}_c1", rates[name][1]) for name in LAYOUTS),
        Figure("generate_tok_per_cpu_s_c1", rates["generate"][1]),
        Figure("generate_batch_tok_per_cpu_s_c1", rates["generate_batch"][1]),
    ]
    finish(figures, same_tokens_as_generate_batch=all(same.values()))


if __name__ == "__main__":
    main()
