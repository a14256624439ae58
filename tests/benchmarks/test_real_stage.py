"""What probes of the stage engine say is found again in the tables that are simulated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.cluster_profiles import at
from atoll.runtime.local.layer_profile import profile_of
from benchmarks.simulation.node_meter import Counted, NodeMeter
from benchmarks.simulation.real_stage import (
    HOPS,
    STREAMS,
    StageLook,
    build_problem,
    find_levels,
    merge_points,
    tabulate,
    usual_look,
)
from benchmarks.simulation.streaming import Latency, StreamedAnswer

HOP_S = 1e-3
SPEEDS = st.lists(st.floats(0.7, 1.5), min_size=3, max_size=9)


def look(level: float = 1.0, late_s: float = 0.0) -> StageLook:
    """Nodes of 30 ms and 2 ms for every sequence, prompts of 1 ms a token, one group out for each node."""
    rows = np.array([[1.0, 1.0, 2.0, 4.0]] * 2)
    steps_s = 0.03 + 0.002 * rows
    tokens_s = steps_s.sum(axis=0) + HOPS * HOP_S
    tokens_s[1:] += 2.0 * late_s
    prompts_s = 1e-3 * np.array([[16.0, 48.0, 96.0, 144.0, 192.0]] * 2)
    return StageLook(level * prompts_s, rows, level * steps_s, level * tokens_s, 0.004)


def test_hops_and_lateness_are_told_apart() -> None:
    assert list(STREAMS) == [1, 2, 4, 8]
    found = look(late_s=0.003)
    assert found.hop_s == pytest.approx(HOP_S)
    assert found.late_s == pytest.approx([0.0, 0.003, 0.003, 0.003], abs=1e-12)
    assert look().late_s == pytest.approx(0.0, abs=1e-12)


@given(SPEEDS)
def test_levels_are_the_speeds_of_the_machine(speeds: list[float]) -> None:
    levels = find_levels([look(speed) for speed in speeds])
    assert levels == pytest.approx([speed / np.median(speeds) for speed in speeds])


@given(SPEEDS, st.data())
def test_a_probe_that_was_held_up_changes_nothing(speeds: list[float], data: st.DataObject) -> None:
    looks = [look(speed) for speed in speeds]
    held_up = data.draw(st.integers(0, len(speeds) - 1))
    disturbed = looks.copy()
    steps_s = looks[held_up].steps_s.copy()
    steps_s[:, 2] *= 3.0
    one = looks[held_up]
    disturbed[held_up] = StageLook(one.prompts_s, one.rows, steps_s, one.tokens_s, one.beside_s)
    usual, still = usual_look(looks), usual_look(disturbed)
    # Without the one that was held up the median of a kind is still that of some look.
    assert still.prompts_s == pytest.approx(usual.prompts_s, rel=1e-9)
    assert still.steps_s[:, 0] == pytest.approx(usual.steps_s[:, 0], rel=1e-9)


@given(st.floats(0.0, 0.9), st.floats(0.0, 0.005))
def test_tables_say_what_was_measured(share: float, late_s: float) -> None:
    measured = look(late_s=late_s)
    for table in tabulate(measured, (share, share)):
        assert dict(table.decode_s)[4] == pytest.approx(0.038 + late_s)
        assert dict(table.prefill_s)[96] == pytest.approx(0.096)
        profile = profile_of(table, None, (1e5,) * table.layers)
        shared_s = profile.shared_s_per_layer * table.layers
        first_s = at(profile.prefill_s_per_layer, 1.0) * table.layers
        # A step of one sequence is late where two streams take turns, and is not where there is one.
        assert shared_s == pytest.approx(min(share * (0.032 + 0.5 * late_s), first_s))


@given(st.lists(st.tuples(st.floats(1.0, 8.0), st.floats(0.01, 0.2)), min_size=1, max_size=8))
def test_curves_rise(points: list[tuple[float, float]]) -> None:
    curve = merge_points(points)
    assert [n for n, _ in curve] == sorted({n for n, _ in curve})
    seconds = [each_s for _, each_s in curve]
    assert seconds == sorted(seconds)
    assert seconds[-1] <= max(each_s for _, each_s in points) + 1e-12


def test_what_nodes_did_is_counted_between_heartbeats() -> None:
    meter = NodeMeter(["ipc://a", "ipc://b"])
    for at_s in range(5):
        meter.hear("ipc://a", float(at_s), Counted(10 * at_s, 40 * at_s, 0.3 * at_s))
    busy, silent = meter.between(0.5, 3.5)
    assert busy == pytest.approx((20, 80, 0.6))
    assert silent == Counted(0, 0, 0.0)


def test_nodes_order_prompts_by_the_promise_that_the_simulator_knows() -> None:
    problem, plan = build_problem()
    (service,) = problem.services
    assert plan.engines[service.name].promised_ttft_s == service.ttft_s


def test_an_answer_of_one_token_has_no_further_ones() -> None:
    assert StreamedAnswer(1.0, (1.5,), 1).latency == Latency(0.5, 0.0)
    assert StreamedAnswer(1.0, (1.5, 1.7, 2.1), 3).latency == pytest.approx((0.5, 0.3))
