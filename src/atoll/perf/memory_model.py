"""Memory of a node: weights, KV cache, activations and what the engine keeps for itself.

All figures are bytes per GPU of one tensor-parallel group. Shares are rounded up as the engine
shards them, and as the time model counts them: KV heads are copied where there are fewer than GPUs,
norms and routers on every GPU. Which weights are stored how is the model's (`catalog/checkpoints.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from atoll.catalog.nodes import NodeType
from atoll.catalog.transformer import TransformerSpec, kept_tokens
from atoll.core.errors import UsageError
from atoll.core.ids import Phase
from atoll.engines.profile import EngineProfile
from atoll.perf.drafts import draft_of
from atoll.perf.layers import LayerKind, Shard, as_held, layer_kinds
from atoll.perf.operators import ACTIVATION_BYTES, Array
from atoll.perf.step import Position, check_tp, window_counts

_LIVE_ROWS = 4.0
"""Hidden-sized buffers alive at once in a forward pass: residual, normed input, output, workspace."""


@dataclass(frozen=True)
class MemoryModel:
    """The memory of a transformer on a node; `tp` GPUs hold one copy of whatever layers it is given."""

    spec: TransformerSpec
    node: NodeType
    tp: int
    engine: EngineProfile
    step_tokens: int

    @classmethod
    def of(
        cls,
        spec: TransformerSpec,
        node: NodeType,
        *,
        tp: int | None = None,
        engine: EngineProfile | None = None,
        phase: Phase = Phase.BOTH,
    ) -> MemoryModel:
        """Return the memory model; `tp` is as many GPUs as divide the model evenly unless given.

        A node that only decodes never sees more tokens in a step than sequences, and needs less
        memory for activations.
        """
        profile = engine if engine is not None else EngineProfile("default")
        decoded = profile.max_sequences * profile.rows
        tokens = decoded if phase is Phase.DECODE else profile.max_tokens
        tokens = min(tokens, profile.part_tokens or tokens)
        size = check_tp(node, tp, spec)
        ranks = profile.spread(spec, node.count, size)
        held = spec if ranks is None else _spread_experts(spec, size, ranks)
        return cls(held, node, size, profile, tokens)

    @cached_property
    def _shard(self) -> Shard:
        return Shard.of(self.spec, self.tp)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct kinds of layer, in order of first appearance."""
        return _distinct_kinds(self.spec)

    @cached_property
    def usable_bytes(self) -> float:
        """Bytes per GPU left for weights and KV cache."""
        total = self.node.gpu.memory_bytes * self.engine.memory_share
        return max(0.0, total - self.engine.reserve_bytes - self.activation_bytes)

    @cached_property
    def activation_bytes(self) -> float:
        """Bytes per GPU of activations at the largest batch."""
        spec, shard = self.spec, self._shard
        inner = shard.intermediate
        if spec.moe is not None:
            routed = spec.moe.top_k * shard.expert_intermediate + shard.shared_intermediate
            inner = max(inner if spec.moe.dense_layers else 0, routed)
        mixed = (2 * shard.heads + 2 * shard.kv_heads) * spec.head_dim
        if spec.mla is not None:
            # Queries, keys and values of all heads, expanded for prefill, and the output.
            mixed = shard.heads * (2 * spec.mla.query_dim + 2 * spec.mla.v_dim)
        if spec.delta is not None:
            gated = 2 * spec.delta.value_heads * spec.delta.value_dim
            mixed = max(mixed, math.ceil((spec.delta.channels + gated) / self.tp))
        # Attention and MLP run one after the other: the wider one counts.
        widest = _LIVE_ROWS * spec.hidden + max(3.0 * inner, float(mixed))
        rows = self.step_tokens * widest * ACTIVATION_BYTES
        # Logits are kept in 32 bits for sampling.
        return rows + self.engine.max_sequences * self.engine.rows * shard.vocab * 4.0

    @cached_property
    def _draft(self) -> TransformerSpec | None:
        return draft_of(self.spec, self.engine)

    @cached_property
    def draft_bytes(self) -> float:
        """Bytes per GPU of the weights of the model that guesses tokens; 0 where none does."""
        draft = self._draft
        if draft is None:
            return 0.0
        held = as_held(draft, self.tp)
        guess = self.engine.speculation
        ends = held.head_bytes if guess is not None and guess.method == "eagle3" else 0.0
        if guess is not None and guess.method == "draft_model":
            ends = held.embedding_bytes + (0.0 if held.tied_embeddings else held.head_bytes)
        return _layer_weight_bytes(draft, self.tp, 0, draft.layers) + ends / self.tp

    def _draft_kv_bytes(self, context: float) -> float:
        """Bytes per GPU that a sequence keeps in the layers of the model that guesses tokens."""
        draft = self._draft
        if draft is None:
            return 0.0
        return _kv_bytes_per_sequence(draft, self.tp, 0, draft.layers, context)

    def layer_weight_bytes(self, start: int, end: int) -> float:
        """Return bytes per GPU of the weights of layers [start, end)."""
        return _layer_weight_bytes(self.spec, self.tp, start, end)

    def outer_bytes(self, position: Position) -> float:
        """Return bytes per GPU of embedding and output matrix at a position, and of a draft."""
        spec = as_held(self.spec, self.tp)
        draft = self.draft_bytes if position.head else 0.0
        # Tied, both ends are one matrix, but only a node with both of them holds it once.
        if position is Position.WHOLE and spec.tied_embeddings:
            return spec.embedding_bytes / self.tp + draft
        held = (spec.embedding_bytes if position.embedding else 0.0) + (
            spec.head_bytes if position.head else 0.0
        )
        return held / self.tp + draft

    def kv_bytes_per_token_layer(self) -> float:
        """Return bytes per GPU that one token leaves in one layer while its window holds it."""
        return _kv_bytes_per_token_layer(self.spec, self.tp)

    def kv_bytes_per_sequence(self, start: int, end: int, context: float) -> float:
        """Return bytes per GPU that a sequence of `context` tokens keeps in layers [start, end)."""
        own = _kv_bytes_per_sequence(self.spec, self.tp, start, end, context)
        return own + self._draft_kv_bytes(context) if end == self.spec.layers else own

    def free_bytes(self, start: int, end: int) -> float:
        """Return bytes per GPU left for KV cache beside layers [start, end); negative if they do not fit."""
        if not 0 <= start < end <= self.spec.layers:
            raise UsageError(
                f"layers [{start}, {end}) are not a range within 0 to {self.spec.layers}"
            )
        position = position_of(self.spec, start, end)
        return self.usable_bytes - self.layer_weight_bytes(start, end) - self.outer_bytes(position)

    def fits(self, start: int, end: int, context: float = 0.0) -> bool:
        """Return whether layers [start, end) fit with KV cache for one sequence of `context` tokens."""
        free = self.free_bytes(start, end)
        need = self.kv_bytes_per_sequence(start, end, context)
        return free > 0.0 and free >= need

    def kv_tokens(self, start: int, end: int, context: float = 4096.0) -> int:
        """Return how many tokens of sequences of `context` tokens each fit beside layers [start, end).

        Layers with a window keep no more of a sequence than their window, layers with a state their state.
        Each of the node's groups of `tp` GPUs holds this many.
        """
        free = self.free_bytes(start, end)
        sequence_bytes = self.kv_bytes_per_sequence(start, end, context)
        return max(0, math.floor(free / sequence_bytes * context))

    def slots(self, start: int, end: int, context: float) -> int:
        """Return how many requests of `context` tokens have room beside layers [start, end) at a time.

        No more than the engine runs.
        """
        needed = self.kv_bytes_per_sequence(start, end, context)
        room = max(0.0, self.free_bytes(start, end))
        return min(self.engine.max_sequences, math.floor(room / needed))

    def sequences_by_layers(self, context: float, position: Position, shared: float = 0.0) -> Array:
        """Return how many sequences of `context` tokens fit beside j layers, for j = 0..layers.

        So many `shared` tokens are held once for all of them. Where layers differ, the run of j layers that
        leaves room for fewest counts. 0 where not even the weights fit; entry 0 is infinite.
        """
        kv = _kv_by_runs(self.spec, self.tp, context)
        if position.head and self._draft is not None:
            kv = kv + self._draft_kv_bytes(context)
        weights = _weights_by_runs(self.spec, self.tp)
        free = self.usable_bytes - self.outer_bytes(position) - weights
        if shared:
            free = free - _kv_by_runs(self.spec, self.tp, shared)
        # No layers have no KV cache to divide by, and room without end.
        room = np.full(kv.shape, np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            np.divide(free[1:], kv[1:], out=room[1:])
        room[1:][free[1:] <= 0.0] = 0.0
        return np.asarray(room.min(axis=1))

    def max_layers(self, context: float = 4096.0, position: Position = Position.MIDDLE) -> int:
        """Return the most layers a node can hold with KV cache for one sequence of `context` tokens."""
        room = self.sequences_by_layers(context, position)
        return int(np.max(np.flatnonzero(room >= 1.0)))


@lru_cache(maxsize=64)
def _spread_experts(spec: TransformerSpec, tp: int, ranks: int) -> TransformerSpec:
    """Return the model with those of its experts that lie on the GPUs of one rank."""
    moe = spec.moe
    assert moe is not None
    experts = tp * math.ceil(moe.experts / (tp * ranks))
    return replace(spec, moe=replace(moe, experts=experts, top_k=min(moe.top_k, experts)))


# What depends on the model and its split alone is shared by all nodes. The arrays are not to be written to.


@lru_cache(maxsize=256)
def _distinct_kinds(spec: TransformerSpec) -> tuple[LayerKind, ...]:
    return tuple(dict.fromkeys(layer_kinds(spec)))


@lru_cache(maxsize=256)
def _kind_weight_bytes(spec: TransformerSpec, tp: int) -> Array:
    """Bytes per GPU of the weights of one layer of each kind."""
    kinds_by_layer, held = layer_kinds(spec), as_held(spec, tp)
    firsts = [kinds_by_layer.index(kind) for kind in _distinct_kinds(spec)]
    return np.array(
        [held.layer_weight_bytes(i) / tp + held.copied_bytes(i) * (tp - 1) / tp for i in firsts]
    )


@lru_cache(maxsize=256)
def _weights_by_runs(spec: TransformerSpec, tp: int) -> Array:
    """Bytes per GPU of the weights of every distinct run of j layers (`window_counts`)."""
    # Sums over kinds by hand: a BLAS call costs more here than the few products it does.
    counts = window_counts(spec, _distinct_kinds(spec))
    return np.asarray((counts * _kind_weight_bytes(spec, tp)).sum(axis=2))


@lru_cache(maxsize=4096)
def _layer_weight_bytes(spec: TransformerSpec, tp: int, start: int, end: int) -> float:
    by_kind, kinds = _kind_weight_bytes(spec, tp), _distinct_kinds(spec)
    return float(sum(by_kind[kinds.index(kind)] for kind in layer_kinds(spec)[start:end]))


@lru_cache(maxsize=4096)
def _kv_bytes_per_sequence(
    spec: TransformerSpec, tp: int, start: int, end: int, context: float
) -> float:
    held = layer_kinds(spec)[start:end]
    kept = sum(kept_tokens(kind.window, context) for kind in held)
    states = sum(kind.window == 0 for kind in held)
    state = states * spec.state_bytes_per_layer / tp
    return kept * _kv_bytes_per_token_layer(spec, tp) + state


@lru_cache(maxsize=256)
def _kv_bytes_per_token_layer(spec: TransformerSpec, tp: int) -> float:
    return spec.kv_width(Shard.of(spec, tp).kv_heads) * spec.kv_dtype.bytes_per_weight


@lru_cache(maxsize=1024)
def _kv_by_runs(spec: TransformerSpec, tp: int, context: float) -> Array:
    """Bytes per GPU that a sequence of `context` tokens keeps in every distinct run of j layers."""
    kinds = _distinct_kinds(spec)
    kept = np.array([kept_tokens(kind.window, context) for kind in kinds])
    # A layer that keeps a state keeps it whatever the length.
    state = spec.state_bytes_per_layer / tp
    states = np.array([state if kind.window == 0 else 0.0 for kind in kinds])
    kept_bytes = kept * _kv_bytes_per_token_layer(spec, tp) + states
    return np.asarray((window_counts(spec, kinds) * kept_bytes).sum(axis=2))


def position_of(spec: TransformerSpec, start: int, end: int) -> Position:
    """Return where layers [start, end) lie in a model."""
    if start == 0:
        return Position.WHOLE if end == spec.layers else Position.FIRST
    return Position.LAST if end == spec.layers else Position.MIDDLE
