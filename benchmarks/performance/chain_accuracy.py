"""Layers of encoders and diffusion blocks on an H200 (`h200_components.csv`), and what a planner reckons.

A chain is predicted as planners do: `perf.components.batches`, on the clocks of a GPU that is kept busy.
`graph` is held against kernels alone, `eager` against what the planner says, with the constants that ship,
whose attention is vLLM's. `own_` has attention fitted to single calls of the kernel that the chains ran: what
is left then is not its speed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from unittest import mock

from atoll.catalog import Catalog
from atoll.catalog.media import EncoderSpec, GeneratorSpec
from atoll.catalog.models import ComponentSpec, ModelSpec
from atoll.core.graph import Component, ComponentGraph, ComponentKind
from atoll.engines.table import profile_engine
from atoll.perf.calibration import fit, op_classes
from atoll.perf.components import batches
from atoll.perf.components import kernels as operators
from atoll.perf.components.kernels import Kernels
from atoll.perf.constants import ConstantTable, OpClass, OpConstants, default_constants
from atoll.perf.measurements import read_points
from atoll.workload.classes import ImageOutput, Images, RequestClass
from benchmarks.report import RESULTS

PART = "part"
NO_HOST = batches.Host(request_s=0.0, megapixel_s=0.0)
"""Chains begin with pixels on the GPU."""
HOST_TIMES = ("_LAYER_S", "LAUNCH_S")
"""How the model's constants are called that say what a host needs to launch kernels."""
ATTENTION = "sdpa_flash"
"""The attention that the chains ran (`attention` in `h200_components_meta.json`)."""
CHAINS = {
    "vit-l-14": "vit",
    "internvit-6b": "internvit",
    "qwen-image": "dit",
    "whisper-large": "whisper",
}
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
class ChainRow:
    """One measured point: `seconds` of a whole chain of `layers`, text beside the tokens of each item."""

    chain: str
    mode: str
    batch: int
    tokens: int
    text: int
    layers: int
    seconds: float


def read_chains() -> Iterator[ChainRow]:
    """Yield every measured point of a chain in a CUDA graph or run eagerly."""
    with (RESULTS / "h200_components.csv").open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            if row["mode"] in ("graph", "eager"):
                yield ChainRow(
                    chain=row["chain"],
                    mode=row["mode"],
                    batch=int(row["batch"]),
                    tokens=int(row["tokens_per_item"]),
                    text=int(row["text_tokens"]),
                    layers=int(row["layers"]),
                    seconds=1e-6 * float(row["median_us"]),
                )


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


def _class(spec: EncoderSpec | GeneratorSpec, row: ChainRow) -> RequestClass:
    """Return requests of one image, tile, clip or picture to denoise once, as long as the row's items."""
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


def planned_seconds(row: ChainRow, kernels: Kernels) -> float:
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


def kernel_seconds(row: ChainRow, kernels: Kernels) -> float:
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
    points = read_points(RESULTS / "h200_attention.csv").of(impl=ATTENTION)
    found: dict[OpClass, OpConstants] = {
        op: fit(op, some, gpu, source="h200_attention.csv", hold_out=False).constants
        for op, some in op_classes(points)
        if op == OpClass.ATTENTION_PREFILL
    }
    table = default_constants()
    return table.with_gpus([table.gpu("H200").with_measured(found)])


def compare() -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield by group what was measured and what is predicted, in seconds."""
    node = Catalog.default().node("H200:1")
    points = list(read_chains())
    for label, constants in (("", None), ("own_", with_own_attention())):
        kernels = Kernels.of(node, 1, profile_engine("vllm", node.gpu), constants)
        for row in points:
            predict = kernel_seconds if row.mode == "graph" else planned_seconds
            pair = (row.seconds, predict(row, kernels))
            yield f"{label}{row.mode}_{CHAINS[row.chain]}", pair
            yield f"{label}{row.mode}_chains", pair
