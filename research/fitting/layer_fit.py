"""Fitting constants to measured whole layers, where no single-operator measurements exist.

A layer's time mixes matrix products, attention and passes, so only what the data can tell apart is
fitted: prefill fixes e_f of the products, small decode batches their e_b; launches and prefill attention
are assumed. The attention of the model fitted on has a bandwidth share of its own (`grouped_e_b`):
kernels of the time read grouped KV heads several times, and folding that into one constant would not
carry over to models without groups. What is kept for other models is that attention streams as well as
the products do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from atoll.catalog.nodes import AllReduceCost, NodeType
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import InputError, MissingDependencyError
from atoll.perf.batch import Batch
from atoll.perf.constants import PROXY_ERROR, GpuConstants, OpClass, OpConstants, Tag
from atoll.perf.layers import model_ops
from atoll.perf.measurements import Points
from atoll.perf.operators import Array

ELEMENTWISE = OpConstants(
    e_b=0.8, t0_us=3.0, tag=Tag.PROXY, source="typical streaming share and launch time"
)
MIN_POINTS = 8
"""Fewest layers of a phase that a fit accepts: fewer would say nothing, or follow their noise."""
_DECODE_T0_US = 20.0
_PRODUCT_T0_US = 8.0
_ATTENTION_SHARE = 0.1
"""Compute share of prefill attention over that of products. Whole layers tell neither it nor launches:
freed, both run to their bounds at hardly less error."""
_PREFILL_E_B = 0.4


@dataclass(frozen=True, slots=True)
class LayerConditions:
    """How the layers were measured: mean prompt length and mean decode context, in tokens."""

    prompt_tokens: float
    decode_context: float


@dataclass(frozen=True, slots=True)
class LayerFit:
    """What whole layers tell about a GPU."""

    products: OpConstants
    prefill_attention: OpConstants
    grouped_e_b: float

    def with_error(self, error: float) -> LayerFit:
        """Return the fit with the error that its predictions of layers have."""
        return replace(
            self,
            products=replace(self.products, error=error),
            # Layers hardly tell it.
            prefill_attention=replace(self.prefill_attention, error=max(error, PROXY_ERROR)),
        )

    def constants(self, gpu: str, *, grouped: bool) -> GpuConstants:
        """Return constants to predict layers with; `grouped` for a model fitted on, with KV groups."""
        share = self.grouped_e_b if grouped else self.products.e_b
        decode = OpConstants(
            e_b=share,
            t0_us=_DECODE_T0_US,
            error=self.products.error,
            tag=self.products.tag,
            source=self.products.source,
        )
        return GpuConstants(
            gpu,
            {
                OpClass.GEMM: self.products,
                OpClass.ATTENTION_PREFILL: self.prefill_attention,
                OpClass.ATTENTION_DECODE: decode,
                OpClass.ELEMENTWISE: ELEMENTWISE,
            },
        )


def predict_layers(
    spec: TransformerSpec,
    node: NodeType,
    constants: GpuConstants,
    points: Points,
    conditions: LayerConditions,
) -> Array:
    """Return predicted seconds of one layer for measured points of both kinds."""
    layer = model_ops(spec, node, node.count, constants).layers[0]
    tokens = points.sizes["tokens_in_batch"]
    zero = np.zeros_like(tokens)
    prompts = np.maximum(tokens / conditions.prompt_tokens, 1.0)
    prefill = layer.seconds(Batch(tokens, prompts, zero, zero, zero))
    decode = layer.seconds(Batch(zero, zero, zero, tokens, zero + conditions.decode_context))
    return np.where(points.labels["kind"] == "prefill", prefill, decode)


def fit_gpu(
    spec: TransformerSpec,
    node: NodeType,
    points: Points,
    conditions: LayerConditions,
    *,
    source: str,
) -> LayerFit:
    """Fit a single-GPU node to measured layers of one model, some of either phase."""
    _check_enough(points, node)

    def build(x: Array) -> LayerFit:
        e_f, e_b, p, grouped = (float(v) for v in x)
        attention = float(f"{_ATTENTION_SHARE * e_f:.5g}")
        base = OpConstants(tag=Tag.LAYER_FITTED, source=source)
        return LayerFit(
            replace(base, e_f=e_f, e_b=e_b, p=p, t0_us=_PRODUCT_T0_US),
            replace(base, e_f=attention, e_b=_PREFILL_E_B, t0_us=10.0, p=1.1),
            grouped,
        )

    def predict(x: Array) -> Array:
        constants = build(x).constants(node.gpu.name, grouped=True)
        return predict_layers(spec, node, constants, points, conditions)

    # p = 1 adds the times of both limits, which is as slow as it gets.
    #        e_f   e_b   p     grouped
    start = (0.50, 0.80, 2.0, 0.50)
    low = (0.05, 0.30, 1.0, 0.05)
    high = (1.30, 1.30, 12.0, 1.50)
    return build(_least_squares(predict, points, start, low, high))


def fit_all_reduce(
    spec: TransformerSpec,
    node: NodeType,
    constants: GpuConstants,
    points: Points,
    conditions: LayerConditions,
) -> AllReduceCost:
    """Fit the all-reduce of a node with several GPUs to measured layers, its GPUs known."""
    _check_enough(points, node)

    def build(x: Array) -> AllReduceCost:
        alpha, bus = (float(v) for v in x)
        return AllReduceCost(alpha, bus)

    def predict(x: Array) -> Array:
        link = replace(node.interconnect, allreduce={node.count: build(x)})
        trial = NodeType(node.gpu, node.count, link)
        return predict_layers(spec, trial, constants, points, conditions)

    bounds = (20.0, 5e9), (2.0, 2e8), (500.0, 1e11)
    return build(_least_squares(predict, points, *bounds))


def _check_enough(points: Points, node: NodeType) -> None:
    for phase in ("prefill", "decode"):
        count = int(np.sum(points.labels["kind"] == phase))
        if count < MIN_POINTS:
            raise InputError(
                f"{count} layers of {phase} on {node.id} are too few to fit",
                hint=f"measure at least {MIN_POINTS} of each phase",
            )


def _least_squares(
    predict: Callable[[Array], Array],
    points: Points,
    start: tuple[float, ...],
    low: tuple[float, ...],
    high: tuple[float, ...],
) -> Array:
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise MissingDependencyError("scipy", "calibrate") from error
    # Both phases weigh the same however many points each has.
    kind = points.labels["kind"]
    weight = np.ones(len(points))
    for name in set(kind.tolist()):
        weight[kind == name] = 1.0 / np.sqrt(np.sum(kind == name))
    target = np.log(points.seconds)
    best = least_squares(
        lambda x: (np.log(predict(np.exp(x))) - target) * weight,
        np.log(start),
        bounds=(np.log(low), np.log(high)),
        loss="soft_l1",
        f_scale=0.02,
    )
    # As the file will hold them, so that errors are reported for what is shipped.
    return np.array([float(f"{value:.5g}") for value in np.exp(best.x)])
