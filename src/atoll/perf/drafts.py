"""Drafts: the models that guess tokens ahead where an engine decodes speculatively.

In each step the engine runs the draft once for every token that it guesses, first over all tokens of the
step and then over one of each sequence; the model itself checks all guesses at once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from atoll.catalog.transformer import TransformerSpec
from atoll.engines.profile import EngineProfile

_EAGLE3_VOCAB = 32_000
"""Tokens that published EAGLE-3 heads guess among, for Llama 3 and Qwen 3."""
_EAGLE_INNER = 4


def draft_of(spec: TransformerSpec, engine: EngineProfile) -> TransformerSpec | None:
    """Return the model that guesses tokens for another, None where none does; it has its KV cache beside."""
    guess = engine.speculation
    if guess is None or guess.method == "ngram":
        return None
    if guess.method == "draft_model":
        return engine.draft and replace(engine.draft, kv_dtype=spec.kv_dtype)
    return _head_of(spec, guess.method)


@lru_cache(maxsize=64)
def _head_of(spec: TransformerSpec, method: str) -> TransformerSpec:
    """Return a head of one layer.

    The matrices with which it puts hidden states and the embedding of a token together are counted as a
    wider MLP of as many weights.
    """
    hidden, moe = spec.hidden, spec.moe
    # What it has beside a layer: 2 h x h weights.
    wider = 2 * hidden // 3
    if method == "mtp" and moe is not None:
        shared = moe.shared_intermediate + wider
        moe = replace(moe, dense_layers=frozenset(), shared_intermediate=shared)
    one = replace(
        spec,
        layers=1,
        windows=(),
        delta=None,
        wide_layers=frozenset(),
        moe=moe if method == "mtp" else None,
        intermediate=(spec.intermediate or _EAGLE_INNER * hidden) + wider,
    )
    if method == "mtp":
        return one
    one = one.with_weights(spec.activation_dtype)
    if method == "eagle":
        return one
    # Three states of the model, and a QKV product of twice the width.
    qkv = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    inner = one.intermediate + hidden // 3 + qkv // 3
    return replace(one, intermediate=inner, vocab=min(spec.vocab, _EAGLE3_VOCAB))
