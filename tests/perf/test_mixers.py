"""Latent attention and the gated delta rule: their operators by hand, in layers, in memory, on the move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.transformer import DeltaSpec, MlaSpec, TransformerSpec
from atoll.perf import operators
from atoll.perf.batch import Batch
from atoll.perf.constants import OpClass, OpSpeed, Tag, default_constants
from atoll.perf.layers import (
    LayerKind,
    as_held,
    layer_kinds,
    model_ops,
    name_grounds,
    op_classes_of,
    splits_evenly,
    tp_sizes,
)
from atoll.perf.memory_model import MemoryModel
from atoll.perf.step import analytic, step_seconds
from atoll.plan.handover import kv_bytes, kv_bytes_by_layers
from tests.perf.builders import BANDWIDTH, PEAK, constants, gpu, model, node, node_type, spec

MLA = MlaSpec(q_rank=96, kv_rank=64, nope_dim=32, rope_dim=16, v_dim=32)
DELTA = DeltaSpec(frozenset({0, 1, 3, 4}), 2, 4, 16, 32, 4)


def latent(**changes: object) -> TransformerSpec:
    """Six layers of latent attention."""
    return spec(kv_heads=1, head_dim=MLA.query_dim, **({"mla": MLA} | changes))


def stateful() -> TransformerSpec:
    """Six layers, of which the third and the last have attention."""
    return spec(delta=DELTA)


class TestOperatorsByHand:
    def test_absorbed_decode_of_deepseek_on_an_h100_is_at_the_ridge(self) -> None:
        """128 heads over a latent of 512 + 64: 278,528 operations and 1152 bytes a cached token."""
        op = operators.latent_decode(
            128, OpSpeed(989e12, 3350e9), kv_rank=512, rope_dim=64, kv_bytes=2, pad=0.0
        )
        assert op.key_s == pytest.approx(max(1152 / 3350e9, 278528 / 989e12))
        assert op.key_s == pytest.approx(1152 / 3350e9)
        slower = operators.latent_decode(
            128, OpSpeed(989e12, 3350e9, e_f=0.66), kv_rank=512, rope_dim=64, kv_bytes=2, pad=0.0
        )
        assert slower.key_s == pytest.approx(278528 / (989e12 * 0.66))
        # 64 sequences over 4096 tokens: 262,144 latents, and queries and outputs of 1088 x 128.
        expected = 262144 * 1152 / 3350e9 + 64 * 2 * 128 * 1088 / 3350e9
        assert op.seconds(64.0, 4096.0) == pytest.approx(expected)

    def test_eight_gpus_do_not_read_fewer_latents(self) -> None:
        """Heads are split, the latent is not: below the ridge decode gains nothing from more GPUs."""
        shares = [
            operators.latent_decode(
                heads,
                OpSpeed(989e12, 3350e9, e_f=0.9),
                kv_rank=512,
                rope_dim=64,
                kv_bytes=2,
                pad=0.0,
            ).key_s
            for heads in (128, 64, 16)
        ]
        assert shares == [pytest.approx(1152 / 3350e9)] * 3

    def test_prefill_expands_cached_latents_again_and_new_ones_elsewhere(self) -> None:
        op = operators.latent_prefill(
            4,
            OpSpeed(peak=PEAK, bandwidth=BANDWIDTH, e_f=1.0, e_b=1.0, t0_s=0.0, p=1.0),
            kv_rank=64,
            nope_dim=32,
            rope_dim=16,
            v_dim=32,
            serial_ns=0.0,
        )
        row = 2 * 4 * (48 + 32) / BANDWIDTH
        expand = 2 * 64 * 4 * (32 + 32) / PEAK
        pair = 2 * 4 * (48 + 32) / PEAK
        fresh = op.seconds(5000.0, 100.0, 100.0, 100.0)
        assert fresh == pytest.approx(5000 * pair + 200 * row)
        cached = op.seconds(5000.0, 100.0, 400.0, 400.0)
        assert cached - fresh == pytest.approx(300 * (row + expand))

    def test_the_delta_rule_takes_what_its_state_takes(self) -> None:
        state = DELTA.state_bytes(2.0)
        op = operators.delta_decode(
            state, DELTA.channels, OpSpeed(peak=PEAK, bandwidth=BANDWIDTH, e_b=0.5, t0_s=0.0, p=1.0)
        )
        seconds = 10 * (2 * state + 2 * DELTA.channels) / (0.5 * BANDWIDTH)
        assert op.seconds(10.0, 0.0) == pytest.approx(seconds)
        assert op.seconds(10.0, 1e6) == op.seconds(10.0, 0.0)

    def test_prefill_of_the_delta_rule_of_qwen3_next(self) -> None:
        """Per head and token 6 x 128 x 128 against the state and 64 x 10 x 128 in the chunk."""
        op = operators.delta_prefill(
            32,
            128,
            128,
            OpSpeed(peak=PEAK, bandwidth=1e30, e_f=1.0, e_b=1.0, t0_s=0.0, p=1.0),
            channels=8192,
        )
        assert op.seconds(0.0, 1000.0, 1000.0, 0.0) == pytest.approx(
            1000 * 32 * (6 * 128 * 128 + 64 * 10 * 128) / PEAK
        )
        streamed = operators.delta_prefill(
            32,
            128,
            128,
            OpSpeed(peak=1e40, bandwidth=BANDWIDTH, e_f=1.0, e_b=1.0, t0_s=0.0, p=1.0),
            channels=8192,
        )
        rows = 8192 + 32 * 5 * 128 + 2 * 32 * 128 * 128 / 64
        assert streamed.seconds(0.0, 10.0, 10.0, 0.0) == pytest.approx(10 * 2 * rows / BANDWIDTH)

    @given(
        heads=st.integers(1, 128),
        rank=st.integers(16, 1024),
        rope=st.integers(8, 128),
        shares=st.tuples(st.floats(0.1, 1.2), st.floats(0.1, 1.2)),
        p=st.floats(0.5, 4.0),
        cached=st.integers(0, 100_000),
        new=st.integers(1, 8192),
    )
    def test_more_work_never_takes_less_time(
        self, heads: int, rank: int, rope: int, shares: tuple[float, float], p: float,
        cached: int, new: int,
    ) -> None:  # fmt: skip
        e_f, e_b = shares
        speed = OpSpeed(PEAK, BANDWIDTH, e_f, e_b, 1e-6, p)
        prefill = operators.latent_prefill(
            heads, speed, kv_rank=rank, nope_dim=2 * rope, rope_dim=rope, v_dim=2 * rope,
            serial_ns=1.0,
        )  # fmt: skip
        decode = operators.latent_decode(
            heads, speed, kv_rank=rank, rope_dim=rope, kv_bytes=2.0, pad=4.0
        )

        def prompt(tokens: int, before: int) -> float:
            batch = Batch.prefill(float(tokens), 1.0, float(before))
            return prefill.seconds(
                batch.pairs(None),
                batch.prefill_tokens,
                batch.prefill_keys(None),
                batch.longest(None),
            )

        assert 0.0 < prompt(new, cached) <= prompt(new, cached + 100)
        assert prompt(new, cached) <= prompt(new + 10, cached)
        assert decode.seconds(1.0, float(cached)) <= decode.seconds(2.0, float(cached))
        assert decode.seconds(1.0, float(cached)) <= decode.seconds(1.0, cached + 50.0)


def ideal_product(m: float, n: float, k: float) -> float:
    """Both limits added at full speed, 16-bit weights."""
    return 2 * m * n * k / PEAK + (2 * n * k + 2 * m * (n + k)) / BANDWIDTH


class TestLayers:
    @pytest.mark.parametrize("tp", [1, 2])
    def test_products_of_a_latent_layer(self, tp: int) -> None:
        ops = model_ops(latent(), node(2), tp, constants().for_gpu(gpu()))
        (layer,) = ops.layers
        heads = 8 // tp
        shapes = [
            (96 + 64 + 16, 512),  # both latents, whole on every GPU
            (heads * 48, 96),
            (heads * 64, 64),
            (512, heads * 32),
            (2 * 1024 // tp, 512),
            (512, 1024 // tp),
        ]
        expected = sum(ideal_product(7.0, n, k) for n, k in shapes)
        assert sum(op.seconds(7.0) for op in layer.dense) == pytest.approx(expected)

    def test_products_of_a_layer_with_a_state(self) -> None:
        ops = model_ops(stateful(), node(2), 2, constants().for_gpu(gpu()))
        assert ops.kinds == (LayerKind(0, False), LayerKind(None, False))
        shapes = [(192 // 2 + 64, 512), (4, 512), (512, 64), (1024, 512), (512, 512)]
        expected = sum(ideal_product(7.0, n, k) for n, k in shapes)
        assert sum(op.seconds(7.0) for op in ops.layers[0].dense) == pytest.approx(expected)

    def test_the_gate_widens_the_queries(self) -> None:
        plain = model_ops(spec(), node(), 1, constants().for_gpu(gpu())).layers[0]
        gated = model_ops(spec(attention_gate=True), node(), 1, constants().for_gpu(gpu())).layers[
            0
        ]
        assert plain.dense[0].seconds(1.0) == pytest.approx(ideal_product(1.0, 768, 512))
        assert gated.dense[0].seconds(1.0) == pytest.approx(ideal_product(1.0, 1280, 512))
        assert spec(attention_gate=True).total_params - spec().total_params == 6 * 512 * 512

    def test_a_context_slows_only_layers_that_keep_it(self) -> None:
        state, attention = model_ops(stateful(), node(), 1, constants().for_gpu(gpu())).layers
        short, long = Batch.decode(4, 100), Batch.decode(4, 100_000)
        assert state.seconds(short) == state.seconds(long)
        assert attention.seconds(short) < attention.seconds(long)
        first, later = Batch.prefill(64, 1, 0), Batch.prefill(64, 1, 50_000)
        assert state.seconds(first) == state.seconds(later)

    @pytest.mark.parametrize("llm", [latent(), stateful()])
    def test_a_step_is_the_same_in_numbers_and_in_arrays(self, llm: TransformerSpec) -> None:
        step = analytic(llm, node(), constants=constants())
        sizes = np.array([1.0, 8.0, 64.0])
        zero = np.zeros(3)
        many = step_seconds(step, Batch(zero, zero, zero, sizes, 100.0 * sizes), 0, 6)
        ones = [step_seconds(step, Batch.decode(n, 100 * n), 0, 6) for n in sizes]
        assert many == pytest.approx(ones)

    def test_groups(self) -> None:
        assert tp_sizes(latent(), 8) == (1, 2, 4, 8)
        # Two key heads do not split over four GPUs.
        assert splits_evenly(stateful(), 2)
        assert not splits_evenly(stateful(), 4)

    def test_a_state_is_worth_as_many_tokens_as_take_its_bytes(self) -> None:
        state, attention = model_ops(stateful(), node(), 1, constants().for_gpu(gpu())).layers
        per_token = stateful().kv_bytes_per_token_layer
        assert state.state_tokens * per_token == pytest.approx(stateful().state_bytes_per_layer)
        assert attention.state_tokens == 0.0


class TestGrounds:
    def test_what_was_not_measured_is_a_proxy(self) -> None:
        h100 = node_type("H100:8")
        assert analytic(model("deepseek-v3"), h100).provenance.startswith(
            "proxy (H100's grouped-query kernels for latent attention): attention_prefill"
        )
        assert "for gated delta rule" in analytic(model("qwen3-next-80b-a3b"), h100).provenance
        assert analytic(model("llama-3.3-70b"), h100).provenance.startswith("measured")

    def test_four_bit_weights_rest_on_the_cores_that_run_them(self) -> None:
        llm = model("llama-3.3-70b@nvfp4")
        b200, h100 = node_type("B200:1").gpu, node_type("H100:1").gpu
        assert OpClass.GEMM_FP4 in op_classes_of(llm, b200)
        assert OpClass.GEMM_FP4 not in op_classes_of(llm, h100)
        for kind in (b200, h100):
            fitted = default_constants().for_gpu(kind)
            assert name_grounds(llm, kind, fitted).tag(op_classes_of(llm, kind)) is Tag.MEASURED

    def test_values_stay(self) -> None:
        h100 = node_type("H100:8").gpu
        fitted = default_constants().for_gpu(h100)
        named = name_grounds(model("deepseek-v3"), h100, fitted)
        assert named.op(OpClass.ATTENTION_DECODE).tag is Tag.PROXY
        assert named.op(OpClass.ATTENTION_DECODE).e_b == fitted.op(OpClass.ATTENTION_DECODE).e_b
        assert name_grounds(spec(), h100, fitted) is fitted


class TestMemory:
    def test_deepseek_on_eight_h200_by_hand(self) -> None:
        memory = MemoryModel.of(model("deepseek-v3"), node_type("H200:8"))
        assert memory.tp == 8
        # Every GPU holds the latents of all heads.
        assert memory.kv_bytes_per_token_layer() == 1152
        assert memory.kv_bytes_per_sequence(0, 61, 1000.0) == 61 * 1000 * 1152

    def test_each_gpu_has_its_own_latent_matrices(self) -> None:
        whole, held = latent(vocab=4032), as_held(latent(vocab=4032), 4)
        copied = 512 * 96 + 512 * 80 + 96 + 64
        assert held.layer_params(0) - whole.layer_params(0) == 3 * copied
        assert as_held(whole, 1) is whole

    def test_a_sequence_keeps_its_state_and_few_tokens(self) -> None:
        llm = stateful()
        memory = MemoryModel.of(llm, node())
        state = llm.state_bytes_per_layer
        assert memory.kv_bytes_per_sequence(0, 6, 0.0) == 4 * state
        assert memory.kv_bytes_per_sequence(0, 3, 100.0) == 2 * state + 100 * 512
        assert MemoryModel.of(llm, node(2), tp=2).kv_bytes_per_sequence(0, 2, 50.0) == state
        free = memory.free_bytes(0, 6)
        tokens = memory.kv_tokens(0, 6, 100.0)
        assert tokens == int(free / (4 * state + 2 * 100 * 512) * 100)

    @given(
        states=st.frozensets(st.integers(0, 7), max_size=7),
        context=st.floats(1.0, 1e5),
        tp=st.sampled_from([1, 2]),
    )
    def test_room_is_that_of_the_worst_range(
        self, states: frozenset[int], context: float, tp: int
    ) -> None:
        from atoll.perf.step import Position

        delta = DeltaSpec(states, 2, 4, 16, 32, 4) if states else None
        memory = MemoryModel.of(spec(layers=8, delta=delta), node(2), tp=tp)
        room = memory.sequences_by_layers(context, Position.MIDDLE)
        outer = memory.outer_bytes(Position.MIDDLE)
        for j in range(1, 9):
            worst = min(
                (memory.usable_bytes - outer - memory.layer_weight_bytes(i, i + j))
                / memory.kv_bytes_per_sequence(i, i + j, context)
                for i in range(9 - j)
            )
            assert room[j] == pytest.approx(worst)


class TestHandover:
    def test_a_latent_and_a_state_move_once(self) -> None:
        assert kv_bytes(latent(), 0, 6, 100.0) == 6 * 100 * 80 * 2
        llm = stateful()
        state = llm.state_bytes_per_layer
        assert kv_bytes(llm, 0, 3, 100.0) == 2 * state + 100 * 512
        by_layers = kv_bytes_by_layers(llm, 100.0)
        for j in range(7):
            assert by_layers[j] == max(kv_bytes(llm, i, i + j, 100.0) for i in range(7 - j))

    def test_chunks_bound_what_moves(self) -> None:
        scout = model("llama-4-scout")
        assert kv_bytes(scout, 0, 4, 20_000.0) == (3 * 8192 + 20_000) * 4096


def test_kinds_are_few() -> None:
    assert set(layer_kinds(model("qwen3-next-80b-a3b"))) == {
        LayerKind(0, True),
        LayerKind(None, True),
    }
    assert set(layer_kinds(model("llama-4-maverick"))) == {
        LayerKind(8192, True),
        LayerKind(8192, False),
        LayerKind(None, True),
    }
