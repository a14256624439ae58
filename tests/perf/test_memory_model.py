from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.nodes import NodeType
from atoll.catalog.transformer import MoeSpec, TransformerSpec
from atoll.core.errors import UsageError
from atoll.core.ids import Phase
from atoll.engines.profile import EngineProfile
from atoll.engines.table import profile_engine
from atoll.perf.layers import Shard
from atoll.perf.memory_model import MemoryModel, position_of
from atoll.perf.step import Position
from tests.perf.builders import hybrid, mixture, model, node, node_type, spec

FOUR_KINDS = spec(
    layers=9,
    windows=(64, None, 64, 64, None, None, 64, None, 64),
    moe=MoeSpec(8, 2, 256, dense_layers=frozenset({0, 1, 5})),
)
MODELS = {
    "dense": model("llama-3.1-8b"),
    "tied": model("llama-3.2-1b"),
    "hybrid": model("gpt-oss-20b"),
    "mixture": mixture(),
    "four kinds": FOUR_KINDS,
    "small hybrid": hybrid(),
}
positions = st.sampled_from(list(Position))


def memory(llm: TransformerSpec, machine: NodeType | None = None, **options: object) -> MemoryModel:
    return MemoryModel.of(llm, machine or node(), **options)  # type: ignore[arg-type]


def test_llama_3_70b_on_eight_h100_by_hand() -> None:
    own = MemoryModel.of(model("llama-3-70b"), node_type("H100:8"), engine=profile_engine("vllm"))
    # One GPU of eight: 8 query heads, 1 KV head, MLP width 3584, 16032 tokens of vocabulary.
    rows = 8192 * (4 * 8192 + 3 * 3584) * 2
    logits = 1024 * 16032 * 4
    assert own.activation_bytes == rows + logits == 778_698_752
    usable = 0.9 * 81559 * 2**20 - 1e9 - 778_698_752
    assert own.usable_bytes == pytest.approx(usable, abs=1)
    # Norms, two a layer, are whole on every GPU.
    weights = (141_107_412_992 - 8192 * 2) / 8 + 80 * 2 * 8192 * 2 * 7 / 8
    assert own.layer_weight_bytes(0, 80) + own.outer_bytes(Position.WHOLE) == weights
    assert own.kv_bytes_per_token_layer() == 2 * 1 * 128 * 2
    assert own.free_bytes(0, 80) == pytest.approx(usable - weights, abs=1)
    assert own.kv_tokens(0, 80) == math.floor((usable - weights) / (80 * 512)) == 1_405_012


def test_usable_bytes_by_hand() -> None:
    profile = EngineProfile(
        "x", memory_share=0.5, reserve_bytes=2e9, max_sequences=10, max_tokens=100
    )
    llm = spec()
    # Widest moment: the MLP, three buffers of 1024, beside four of the hidden size. Engines pad the 4000
    # tokens of the vocabulary to 4032.
    activations = 100 * (4 * 512 + 3 * 1024) * 2 + 10 * 4032 * 4
    assert memory(llm, engine=profile).activation_bytes == activations
    assert memory(llm, engine=profile).usable_bytes == 12e9 - 2e9 - activations
    # A node that only decodes never sees more tokens than sequences.
    decode = memory(llm, engine=profile, phase=Phase.DECODE)
    assert decode.activation_bytes == 10 * (4 * 512 + 3 * 1024) * 2 + 10 * 4032 * 4
    for phase in (Phase.PREFILL, Phase.BOTH):
        assert memory(llm, engine=profile, phase=phase).activation_bytes == activations
    # Where attention is wider than the MLP it counts.
    slim = memory(spec(intermediate=8), engine=profile)
    assert slim.activation_bytes == 100 * (4 * 512 + (8 + 4) * 64 + 8 * 64) * 2 + 10 * 4032 * 4


def test_activations_of_experts() -> None:
    profile = EngineProfile("x", max_sequences=1, max_tokens=1)

    def widest(llm: TransformerSpec) -> float:
        return (memory(llm, engine=profile).activation_bytes - 4032 * 4) / 2 - 4 * 512

    # Two experts of 256 and a shared one of 128 run per token; dense layers are 1024 wide.
    assert widest(mixture()) == 3 * 1024
    alone = MoeSpec(16, 2, 1000, shared_intermediate=128)
    assert widest(spec(moe=alone)) == 3 * (2 * 1000 + 128)
    # Without dense layers the width that a config states for them is not used.
    assert widest(spec(moe=MoeSpec(16, 2, 250))) == 3 * 2 * 250


def test_a_gpu_too_small_for_anything_has_nothing_to_use() -> None:
    own = memory(spec(), node(memory_bytes=10**9))
    assert own.usable_bytes == 0.0
    assert own.max_layers() == 0
    assert not own.fits(0, 1)
    assert own.kv_tokens(0, 1) == 0


@given(st.sampled_from(sorted(MODELS)), st.sampled_from([1, 2]), st.data())
def test_layers_sum_to_the_whole_model(name: str, tp: int, data: st.DataObject) -> None:
    llm = MODELS[name]
    own = memory(llm, node(tp))
    cuts = data.draw(st.sets(st.integers(1, llm.layers - 1), max_size=4))
    ends = [0, *sorted(cuts), llm.layers]
    pieces = [own.layer_weight_bytes(a, b) for a, b in itertools.pairwise(ends)]
    final_norm = 2.0 * llm.hidden
    copied = [llm.copied_bytes(i) * (tp - 1) / tp for i in range(llm.layers)]
    padded = -llm.vocab % 64 * llm.hidden * 2 * (1 if llm.tied_embeddings else 2)
    whole = (llm.weight_bytes - final_norm + padded) / tp + sum(copied)
    assert sum(pieces) + own.outer_bytes(Position.WHOLE) == pytest.approx(whole, rel=1e-12)
    for i in range(llm.layers):
        one = llm.layer_weight_bytes(i) / tp + copied[i]
        assert own.layer_weight_bytes(i, i + 1) == pytest.approx(one)


def test_tied_embeddings_count_once_only_where_both_ends_meet() -> None:
    table = 4032 * 512 * 2  # rows are padded to a multiple of 64
    apart, tied = memory(spec()), memory(spec(tied_embeddings=True))
    expected = {
        Position.FIRST: (table, table),
        Position.MIDDLE: (0, 0),
        Position.LAST: (table, table),
        Position.WHOLE: (2 * table, table),
    }
    for position, sizes in expected.items():
        assert (apart.outer_bytes(position), tied.outer_bytes(position)) == sizes
    assert memory(spec(), node(4)).outer_bytes(Position.WHOLE) == 2 * table / 4


def test_kv_heads_are_copied_where_gpus_outnumber_them() -> None:
    llm = spec()  # two KV heads of 64
    assert [memory(llm, node(tp)).kv_bytes_per_token_layer() for tp in (1, 2, 4, 8)] == [
        2 * 2 * 64 * 2,
        2 * 1 * 64 * 2,
        2 * 1 * 64 * 2,
        2 * 1 * 64 * 2,
    ]
    # Eight GPUs hold eight KV heads between them, six of them copies, in both projections.
    copies = 2 * 6 * 64 * 512 * 2
    own = memory(llm, node(8))
    norms = 2 * 512 * 2
    whole = llm.layer_weight_bytes(0)
    assert own.layer_weight_bytes(0, 1) * 8 == whole + copies + 7 * norms
    assert memory(llm, node(2)).layer_weight_bytes(0, 1) * 2 == whole + norms


def test_norms_and_routers_are_whole_on_every_gpu() -> None:
    llm = mixture()
    # Two norms of 512 in 16 bits, and a router where there are experts.
    dense, mixed = 0, next(i for i in range(llm.layers) if llm.is_moe_layer(i))
    assert llm.moe is not None
    assert llm.copied_bytes(dense) == 2 * 512 * 2
    assert llm.copied_bytes(mixed) == (2 + llm.moe.experts) * 512 * 2
    one, four = memory(llm, node(1)), memory(llm, node(4))
    for i in (dense, mixed):
        rest = llm.layer_weight_bytes(i) - llm.copied_bytes(i)
        held = rest + 2 * 2 * 64 * 512 * 2  # two KV heads more
        assert one.layer_weight_bytes(i, i + 1) == rest + llm.copied_bytes(i)
        assert four.layer_weight_bytes(i, i + 1) == held / 4 + llm.copied_bytes(i)


def test_kv_cache_of_a_sequence() -> None:
    own = memory(hybrid((128, None, None)))
    token = own.kv_bytes_per_token_layer()
    assert token == 2 * 2 * 64 * 2
    assert own.kv_bytes_per_sequence(0, 3, 1000) == (128 + 1000 + 1000) * token
    assert own.kv_bytes_per_sequence(0, 1, 1000) == 128 * token
    assert own.kv_bytes_per_sequence(0, 3, 100) == 300 * token
    narrow = memory(hybrid((128, None, None)).with_kv_dtype("fp8"))
    assert narrow.kv_bytes_per_sequence(0, 3, 1000) == (128 + 1000 + 1000) * token / 2


def test_tokens_that_fit_where_windows_keep_few() -> None:
    own = memory(hybrid((128, None, None)))
    one = own.kv_bytes_per_sequence(0, 3, 1000)
    assert own.kv_tokens(0, 3, 1000) == math.floor(own.free_bytes(0, 3) / one * 1000)
    # The longer the sequences, the larger the share of their tokens that the windows let go.
    assert own.kv_tokens(0, 3, 100) < own.kv_tokens(0, 3, 1000) < own.kv_tokens(0, 3, 100_000)
    full = memory(spec())
    assert full.kv_tokens(0, 6, 10) == pytest.approx(full.kv_tokens(0, 6, 5000), abs=1)


def test_where_layers_lie() -> None:
    llm = spec()
    assert position_of(llm, 0, 6) is Position.WHOLE
    assert position_of(llm, 0, 5) is Position.FIRST
    assert position_of(llm, 1, 6) is Position.LAST
    assert position_of(llm, 1, 5) is Position.MIDDLE


@given(
    st.sampled_from(sorted(MODELS)),
    st.floats(0.5e9, 40e9),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0.0, 1.0, 100.0, 128.0, 1000.0, 50_000.0]),
    positions,
)
def test_sequences_by_layers_against_every_start(
    name: str, memory_bytes: float, tp: int, context: float, position: Position
) -> None:
    llm = MODELS[name]
    own = memory(llm, node(tp, memory_bytes=int(memory_bytes)), phase=Phase.DECODE)
    found = own.sequences_by_layers(context, position)
    assert found.shape == (llm.layers + 1,)
    assert found[0] == np.inf
    for j in range(1, llm.layers + 1):
        rooms = []
        for start in range(llm.layers - j + 1):
            free = (
                own.usable_bytes
                - own.layer_weight_bytes(start, start + j)
                - own.outer_bytes(position)
            )
            kept = own.kv_bytes_per_sequence(start, start + j, context)
            rooms.append(0.0 if free <= 0 else np.inf if kept == 0 else free / kept)
        assert found[j] == pytest.approx(min(rooms), rel=1e-9, abs=1e-6)


@given(st.sampled_from(sorted(MODELS)), st.floats(0.5e9, 40e9), st.integers(0, 20_000), st.data())
def test_fits_agrees_with_the_room_of_that_range(
    name: str, memory_bytes: float, context: int, data: st.DataObject
) -> None:
    llm = MODELS[name]
    own = memory(llm, node(memory_bytes=int(memory_bytes)))
    start = data.draw(st.integers(0, llm.layers - 1))
    end = data.draw(st.integers(start + 1, llm.layers))
    position = position_of(llm, start, end)
    free = own.usable_bytes - own.layer_weight_bytes(start, end) - own.outer_bytes(position)
    assert own.free_bytes(start, end) == free
    need = own.kv_bytes_per_sequence(start, end, context)
    assert own.fits(start, end, context) == (free > 0 and free >= need)
    # A table entry that has room holds wherever the layers lie.
    if own.sequences_by_layers(context, position)[end - start] >= 1.0 + 1e-9:
        assert own.fits(start, end, context)


def test_fits_at_the_edge() -> None:
    llm = spec()
    base = memory(llm, node(memory_bytes=10 * 10**9))
    context = 100_000.0
    need = base.kv_bytes_per_sequence(0, 6, context)
    spare = (base.free_bytes(0, 6) - need) / 0.92
    tight = memory(llm, node(memory_bytes=10**10 - math.floor(spare) + 10))
    assert tight.fits(0, 6, context)
    assert not tight.fits(0, 6, context + 1)
    assert tight.kv_tokens(0, 6) == context
    short = memory(llm, node(memory_bytes=10**10 - math.ceil(spare) - 10))
    assert not short.fits(0, 6, context)
    assert short.fits(0, 6, context - 1)


def test_weights_that_leave_nothing_do_not_fit() -> None:
    profile = EngineProfile("x", memory_share=1.0, reserve_bytes=0.0)
    own = memory(spec(), engine=profile)
    weights = own.layer_weight_bytes(0, 6) + own.outer_bytes(Position.WHOLE)
    full = node(memory_bytes=int(own.activation_bytes + weights))
    assert memory(spec(), full, engine=profile).free_bytes(0, 6) == 0.0
    assert not memory(spec(), full, engine=profile).fits(0, 6)


@given(
    st.sampled_from(sorted(MODELS)),
    st.floats(1e9, 60e9),
    st.floats(1.0, 3.0),
    st.floats(1, 50_000),
    positions,
)
def test_more_memory_never_holds_fewer_layers(
    name: str, memory_bytes: float, factor: float, context: float, position: Position
) -> None:
    llm = MODELS[name]
    small = memory(llm, node(memory_bytes=int(memory_bytes)))
    large = memory(llm, node(memory_bytes=int(memory_bytes * factor)))
    most = small.max_layers(context, position)
    assert 0 <= most <= large.max_layers(context, position) <= llm.layers
    # A longer sequence leaves room for no more layers.
    assert small.max_layers(2 * context, position) <= most


def test_max_layers_by_hand() -> None:
    own = memory(model("llama-3-70b"), node_type("L4:1"), phase=Phase.DECODE)
    layer = model("llama-3-70b").layer_weight_bytes(0) + 4096 * 4096
    assert own.max_layers() == math.floor(own.usable_bytes / layer)
    outer = own.outer_bytes(Position.FIRST)
    assert own.max_layers(position=Position.FIRST) == math.floor((own.usable_bytes - outer) / layer)
    assert own.max_layers(4096, Position.WHOLE) < own.max_layers(4096, Position.MIDDLE)


def test_groups_of_a_node() -> None:
    llm = model("llama-3.1-8b")
    machine = node_type("H100:8")
    assert MemoryModel.of(llm, machine).tp == 8
    pair = MemoryModel.of(llm, machine, tp=2)
    alone = MemoryModel.of(llm, node_type("H100:2"))
    assert pair.kv_tokens(0, 32) == alone.kv_tokens(0, 32)
    with pytest.raises(UsageError):
        MemoryModel.of(llm, machine, tp=3)


@pytest.mark.parametrize(("start", "end"), [(0, 99), (5, 3), (-2, 3), (3, 3), (6, 7)])
def test_ranges_outside_the_model(start: int, end: int) -> None:
    own = memory(spec())
    for ask in (own.fits, own.kv_tokens, own.free_bytes):
        with pytest.raises(UsageError, match=rf"layers \[{start}, {end}\) are not a range"):
            ask(start, end)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_uneven_shares_are_rounded_up_as_the_times_are(tp: int) -> None:
    experts = MoeSpec(4, 2, 333, shared_intermediate=101, dense_layers=frozenset({0}))
    uneven = spec(kv_heads=8, intermediate=1001, vocab=4001, moe=experts)
    held = spec(
        kv_heads=8,
        intermediate=math.ceil(1001 / tp) * tp,
        vocab=math.ceil(4032 / tp) * tp,
        moe=MoeSpec(
            4,
            2,
            math.ceil(333 / tp) * tp,
            shared_intermediate=math.ceil(101 / tp) * tp,
            dense_layers=frozenset({0}),
        ),
    )
    own = memory(uneven, node(tp))
    for layer in range(6):
        bytes_ = own.layer_weight_bytes(layer, layer + 1)
        assert bytes_ == pytest.approx(
            held.layer_weight_bytes(layer) / tp + held.copied_bytes(layer) * (tp - 1) / tp
        )
        assert bytes_ > uneven.layer_weight_bytes(layer) / tp
    assert own.outer_bytes(Position.LAST) == Shard.of(uneven, tp).vocab * 512 * 2
    assert own.outer_bytes(Position.WHOLE) == 2 * own.outer_bytes(Position.LAST)
