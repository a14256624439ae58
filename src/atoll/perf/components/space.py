"""Memory of executors: the weights of all parts lie on the same GPUs, and KV caches get what is left.

An executor of n GPUs at tensor parallelism `tp` holds n / tp copies; figures are bytes per GPU. What other
parts take (weights, activations of their largest batches) is reserved before a part's own memory model
counts: an encoder beside an llm takes KV cache from it. Two parts that keep KV caches share what is left in
proportion to what a request leaves there, by the classes that use each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.catalog.models import ModelSpec
from atoll.catalog.nodes import NodeType
from atoll.catalog.transformer import TransformerSpec
from atoll.core.ids import Phase
from atoll.engines.profile import EngineProfile
from atoll.perf.components.batches import LARGEST_INPUT_SHARE
from atoll.perf.components.class_loads import component_of
from atoll.perf.components.component_shapes import autoregressive_spec, component_weight_bytes
from atoll.perf.memory_model import MemoryModel


@dataclass(frozen=True)
class Space:
    """Memory of parts side by side: bytes of weights of all, and what each token-making part may use.

    `engines` has, by such a part, the engine's profile with everything that is not its own reserved.
    `for_batches` is what is left, per GPU, for the activations of parts that work on whole requests.
    """

    weight_bytes: float
    engines: Mapping[str, EngineProfile]
    for_batches: float
    kv_tokens: Mapping[str, int]


def phase_of(part: str) -> Phase:
    """Return the phase that a part of an llm is; a whole one has both."""
    _, dot, phase = part.partition(".")
    return Phase(phase) if dot else Phase.BOTH


def fit(
    model: ModelSpec,
    parts: Sequence[str],
    node: NodeType,
    tp: int,
    engine: EngineProfile,
    *,
    batch_bytes: float,
    largest_bytes: float,
    kv_weights: Mapping[str, float],
) -> Space | None:
    """Return how the memory of a node is shared out among parts; None where they do not fit.

    `batch_bytes` are activations that the other parts need at least for a batch, per GPU, and
    `largest_bytes` what they would like for their largest batch or input (see `batches`). `kv_weights` says
    how much of the KV cache each token-making part needs against the others.
    """
    makers = {
        part: spec for part in parts if (spec := autoregressive_spec(model, part)) is not None
    }
    memories = {
        part: MemoryModel.of(spec, node, tp=tp, engine=engine, phase=phase_of(part))
        for part, spec in makers.items()
    }
    weights: dict[str, float] = {}
    for part in parts:
        name = component_of(part)
        # Phases of one llm on the same GPUs share its weights.
        if part in makers:
            weights[name] = max(
                weights.get(name, 0.0),
                _extra(model, name, tp) + _held(makers[part], memories[part]),
            )
        else:
            weights[name] = component_weight_bytes(model, name) / tp
    total = sum(weights.values())
    usable = node.gpu.memory_bytes * engine.memory_share - engine.reserve_bytes
    activations = max((memory.activation_bytes for memory in memories.values()), default=0.0)
    free = usable - total - activations
    # In this order, so that more parts never leave more room.
    batch_bytes = max(batch_bytes, min(largest_bytes, LARGEST_INPUT_SHARE * free))
    left = free - batch_bytes
    if left <= 0.0:
        return None
    engines: dict[str, EngineProfile] = {}
    tokens: dict[str, int] = {}
    scale = sum(kv_weights[part] for part in makers)
    for part, memory in memories.items():
        own = component_of(part)
        share = kv_weights[part] / scale if scale > 0.0 else 1.0 / len(makers)
        others = sum(size for name, size in weights.items() if name != own)
        others += _extra(model, own, tp) + batch_bytes
        others += activations - memory.activation_bytes
        others += (1.0 - share) * left if len(makers) > 1 else 0.0
        profile = replace(engine, reserve_bytes=engine.reserve_bytes + others) if others else engine
        engines[part] = profile
        restricted = MemoryModel.of(makers[part], node, tp=tp, engine=profile, phase=phase_of(part))
        tokens[part] = restricted.kv_tokens(0, makers[part].layers) * (node.count // tp)
    return Space(total * node.count, engines, batch_bytes if makers else free, tokens)


def _held(spec: TransformerSpec, memory: MemoryModel) -> float:
    """Bytes per GPU of the weights of a whole transformer."""
    from atoll.perf.step import Position

    return memory.layer_weight_bytes(0, spec.layers) + memory.outer_bytes(Position.WHOLE)


def _extra(model: ModelSpec, name: str, tp: int) -> float:
    """Bytes per GPU of a component beside the transformer that its memory model counts."""
    spec = autoregressive_spec(model, name)
    if spec is None or (model.has_llm and name == model.llm_name):
        return 0.0
    return max(0.0, component_weight_bytes(model, name) - spec.weight_bytes) / tp
