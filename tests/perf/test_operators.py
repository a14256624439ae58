from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog import nodes
from atoll.perf import operators
from atoll.perf.constants import OpSpeed
from atoll.perf.operators import (
    AllReduce,
    Array,
    DecodeAttention,
    GroupedExperts,
    PrefillAttention,
    Roofline,
    Stream,
    larger,
    smaller,
)

Operator = Roofline | Stream | PrefillAttention | DecodeAttention | GroupedExperts | AllReduce

sharpness = st.floats(0.3, 8.0)
launch = st.floats(0.0, 1e-4)
share = st.floats(0.05, 1.3)
width = st.integers(16, 32768).map(float)


@st.composite
def speeds(draw: st.DrawFn) -> OpSpeed:
    return OpSpeed(
        peak=draw(st.floats(1e13, 5e15)),
        bandwidth=draw(st.floats(1e11, 8e12)),
        e_f=draw(share),
        e_b=draw(share),
        t0_s=draw(launch),
        p=draw(sharpness),
    )


@st.composite
def gemms(draw: st.DrawFn) -> Roofline:
    pads = {"pad_k": draw(st.floats(0, 2000)), "pad_n": draw(st.floats(0, 2000))}
    bytes_ = draw(st.sampled_from([0.53125, 1.0, 2.0, 4.0]))
    return operators.gemm(draw(width), draw(width), draw(speeds()), weight_bytes=bytes_, **pads)


@st.composite
def prefills(draw: st.DrawFn) -> PrefillAttention:
    return operators.prefill_attention(
        draw(st.integers(1, 64)),
        draw(st.integers(1, 8)),
        draw(st.sampled_from([64.0, 128.0])),
        draw(speeds()),
        kv_bytes=draw(st.sampled_from([1.0, 2.0])),
        serial_ns=draw(st.floats(0, 100)),
    )


@st.composite
def decodes(draw: st.DrawFn) -> DecodeAttention:
    kv_heads = draw(st.integers(1, 8))
    return operators.decode_attention(
        kv_heads * draw(st.integers(1, 8)),
        kv_heads,
        draw(st.sampled_from([64.0, 128.0])),
        draw(speeds()),
        kv_bytes=draw(st.sampled_from([1.0, 2.0])),
        pad=draw(st.floats(0, 100)),
        serial_ns=draw(st.floats(0, 100)),
    )


@st.composite
def expert_layers(draw: st.DrawFn) -> GroupedExperts:
    experts = draw(st.integers(1, 256))
    return operators.grouped_experts(
        draw(width),
        draw(width),
        experts,
        draw(st.integers(1, experts)),
        draw(speeds()),
        weight_bytes=draw(st.sampled_from([0.53125, 1.0, 2.0])),
        pad=draw(st.floats(0, 64)),
    )


@st.composite
def sums(draw: st.DrawFn) -> AllReduce:
    found = operators.all_reduce(
        draw(st.integers(2, 16)),
        draw(width),
        alpha_us=draw(st.floats(0.1, 200)),
        bus_bytes_per_s=draw(st.floats(1e9, 1e12)),
        p=draw(sharpness),
    )
    assert found is not None
    return found


@st.composite
def passes(draw: st.DrawFn) -> Stream:
    return operators.elementwise(draw(width), draw(speeds()))


ARGUMENTS: dict[type[Operator], int] = {
    Roofline: 1,
    Stream: 1,
    PrefillAttention: 4,
    DecodeAttention: 2,
    GroupedExperts: 1,
    AllReduce: 1,
}
any_operator = st.one_of(gemms(), prefills(), decodes(), expert_layers(), sums(), passes())
sizes = st.lists(st.integers(1, 10**6).map(float), min_size=4, max_size=4)


def seconds(op: Operator, at: list[float]) -> float:
    return float(op.seconds(*at[: ARGUMENTS[type(op)]]))


def limits(op: Operator, at: list[float]) -> list[float]:
    """The times that no operator can be faster than, one resource each."""
    if isinstance(op, Roofline):
        return [op.flop_s * at[0], op.fixed_s + op.row_s * at[0], op.t0_s]
    if isinstance(op, Stream):
        return [op.row_s * at[0], op.t0_s]
    if isinstance(op, PrefillAttention):
        pairs, tokens, keys, longest = at
        return [
            op.pair_s * pairs,
            op.token_s * tokens + op.key_s * keys,
            op.serial_s * longest,
            op.t0_s,
        ]
    if isinstance(op, DecodeAttention):
        return [at[0] * op.key_s * at[1], at[0] * op.query_s, op.serial_s * at[1], op.t0_s]
    if isinstance(op, GroupedExperts):
        active = op.active(at[0])
        return [
            op.flop_s * op.top_k * at[0],
            op.expert_s * active + op.row_s * at[0],
            op.t0_s,
        ]
    return [op.alpha_s, op.row_s * at[0]]


@given(any_operator, st.lists(sizes, min_size=1, max_size=5))
def test_floats_and_arrays_agree(op: Operator, rows: list[list[float]]) -> None:
    count = ARGUMENTS[type(op)]
    columns: list[Array] = [np.array([row[i] for row in rows]) for i in range(count)]
    many = op.seconds(*columns)
    assert isinstance(many, np.ndarray)
    one = [seconds(op, row) for row in rows]
    assert all(isinstance(value, float) for value in one)
    assert many == pytest.approx(one, rel=1e-12)


@given(any_operator, sizes, st.integers(0, 3), st.floats(1.0, 100.0))
def test_more_work_never_takes_less_time(
    op: Operator, at: list[float], which: int, factor: float
) -> None:
    more = [value * factor if i == which else value for i, value in enumerate(at)]
    assert seconds(op, more) >= seconds(op, at) * (1 - 1e-12)


@given(any_operator, sizes)
def test_no_operator_beats_any_of_its_limits(op: Operator, at: list[float]) -> None:
    total = seconds(op, at)
    assert all(total >= limit * (1 - 1e-12) for limit in limits(op, at))


@given(st.one_of(gemms(), prefills(), decodes(), expert_layers(), sums()), sizes)
def test_a_sharp_roofline_is_the_larger_limit(
    op: Roofline | PrefillAttention | DecodeAttention | GroupedExperts | AllReduce,
    at: list[float],
) -> None:
    if isinstance(op, GroupedExperts):
        op = replace(op, pad=0.0)
    if isinstance(op, DecodeAttention):
        op = replace(op, pad=0.0, query_s=0.0)
    sharp = replace(op, p=16.0)
    if isinstance(op, DecodeAttention | AllReduce):
        expected = max(limits(op, at))
    else:
        *times, t0 = limits(op, at)
        expected = max(times) + t0
    # Three equal limits are 3^(1/16) = 1.07 times one.
    assert expected * (1 - 1e-12) <= seconds(sharp, at) <= expected * 1.0711


def test_the_sharpest_roofline_a_file_may_ask_for() -> None:
    op = Roofline(flop_s=1e-6, fixed_s=2e-6, row_s=0.0, t0_s=0.0, p=16.0)
    assert op.seconds(1.0) == pytest.approx(2e-6, rel=1e-5)
    # A microsecond is short for a kernel; even a millionth of that does not vanish.
    op = Roofline(flop_s=1e-12, fixed_s=2e-12, row_s=0.0, t0_s=0.0, p=16.0)
    assert op.seconds(1.0) == pytest.approx(2e-12, rel=1e-5)


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(0.3, 8.0))
def test_a_sharper_roofline_is_never_slower(compute_s: float, memory_s: float, p: float) -> None:
    soft = Roofline(compute_s, memory_s, 0.0, 0.0, p).seconds(1.0)
    assert Roofline(compute_s, memory_s, 0.0, 0.0, p + 0.5).seconds(1.0) <= soft * (1 + 1e-12)


# By hand.


def test_a_product_by_hand() -> None:
    op = operators.gemm(
        4000,
        1000,
        OpSpeed(peak=1e12, bandwidth=1e9, e_f=0.5, e_b=0.8, t0_s=1e-6, p=2),
        weight_bytes=2,
        pad_k=100,
        pad_n=50,
    )
    flop = 2 * 10 * 4000 * (1000 + 100)
    moved = 2 * (4000 + 50) * 1000 + 2 * 10 * (4000 + 1000)
    assert op.seconds(10.0) == pytest.approx(math.hypot(flop / 0.5e12, moved / 0.8e9) + 1e-6)


def test_a_well_known_product_on_an_h100() -> None:
    # 8192^3 is deep in the compute-bound regime: 1.0995e12 FLOP at 989 TFLOP/s take 1.112 ms.
    op = operators.gemm(
        8192,
        8192,
        OpSpeed(peak=989e12, bandwidth=3.35e12, e_f=1, e_b=1, t0_s=0, p=4),
        weight_bytes=2,
    )
    assert op.seconds(8192.0) == pytest.approx(1.112e-3, rel=1e-3)
    # One row is the weights at full bandwidth: 134 MB at 3.35 TB/s take 40.06 us.
    assert op.seconds(1.0) == pytest.approx(40.06e-6, rel=1e-3)


def test_a_pass_by_hand() -> None:
    op = operators.elementwise(1000, OpSpeed(peak=1.0, bandwidth=1e9, e_b=0.5, t0_s=3e-6))
    assert op.seconds(7.0) == pytest.approx(7 * 1000 * 2 / 0.5e9 + 3e-6)
    both = op + operators.elementwise(500, OpSpeed(peak=1.0, bandwidth=1e9, e_b=0.5, t0_s=3e-6))
    assert both.seconds(7.0) == pytest.approx(7 * 1500 * 2 / 0.5e9 + 6e-6)


def test_prefill_attention_by_hand() -> None:
    op = operators.prefill_attention(
        32,
        8,
        64,
        OpSpeed(peak=1e12, bandwidth=1e9, e_f=0.5, e_b=0.25, t0_s=1e-5, p=1),
        kv_bytes=1,
        serial_ns=10,
    )
    pairs, tokens, keys, longest = 5000.0, 100.0, 300.0, 150.0
    flop_s = 4 * 64 * 32 * pairs / 0.5e12
    queries_and_outputs = 2 * 2 * 32 * 64 * tokens
    keys_and_values = 2 * 1 * 8 * 64 * keys
    memory_s = (queries_and_outputs + keys_and_values) / 0.25e9
    # A chain step over 64 dimensions takes half of one over 128.
    chain_s = 150 * 10e-9 / 2
    assert op.seconds(pairs, tokens, keys, longest) == pytest.approx(
        flop_s + memory_s + chain_s + 1e-5
    )


def test_decode_attention_by_hand() -> None:
    def build(kv_heads: float) -> DecodeAttention:
        return operators.decode_attention(
            32,
            kv_heads,
            128,
            OpSpeed(peak=1.0, bandwidth=1e9, e_b=0.5, t0_s=1e-5, p=1),
            kv_bytes=2,
            pad=16,
            serial_ns=10,
        )

    keys_and_values = 2 * 2 * 8 * 128 * (1000 + 16)
    query_and_output = 2 * 2 * 32 * 128
    memory_s = 3 * (keys_and_values + query_and_output) / 0.5e9
    assert build(8).seconds(3.0, 1000.0) == pytest.approx(memory_s + 1e-5)
    # Without groups the kernel does not split the context and walks it in turn.
    assert build(32).serial_s == pytest.approx(10e-9)
    assert build(8).serial_s == 0.0
    ungrouped_s = 3 * (4 * keys_and_values + query_and_output) / 0.5e9
    assert build(32).seconds(3.0, 1000.0) == pytest.approx(ungrouped_s + 1e-5 + 1000 * 10e-9)


def test_launch_time_of_decode_meets_the_stream_smoothly() -> None:
    op = operators.decode_attention(
        8,
        2,
        128,
        OpSpeed(peak=1.0, bandwidth=1e9, e_b=1, t0_s=3e-4, p=2),
        kv_bytes=2,
        pad=0,
        serial_ns=0,
    )
    stream_s = 100 * (1000 * op.key_s + op.query_s)
    assert op.seconds(100.0, 1000.0) == pytest.approx(math.hypot(stream_s, 3e-4))


def test_experts_by_hand() -> None:
    op = operators.grouped_experts(
        100,
        50,
        8,
        2,
        OpSpeed(peak=1e12, bandwidth=1e9, e_f=0.5, e_b=0.25, t0_s=1e-5, p=1),
        weight_bytes=2,
        pad=3,
    )
    m = 6.0
    active = 8 * (1 - 0.75**6)
    matrices = 3 * 100 * 50
    flop_s = 2 * matrices * (m * 2 + 3 * active) / 0.5e12
    rows = m * 2 * (2 * 100 + 2 * 2 * 50)
    memory_s = (2 * matrices * active + rows) / 0.25e9
    assert op.seconds(m) == pytest.approx(flop_s + memory_s + 1e-5)


def experts(count: int, top_k: int) -> GroupedExperts:
    return operators.grouped_experts(
        64,
        64,
        count,
        top_k,
        OpSpeed(peak=1e12, bandwidth=1e9, e_f=1, e_b=1, t0_s=0, p=1),
        weight_bytes=2,
        pad=0,
    )


@pytest.mark.parametrize(
    ("count", "top_k", "tokens"),
    [(2, 1, 3), (3, 2, 2), (4, 1, 4), (4, 2, 3), (5, 3, 3), (3, 3, 2), (1, 1, 2)],
)
def test_touched_experts_against_every_possible_routing(
    count: int, top_k: int, tokens: int
) -> None:
    choices = list(itertools.combinations(range(count), top_k))
    routings = list(itertools.product(choices, repeat=tokens))
    mean = sum(len(set().union(*routing)) for routing in routings) / len(routings)
    assert experts(count, top_k).active(float(tokens)) == pytest.approx(mean, rel=1e-12)


def test_touched_experts_against_drawn_routings() -> None:
    rng = np.random.default_rng(1)
    drawn = [
        len({int(e) for _ in range(40) for e in rng.choice(64, size=4, replace=False)})
        for _ in range(200)
    ]
    assert experts(64, 4).active(40.0) == pytest.approx(np.mean(drawn), rel=0.01)


def test_touched_experts_at_the_ends() -> None:
    op = experts(128, 8)
    assert op.active(0.0) == 0.0
    assert op.active(1.0) == pytest.approx(8.0)
    assert op.active(1e5) == pytest.approx(128.0)


def test_no_tokens_still_pay_the_launch() -> None:
    assert replace(experts(8, 2), t0_s=1e-5).seconds(0.0) == 1e-5


def test_all_reduce_by_hand() -> None:
    op = operators.all_reduce(4, 1000, alpha_us=5, bus_bytes_per_s=1e9, p=1)
    assert op is not None
    assert op.seconds(10.0) == pytest.approx(5e-6 + 2 * 3 / 4 * 10 * 1000 * 2 / 1e9)


def test_one_gpu_sums_nothing() -> None:
    assert operators.all_reduce(1, 1000, alpha_us=5, bus_bytes_per_s=1e9, p=1) is None


@given(st.integers(2, 16), st.floats(1, 100), st.floats(1e9, 1e12), st.floats(0.4, 4))
def test_all_reduce_is_the_one_of_the_catalog(
    gpus: int, alpha_us: float, bus: float, p: float
) -> None:
    op = operators.all_reduce(gpus, 4096, alpha_us=alpha_us, bus_bytes_per_s=bus, p=p)
    assert op is not None
    fact = nodes.AllReduceCost(alpha_us, bus, p)
    for rows in (1.0, 64.0, 8192.0):
        assert op.seconds(rows) == pytest.approx(fact.time_s(rows * 4096 * 2, gpus), rel=1e-12)


@pytest.mark.parametrize(("function", "expected"), [(smaller, [1.0, 2.0]), (larger, [2.0, 3.0])])
def test_limits_of_floats_and_arrays(
    function: Callable[[object, float], object], expected: list[float]
) -> None:
    assert [function(1.0, 2.0), function(3.0, 2.0)] == expected
    assert np.array_equal(np.asarray(function(np.array([1.0, 3.0]), 2.0)), expected)
