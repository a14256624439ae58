"""The time of one operator: a smooth roofline with fitted constants.

Notation, used by every function here:

    F       floating-point operations          P    peak rate, FLOP/s
    Q       bytes moved through memory         W    memory bandwidth, bytes/s
    e_f     share of P that is reached         e_b  share of W that is reached
    t0      launch and ramp-up time, s         p    how sharply the limits meet

    t = ((F / (P e_f))^p + (Q / (W e_b))^p)^(1/p) + t0

p = 1 adds the two times, p -> infinity takes the larger; fitted values lie between 0.5 and 4.
Every function takes floats or numpy arrays for the sizes that vary from step to step and is
written so that one expression serves both: a planner evaluates grids, a simulator single steps.
All times are seconds, all sizes elements unless a name says bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.perf.constants import OpSpeed

Array = NDArray[np.float64]
Num = TypeVar("Num", float, Array)

ACTIVATION_BYTES = 2.0
"""Bytes of one activation element (bf16 or fp16)."""


def smaller(x: Num, limit: float) -> Num:
    """Return the element-wise minimum of x and a constant, for a float or an array."""
    if isinstance(x, float):
        return min(limit, x)
    return np.minimum(x, limit)


def larger(x: Num, limit: float) -> Num:
    """Return the element-wise maximum of x and a constant, for a float or an array."""
    if isinstance(x, float):
        return max(limit, x)
    return np.maximum(x, limit)


@dataclass(frozen=True, slots=True)
class Roofline:
    """A roofline whose work is affine in the number of rows m of a step.

    Its two limits are `flop_s * m` and `fixed_s + row_s * m` seconds: a GEMM reads its weights
    once whatever m is, and its inputs and outputs once per row.
    """

    flop_s: float
    fixed_s: float
    row_s: float
    t0_s: float
    p: float

    def seconds(self, m: Num) -> Num:
        """Return the time in seconds for m rows (tokens)."""
        p = self.p
        compute = self.flop_s * m
        memory = self.fixed_s + self.row_s * m
        total: Num = (compute**p + memory**p) ** (1.0 / p) + self.t0_s
        return total


def gemm(
    n: float,
    k: float,
    speed: OpSpeed,
    *,
    weight_bytes: float,
    pad_k: float = 0.0,
    pad_n: float = 0.0,
) -> Roofline:
    """Return the roofline of an (m, k) x (k, n) product; `weight_bytes` is per weight element.

    F = 2 m n (k + pad_k): each output tile pays a prologue and an epilogue worth pad_k of depth.
    Q = weight_bytes (n + pad_n) k + 2 m (n + k): narrow products have too few tiles in flight to
    fill the memory pipe, as if they were pad_n columns wider.
    """
    return Roofline(
        flop_s=2.0 * n * (k + pad_k) / speed.flop_per_s,
        fixed_s=weight_bytes * (n + pad_n) * k / speed.bytes_per_s,
        row_s=ACTIVATION_BYTES * (n + k) / speed.bytes_per_s,
        t0_s=speed.t0_s,
        p=speed.p,
    )


@dataclass(frozen=True, slots=True)
class Stream:
    """Memory-bound passes over activations: so many seconds per row and a launch. Streams add up."""

    row_s: float
    t0_s: float

    def __add__(self, other: Stream) -> Stream:
        return Stream(self.row_s + other.row_s, self.t0_s + other.t0_s)

    def seconds(self, m: Num) -> Num:
        """Return the time in seconds for m rows."""
        return self.row_s * m + self.t0_s


def elementwise(elements: float, speed: OpSpeed) -> Stream:
    """Return a memory-bound pass that touches `elements` activations per row."""
    return Stream(ACTIVATION_BYTES * elements / speed.bytes_per_s, speed.t0_s)


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """Causal attention of new tokens over themselves and what is cached.

    F = 4 d h x (query-key pairs); Q = queries, outputs, and the keys and values read;
    a chain term `serial_s` per key of the longest sequence covers launches too small to fill
    the GPU, where one block walks all keys in turn.
    """

    pair_s: float
    token_s: float
    key_s: float
    serial_s: float
    t0_s: float
    p: float

    def seconds(self, pairs: Num, tokens: Num, keys: Num, longest: Num) -> Num:
        """Return seconds for `pairs` query-key pairs, `tokens` queries and `keys` keys in all,
        the longest sequence attending to `longest` keys.
        """
        p = self.p
        total: Num = (
            (self.pair_s * pairs) ** p
            + (self.token_s * tokens + self.key_s * keys) ** p
            + (self.serial_s * longest) ** p
        ) ** (1.0 / p) + self.t0_s
        return total


def prefill_attention(
    heads: float,
    kv_heads: float,
    head_dim: float,
    speed: OpSpeed,
    *,
    kv_bytes: float,
    serial_ns: float,
) -> PrefillAttention:
    """Return the prefill attention of one layer on one GPU; `serial_ns` is per key."""
    return PrefillAttention(
        pair_s=4.0 * heads * head_dim / speed.flop_per_s,
        token_s=2.0 * ACTIVATION_BYTES * heads * head_dim / speed.bytes_per_s,
        key_s=2.0 * kv_bytes * kv_heads * head_dim / speed.bytes_per_s,
        serial_s=serial_ns * 1e-9 * head_dim / 128.0,
        t0_s=speed.t0_s,
        p=speed.p,
    )


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """One query per sequence over its cached keys and values.

    t = ((Q / (W e_b))^p + t0^p + (serial c)^p)^(1/p) with Q the KV bytes of all sequences, each
    padded by `pad` tokens (pages and split granularity). `serial_s` per context token is the
    chain of a kernel that does not split the context (multi-head attention without groups).
    """

    key_s: float
    query_s: float
    pad: float
    serial_s: float
    t0_s: float
    p: float

    def seconds(self, sequences: Num, context: Num) -> Num:
        """Return seconds for `sequences` queries, each over `context` cached tokens."""
        p = self.p
        total: Num = (
            (sequences * (self.key_s * (context + self.pad) + self.query_s)) ** p
            + self.t0_s**p
            + (self.serial_s * context) ** p
        ) ** (1.0 / p)
        return total


def decode_attention(
    heads: float,
    kv_heads: float,
    head_dim: float,
    speed: OpSpeed,
    *,
    kv_bytes: float,
    pad: float,
    serial_ns: float,
    queries: float = 1.0,
) -> DecodeAttention:
    """Return the decode attention of one layer on one GPU; `serial_ns` is per context token.

    With several `queries` of a sequence its keys are read once, and their products count where they take
    longer: 4 h d operations a key for each.
    """
    # Kernels for grouped heads split the context, and have no chain.
    grouped = heads > kv_heads
    key_s = 2.0 * kv_bytes * kv_heads * head_dim / speed.bytes_per_s
    if queries > 1.0:
        key_s = max(key_s, 4.0 * heads * head_dim * queries / speed.flop_per_s)
    return DecodeAttention(
        key_s=key_s,
        query_s=2.0 * queries * ACTIVATION_BYTES * heads * head_dim / speed.bytes_per_s,
        pad=pad,
        serial_s=0.0 if grouped else serial_ns * 1e-9 * head_dim / 128.0,
        t0_s=speed.t0_s,
        p=speed.p,
    )


def latent_prefill(
    heads: float,
    speed: OpSpeed,
    *,
    kv_rank: float,
    nope_dim: float,
    rope_dim: float,
    v_dim: float,
    serial_ns: float,
) -> PrefillAttention:
    """Return the prefill of latent attention (MLA) with keys and values expanded to all heads.

    A pair costs 2 h (d + v) operations, with d = nope + rope the width of a key and v that of a value. The
    latents of new tokens are expanded by a product that counts among the layer's products; those of cached
    tokens are expanded again, 2 r h (nope + v) operations each, and that counts here: in `key_s`, and off
    `token_s` for the keys that are new.
    """
    width = (nope_dim + rope_dim) + v_dim
    expand_s = 2.0 * kv_rank * heads * (nope_dim + v_dim) / speed.flop_per_s
    stream_s = ACTIVATION_BYTES * heads * width / speed.bytes_per_s
    return PrefillAttention(
        pair_s=2.0 * heads * width / speed.flop_per_s,
        token_s=stream_s - expand_s,
        key_s=stream_s + expand_s,
        serial_s=serial_ns * 1e-9 * (nope_dim + rope_dim) / 128.0,
        t0_s=speed.t0_s,
        p=speed.p,
    )


def latent_decode(
    heads: float,
    speed: OpSpeed,
    *,
    kv_rank: float,
    rope_dim: float,
    kv_bytes: float,
    pad: float,
    queries: float = 1.0,
) -> DecodeAttention:
    """Return the decode of latent attention in absorbed form: every head queries the latents themselves.

    A cached token is r + rope numbers, read once for all heads, and costs 2 h (r + rope) operations for its
    score and 2 h r for its value. With 128 heads that is 242 operations a byte in 16 bits, about what an H100
    offers: either limit may rule, and as kernels for it come close to both, the larger counts. Queries and
    outputs are h (r + rope) and h r wide; the products that absorb them count among the layer's products.
    """
    latent = kv_rank + rope_dim
    memory_s = kv_bytes * latent / speed.bytes_per_s
    compute_s = 2.0 * queries * heads * (latent + kv_rank) / speed.flop_per_s
    return DecodeAttention(
        key_s=max(memory_s, compute_s),
        query_s=queries * ACTIVATION_BYTES * heads * (latent + kv_rank) / speed.bytes_per_s,
        pad=pad,
        serial_s=0.0,
        t0_s=speed.t0_s,
        p=speed.p,
    )


DELTA_CHUNK = 64.0
"""Tokens that the kernels of the gated delta rule take together in prefill."""


def delta_prefill(
    value_heads: float,
    key_dim: float,
    value_dim: float,
    speed: OpSpeed,
    *,
    channels: float,
) -> PrefillAttention:
    """Return the prefill of a layer of the gated delta rule: linear in the tokens, whatever came before.

    In chunks of C tokens, a token and head cost 6 k v operations against the state (read, correct, update)
    and C (6 k + 4 v) inside its chunk (two products of keys, one with queries, three that apply them).
    Moved are inputs and outputs, the corrected keys and values twice, and a state in 16 bits for every
    chunk. The two add up: the kernels run one after the other.
    """
    flops = value_heads * (
        6.0 * key_dim * value_dim + DELTA_CHUNK * (6.0 * key_dim + 4.0 * value_dim)
    )
    state = value_heads * key_dim * value_dim / DELTA_CHUNK
    moved = channels + value_heads * (3.0 * value_dim + 2.0 * key_dim) + 2.0 * state
    return PrefillAttention(
        pair_s=0.0,
        token_s=flops / speed.flop_per_s + ACTIVATION_BYTES * moved / speed.bytes_per_s,
        key_s=0.0,
        serial_s=0.0,
        t0_s=speed.t0_s,
        p=speed.p,
    )


def delta_decode(
    state_bytes: float, channels: float, speed: OpSpeed, queries: float = 1.0
) -> DecodeAttention:
    """Return the decode of such a layer: a sequence's state is read and written, however long it is.

    Where guesses are checked there is a state to write after each, of which one is kept.
    """
    moved = (1.0 + queries) * state_bytes + queries * ACTIVATION_BYTES * channels
    return DecodeAttention(
        key_s=0.0,
        query_s=moved / speed.bytes_per_s,
        pad=0.0,
        serial_s=0.0,
        t0_s=speed.t0_s,
        p=speed.p,
    )


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """The experts of one mixture-of-experts layer on one GPU.

    m tokens with k of E experts each touch E_a = E (1 - (1 - k/E)^m) experts on average; their
    weights are read once, and each touched expert rounds its rows up by `pad` on average.
    """

    experts: float
    top_k: float
    flop_s: float
    expert_s: float
    row_s: float
    pad: float
    t0_s: float
    p: float

    def active(self, m: Num) -> Num:
        """Return the expected number of distinct experts that m tokens touch."""
        touched: Num = self.experts * (1.0 - (1.0 - self.top_k / self.experts) ** m)
        return touched

    def seconds(self, m: Num) -> Num:
        """Return the time in seconds for m tokens; the launch is paid even for none."""
        return self.seconds_of(m, self.active(m))

    def seconds_of(self, m: Num, active: Num) -> Num:
        """Return the time in seconds for m tokens that touch so many experts."""
        p = self.p
        compute = self.flop_s * (m * self.top_k + self.pad * active)
        memory = self.expert_s * active + self.row_s * m
        total: Num = (compute**p + memory**p) ** (1.0 / p) + self.t0_s
        return total


def grouped_experts(
    hidden: float,
    inner: float,
    experts: float,
    top_k: float,
    speed: OpSpeed,
    *,
    weight_bytes: float,
    pad: float,
    pad_k: float = 0.0,
    pad_n: float = 0.0,
) -> GroupedExperts:
    """Return the gated experts of a layer: three (hidden x inner) matrices each.

    Narrow experts fill neither the arithmetic units nor the memory pipe: they take as long as if `inner` were
    pad_k and pad_n wider.
    """
    rows = ACTIVATION_BYTES * (2.0 * hidden + 2.0 * top_k * inner)
    return GroupedExperts(
        experts=experts,
        top_k=top_k,
        flop_s=6.0 * hidden * (inner + pad_k) / speed.flop_per_s,
        expert_s=3.0 * weight_bytes * hidden * (inner + pad_n) / speed.bytes_per_s,
        row_s=rows / speed.bytes_per_s,
        pad=pad,
        t0_s=speed.t0_s,
        p=speed.p,
    )


SPREAD_IMBALANCE = 1.25
"""Tokens of the busiest GPU over the mean, where experts are spread over GPUs: an assumption."""


def spread_experts(whole: GroupedExperts, tp: int, ranks: int) -> GroupedExperts:
    """Return the experts of one of tp x ranks GPUs that have so many of them each, none split.

    Tokens are those of one rank, and all ranks have as many. A GPU has E / GPUs experts, each of which is
    met by a token of every rank with 1 - (1 - k/E)^ranks; of the products k / tp for a token are its own.
    """
    local = whole.experts / (tp * ranks)
    met = 1.0 - (1.0 - whole.top_k / whole.experts) ** ranks
    share = SPREAD_IMBALANCE / tp
    flop_s = whole.flop_s * whole.top_k * share / (local * met)
    return replace(
        whole,
        experts=local,
        top_k=local * met,
        flop_s=flop_s,
        pad=whole.pad * whole.flop_s / flop_s,
        row_s=whole.row_s * share,
    )


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sum over the GPUs of a node: (alpha^p + (2 (n-1)/n bytes / bus)^p)^(1/p).

    p below 1 covers the band of sizes where neither latency nor bandwidth rules.
    """

    row_s: float
    alpha_s: float
    p: float

    def seconds(self, m: Num) -> Num:
        """Return seconds to sum m rows of `hidden` activations."""
        p = self.p
        total: Num = (self.alpha_s**p + (self.row_s * m) ** p) ** (1.0 / p)
        return total


def all_reduce(
    gpus: int, row: float, *, alpha_us: float, bus_bytes_per_s: float, p: float
) -> AllReduce | None:
    """Return the all-reduce of rows of `row` activations, or None on a single GPU."""
    if gpus == 1:
        return None
    wire = 2.0 * (gpus - 1) / gpus * ACTIVATION_BYTES * row
    return AllReduce(wire / bus_bytes_per_s, alpha_us * 1e-6, p)
