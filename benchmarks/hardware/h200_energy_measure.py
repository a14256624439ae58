"""Measure the energy of prefill and decode steps of stacks of decoder layers on one GPU (an NVIDIA H200).

    OUT=folder python -m benchmarks.h200_energy_measure            # on the GPU, torch alone, < 5 minutes
    OUT=folder python -m benchmarks.h200_energy_measure --dry-run  # on a CPU: tiny shapes, no energy

A few distinct layers with random weights run as one CUDA graph, replayed for seconds; joules come from the
driver's energy counter between two of its moves. Every point has its own weights and KV cache in device
memory. Rows with a `duty` below 1 let the GPU wait for the rest of every 20 ms with the model loaded: this
is how a lightly loaded engine draws. `idle` rows wait throughout. bf16.

Files: h200_energy.csv (`tokens` is the total of the step, `context` the KV length of each sequence, the new
tokens included; joules are those of a replay, over all timed layers, without the output matrix; `date_utc`
and versions are in every row) and h200_energy_meta.json. `benchmarks.h200_energy` compares them with
`atoll.perf.energy`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: three folders up is the root of the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.hardware.h200_harness import (
    Bench,
    Call,
    Log,
    Ops,
    Table,
    gpu_state,
    nvidia_smi,
    prefill_floor_us,
    prefill_sets,
    rotate,
    sdpa,
    select_ops,
    time_prefill,
    tune_decode,
)
from benchmarks.hardware.h200_measure import Stack
from benchmarks.hardware.h200_meter import EnergyMeter, Window, watch
from benchmarks.hardware.h200_shapes import Model

COLUMNS = (
    "date_utc,gpu,driver,torch,cuda,model,phase,sequences,tokens,context,layers,duty,replay_ms,"
    "replays,window_s,joules_per_replay,watts,sm_mhz,celsius,attention_impl"
)
SLOT_S = 0.02
"""Work and wait of a partly loaded GPU repeat this often."""
CALL_S = 0.02
"""Replays are queued for about so long before the host looks at the counter."""


@dataclass(frozen=True)
class Sweep:
    """What is measured: prefill shapes are (sequences, tokens each), decode shapes (sequences, context)."""

    models: tuple[Model, ...]
    prefill: tuple[tuple[int, int], ...]
    decode: tuple[tuple[int, int], ...]
    duty: tuple[float, ...]
    duty_decode: tuple[int, int]
    window_s: float


FULL = Sweep(
    models=(
        Model("llama-3.1-8b", 4096, 32, 8, 128, 14336, 128256, 8),
        Model("qwen3-32b", 5120, 64, 8, 128, 25600, 151936, 6),
        Model("qwen3-14b", 5120, 40, 8, 128, 17408, 151936, 6),
    ),
    prefill=((1, 512), (1, 2048), (4, 2048), (1, 8192)),
    decode=((1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024), (8, 8192), (64, 8192)),
    duty=(0.25, 0.5),
    duty_decode=(32, 1024),
    window_s=2.2,
)
DRY = Sweep(
    models=(Model("tiny", 64, 4, 2, 16, 96, 128, 2),),
    prefill=((1, 16),),
    decode=((1, 16), (3, 80)),
    duty=(0.5,),
    duty_decode=(1, 16),
    window_s=0.05,
)


class EnergyRun:
    """One process that measures: kernels, buffers, the counter and the table."""

    def __init__(self, bench: Bench, log: Log, sweep: Sweep, out: Path) -> None:
        self.bench, self.log, self.sweep = bench, log, sweep
        self.meter = EnergyMeter()
        widths = [(model.hidden, model.intermediate) for model in sweep.models]
        heads = [(model.heads, model.kv_heads, model.head_dim) for model in sweep.models]
        self.ops: Ops = select_ops(bench, log, not bench.dry, widths, heads)
        self.table = Table(out / "h200_energy.csv", COLUMNS)
        torch = bench.torch
        self.stamp = (
            datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "cpu" if bench.dry else torch.cuda.get_device_name(0),
            nvidia_smi(["driver_version"]).get("driver_version", ""),
            torch.__version__,
            torch.version.cuda or "",
        )
        per_token = max(model.kv_heads * model.head_dim for model in sweep.models)
        most = max(n * length for n, length in (*sweep.prefill, *sweep.decode))
        layers = max(model.layers for model in sweep.models)
        self.pool = bench.randn(2 * layers * most * per_token)
        self.stack: Stack | None = None

    def stack_of(self, model: Model) -> Stack:
        if self.stack is None or self.stack.model != model:
            self.stack = None  # the previous model's weights go first
            positions = max(length for _, length in (*self.sweep.prefill, *self.sweep.decode))
            self.stack = Stack(self.bench, self.ops, model, positions)
        return self.stack

    def caches_of(self, model: Model, batch: int, context: int) -> list[tuple[Any, Any]]:
        """(k, v) of each layer, all distinct."""
        shape = (batch, model.kv_heads, context, model.head_dim)
        size = math.prod(shape)
        views = [self.pool[i * size : (i + 1) * size].view(shape) for i in range(2 * model.layers)]
        return list(itertools.pairwise(views))[::2]

    def prefill(self, model: Model, batch: int, length: int) -> None:
        bench, stack = self.bench, self.stack_of(model)
        heads, kv, dim = model.heads, model.kv_heads, model.head_dim
        sets = prefill_sets(self.pool, batch, length, heads, kv, dim)[: model.layers]
        times, _ = time_prefill(bench, sets, prefill_floor_us(batch, length, heads, dim), False)
        impl = min(times, key=lambda name: times[name])
        caches, x = self.caches_of(model, batch, length), self._inputs(model, batch * length)

        def attend(q: Any, k: Any, v: Any) -> Any:
            return sdpa(bench, impl, q.transpose(1, 2), k, v, causal=True).transpose(1, 2)

        step = partial(stack.forward, x, caches, attend, length, 0)
        if not bool(bench.torch.isfinite(step()).all()):
            raise ValueError("the layers' output is not finite")
        self._put((model.name, "prefill", batch, batch * length, length, model.layers), impl, step)

    def decode(self, model: Model, batch: int, context: int, duties: Sequence[float]) -> None:
        bench, stack = self.bench, self.stack_of(model)
        q = bench.randn(batch, model.heads, model.head_dim)
        sets = rotate(self.pool, [(batch, model.kv_heads, context, model.head_dim)] * 2)
        choice = tune_decode(bench, self.ops, q, sets)
        caches, x = self.caches_of(model, batch, context), self._inputs(model, batch)

        def attend(q: Any, k: Any, v: Any) -> Any:
            return self.ops.decode(q.squeeze(1), k, v, choice)

        error = stack.check(caches, attend) if batch <= 8 else 0.0
        step = partial(stack.forward, x, caches, attend, 1, context - 1)
        row = (model.name, "decode", batch, batch, context, model.layers)
        self._put(row, self.ops.decode_name, step, duties)
        if not error < 5e-2:
            raise ValueError(f"layers differ from plain torch by {error}")

    def idle(self, name: str) -> None:
        """Wait with whatever is loaded."""

        def wait() -> float:
            time.sleep(self.sweep.window_s / 100)
            return self.sweep.window_s / 100

        window = watch(wait, self.meter, self.sweep.window_s)
        self._row((name, "idle", 0, 0, 0, 0), 0.0, 0.0, window, 1, "")

    def _inputs(self, model: Model, tokens: int) -> tuple[Any, Any]:
        return self.bench.randn(tokens, model.hidden), self.bench.randn(tokens, model.hidden)

    def _put(
        self, row: tuple[Any, ...], impl: str, step: Call, duties: Sequence[float] = (1.0,)
    ) -> None:
        """Replay a step for a window at each duty, and write rows."""
        replay, reset = self._replayer(step)
        try:
            once_s = replay(3)
            count = max(1, round(CALL_S / once_s))
            for duty in duties:
                call, each = self._call(replay, count, once_s, duty)
                min_s = self.sweep.window_s * (1.0 if duty >= 1.0 else 2.0)
                window = watch(call, self.meter, min_s)
                self._row(row, duty, statistics.median(window.step_s) / each, window, each, impl)
        finally:
            reset()

    def _call(
        self, replay: Callable[[int], float], count: int, once_s: float, duty: float
    ) -> tuple[Callable[[], float], int]:
        """Return what runs replays, then waits so that they take `duty` of the time; and how many."""
        if duty >= 1.0:
            return (lambda: replay(count) * count), count
        each = max(1, round(SLOT_S * duty / once_s))

        def call() -> float:
            began = time.perf_counter()
            seconds = replay(each) * each
            time.sleep(max(0.0, seconds / duty - (time.perf_counter() - began)))
            return seconds

        return call, each

    def _replayer(self, step: Call) -> tuple[Callable[[int], float], Call]:
        """Return what replays the step n times and returns seconds of one, and what frees it."""
        bench = self.bench
        if bench.dry:

            def on_host(count: int) -> float:
                began = time.perf_counter()
                for _ in range(count):
                    step()
                return (time.perf_counter() - began) / count

            return on_host, lambda: None
        cuda = bench.torch.cuda
        cuda.synchronize()
        with cuda.stream(bench.stream):  # compilation stays out of the capture
            step()
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, stream=bench.stream):
            step()
        cuda.synchronize()

        def on_gpu(count: int) -> float:
            start, end = (cuda.Event(enable_timing=True) for _ in "se")
            with cuda.stream(bench.stream):
                start.record()
                for _ in range(count):
                    graph.replay()
                end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e-3 / count

        return on_gpu, graph.reset

    def _row(
        self,
        row: tuple[Any, ...],
        duty: float,
        replay_s: float,
        window: Window,
        each: int,
        impl: str,
    ) -> None:
        joules = window.joules_per_step
        self.table.row(
            *self.stamp,
            *row,
            f"{duty:g}",
            f"{1e3 * replay_s:.5f}",
            window.steps * each,
            f"{window.seconds:.4f}",
            "" if joules is None else f"{joules / each:.6g}",
            "" if window.watts is None else f"{window.watts:.2f}",
            window.clock_mhz,
            window.celsius,
            impl,
        )

    def cases(self) -> Iterator[tuple[str, Call]]:
        """Label and call of every point, model by model."""
        for model in self.sweep.models:
            for n, context in self.sweep.decode:
                duties = self.sweep.duty if (n, context) == self.sweep.duty_decode else ()
                label = f"{model.name} decode {n}x{context}"
                yield label, partial(self.decode, model, n, context, (1.0, *duties))
            for n, length in self.sweep.prefill:
                yield f"{model.name} prefill {n}x{length}", partial(self.prefill, model, n, length)
            yield f"{model.name} idle", partial(self.idle, model.name)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all points and return 1 if any failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    out = os.environ.get("OUT")
    parser.add_argument(
        "--out", type=Path, default=Path(out) if out else None, help="folder ($OUT)"
    )
    parser.add_argument("--budget-s", type=float, default=270.0, help="no point begins after this")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    args = parser.parse_args(argv)
    if args.out is None:
        parser.error("give a folder with --out, or the environment variable OUT")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "h200_energy_meta.json"
    path.unlink(missing_ok=True)
    log = Log(path)
    log.put("nvidia_smi", "before", gpu_state())
    bench = Bench(args.dry_run, time.time() + args.budget_s)
    log.data |= {"python": platform.python_version(), "torch": bench.torch.__version__}
    failed = 0
    with bench.torch.inference_mode():
        run = EnergyRun(bench, log, DRY if args.dry_run else FULL, args.out)
        try:
            bench.run_cases("energy", log, list(run.cases()))
        except RuntimeError as error:
            failed = 1
            print(error, flush=True)
    log.put("nvidia_smi", "after", gpu_state())
    print((args.out / "h200_energy.csv").read_text())
    print(json.dumps({k: log.data.get(k) for k in ("cut_short", "case_errors", "kernels")}))
    return failed


if __name__ == "__main__":
    sys.exit(main())
