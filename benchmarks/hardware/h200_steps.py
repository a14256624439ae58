"""Whole steps of the stage engine on one GPU, with the energy they take.

A node of the engine as it runs (`NodeCore`: batching, block tables, forward, sampling, messages; no
sockets), with all layers of a model in bf16, random weights and a KV cache of random numbers. Sequences
are opened with their context declared done, so that shapes are reached without prefilling them. Three
parts, each in a file of its own, rows written as they come:

    h200_power.csv   matrix products from memory-bound to compute-bound, a copy, idling: rates and watts
    h200_host.csv    models so small that their steps are host time: by sequences, and by layers launched
    h200_steps.csv   steps of whole models: milliseconds, of which kernels, joules
    h200_steps_kernels.csv   where the kernels' time of each such step goes

`benchmarks.h200_fidelity` compares them with what `atoll.perf` says. Needs torch, triton, transformers and
msgspec. Nodes are not warmed up as they are before they serve: their steps are launched kernel by kernel, and
take longer than those that replay captured graphs. Run it where the GPU is:

    PYTHONPATH=src python -m benchmarks.h200_steps --out benchmarks/results
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.hardware.h200_harness import Table, gpu_state
from benchmarks.hardware.h200_meter import EnergyMeter, Window, watch
from benchmarks.hardware.h200_standins import install

BLOCK = 16
HOST_WINDOW_S = 0.6
STEP_COLUMNS = (
    "model,prompts,prompt_tokens,prompt_context,decodes,decode_context,step_ms,step_ms_p10,step_ms_p90,"
    "kernel_ms,steps,window_s,joules_per_step,watts,sm_mhz,celsius"
)
POWER_COLUMNS = "load,m,n,k,seconds,bytes_per_s,flop_per_s,watts,sm_mhz,celsius"
KERNEL_COLUMNS = "model,prompts,prompt_tokens,prompt_context,decodes,decode_context,kernel,calls,ms"


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one step holds: prompts of `new` tokens each after `past` cached ones, and decodes."""

    prompts: int = 0
    new: int = 0
    past: int = 0
    decodes: int = 0
    context: int = 0

    @property
    def rows(self) -> int:
        """Tokens of the step."""
        return self.prompts * self.new + self.decodes

    @property
    def spare(self) -> int:
        """Positions kept free for every decode: more than a window has steps, which are slower with more."""
        return 1000 if self.decodes <= 16 else 700 if self.decodes <= 64 else 450


def decode(sequences: int, context: int) -> StepShape:
    return StepShape(decodes=sequences, context=context)


def prefill(prompts: int, new: int, past: int = 0) -> StepShape:
    return StepShape(prompts, new, past)


SHAPES: dict[str, tuple[StepShape, ...]] = {
    "llama-3.1-8b": (
        decode(1, 512),
        decode(1, 8192),
        decode(8, 2048),
        decode(32, 1024),
        decode(64, 1024),
        decode(64, 4096),
        decode(128, 2048),
        decode(256, 1024),
        prefill(1, 512),
        prefill(1, 2048),
        prefill(1, 8192),
        prefill(4, 2048),
        prefill(1, 512, 3584),
        StepShape(1, 512, 0, 32, 1024),
        StepShape(1, 1024, 1024, 128, 1024),
    ),
    "qwen3-14b": (
        decode(1, 2048),
        decode(16, 1024),
        decode(64, 2048),
        decode(128, 1024),
        prefill(1, 1024),
        prefill(1, 4096),
        StepShape(1, 1024, 0, 64, 1024),
    ),
    "qwen3-32b": (
        decode(1, 1024),
        decode(32, 2048),
        decode(128, 1024),
        prefill(1, 2048),
        prefill(1, 8192),
    ),
}
SIZES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 128256,
    },
    "qwen3-14b": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "vocab_size": 151936,
    },
    "qwen3-32b": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "vocab_size": 151936,
    },
}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
}
SIZES |= {f"small-{layers}": SMALL | {"num_hidden_layers": layers} for layers in (2, 18)}
LAUNCH_SHAPES = (prefill(1, 16), prefill(4, 16), StepShape(1, 16, 0, 32, 128))
"""Steps with prompts, whose kernels are launched one by one: of two depths, the difference is launching."""
HOST_SHAPES = {
    "small-2": (*(decode(n, 128) for n in (1, 4, 8, 16, 32, 64, 128, 192, 256)), *LAUNCH_SHAPES),
    "small-18": LAUNCH_SHAPES,
}
TINY_SHAPES = (decode(3, 40), prefill(2, 24), prefill(1, 8, 16), StepShape(1, 8, 0, 2, 20))


@dataclass(slots=True)
class Rig:
    """Where it runs, how long a window is, and when to stop."""

    device: str
    dtype: str
    window_s: float
    ends_s: float
    meter: EnergyMeter
    out: Path

    @property
    def left_s(self) -> float:
        """Seconds until nothing new is begun."""
        return self.ends_s - time.monotonic()


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Print what goes wrong and go on."""
    began = time.monotonic()
    try:
        yield
    except Exception:  # noqa: BLE001 - one part that fails must not take the others with it
        print(f"FAILED: {what}\n{traceback.format_exc()}", flush=True)
    print(f"  ({what}: {time.monotonic() - began:.1f} s)", flush=True)


def config_of(name: str) -> Any:
    """The shapes of a model as transformers has them."""
    from transformers import LlamaConfig, Qwen3Config

    kind = Qwen3Config if name.startswith("qwen3") else LlamaConfig
    plain = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
    }
    return kind(**(plain | SIZES[name]))


class EngineBench:
    """One node of the engine that holds all layers of a model, and shapes run on it."""

    def __init__(self, rig: Rig, name: str, blocks: int) -> None:
        import torch

        from atoll.engine.model_stage import StageModel

        self.rig, self.name = rig, name
        config = config_of(name)
        self.stage = StageModel.random(
            config,
            0,
            config.num_hidden_layers,
            blocks=blocks,
            block_size=BLOCK,
            device=rig.device,
            dtype=rig.dtype,
        )
        # Zeros would draw less power than numbers do.
        for store in (self.stage.cache.keys, self.stage.cache.values):
            for tensor in store.values():
                tensor.normal_()
        self._random = torch.Generator().manual_seed(0)

    def load(self, shape: StepShape) -> Callable[[], float]:
        """Open the decoding sequences of a shape; returns a function that runs one step."""
        import numpy as np
        import torch

        from atoll.core.request_parameters import SamplingParams
        from atoll.engine.engine_messages import Hop, Open, OpenBody, Release
        from atoll.engine.kv import BlockPool, BlockTable
        from atoll.engine.node_core import CoreSettings, NodeCore

        stage = self.stage

        class WarmPool(BlockPool):
            """A pool whose tables are opened with `done` positions written already."""

            done = 0

            def open(self, tokens: Any, seed: bytes, room_positions: int) -> BlockTable:
                table = super().open(tokens, seed, room_positions)
                if self.done:
                    self.grow(table, self.done)
                    table.length = self.done
                return table

        pool = WarmPool(stage.cache.blocks, BLOCK)
        rows = max(512, shape.rows)
        core = NodeCore(
            "bench",
            "mem://bench",
            stage,
            pool,
            lambda to, message: None,  # noqa: ARG005 - nobody listens
            time.perf_counter,
            settings=CoreSettings(token_budget=rows, chunk=max(256, shape.new)),
        )
        route = (Hop(node="bench", endpoint="mem://bench", start=0, end=stage.total),)
        sampling = SamplingParams(max_tokens=1 << 20)
        numbers = iter(range(1, 1 << 30))

        def open_sequence(length: int, done: int, prompt: int, room: int) -> int:
            tokens = torch.randint(3, stage.vocabulary, (length,), generator=self._random)
            pool.done = done
            number = next(numbers)
            body = OpenBody(
                seq=number,
                epoch=0,
                route=route,
                prompt_length=prompt,
                max_length=room,
                arrival=number,
                reply_to="mem://nobody",
                sampling=sampling,
            )
            core.handle(Open(body, tokens.numpy()))
            return number

        for _ in range(shape.decodes):
            context = shape.context
            open_sequence(context + 1, context, context, context + shape.spare)

        def step() -> float:
            length = shape.past + shape.new
            opened = [
                open_sequence(length, shape.past, length, length) for _ in range(shape.prompts)
            ]
            tokens = core.tokens
            began = time.perf_counter()
            core.step()
            took = time.perf_counter() - began
            if core.tokens - tokens != shape.rows:
                raise RuntimeError(f"a step of {core.tokens - tokens} rows, {shape.rows} wanted")
            if opened:
                core.handle(Release(np.array([(number, 0) for number in opened], np.int64)))
            return took

        return step

    def measure(self, shape: StepShape, kernels: Table | None) -> tuple[Any, ...]:
        """Run a shape for a window and return its row, all but the name of the model."""
        step = self.load(shape)
        for _ in range(6):
            step()
        steps_before = 6
        window = watch(step, self.rig.meter, self.rig.window_s)
        context = 0.0
        if shape.decodes:
            # Of the window's steps the middle one; each adds a token to every sequence.
            context = shape.context + steps_before + len(window.step_s) / 2
        kernel_ms = self._kernel_ms(step, shape, kernels)
        return (*_labels(shape, round(context)), *_figures(window, kernel_ms))

    def _kernel_ms(
        self, step: Callable[[], float], shape: StepShape, kernels: Table | None
    ) -> float | str:
        """Milliseconds that kernels and copies of one step take on the GPU, by the profiler."""
        if self.rig.device == "cpu" or self.rig.left_s < 0:
            return ""
        import torch
        from torch.profiler import ProfilerActivity

        step()
        repeats = 3
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(repeats):
                step()
            torch.cuda.synchronize()
        found = [
            (event.self_device_time_total / 1e3 / repeats, event.count // repeats, event.key)
            for event in seen.key_averages()
            if event.self_device_time_total > 0
        ]
        found.sort(reverse=True)
        if kernels is not None:
            for ms, calls, name in found[:10]:
                short = " ".join(name.replace(",", ";").split())[:90]
                kernels.row(self.name, *_labels(shape, shape.context), short, calls, ms)
        return float(sum(ms for ms, _, _ in found))


def _labels(shape: StepShape, context: int) -> tuple[int, ...]:
    return (shape.prompts, shape.prompts * shape.new, shape.past, shape.decodes, context)


def _figures(window: Window, kernel_ms: float | str) -> tuple[Any, ...]:
    times = sorted(window.step_s)
    joules, watts = window.joules_per_step, window.watts
    return (
        1e3 * window.median_s,
        1e3 * times[len(times) // 10],
        1e3 * times[len(times) * 9 // 10],
        kernel_ms,
        window.steps,
        window.seconds,
        "" if joules is None else f"{joules:.5f}",
        "" if watts is None else f"{watts:.1f}",
        window.clock_mhz,
        window.celsius,
    )


def blocks_for(shapes: tuple[StepShape, ...]) -> int:
    """KV blocks that the largest of the shapes needs."""
    each = (
        s.decodes * -(-(s.context + s.spare) // BLOCK)
        + s.prompts * (-(-(s.past + s.new) // BLOCK) + 1)
        for s in shapes
    )
    return max(each) + 64


def measure_model(
    rig: Rig, name: str, shapes: tuple[StepShape, ...], table: Table, kernels: Table | None
) -> None:
    """Measure the shapes of one model, each on its own."""
    with guarded(name):
        bench = EngineBench(rig, name, blocks_for(shapes))
        for shape in shapes:
            if rig.left_s < 2 * rig.window_s:
                print(f"  no time left for {name} {shape}", flush=True)
                continue
            with guarded(f"{name} {shape}"):
                row = bench.measure(shape, kernels)
                table.row(name, *row)
                print(f"  {name} {row}", flush=True)
        del bench
    release_memory(rig)


def release_memory(rig: Rig) -> None:
    """Give memory back between models."""
    gc.collect()
    if rig.device != "cpu":
        import torch

        torch.cuda.empty_cache()


def measure_power(rig: Rig) -> None:
    """Watts of loads that are nothing but memory traffic, arithmetic, or a known mix of both."""
    import torch

    tiny = rig.device == "cpu"
    kind = torch.float32 if tiny else torch.bfloat16
    table = Table(rig.out / "h200_power.csv", POWER_COLUMNS)

    def idle() -> float:
        time.sleep(0.02)
        return 0.02

    def note(load: str, m: int, n: int, k: int, window: Window, moved: float, flops: float) -> None:
        per_s = window.steps / window.seconds
        watts = "" if window.watts is None else f"{window.watts:.1f}"
        row = (
            load,
            m,
            n,
            k,
            f"{window.median_s:.3e}",
            f"{moved * per_s:.4e}",
            f"{flops * per_s:.4e}",
        )
        table.row(*row, watts, window.clock_mhz, window.celsius)
        print(f"  {row} {watts} W {window.clock_mhz} MHz", flush=True)

    note("idle", 0, 0, 0, watch(idle, rig.meter, rig.window_s), 0.0, 0.0)

    def run_for(calls: list[Callable[[], object]]) -> Window:
        """Queue all calls, then wait: one such round is a step."""

        def step() -> float:
            began = time.perf_counter()
            for call in calls:
                call()
            if not tiny:
                torch.cuda.synchronize()
            return time.perf_counter() - began

        for _ in range(3):
            step()
        return watch(step, rig.meter, rig.window_s)

    size = 1 << 12 if tiny else 1 << 31
    source = torch.empty(size, dtype=kind, device=rig.device).normal_()
    target = torch.empty_like(source)
    copied = run_for([partial(target.copy_, source)] * 8)
    item = source.element_size()
    note("copy", 0, 0, 0, copied, 8 * 2.0 * size * item, 0.0)
    del source, target
    n, k = (64, 32) if tiny else (28672, 8192)
    weights = [torch.empty(n, k, dtype=kind, device=rig.device).normal_() for _ in range(4)]
    for m in (1, 4) if tiny else (1, 16, 64, 128, 256, 512, 2048, 8192):
        with guarded(f"power, {m} rows"):
            x = torch.empty(m, k, dtype=kind, device=rig.device).normal_()
            rounds = 1 if m > 1000 else 8
            calls: list[Callable[[], object]] = [
                partial(torch.nn.functional.linear, x, weight) for weight in weights * rounds
            ]
            count = len(calls)
            moved = count * item * (n * k + m * (n + k))
            note("product", m, n, k, run_for(calls), moved, count * 2.0 * m * n * k)
    note("idle", 1, 0, 0, watch(idle, rig.meter, rig.window_s), 0.0, 0.0)


def describe(rig: Rig, parts: list[str]) -> dict[str, Any]:
    """Date, versions and state of the GPU."""
    import torch
    import transformers

    found: dict[str, Any] = {
        "date_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "parts": parts,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "window_s": rig.window_s,
        "dtype": rig.dtype,
        "device": rig.device,
        "state": gpu_state(),
    }
    if rig.device != "cpu":
        import triton

        found |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        }
    return found


def main() -> None:
    """Measure the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV files")
    parser.add_argument("--parts", default="power,host," + ",".join(SHAPES))
    parser.add_argument("--window-s", type=float, default=3.0, help="seconds of each measurement")
    parser.add_argument("--budget-s", type=float, default=440.0, help="begin nothing after this")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, as a test")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if install():
        print("  pydantic is not here: messages are plain records", flush=True)
    device, dtype = ("cpu", "float32") if options.tiny else ("cuda", "bfloat16")
    window_s = 0.05 if options.tiny else options.window_s
    rig = Rig(device, dtype, window_s, began + options.budget_s, EnergyMeter(), options.out)
    parts = options.parts.split(",")
    with guarded("what is here"):
        meta = json.dumps(describe(rig, parts), indent=1)
        (rig.out / "h200_steps_meta.json").write_text(f"{meta}\n", encoding="utf-8")
        print(meta, flush=True)
    if "power" in parts:
        with guarded("power"):
            measure_power(rig)
        release_memory(rig)
    if "host" in parts:
        with guarded("host time"):
            hosts = Table(rig.out / "h200_host.csv", STEP_COLUMNS)
            short = replace(rig, window_s=min(rig.window_s, HOST_WINDOW_S))
            for name, shapes in HOST_SHAPES.items():
                measure_model(short, name, TINY_SHAPES if options.tiny else shapes, hosts, None)
    table = Table(rig.out / "h200_steps.csv", STEP_COLUMNS)
    kernels = Table(rig.out / "h200_steps_kernels.csv", KERNEL_COLUMNS)
    for name, shapes in SHAPES.items():
        if name in parts and not options.tiny:
            measure_model(rig, name, shapes, table, kernels)
    print(f"  done in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
