from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.link_table import Link
from atoll.core.errors import InputError, UsageError
from atoll.core.ids import Phase
from atoll.engines.limits import EngineLimits, HostTime
from atoll.engines.profile import EngineProfile
from atoll.engines.table import EngineChoice
from atoll.perf.batch import Batch
from atoll.perf.capacity import CapacityModel, CapacityTable, RoleLoad, table_of
from atoll.perf.constants import ConstantTable, default_constants, sample_constants
from atoll.perf.layers import tp_sizes
from atoll.perf.memory_model import MemoryModel
from atoll.perf.step import Position, analytic, step_seconds
from atoll.workload.lengths import LengthMix, length_mix
from tests.perf.builders import constants, mixture, model, node, node_type, spec
from tests.reference.capacity_tables import best_table, capacity, capacity_table

LLAMA = model("llama-3.1-8b")
LINK = Link(10e9 / 8, 0.5e-3)


def role(
    phase: Phase = Phase.DECODE,
    *,
    slo_s: float = 0.1,
    lengths: LengthMix | None = None,
    name: str = "llama",
    llm: str | None = None,
) -> RoleLoad:
    return RoleLoad(
        name, model(llm) if llm else LLAMA, phase, slo_s, lengths or LengthMix.fixed(1024, 256)
    )


# By hand.


def test_decode_by_hand() -> None:
    """A model and a GPU of round numbers, with memory for fewer sequences than the engine allows."""
    llm = spec()
    profile = EngineProfile(
        "x", HostTime(step_s=1e-3), reserve_bytes=0.0, memory_share=1.0, max_sequences=64
    )
    machine = node(memory_bytes=200_000_000)
    own = analytic(llm, machine, engine=profile, constants=constants())
    lengths = LengthMix.fixed(3000, 1000)
    found = capacity(RoleLoad("x", llm, Phase.DECODE, 1.0, lengths), own, 6)
    activations = 64 * (4 * 512 + 3 * 1024) * 2 + 64 * 4000 * 4
    weights = llm.weight_bytes - 512 * 2
    sequence = 6 * 3500 * 2 * 2 * 64 * 2
    room = (200e6 - activations - weights) / sequence
    assert 10 < room < 64
    assert found.batch == pytest.approx(room, rel=1e-3)
    assert found.limit == "KV memory"
    step_s = step_seconds(own, Batch.decode(room, 3500), 0, 6)
    assert found.step_s == pytest.approx(step_s, rel=1e-3)
    assert found.throughput == pytest.approx(room / step_s, rel=1e-3)
    assert found.transfer_s == 0.0


def test_prefill_by_hand() -> None:
    llm = spec()
    profile = EngineProfile("x", HostTime(step_s=1e-3), max_tokens=8000)
    own = analytic(llm, node(), engine=profile, constants=constants())
    lengths = LengthMix(1000.0, 10.0, 1.5e6, 100.0)
    found = capacity(RoleLoad("x", llm, Phase.PREFILL, 1.0, lengths), own, 6)
    assert found.batch == pytest.approx(8.0)
    step_s = step_seconds(own, Batch.prefill(8000, 8, 0, 1.5), 0, 6)
    assert found.step_s == pytest.approx(step_s)
    assert found.throughput == pytest.approx(8000 / step_s)
    assert found.limit == "the engine's largest batch"


def test_groups_of_a_node_add_up() -> None:
    lengths = LengthMix.fixed(512, 64)
    two = capacity(role(lengths=lengths), analytic(LLAMA, node_type("H100:2")), 32)
    four_pairs = capacity(role(lengths=lengths), analytic(LLAMA, node_type("H100:8"), tp=2), 32)
    assert four_pairs.throughput == pytest.approx(4 * two.throughput)
    assert four_pairs.batch == two.batch


def test_a_pipeline_that_holds_fewer_requests_than_stages_waits() -> None:
    """Room for N < S requests: each stage is busy N times in a round of S hand-overs."""
    own = analytic(LLAMA, node_type("L4:1"))
    long = role(lengths=LengthMix.fixed(20_000, 10), slo_s=100.0)
    memory = MemoryModel.of(LLAMA, node_type("L4:1"), engine=own.engine, phase=Phase.DECODE)
    room = memory.sequences_by_layers(20_005.0, Position.MIDDLE)[8]
    stages = 64
    assert 1 < room < stages
    step_s = step_seconds(own, Batch.decode(1, 20_005), 8, 16)
    u = LINK.time_s(4096 * 2)
    found = capacity(long, own, 8, stages=stages, budget_s=10.0, link=LINK)
    assert found.throughput == pytest.approx(room / (stages * (step_s + u)), rel=1e-6)
    assert found.transfer_s == pytest.approx(u)
    assert found.limit == "KV memory"


# Limits, each constructed.


def test_no_room() -> None:
    own = analytic(model("llama-3-70b"), node_type("L4:1"))
    found = capacity(role(llm="llama-3-70b", slo_s=100.0), own, 80)
    assert found.limit == "memory: no room for the layers and one request's KV cache"
    assert (found.throughput, found.batch) == (0.0, 0.0)


def test_room_for_the_weights_but_not_for_one_request() -> None:
    own = analytic(LLAMA, node_type("L4:1"))
    found = capacity(role(lengths=LengthMix.fixed(130_000, 1), slo_s=1e3), own, 32)
    assert found.limit.startswith("memory: no room")
    assert found.throughput == 0.0


def test_too_little_time() -> None:
    own = analytic(LLAMA, node_type("L4:1"))
    found = capacity(role(slo_s=1e-4), own, 32)
    assert found.limit == "latency: one request alone takes longer than the budget"
    assert (found.throughput, found.batch) == (0.0, 0.0)


def test_time_cuts_the_batch() -> None:
    own = analytic(LLAMA, node_type("H100:1"))
    one = step_seconds(own, Batch.decode(1, 1152), 0, 32)
    all_ = step_seconds(own, Batch.decode(512, 1152), 0, 32)
    budget_s = (one + all_) / 2
    found = capacity(role(slo_s=budget_s), own, 32)
    assert found.limit == "latency budget"
    assert found.step_s == pytest.approx(budget_s)
    assert 1 < found.batch < 512
    # The batch it names does take that long.
    exact = step_seconds(own, Batch.decode(found.batch, 1152), 0, 32)
    assert exact == pytest.approx(budget_s, rel=0.01)


def test_the_engine_cuts_the_batch() -> None:
    own = analytic(LLAMA, node_type("H100:8"), engine=EngineProfile("x", max_sequences=16))
    found = capacity(role(slo_s=10.0), own, 32)
    assert found.limit == "the engine's largest batch"
    assert found.batch == 16.0


def test_memory_cuts_the_batch() -> None:
    own = analytic(LLAMA, node_type("L4:1"))
    found = capacity(role(slo_s=100.0, lengths=LengthMix.fixed(8000, 100)), own, 32)
    assert found.limit == "KV memory"
    assert 1 <= found.batch < 8


def test_memory_cuts_a_batch_of_one_long_prompt() -> None:
    # A prompt longer than the engine's step: 0.23 of one in every step. With 64 stages 15 are under way.
    own = analytic(LLAMA, node_type("L4:1"))
    long = role(Phase.PREFILL, slo_s=100.0, lengths=LengthMix.fixed(9000, 10))
    roomy = capacity(long, own, 32, stages=2, budget_s=100.0)
    crowded = capacity(long, own, 32, stages=64, budget_s=100.0)
    room = MemoryModel.of(LLAMA, own.node, engine=own.engine, phase=Phase.PREFILL)
    places = float(room.sequences_by_layers(9000, Position.MIDDLE)[32])
    under_way = 1.0 + 63.0 * 2048 / 9000
    assert 1.0 < places < under_way
    assert crowded.throughput == pytest.approx(roomy.throughput * places / under_way)
    assert crowded.limit == "KV memory"
    assert roomy.limit == "the engine's largest batch"


def test_the_link_cuts_the_rate() -> None:
    """However short its steps, a stage hands on no more than the link carries."""
    own = analytic(LLAMA, node_type("H100:8"))
    slow = Link(5e6, 0.0)
    found = capacity(role(slo_s=10.0), own, 1, stages=4, budget_s=10.0, link=slow)
    assert found.limit == "the link between stages"
    assert found.throughput == pytest.approx(5e6 / (4096 * 2))
    # A single stage hands nothing over.
    alone = capacity(role(slo_s=10.0), own, 1, link=slow)
    assert alone.throughput > 10 * found.throughput
    assert alone.limit != "the link between stages"


# Long prompts that must keep the promise on their own.


PIECES = [Batch.prefill(2048), Batch.prefill(2048, 1, 2048), Batch.prefill(1904, 1, 4096)]
BESIDE_S = 6.5e-3
"""What vLLM takes for a prompt beside steps."""
TOKENIZE_S = 3e-6
"""What it takes for each token of it."""


def test_prompts_longer_than_a_step_run_in_pieces() -> None:
    own = analytic(LLAMA, node_type("L40S:1"))
    long = role(Phase.PREFILL, slo_s=100.0, lengths=LengthMix.fixed(6144, 10))
    found = capacity(long, own, 32)
    pieces = [
        step_seconds(own, Batch.prefill(2048, 1, before), 0, 32) for before in (0, 2048, 4096)
    ]
    assert found.throughput == pytest.approx(6144 / sum(pieces), rel=0.01)
    assert found.batch == pytest.approx(1 / 3)
    # Alone it takes all of its pieces; through four stages one of them thrice more.
    alone = RoleLoad("role", LLAMA, Phase.PREFILL, 1.0, long.lengths)
    mean = sum(pieces) / 3
    read_s = 6144 * TOKENIZE_S
    assert capacity(alone, own, 32, budget_s=mean * 2.9).throughput == 0.0
    assert capacity(alone, own, 32, budget_s=mean * 3.1 + read_s).throughput > 0.0
    part = [step_seconds(own, Batch.prefill(2048, 1, before), 8, 16) for before in (0, 2048, 4096)]
    passed = (sum(part) + 3 * sum(part) / 3) / 4
    assert capacity(alone, own, 8, stages=4, budget_s=passed * 0.95).throughput == 0.0
    assert capacity(alone, own, 8, stages=4, budget_s=passed * 1.05 + read_s / 4).throughput > 0.0


@given(st.floats(100.0, 30_000.0), st.integers(256, 8192), st.integers(1, 8))
def test_smaller_steps_never_carry_more_prompts(mean: float, tokens: int, stages: int) -> None:
    """Nor does a prompt that is just short enough for one step jump when it becomes a little longer."""

    def carried(lengths: float, most: int) -> float:
        choice = EngineChoice("vllm", EngineLimits(max_num_batched_tokens=most, max_num_seqs=64))
        load = role(Phase.PREFILL, slo_s=30.0, lengths=LengthMix.fixed(lengths, 10))
        own = analytic(LLAMA, node_type("H100:1"), engine=choice)
        return capacity(load, own, 32 // stages, stages=stages).throughput

    assert carried(mean, tokens) <= carried(mean, 2 * tokens) * 1.02
    assert carried(tokens * 1.001, tokens) == pytest.approx(
        carried(tokens * 0.999, tokens), rel=0.02
    )


def test_the_tail_prompt_decides_yes_or_no() -> None:
    own = analytic(LLAMA, node_type("L40S:1"))
    mean = LengthMix.fixed(1000, 100)
    tail = replace(mean, input_tail=6000.0)
    # A step takes 2,048 tokens there.
    steps_s = sum(step_seconds(own, piece, 0, 32) for piece in PIECES)
    whole = step_seconds(own, Batch.prefill(6000), 0, 32)
    assert whole < steps_s < whole * 1.2
    alone = BESIDE_S + 6000 * TOKENIZE_S + steps_s

    def at(slo_s: float, lengths: LengthMix) -> float:
        return capacity(role(Phase.PREFILL, slo_s=slo_s, lengths=lengths), own, 32).throughput

    assert at(alone * 0.999, tail) == 0.0
    assert at(alone * 0.999, mean) > 0.0
    assert at(alone * 1.001, tail) == at(alone * 1.001, mean) > 0.0
    found = capacity(role(Phase.PREFILL, slo_s=alone * 0.999, lengths=tail), own, 32)
    assert found.limit.startswith("latency:")


def test_the_tail_prompt_pays_the_hand_over_too() -> None:
    own = analytic(LLAMA, node_type("L40S:1"))
    tail = replace(LengthMix.fixed(1000, 100), input_tail=6000.0)
    pieces = [step_seconds(own, piece, 8, 16) for piece in PIECES]
    # The last piece leaves the first of four stages after all three, and then passes three more.
    step_s = (BESIDE_S + 6000 * TOKENIZE_S + sum(pieces) + 3.0 * max(pieces)) / 4.0
    total = step_s + LINK.time_s(2048 * 4096 * 2)

    def at(budget_s: float, link: Link | None) -> float:
        load = role(Phase.PREFILL, lengths=tail)
        found = capacity(load, own, 8, stages=4, budget_s=budget_s, link=link)
        return found.throughput

    assert at(total * 0.999, LINK) == 0.0
    assert at(total * 1.001, LINK) > 0.0
    assert at(total * 0.999, None) > 0.0
    assert at(step_s * 0.999, None) == 0.0


def test_a_tail_below_the_mean_and_the_tail_of_decode_change_nothing() -> None:
    own = analytic(LLAMA, node_type("L40S:1"))
    mean = LengthMix.fixed(1000, 100)
    one = BESIDE_S + 1000 * TOKENIZE_S + step_seconds(own, Batch.prefill(1000), 0, 32)
    for phase, tail in ((Phase.PREFILL, 900.0), (Phase.PREFILL, 1000.0), (Phase.DECODE, 1e5)):
        plain = capacity(role(phase, slo_s=one * 1.01, lengths=mean), own, 32)
        with_tail = replace(mean, input_tail=tail)
        assert capacity(role(phase, slo_s=one * 1.01, lengths=with_tail), own, 32) == plain
        assert plain.throughput > 0.0


def test_the_tail_prompt_needs_room_too() -> None:
    machine = node_type("L4:1")
    own = analytic(LLAMA, machine)
    memory = MemoryModel.of(LLAMA, machine, engine=own.engine, phase=Phase.PREFILL)
    assert not memory.fits(0, 32, 100_000)
    tail = replace(LengthMix.fixed(1000, 100), input_tail=100_000.0)
    found = capacity(role(Phase.PREFILL, slo_s=1e4, lengths=tail), own, 32)
    assert found.throughput == 0.0
    assert found.limit == "memory: no room for the layers and the longest request's KV cache"
    # Fewer layers leave room for it, and then it costs nothing more.
    most = int(np.sum(memory.sequences_by_layers(100_000, Position.MIDDLE) >= 1.0)) - 1
    assert 1 < most < 32
    for layers, carries in ((most, True), (most + 1, False)):
        load = role(Phase.PREFILL, slo_s=1e4, lengths=tail)
        there = capacity(load, own, layers, stages=2, budget_s=1e4)
        assert (there.throughput > 0.0) == carries


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_a_tail_prompt_longer_than_the_model_reads(phase: Phase) -> None:
    tail = replace(LengthMix.fixed(1000, 100), input_tail=131_073.0)
    with pytest.raises(InputError, match="exceeds the model's 131,072") as caught:
        role(phase, lengths=tail)
    assert caught.value.field == "input_tail"
    role(phase, lengths=replace(tail, input_tail=131_072.0))


# Tables.

ROLES = (
    role(Phase.PREFILL, slo_s=1.5, name="llama/prefill"),
    role(Phase.DECODE, slo_s=0.1, name="llama/decode"),
    role(Phase.DECODE, slo_s=0.08, name="oss/decode", llm="gpt-oss-20b"),
    RoleLoad("mix/prefill", mixture(), Phase.PREFILL, 0.5, length_mix("azure-conv")),
)
NODES = tuple(node_type(name) for name in ("L4:1", "A10G:2", "L40S:1", "H100:4"))
STAGES = 5


@pytest.fixture(scope="module")
def tables() -> dict[tuple[str, str], CapacityTable]:
    return dict(capacity_table(ROLES, NODES, STAGES, link=LINK))


def test_a_table_for_every_role_on_every_node(
    tables: dict[tuple[str, str], CapacityTable],
) -> None:
    assert set(tables) == {(r.name, n.id) for r in ROLES for n in NODES}
    for (name, machine), table in tables.items():
        assert (table.role.name, table.node.id) == (name, machine)
        assert table.throughput.shape == (4, STAGES, table.role.spec.layers + 1)
        assert table.tp.shape == table.throughput.shape
        assert set(table.tp.flat) <= set(tp_sizes(table.role.spec, table.node.count))
        assert table.provenance
    assert tables["llama/decode", "A10G:2"].provenance.startswith("proxy")


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(each.id, marks=[] if each.id == "A10G:2" else pytest.mark.slow)
        for each in NODES
    ],
)
def test_an_entry_is_the_capacity(
    tables: dict[tuple[str, str], CapacityTable], machine: str
) -> None:
    for table in (tables[each.name, machine] for each in ROLES):
        sizes = tp_sizes(table.role.spec, table.node.count)
        models = [analytic(table.role.spec, table.node, tp=tp) for tp in sizes]
        total = table.role.spec.layers
        for stages, position in itertools.product((1, 2, 5), Position):
            if (stages == 1) != (position is Position.WHOLE):
                continue
            for layers in {1, total // 3, total}:
                rates = {
                    own.tp: capacity(
                        table.role, own, layers, stages=stages, position=position, link=LINK
                    ).throughput
                    for own in models
                }
                assert table.at(layers, stages, position) == max(rates.values())
                at = (table.POSITIONS.index(position), stages - 1, layers)
                # Of equals the larger: it answers sooner.
                assert table.tp[at] == max(tp for tp in rates if rates[tp] == max(rates.values()))


def test_eight_small_copies_beat_one_split_over_pcie() -> None:
    """Eight GPUs alone carry eight times one; split over all of them most of the time goes to all-reduces."""
    prefill = role(Phase.PREFILL, slo_s=1.5)
    tables = capacity_table([prefill], [node_type("L40S:1"), node_type("L40S:8")], 1)
    one, eight = (tables["llama", f"L40S:{n}"] for n in (1, 8))
    assert eight.at(32, 1) == pytest.approx(8 * one.at(32, 1))
    assert eight.tp[-1, 0, 32] == 1
    largest = capacity(prefill, analytic(LLAMA, node_type("L40S:8"), tp=8), 32)
    assert eight.at(32, 1) > 5 * largest.throughput


def test_a_larger_split_wins_where_a_copy_has_no_room() -> None:
    decode = role(llm="llama-3-70b")
    table = capacity_table([decode], [node_type("H100:8")], 1)["llama", "H100:8"]
    # 140 GB of weights: no single GPU holds them, two leave little for KV cache.
    assert table.tp[-1, 0, 80] == 4
    assert table.tp[-1, 0, 10] == 1


def test_positions_and_defaults(tables: dict[tuple[str, str], CapacityTable]) -> None:
    table = tables["llama/decode", "L40S:1"]
    own = analytic(LLAMA, node_type("L40S:1"))
    assert table.at(32, 1) == table.at(32, 1, Position.WHOLE)
    assert table.at(32, 1) == capacity(table.role, own, 32, link=LINK).throughput
    ends = (Position.FIRST, Position.MIDDLE, Position.LAST)
    worst = min(table.at(8, 4, position) for position in ends)
    assert table.at(8, 4) == worst > 0.0
    # Holding the output matrix costs time and memory.
    assert table.at(8, 4, Position.LAST) < table.at(8, 4, Position.MIDDLE)
    middle = capacity(table.role, own, 8, stages=4, link=LINK)
    assert middle.throughput == table.at(8, 4, Position.MIDDLE)
    assert table.at(0, 1) == table.at(0, 3) == 0.0


def test_stage_rows(tables: dict[tuple[str, str], CapacityTable]) -> None:
    table = tables["oss/decode", "H100:4"]
    for stages in range(1, STAGES + 1):
        row = table.stage_row(stages)
        assert row.shape == (4, 25)
        for index, position in enumerate(CapacityTable.POSITIONS):
            if (position is Position.WHOLE) == (stages == 1):
                for layers in (1, 12, 24):
                    assert row[index, layers] == table.at(layers, stages, position)
    assert np.all(table.stage_row(1)[:3] == 0.0)
    assert np.all(table.stage_row(3)[3] == 0.0)
    assert np.all(np.diff(table.throughput[:, :, 1:], axis=2) <= 0.0)


@pytest.mark.parametrize(
    ("layers", "stages", "field"),
    [
        (8, 0, "stages"),
        (8, -1, "stages"),
        (8, STAGES + 1, "stages"),
        (-1, 2, "layers"),
        (33, 2, "layers"),
    ],
)
def test_entries_outside_the_table(
    tables: dict[tuple[str, str], CapacityTable], layers: int, stages: int, field: str
) -> None:
    with pytest.raises(UsageError) as caught:
        tables["llama/decode", "L40S:1"].at(layers, stages)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("stages", "position"), [(1, Position.FIRST), (1, Position.MIDDLE), (2, Position.WHOLE)]
)
def test_positions_that_a_pipeline_does_not_have(
    tables: dict[tuple[str, str], CapacityTable], stages: int, position: Position
) -> None:
    with pytest.raises(UsageError, match="no position in a pipeline"):
        tables["llama/decode", "L40S:1"].at(8, stages, position)


def test_the_order_of_nodes_and_roles_changes_nothing(
    tables: dict[tuple[str, str], CapacityTable],
) -> None:
    turned = capacity_table(ROLES[::-1], NODES[::-1], STAGES, link=LINK)
    assert set(turned) == set(tables)
    for key, table in tables.items():
        assert turned[key].throughput.tobytes() == table.throughput.tobytes()


def test_an_iterator_of_nodes_serves_every_role() -> None:
    found = capacity_table(ROLES[:2], iter(NODES[:2]), 1)
    assert len(found) == 4


def test_more_stages_only_extend_a_table(tables: dict[tuple[str, str], CapacityTable]) -> None:
    fewer = capacity_table(ROLES[:1], NODES[:1], 2, link=LINK)["llama/prefill", "L4:1"]
    more = tables["llama/prefill", "L4:1"]
    assert np.array_equal(fewer.throughput, more.throughput[:, :2])


def test_a_table_with_a_backend_of_ones_own() -> None:
    own = analytic(LLAMA, node_type("H100:8"), tp=2)
    table = table_of(role(), own, 3)
    assert (table.tp == 2).all()
    assert table.at(32, 1) == capacity(role(), own, 32).throughput
    faster = capacity_table([role()], [node_type("H100:8")], 1, engine="vllm")
    slower = capacity_table([role()], [node_type("H100:8")], 1, engine="atoll")
    assert faster["llama", "H100:8"].at(32, 1) > slower["llama", "H100:8"].at(32, 1)


def test_kernel_time_alone() -> None:
    own = analytic(LLAMA, node_type("H100:1"), engine="none")
    table = table_of(role(), own, 3)
    assert table.at(8, 3) > table_of(role(), analytic(LLAMA, node_type("H100:1")), 3).at(8, 3)


def test_kernel_time_alone_over_a_link() -> None:
    own = analytic(LLAMA, node_type("H100:1"), engine="none")
    assert table_of(role(), own, 3, link=LINK).at(8, 3) > 0.0


# What cannot be asked.


@pytest.mark.parametrize("phase", [Phase.BOTH, Phase.ENCODE, Phase.GENERATE])
def test_capacity_is_per_phase(phase: Phase) -> None:
    with pytest.raises(UsageError, match=phase.value):
        role(phase)


@pytest.mark.parametrize("slo_s", [0.0, -1.0, math.nan, math.inf])
def test_promises_that_are_none(slo_s: float) -> None:
    with pytest.raises(InputError) as caught:
        role(slo_s=slo_s)
    assert caught.value.field == "slo_s"


@pytest.mark.parametrize("layers", [0, -1, 33])
def test_layers_the_model_does_not_have(layers: int) -> None:
    with pytest.raises(UsageError, match=f"{layers} layers of a model with 32"):
        capacity(role(), analytic(LLAMA, node_type("L4:1")), layers)


@pytest.mark.parametrize("stages", [0, -2])
def test_pipelines_without_stages(stages: int) -> None:
    with pytest.raises(UsageError):
        capacity(role(), analytic(LLAMA, node_type("L4:1")), 8, stages=stages)
    with pytest.raises(UsageError):
        capacity_table([role()], [node_type("L4:1")], stages)


def test_a_step_model_of_another_transformer() -> None:
    other = analytic(model("qwen3-32b"), node_type("H100:1"))
    with pytest.raises(UsageError, match="another transformer"):
        CapacityModel(role(), other)


def test_names_given_twice() -> None:
    machine = node_type("L4:1")
    with pytest.raises(UsageError, match="role llama is given twice"):
        capacity_table([role(slo_s=0.1), role(slo_s=0.2)], [machine], 1)
    with pytest.raises(UsageError, match="node type L4:1 is given twice"):
        capacity_table([role()], [machine, machine], 1)


def test_requests_longer_than_the_model_reads() -> None:
    with pytest.raises(InputError, match="exceeds the model's 131,072") as caught:
        role(lengths=LengthMix.fixed(131_000, 100))
    assert caught.value.field == "lengths"
    role(lengths=LengthMix.fixed(131_000, 72))


@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_constants_of_another_call_change_nothing(one: int, other: int) -> None:
    nodes = [node_type("L4:1"), node_type("L40S:2")]
    load = role(Phase.DECODE, slo_s=0.1)
    gpus = [each.gpu for each in nodes]

    def carried(table: ConstantTable | None) -> list[list[float]]:
        tables = capacity_table([load], nodes, 2, constants=table)
        return [tables[load.name, each.id].throughput.tolist() for each in nodes]

    def directly(table: ConstantTable) -> list[list[float]]:
        found = []
        for each in nodes:
            sizes = [
                table_of(load, analytic(LLAMA, each, tp=tp, constants=table), 2)
                for tp in tp_sizes(LLAMA, each.count)
            ]
            found.append(best_table(sizes).throughput.tolist())
        return found

    shipped_constants = ConstantTable([default_constants().for_gpu(each) for each in gpus])
    drawn = [
        sample_constants(shipped_constants, np.random.default_rng(seed), gpus)
        for seed in (one, other)
    ]
    shipped = carried(None)
    answers = [carried(table) for table in drawn]
    assert answers != [shipped, shipped]
    assert (answers[0] == answers[1]) == (one == other)
    for table, answer in zip(drawn, answers, strict=True):
        for found, expected in zip(answer, directly(table), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-12)
        assert carried(table) == answer
    assert carried(None) == shipped
