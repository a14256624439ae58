"""A transformer cut for tensor parallelism: the operators of its layers on one GPU of a node."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from atoll.catalog.gpus import GpuType
from atoll.catalog.nodes import NodeType
from atoll.catalog.transformer import DeltaSpec, DType, MlaSpec, TransformerSpec
from atoll.perf import operators
from atoll.perf.batch import Batch
from atoll.perf.constants import (
    PROXY_ERROR,
    ConstantTable,
    GpuConstants,
    OpClass,
    OpConstants,
    OpSpeed,
    Tag,
    expert_class,
    peak_flops,
    product_class,
)
from atoll.perf.operators import (
    AllReduce,
    DecodeAttention,
    GroupedExperts,
    Num,
    PrefillAttention,
    Roofline,
    Stream,
)

_VOCAB_ROWS = 64
"""vLLM and SGLang pad embedding and output matrix to a multiple of so many rows."""


UNPACKED_PER_SM = 26e9
"""Weights per second that an SM unpacks where 4 bits are emulated (Marlin). Qwen3-14B in AWQ on an H200, vLLM
0.22.1, took 6.0 to 6.3 ms a token alone, of which all but the reading of weights takes 2; at the rate of
memory 13.2e9 weights would take 1.7. One server: small GPUs are slower at reading than at this."""
_UNPACKED = ("int4", "nvfp4", "mxfp4")


class LayerKind(NamedTuple):
    """Layers of one kind take the same time: same attention window, same kind of MLP, weights stored alike.

    `wide` ones have their matrices in 16 bits where those of others are quantised. Window 0 is a layer of
    the gated delta rule, which keeps a state and no tokens. A layer that attends within
    chunks has the chunk for its window: it keeps no more, and what it reads is bounded by it.
    """

    window: int | None
    moe: bool
    wide: bool = False


@lru_cache(maxsize=256)
def layer_kinds(spec: TransformerSpec) -> tuple[LayerKind, ...]:
    """Return the kind of every layer, first to last."""
    wide = spec.wide_layers
    return tuple(
        LayerKind(spec.windows[i], spec.is_moe_layer(i), i in wide) for i in range(spec.layers)
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """Sizes of one GPU's share when a layer is split over `tp` GPUs, uneven shares rounded up.

    KV heads are copied where there are fewer than GPUs; so is the latent of MLA, its one KV head.
    """

    tp: int
    heads: int
    kv_heads: int
    intermediate: int
    expert_intermediate: int
    shared_intermediate: int
    vocab: int

    @classmethod
    def of(cls, spec: TransformerSpec, tp: int) -> Shard:
        """Return the share of each of `tp` GPUs."""
        moe = spec.moe
        return cls(
            tp=tp,
            heads=math.ceil(spec.heads / tp),
            kv_heads=math.ceil(spec.kv_heads / tp),
            intermediate=math.ceil(spec.intermediate / tp),
            expert_intermediate=math.ceil(moe.intermediate / tp) if moe else 0,
            shared_intermediate=math.ceil(moe.shared_intermediate / tp) if moe else 0,
            vocab=math.ceil(padded_vocab(spec) / tp),
        )


def padded_vocab(spec: TransformerSpec) -> int:
    """Return the rows of embedding and output matrix as engines hold them: a multiple of 64."""
    return math.ceil(spec.vocab / _VOCAB_ROWS) * _VOCAB_ROWS


@lru_cache(maxsize=256)
def as_held(spec: TransformerSpec, tp: int) -> TransformerSpec:
    """Return the model as `tp` GPUs hold it together: shares rounded up, KV heads copied, rows padded."""
    if tp == 1:
        return spec if spec.vocab == padded_vocab(spec) else replace(spec, vocab=padded_vocab(spec))
    shard = Shard.of(spec, tp)
    moe = spec.moe
    mla = spec.mla
    return replace(
        spec,
        kv_heads=shard.kv_heads * tp if mla is None else 1,
        mla=mla and replace(mla, copies=tp),
        intermediate=shard.intermediate * tp,
        vocab=shard.vocab * tp,
        moe=moe
        and replace(
            moe,
            intermediate=shard.expert_intermediate * tp,
            shared_intermediate=shard.shared_intermediate * tp,
        ),
    )


def splits_evenly(spec: TransformerSpec, tp: int) -> bool:
    """Return whether engines can split the model over `tp` GPUs: whole heads each, KV heads copied evenly."""
    if spec.delta is not None and spec.delta.key_heads % tp:
        return False
    return spec.heads % tp == 0 and (spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0)


Split = int | Literal["all"] | None
"""GPUs of a node that split a layer: so many, all of them, or as is best."""


@lru_cache(maxsize=1024)
def tp_sizes(spec: TransformerSpec, gpus: int) -> tuple[int, ...]:
    """Return, ascending, over how many GPUs each layer can be split on a node of so many: 1 always.

    Each divides the node and the model evenly. A node of n GPUs holds n / size copies of its layers side by
    side; which size carries most depends on the role, the layers and the promise.
    """
    sizes = (size for size in range(1, gpus + 1) if gpus % size == 0)
    return tuple(size for size in sizes if size == 1 or splits_evenly(spec, size))


def node_splits(spec: TransformerSpec, node: NodeType) -> tuple[int, ...]:
    """Return `tp_sizes` of a node; shares of a GPU take turns, and split no layer between them."""
    return tp_sizes(spec, node.count) if node.gpu.shares == 1 else (1,)


def default_tp(spec: TransformerSpec, node: NodeType) -> int:
    """Return the largest of `node_splits`: it holds most and answers soonest, and often carries less."""
    return node_splits(spec, node)[-1]


@dataclass(frozen=True, slots=True)
class LayerOps:
    """The operators of one layer of one kind on one GPU; `seconds` adds them up for a batch.

    `state_tokens` is what a sequence keeps whatever its length, in tokens of KV cache of as many bytes.
    """

    window: int | None
    dense: tuple[Roofline, ...]
    elementwise: Stream
    prefill: PrefillAttention
    decode: DecodeAttention
    experts: GroupedExperts | None
    all_reduce: AllReduce | None
    state_tokens: float = 0.0

    def seconds(self, batch: Batch[Num]) -> Num:
        """Return the time of one layer in seconds. The batch must hold at least one token."""
        m = batch.tokens
        total = self.elementwise.seconds(m)
        for op in self.dense:
            total = total + op.seconds(m)
        if self.experts is not None:
            total = total + self.experts.seconds(m)
        if self.all_reduce is not None:
            total = total + 2.0 * self.all_reduce.seconds(m)
        return total + self.attention_seconds(batch)

    def attention_seconds(self, batch: Batch[Num]) -> Num:
        """Return the time of attention alone; a part of the batch that is empty takes none."""
        prompts, sequences = batch.prefill_tokens, batch.decode_sequences
        if isinstance(prompts, float):
            total = self._prefill_seconds(batch) if prompts > 0.0 else 0.0
            return total + self._decode_seconds(batch) if sequences > 0.0 else total
        return self._prefill_seconds(batch) * (prompts > 0.0) + self._decode_seconds(batch) * (
            sequences > 0.0
        )

    def _prefill_seconds(self, batch: Batch[Num]) -> Num:
        window = self.window
        return self.prefill.seconds(
            batch.pairs(window),
            batch.prefill_tokens,
            batch.prefill_keys(window),
            batch.longest(window),
        )

    def _decode_seconds(self, batch: Batch[Num]) -> Num:
        return self.decode.seconds(batch.decode_sequences, batch.decode_keys(self.window))


def op_classes_of(spec: TransformerSpec, gpu: GpuType) -> tuple[OpClass, ...]:
    """Return the operator classes whose constants the time of a model on a GPU rests on.

    The output matrix and a router stay wide where a quantiser narrows the rest, and count too.
    """
    dtypes = {spec.attention_dtype, spec.embedding_dtype}
    if spec.moe is None or spec.moe.dense_layers or spec.moe.shared_intermediate:
        dtypes.add(spec.mlp_dtype)
    if spec.moe is not None or spec.wide_layers:
        dtypes.add(spec.activation_dtype)
    used = {OpClass.ATTENTION_PREFILL, OpClass.ATTENTION_DECODE}
    used |= {product_class(d.name, gpu) for d in dtypes}
    if spec.moe is not None:
        used.add(expert_class(spec.expert_dtype, gpu))
    return tuple(op for op in OpClass if op in used)


def name_grounds(
    spec: TransformerSpec,
    gpu: GpuType,
    constants: GpuConstants,
    *,
    guessed: bool = False,
    spread: bool = False,
) -> GpuConstants:
    """Return the constants with the tags they deserve for this model; the values stay.

    Kernels of latent attention and of the delta rule were not measured, nor those that check tokens which
    were `guessed`: they are priced with constants of relatives, which is what a proxy is.
    """
    lent: dict[OpClass, str] = {}
    if guessed:
        lent[OpClass.ATTENTION_DECODE] = f"{gpu.name}'s kernels of one query for several"
    if spread and spec.moe is not None:
        lent[expert_class(spec.expert_dtype, gpu)] = f"{gpu.name}'s experts on one GPU for several"
    if spec.mla is not None or spec.delta is not None:
        what = "latent attention" if spec.mla is not None else "gated delta rule"
        source = f"{gpu.name}'s grouped-query kernels for {what}"
        lent |= dict.fromkeys((OpClass.ATTENTION_PREFILL, OpClass.ATTENTION_DECODE), source)
    changed: dict[OpClass, OpConstants] = {}
    for op, source in lent.items():
        own = constants.op(op)
        error = max(own.error, PROXY_ERROR)
        changed[op] = replace(own, tag=Tag.PROXY, source=source, error=error)
    return replace(constants, ops={**constants.ops, **changed}) if lent else constants


def ground_constants(
    table: ConstantTable,
    specs: Iterable[TransformerSpec],
    gpus: Iterable[GpuType],
    *,
    guessed: bool = False,
    spread: bool = False,
) -> ConstantTable:
    """Return a table whose constants are as unsure as `name_grounds` says they are for any of the models."""
    known = {gpu.name: (gpu, table.for_gpu(gpu)) for gpu in gpus}
    for spec in specs:
        known = {
            name: (gpu, name_grounds(spec, gpu, fitted, guessed=guessed, spread=spread))
            for name, (gpu, fitted) in known.items()
        }
    return table.with_gpus(fitted for _, fitted in known.values())


class _Factory:
    """Builds operators for one GPU from its facts and constants."""

    def __init__(
        self,
        gpu: GpuType,
        constants: GpuConstants,
        formats: Mapping[str, float] | None = None,
        *,
        mxfp8: bool = False,
        queries: float = 1.0,
    ) -> None:
        self._queries = queries
        self._gpu = gpu
        self._constants = constants
        self._formats = formats or {}
        self._mxfp8 = mxfp8
        self._speeds: dict[OpClass, OpSpeed] = {}

    def _speed(self, op: OpClass) -> OpSpeed:
        """Return the speed of operators of a class."""
        found = self._speeds.get(op)
        if found is None:
            gpu, c = self._gpu, self._constants.op(op)
            found = c.speed(peak_flops(op, gpu), gpu.bandwidth_bytes_per_s)
            self._speeds[op] = found
        return found

    def _speed_of(self, op: OpClass, dtype: DType) -> OpSpeed:
        """Return the speed of products with weights of a format."""
        speed, share = self._speed(op), self._formats.get(dtype.name, 1.0)
        return (
            speed if share == 1.0 else replace(speed, e_f=speed.e_f * share, e_b=speed.e_b * share)
        )

    def gemm(self, n: float, k: float, dtype: DType) -> Roofline:
        """Return a product with (k, n) weights."""
        kind = product_class(dtype.name, self._gpu)
        c = self._constants.op(kind)
        speed = self._speed_of(kind, dtype)
        weight_bytes = dtype.bytes_per_weight
        if kind is OpClass.GEMM and dtype.name in _UNPACKED:
            unpacked_per_s = UNPACKED_PER_SM * self._gpu.sms
            weight_bytes = max(weight_bytes, speed.bytes_per_s / unpacked_per_s)
        return operators.gemm(
            n,
            k,
            speed,
            weight_bytes=weight_bytes,
            pad_k=c.pad_k,
            pad_n=c.pad_n,
        )

    def experts(
        self, hidden: int, inner: int, experts: int, top_k: int, dtype: DType
    ) -> GroupedExperts:
        """Return the routed experts of a layer.

        MXFP4 weights with activations in MXFP8 are native on GPUs with cores for 4 bits. Kernels reach the
        shares of those with NVFP4, of the arithmetic in 8 bits: 0.35 ms for 1,024 tokens of gpt-oss-120b on a
        B200, 1.11 for 8,192, where TensorRT-LLM's tables say 0.39 and 1.05 (aiconfigurator-core 0.12.0).
        """
        kind = expert_class(dtype, self._gpu)
        native = self._mxfp8 and dtype.name == "mxfp4" and self._gpu.fp4_flops is not None
        if native:
            kind = OpClass.EXPERTS_FP4
        speed = self._speed_of(kind, dtype)
        if native:
            speed = replace(speed, peak=peak_flops(OpClass.EXPERTS_FP8, self._gpu))
        c = self._constants.op(kind)
        return operators.grouped_experts(
            hidden,
            inner,
            experts,
            top_k,
            speed,
            weight_bytes=dtype.bytes_per_weight,
            pad=c.pad,
            pad_k=c.pad_k,
            pad_n=c.pad_n,
        )

    def attention(
        self, heads: int, kv_heads: int, head_dim: int, kv: DType
    ) -> tuple[PrefillAttention, DecodeAttention]:
        """Return prefill and decode attention of one layer.

        A cache of 8 bits is half as large, but its kernels are not twice as fast on all GPUs.
        """
        narrow = kv.bits_per_weight < 16
        c = self._constants.op(OpClass.ATTENTION_PREFILL)
        d = self._constants.op(OpClass.ATTENTION_DECODE)
        prompts = self._speed(OpClass.ATTENTION_PREFILL)
        answers = self._speed(OpClass.ATTENTION_DECODE)
        if narrow:
            prompts = replace(prompts, e_f=c.e_f / c.kv8, t0_s=c.t0_s * c.kv8_t0)
            answers = replace(answers, t0_s=d.t0_s * d.kv8_t0)
        prefill = operators.prefill_attention(
            heads,
            kv_heads,
            head_dim,
            prompts,
            kv_bytes=kv.bytes_per_weight,
            serial_ns=c.serial_ns,
        )
        decode = operators.decode_attention(
            heads,
            kv_heads,
            head_dim,
            answers,
            kv_bytes=kv.bytes_per_weight * (d.kv8 if narrow else 1.0),
            pad=d.pad,
            serial_ns=d.serial_ns,
            queries=self._queries,
        )
        return prefill, decode

    def latent_attention(
        self, heads: int, mla: MlaSpec, kv: DType
    ) -> tuple[PrefillAttention, DecodeAttention]:
        """Return prefill and decode attention of one layer with a latent KV cache."""
        c = self._constants.op(OpClass.ATTENTION_PREFILL)
        d = self._constants.op(OpClass.ATTENTION_DECODE)
        prefill = operators.latent_prefill(
            heads,
            self._speed(OpClass.ATTENTION_PREFILL),
            kv_rank=mla.kv_rank,
            nope_dim=mla.nope_dim,
            rope_dim=mla.rope_dim,
            v_dim=mla.v_dim,
            serial_ns=c.serial_ns,
        )
        decode = operators.latent_decode(
            heads,
            replace(self._speed(OpClass.ATTENTION_DECODE), e_f=c.e_f),
            kv_rank=mla.kv_rank,
            rope_dim=mla.rope_dim,
            kv_bytes=kv.bytes_per_weight * (d.kv8 if kv.bits_per_weight < 16 else 1.0),
            pad=d.pad,
            queries=self._queries,
        )
        return prefill, decode

    def delta_rule(
        self, delta: DeltaSpec, tp: int, state_bytes: float
    ) -> tuple[PrefillAttention, DecodeAttention]:
        """Return prefill and decode of one layer of the gated delta rule, its heads split over `tp` GPUs."""
        channels = delta.channels / tp
        prefill = operators.delta_prefill(
            delta.value_heads / tp,
            delta.key_dim,
            delta.value_dim,
            self._speed(OpClass.ATTENTION_PREFILL),
            channels=channels,
        )
        decode = operators.delta_decode(
            state_bytes / tp,
            channels,
            self._speed(OpClass.ATTENTION_DECODE),
            self._queries,
        )
        return prefill, decode

    def elementwise(self, elements: float) -> Stream:
        """Return a pass that touches this many activations per token."""
        return operators.elementwise(elements, self._speed(OpClass.ELEMENTWISE))


@dataclass(frozen=True, slots=True)
class ModelOps:
    """All operators of a model on one GPU of a tensor-parallel group of `tp`."""

    kinds: tuple[LayerKind, ...]
    layers: tuple[LayerOps, ...]
    embedding: Stream
    embedding_all_reduce: AllReduce | None
    head: Roofline
    gather: AllReduce | None

    def embedding_seconds(self, batch: Batch[Num]) -> Num:
        """Return the time of the embedding look-up in seconds."""
        total = self.embedding.seconds(batch.tokens)
        if self.embedding_all_reduce is not None:
            total = total + self.embedding_all_reduce.seconds(batch.tokens)
        return total

    def head_seconds(self, batch: Batch[Num]) -> Num:
        """Return the time of the output matrix in seconds, its shares gathered."""
        total = self.head.seconds(batch.outputs)
        if self.gather is not None:
            total = total + self.gather.seconds(batch.outputs)
        return total


def model_ops(
    spec: TransformerSpec,
    node: NodeType,
    tp: int,
    constants: GpuConstants,
    *,
    fused: bool = False,
    formats: Mapping[str, float] | None = None,
    mxfp8: bool = False,
    queries: float = 1.0,
    ranks: int | None = None,
) -> ModelOps:
    """Return the operators of `spec` on each of `tp` GPUs of `node`.

    `formats` are shares of speed that products reach with weights of a number format, 1 where it has none.
    With `mxfp8` experts in MXFP4 compute in MXFP8 where the GPU can. Decoding sequences have so many
    `queries` each in a step.

    With `ranks` that many copies of the layers side by side share their experts, which lie whole on the
    GPUs of all: what all ranks have is gathered before the experts and summed and dealt out after them,
    which takes as long as a sum over all GPUs.

    A layer is: norm, QKV product, attention, output product, sum over GPUs, norm, MLP up, activation,
    MLP down, sum over GPUs. Norms include the residual addition (two reads and two writes); rotary
    embedding and KV writes are part of the fused attention prologue and not counted apart. With `fused` sums
    over GPUs and norms are one kernel (`fuses`). What lies between the norms, attention
    of one kind or another, is `_mixers`.
    """
    make = _Factory(node.gpu, constants, formats, mxfp8=mxfp8, queries=queries)
    shard = Shard.of(spec, tp)
    reduce = _all_reduce(spec.hidden, node, tp, constants.links)
    whole = spec.with_weights(spec.activation_dtype) if spec.wide_layers else spec
    stored = {False: spec, True: whole}
    mixers = {wide: _mixers(each, shard, make) for wide, each in stored.items()}
    norm = make.elementwise(4.0 * spec.hidden)
    summed = reduce
    if fused and reduce is not None:
        # One launch, and none of the sizes between latency and bandwidth that are slow on their own.
        norm, summed = replace(norm, t0_s=0.0), replace(reduce, p=1.0)
    kinds = layer_kinds(spec)
    distinct = tuple(dict.fromkeys(kinds))
    layers = []
    for kind in distinct:
        inner = shard.shared_intermediate if kind.moe else shard.intermediate
        mixer = mixers[kind.wide][kind.window == 0]
        dense = mixer.products
        passes = norm + norm
        experts = None
        if inner:
            ups = 2 if spec.gated_mlp else 1
            dense += (
                make.gemm(ups * inner, spec.hidden, stored[kind.wide].mlp_dtype),
                make.gemm(spec.hidden, inner, stored[kind.wide].mlp_dtype),
            )
            passes = passes + make.elementwise((ups + 1.0) * inner)
        if kind.moe and spec.moe is not None:
            dense += (make.gemm(spec.moe.experts, spec.hidden, spec.activation_dtype),)
            inner = shard.expert_intermediate if ranks is None else spec.moe.intermediate
            experts = make.experts(
                spec.hidden,
                inner,
                spec.moe.experts,
                spec.moe.top_k,
                stored[kind.wide].expert_dtype,
            )
            if ranks is not None:
                experts = operators.spread_experts(experts, tp, ranks)
        layers.append(
            LayerOps(
                window=kind.window,
                dense=dense,
                elementwise=passes,
                prefill=mixer.prefill,
                decode=mixer.decode,
                experts=experts,
                all_reduce=_exchange(summed, spec.hidden, node, tp, ranks, constants.links)
                if experts is not None and ranks is not None
                else summed,
                state_tokens=mixer.state_tokens,
            )
        )
    return ModelOps(
        kinds=distinct,
        layers=tuple(layers),
        embedding=make.elementwise(2.0 * spec.hidden),
        embedding_all_reduce=reduce,
        head=make.gemm(shard.vocab, spec.hidden, spec.embedding_dtype),
        # Half an all-reduce: logits are collected on one GPU and not sent back.
        gather=_all_reduce(spec.vocab / 2.0, node, tp, constants.links),
    )


class _Mixer(NamedTuple):
    """The token mixer of a layer: its products, and attention or what stands in for it."""

    products: tuple[Roofline, ...]
    prefill: PrefillAttention
    decode: DecodeAttention
    state_tokens: float = 0.0


def _mixers(spec: TransformerSpec, shard: Shard, make: _Factory) -> dict[bool, _Mixer]:
    """Return the mixer of layers with attention (False) and of those of the delta rule (True, if any)."""
    dtype, hidden = spec.attention_dtype, spec.hidden
    products: tuple[Roofline, ...]
    if spec.mla is None:
        q, kv = shard.heads * spec.head_dim, shard.kv_heads * spec.head_dim
        wide = (2 if spec.attention_gate else 1) * q + 2 * kv
        products = (make.gemm(wide, hidden, dtype), make.gemm(hidden, q, dtype))
        attention = make.attention(shard.heads, shard.kv_heads, spec.head_dim, spec.kv_dtype)
    else:
        mla = spec.mla
        # Both latents come from one product, which every GPU does whole.
        down = mla.q_rank + mla.latent_dim
        up = shard.heads * mla.query_dim
        products = (
            make.gemm(down, hidden, dtype),
            make.gemm(up, mla.q_rank or hidden, dtype),
            make.gemm(shard.heads * (mla.nope_dim + mla.v_dim), mla.kv_rank, dtype),
            make.gemm(hidden, shard.heads * mla.v_dim, dtype),
        )
        attention = make.latent_attention(shard.heads, mla, spec.kv_dtype)
    mixers = {False: _Mixer(products, *attention)}
    if spec.delta is not None:
        delta, tp = spec.delta, shard.tp
        inner = math.ceil(delta.value_heads * delta.value_dim / tp)
        wide = math.ceil(delta.channels / tp) + inner
        mixers[True] = _Mixer(
            (
                make.gemm(wide, hidden, dtype),
                make.gemm(math.ceil(2 * delta.value_heads / tp), hidden, spec.activation_dtype),
                make.gemm(hidden, inner, dtype),
            ),
            *make.delta_rule(delta, tp, spec.state_bytes_per_layer),
            state_tokens=spec.state_bytes_per_layer / spec.kv_bytes_per_token_layer,
        )
    return mixers


def fuses(node: NodeType, tp: int, *, widely: bool = False) -> bool:
    """Return whether engines sum over GPUs and normalise in one kernel: on Blackwell's NVLink, up to four.

    Over eight GPUs FlashInfer's kernel takes batches of a few dozen rows only. TensorRT-LLM has kernels of
    its own for all sizes, on any NVLink (`widely`).
    """
    if tp == 1 or node.interconnect.kind != "nvlink":
        return False
    return widely or (node.gpu.architecture.lower().startswith("blackwell") and tp <= 4)


def _all_reduce(row: float, node: NodeType, tp: int, slower: float) -> AllReduce | None:
    if tp == 1:
        return None
    cost = node.interconnect.allreduce_for(tp)
    return operators.all_reduce(
        tp,
        row,
        alpha_us=cost.alpha_us * slower,
        bus_bytes_per_s=cost.bus_bandwidth_bytes_per_s / slower,
        p=cost.p,
    )


def _exchange(
    summed: AllReduce | None, row: float, node: NodeType, tp: int, ranks: int, slower: float
) -> AllReduce | None:
    """Return what counts twice in a layer: half of the sum over a rank and of the exchange between ranks."""
    between = _all_reduce(row, node, tp * ranks, slower) if ranks > 1 else None
    if between is None:
        return summed
    own_s, own_row_s = (summed.alpha_s, summed.row_s) if summed is not None else (0.0, 0.0)
    return AllReduce(
        row_s=0.5 * (own_row_s + ranks * between.row_s),
        alpha_s=0.5 * (own_s + between.alpha_s),
        p=between.p,
    )
