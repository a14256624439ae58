"""Measure layers of encoders and denoisers, convolutions, and the host that prepares pictures (eager, bf16).

    python3 benchmarks/component_measure.py > benchmarks/results/h200_components.csv        # on the GPU

Layers are plain ones with random weights in the shapes of the catalog's models, launched kernel by kernel as
engines run encoders: norm, QKV, two passes over queries and keys as a rotation takes, attention over
segments, output, scaling, sum, norm, MLP, scaling, sum. Milliseconds are medians for one layer, over six with
weights of their own. `component_accuracy` compares them with predictions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

COUNT = 6
SHAPES: dict[str, tuple[int, int, int, bool]] = {
    # hidden, MLP, heads, gated
    "internvit": (3200, 12800, 25, False),
    "qwen2.5-vision": (1280, 3420, 16, True),
    "whisper": (1280, 5120, 20, False),
    "mel-dit": (1024, 2048, 16, False),
}
CASES = {
    "internvit": [(tiles * 1025, 1025) for tiles in (1, 3, 7, 9, 13, 40)],
    "qwen2.5-vision": [
        (2368, 64),
        (2368, 2368),
        (8000, 64),
        (8000, 8000),
        (40000, 64),
        (40000, 2000),
    ],
    "whisper": [(400, 400), (1500, 1500), (12000, 1500)],
    "mel-dit": [(500, 500), (1000, 1000), (3000, 3000)],
}
STREAMS = [(1024, 500), (1024, 1000), (4096, 500), (16384, 500)]
CONVOLUTIONS = [(384, 64), (384, 128), (192, 256), (96, 512)]
PICTURES = [(784, 588, 1), (1920, 1080, 1), (700, 560, 20)]


def time_ms(torch: Any, call: Callable[[], Any], repeats: int = 7) -> float:
    """Return the median time of runs in milliseconds, launches included where they take longer."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def weight(torch: Any, rows: int, columns: int) -> Any:
    """Return random weights."""
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02


def run_layers(torch: Any, x: Any, layers: list[Any], segment: int, heads: int, gated: bool) -> Any:
    """Run plain layers over rows that attend within segments."""
    f, hidden = torch.nn.functional, x.shape[1]
    for qkv, out, up, down, scale in layers:
        y = f.linear(f.layer_norm(x, (hidden,), scale), qkv)
        q, k, v = (
            part.view(-1, segment, heads, hidden // heads).transpose(1, 2)
            for part in y.chunk(3, -1)
        )
        q, k = q * 0.5 + q.roll(1, -1), k * 0.5 + k.roll(1, -1)
        a = f.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, hidden)
        x = x + f.linear(a, out) * scale
        y = f.linear(f.layer_norm(x, (hidden,), scale), up)
        if gated:
            gate, wide = y.chunk(2, -1)
            y = f.silu(gate) * wide
        else:
            y = f.gelu(y)
        x = x + f.linear(y, down) * scale
    return x


def run_pairs(torch: Any, streams: list[Any], pairs: list[Any], step: Any) -> Any:
    """Run blocks of picture and text, each with weights of its own, that attend to each other."""
    f, hidden = torch.nn.functional, streams[0].shape[1]
    lengths = [len(x) for x in streams]
    for pair in pairs:
        mods, joint = [], []
        for x, layer in zip(streams, pair, strict=True):
            mod = f.linear(f.silu(step), layer[4]).chunk(6, -1)
            y = f.linear(f.layer_norm(x, (hidden,)) * (1 + mod[0]) + mod[1], layer[0])
            q, k, v = (part.view(1, -1, 24, 128).transpose(1, 2) for part in y.chunk(3, -1))
            q, k = f.rms_norm(q, (128,)), f.rms_norm(k, (128,))
            q, k = q * 0.5 + q.roll(1, -1), k * 0.5 + k.roll(1, -1)
            mods.append(mod)
            joint.append((q, k, v))
        q, k, v = (torch.cat([one[i] for one in joint], 2) for i in range(3))
        a = f.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, hidden)
        done = []
        for x, layer, mod, part in zip(streams, pair, mods, a.split(lengths), strict=True):
            y = x + mod[2] * f.linear(part, layer[1])
            h = f.layer_norm(y, (hidden,)) * (1 + mod[3]) + mod[4]
            done.append(y + mod[5] * f.linear(f.gelu(f.linear(h, layer[2])), layer[3]))
        streams = done
    return streams


def main() -> None:
    """Print one line for each case."""
    import numpy
    import torch

    torch.set_grad_enabled(False)
    print("case,rows,segment,ms")

    def show(case: str, rows: int, segment: int, ms: float) -> None:
        print(f"{case},{rows},{segment},{ms:.4f}", flush=True)

    for case, (hidden, inner, heads, gated) in SHAPES.items():
        sizes = ((3 * hidden, hidden), (hidden, hidden), ((1 + gated) * inner, hidden))
        layers = [
            [
                *(weight(torch, *size) for size in (*sizes, (hidden, inner))),
                torch.ones(hidden, device="cuda", dtype=torch.bfloat16),
            ]
            for _ in range(COUNT)
        ]
        for rows, segment in CASES[case]:
            x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
            run = partial(run_layers, torch, x, layers, segment, heads, gated)
            took = time_ms(torch, run)
            show(case, rows, segment, took / COUNT)
    hidden = 3072
    shapes = ((3, 1), (1, 1), (4, 1), (1, 4), (6, 1))
    pairs = [
        [[weight(torch, a * hidden, b * hidden) for a, b in shapes] for _ in range(2)]
        for _ in range(COUNT)
    ]
    step = weight(torch, 1, hidden)
    for picture, text in STREAMS:
        both = [weight(torch, picture, hidden), weight(torch, text, hidden)]
        took = time_ms(torch, partial(run_pairs, torch, both, pairs, step), 5)
        show("qwen-image-dit", picture, text, took / COUNT)
    for channels, side in CONVOLUTIONS:
        conv = torch.nn.Conv3d(channels, channels, 3, padding=(0, 1, 1)).cuda().bfloat16()
        shape = (1, channels, 3, side, side)
        x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        show("convolution", channels, side, time_ms(torch, partial(conv, x), 5))
    from transformers import Qwen2VLImageProcessor

    processor = Qwen2VLImageProcessor()
    rng = numpy.random.default_rng(0)
    for wide, high, frames in PICTURES:
        images = [rng.integers(0, 255, (high, wide, 3), dtype=numpy.uint8)] * frames
        for threads in (1, 8):
            torch.set_num_threads(threads)
            took = time_ms(torch, partial(processor, images, return_tensors="pt"), 3)
            show("host", wide * high * frames, threads, took)


if __name__ == "__main__":
    main()
