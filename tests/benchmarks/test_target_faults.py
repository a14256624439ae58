"""Targets that answer wrongly: nothing is taken for gone, nothing is started twice."""

from __future__ import annotations

import pytest

from tests.slow.targets.cluster_events import EVENTS, ClusterEvent, run_event
from tests.slow.targets.fault_stages import STAGES
from tests.slow.targets.target_faults import (
    CHANGE,
    SHORT_TURNS,
    TAKEOVER,
    Case,
    Outcome,
    run,
)


@pytest.mark.parametrize("target", STAGES)
@pytest.mark.parametrize(
    ("fault", "during", "started"),
    [("no rows", TAKEOVER, 2), ("partial", CHANGE, 4), ("half-started", CHANGE, 4)],
)
def test_a_fleet_stays_what_it_is(target: str, fault: str, during: str, started: int) -> None:
    found = run(Case(target, fault, SHORT_TURNS, during))
    assert found == Outcome(started=started, rests=True)


def test_a_full_disk_does_not_end_the_controller() -> None:
    assert run(Case("local", "quota", SHORT_TURNS, CHANGE)) == Outcome(started=4, rests=True)


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(each, id=each.name)
        for each in EVENTS
        if " without " not in each.name or each.name == "configmaps without labels"
    ],
)
def test_a_fleet_carries_its_demand_whatever_happens_in_its_cluster(event: ClusterEvent) -> None:
    found, wrong = run_event(event)
    assert not wrong
    assert found.started <= event.started
    assert found == Outcome(started=found.started, rests=True)
