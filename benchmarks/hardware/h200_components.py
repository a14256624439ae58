"""Encoders and diffusion blocks on one GPU: how long chains of their layers take, and the host.

Four chains with random bf16 weights: a whole ViT-L/14 (patches to features), layers like InternViT-6B's,
dual-stream blocks like Qwen-Image's, and the layers of an encoder like Whisper large's. Needs torch,
nothing else. Run it where the GPU is (`--tiny`: small shapes on a CPU, as a test):

    python -m benchmarks.h200_components --out benchmarks/results

`h200_components.csv` has a row for every point and mode, times in microseconds:

    graph       kernels alone: one run replayed as a CUDA graph, timed with events
    eager       one run of plain modules from call to finished, the GPU idle before: what an engine
                that runs its encoders without graphs waits; less `graph`, it is host time that shows
    host        the part of `eager` until the call returns: what the host needs to launch everything
    end_to_end  ViT only: batches back to back, bytes of pixels copied from the host and normalised

Products of queries, keys and values are one; attention is `scaled_dot_product_attention` by the backend
asked for. Weights of a chain exceed the L2 cache, so they come from memory. `tokens_per_item` counts an
image, tile, latent or clip, the class token included; `text_tokens` are those beside it. Resizing and
decoding of images are not measured. `h200_components_meta.json` has versions, images/s and failures.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.hardware.h200_harness import (
    Bench,
    Call,
    Log,
    Table,
    gpu_state,
    nvidia_smi,
    relative_error,
)

COLUMNS = "chain,mode,batch,tokens_per_item,text_tokens,layers,median_us,p90_us,per_layer_us"
PATCH = 14  # pixels of a side
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
PIXEL_STATISTICS = ((123.0, 117.0, 104.0), (69.0, 67.0, 70.0))  # mean, deviation of each colour
TARGET_S = 0.4  # of runs a point and mode, within 5 to 40 of them
TOLERANCE = 5e-2  # relative difference allowed between attention backends after a whole chain
Rotation = Tensor  # complex, (positions, half a head)


@dataclass(frozen=True, slots=True)
class Chain:
    """Shapes of a chain of layers, and the points it is measured at."""

    name: str
    kind: str  # "vit": with patches and positions; "layers": of an encoder; "blocks": two streams
    hidden: int
    heads: int
    mlp: int
    layers: int
    tokens: tuple[int, ...]
    text: tuple[int, ...]
    batches: tuple[int, ...]
    rms: bool = False  # RMS norms, on queries and keys too; scaled branches; no bias on them

    @property
    def points(self) -> Iterator[tuple[int, int, int]]:
        """(tokens, text tokens, batch) of every point."""
        return ((n, t, b) for n in self.tokens for t in self.text for b in self.batches)

    def flop(self, tokens: int, text: int, batch: int) -> float:
        """Floating-point operations of linear layers and attention at a point."""
        length = tokens + text
        linear = 2.0 * length * self.hidden * (4 * self.hidden + 2 * self.mlp)
        return batch * self.layers * (linear + 4.0 * length**2 * self.hidden)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Everything that is measured; `rate_batch` images of the first chain give its images/s."""

    chains: tuple[Chain, ...]
    rate_batch: int


def vit_tokens(side: int) -> int:
    """Tokens of a square image of `side` pixels, the class token included."""
    return (side // PATCH) ** 2 + 1


VIT_TOKENS = tuple(vit_tokens(side) for side in (224, 336, 448, 896))
TILES = (1, 4, 9, 13, 32)
IMAGE_TOKENS = (1024, 4096)  # sides of 512 and 1024 pixels: a latent of an eighth, patches of two
FULL = Sweep(
    (
        Chain("vit-l-14", "vit", 1024, 16, 4096, 24, VIT_TOKENS, (0,), (1, 2, 4, 8, 16, 32, 64)),
        Chain("internvit-6b", "layers", 3200, 25, 12800, 4, (1025,), (0,), TILES, rms=True),
        Chain("qwen-image", "blocks", 3072, 24, 12288, 4, IMAGE_TOKENS, (128, 1024), (1, 2, 4, 8)),
        Chain("whisper-large", "layers", 1280, 20, 5120, 32, (1500,), (0,), (1, 4, 16)),
    ),
    rate_batch=32,
)
TINY = Sweep(
    (
        Chain("vit-l-14", "vit", 32, 2, 64, 2, (vit_tokens(28), vit_tokens(42)), (0,), (1, 2)),
        Chain("internvit-6b", "layers", 48, 3, 96, 2, (9,), (0,), (1, 3), rms=True),
        Chain("qwen-image", "blocks", 32, 2, 64, 2, (8, 16), (3, 5), (1, 2)),
        Chain("whisper-large", "layers", 32, 2, 64, 2, (11,), (0,), (1, 2)),
    ),
    rate_batch=2,
)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of (batch, tokens, heads, width of a head), heads joined in the result."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class EncoderLayer(nn.Module):
    """Attention over all tokens, then a GELU MLP, each on the normed input and added to it."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        hidden, self.heads = chain.hidden, chain.heads
        norm = partial(nn.RMSNorm, eps=1e-6) if chain.rms else nn.LayerNorm
        self.norm1, self.norm2 = norm(hidden), norm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=not chain.rms)
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, chain.mlp), nn.Linear(chain.mlp, hidden)
        self.scaled = chain.rms
        if chain.rms:
            self.q_norm, self.k_norm = norm(hidden), norm(hidden)
            self.scale1, self.scale2 = (nn.Parameter(torch.ones(hidden)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        if self.scaled:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in (q, k, v))
        y = self.out(attend(q, k, v))
        x = x + (y * self.scale1 if self.scaled else y)
        y = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + (y * self.scale2 if self.scaled else y)  # type: ignore[no-any-return]


class Vit(nn.Module):
    """Normalised pixels (batch, 3, side, side) to features (batch, tokens, hidden)."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * PATCH**2, chain.hidden, bias=False)
        self.first = nn.Parameter(torch.zeros(1, 1, chain.hidden))
        self.positions = nn.Parameter(torch.zeros(max(chain.tokens), chain.hidden))
        self.norm_in, self.norm_out = nn.LayerNorm(chain.hidden), nn.LayerNorm(chain.hidden)
        self.layers = nn.Sequential(*(EncoderLayer(chain) for _ in range(chain.layers)))

    def forward(self, pixels: Tensor) -> Tensor:
        batch, _, side, _ = pixels.shape
        count = side // PATCH  # patches side by side
        x = pixels.view(batch, 3, count, PATCH, count, PATCH).permute(0, 2, 4, 1, 3, 5)
        x = x.reshape(batch, count**2, 3 * PATCH**2)
        x = torch.cat([self.first.expand(batch, -1, -1), self.patches(x)], dim=1)
        x = self.norm_in(x + self.positions[: x.shape[1]])
        return self.norm_out(self.layers(x))  # type: ignore[no-any-return]


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotary positions on (batch, tokens, heads, width), as a complex product in fp32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation[:, None]).flatten(3).type_as(x)


class Stream(nn.Module):
    """One of a block's two streams: everything but the attention they share."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        hidden, self.heads = chain.hidden, chain.heads
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden))
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, elementwise_affine=False) for _ in "12")
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.q_norm, self.k_norm = (nn.RMSNorm(hidden // self.heads, eps=1e-6) for _ in "qk")
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, chain.mlp), nn.Linear(chain.mlp, hidden)

    def modulate(self, time_embedding: Tensor) -> tuple[Tensor, ...]:
        """Shift, scale and gate of attention, then those of the MLP, each (batch, 1, hidden)."""
        values: Tensor = self.modulation(time_embedding)
        return values.unsqueeze(1).chunk(6, dim=-1)

    def project(
        self, x: Tensor, shift: Tensor, scale: Tensor, rotation: Rotation
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values, each (batch, tokens, heads, width of a head)."""
        y = self.qkv(self.norm1(x) * (1 + scale) + shift)
        q, k, v = (z.unflatten(-1, (self.heads, -1)) for z in y.chunk(3, dim=-1))
        return rotate(self.q_norm(q), rotation), rotate(self.k_norm(k), rotation), v

    def finish(self, x: Tensor, attended: Tensor, modulation: Sequence[Tensor]) -> Tensor:
        """The stream after attention's result and the MLP are added through their gates."""
        gate1, shift, scale, gate2 = modulation
        x = x + gate1 * self.out(attended)
        y = self.up(self.norm2(x) * (1 + scale) + shift)
        return x + gate2 * self.down(functional.gelu(y, approximate="tanh"))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Text and image streams with weights of their own and one attention over both."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.text, self.image = Stream(chain), Stream(chain)

    def forward(
        self,
        text: Tensor,
        image: Tensor,
        time_embedding: Tensor,
        rotations: tuple[Rotation, Rotation],
    ) -> tuple[Tensor, Tensor]:
        text_shift, text_scale, *text_rest = self.text.modulate(time_embedding)
        image_shift, image_scale, *image_rest = self.image.modulate(time_embedding)
        of_text = self.text.project(text, text_shift, text_scale, rotations[0])
        of_image = self.image.project(image, image_shift, image_scale, rotations[1])
        joint = (torch.cat(pair, dim=1) for pair in zip(of_text, of_image, strict=True))
        to_text, to_image = attend(*joint).split([text.shape[1], image.shape[1]], dim=1)
        return (
            self.text.finish(text, to_text, text_rest),
            self.image.finish(image, to_image, image_rest),
        )


class Blocks(nn.Module):
    """Blocks one after another; returns the image's stream."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(chain) for _ in range(chain.layers))

    def forward(
        self,
        text: Tensor,
        image: Tensor,
        time_embedding: Tensor,
        rotations: tuple[Rotation, Rotation],
    ) -> Tensor:
        for block in self.blocks:
            text, image = block(text, image, time_embedding, rotations)
        return image


def build(chain: Chain) -> nn.Module:
    """The chain's modules, on torch's default device."""
    if chain.kind == "vit":
        return Vit(chain)
    if chain.kind == "blocks":
        return Blocks(chain)
    return nn.Sequential(*(EncoderLayer(chain) for _ in range(chain.layers)))


def load(chain: Chain, bench: Bench) -> nn.Module:
    """The chain on the bench's device with random weights that keep the size of activations."""
    with torch.device(bench.device):
        module = build(chain).to(bench.dtype).eval()
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.02)
    return module


def make_inputs(
    chain: Chain, bench: Bench, tokens: int, text: int, batch: int
) -> tuple[object, ...]:
    """Random arguments of the chain's modules at a point."""
    if chain.kind == "vit":
        side = PATCH * math.isqrt(tokens - 1)
        return (bench.randn(batch, 3, side, side),)
    image = bench.randn(batch, tokens, chain.hidden)
    if chain.kind == "layers":
        return (image,)
    half = chain.hidden // chain.heads // 2
    angles = torch.rand(text + tokens, half, device=bench.device) * 6.28
    turns = torch.polar(torch.ones_like(angles), angles)
    words, condition = bench.randn(batch, text, chain.hidden), bench.randn(batch, chain.hidden)
    return words, image, condition, (turns[:text], turns[text:])


def eager_times(bench: Bench, call: Call, target_s: float) -> tuple[list[float], list[float]]:
    """Seconds of each of 5 to 40 runs begun on an idle device: until finished, until launched."""
    done: list[float] = []
    launched: list[float] = []
    warm_up, count = 2, 5
    while len(done) < warm_up + count:
        bench.sync()
        start = time.perf_counter()
        call()
        launched.append(time.perf_counter() - start)
        bench.sync()
        done.append(time.perf_counter() - start)
        if len(done) == warm_up and not bench.dry:
            count = int(min(40, max(5, target_s / done[-1])))
    return done[warm_up:], launched[warm_up:]


def passes(bench: Bench, call: Call, target_s: float) -> list[float]:
    """Seconds a call takes when many are queued: one figure for each of five passes."""
    (once, *_), _ = eager_times(bench, call, 0.0)
    count = 1 if bench.dry else int(max(2, target_s / once))
    times = []
    for _ in range(5):
        bench.sync()
        start = time.perf_counter()
        for _ in range(count):
            call()
        bench.sync()
        times.append((time.perf_counter() - start) / count)
    return times


class Measurement:
    """The chains of a sweep at all their points."""

    def __init__(
        self, bench: Bench, log: Log, table: Table, sweep: Sweep, backend: SDPBackend
    ) -> None:
        self.bench, self.log, self.table = bench, log, table
        self.sweep, self.backend = sweep, backend

    def write(
        self, chain: Chain, mode: str, point: tuple[int, int, int], times: Sequence[float]
    ) -> float:
        """Add a row for these seconds; returns their median in us."""
        tokens, text, batch = point
        ordered = sorted(times)
        median_us = statistics.median(ordered) * 1e6
        p90_us = ordered[math.ceil(0.9 * len(ordered)) - 1] * 1e6
        shape = (chain.name, mode, batch, tokens, text, chain.layers)
        self.table.row(*shape, median_us, p90_us, median_us / chain.layers)
        return median_us

    def point(self, chain: Chain, module: nn.Module, point: tuple[int, int, int]) -> None:
        call = partial(module, *make_inputs(chain, self.bench, *point))
        if not bool(torch.isfinite(call()).all()):
            raise ValueError("the output is not finite")
        graph = self.write(chain, "graph", point, self.bench.sample([call], TARGET_S))
        done, launched = eager_times(self.bench, call, TARGET_S)
        eager = self.write(chain, "eager", point, done)
        host = self.write(chain, "host", point, launched)
        tokens, text, batch = point
        rate = chain.flop(*point) / graph * 1e-6
        line = f"{chain.name:14}{batch:4} x {tokens:4} +{text:5}{graph:12.1f}{eager:12.1f}"
        line += f"{host:11.1f}{eager - graph:11.1f}{rate:8.1f}"
        print(line, flush=True)

    def check(self, chain: Chain, module: nn.Module) -> None:
        """The smallest point by this backend against attention written out."""
        inputs = make_inputs(chain, self.bench, *next(chain.points))
        out = module(*inputs)
        with sdpa_kernel(SDPBackend.MATH):
            error = relative_error(out, module(*inputs))
        self.log.put("relative_error_to_math", chain.name, error)
        if not error < TOLERANCE:
            raise ValueError(f"relative error {error} to the math backend")

    def rate(self, chain: Chain, module: nn.Module, tokens: int) -> None:
        """Images/s of one size when batches follow each other."""
        bench, side, batch = self.bench, PATCH * math.isqrt(tokens - 1), self.sweep.rate_batch
        pixels = torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8)
        pixels = pixels if bench.dry else pixels.pin_memory()
        mean, deviation = (
            torch.tensor(values, dtype=bench.dtype, device=bench.device).view(3, 1, 1)
            for values in PIXEL_STATISTICS
        )

        def step() -> Tensor:
            x = pixels.to(bench.device, non_blocking=True).to(bench.dtype)
            return module((x - mean) / deviation)  # type: ignore[no-any-return]

        us = self.write(chain, "end_to_end", (tokens, 0, batch), passes(bench, step, TARGET_S))
        self.log.put("images_per_s", f"{side}px batch {batch}", batch / us * 1e6)

    def run(self, chain: Chain) -> None:
        """All of a chain's points; raises at last if one failed."""
        module = load(chain, self.bench)
        self.log.put("parameters", chain.name, sum(p.numel() for p in module.parameters()))
        with sdpa_kernel(self.backend):
            cases: list[tuple[str, Call]] = [("check", partial(self.check, chain, module))]
            cases += [(str(p), partial(self.point, chain, module, p)) for p in chain.points]
            if chain.kind == "vit":
                cases += [(f"rate {n}", partial(self.rate, chain, module, n)) for n in chain.tokens]
            self.bench.run_cases(chain.name, self.log, cases)


def cpu_name() -> str:
    """The host's processor as Linux names it, on which host time depends."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe(options: argparse.Namespace) -> dict[str, object]:
    """Date, versions, and the GPU as it is before."""
    found: dict[str, object] = {
        "date_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tiny": options.tiny,
        "attention": options.attention,
        "budget_s": options.budget_s,
        "python": platform.python_version(),
        "host_cpus": os.cpu_count(),
        "host_cpu": cpu_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": nvidia_smi(["driver_version"]).get("driver_version"),
        "nvidia_smi": {"before": gpu_state()},
        "errors": {},
        "case_errors": {},
        "cut_short": {},
    }
    if not options.tiny:
        found["gpu"] = torch.cuda.get_device_name()
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all chains and return 1 if anything failed or was left out for lack of time."""
    began = time.time()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--attention", choices=list(BACKENDS), default="flash", help="backend")
    parser.add_argument("--budget-s", type=float, default=200.0, help="begin nothing after this")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU, as a test")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "h200_components_meta.json"
    path.unlink(missing_ok=True)
    log = Log(path)
    log.data |= describe(options)
    log.save()
    bench = Bench(options.tiny, began + options.budget_s)
    sweep, backend = TINY if options.tiny else FULL, BACKENDS[options.attention]
    print("chain        batch x tokens+ text    graph us    eager us    host us  eager-gr. TFLOP/s")
    table = Table(options.out / "h200_components.csv", COLUMNS)
    with table.file, torch.inference_mode():
        measurement = Measurement(bench, log, table, sweep, backend)
        for chain in sweep.chains:
            start = time.time()
            try:
                measurement.run(chain)
            except Exception:  # noqa: BLE001 (recorded; the other chains go on)
                log.put("errors", chain.name, traceback.format_exc()[-3000:])
            log.put("seconds", chain.name, round(time.time() - start, 1))
            log.put("nvidia_smi", f"after_{chain.name}", gpu_state())
    for group in ("images_per_s", "relative_error_to_math", "seconds", "case_errors", "cut_short"):
        print(f"{group}: {log.data.get(group, {})}"[:1500])
    print(f"done in {time.time() - began:.0f} s", flush=True)
    return int(bool(log.data["errors"] or log.data["cut_short"]))


if __name__ == "__main__":
    sys.exit(main())
