"""Times of single operators on this machine's GPU: matrix products, attention over prompts and contexts.

What `atoll perf calibrate` fits constants to. Operands come from memory, not from a cache, as they do in
service, where many layers take turns: calls go around over copies that are larger than the cache together.
Calls are captured into one CUDA graph, so that launches cost what they cost an engine that captures its
steps. Of torch's kernels for attention over prompts the fastest counts; that over contexts is Atoll's own.
"""

from __future__ import annotations

import csv
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from atoll.core.errors import InputError

COLD_BYTES = 300_000_000
"""Bytes over which calls go around: several times the cache of any GPU."""
_MAX_COPIES = 256
_GRAPH_S = 1e-3
"""Seconds that a graph of calls should take at least."""
_REPLAYS = 12
_PAGE = 16
Call = Callable[[], object]
Progress = Callable[[float, str], None]


Timer = Callable[[Sequence[Call]], float]
"""Returns the seconds of a call, as the median over many; each of the calls has operands of its own."""


class Heads(NamedTuple):
    """Attention heads of a layer on a GPU: queries, keys and values, and numbers in each."""

    queries: int
    kv: int
    size: int


@dataclass(frozen=True, slots=True)
class OperatorSweep:
    """What to measure: (n, k) of weights by rows m; prompts and contexts as (sequences, tokens)."""

    weights: Sequence[tuple[int, int]] = (
        (4096, 4096),
        (6144, 4096),
        (28672, 4096),
        (4096, 14336),
        (10240, 8192),
        (8192, 8192),
        (14336, 8192),
        (128256, 4096),
    )
    rows: Sequence[int] = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    heads: Sequence[Heads] = (Heads(32, 8, 128), Heads(64, 8, 128), Heads(8, 1, 128))
    prompts: Sequence[tuple[int, int]] = (
        *((1, 2**power) for power in range(7, 15)),
        *((4, 512), (4, 2048), (16, 512)),
    )
    contexts: Sequence[tuple[int, int]] = tuple(
        itertools.product((1, 4, 16, 64, 256), (256, 1024, 4096, 16384))
    )
    max_bytes: int = 12_000_000_000
    """Most bytes of one case; larger ones are left out, as they are on small GPUs."""


class OperatorTimes(NamedTuple):
    """Rows of measurements, as `perf.measurements` reads them: of products, and of attention."""

    gemm: list[dict[str, object]]
    attention: list[dict[str, object]]

    def write(self, folder: Path) -> list[Path]:
        """Write them as CSV files of a folder; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        found = []
        for name, rows in self._asdict().items():
            path = folder / f"{name}.csv"
            with path.open("w", newline="") as stream:
                writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
            found.append(path)
        return found


class _Case(NamedTuple):
    """A case: what it is called, its row but for the time, and how its calls are made."""

    kind: str
    row: dict[str, object]
    make: Callable[[], list[Call]]


@dataclass(slots=True)
class OperatorProfiler:
    """Runs the cases of a sweep on a device, one after the other."""

    gpu: str
    timer: Timer
    device: str = "cuda"
    sweep: OperatorSweep = field(default_factory=OperatorSweep)
    _pool: Any = field(default=None, init=False)

    def measure(self, say: Progress) -> OperatorTimes:
        """Measure every case; those that the GPU has no kernel for, or no room, are left out."""
        import torch

        torch.manual_seed(0)
        found = OperatorTimes([], [])
        cases = list(self._cases())
        for number, case in enumerate(cases):
            say(number / len(cases), case.kind)
            try:
                seconds = self.timer(case.make())
            except (RuntimeError, NotImplementedError, torch.OutOfMemoryError):
                continue
            row = {"gpu": self.gpu, **case.row, "latency_us": f"{1e6 * seconds:.3f}"}
            (found.gemm if case.kind == "products" else found.attention).append(row)
        for name, rows in found._asdict().items():
            if not rows:
                raise InputError(f"this GPU ran none of the cases of {name}")
        return found

    def _cases(self) -> Iterator[_Case]:
        sweep = self.sweep
        formats = ["bfloat16" if _has_bf16(self.device) else "float16"]
        formats += ["fp8"] if _has_fp8(self.device) else []
        for kind, (n, k), m in itertools.product(formats, sweep.weights, sweep.rows):
            if 2 * (n * k + m * (n + k)) <= sweep.max_bytes:
                row = {"gemm_dtype": kind, "m": m, "n": n, "k": k}
                yield _Case("products", row, partial(self._gemm, kind, m, n, k))
        kernels = ("flash", "cudnn") if self.device == "cuda" else ("math",)
        for heads, (batch, tokens), name in itertools.product(sweep.heads, sweep.prompts, kernels):
            row = _attention_row("prefill", name, heads, batch, tokens)
            make = partial(self._prefill, name, heads, batch, tokens)
            yield _Case("attention over prompts", row, make)
        for heads, (batch, tokens) in itertools.product(sweep.heads, sweep.contexts):
            if 4 * batch * tokens * heads.kv * heads.size <= sweep.max_bytes:
                row = _attention_row("decode", "atoll", heads, batch, tokens)
                make = partial(self._decode, heads, batch, tokens)
                yield _Case("attention over contexts", row, make)

    def _dtype(self) -> Any:
        import torch

        return torch.bfloat16 if _has_bf16(self.device) else torch.float16

    def _random(self, *shape: int) -> Any:
        import torch

        return torch.empty(shape, dtype=self._dtype(), device=self.device).normal_(0.0, 0.1)

    def _copies(self, *shapes: tuple[int, ...]) -> list[tuple[Any, ...]]:
        """Return distinct operands of these shapes, as many as are larger than the cache."""
        size = sum(2 * math.prod(shape) for shape in shapes)
        count = min(_MAX_COPIES, max(1, -(-COLD_BYTES // size)))
        needed = count * size // 2
        if self._pool is None or self._pool.numel() < needed:
            self._pool = None  # freed before more is taken
            self._pool = self._random(needed)
        at = itertools.accumulate((math.prod(shape) for shape in shapes * count), initial=0)
        views = [
            self._pool[start : start + math.prod(shape)].view(shape)
            for start, shape in zip(at, shapes * count, strict=False)
        ]
        return list(zip(*([iter(views)] * len(shapes)), strict=True))

    def _gemm(self, kind: str, m: int, n: int, k: int) -> list[Call]:
        import torch

        x = self._random(m, k)
        if kind != "fp8":
            return [partial(torch.mm, x, w.t()) for (w,) in self._copies((n, k))]
        x8, one = x.to(torch.float8_e4m3fn), torch.ones((), device=self.device)
        narrow = [w.view(torch.float8_e4m3fn)[:, :k] for (w,) in self._copies((n, -(-k // 2)))]
        multiply = partial(torch._scaled_mm, out_dtype=torch.bfloat16)
        return [partial(multiply, x8, w.t(), one, one) for w in narrow]

    def _prefill(self, kernel: str, heads: Heads, batch: int, tokens: int) -> list[Call]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = {
            "flash": SDPBackend.FLASH_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "math": SDPBackend.MATH,
        }[kernel]
        stored = (batch, heads.kv, tokens, heads.size)

        def attend(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q.transpose(1, 2), k, v, is_causal=True, enable_gqa=True
                )

        copies = self._copies((batch, tokens, heads.queries, heads.size), stored, stored)
        return [partial(attend, *one) for one in copies]

    def _decode(self, heads: Heads, batch: int, tokens: int) -> list[Call]:
        """Attend from one row a sequence, whose pages no other call reads."""
        import torch

        if self.device != "cuda":
            return self._prefill("math", heads, batch, 1)
        from atoll.engine import triton_ops

        pages = -(-tokens // _PAGE)
        slots = (batch * pages * _PAGE, heads.kv, heads.size)
        copies = self._copies(slots, slots)
        tables = torch.arange(batch * pages, dtype=torch.int32, device=self.device)
        tables = tables.view(batch, pages)
        wanted = triton_ops.parts_wanted(torch.device("cuda", 0), heads.kv)
        parts = triton_ops.ContextParts(batch, heads.kv, wanted, tables.device)
        # A step cuts its contexts once for all of its layers.
        parts.cut(torch.full((batch,), tokens, dtype=torch.int32, device=self.device))
        q = self._random(batch, heads.queries, heads.size)
        return [
            partial(triton_ops.paged_decode, q, k, v, tables, parts, heads.size**-0.5, _PAGE)
            for k, v in copies
        ]


def _attention_row(
    kind: str, kernel: str, heads: Heads, batch: int, tokens: int
) -> dict[str, object]:
    return {
        "kind": kind,
        "impl": kernel,
        "batch_size": batch,
        "seq_len": tokens,
        "num_heads": heads.queries,
        "num_key_value_heads": heads.kv,
        "head_dim": heads.size,
    }


def _has_bf16(device: str) -> bool:
    import torch

    return device == "cpu" or torch.cuda.get_device_capability() >= (8, 0)


def _has_fp8(device: str) -> bool:
    import torch

    return device == "cuda" and torch.cuda.get_device_capability() >= (8, 9)


def time_in_graph(calls: Sequence[Call]) -> float:
    """Return the seconds of a call, as the median of replays of a CUDA graph of all of them."""
    import torch

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # Kernels compile and libraries choose before anything is captured.
        for call in calls:
            call()
        once_s = _replay(calls[0], 3)
    count = max(len(calls), min(_MAX_COPIES, math.ceil(_GRAPH_S / max(once_s, 1e-6))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in itertools.islice(itertools.cycle(calls), count):
            call()
    with torch.cuda.stream(stream):
        seconds = _replay(graph.replay, _REPLAYS)
    graph.reset()
    return seconds / count


def _replay(run: Call, times: int) -> float:
    """Return the median seconds of runs, after one that does not count."""
    import torch

    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(times)
    ]
    run()
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) * 1e-3 for begin, end in marks))
