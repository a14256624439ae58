"""Experts spread over the GPUs of a node: times, memory and capacity, by hand where they can be."""

from __future__ import annotations

import pytest

from atoll.core.ids import Phase
from atoll.engines.limits import EngineLimits
from atoll.engines.table import EngineChoice
from atoll.perf.batch import Batch
from atoll.perf.capacity import CapacityModel, RoleLoad, copy_of
from atoll.perf.memory_model import MemoryModel
from atoll.perf.operators import SPREAD_IMBALANCE
from atoll.perf.step import Position, analytic, step_seconds
from atoll.workload.lengths import LengthMix
from tests.perf.builders import model, node_type

LLM = model("qwen3-235b-a22b@fp8")
NODE = node_type("H200:8")
SPREAD = EngineChoice("vllm", EngineLimits(expert_parallel=True))
PLAIN = EngineChoice("vllm")


@pytest.mark.parametrize(("tp", "ranks"), [(8, 1), (4, 2), (1, 8)])
def test_each_gpu_has_its_experts_whole(tp: int, ranks: int) -> None:
    whole = analytic(LLM, NODE, tp=1, engine=PLAIN).ops.layers[0].experts
    own = analytic(LLM, NODE, tp=tp, engine=SPREAD).ops.layers[0].experts
    assert whole is not None
    assert own is not None
    moe = LLM.moe
    assert moe is not None
    # 128 experts on 8 GPUs; 30 tokens of each rank meet 1 - (1 - 8/128)^(30 ranks) of them.
    assert own.experts == pytest.approx(moe.experts / 8)
    met = 1.0 - (1.0 - moe.top_k / moe.experts) ** (30 * ranks)
    assert own.active(30.0) == pytest.approx(16 * met)
    assert own.expert_s == whole.expert_s
    # Of 30 ranks x 8 products a GPU has an 8th, and the busiest somewhat more.
    products = own.flop_s * 30.0 * own.top_k / whole.flop_s
    assert products == pytest.approx(SPREAD_IMBALANCE * 30 * ranks * moe.top_k / 8)


def test_ranks_exchange_what_all_of_them_have() -> None:
    node = NODE.interconnect.allreduce_for(8)
    layer = analytic(LLM, NODE, tp=1, engine=SPREAD).ops.layers[0]
    assert layer.all_reduce is not None
    # Twice half of a sum over 8 GPUs of 8 ranks' tokens; a rank of one GPU has none of its own.
    wire = 2.0 * 7 / 8 * 2.0 * LLM.hidden / node.bus_bandwidth_bytes_per_s
    assert 2.0 * layer.all_reduce.seconds(1e6) == pytest.approx(8e6 * wire, rel=0.02)
    assert analytic(LLM, NODE, tp=1, engine=PLAIN).ops.layers[0].all_reduce is None
    whole = analytic(LLM, NODE, tp=8, engine=SPREAD).ops.layers[0]
    assert whole.all_reduce == analytic(LLM, NODE, tp=8, engine=PLAIN).ops.layers[0].all_reduce


def test_copies_share_experts_and_have_attention_each() -> None:
    plain, spread = (
        MemoryModel.of(LLM, NODE, tp=1, engine=choice.on(NODE.gpu)) for choice in (PLAIN, SPREAD)
    )
    experts = LLM.moe.experts * LLM.expert_bytes if LLM.moe else 0.0
    own = plain.layer_weight_bytes(0, 1) - spread.layer_weight_bytes(0, 1)
    assert own == pytest.approx(experts * 7 / 8, rel=1e-3)
    # One GPU has not room for all of it, and has it with the experts of all shared.
    assert plain.free_bytes(0, LLM.layers) < 0.0 < spread.free_bytes(0, LLM.layers)
    assert spread.kv_bytes_per_token_layer() == plain.kv_bytes_per_token_layer()
    eight = MemoryModel.of(LLM, NODE, tp=8, engine=SPREAD.on(NODE.gpu))
    split = MemoryModel.of(LLM, NODE, tp=8, engine=PLAIN.on(NODE.gpu))
    assert eight.layer_weight_bytes(0, 1) == pytest.approx(split.layer_weight_bytes(0, 1), rel=1e-2)


def test_a_copy_by_itself_is_as_fast_as_on_its_node() -> None:
    copy, engine = copy_of(NODE, 2, SPREAD)
    assert (copy.count, engine.copies) == (2, 4)
    one = Batch.decode(32.0, 2000.0)
    here, there = (
        step_seconds(analytic(LLM, node, tp=2, engine=choice), one, 0, LLM.layers)
        for node, choice in ((copy, engine), (NODE, SPREAD))
    )
    assert here == there
    mix = LengthMix.fixed(1000, 500)
    load = RoleLoad("d", LLM, Phase.DECODE, 0.05, mix)
    alone, all_ = (
        CapacityModel(load, analytic(LLM, node, tp=2, engine=choice)).throughput(
            [1], [0.05], Position.WHOLE
        )
        for node, choice in ((copy, engine), (NODE, SPREAD))
    )
    assert 4.0 * float(alone[0, -1]) == pytest.approx(float(all_[0, -1]))


def test_models_without_experts_are_as_before() -> None:
    dense = model("llama-3.1-8b")
    plain, spread = (analytic(dense, NODE, tp=2, engine=choice).ops for choice in (PLAIN, SPREAD))
    assert plain == spread


def test_what_it_rests_on_is_a_proxy() -> None:
    assert "experts on one GPU for several" in analytic(LLM, NODE, tp=1, engine=SPREAD).provenance
