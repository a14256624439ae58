"""Predicted against measured on an H200: encoders and diffusion blocks, their kernels alone and run eagerly.

The rows in `benchmarks/results/h200_components.csv` were taken with `benchmarks.h200_components`; no
constant is fitted on them. A chain is predicted as a planner would: `perf.components.batches`, on the clocks
of a GPU that is kept busy. `graph` is held against kernels alone, `eager` against what the planner says.

First with the constants that ship, whose attention is vLLM's, then (`own_`) with attention fitted to single
calls of the very kernel that the chains ran, as `h200_measure.py` measured it: what is left then is not its
speed.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from unittest import mock

import numpy as np

from atoll.catalog import Catalog
from atoll.catalog.media import EncoderSpec, GeneratorSpec
from atoll.catalog.models import ComponentSpec, ModelSpec
from atoll.core.graph import Component, ComponentGraph, ComponentKind
from atoll.engines.table import profile_engine
from atoll.perf.calibration import Accuracy, accuracy, fit, op_classes
from atoll.perf.components import batches
from atoll.perf.components import kernels as operators
from atoll.perf.components.kernels import Kernels
from atoll.perf.constants import (
    ConstantTable,
    OpClass,
    OpConstants,
    default_constants,
)
from atoll.perf.measurements import read_points
from atoll.workload.classes import ImageOutput, Images, RequestClass
from benchmarks.report import ROOT, Figure, finish

RESULTS = ROOT / "benchmarks" / "results"
PART = "part"
NO_HOST = batches.Host(request_s=0.0, megapixel_s=0.0)
"""Chains begin with pixels on the GPU."""
HOST_TIMES = ("_LAYER_S", "LAUNCH_S")
"""How the model's constants are called that say what a host needs to launch kernels."""
ATTENTION_FILE, ATTENTION = "h200_attention.csv", "sdpa_flash"
"""The attention that the chains ran (`attention` in `h200_components_meta.json`)."""
PATCH = 14
VIT = EncoderSpec(
    kind="vision",
    layers=24,
    hidden=1024,
    intermediate=4096,
    heads=16,
    output_dim=1024,
    rule="tiles",
    norm_bias=True,
    patch_size=PATCH,
    positions=1025,
    class_token=True,
    max_tiles=1,
    projector=(1024,),
)
"""ViT-L/14 up to its features: no projector."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured point: `seconds` of a whole chain of `layers`, text beside the tokens of each item."""

    chain: str
    mode: str
    batch: int
    tokens: int
    text: int
    layers: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Compared:
    """A measured point and what the model says, in seconds."""

    row: Row
    predicted_s: float

    @property
    def error(self) -> float:
        """How much too slow the prediction is, in per cent of what was measured."""
        return 100.0 * (self.predicted_s / self.row.seconds - 1.0)


def read_rows() -> list[Row]:
    """Return every measured point, in the order of the file."""
    with (RESULTS / "h200_components.csv").open(newline="", encoding="utf-8") as stream:
        return [
            Row(
                row["chain"],
                row["mode"],
                int(row["batch"]),
                int(row["tokens_per_item"]),
                int(row["text_tokens"]),
                int(row["layers"]),
                float(row["median_us"]) * 1e-6,
            )
            for row in csv.DictReader(stream)
        ]


@cache
def spec_of(chain: str) -> EncoderSpec | GeneratorSpec:
    """Return the shapes of a chain, from the catalog where it has them."""
    catalog = Catalog.default()
    found: ComponentSpec = {
        "vit-l-14": VIT,
        "internvit-6b": catalog.model("internvl3-38b").components["vision"],
        "qwen-image": catalog.model("qwen-image").components["dit"],
        "whisper-large": catalog.model("qwen2.5-omni-7b").components["audio"],
    }[chain]
    assert isinstance(found, EncoderSpec | GeneratorSpec)
    return found


def _model(spec: ComponentSpec) -> ModelSpec:
    kind = ComponentKind.ENCODER if isinstance(spec, EncoderSpec) else ComponentKind.GENERATOR
    graph = ComponentGraph((Component(PART, kind),))
    return ModelSpec("chain", (), None, "chain", graph, {PART: spec})


def _class(spec: EncoderSpec | GeneratorSpec, row: Row) -> RequestClass:
    """Requests of one image, tile, clip or picture to denoise once, as long as the row's items."""
    if isinstance(spec, GeneratorSpec):
        side = 16 * round(row.tokens**0.5)
        wanted = ImageOutput(width_px=side, height_px=side, steps=1)
        return RequestClass(
            name="text -> image", share=1.0, input_tokens=row.text, image_output=wanted
        )
    if spec.kind == "audio":
        return RequestClass(name="audio+text", share=1.0, audio_s=30.0)
    side = PATCH * round((row.tokens - 1) ** 0.5)
    return RequestClass(name="image+text", share=1.0, images=Images(width_px=side, height_px=side))


def planned_seconds(row: Row, kernels: Kernels) -> float:
    """Return what a planner takes a batch to take, layers launched one kernel after another.

    What stands around the layers drops out where the chain has none: the difference to twice as many.
    """
    spec = spec_of(row.chain)
    klass = _class(spec, row)

    def seconds(layers: int) -> float:
        sized: EncoderSpec | GeneratorSpec = replace(spec, layers=layers)
        room = row.batch * row.tokens
        if isinstance(sized, EncoderSpec) and sized.kind == "vision":
            assert klass.images is not None
            side = klass.images.width_px
            sized = replace(sized, image_size=side)
            room = row.batch * sized.image_tokens(side, side)
        elif isinstance(sized, EncoderSpec):
            room = row.batch * sized.audio_tokens(klass.audio_s or 0.0)
        times = batches.batch_time(
            _model(sized), PART, klass, kernels, max_tokens=room, host=NO_HOST
        )
        return times.seconds(row.batch)

    if row.chain == "vit-l-14":
        return seconds(row.layers)
    return seconds(2 * row.layers) - seconds(row.layers)


def kernel_seconds(row: Row, kernels: Kernels) -> float:
    """Return what the kernels of a chain are predicted to take, with no host behind them."""
    with ExitStack() as stack:
        for module in (batches, operators):
            for name in dir(module):
                if name.endswith(HOST_TIMES):
                    stack.enter_context(mock.patch.object(module, name, 0.0))
        return planned_seconds(row, kernels)


def with_own_attention() -> ConstantTable:
    """Return the constants that ship, attention fitted to the chains' kernel alone on such a card."""
    gpu = Catalog.default().gpu("H200")
    points = read_points(RESULTS / ATTENTION_FILE).of(impl=ATTENTION)
    found: dict[OpClass, OpConstants] = {
        op: fit(op, some, gpu, source=ATTENTION_FILE, hold_out=False).constants
        for op, some in op_classes(points)
        if op == OpClass.ATTENTION_PREFILL
    }
    table = default_constants()
    return table.with_gpus([table.gpu("H200").with_measured(found)])


def compare(constants: ConstantTable | None = None) -> list[Compared]:
    """Return every point in a CUDA graph and every eager one beside what the model says."""
    node = Catalog.default().node("H200:1")
    kernels = Kernels.of(node, 1, profile_engine("vllm", node.gpu), constants)
    predict = {"graph": kernel_seconds, "eager": planned_seconds}
    return [
        Compared(row, predict[row.mode](row, kernels)) for row in read_rows() if row.mode in predict
    ]


def errors(points: Iterable[Compared], mode: str, chain: str | None = None) -> Accuracy:
    """Return the errors of a mode, of one chain or of all."""
    chosen = [p for p in points if p.row.mode == mode and chain in (None, p.row.chain)]
    return accuracy(
        np.array([p.predicted_s for p in chosen]), np.array([p.row.seconds for p in chosen])
    )


def _key(point: Compared) -> tuple[str, int, int, int]:
    row = point.row
    return row.chain, row.batch, row.tokens, row.text


def show(points: list[Compared]) -> None:
    """Print every point: microseconds a layer, and how much too slow the prediction is."""
    eager = {_key(p): p for p in points if p.row.mode == "eager"}
    print(f"  {'chain, batch x tokens + text':36s} {'graph':>9s} {'model':>9s} {'%':>6s}", end="")
    print(f" {'eager':>9s} {'planned':>9s} {'%':>6s}   (us a layer)")
    for point in points:
        row = point.row
        if row.mode != "graph":
            continue
        cells = ""
        for p in (point, eager[_key(point)]):
            scale = 1e6 / row.layers
            cells += f" {scale * p.row.seconds:9.1f} {scale * p.predicted_s:9.1f} {p.error:+6.1f}"
        print(f"  {row.chain:14s} {row.batch:4d} x {row.tokens:4d} + {row.text:4d}     {cells}")


CHAINS = {
    "vit": "vit-l-14",
    "internvit": "internvit-6b",
    "dit": "qwen-image",
    "whisper": "whisper-large",
}


def main() -> None:
    """Compare and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    parser.parse_args()
    points = compare()
    show(points)
    own = compare(with_own_attention())
    figures = []
    print(f"  {'':32s} points   median      p95   (per cent)")
    for label, found, mode in (
        ("", points, "graph"),
        ("eager_", points, "eager"),
        ("own_", own, "graph"),
        ("own_eager_", own, "eager"),
    ):
        for short, chain in (*CHAINS.items(), ("all", None)):
            result = errors(found, mode, chain)
            name = f"{label}{short}"
            print(f"  {name:32s} {result.points:6d} {result.median:8.1f} {result.p95:8.1f}")
            figures += [Figure(f"{name}_median", result.median), Figure(f"{name}_p95", result.p95)]
    finish(figures)


if __name__ == "__main__":
    main()
