"""Targets that answer wrongly, some of all cases: nothing is taken for gone, nothing is started twice."""

from __future__ import annotations

import pytest

from tests.slow.targets.cluster_events import EVENTS, run_event
from tests.slow.targets.target_faults import CHANGE, SHORT_TURNS, TAKEOVER, Case, Outcome, run

FEW_EVENTS = ("a machine is gone", "both machines are drained")


@pytest.mark.parametrize(
    ("target", "fault", "during", "started"),
    [
        ("local", "quota", CHANGE, 4),
        ("local", "half-started", CHANGE, 4),
        ("joined", "no rows", TAKEOVER, 2),
        ("slurm", "partial", CHANGE, 4),
        ("kubernetes", "half-started", CHANGE, 4),
        ("skypilot", "partial", CHANGE, 4),
    ],
)
def test_a_fleet_stays_what_it_is(target: str, fault: str, during: str, started: int) -> None:
    found = run(Case(target, fault, SHORT_TURNS, during))
    assert found == Outcome(started=started, rests=True)


@pytest.mark.parametrize("name", FEW_EVENTS)
def test_a_fleet_carries_its_demand_whatever_happens_in_its_cluster(name: str) -> None:
    (event,) = (each for each in EVENTS if each.name == name)
    found, wrong = run_event(event)
    assert not wrong
    assert found.started <= event.started
    assert found == Outcome(started=found.started, rests=True)
