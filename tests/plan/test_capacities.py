from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.links import Link
from atoll.catalog.overlay import apply_overlay
from atoll.core.ids import Phase
from atoll.perf.capacity import RoleLoad, capacity_table
from atoll.perf.step import Position
from atoll.plan.capacities import (
    POSITIONS,
    hop_bytes_per_unit,
    kv_context,
    node_capacity,
    role_table,
    tokens_per_unit,
)
from tests.plan.builders import LAYERS, catalog, few, problem, service

STAGES = 3
APART, TOGETHER = service("chat"), service("chat", phases="together")
ROLES = (*APART.roles, *TOGETHER.roles)


def test_one_phase_is_what_the_performance_model_says() -> None:
    spec = catalog().model("llama-3.1-8b").llm
    load = RoleLoad("x", spec, Phase.DECODE, 0.08, APART.lengths.mix())
    node = catalog().node("L40S:1")
    link = catalog().links.between("r", "r", "L40S:1", "L40S:1")
    (expected,) = capacity_table([load], [node], STAGES, link=link).values()
    table = role_table(problem(), catalog(), APART, "chat/llm/decode", "L40S:1", STAGES)
    np.testing.assert_array_equal(table, expected.throughput)
    assert table.shape == (4, STAGES, LAYERS + 1)


def test_both_phases_share_the_node() -> None:
    apart = [
        role_table(problem(), catalog(), APART, role, "L40S:1", STAGES) for role in APART.roles
    ]
    table = role_table(problem(), catalog(), TOGETHER, "chat/llm/both", "L40S:1", STAGES)
    some = (apart[0] > 0) & (apart[1] > 0)
    assert some.any()
    np.testing.assert_array_equal(table > 0, some)
    seconds = 512 / apart[0][some] + 128 / apart[1][some]
    np.testing.assert_allclose(table[some], 1 / seconds)


@few
@given(
    st.sampled_from(ROLES),
    st.sampled_from(("L4:1", "L40S:1", "L4:4")),
    st.integers(1, STAGES),
    st.integers(1, LAYERS),
    st.sampled_from(POSITIONS),
)
def test_one_entry_equals_the_table(
    role: object, kind: str, stages: int, layers: int, position: Position
) -> None:
    own = TOGETHER if str(role).endswith("both") else APART
    one = node_capacity(problem(), catalog(), own, str(role), kind, layers, stages, position)
    if (position is Position.WHOLE) == (stages == 1):
        table = role_table(problem(), catalog(), own, str(role), kind, STAGES)
        entry = table[POSITIONS.index(position), stages - 1, layers]
        assert one == pytest.approx(float(entry), rel=1e-12)
    assert one >= 0


@pytest.mark.parametrize("role", [str(role) for role in ROLES])
def test_tables_never_rise_with_layers(role: str) -> None:
    own = TOGETHER if role.endswith("both") else APART
    table = role_table(problem(), catalog(), own, role, "L40S:1", STAGES)
    assert (np.diff(table[:, :, 1:], axis=2) <= 0).all()


@pytest.mark.parametrize("layers", [0, LAYERS + 1])
def test_layers_the_model_does_not_have(layers: int) -> None:
    role = APART.roles[0]
    got = node_capacity(problem(), catalog(), APART, role, "L40S:1", layers, 1, Position.WHOLE)
    assert got == 0.0


def test_a_thin_link_bounds_every_stage() -> None:
    thin = apply_overlay(catalog(), {"links": {"in_region": {"bandwidth": "10Mbit/s"}}})
    assert hop_link(thin, "L40S:1") == Link(1.25e6, thin.links.in_region.latency_s)
    for own in (APART, TOGETHER):
        for role in own.roles:
            table = role_table(problem(), thin, own, role, "L40S:1", STAGES)
            used = table[:, 1:] * hop_bytes_per_unit(thin, own, role.phase)
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
    with_vllm = node_capacity(problem(), catalog(), APART, role, "L4:1", 20, 2, Position.FIRST)
    with_own = node_capacity(slow, catalog(), APART, role, "L4:1", 20, 2, Position.FIRST)
    assert 0 < with_own < with_vllm
