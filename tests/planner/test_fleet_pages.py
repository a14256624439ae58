"""What the planner says of operated fleets: how they stand, their plan, history and the next change."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from atoll.control.operation.approval import ChangeAnswer, ChangeRow, NextChange
from atoll.control.operation.control_loop import PlanInForce
from atoll.control.operation.fleet_history import HistoryEvent
from atoll.control.operation.fleet_home import FleetHome, FleetRecord, home_of, write_holder
from atoll.control.operation.fleet_status import FleetStatus, InstanceRow
from atoll.core.files import read_text_limited
from atoll.deploy.target_table import TargetSettings
from atoll.plan.plan import Plan
from atoll.planner.fleets import FleetList, FleetShelf, ListedFleet
from atoll.planner.planner_service import FleetWatch
from atoll.planner.plans import describe_bind
from atoll.solve.explain.plan_explanation import Constraint, Worth
from tests.control.operation.test_control_loop import PROBLEM, plan
from tests.planner.asking import JobsHere, ask, running

FLEET = "name: small\nmodels: {}\n"


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(PROBLEM)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetHome:
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    source = tmp_path / "small.yaml"
    source.write_text(FLEET)
    found = home_of("small")
    found.make()
    targets = TargetSettings.parse({"names": ["local"], "local": {"pretend": True}})
    found.write(FleetRecord(name="small", source=str(source), targets=targets, since_s=7.0))
    return found


def change(state: str = "waiting", *, on_page: bool = True, holder: str = "") -> NextChange:
    row = ChangeRow(instance="a", target="local", layout="x", usd_per_hour=1.0, reason="why")
    return NextChange.parse(
        {
            "id": "c41d",
            "at_s": 5.0,
            "state": state,
            "on_page": on_page,
            "holder": holder or write_holder("operate"),
            "stays": ["b"],
            "starts": [row],
            "goes": [],
            "stops": [],
            "usd_before": 1.0,
            "usd_after": 2.0,
            "dips": [],
            "reasons": ["more demand"],
            "waits": [],
        }
    )


async def test_the_next_change_is_shown_and_approved_by_its_id(
    tmp_path: Path, home: FleetHome
) -> None:
    at_path = "/atoll/v1/fleets/small/next"
    answer = home.folder / "approval.json"

    async with running() as at:
        assert await ask(at, "GET", at_path) == (200, {"next": None})
        home.board.write(change())
        status, said = await ask(at, "GET", at_path, role="viewer")
        assert status == 200
        assert said["next"]["id"] == "c41d"
        assert said["next"]["starts"][0]["layout"] == "x"
        assert "holder" not in said["next"]
        agreed = {"id": "c41d", "approve": True}
        assert (await ask(at, "POST", at_path, agreed, role="member"))[0] == 403
        for body in ({}, {"id": "c41d"}, {"id": 3, "approve": True}, {"id": "x", "approve": 1}):
            assert (await ask(at, "POST", at_path, body))[0] == 400
        status, said = await ask(at, "POST", at_path, {"id": "other", "approve": True})
        assert (status, said["error"]["code"]) == (409, "changed")
        assert not answer.exists()
        assert (await ask(at, "POST", at_path, agreed))[0] == 202
        assert ChangeAnswer.from_json(read_text_limited(answer)).approve
        home.board.write(change("applying"))
        assert (await ask(at, "POST", at_path, agreed))[1]["error"]["code"] == "applying"
        home.board.write(change("asked", on_page=False))
        assert (await ask(at, "POST", at_path, agreed))[1]["error"]["code"] == "asked_elsewhere"
        dead = write_holder("operate").replace(" of process ", " of process 9")
        home.board.write(change(holder=dead))
        assert await ask(at, "GET", at_path) == (200, {"next": None})
        assert (await ask(at, "POST", at_path, agreed))[0] == 409


async def test_history_is_the_newest_last(tmp_path: Path, home: FleetHome) -> None:
    for number in range(5):
        home.history.add(HistoryEvent(at_s=float(number), kind="note", text=str(number)))

    async with running() as at:
        path = "/atoll/v1/fleets/small/history"
        _, said = await ask(at, "GET", path)
        assert [event["text"] for event in said["events"]] == ["0", "1", "2", "3", "4"]
        _, said = await ask(at, "GET", f"{path}?last=2")
        assert [event["text"] for event in said["events"]] == ["3", "4"]
        assert (await ask(at, "GET", f"{path}?last=-1"))[0] == 400
        assert await ask(at, "GET", "/atoll/v1/fleets/quickstart/history") == (
            200,
            {"events": []},
        )


async def test_the_plan_in_force_is_drawn_and_what_binds_it_comes_later(
    home: FleetHome, made: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What works on what nobody waits for.
    monkeypatch.setattr("atoll.planner.planner_service.JobRunner", JobsHere)
    async with running() as at:
        path = "/atoll/v1/fleets/small/plan"
        _, said = await ask(at, "GET", path)
        assert said["plan"] is None
        assert "no plan" in said["reason"]
        home.keep_plan(PlanInForce(made_s=9.0, hash="9f2c", problem=PROBLEM, plan=made))
        _, said = await ask(at, "GET", path)
        assert said["made_s"] == 9.0
        assert said["plan"]["hash"] == "9f2c"
        assert said["plan"]["binds"] is None
        assert said["plan"]["usd_per_hour"] == pytest.approx(made.usd_per_hour)
        assert {flow["from"] for flow in said["plan"]["flows"]} == {"demand:chat"}
        while (await ask(at, "GET", path))[1]["plan"]["binds"] is None:
            await asyncio.sleep(0.05)
        _, fleets = await ask(at, "GET", "/atoll/v1/fleets")
        assert fleets["plans"] == 1
        _, other = await ask(at, "GET", "/atoll/v1/fleets/quickstart/plan")
        assert other["plan"] is None
        record = home.read()
        assert record is not None
        home.write(record.model_copy(update={"up": False}))
        assert "not up" in (await ask(at, "GET", path))[1]["reason"]


def stand(home: FleetHome, record: FleetRecord, now_s: float, reason: str = "") -> FleetStatus:
    row = InstanceRow("chat-1", "chat", "local", "ready", now_s, None, 1.5, ("here",), reason)
    return FleetStatus(
        fleet=record.name,
        up=True,
        source=record.source,
        home=str(home.folder),
        targets=("local",),
        url=None,
        since_s=0.0,
        controller="somebody",
        usd_per_hour=1.5,
        instances=(row,),
        errors=("a line",),
        stand_ins=(),
        traffic=(),
        gateway=None,
    )


async def test_machines_are_asked_once_for_all_who_ask(home: FleetHome) -> None:
    looks: list[str] = []
    go_on = threading.Event()

    def look(home: FleetHome, record: FleetRecord, now_s: float) -> FleetStatus:
        looks.append(record.name)
        assert go_on.wait(30.0)
        return stand(home, record, now_s)

    shelf = FleetShelf(look=look)
    asking = [asyncio.create_task(shelf.describe()) for _ in range(5)]
    while not looks:
        await asyncio.sleep(0.01)
    go_on.set()
    answers = await asyncio.gather(*asking)
    assert looks == ["small"]
    assert all(answer == answers[0] for answer in answers)
    fleet = answers[0][0]
    assert fleet["name"] == "small"
    assert fleet["controller"] == "somebody"
    assert fleet["errors"] == ["a line"]


async def test_a_fleet_that_cannot_be_looked_at_hides_no_other(home: FleetHome) -> None:
    def look(home: FleetHome, record: FleetRecord, now_s: float) -> FleetStatus:
        raise ZeroDivisionError

    found = await FleetShelf(look=look).describe()
    assert found[0]["errors"]
    assert "quickstart" in {fleet["name"] for fleet in found}


async def test_a_fleet_alone_has_its_instances(tmp_path: Path, home: FleetHome) -> None:
    async with running() as at:
        _, said = await ask(at, "GET", "/atoll/v1/fleets/small")
        assert said["instances"] == []
        assert said["since_s"] == 7.0


async def test_who_listens_is_told_of_changes_and_nobody_looks_for_nobody() -> None:
    reads = 0
    fleets: list[ListedFleet] = []

    async def read() -> FleetList:
        nonlocal reads
        reads += 1
        if reads == 1:
            raise OSError("not now")
        return FleetList(fleets=list(fleets), plans=0)

    watch = FleetWatch(read, every_s=0.0)
    streams = [watch.listen() for _ in range(3)]
    told: list[list[FleetList]] = []
    for stream in streams:
        assert (await anext(stream)).startswith(b":")
    one = ListedFleet(name="a", kind="file")
    for wanted in ([], [one]):
        fleets[:] = wanted
        told.append([json.loads((await anext(s)).split(b"data: ")[1]) for s in streams])
    assert [[each["fleets"] for each in said] for said in told] == [[[]] * 3, [[one]] * 3]
    for stream in streams:
        await stream.aclose()
    # Nothing is left to be ended with the loop.
    assert asyncio.all_tasks() == {asyncio.current_task()}
    before = reads
    for _ in range(10):
        await asyncio.sleep(0)
    assert reads == before


def test_binds_say_what_and_for_which_price() -> None:
    tight = Constraint(kind="budget", where="budget", used=2.0, limit=3.0, loosened="any budget")
    assert describe_bind(tight) == {"what": "budget: $2.00/h of $3.00/h", "price": None}
    worth = Worth(usd_per_hour=0.5, served=1.0, served_now=1.0)
    said = describe_bind(tight.model_copy(update={"worth": worth}))
    assert said["price"] == "any budget would save $0.50/h"
