"""Changes that are agreed to: at the terminal, or on a page that names the very change."""

from __future__ import annotations

from pathlib import Path

from atoll.control.operation.approval import ApprovalGate, Ask, ChangeBoard, NextChange
from atoll.control.operation.control_loop import (
    FleetController,
    FleetPlace,
    InstanceStore,
    LoopTurn,
)
from atoll.control.operation.controller_lease import FileLease
from atoll.control.operation.fleet_change import FleetChange, find_change
from atoll.control.operation.fleet_history import History
from atoll.control.operation.fleet_home import FleetHome
from tests.control.operation.test_control_loop import PROBLEM, World, order, plan


class Site:
    """A controller over a target in memory, with the gate that asks."""

    def __init__(self, folder: Path, ask: Ask | None = None) -> None:
        self.world = World()
        self.home = FleetHome(folder)
        self.board = ChangeBoard(folder)
        self.gate = ApprovalGate(self.board, "one", self.world.clock, ask)
        self.refusals = 0
        self.gate.on_refused = self._count
        place = FleetPlace(
            "small", PROBLEM, {"memory": self.world}, self.world, lambda _: "memory", order
        )
        self.controller = FleetController(
            place,
            InstanceStore(folder / "instances"),
            History(folder / "history.jsonl"),
            FileLease(folder / "lease.json"),
            plan,
            holder="one",
            clock=self.world.clock,
            keep_plan=self.home.keep_plan,
        )

    def _count(self) -> None:
        self.refusals += 1

    def turn(self, seconds: float = 60.0) -> LoopTurn:
        def approve(turn: LoopTurn) -> bool:
            return self.gate.admit(find_change(turn.view, turn.decision, lambda _: "memory"))

        done = self.controller.turn(approve=approve)
        self.world.pass_time(seconds)
        return done

    def next(self) -> NextChange:
        found = self.board.read()
        assert found is not None
        return found

    def settle(self, turns: int = 12) -> None:
        for _ in range(turns):
            self.turn()


def test_a_change_waits_for_its_own_approval_on_a_page(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.turn()
    first = site.next()
    assert first.state == "waiting"
    assert first.on_page
    assert first.starts
    assert first.usd_after > first.usd_before == 0.0
    assert not site.world.started
    site.turn()
    # The same change under the same id, though its instances would have other names.
    assert site.next().id == first.id
    site.board.answer("another", approve=True, now_s=0.0)
    assert site.gate.has_answer()
    site.turn()
    assert not site.world.started
    assert not site.gate.has_answer()
    site.board.answer(first.id, approve=True, now_s=0.0)
    site.turn()
    assert site.world.started
    assert site.next().state == "applying"
    site.settle()
    assert site.board.read() is None
    assert len(site.world.started) == len(set(site.world.started)) == len(first.starts)


def test_a_change_that_changed_needs_a_new_approval(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.turn()
    first = site.next()
    site.world.rate_per_s *= 3.0
    for _ in range(8):
        site.turn()
    second = site.next()
    assert second.id != first.id
    site.board.answer(first.id, approve=True, now_s=0.0)
    site.turn()
    assert not site.world.started
    site.board.answer(second.id, approve=True, now_s=0.0)
    site.turn()
    assert site.world.started


def test_an_approval_counts_once_and_for_one_controller(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.turn()
    first = site.next()
    site.board.answer(first.id, approve=True, now_s=0.0)
    site.settle()
    started = len(site.world.started)
    # Everything is lost, and the same is wanted again: that is another change.
    site.world.statuses.clear()
    site.board.answer(first.id, approve=True, now_s=0.0)
    site.settle(4)
    again = site.next()
    assert again.state == "waiting"
    assert again.id != first.id
    assert len(site.world.started) == started
    site.board.answer(again.id, approve=True, now_s=0.0)
    other = Site(tmp_path)
    other.world.now_s = site.world.now_s + 1000.0
    other.turn()
    assert other.next().id != again.id
    assert not other.world.started


def test_what_was_refused_on_a_page_can_still_be_approved(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.turn()
    name = site.next().id
    site.board.answer(name, approve=False, now_s=0.0)
    site.turn()
    assert (site.next().state, site.refusals) == ("refused", 1)
    site.board.answer(name, approve=False, now_s=0.0)
    site.turn()
    assert (site.next().state, site.refusals) == ("refused", 1)
    site.board.answer(site.next().id, approve=True, now_s=0.0)
    site.turn()
    assert site.next().state == "applying"


def test_at_a_terminal_a_change_is_asked_once(tmp_path: Path) -> None:
    asked: list[str] = []
    answers = [False, True]

    def ask(change: FleetChange) -> bool:
        assert change.starts
        asked.append(site.next().state)
        return answers[0]

    site = Site(tmp_path, ask)
    site.turn()
    site.turn()
    assert asked == ["asked"]
    assert (site.next().state, site.next().on_page) == ("refused", False)
    answers[0] = True
    site.board.answer(site.next().id, approve=True, now_s=0.0)
    site.turn()
    # Who asks at a terminal does not listen to pages.
    assert not site.world.started
    site = Site(tmp_path, ask)
    site.world.now_s += 1000.0
    site.turn()
    assert site.world.started
    site.gate.leave()
    assert site.board.read() is None


def test_a_broken_answer_is_no_answer(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.turn()
    (tmp_path / "approval.json").write_text("{")
    site.turn()
    assert not site.world.started
    assert not (tmp_path / "approval.json").exists()


def test_the_plan_in_force_is_written_down(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.turn()
    assert site.home.read_plan() is None
    site.board.answer(site.next().id, approve=True, now_s=0.0)
    site.turn()
    found = site.home.read_plan()
    assert found is not None
    assert found.plan == site.controller.memory.plan
    assert found.hash == site.controller.memory.plan_hash
    assert found.problem.services[0].rate_per_s > 0.0
    written = (tmp_path / "plan.json").stat().st_mtime_ns
    site.turn()
    assert (tmp_path / "plan.json").stat().st_mtime_ns == written
