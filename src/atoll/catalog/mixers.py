"""Token mixers of a layer beside plain attention: latent attention and the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.catalog.dtypes import FP32, DType
from atoll.catalog.fields import check_whole
from atoll.core.errors import InputError


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention: keys and values of all heads come from one small latent per token.

    A token leaves `kv_rank + rope_dim` numbers in a layer, whatever the number of heads. With h hidden and
    a heads:

        queries     h q_rank + q_rank a (nope + rope), or h a (nope + rope) where q_rank is 0
        latent      h (kv_rank + rope)
        expansion   kv_rank a (nope + v), into keys and values (prefill) or into queries and outputs (decode)
        output      a v h

    `copies` is how often the first query matrix and the latent's are held: every GPU of a group has its own.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    copies: int = 1

    def __post_init__(self) -> None:
        check_whole("q_rank", self.q_rank, min_value=0)
        for name in ("kv_rank", "nope_dim", "rope_dim", "v_dim", "copies"):
            check_whole(name, getattr(self, name))

    @property
    def query_dim(self) -> int:
        """Width of one head's query: its part without and its part with positions."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Numbers that one token leaves in the cache of a layer."""
        return self.kv_rank + self.rope_dim

    def params(self, hidden: int, heads: int) -> int:
        """Parameters of the matrices of one layer."""
        first = hidden * self.q_rank + hidden * self.latent_dim
        queries = (self.q_rank or hidden) * heads * self.query_dim
        rest = self.kv_rank * heads * (self.nope_dim + self.v_dim) + heads * self.v_dim * hidden
        return self.copies * first + queries + rest


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Layers of the gated delta rule: a matrix per head instead of keys and values that grow.

    `layers` lists them. A sequence keeps, in each, value_heads x key_dim x value_dim numbers in `state_dtype`
    and the last `conv - 1` inputs of a short convolution, however long it is.
    """

    layers: frozenset[int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    state_dtype: DType = FP32

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "conv"):
            check_whole(name, getattr(self, name))
        if self.value_heads % self.key_heads:
            raise InputError(
                f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly",
                field="value_heads",
            )

    @property
    def channels(self) -> int:
        """Width of what the convolution sees: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def params(self, hidden: int) -> int:
        """Parameters of the large matrices of one layer: queries, keys, values, gate and output."""
        inner = self.value_heads * self.value_dim
        return hidden * (self.channels + inner) + inner * hidden

    def small_params(self, hidden: int) -> int:
        """Parameters of a layer that quantisers leave alone: decay, strength, convolution, norm."""
        return (
            hidden * 2 * self.value_heads
            + self.conv * self.channels
            + 2 * self.value_heads
            + self.value_dim
        )

    def state_bytes(self, activation_bytes: float) -> float:
        """Bytes that one sequence keeps in one layer."""
        matrix = self.value_heads * self.key_dim * self.value_dim
        inputs = (self.conv - 1) * self.channels
        return matrix * self.state_dtype.bytes_per_weight + inputs * activation_bytes
