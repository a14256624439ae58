from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.link_table import Link
from atoll.catalog.overlay import apply_overlay
from atoll.core.errors import UsageError
from atoll.core.ids import Phase, RoleId
from atoll.engines.profile import SERVER_REQUEST_S
from atoll.perf.capacity import RoleLoad, copy_node
from atoll.perf.layers import tp_sizes
from atoll.perf.memory_model import position_of
from atoll.perf.mixed_capacity import MixedCapacityModel
from atoll.perf.queueing import load_within
from atoll.perf.step import Position, analytic
from atoll.plan.capacities import (
    POSITIONS,
    best_tp,
    hop_bytes_per_unit,
    kv_context,
    memory_model,
    node_capacity,
    node_source,
    prefill_promise_s,
    role_table,
    tokens_per_unit,
)
from atoll.plan.handover import handover, hop_link
from atoll.plan.problem import Lengths, Service
from atoll.workload.lengths import length_mix
from tests.plan.builders import EAST, LAYERS, catalog, few, lengths, offer, problem, service
from tests.reference.capacity_tables import capacity_table

STAGES = 3
APART, TOGETHER = service("chat", phases="apart"), service("chat", phases="together")
ROLES = (*APART.roles, *TOGETHER.roles)
PREFILL, DECODE, BOTH = ROLES


def own(role: object) -> Service:
    """The service that a role belongs to."""
    return TOGETHER if str(role).endswith("both") else APART


def test_one_phase_is_what_the_performance_model_says_within_the_network_interface() -> None:
    spec = catalog().model("llama-3.1-8b").llm
    load = RoleLoad("x", spec, Phase.DECODE, 0.08, APART.lengths.mix(), waits=True)
    link = hop_link(catalog(), "L40S:2")
    (expected,) = capacity_table([load], [catalog().node("L40S:2")], STAGES, link=link).values()
    table = role_table(problem(), catalog(), APART, DECODE, "L40S:2", STAGES)
    assert table.shape == (4, STAGES, LAYERS + 1)
    # Four prompt tokens come with each token that is generated; 4,096 bytes of KV each, per layer.
    kv = 4 * 4096 * np.arange(1, LAYERS + 1)
    # Half of all transfers wait no longer than a quarter of TTFT: prompts are equal, so K is a half.
    transfer = handover(problem(), catalog(), APART)
    assert transfer is not None
    takes_s = 512 * 4096 * np.arange(1, LAYERS + 1) / link.bandwidth_bytes_per_s
    assert transfer.moving_s <= 0.25 * APART.ttft_s
    load_share = load_within(0.25 * APART.ttft_s / takes_s / 0.5, np.ones(1))
    alone, piped = (link.bandwidth_bytes_per_s / (kv + hop) * load_share for hop in (0, 8192))
    np.testing.assert_array_equal(table[:, 0, 1:], np.minimum(expected.throughput[:, 0, 1:], alone))
    np.testing.assert_array_equal(
        table[:, 1:, 1:], np.minimum(expected.throughput[:, 1:, 1:], piped)
    )
    assert (table[1, 1:] < expected.throughput[1, 1:]).any()


def test_prefill_leaves_time_to_hand_over() -> None:
    spec = catalog().model("llama-3.1-8b").llm
    transfer = handover(problem(), catalog(), APART)
    assert transfer is not None
    # vLLM asks who decodes when the prompt is computed, and that takes a while.
    left_s = 1.5 - SERVER_REQUEST_S - transfer.seconds
    assert prefill_promise_s(problem(), catalog(), APART) == left_s
    assert prefill_promise_s(problem(), catalog(), TOGETHER) == 1.5
    mix = APART.lengths.mix()
    load = RoleLoad("x", spec, Phase.PREFILL, left_s, mix, waits=True)
    # Of the sizes that there are, this one's interface holds nothing up.
    (expected,) = capacity_table([load], [catalog().node("L40S:8")], 1).values()
    table = role_table(problem(), catalog(), APART, PREFILL, "L40S:8", 1)
    assert 0 < table[3, 0, LAYERS] == expected.at(LAYERS, 1)


def test_both_phases_share_the_node_and_hand_nothing_over() -> None:
    spec, mix = catalog().model("llama-3.1-8b").llm, TOGETHER.lengths.mix()
    prompts = RoleLoad("prefill", spec, Phase.PREFILL, 1.5, mix, together=True, waits=True)
    answers = RoleLoad("decode", spec, Phase.DECODE, 0.08, mix, together=True, waits=True)
    link, node = hop_link(catalog(), "L4:4"), catalog().node("L4:4")
    table = role_table(problem(), catalog(), TOGETHER, BOTH, "L4:4", STAGES)
    best = np.zeros_like(table)
    for tp in (1, 2, 4):
        steps = analytic(spec, copy_node(node, tp), tp=tp)
        model = MixedCapacityModel(prompts, answers, steps, link=link.share(tp, 4))
        copies = 4 // tp
        whole = model.throughputs([1], [Position.WHOLE]) * copies
        best[-1:, :1] = np.maximum(best[-1:, :1], whole)
        ends = model.throughputs([2, 3], POSITIONS[:-1]) * copies
        best[:-1, 1:] = np.maximum(best[:-1, 1:], ends)
    np.testing.assert_allclose(table, best, rtol=1e-12)
    assert (table > 0).any()


KINDS = (
    ("L4:1", None), ("L40S:1", None), ("L4:4", None), ("L4:1", "L4:8"), ("L4:4", "L4:8"), ("H100:8", None),
)  # fmt: skip


@few
@given(
    st.sampled_from(ROLES),
    st.sampled_from(KINDS),
    st.integers(1, STAGES),
    st.integers(1, LAYERS),
    st.sampled_from(POSITIONS),
)
def test_one_entry_equals_the_table_and_the_best_split(
    role: RoleId,
    kind_of: tuple[str, str | None],
    stages: int,
    layers: int,
    position: Position,
) -> None:
    kind, machine = kind_of
    asked = (problem(), catalog(), own(role), role, kind)
    one = node_capacity(*asked, layers, stages, position, machine=machine)
    if (position is Position.WHOLE) == (stages == 1):
        table = role_table(*asked, STAGES, machine=machine)
        assert one == table[POSITIONS.index(position), stages - 1, layers]
    sizes = tp_sizes(catalog().model("llama-3.1-8b").llm, catalog().node(kind).count)
    fixed = {
        tp: node_capacity(*asked, layers, stages, position, tp=tp, machine=machine) for tp in sizes
    }
    assert one == max(fixed.values()) >= 0.0
    chosen = best_tp(*asked, layers, stages, position, machine=machine)
    assert chosen == max(tp for tp, rate in fixed.items() if rate == one)


@few
@given(
    st.sampled_from(ROLES),
    st.sampled_from(KINDS),
    st.sampled_from(POSITIONS),
    st.floats(1.0, 3.0),
)
def test_never_rises_with_layers_nor_falls_with_a_looser_promise(
    role: RoleId, kind_of: tuple[str, str | None], position: Position, factor: float
) -> None:
    kind, machine = kind_of
    at = POSITIONS.index(position)
    table = role_table(problem(), catalog(), own(role), role, kind, STAGES, machine=machine)[at]
    assert (np.diff(table[:, 1:], axis=1) <= 0).all()
    # A longer TTFT may also allow slower hand-overs, so where phases are apart only TPOT is loosened.
    looser: dict[str, float] = {"tpot_s": 0.08 * factor}
    if role.phase is Phase.BOTH:
        looser["ttft_s"] = 1.5 * factor
    loose = own(role).model_copy(update=looser)
    more = role_table(problem(), catalog(), loose, role, kind, STAGES, machine=machine)[at]
    assert (more >= table * (1 - 1e-9)).all()


def test_a_slice_has_a_share_of_its_machines_interface_and_the_same_gpus() -> None:
    whole = hop_link(catalog(), "L4:8")
    assert hop_link(catalog(), "L4:8", None, 2) == Link(
        whole.bandwidth_bytes_per_s / 4, whole.latency_s
    )
    piece = node_source(catalog(), "L4:2", machine="L4:8")
    assert piece.node == catalog().node("L4:2")
    assert piece.link == hop_link(catalog(), "L4:8", None, 2)
    assert node_source(catalog(), "L4:8", machine="L4:8") == node_source(catalog(), "L4:8")
    # Four quarters carry what the machine does with the same split, where both phases run together.
    asked = (problem(), catalog(), TOGETHER, BOTH)
    for stages, layers, position in ((1, LAYERS, Position.WHOLE), (2, 16, Position.FIRST)):
        quarter = node_capacity(*asked, "L4:2", layers, stages, position, tp=2, machine="L4:8")
        machine = node_capacity(*asked, "L4:8", layers, stages, position, tp=2)
        assert 0 < machine == pytest.approx(4 * quarter)


def test_a_slice_is_joined_as_its_machine_is() -> None:
    joined = apply_overlay(catalog(), {"nodes": {"A100-80:8": {"interconnect": "pcie4"}}})
    assert node_source(joined, "A100-80:2", machine="A100-80:8").node.interconnect.kind == "pcie"
    assert node_source(joined, "A100-80:2").node.interconnect.kind == "nvlink"


def test_boxes_of_eight_carry_what_their_gpus_do() -> None:
    lengths = Lengths.of(length_mix("azure-conv"))
    asked = service("chat", phases="together", lengths=lengths)
    for kind, least in (("L40S:8", 90_000), ("L4:8", 20_000)):
        role = asked.roles[0]
        rate = node_capacity(
            problem(), catalog(), asked, role, kind, LAYERS, 1, Position.WHOLE, tp=1
        )
        eight = node_capacity(
            problem(), catalog(), asked, role, kind, LAYERS, 1, Position.WHOLE, tp=8
        )
        assert best_tp(problem(), catalog(), asked, role, kind, LAYERS, 1, Position.WHOLE) < 8
        assert rate > 1.5 * eight
        apart = service("chat", phases="apart", lengths=lengths)
        prompts = node_capacity(
            problem(offers=(offer(EAST, kind, 1.0),)),
            catalog(), apart, "chat/llm/prefill", kind, LAYERS, 1, Position.WHOLE,
        )  # fmt: skip
        assert prompts > least


def test_a_split_that_does_not_divide_is_refused() -> None:
    asked = (problem(), catalog(), TOGETHER, BOTH, "L4:4", LAYERS, 1, Position.WHOLE)
    with pytest.raises(UsageError, match="does not divide"):
        node_capacity(*asked, tp=3)


@pytest.mark.parametrize("layers", [0, LAYERS + 1])
def test_layers_the_model_does_not_have(layers: int) -> None:
    role = APART.roles[0]
    got = node_capacity(problem(), catalog(), APART, role, "L40S:1", layers, 1, Position.WHOLE)
    assert got == 0.0


def test_a_thin_link_bounds_every_stage() -> None:
    thin = apply_overlay(catalog(), {"links": {"in_region": {"bandwidth": "10Mbit/s"}}})
    assert hop_link(thin, "L40S:1") == Link(1.25e6, thin.links.in_region.latency_s)
    for role in ROLES:
        table = role_table(problem(), thin, own(role), role, "L40S:1", STAGES)
        used = table[:, 1:] * hop_bytes_per_unit(thin, own(role), role.phase)
        assert (used <= 1.25e6 * (1 + 1e-9)).all()


def test_what_a_hop_carries() -> None:
    assert tokens_per_unit(APART, Phase.DECODE) == 1.0
    assert tokens_per_unit(TOGETHER, Phase.BOTH) == 640.0
    assert hop_bytes_per_unit(catalog(), APART, Phase.PREFILL) == 4096 * 2
    assert kv_context(APART, Phase.PREFILL) == 512.0
    assert kv_context(APART, Phase.DECODE) == kv_context(TOGETHER, Phase.BOTH) == 512 + 64


def test_the_engine_counts() -> None:
    slow = problem(settings={"engine": "atoll"})
    role = APART.roles[1]
    with_vllm = node_capacity(problem(), catalog(), APART, role, "L4:1", 8, 2, Position.FIRST)
    with_own = node_capacity(slow, catalog(), APART, role, "L4:1", 8, 2, Position.FIRST)
    assert 0 < with_own < with_vllm


@pytest.mark.parametrize("kind", ["T4:1", "L4:1", "A10G:1"])
@pytest.mark.parametrize("sizes", [(512.0, 128.0), (1092.0, 2963.0), (200.0, 6000.0)])
def test_what_carries_anything_has_the_memory_for_it(kind: str, sizes: tuple[float, float]) -> None:
    """At the edge of memory, too: where both phases run, activations of both have their room."""
    chat = service("chat", phases="auto", ttft_s=10.0, tpot_s=1.0, lengths=lengths(*sizes))
    asked = problem(services=(chat,), offers=(offer("lab", kind, 1.0),))
    spec, node = catalog().model(chat.model).llm, catalog().node(kind)
    for role in chat.roles:
        memory = memory_model(asked, catalog(), chat, role.phase, node, 1)
        for layers in range(1, LAYERS):
            for start, end in ((0, layers), (LAYERS - layers, LAYERS)):
                place = position_of(spec, start, end)
                rate = node_capacity(asked, catalog(), chat, role, kind, layers, 2, place, tp=1)
                assert rate == 0 or memory.fits(start, end, kv_context(chat, role.phase))
