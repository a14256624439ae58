"""Measure GEMM, attention and decoder-layer latency on one GPU (written for an NVIDIA H200).

    python benchmarks/hardware/h200_measure.py --out results --budget-s 420   # on the GPU
    python benchmarks/hardware/h200_measure.py --out results-dry --dry-run    # on a CPU: tiny shapes

Sections run in their own processes, most valuable first, so that a crash or a hang in one leaves
the others alone; every row is on disk as soon as it is measured. bf16, random data, median of
CUDA-graph replays timed with events. "Cold" rotates over distinct buffers worth several L2 caches,
so that weights and KV come from device memory; "warm" reuses one weight. GEMM activations are
always reused. Latencies are microseconds.

Files: h200_gemm.csv, h200_attention.csv, h200_layers.csv (``tokens`` is the total in the step;
``context`` is the KV length of each sequence, the new token included) and h200_meta.json.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: three folders up is the root of the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.hardware.h200_harness import (
    TOLERANCE,
    Bench,
    Call,
    Log,
    Ops,
    Table,
    attention_reference,
    cycled,
    gpu_state,
    load_kernels,
    nvidia_smi,
    prefill_floor_us,
    prefill_sets,
    relative_error,
    rope_tables,
    rotate,
    sdpa,
    select_ops,
    time_prefill,
    torch_ops,
    tune_decode,
)
from benchmarks.hardware.h200_shapes import DRY, FULL, Model, Plan

SECTION_END = {"ceilings": 0.14, "layers": 0.48, "attention": 0.76, "gemm": 1.0}  # of the budget
GRACE_S = 25.0  # past its end a section is killed
MAX_KV_BYTES = 40e9


@dataclass(frozen=True)
class Run:
    """What a section works with."""

    bench: Bench
    log: Log
    out: Path
    use_triton: bool
    plan: Plan

    def ops(self) -> Ops:
        """The kernels that pass their checks on the planned shapes."""
        widths = [(model.hidden, model.intermediate) for model in self.plan.models]
        return select_ops(self.bench, self.log, self.use_triton, widths, self.plan.heads)


class Stack:
    """A few distinct decoder layers with random weights."""

    def __init__(self, bench: Bench, ops: Ops, model: Model, positions: int) -> None:
        self.bench, self.ops, self.model = bench, ops, model
        self.cos, self.sin = rope_tables(bench, positions, model.head_dim)
        gemms = {k: v for k, v in model.gemms(1).items() if k != "lm_head"}
        self.layers = [
            {name: bench.randn(n, k, std=k**-0.5) for name, (n, k) in gemms.items()}
            | {name: 1.0 + bench.randn(model.hidden, std=0.1) for name in ("norm1", "norm2")}
            for _ in range(model.layers)
        ]

    def forward(
        self, x: tuple[Any, Any], caches: Sequence[tuple[Any, Any]], attend: Callable[..., Any],
        length: int, pos0: int, ops: Ops | None = None,
    ) -> Any:  # fmt: skip
        """All layers over x = (delta, residual), each (T, hidden); one (k, v) cache a layer."""
        ops, linear = ops or self.ops, self.bench.torch.nn.functional.linear
        delta, residual = x
        for layer, (k, v) in zip(self.layers, itertools.cycle(caches), strict=False):
            y, residual = ops.rmsnorm(delta, residual, layer["norm1"])
            qkv = linear(y, layer["qkv"]).view(k.shape[0], length, -1)
            q = ops.rope_kv(qkv, self.cos, self.sin, k, v, self.model.heads, pos0)
            delta = linear(attend(q, k, v).reshape(y.shape[0], -1), layer["o"])
            y, residual = ops.rmsnorm(delta, residual, layer["norm2"])
            delta = linear(ops.silu_mul(linear(y, layer["gate_up"])), layer["down"])
        return delta

    def check(self, caches: Sequence[tuple[Any, Any]], attend: Callable[..., Any]) -> float:
        """Relative error of a decode step with the chosen kernels against plain torch ones."""
        batch, _, ctx, _ = caches[0][0].shape
        plain = torch_ops(self.bench)
        x = (self.bench.randn(batch, self.model.hidden), self.bench.randn(batch, self.model.hidden))
        out = self.forward(x, caches, attend, 1, ctx - 1)

        def reference(q: Any, k: Any, v: Any) -> Any:
            return plain.decode(q.squeeze(1), k, v, None)

        return relative_error(out, self.forward(x, caches, reference, 1, ctx - 1, plain))


def section_ceilings(run: Run) -> None:
    """Copy and read bandwidth, matrix rate, launch overhead, clocks under load."""
    bench, log, torch = run.bench, run.log, run.bench.torch
    n = 64 if bench.dry else 8192
    a, b = bench.randn(n, n), bench.randn(n, n)
    src = bench.randn(1 << (12 if bench.dry else 30))
    dst, size = torch.empty_like(src), src.numel() * src.element_size()
    rows = src.view(-1, 4096)
    loads: dict[str, tuple[Call, float]] = {  # work in units of 1e12 operations or 1e9 bytes
        "matmul_bf16_tflop_s": (lambda: torch.mm(a, b), 2e-12 * n**3),
        "copy_gb_s_read_plus_write": (lambda: dst.copy_(src), 2e-9 * size),
        "read_gb_s": (lambda: rows.amax(dim=1), 1e-9 * size),
    }
    for name, (call, work) in loads.items():
        us = bench.measure([call] * 10, target_s=0.1)
        log.put("ceilings", name, work / us * 1e6)
        count = 2 if bench.dry else int(2e6 / us)  # two seconds queued, the card read meanwhile
        seconds, state = bench.sustain(call, count, gpu_state)
        log.put("ceilings", name + "_sustained", work * count / seconds)
        log.put("nvidia_smi", "during_" + name.split("_")[0], state)

    tiny = bench.randn(16)
    launches: dict[str, Call] = {"torch_op": lambda: torch.neg(tiny, out=tiny)}
    if run.use_triton and not bench.dry:
        kernel = load_kernels().noop_kernel
        launches["triton_empty"] = lambda: kernel[(1,)](tiny)
    for name, call in launches.items():
        log.put("ceilings", f"launch_eager_us_{name}", bench.measure_eager(call, 500))
        log.put("ceilings", f"launch_graph_us_{name}", bench.measure([call] * 500))


class Layers:
    """Whole decoder layers, prefill and decode."""

    def __init__(self, run: Run) -> None:
        self.bench, self.plan, self.ops = run.bench, run.plan, run.ops()
        self.table = Table(
            run.out / "h200_layers.csv",
            "model,phase,sequences,tokens,context,layers_timed,latency_us_per_layer,mode,"
            "attention_impl",
        )
        sizes = [model.kv_heads * model.head_dim for model in self.plan.models]
        largest = 2 * max(self.plan.layer_batch) * max(self.plan.layer_ctx) * max(sizes)
        self.pool = self.bench.randn(2 * largest)  # two layers' KV at the largest point
        self.stack: Stack | None = None

    def stack_of(self, model: Model) -> Stack:
        if self.stack is None or self.stack.model != model:
            self.stack = None  # the previous model's weights go first
            lengths = [n for _, n in self.plan.layer_prefill]
            positions = max(*self.plan.layer_ctx, *lengths)
            self.stack = Stack(self.bench, self.ops, model, positions)
        return self.stack

    def caches_of(self, model: Model, batch: int, ctx: int) -> list[tuple[Any, Any]]:
        """(k, v) for each layer, shared by some where the pool holds fewer (all beyond the L2)."""
        shape = (batch, model.kv_heads, ctx, model.head_dim)
        size = math.prod(shape)
        count = max(1, min(model.layers, self.pool.numel() // (2 * size)))
        views = [self.pool[i * size : (i + 1) * size].view(shape) for i in range(2 * count)]
        return list(itertools.pairwise(views))[::2]

    def inputs(self, model: Model, tokens: int) -> tuple[Any, Any]:
        return self.bench.randn(tokens, model.hidden), self.bench.randn(tokens, model.hidden)

    def prefill(self, model: Model, batch: int, length: int) -> None:
        bench, stack = self.bench, self.stack_of(model)
        heads, kv, dim = model.heads, model.kv_heads, model.head_dim
        sets = prefill_sets(self.pool, batch, length, heads, kv, dim)[: model.layers]
        floor_us = prefill_floor_us(batch, length, heads, dim)
        times, _ = time_prefill(bench, sets, floor_us, check=False)
        impl = min(times, key=lambda name: times[name])
        caches, x = self.caches_of(model, batch, length), self.inputs(model, batch * length)

        def attend(q: Any, k: Any, v: Any) -> Any:
            return sdpa(bench, impl, q.transpose(1, 2), k, v, causal=True).transpose(1, 2)

        def step() -> Any:
            return stack.forward(x, caches, attend, length, 0)

        if not bool(bench.torch.isfinite(step()).all()):
            raise ValueError("the layers' output is not finite")
        us = bench.measure([step], target_s=0.4) / model.layers
        row = (model.name, "prefill", batch, batch * length, length, model.layers)
        self.table.row(*row, us, "graph", impl)

    def decode(self, model: Model, batch: int, ctx: int) -> None:
        bench, ops, stack = self.bench, self.ops, self.stack_of(model)
        q = bench.randn(batch, model.heads, model.head_dim)
        sets = rotate(self.pool, [(batch, model.kv_heads, ctx, model.head_dim)] * 2)
        choice = tune_decode(bench, ops, q, sets)
        caches, x = self.caches_of(model, batch, ctx), self.inputs(model, batch)

        def attend(q: Any, k: Any, v: Any) -> Any:
            return ops.decode(q.squeeze(1), k, v, choice)

        def step() -> Any:
            return stack.forward(x, caches, attend, 1, ctx - 1)

        error = stack.check(caches, attend) if batch <= 8 else 0.0
        us = bench.measure([step], target_s=0.1) / model.layers
        row = (model.name, "decode", batch, batch, ctx, model.layers)
        self.table.row(*row, us, "graph", ops.decode_name)
        if batch in self.plan.eager_batch:
            us = bench.measure_eager(step) / model.layers
            self.table.row(*row, us, "eager", ops.decode_name)
        if not error < 5e-2:
            raise ValueError(f"layers differ from plain torch by {error}")

    def cases(self, model: Model) -> Iterator[tuple[str, Call]]:
        for n, length in self.plan.layer_prefill:
            label = f"{model.name} prefill {n}x{length}"
            yield label, partial(self.prefill, model, n, length)
        for ctx, n in itertools.product(self.plan.layer_ctx, self.plan.layer_batch):
            yield f"{model.name} decode {n}x{ctx}", partial(self.decode, model, n, ctx)


def section_layers(run: Run) -> None:
    """Every point of the layers sweep."""
    layers = Layers(run)
    cases = [case for model in run.plan.models for case in layers.cases(model)]
    run.bench.run_cases("layers", run.log, cases)


class Attention:
    """Attention alone: causal prefill and one-query decode."""

    def __init__(self, run: Run) -> None:
        self.bench, self.log, self.plan, self.ops = run.bench, run.log, run.plan, run.ops()
        self.table = Table(
            run.out / "h200_attention.csv",
            "kind,impl,batch_size,seq_len,num_heads,num_key_value_heads,head_dim,latency_us,is_fastest",
        )
        sizes = [
            2 * b * c * kv * dim for h in self.plan.heads for b, c, _, kv, dim in self.steps(h)
        ]
        self.pool = self.bench.randn(max(sizes) + 4096)

    def steps(self, heads: tuple[int, int, int]) -> list[tuple[int, int, int, int, int]]:
        """Decode points (batch, context, H, KV, D) whose KV fits."""
        return [
            (batch, ctx, *heads)
            for ctx, batch in itertools.product(self.plan.decode_ctx, self.plan.decode_batch)
            if 4.0 * batch * ctx * heads[1] * heads[2] <= MAX_KV_BYTES
        ]

    def write(self, kind: str, shape: Sequence[int], times: dict[str, float]) -> None:
        for impl, us in times.items():
            self.table.row(kind, impl, *shape, us, int(us == min(times.values())))

    def prefill(self, batch: int, length: int, heads: int, kv: int, dim: int) -> None:
        sets = prefill_sets(self.pool, batch, length, heads, kv, dim)
        floor_us = prefill_floor_us(batch, length, heads, dim)
        times, errors = time_prefill(self.bench, sets, floor_us, check=length <= 1024)
        self.write("prefill", (batch, length, heads, kv, dim), times)
        for impl, text in errors.items():
            self.log.put("unavailable", f"prefill {impl} {batch}x{length} ({heads}, {kv})", text)

    def decode(self, batch: int, ctx: int, heads: int, kv: int, dim: int) -> None:
        bench, plain = self.bench, torch_ops(self.bench)
        q = bench.randn(batch, heads, dim)
        sets = rotate(self.pool, [(batch, kv, ctx, dim)] * 2)
        floor_us = max(3.0, 4.0 * batch * kv * ctx * dim / 4.5e6)
        choices: dict[str, tuple[Ops, Any]] = {plain.decode_name: (plain, None)}
        if self.ops.decode_name not in choices:
            choice = tune_decode(bench, self.ops, q, sets)
            choices[self.ops.decode_name] = (self.ops, choice)
            self.log.put("decode_plans", f"{batch}x{ctx} ({heads}, {kv})", choice._asdict())
        far_k, far_v = sets[-1]  # its last sequence lies at the far end of the buffers
        want = attention_reference(bench.torch, q[-1:, :, None], far_k[-1:], far_v[-1:], False)
        times: dict[str, float] = {}
        failures = []
        for impl, (ops, choice) in choices.items():
            try:
                error = relative_error(ops.decode(q, far_k, far_v, choice)[-1], want[0, :, 0])
                if not error < TOLERANCE:
                    raise ValueError(f"relative error {error}")
                calls = [partial(ops.decode, q, k, v, choice) for k, v in sets]
                times[impl] = bench.measure(cycled(calls, floor_us))
            except Exception as failure:  # noqa: BLE001 (the other implementation still counts)
                failures.append(f"{impl}: {type(failure).__name__}: {failure}"[:500])
                bench.sync()
        self.write("decode", (batch, ctx, heads, kv, dim), times)
        if failures:
            raise RuntimeError("; ".join(failures))

    def cases(self, heads: tuple[int, int, int]) -> Iterator[tuple[str, Call]]:
        for batch, length in self.plan.prefill:
            yield f"prefill {batch}x{length} {heads}", partial(self.prefill, batch, length, *heads)
        for step in self.steps(heads):
            yield f"decode {step[0]}x{step[1]} {heads}", partial(self.decode, *step)


def section_attention(run: Run) -> None:
    """Every point of the attention sweep."""
    attention = Attention(run)
    cases = [case for heads in run.plan.heads for case in attention.cases(heads)]
    run.bench.run_cases("attention", run.log, cases)


def section_gemm(run: Run) -> None:
    """Linear layers at every shard shape and token count."""
    columns = "kind,name,model,tp,m,n,k,latency_us,latency_us_warm"
    table = Table(run.out / "h200_gemm.csv", columns)
    bench, plan, linear = run.bench, run.plan, run.bench.torch.nn.functional.linear
    shapes = [
        (model.name, tp, name, n, k)
        for tp in plan.tps
        for model in plan.models
        for name, (n, k) in model.gemms(tp).items()
    ]
    pool = bench.randn(max(n * k for *_, n, k in shapes) + (0 if bench.dry else 1 << 27), std=0.02)
    activations = bench.randn(max(plan.gemm_m) * max(k for *_, k in shapes))

    def gemm(model: str, tp: int, name: str, n: int, k: int, m: int) -> None:
        x = activations[: m * k].view(m, k)
        weights = [w for (w,) in rotate(pool, [(n, k)])]
        floor_us = max(2.0, 2.0 * m * n * k / 800e6, 2.0 * n * k / 4.5e6)
        cold = bench.measure(cycled([partial(linear, x, w) for w in weights], floor_us))
        warm = bench.measure(cycled([partial(linear, x, weights[0])], floor_us))
        table.row("gemm", name, model, tp, m, n, k, cold, warm)

    cases: list[tuple[str, Call]] = [
        (f"{(*shape, m)}", partial(gemm, *shape, m)) for shape in shapes for m in plan.gemm_m
    ]
    bench.run_cases("gemm", run.log, cases)


SECTIONS: dict[str, Callable[[Run], None]] = {
    "ceilings": section_ceilings,
    "layers": section_layers,
    "attention": section_attention,
    "gemm": section_gemm,
}


def run_section(name: str, args: argparse.Namespace) -> int:
    """Run one section in this process; its failure goes to the log and the exit status."""
    log, bench = Log(args.out / "h200_meta.json"), None
    try:
        bench = Bench(args.dry_run, args.deadline)
        torch = bench.torch
        log.data["torch"], log.data["cuda"] = torch.__version__, torch.version.cuda
        if not args.dry_run:
            log.data["gpu"] = torch.cuda.get_device_name(0)
            log.data["multiprocessors"] = bench.sms
            properties = torch.cuda.get_device_properties(0)
            log.data["l2_bytes"] = getattr(properties, "L2_cache_size", None)
            log.data["cudnn"] = torch.backends.cudnn.version()
        with torch.inference_mode():
            plan = DRY if args.dry_run else FULL
            SECTIONS[name](Run(bench, log, args.out, not args.no_triton, plan))
    except Exception:  # noqa: BLE001 (recorded; the other sections go on)
        log.put("errors", name, traceback.format_exc()[-3000:])
    if bench and bench.spreads:
        spread = {"median": statistics.median(bench.spreads), "max": max(bench.spreads)}
        log.put("relative_spread_p10_p90", name, spread)
    log.save()
    return int(name in log.data.get("errors", {}))


def summary(out: Path, log: Log) -> Iterator[str]:
    """Lines of the closing table."""

    def rows(name: str) -> list[dict[str, str]]:
        path = out / name
        return list(csv.DictReader(path.open())) if path.exists() else []

    yield "ceilings:"
    yield from (f"  {name} = {value:.2f}" for name, value in log.data.get("ceilings", {}).items())
    yield "layers: us per layer by model, phase, sequences x context"
    for r in rows("h200_layers.csv"):
        if r["mode"] == "eager" or r["sequences"] in ("1", "64", "256"):
            case = f"{r['model']} {r['phase']} {r['sequences']}x{r['context']}"
            yield f"  {case:32} {r['latency_us_per_layer']:>12} {r['mode']} {r['attention_impl']}"
    yield "attention, fastest: 32 heads; decode in GB/s of KV, prefill in TFLOP/s"
    for r in rows("h200_attention.csv"):
        if r["is_fastest"] == "1" and r["num_heads"] == "32" and r["batch_size"] in ("1", "64"):
            b, s, h, kv, d = (int(v) for v in list(r.values())[2:7])
            us = float(r["latency_us"])
            work = 4e-3 * b * s * kv * d if r["kind"] == "decode" else 2e-6 * b * h * d * s * s
            yield f"  {r['kind']} {b}x{s}: {us} us, {work / us:.0f}, {r['impl']}"
    yield "gemm, tp 1: us cold, us warm, GB/s of weight, TFLOP/s"
    for r in rows("h200_gemm.csv"):
        if r["tp"] == "1" and r["m"] in ("1", "64", "4096") and r["name"] in ("qkv", "gate_up"):
            m, n, k, cold = int(r["m"]), int(r["n"]), int(r["k"]), float(r["latency_us"])
            rates = f"{2e-3 * n * k / cold:.0f} {2e-6 * m * n * k / cold:.0f}"
            yield f"  {r['model']} {r['name']} m={m}: {cold} {r['latency_us_warm']} {rates}"
    yield "rows: " + ", ".join(f"{p.name} {len(rows(p.name))}" for p in sorted(out.glob("*.csv")))
    for group in ("kernels", "seconds", "cut_short", "relative_spread_p10_p90", "errors"):
        yield f"{group}: {json.dumps(log.data.get(group, {}))[:1500]}"
    yield f"case errors: {len(log.data.get('case_errors', {}))}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections one after another and return 1 if any failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--budget-s", type=float, default=420.0, help="wall-clock seconds in all")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which, comma-separated")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--no-triton", action="store_true", help="torch versions only")
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=math.inf, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.section:
        return run_section(args.section, args)

    start = time.time()
    chosen = [name for name in SECTIONS if name in args.sections.split(",")]
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "h200_meta.json"
    path.unlink(missing_ok=True)
    log = Log(path)
    packages = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    log.data |= {
        "date_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "dry_run": args.dry_run,
        "budget_s": args.budget_s,
        "python": platform.python_version(),
        "host_cpus": os.cpu_count(),
        "driver": nvidia_smi(["driver_version"]).get("driver_version"),
        "triton": packages.get("triton"),
        "errors": {},
        "cut_short": {},
    }
    log.put("nvidia_smi", "before", gpu_state())
    failed = False
    for name in chosen:
        begun = time.time()
        end = start + args.budget_s * (SECTION_END[name] if len(chosen) > 1 else 1.0)
        flags = [f for f in ("dry_run", "no_triton") if getattr(args, f)]
        command = [sys.executable, "-u", str(Path(__file__).resolve()), "--section", name]
        command += ["--out", str(args.out), "--deadline", str(end)]
        command += ["--" + f.replace("_", "-") for f in flags]
        print(f"section {name}, until {end - start:.0f} s", flush=True)
        try:
            status = subprocess.run(
                command, timeout=max(5.0, end + GRACE_S - begun), check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = -9
        log = Log(path)  # as the section left it
        if status != 0:
            failed = True
            log.data["errors"].setdefault(name, f"exit status {status} (-9: ran past its end)")
        log.put("seconds", name, round(time.time() - begun, 1))
        log.put("nvidia_smi", f"after_{name}", gpu_state())
    log.put("nvidia_smi", "after", gpu_state())
    print("\n".join(summary(args.out, log)), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
