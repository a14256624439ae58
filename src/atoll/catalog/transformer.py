"""Transformers as shapes: exact parameter, weight and KV-cache counts, per layer.

Notation, per layer: h hidden, q = heads x head_dim, k = kv_heads x head_dim, f the MLP width.

    attention   h q + 2 h k + q h
    MLP         3 h f gated, 2 h f otherwise; an expert has the same form with its own width
    small       norms, biases, sinks, router: always kept in the activation dtype

Latent attention (MLA) and layers of the gated delta rule count by `MlaSpec` and `DeltaSpec`. Only matrices
are quantised; how a checkpoint stores which of them is in `checkpoints.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from atoll.catalog.dtypes import (
    BF16,
    DTYPES,
    FP8,
    FP16,
    FP32,
    GGUF_OUTER,
    INT4,
    INT8,
    KV_DTYPES,
    MXFP4,
    NVFP4,
    DType,
    dtype_of,
)
from atoll.catalog.fields import check_whole
from atoll.catalog.mixers import DeltaSpec, MlaSpec
from atoll.core.errors import InputError, UnknownNameError

__all__ = [
    "BF16",
    "DTYPES",
    "FP8",
    "FP16",
    "FP32",
    "INT4",
    "INT8",
    "KV_DTYPES",
    "MXFP4",
    "NVFP4",
    "DType",
    "DeltaSpec",
    "MlaSpec",
    "MoeSpec",
    "TransformerSpec",
    "dtype_of",
    "kept_tokens",
]

_MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Mixture of experts: `top_k` of `experts` per token, each of MLP width `intermediate`.

    `shared_intermediate` is the width of the expert every token passes (0: none), `shared_gate`
    whether a gate vector weighs it, and `dense_layers` the layers that have a plain MLP instead.
    """

    experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int = 0
    dense_layers: frozenset[int] = frozenset()
    router_bias: bool = False
    shared_gate: bool = False

    def __post_init__(self) -> None:
        check_whole("experts", self.experts)
        check_whole("top_k", self.top_k)
        check_whole("moe intermediate", self.intermediate)
        check_whole("shared_intermediate", self.shared_intermediate, min_value=0)
        if self.top_k > self.experts:
            raise InputError(f"top_k {self.top_k} exceeds {self.experts} experts", field="top_k")


@dataclass(frozen=True, slots=True)
class TransformerSpec:
    """A decoder-only transformer by its shapes; counts are exact, bytes follow the dtypes.

    `windows` has one entry per layer: the number of positions it attends to, None for all. An empty
    tuple means full attention everywhere. `norm_bias` tells LayerNorm from RMSNorm; `qk_norm` is
    one scale per head dimension, `qk_norm_full` one per projected dimension. `attention_gate` doubles
    the query matrix by a gate on the output of attention. With `mla` there is one KV head and `head_dim`
    is the width of a query; layers of `delta` have window 0: they keep a state and no tokens. `wide_layers`
    have their matrices in the activation dtype where those of other layers are quantised.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_context: int
    tied_embeddings: bool = False
    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_full: bool = False
    norms_per_layer: int = 2
    norm_bias: bool = False
    gated_mlp: bool = True
    sinks: bool = False
    head_bias: bool = False
    attention_gate: bool = False
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    delta: DeltaSpec | None = None
    wide_layers: frozenset[int] = frozenset()
    attention_dtype: DType = BF16
    mlp_dtype: DType = BF16
    expert_dtype: DType = BF16
    embedding_dtype: DType = BF16
    kv_dtype: DType = BF16
    activation_dtype: DType = BF16
    # Counted once here: the performance model asks for them for every layer range it tries.
    _layer_params: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _layer_bytes: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _bytes_before: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        states = frozenset() if self.delta is None else self.delta.layers
        windows = self.windows or (None,) * self.layers
        windows = tuple(0 if i in states else window for i, window in enumerate(windows))
        object.__setattr__(self, "windows", windows)
        dense = frozenset(range(self.layers)) if self.moe is None else self.moe.dense_layers
        wide = self.wide_layers
        of_layers = [(i in dense, i in states, i in wide) for i in range(self.layers)]
        kinds = {kind: self._count(*kind) for kind in set(of_layers)}
        counts = [kinds[kind] for kind in of_layers]
        set_ = object.__setattr__
        set_(self, "_layer_params", tuple(params for params, _ in counts))
        set_(self, "_layer_bytes", tuple(size for _, size in counts))
        set_(self, "_bytes_before", tuple(itertools.accumulate(self._layer_bytes, initial=0.0)))
        compared = (f for f in self.__dataclass_fields__.values() if f.compare)
        set_(self, "_hash", hash(tuple(getattr(self, f.name) for f in compared)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, TransformerSpec) or self._hash != other._hash:
            return NotImplemented if not isinstance(other, TransformerSpec) else False
        compared = (f.name for f in self.__dataclass_fields__.values() if f.compare)
        return all(getattr(self, name) == getattr(other, name) for name in compared)

    def __reduce__(self) -> tuple[object, tuple[dict[str, object]]]:
        # Rebuilt, not copied: the stored hash is only valid in the process that computed it.
        fields = self.__dataclass_fields__.values()
        return (_rebuild, ({f.name: getattr(self, f.name) for f in fields if f.init},))

    # Parameters

    @property
    def attention_params(self) -> int:
        """Parameters of the attention matrices of one layer (not one of the delta rule)."""
        if self.mla is not None:
            return self.mla.params(self.hidden, self.heads)
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * ((3 if self.attention_gate else 2) * q + 2 * k)

    def mlp_params(self, i: int) -> int:
        """Parameters of the dense MLP and the shared expert of layer i, without biases."""
        if not self.is_moe_layer(i):
            return self._matrix_params(self.intermediate)
        assert self.moe is not None
        return self._matrix_params(self.moe.shared_intermediate)

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert with its biases, 0 for a dense model."""
        return 0 if self.moe is None else self._mlp_with_bias(self.moe.intermediate)

    @property
    def expert_bytes(self) -> float:
        """Bytes of one routed expert: its matrices as they are stored, its biases as activations are."""
        if self.moe is None:
            return 0.0
        matrices = self._matrix_params(self.moe.intermediate)
        biases = self.expert_params - matrices
        return (
            matrices * self.expert_dtype.bytes_per_weight
            + biases * self.activation_dtype.bytes_per_weight
        )

    def is_moe_layer(self, i: int) -> bool:
        """Whether layer i has routed experts."""
        return self.moe is not None and i not in self.moe.dense_layers

    def layer_params(self, i: int) -> int:
        """All parameters of layer i, every expert included."""
        return self._layer_params[i]

    def layer_active_params(self, i: int) -> int:
        """Parameters of layer i that one token uses."""
        if self.moe is None or not self.is_moe_layer(i):
            return self._layer_params[i]
        idle = self.moe.experts - self.moe.top_k
        return self._layer_params[i] - idle * self.expert_params

    @property
    def embedding_params(self) -> int:
        """Parameters of the input embedding table."""
        return self.vocab * self.hidden

    @property
    def head_params(self) -> int:
        """Parameters of the output matrix; the last stage needs it even when it is tied."""
        return self.vocab * self.hidden + (self.vocab if self.head_bias else 0)

    @property
    def final_norm_params(self) -> int:
        """Parameters of the norm before the output matrix."""
        return self.hidden * (2 if self.norm_bias else 1)

    @property
    def total_params(self) -> int:
        """All parameters; a tied embedding counts once."""
        return sum(self._layer_params) + self._outer_params()

    @property
    def active_params(self) -> int:
        """Parameters one token uses, both embedding tables included."""
        return sum(map(self.layer_active_params, range(self.layers))) + self._outer_params()

    # Bytes

    def layer_weight_bytes(self, i: int) -> float:
        """Bytes the weights of layer i take, every expert included."""
        return self._layer_bytes[i]

    def copied_bytes(self, i: int) -> float:
        """Bytes of layer i that every GPU has whole where several split it: norms and the router."""
        norms = self.norms_per_layer * self.hidden * (2 if self.norm_bias else 1)
        router = 0
        if self.moe is not None and self.is_moe_layer(i):
            router = self.moe.experts * (self.hidden + (1 if self.moe.router_bias else 0))
        return (norms + router) * self.activation_dtype.bytes_per_weight

    def range_weight_bytes(self, start: int, end: int) -> float:
        """Bytes the weights of layers [start, end) take, without embedding and head."""
        return self._bytes_before[end] - self._bytes_before[start]

    @property
    def embedding_bytes(self) -> float:
        """Bytes of the input embedding table."""
        return self.embedding_params * self.embedding_dtype.bytes_per_weight

    @property
    def head_bytes(self) -> float:
        """Bytes of the output matrix as the last stage holds it, also when tied."""
        return self.head_params * self.embedding_dtype.bytes_per_weight

    @property
    def weight_bytes(self) -> float:
        """Bytes of the whole model on one device; a tied embedding counts once."""
        head = 0.0 if self.tied_embeddings else self.head_bytes
        norm = self.final_norm_params * self.activation_dtype.bytes_per_weight
        return self._bytes_before[-1] + self.embedding_bytes + head + norm

    @property
    def kv_bytes_per_token_layer(self) -> float:
        """Bytes of keys and values (with `mla`, of the latent) one token leaves in one layer."""
        return self.kv_width(self.kv_heads) * self.kv_dtype.bytes_per_weight

    def kv_width(self, kv_heads: int) -> int:
        """Numbers that one token leaves in one layer of a share with so many KV heads."""
        return 2 * kv_heads * self.head_dim if self.mla is None else self.mla.latent_dim

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values one token leaves in all layers, while inside every window."""
        keeping = self.layers - (0 if self.delta is None else len(self.delta.layers))
        return keeping * self.kv_bytes_per_token_layer

    @property
    def state_bytes_per_layer(self) -> float:
        """Bytes a sequence keeps in a layer of the delta rule whatever its length; 0 without such layers."""
        if self.delta is None:
            return 0.0
        return self.delta.state_bytes(self.activation_dtype.bytes_per_weight)

    @property
    def state_bytes_per_sequence(self) -> float:
        """Bytes a sequence keeps in all layers beside its KV cache, whatever its length."""
        return 0.0 if self.delta is None else len(self.delta.layers) * self.state_bytes_per_layer

    def kv_tokens(self, i: int, context: int) -> int:
        """How many of `context` tokens layer i keeps: all, or as many as its window holds."""
        return int(kept_tokens(self.windows[i], context))

    # Variants

    def with_weights(self, dtype: str | DType) -> TransformerSpec:
        """The same shapes with attention, MLP and expert matrices stored in `dtype`.

        Norms and router keep their dtype; embedding and output matrix do, too, but in GGUF files.
        """
        new = dtype_of(dtype)
        return replace(
            self,
            attention_dtype=new,
            mlp_dtype=new,
            expert_dtype=new,
            embedding_dtype=GGUF_OUTER.get(new.name, self.embedding_dtype),
            wide_layers=frozenset(),
        )

    def with_kv_dtype(self, dtype: str | DType) -> TransformerSpec:
        """The same model with its KV cache stored in `dtype`, one of KV_DTYPES."""
        new = dtype_of(dtype)
        if new.name not in KV_DTYPES:
            raise UnknownNameError("KV cache dtype", new.name, KV_DTYPES)
        return replace(self, kv_dtype=new)

    # Counting

    def _outer_params(self) -> int:
        head = 0 if self.tied_embeddings else self.head_params
        return self.embedding_params + head + self.final_norm_params

    def _matrix_params(self, width: int) -> int:
        """Parameters of the matrices of an MLP of a width, without biases."""
        return (3 if self.gated_mlp else 2) * self.hidden * width

    def _mlp_with_bias(self, width: int) -> int:
        ups = 2 if self.gated_mlp else 1
        bias = ups * width + self.hidden if self.mlp_bias else 0
        return self._matrix_params(width) + bias

    def _small_attention_params(self, is_delta: bool) -> int:
        if is_delta:
            assert self.delta is not None
            return self.delta.small_params(self.hidden)
        small = self.hidden if self.o_bias else 0
        small += self.heads if self.sinks else 0
        if self.mla is not None:
            return small + self.mla.copies * (self.mla.q_rank + self.mla.kv_rank)
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        small += (q + 2 * k) if self.qkv_bias else 0
        small += 2 * self.head_dim if self.qk_norm else 0
        return small + (q + k if self.qk_norm_full else 0)

    def _small_params(self, is_dense: bool, is_delta: bool) -> int:
        """Everything of a layer that is not a matrix or an expert, and the router."""
        small = self.norms_per_layer * self.hidden * (2 if self.norm_bias else 1)
        small += self._small_attention_params(is_delta)
        ups = 2 if self.gated_mlp else 1
        if is_dense:
            return small + (ups * self.intermediate + self.hidden if self.mlp_bias else 0)
        assert self.moe is not None
        small += self.moe.experts * (self.hidden + (1 if self.moe.router_bias else 0))
        small += self.hidden if self.moe.shared_gate else 0
        if self.moe.shared_intermediate and self.mlp_bias:
            small += ups * self.moe.shared_intermediate + self.hidden
        return small

    def _count(self, is_dense: bool, is_delta: bool, is_wide: bool = False) -> tuple[int, float]:
        """Parameters and bytes of a dense or a mixture layer, with attention or the delta rule."""
        if is_wide:
            whole = self.with_weights(self.activation_dtype)
            return whole._count(is_dense, is_delta)
        attention = self.attention_params
        if is_delta:
            assert self.delta is not None
            attention = self.delta.params(self.hidden)
        width, experts = self.intermediate, 0
        if not is_dense:
            assert self.moe is not None
            width, experts = self.moe.shared_intermediate, self.moe.experts
        mlp = self._matrix_params(width)
        small = self._small_params(is_dense, is_delta)
        size = (
            attention * self.attention_dtype.bytes_per_weight
            + mlp * self.mlp_dtype.bytes_per_weight
            + experts * self.expert_bytes
            + small * self.activation_dtype.bytes_per_weight
        )
        return attention + mlp + experts * self.expert_params + small, size

    def _check(self) -> None:
        check_whole("layers", self.layers, max_value=_MAX_LAYERS)
        for name in (
            "hidden",
            "heads",
            "kv_heads",
            "head_dim",
            "intermediate",
            "vocab",
            "max_context",
            "norms_per_layer",
        ):
            check_whole(name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise InputError(
                f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly", field="kv_heads"
            )
        if self.windows and len(self.windows) != self.layers:
            raise InputError(
                f"{len(self.windows)} windows for {self.layers} layers", field="windows"
            )
        self._check_kinds()
        for layer in self.wide_layers:
            if not 0 <= layer < self.layers:
                raise InputError(
                    f"wide layer {layer} of a model with {self.layers}", field="wide_layers"
                )
        if self.moe is not None:
            for layer in self.moe.dense_layers:
                if not 0 <= layer < self.layers:
                    raise InputError(
                        f"dense layer {layer} of a model with {self.layers}", field="dense_layers"
                    )

    def _check_kinds(self) -> None:
        states = frozenset() if self.delta is None else self.delta.layers
        for i, window in enumerate(self.windows):
            if window is not None:
                check_whole("windows", window, min_value=0 if i in states else 1)
        for layer in states:
            if not 0 <= layer < self.layers:
                raise InputError(
                    f"layer {layer} of the delta rule in a model with {self.layers}", field="delta"
                )
        if self.mla is not None and (self.kv_heads, self.head_dim) != (1, self.mla.query_dim):
            raise InputError(
                f"latent attention has 1 KV head and head_dim {self.mla.query_dim}, the width of a query",
                field="mla",
            )


def kept_tokens(window: int | None, context: float) -> float:
    """Return how many of `context` tokens a layer with this window keeps in its KV cache.

    `sim/link_traffic.py` has the same rule in compiled code.
    """
    return context if window is None else min(context, float(window))


def _rebuild(fields: dict[str, object]) -> TransformerSpec:
    return TransformerSpec(**fields)  # type: ignore[arg-type]
