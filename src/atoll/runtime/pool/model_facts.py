"""Facts of models as their engines list them under /v1/models, for those who ask a gateway."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

_MAX_CHARS = 512
_MAX_LENGTH = 2**31


class ModelFacts(NamedTuple):
    """Facts of one model; None: its engine does not say, or engines do not agree."""

    max_model_len: int | None = None
    """Tokens that prompt and answer may have together."""
    root: str | None = None
    """The model that it is made of."""
    owned_by: str | None = None


def read_facts(body: bytes) -> dict[str, ModelFacts]:
    """Return the facts in an answer to /v1/models by model; nothing where it says nothing."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    listed = data.get("data") if isinstance(data, dict) else None
    entries = [e for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []
    return {
        entry["id"]: ModelFacts(_length(entry), _text(entry, "root"), _text(entry, "owned_by"))
        for entry in entries
        if isinstance(entry.get("id"), str)
    }


def _length(entry: dict[str, Any]) -> int | None:
    # llama.cpp says it among what the model was trained with.
    meta = entry.get("meta")
    trained = meta.get("n_ctx_train") if isinstance(meta, dict) else None
    length = entry.get("max_model_len", trained)
    return length if isinstance(length, int) and 0 < length < _MAX_LENGTH else None


def _text(entry: dict[str, Any], key: str) -> str | None:
    value = entry.get(key)
    return value if isinstance(value, str) and 0 < len(value) <= _MAX_CHARS else None


def join_facts(all_facts: Collection[ModelFacts]) -> ModelFacts:
    """Return the facts of a model that several backends serve: what fits all, and what all say."""
    lengths = [facts.max_model_len for facts in all_facts if facts.max_model_len is not None]
    roots = {facts.root for facts in all_facts}
    owners = {facts.owned_by for facts in all_facts}
    return ModelFacts(
        min(lengths, default=None),
        roots.pop() if len(roots) == 1 else None,
        owners.pop() if len(owners) == 1 else None,
    )
