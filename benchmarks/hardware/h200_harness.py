"""Timing, logs, reference operators and kernel checks for ``h200_measure.py``.

Tensors and the torch module are ``Any`` here: torch is imported only when a Bench is made, so the
parent process and the type checker need no torch. Shapes as in ``h200_kernels.py``. Times are
microseconds where a name ends in ``_us`` and seconds where it ends in ``_s``.
"""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

COLD_BYTES = 300e6  # distinct bytes per graph when cold: five times the L2
TOLERANCE = 2e-2  # relative error allowed to a bf16 kernel against fp32
BACKENDS = {
    "sdpa_flash": "FLASH_ATTENTION",
    "sdpa_cudnn": "CUDNN_ATTENTION",
    "sdpa_math": "MATH",
}
Call = Callable[[], Any]


class Log:
    """h200_meta.json: loaded, changed in place, saved whole and atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def put(self, group: str, key: str, value: Any) -> None:
        self.data.setdefault(group, {})[key] = value
        self.save()

    def save(self) -> None:
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.data, indent=1) + "\n")
        temporary.replace(self.path)


class Table:
    """A CSV file whose every row is flushed as it is written."""

    def __init__(self, path: Path, columns: str) -> None:
        self.file = path.open("w", newline="", buffering=1)
        self.columns = columns.split(",")
        self.writer = csv.writer(self.file)
        self.writer.writerow(self.columns)

    def row(self, *values: Any) -> None:
        assert len(values) == len(self.columns)
        self.writer.writerow([f"{v:.3f}" if isinstance(v, float) else v for v in values])
        self.file.flush()


def nvidia_smi(fields: Sequence[str]) -> dict[str, str]:
    """These fields of the first GPU, or what went wrong under "error"."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    if done.returncode != 0:
        return {"error": (done.stdout + done.stderr).strip()[:300]}
    return dict(zip(fields, done.stdout.splitlines()[0].split(", "), strict=False))


def gpu_state() -> dict[str, str]:
    """Clocks (MHz), power (W), temperature (C) and throttle reasons as they are now."""
    fields = ["clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu"]
    state = nvidia_smi([*fields, "clocks_event_reasons.active"])
    return nvidia_smi(fields) if "error" in state else state


class Bench:
    """The torch module, the device and the timers of one section's process."""

    def __init__(self, dry: bool, deadline: float) -> None:
        """``deadline``: epoch seconds after which no new case is begun."""
        self.torch: Any = importlib.import_module("torch")
        self.dry, self.deadline = dry, deadline
        self.device = "cpu" if dry else "cuda"
        self.dtype = self.torch.float16 if dry else self.torch.bfloat16
        self.spreads: list[float] = []
        self.sms = 4
        self.torch.manual_seed(0)
        if not dry:
            self.sms = self.torch.cuda.get_device_properties(0).multi_processor_count
            self.stream = self.torch.cuda.Stream()
            x = self.randn(8192, 8192)
            for _ in range(200):  # a quarter of a second of work raises the clocks
                self.torch.mm(x, x)
            self.sync()

    def randn(self, *shape: int, std: float = 1.0) -> Any:
        """Normal random tensor on the device."""
        return self.torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0.0, std)

    def sync(self) -> None:
        if not self.dry:
            self.torch.cuda.synchronize()

    def measure(self, calls: Sequence[Call], target_s: float = 0.03, keep: bool = True) -> float:
        """Median time per call in us: ``calls`` form one graph, replayed for ``target_s``."""
        times = self.sample(calls, target_s)
        median = statistics.median(times)
        if keep and len(times) >= 5:
            ordered = sorted(times)
            low, high = ordered[len(times) // 10], ordered[-1 - len(times) // 10]
            self.spreads.append((high - low) / median)
        return median / len(calls) * 1e6

    def sample(self, calls: Sequence[Call], target_s: float) -> list[float]:
        """Seconds of each replay of the graph that ``calls`` form, 5 to 40 of them."""
        return self._host_times(calls) if self.dry else self._graph_times(calls, target_s)

    def _host_times(self, calls: Sequence[Call]) -> list[float]:
        times = []
        for _ in range(2):
            start = time.perf_counter()
            for call in calls:
                call()
            times.append(time.perf_counter() - start)
        return times

    def _graph_times(self, calls: Sequence[Call], target_s: float) -> list[float]:
        cuda = self.torch.cuda
        cuda.synchronize()
        with cuda.stream(self.stream):  # every call once: compilation stays out of the capture
            for call in calls:
                call()
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, stream=self.stream):
            for call in calls:
                call()
        with cuda.stream(self.stream):
            once = self._replay(graph, 1)[0]
            times = self._replay(graph, int(min(40, max(5, target_s / once))))
        graph.reset()
        return times

    def _replay(self, graph: Any, count: int) -> list[float]:
        """Seconds of each of ``count`` replays, after one that is not timed."""
        cuda = self.torch.cuda
        events = [[cuda.Event(enable_timing=True) for _ in "se"] for _ in range(count)]
        cuda._sleep(1_000_000)  # half a millisecond of waiting, so that the host runs ahead
        graph.replay()
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in events]

    def measure_eager(self, call: Call, repeat: int = 20) -> float:
        """Median wall-clock time per call in us without a graph: host dispatch included."""
        call()
        times = []
        for _ in range(5):
            self.sync()
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            self.sync()
            times.append((time.perf_counter() - start) / repeat)
        return statistics.median(times) * 1e6

    def sustain(self, call: Call, count: int, meanwhile: Call) -> tuple[float, Any]:
        """Seconds that ``count`` queued calls take, and what ``meanwhile`` returned."""
        if self.dry:
            return self._host_times([call] * count)[-1], meanwhile()
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        for _ in range(count):
            call()
        end.record()
        value = meanwhile()
        self.sync()
        return start.elapsed_time(end) * 1e-3, value

    def run_cases(self, section: str, log: Log, cases: Sequence[tuple[str, Call]]) -> None:
        """Run labelled cases until the section's end; raise at last if any of them failed."""
        failed = 0
        for done, (label, case) in enumerate(cases):
            if time.time() > self.deadline:
                log.put("cut_short", section, f"{done} of {len(cases)} cases run")
                break
            try:
                case()
            except Exception as error:  # noqa: BLE001 (recorded; the next case goes on)
                failed += 1
                log.put("case_errors", f"{section}: {label}", f"{type(error).__name__}: {error}")
                print(f"FAILED {section}: {label}: {str(error)[:300]}", flush=True)
                self.sync()  # raises again, and so ends the section, if the GPU context is lost
        if failed:
            raise RuntimeError(f"{failed} of {len(cases)} cases failed, see case_errors")


def rotate(pool: Any, shapes: Sequence[tuple[int, ...]], limit: int = 768) -> list[tuple[Any, ...]]:
    """Distinct sets of views of ``pool`` with these shapes, worth COLD_BYTES where it can be."""
    sizes = [math.ceil(math.prod(shape) / 128) * 128 for shape in shapes]
    wanted = math.ceil(COLD_BYTES / (sum(sizes) * pool.element_size()))
    count = min(pool.numel() // sum(sizes), wanted, limit)
    if count < 1:
        raise ValueError(f"a pool of {pool.numel()} elements cannot hold {list(shapes)}")
    starts = itertools.accumulate(itertools.cycle(sizes), initial=0)
    return [
        tuple(pool[i : i + math.prod(s)].view(s) for s, i in zip(shapes, starts, strict=False))
        for _ in range(count)
    ]


def cycled(calls: Sequence[Call], floor_us: float) -> list[Call]:
    """The calls, repeated in turn until one pass should take a millisecond (256 at most)."""
    count = max(len(calls), min(256, math.ceil(1000.0 / floor_us)))
    return list(itertools.islice(itertools.cycle(calls), count))


def sdpa(bench: Bench, impl: str, q: Any, k: Any, v: Any, causal: bool) -> Any:
    """SDPA of torch on (B, heads, S, D) tensors by one of BACKENDS, grouped KV heads."""
    attention = importlib.import_module("torch.nn.attention")
    with attention.sdpa_kernel(getattr(attention.SDPBackend, BACKENDS[impl])):
        return bench.torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=True
        )


def attention_reference(torch: Any, q: Any, k: Any, v: Any, causal: bool) -> Any:
    """fp32 attention of q (B, H, S, D) over k, v (B, KV, C, D), written out."""
    _, heads, length, dim = q.shape
    group = heads // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * dim**-0.5
    if causal:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(mask, -math.inf)
    return scores.softmax(-1) @ v


def relative_error(out: Any, reference: Any) -> float:
    """Norm of the difference over the norm of the reference."""
    reference = reference.float()
    return float((out.float() - reference).norm() / reference.norm())


@dataclass(frozen=True)
class Ops:
    """The operators a decoder layer is made of, besides its linear layers."""

    rmsnorm: Callable[..., tuple[Any, Any]]
    rope_kv: Callable[..., Any]
    silu_mul: Callable[..., Any]
    decode: Callable[..., Any]
    decode_name: str
    decode_plans: Callable[[int, int], list[Any]]  # (B * KV, context) to plans worth timing


def torch_ops(bench: Bench) -> Ops:
    """Plain torch versions of the fused kernels: the reference, and the fallback."""
    torch = bench.torch
    decode_name = "sdpa_math" if bench.dry else "sdpa_flash"

    def rmsnorm(delta: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
        x = delta.float() + residual.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return (x * scale * weight.float()).to(delta.dtype), x.to(delta.dtype)

    def rope_kv(
        qkv: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, heads: int, pos0: int
    ) -> Any:
        batch, length, _ = qkv.shape
        rotated = heads + k_cache.shape[1]
        x = qkv.view(batch, length, -1, k_cache.shape[3])
        x1, x2 = x[:, :, :rotated].float().chunk(2, dim=-1)
        c, s = (table[pos0 : pos0 + length, None] for table in (cos, sin))
        y = torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1).to(qkv.dtype)
        k_cache[:, :, pos0 : pos0 + length] = y[:, :, heads:].transpose(1, 2)
        v_cache[:, :, pos0 : pos0 + length] = x[:, :, rotated:].transpose(1, 2)
        return y[:, :, :heads].contiguous()

    def silu_mul(gate_up: Any) -> Any:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

    def decode(q: Any, k: Any, v: Any, _plan: Any) -> Any:
        return sdpa(bench, decode_name, q.unsqueeze(2), k, v, causal=False).squeeze(2)

    return Ops(rmsnorm, rope_kv, silu_mul, decode, decode_name, lambda _pairs, _ctx: [None])


def rope_tables(bench: Bench, positions: int, dim: int) -> tuple[Any, Any]:
    """fp32 cos and sin, each (positions, dim / 2), with the base of Llama 3."""
    torch = bench.torch
    frequency = 500000.0 ** (-torch.arange(0, dim, 2, device=bench.device).float() / dim)
    angle = torch.arange(positions, device=bench.device).float()[:, None] * frequency
    return angle.cos(), angle.sin()


@dataclass(frozen=True)
class Checks:
    """Each Triton kernel against its fp32 reference, on the measured widths and heads."""

    bench: Bench
    kernels: Any
    widths: Sequence[tuple[int, int]]  # hidden, intermediate
    heads: Sequence[tuple[int, int, int]]  # H, KV, D

    def rmsnorm(self) -> list[float]:
        errors = []
        for rows, (hidden, _) in itertools.product((1, 7), self.widths):
            delta, residual = self.bench.randn(rows, hidden), self.bench.randn(rows, hidden)
            weight = 1.0 + self.bench.randn(hidden, std=0.1)
            outs = self.kernels.rmsnorm(delta, residual, weight)
            wants = torch_ops(self.bench).rmsnorm(delta.float(), residual.float(), weight.float())
            errors += [relative_error(a, b) for a, b in zip(outs, wants, strict=True)]
        return errors

    def silu_mul(self) -> list[float]:
        errors = []
        for rows, (_, intermediate) in itertools.product((1, 7), self.widths):
            x = self.bench.randn(rows, 2 * intermediate, std=2.0)
            want = torch_ops(self.bench).silu_mul(x.float())
            errors.append(relative_error(self.kernels.silu_mul(x), want))
        return errors

    def rope_kv(self) -> list[float]:
        errors = []
        steps = ((2, 33, 0), (5, 1, 38), (1, 16, 7))  # B, S, first position
        for (batch, length, pos0), (heads, kv, dim) in itertools.product(steps, self.heads):
            cos, sin = rope_tables(self.bench, 64, dim)
            qkv = self.bench.randn(batch, length, (heads + 2 * kv) * dim)
            k, v = (self.bench.randn(batch, kv, 40, dim) for _ in "kv")
            want_k, want_v = k.float(), v.float()  # whole caches: nothing else may be written
            q = self.kernels.rope_kv(qkv, cos, sin, k, v, heads, pos0)
            rope = torch_ops(self.bench).rope_kv
            want_q = rope(qkv.float(), cos, sin, want_k, want_v, heads, pos0)
            for out, want in ((q, want_q), (k, want_k), (v, want_v)):
                errors.append(relative_error(out, want))
        return errors

    def decode(self) -> list[float]:
        errors = []
        steps = ((1, 64), (3, 300), (2, 1000))  # B, context
        for (heads, kv, dim), (batch, ctx) in itertools.product(self.heads, steps):
            q = self.bench.randn(batch, heads, dim)
            k, v = (self.bench.randn(batch, kv, ctx, dim) for _ in "kv")
            want = attention_reference(self.bench.torch, q.unsqueeze(2), k, v, causal=False)
            for plan in self.kernels.candidate_plans(8, ctx, 4):  # one split and several
                out = self.kernels.decode_attention(q, k, v, plan)
                errors.append(relative_error(out, want.squeeze(2)))
        return errors


def load_kernels() -> Any:
    """The module of Triton kernels, imported only where they can run."""
    return importlib.import_module("benchmarks.hardware.h200_kernels")


def select_ops(
    bench: Bench, log: Log, use_triton: bool,
    widths: Sequence[tuple[int, int]], heads: Sequence[tuple[int, int, int]],
) -> Ops:  # fmt: skip
    """Triton kernels that pass their check, torch versions for the rest; recorded in the log."""
    ops = torch_ops(bench)
    if bench.dry and os.environ.get("TRITON_INTERPRET") != "1":
        use_triton = False
    for name in ("rmsnorm", "rope_kv", "silu_mul", "decode"):
        entry: dict[str, Any] = {"impl": "torch"}
        try:
            if use_triton:
                kernels = load_kernels()
                errors = getattr(Checks(bench, kernels, widths, heads), name)()
                bench.sync()
                passed = all(error < TOLERANCE for error in errors)  # not so for NaN
                worst = "nan" if any(math.isnan(error) for error in errors) else max(errors)
                entry = {"impl": "triton" if passed else "torch", "relative_error": worst}
                if passed and name == "decode":
                    plans = partial(kernels.candidate_plans, sms=bench.sms)
                    ops = replace(ops, decode=kernels.decode_attention, decode_plans=plans)
                    ops = replace(ops, decode_name="triton_split_kv")
                elif passed:
                    ops = replace(ops, **{name: getattr(kernels, name)})
        except Exception as error:  # noqa: BLE001 (recorded; torch takes its place)
            entry = {"impl": "torch", "error": f"{type(error).__name__}: {error}"[:1000]}
            bench.sync()
        log.put("kernels", name, entry)
        print("kernel", name, entry, flush=True)
    return ops


def tune_decode(bench: Bench, ops: Ops, q: Any, sets: Sequence[tuple[Any, ...]]) -> Any:
    """The fastest of the decode plans for q (B, H, D) over these KV sets."""
    batch, kv_heads, ctx, _ = sets[0][0].shape
    plans = ops.decode_plans(batch * kv_heads, ctx)
    if len(plans) == 1:
        return plans[0]

    def timed(plan: Any) -> float:
        calls = [partial(ops.decode, q, k, v, plan) for k, v in sets]
        return bench.measure(calls, target_s=0.005, keep=False)

    return min(plans, key=timed)


def time_prefill(
    bench: Bench, sets: Sequence[tuple[Any, ...]], floor_us: float, check: bool
) -> tuple[dict[str, float], dict[str, str]]:
    """Time (us) of causal SDPA by implementation over (q, k, v) sets, and what failed."""
    times: dict[str, float] = {}
    errors: dict[str, str] = {}
    for impl in ("sdpa_math",) if bench.dry else ("sdpa_flash", "sdpa_cudnn"):
        try:
            if check:
                q, k, v = (x[-1:] for x in sets[-1])
                want = attention_reference(bench.torch, q, k, v, causal=True)
                error = relative_error(sdpa(bench, impl, q, k, v, causal=True), want)
                if not error < TOLERANCE:
                    raise ValueError(f"relative error {error}")
            calls = [partial(sdpa, bench, impl, q, k, v, True) for q, k, v in sets]
            times[impl] = bench.measure(cycled(calls, floor_us))
        except Exception as failure:  # noqa: BLE001 (recorded; the other backend counts)
            errors[impl] = f"{type(failure).__name__}: {failure}"[:500]
            bench.sync()
    if not times:
        raise RuntimeError(f"no SDPA backend worked: {errors}")
    return times, errors


def prefill_sets(pool: Any, batch: int, length: int, heads: int, kv: int, dim: int) -> list[Any]:
    """(q, k, v) sets: q stored token by token as a linear layer leaves it, k and v as cached."""
    shapes = [(batch, length, heads, dim), *[(batch, kv, length, dim)] * 2]
    return [(q.transpose(1, 2), k, v) for q, k, v in rotate(pool, shapes, limit=512)]


def prefill_floor_us(batch: int, length: int, heads: int, dim: int) -> float:
    """A low guess of causal attention time in us, to size the graph: 600 TFLOP/s, 3 us."""
    return max(3.0, 2.0 * batch * heads * length**2 * dim / 600e6)
