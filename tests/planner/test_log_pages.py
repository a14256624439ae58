"""Logs of fleets, and fleets that are served here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from atoll.control.operation.fleet_home import FleetHome, FleetRecord
from atoll.core.errors import UnknownNameError
from atoll.deploy.target_table import TargetSettings
from atoll.plan.files.read import find_fleet_file, read_plan
from atoll.planner.fleets import FleetShelf
from atoll.planner.jobs import JobRunner
from atoll.planner.log_pages import show_log, show_logs
from atoll.planner.planner_service import PlannerRequest, PlanningService
from atoll.planner.plans import PlanBook
from atoll.runtime.http.handlers import EventStream, Response
from atoll.runtime.local.fleet_state import FleetState, write_state

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))


def serve(tmp_path: Path, source: str) -> FleetState:
    folder = tmp_path / "run" / "atoll" / "run-x"
    folder.mkdir(mode=0o700, parents=True)
    folder.parent.chmod(0o700)
    (folder / "gateway.log").write_text("one\ntwo\nthree\n")
    state = FleetState(
        name="demo-local",
        pid=os.getpid(),
        url="http://127.0.0.1:1",
        started_s=5.0,
        folder=str(folder),
        source=source,
    )
    write_state(state, (EXAMPLES / "demo-plan.json").read_text())
    return state


async def test_a_plan_that_is_served_is_shown_as_in_force(tmp_path: Path) -> None:
    serve(tmp_path, str(EXAMPLES / "demo-local.yaml"))
    entry = FleetShelf().find("demo-local")
    assert entry.kind == "served"
    runner = JobRunner(0, modules=())
    shown = await PlanBook(runner).show(entry)
    assert shown["plan"] is not None
    assert [one["ttft_s"] for one in shown["plan"]["services"]] == [5.0]
    stages = shown["plan"]["instances"][0]["stages"]
    assert [stage["layers"] for stage in stages] == [[0, 14], [14, 20], [20, 30], [20, 30]]


async def test_a_plan_of_an_unknown_fleet_says_what_to_do(tmp_path: Path) -> None:
    serve(tmp_path, "")
    shown = await PlanBook(JobRunner(0, modules=())).show(FleetShelf().find("demo-local"))
    assert shown["plan"] is None
    assert "--fleet" in shown["reason"]


def test_the_fleet_file_beside_a_plan_is_found(tmp_path: Path) -> None:
    plan = read_plan(EXAMPLES / "demo-plan.json")
    assert find_fleet_file(plan, EXAMPLES / "demo-plan.json") == EXAMPLES / "demo-local.yaml"
    assert find_fleet_file(plan, tmp_path / "plan.json") is None
    # One of the same name for other models is another fleet's.
    text = (EXAMPLES / "demo-local.yaml").read_text().replace("  smollm2:\n", "  other:\n")
    (tmp_path / "demo-local.yaml").write_text(text)
    assert find_fleet_file(plan, tmp_path / "plan.json") is None


async def test_logs_of_what_is_served_and_of_a_named_home(tmp_path: Path) -> None:
    serve(tmp_path, "")
    home = FleetHome(tmp_path / "elsewhere")
    home.make()
    home.write(FleetRecord(name="lab", source="gone.yaml", targets=TargetSettings(), up=False))
    (home.folder / "hub.log").write_text("the hub\n")
    planner = PlanningService((), (home.folder,), JobRunner(0, modules=()))
    try:
        for name, logs in (("demo-local", ["gateway"]), ("lab", ["hub"])):
            answer = await show_logs(planner, PlannerRequest("admin", names={"name": name}))
            assert isinstance(answer, Response)
            assert json.loads(answer.body)["logs"] == logs
        names = {"name": "demo-local", "instance": "gateway"}
        asked = PlannerRequest("admin", names=names, query=b"lines=2")
        answer = await show_log(planner, asked)
        assert isinstance(answer, Response)
        assert json.loads(answer.body)["text"] == "two\nthree"
        with pytest.raises(UnknownNameError):
            await show_log(
                planner, PlannerRequest("admin", names={"name": "lab", "instance": "chat-1"})
            )
        followed = await show_log(planner, PlannerRequest("admin", names=names, query=b"follow=1"))
        assert isinstance(followed, EventStream)
        pieces = [await anext(followed.pieces), await anext(followed.pieces)]
        assert b'"three"' in pieces[1]
        await followed.pieces.aclose()
    finally:
        await planner.close()
