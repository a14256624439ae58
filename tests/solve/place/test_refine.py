"""Ranking by a measure: what is measured, what is kept, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from atoll.solve.array_types import Ints
from atoll.solve.deadline import Deadline
from atoll.solve.effort import Measured
from atoll.solve.place import refine as refining
from atoll.solve.place.flow_instance import FlowInstance, Flows, Placement
from atoll.solve.place.placement_polish import Value
from atoll.solve.place.refine import DRAWS, MEASURED, Measure, Refined, Split, refine
from tests.solve.place.test_sustained import instance

LONG = 1e6
"""Seconds that never pass."""


def flows(value: float, size: int) -> Flows:
    return Flows(value, np.zeros((size, size)), np.full(size, value / size), np.zeros(size))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few changes are tried in vain."""
    monkeypatch.setattr(refining, "_PATIENCE", 10)


def usual(own: FlowInstance, placement: Placement) -> Flows:
    return flows(1.0, own.size)


def other(own: FlowInstance, placement: Placement) -> Flows:
    return flows(2.0, own.size)


def first_node_layers(placement: Placement, carried: Flows, draw: int) -> Measured:
    """More layers on the first node are better, and so is the other flow."""
    held = float(placement.end[0] - placement.start[0])
    return Measured(held * carried.value, 1.0, 1.0)


def lanes(*first: int) -> list[Placement]:
    return [Placement(np.array([0, k, 0, 8]), np.array([k, 16, 8, 16])) for k in first]


def refined(
    candidates: list[Placement],
    measure: Measure = first_node_layers,
    splits: Sequence[Split] = (usual, other),
    *,
    layers: int = 16,
    quick: Value = lambda start, end: 1.0,
    deadline_s: float = LONG,
    max_runs: int = 60,
    known: Sequence[Placement] = (),
) -> Refined:
    return refine(
        instance(4, layers, most=3 * layers // 4),
        candidates,
        splits,
        measure,
        quick=quick,
        deadline=Deadline(deadline_s),
        random=np.random.default_rng(3),
        known=known,
        max_runs=max_runs,
    )


def worthless(start: Ints, end: Ints) -> float:
    """An analytic value for which no change is measured."""
    return 0.0


def test_the_best_candidate_is_found_with_its_best_flow() -> None:
    found = refined(lanes(4, 7, 5), max_runs=6)
    assert found.placement.end[0] == 7
    assert found.flows.value == 2.0
    assert (found.value.tokens_per_s, found.first.tokens_per_s) == (14.0, 4.0)
    assert found.runs == 6


def test_changes_are_kept_where_they_are_better() -> None:
    found = refined(lanes(4))
    assert found.value.tokens_per_s > 8.0
    assert found.value.tokens_per_s == 2.0 * (found.placement.end[0] - found.placement.start[0])
    assert found.runs <= 60


@pytest.mark.usefixtures("impatient")
def test_changes_of_no_analytic_value_are_not_measured() -> None:
    found = refined(lanes(4), quick=worthless)
    assert found.runs == 2 * DRAWS


def test_more_work_tries_more_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    usual_runs = MEASURED // 4
    monkeypatch.setattr(refining, "MEASURED", usual_runs)
    monkeypatch.setattr(refining, "_PATIENCE", refining._PATIENCE // 4)

    def alike(placement: Placement, carried: Flows, draw: int) -> Measured:
        return Measured(1.0, 1.0, 1.0)

    runs = [
        refined(lanes(4), alike, (usual,), max_runs=most).runs
        for most in (usual_runs, 2 * usual_runs)
    ]
    assert runs[0] == usual_runs
    # With the patience of the usual effort it would end sooner.
    assert runs[1] > 1.5 * usual_runs


def test_the_first_is_measured_without_any_time() -> None:
    found = refined(lanes(4, 7), deadline_s=0.0)
    assert found.runs == 1
    assert found.value == found.first


def test_the_same_seed_gives_the_same_placement() -> None:
    one, two = refined(lanes(4, 5)), refined(lanes(4, 5))
    assert one.placement.start.tolist() == two.placement.start.tolist()
    assert one.placement.end.tolist() == two.placement.end.tolist()
    assert one.value == two.value


def test_sooner_counts_a_little() -> None:
    assert Measured(100.0, 1.0, 1.0).score > Measured(101.0, 1.3, 1.0).score
    assert Measured(100.0, 1.0, 1.0).score < Measured(110.0, 1.3, 1.0).score
    assert Measured(100.0, 2.0, 3.0).score == pytest.approx(100.0 / 2.0**0.2 / 3.0**0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("quick_tokens_per_s", "taken"), [(96.0, 4), (90.0, 7)])
def test_what_answers_sooner_generates_at_most_a_twentieth_less(
    quick_tokens_per_s: float, taken: int
) -> None:
    def measure(placement: Placement, carried: Flows, draw: int) -> Measured:
        sooner = placement.end[0] == 4
        return Measured(quick_tokens_per_s if sooner else 100.0, 0.1 if sooner else 1.0, 0.1)

    found = refined(lanes(4, 7), measure, (usual,), quick=worthless)
    assert found.placement.end[0] == taken
    # It would be taken by its score alone.
    assert Measured(90.0, 0.1, 0.1).score > Measured(100.0, 1.0, 0.1).score


@pytest.mark.usefixtures("impatient")
def test_nothing_is_better_for_its_luck_under_one_draw() -> None:
    def lucky(placement: Placement, carried: Flows, draw: int) -> Measured:
        # Seven layers shine under the first draw only; five are the best in the mean.
        value = {7: (20.0, 1.0, 1.0), 5: (12.0, 12.0, 12.0)}.get(int(placement.end[0]), (10.0,) * 3)
        return Measured(value[draw], 1.0, 1.0)

    found = refined(lanes(4, 7, 5), lucky, (usual,), quick=worthless)
    assert found.placement.end[0] == 5
    assert found.value.tokens_per_s == 12.0


def test_known_placements_are_measured_with_every_flow() -> None:
    found = refined(lanes(4), known=lanes(11, 3), max_runs=5)
    assert found.runs == 5
    assert (found.placement.end[0], found.flows.value) == (11, 2.0)


def test_what_is_found_generates_no_less_than_what_is_known() -> None:
    def sooner_for_less(placement: Placement, carried: Flows, draw: int) -> Measured:
        # By its score alone the placement with 4 layers would win by far.
        known = placement.end[0] == 9
        return Measured(10.0, 1.0, 1.0) if known else Measured(9.0, 1e-3, 1.0)

    found = refined(lanes(4), sooner_for_less, (usual,), known=lanes(9), max_runs=30)
    assert found.placement.end[0] == 9
    assert found.value.tokens_per_s == 10.0


def test_no_try_is_spent_on_the_same_plan_once_more() -> None:
    def idle_last(own: FlowInstance, placement: Placement) -> Flows:
        entering = np.array([0.5, 0.25, 0.25, 0.0])
        return Flows(1.0, np.zeros((own.size, own.size)), entering, np.zeros(own.size))

    def idle_changes_first(start: Ints, end: Ints) -> float:
        # By its analytic value nothing beats a change to the last node, which has no flow.
        return 1.0 if (start[:3].tolist(), end[:3].tolist()) == ([0, 10, 0], [10, 40, 20]) else 0.95

    first = Placement(np.array([0, 10, 0, 20]), np.array([10, 40, 20, 40]))
    measured: list[tuple[list[int], list[int]]] = []

    def measure(placement: Placement, carried: Flows, draw: int) -> Measured:
        measured.append((placement.start[:3].tolist(), placement.end[:3].tolist()))
        return Measured(1.0, 1.0, 1.0)

    found = refined(
        [first], measure, (idle_last,), layers=40, quick=idle_changes_first, max_runs=MEASURED
    )
    assert found.runs == len(measured) == MEASURED
    others = [repr(ranges) for ranges in measured[DRAWS:]]
    assert len(set(others)) == len(others)
