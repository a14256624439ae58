"""Which part of every tensor a rank holds: tensor parallelism over the GPUs of a node.

Matrices whose outputs are heads, columns of the MLP or tokens are cut by rows; those that take these in are
cut by columns, and the ranks' results are added up. Everything else is on every rank. Only this
module knows: `StageModel` builds its layers from the rank's `config` and reads its `piece` of every tensor.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import UsageError

ARCHITECTURES = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt_oss",
        "llama",
        "mistral",
        "mixtral",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    }
)
"""Model types whose tensors are known here."""
_UNITS = (128, 64, 32, 16)
"""Columns of an MLP are handed out in the largest that fits: kernels and groups of 4-bit weights want it."""
_MIN_ROUND_VOCABULARY = 4096

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Ranges [start, end) along one dimension of a tensor, one after another; without any: zeros."""

    dim: int
    ranges: tuple[Range, ...]


class RankCut:
    """The share of one rank of `size` in a model with the transformers config `whole`."""

    def __init__(self, whole: Any, rank: int, size: int) -> None:
        heads = whole.num_attention_heads
        if whole.model_type not in ARCHITECTURES:
            raise UsageError(
                f"models of the type {whole.model_type} run on one GPU a node",
                hint=f"several GPUs are known for {', '.join(sorted(ARCHITECTURES))}",
            )
        if heads % size:
            raise UsageError(f"{heads} attention heads cannot be split over {size} GPUs")
        self._rank = rank
        self._transposed = whole.model_type == "gpt_oss"
        self.vocabulary: int = whole.vocab_size
        self.kv_heads: int = whole.num_key_value_heads
        self.head_size: int = getattr(whole, "head_dim", None) or whole.hidden_size // heads
        self._query_heads: int = heads
        own = heads // size
        self._queries = (rank * own, (rank + 1) * own)
        # Query heads that share a KV head, as many as any rank has of each. Where ranks cut through a group,
        # or there are more ranks than KV heads, several have a copy of one.
        group = heads // self.kv_heads
        shared = math.gcd(group, own)
        self._kv_of_ranks = [
            tuple((r * own + first) // group for first in range(0, own, shared))
            for r in range(size)
        ]
        # Equal numbers of tokens on all ranks but the last, which may have fewer: logits are put together.
        self.tokens_a_rank = -(-self.vocabulary // size)
        if self.vocabulary >= _MIN_ROUND_VOCABULARY:
            self.tokens_a_rank = -(-self.tokens_a_rank // _UNITS[1]) * _UNITS[1]
        start = rank * self.tokens_a_rank
        self.tokens: Range = (start, min(self.vocabulary, start + self.tokens_a_rank))
        if self.tokens[0] >= self.tokens[1]:
            raise UsageError(f"{self.vocabulary} tokens cannot be split over {size} GPUs")
        self._columns: int = whole.intermediate_size
        self._own_columns = _share(self._columns, rank, size)
        self._expert_columns: int = getattr(whole, "moe_intermediate_size", None) or self._columns
        self._own_expert_columns = _share(self._expert_columns, rank, size)
        self.config = self._own_config(whole)

    @property
    def own_kv_heads(self) -> tuple[int, ...]:
        """The KV heads that this rank holds, by their numbers in the whole model."""
        return self._kv_of_ranks[self._rank]

    @property
    def kv_holders(self) -> list[tuple[int, int]]:
        """For every KV head of the model, a rank that holds it and its number there."""
        places: dict[int, tuple[int, int]] = {}
        for rank, held in enumerate(self._kv_of_ranks):
            for number, head in enumerate(held):
                places.setdefault(head, (rank, number))
        return [places[head] for head in range(self.kv_heads)]

    def _own_config(self, whole: Any) -> Any:
        config = copy.deepcopy(whole)
        config.head_dim = self.head_size
        config.num_attention_heads = self._queries[1] - self._queries[0]
        config.num_key_value_heads = len(self.own_kv_heads)
        config.intermediate_size = _length(self._own_columns)
        if getattr(whole, "moe_intermediate_size", None):
            config.moe_intermediate_size = _length(self._own_expert_columns)
        config.vocab_size = _length(self.tokens)
        # It may lie outside this rank's tokens, and only training reads it.
        config.pad_token_id = None
        return config

    def piece(self, name: str) -> TensorPiece | None:
        """Return what this rank holds of the parameter `name`; None: all of it."""
        *_, owner, leaf = name.split(".")
        if owner == "experts":
            return self._expert_piece(leaf)
        if leaf == "sinks":
            return TensorPiece(0, (self._queries,))
        columns = self._own_columns
        by_rows: dict[str, tuple[Range, ...]] = {
            "q_proj": (self._head_rows(self._queries),),
            "k_proj": self._kv_rows(0),
            "v_proj": self._kv_rows(0),
            "qkv_proj": (
                self._head_rows(self._queries),
                *self._kv_rows(self._query_heads),
                *self._kv_rows(self._query_heads + self.kv_heads),
            ),
            "gate_proj": (columns,),
            "up_proj": (columns,),
            "gate_up_proj": (columns, _shift(columns, self._columns)),
            "embed_tokens": (self.tokens,),
            "lm_head": (self.tokens,),
        }
        if owner in by_rows:
            return TensorPiece(0, by_rows[owner])
        by_columns = {"o_proj": self._head_rows(self._queries), "down_proj": columns}
        if owner not in by_columns:
            return None
        return TensorPiece(1, (by_columns[owner],)) if leaf == "weight" else self._once()

    def _expert_piece(self, leaf: str) -> TensorPiece | None:
        """All experts, cut as the MLP of a dense layer is; each is a matrix of a stack."""
        own = self._own_expert_columns
        # GPT-OSS has inputs before outputs, and the rows of gate and up in turn.
        inputs, outputs = (1, 2) if self._transposed else (2, 1)
        both: tuple[Range, ...] = (own, _shift(own, self._expert_columns))
        if self._transposed:
            both = ((2 * own[0], 2 * own[1]),)
        pieces = {
            "gate_up_proj": TensorPiece(outputs, both),
            "gate_up_proj_bias": TensorPiece(1, both),
            "down_proj": TensorPiece(inputs, (own,)),
            "down_proj_bias": self._once(),
        }
        return pieces[leaf]

    def _once(self) -> TensorPiece | None:
        """What is added to a sum is added by the first rank alone."""
        return None if self._rank == 0 else TensorPiece(0, ())

    def _head_rows(self, heads: Range) -> Range:
        return heads[0] * self.head_size, heads[1] * self.head_size

    def _kv_rows(self, first: int) -> tuple[Range, ...]:
        return tuple(self._head_rows((first + h, first + h + 1)) for h in self.own_kv_heads)


def _share(total: int, rank: int, size: int) -> Range:
    """Return a rank's part of so many columns, in the largest unit of which every rank has one."""
    unit = next((u for u in _UNITS if total % u == 0 and total >= u * size), 1)
    units = total // unit
    if units < size:
        raise UsageError(f"{total} columns of an MLP cannot be split over {size} GPUs")
    return units * rank // size * unit, units * (rank + 1) // size * unit


def _length(span: Range) -> int:
    return span[1] - span[0]


def _shift(span: Range, by: int) -> Range:
    return span[0] + by, span[1] + by
