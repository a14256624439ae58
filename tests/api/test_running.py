"""Fleets brought up, operated and taken down from Python, by processes that stand for machines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from atoll import Fleet, OperationOptions, PoolSpec, ServiceSpec
from atoll.control.decision.decide import MakePlan
from atoll.control.operation.fleet_change import FleetChange
from atoll.control.operation.fleet_home import home_of
from atoll.control.operation.options import OperationListener
from atoll.control.operation.rollout import NotUpError
from atoll.control.virtual import fluid_calibration as calibrate
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from tests.control.virtual import toys


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("ATOLL_FABRIC", raising=False)


@pytest.fixture
def fleet() -> Fleet:
    chat = ServiceSpec(
        model="llama-3.1-8b",
        ttft=1.5,
        tpot=0.08,
        rate=1.0,
        lengths="512x128",
        phases="together",
    )
    return Fleet.of("lab", {"chat": chat}, pool=PoolSpec(owned={"here": {"L4:1": 4}}))


class Refusing(OperationListener):
    """Does not agree, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[FleetChange] = []
        self.notes: list[str] = []

    def approve(self, change: FleetChange) -> bool:
        self.asked.append(change)
        return False

    def note(self, text: str) -> None:
        self.notes.append(text)


OPTIONS = OperationOptions(stand_in=True, port=0)


def test_a_change_that_is_refused_is_not_made(fleet: Fleet) -> None:
    plan = fleet.plan(capacity_only=True)
    listener = Refusing()
    with pytest.raises(NotUpError, match="did not agree"):
        plan.up("local", options=OPTIONS, listener=listener)
    (change,) = listener.asked
    assert len(change.starts) == len(plan.instances)
    assert home_of("lab").read() is None
    # A fleet without a file has one written, which `atoll operate lab` follows.
    kept = json.loads((home_of("lab").folder / "problem.json").read_text())
    assert kept["name"] == "lab"


def test_operating_once_asks_too(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_planner(deadline_s: float) -> MakePlan:
        del deadline_s
        return lambda asked: solve(asked, PlanRequest(effort=Effort(cached=False)))

    monkeypatch.setattr("atoll.control.operation.live_operation.make_planner", make_planner)
    listener = Refusing()
    fleet.operate("local", options=OPTIONS, once=True, listener=listener)
    assert listener.asked[0].starts
    texts = [event.text for event in home_of("lab").history.read()]
    assert texts[0] == "begins to operate"
    assert texts[-1] == "ends; the fleet goes on serving"


def test_operating_in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = toys.problem()
    monkeypatch.setattr(calibrate, "calibrate_fleet", lambda *_, **__: toys.fleet(asked))
    found = Fleet(asked).simulate_operation(days=0.05, prices="generated", seed=2)
    assert [row.name for row in found.summaries][:2] == ["atoll", "static-peak"]
    assert "static-peak" in str(found)
    assert found.to_page().startswith("<!doctype html>")


@pytest.mark.slow
def test_a_plan_is_brought_up_asked_and_taken_down(fleet: Fleet) -> None:
    from atoll.runtime.http.http_client import request

    plan = fleet.plan(capacity_only=True)
    running = plan.up("local", options=OPTIONS, wait_s=300.0)
    try:
        assert running.services == ("chat",)
        assert len(running.instances) == len(plan.instances)
        chat = {"model": "chat", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
        answer = asyncio.run(
            request(f"{running.url}/v1/chat/completions", body=chat, timeout_s=60.0)
        )
        assert answer.status == 200
        assert json.loads(answer.body)["choices"][0]["message"]["content"]
        fleet.operate(once=True)  # nothing is to be done
    finally:
        running.down(wait_s=0.0)
    record = home_of("lab").read()
    assert record is not None
    assert not record.up
