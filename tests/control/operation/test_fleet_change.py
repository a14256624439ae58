"""What people are shown before a change happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.control.operation.control_loop import FleetController, LoopTurn
from atoll.control.operation.controller_lease import FileLease
from atoll.control.operation.fleet_change import find_change
from atoll.control.operation.fleet_history import History
from atoll.core.errors import InputError
from tests.control.operation.test_control_loop import World
from tests.control.operation.test_control_loop import controller as make


def turn_of(world: World, tmp_path: Path, *, rate: float) -> tuple[FleetController, LoopTurn]:
    world.rate_per_s = rate
    controller = make(world, tmp_path)
    return controller, controller.turn(act=False)


def test_a_first_plan_is_all_starts(tmp_path: Path) -> None:
    world = World()
    _, turn = turn_of(world, tmp_path, rate=20.0)
    change = find_change(turn.view, turn.decision, lambda _: "memory")
    assert not change.is_empty
    assert not change.stays
    assert not change.goes
    assert change.usd_before == 0.0
    assert change.usd_after > 0.0
    text = change.text()
    for row in change.starts:
        assert f"  + {row.instance} on memory: chat as [0, 32) L40S:1 in here, $1.86/h" in text
    assert f"cost: $0.00/h -> ${change.usd_after:.2f}/h" in text
    assert "dips: none" in text
    assert "why: adopted: nothing runs yet" in text


def test_growing_keeps_what_runs(tmp_path: Path) -> None:
    world = World()
    first = make(world, tmp_path)
    first.turn()
    world.pass_time(200.0)
    before = set(world.statuses)
    assert before
    _, turn = turn_of(world, tmp_path, rate=60.0)
    change = find_change(turn.view, turn.decision, lambda _: "memory")
    assert set(change.stays) == before
    assert change.starts
    assert not change.goes
    assert change.usd_before < change.usd_after
    assert all(f"  = {name}" in change.text() for name in before)


def test_shrinking_drains_and_saves(tmp_path: Path) -> None:
    world = World(rate_per_s=60.0)
    first = make(world, tmp_path)
    first.turn()
    world.pass_time(200.0)
    _, turn = turn_of(world, tmp_path, rate=5.0)
    change = find_change(turn.view, turn.decision, lambda _: "memory")
    assert change.goes
    assert not change.starts
    assert change.usd_after < change.usd_before
    assert all(f"  - {row.instance} on memory" in change.text() for row in change.goes)
    # Told and kept are all there is.
    assert {row.instance for row in change.goes} | set(change.stays) == set(world.statuses)


def test_what_is_refused_is_not_done(tmp_path: Path) -> None:
    world = World()
    controller = make(world, tmp_path)
    turn = controller.turn(approve=lambda _: False)
    assert not turn.approved
    assert turn.decision.actions
    assert world.started == []
    assert controller.memory.plan is None
    assert History(tmp_path / "history.jsonl").read() == []
    assert controller.turn(approve=lambda _: True).done
    assert world.started


def test_looking_writes_nothing_even_where_a_target_is_silent(tmp_path: Path) -> None:
    world = World(answers=False)
    controller = make(world, tmp_path)
    turn = controller.turn(act=False)
    assert turn.unreachable == ["memory"]
    assert "no route" in controller.reasons["memory"]
    assert not (tmp_path / "history.jsonl").exists()
    assert FileLease(tmp_path / "lease.json").read() is None


def test_what_nobody_wrote_down_is_not_started_a_second_time(tmp_path: Path) -> None:
    world = World()
    make(world, tmp_path).turn()
    begun = list(world.started)
    (tmp_path / "elsewhere").mkdir()
    elsewhere = make(world, tmp_path / "elsewhere", "two")
    world.now_s += 1000.0
    with pytest.raises(InputError, match="does not say what it is"):
        elsewhere.turn()
    assert world.started == begun
