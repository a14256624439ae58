"""Energy of a step: what GPUs draw while they wait, move bytes and multiply.

    watts = min(limit, idle + byte_j x bytes/s + flop_j x FLOP/s)

The three were measured on an H200 by its energy counter: idle with an engine loaded and clocks up (127 W;
79 W with nothing loaded), a byte by copies and products with one row (104 pJ; 118 on another H200), an
operation by large products (0.81 pJ in 16 bits); not on steps of models, against which
`benchmarks.gpu_accuracy` holds them (stacks of layers, GPUs that work a share of the time, and whole steps
of an engine). Other GPUs draw, idle and at full memory or arithmetic rate, the same shares of their own
limit, which is a proxy. Only GPUs are counted: no CPUs, fans, power supplies or cooling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from atoll.catalog.gpus import GpuType
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import UsageError
from atoll.perf.batch import Batch
from atoll.perf.constants import Tag
from atoll.perf.layers import layer_kinds
from atoll.perf.step import StepModel, step_seconds

_MEASURED_GPU = "H200"
_IDLE_SHARE = 0.181
"""Of the limit: 127 of 700 W."""
_MEMORY_SHARE = 0.87
"""Of what is left of the limit, at the datasheet's bandwidth: 4.8 TB/s of 104 pJ each."""
_COMPUTE_SHARE = 1.40
"""The same at the peak of 989 TFLOPS, 0.81 pJ each: more than there is, so clocks go down."""


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Watts of one GPU that waits and the most it may draw; joules of a byte moved and of an operation."""

    idle_w: float
    limit_w: float
    byte_j: float
    flop_j: float
    tag: Tag

    def watts(self, bytes_per_s: float, flop_per_s: float) -> float:
        """Return what a GPU draws at these rates."""
        drawn = self.idle_w + self.byte_j * bytes_per_s + self.flop_j * flop_per_s
        return min(self.limit_w, drawn)


def power_model(gpu: GpuType) -> PowerModel:
    """Return the power model of a kind of GPU: measured on H200, its shares of the limit elsewhere."""
    idle_w = _IDLE_SHARE * gpu.tdp_w
    rest_w = gpu.tdp_w - idle_w
    return PowerModel(
        idle_w=idle_w,
        limit_w=gpu.tdp_w,
        byte_j=_MEMORY_SHARE * rest_w / gpu.bandwidth_bytes_per_s,
        flop_j=_COMPUTE_SHARE * rest_w / gpu.fp16_flops,
        tag=Tag.MEASURED if gpu.whole.name == _MEASURED_GPU else Tag.PROXY,
    )


@dataclass(frozen=True, slots=True)
class StepWork:
    """Bytes that a step reads and operations that it does, over all GPUs that share it."""

    moved_bytes: float
    flops: float


def step_work(spec: TransformerSpec, batch: Batch[float], start: int, end: int) -> StepWork:
    """Return the work of layers [start, end) with a batch: weights and KV cache read, products and attention.

    Activations are not counted: they stay in caches, or the step is bound by arithmetic. Of experts those
    count that tokens are expected to touch.
    """
    if not 0 <= start < end <= spec.layers:
        raise UsageError(f"layers [{start}, {end}) are not a range within 0 to {spec.layers}")
    kinds = layer_kinds(spec)
    moved = flops = 0.0
    prompts, sequences = batch.prefill_sequences, batch.decode_sequences
    for i in range(start, end):
        window = kinds[i].window
        moved += spec.layer_weight_bytes(i) - _untouched_bytes(spec, i, batch.tokens)
        flops += 2.0 * spec.layer_active_params(i) * batch.tokens
        keys = sequences * batch.decode_keys(window)
        moved += spec.kv_bytes_per_token_layer * (keys + batch.prefill_keys(window))
        flops += _pair_flops(spec, absorbed=False) * batch.pairs(window)
        flops += _pair_flops(spec, absorbed=True) * keys
        if window == 0:
            moved += 2.0 * spec.state_bytes_per_layer * (sequences + prompts)
    if end == spec.layers:
        moved += spec.head_bytes
        flops += 2.0 * spec.head_params * batch.outputs
    return StepWork(moved, flops)


def _untouched_bytes(spec: TransformerSpec, i: int, tokens: float) -> float:
    """Bytes of the experts of layer i that none of so many tokens is expected to use."""
    moe = spec.moe
    if moe is None or not spec.is_moe_layer(i):
        return 0.0
    untouched = moe.experts * math.pow(1.0 - moe.top_k / moe.experts, tokens)
    return untouched * spec.expert_bytes


def _pair_flops(spec: TransformerSpec, *, absorbed: bool) -> float:
    """Operations of one query with one key; `absorbed` is how latent attention decodes."""
    mla = spec.mla
    if mla is None:
        return 4.0 * spec.heads * spec.head_dim
    if absorbed:
        return 2.0 * spec.heads * (mla.latent_dim + mla.kv_rank)
    return 2.0 * spec.heads * (mla.query_dim + mla.v_dim)


def step_joules(model: StepModel, batch: Batch[float], start: int, end: int) -> float:
    """Return the energy in joules of one step of layers [start, end), over the GPUs that split a layer."""
    seconds = step_seconds(model, batch, start, end)
    batch = replace(batch, rows=float(model.engine.rows))
    work = step_work(model.spec, batch, start, end)
    each = model.tp * seconds
    watts = power_model(model.node.gpu).watts(work.moved_bytes / each, work.flops / each)
    return watts * each


def dynamic_joules(model: StepModel, batch: Batch[float], start: int, end: int) -> float:
    """Return what one step takes beside what its GPUs would draw in that time anyway, in joules."""
    seconds = step_seconds(model, batch, start, end)
    waiting_j = power_model(model.node.gpu).idle_w * model.tp * seconds
    return max(0.0, step_joules(model, batch, start, end) - waiting_j)


def min_dynamic_joules(models: Sequence[StepModel], rows: float) -> float:
    """Return what no step of up to `rows` tokens goes below, in joules per token, whatever runs where.

    `models` are ways to run the same layers; every layer takes the best of them. A token that passes a layer
    moves its part of the weights and multiplies them, unless GPUs at their limit draw less than that; then
    it takes at least its part of the time that the layer takes with all rows and next to no attention.
    Neither part grows with the rows of a step, and attention, the output matrix and host time only add.
    """
    spec = models[0].spec
    # Prompts of one token: as many rows, and hardly any attention.
    batch = Batch.prefill(rows, rows)
    min_joules = [math.inf] * spec.layers
    for model in models:
        power = power_model(model.node.gpu)
        seconds = model.parts(batch).layers
        indices = {kind: index for index, kind in enumerate(model.kinds)}
        kinds = layer_kinds(spec)
        for i in range(spec.layers):
            moved = spec.layer_weight_bytes(i) - _untouched_bytes(spec, i, rows)
            flops = 2.0 * spec.layer_active_params(i) * rows
            worked = power.byte_j * moved + power.flop_j * flops
            capped = (power.limit_w - power.idle_w) * model.tp * seconds[indices[kinds[i]]]
            min_joules[i] = min(min_joules[i], worked / rows, capped / rows)
    return sum(min_joules)
