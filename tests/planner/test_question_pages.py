"""What-if, traces and simulations, answers that are known, and askers that go away."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from atoll.planner.answers import AnsweringRunner, Answers, Recent, key_of
from atoll.planner.jobs import JobMessage, JobRunner
from atoll.planner.planner_api import PlannerApi
from atoll.planner.planner_service import PlanningService
from atoll.planner.questions import BEFOREHAND, WHATIF
from atoll.planner.worker import NamedJob, Said
from tests.planner.asking import JobsHere, ask, running
from tests.planner.question_jobs import answer, work_on
from tests.prove.test_quick_plan import SMALL


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    return tmp_path


@pytest.mark.parametrize("jobs", [JobsHere, pytest.param(JobRunner, marks=pytest.mark.slow)])
async def test_a_file_is_turned_and_tried_with_a_trace(
    tmp_path: Path, jobs: type[JobRunner]
) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    async with running(files=(file,), jobs=jobs(2, modules=())) as at:
        status, dials = await ask(at, "GET", "/atoll/v1/fleets/small.yaml/dials")
        assert status == 200
        assert [service["name"] for service in dials["services"]] == ["chat", "titles"]
        assert dials["usd_per_hour"] is None

        asked = {"fleet": "small.yaml", "demand": {"chat": 2.0}, "simulate_s": 20}
        status, said = await ask(at, "POST", "/atoll/v1/whatif", asked)
        assert status == 200
        event, found = said[-1]
        assert event == "result", found
        assert {name for name, _ in said[:-1]} == {"progress"}
        assert set(found) >= {"now", "then", "diff", "verdict", "fleet_file", "seconds"}
        assert "made" not in found
        assert (await ask(at, "POST", "/atoll/v1/whatif", asked))[1] == [("result", found)]
        _, plan = await ask(at, "GET", "/atoll/v1/fleets/small.yaml/plan")
        assert plan["plan"]["usd_per_hour"] == found["now"]["usd_per_hour"]
        _, dials = await ask(at, "GET", "/atoll/v1/fleets/small.yaml/dials")
        assert dials["usd_per_hour"] == found["now"]["usd_per_hour"]

        rows = "".join(f"{second},100,20\n" for second in range(30))
        text = f"arrival_s,input_tokens,output_tokens\n{rows}".encode()
        name = "..%2F%3Cb%3Ez%C3%BCrich.csv"
        taken = await ask(at, "POST", "/atoll/v1/traces", text, x_atoll_filename=name)
        assert taken[0] == 201
        _, listed = await ask(at, "GET", "/atoll/v1/traces")
        trace = listed["traces"][-1]
        assert (trace["kind"], trace["name"], trace["requests"]) == (
            "uploaded",
            "<b>zürich.csv",
            30,
        )

        asked = {"fleet": "small.yaml", "trace": trace["id"], "service": "chat"}
        _, said = await ask(at, "POST", "/atoll/v1/simulate", asked)
        event, found = said[-1]
        assert event == "result", found
        assert found["requests"] == 30
        _, page = await ask(at, "GET", f"/atoll/v1/reports/{found['report']}")
        assert page.startswith(b"<!")
        assert (await ask(at, "GET", "/atoll/v1/reports/r-0"))[0] == 404
        gone = f"/atoll/v1/traces/{trace['id']}"
        assert (await ask(at, "DELETE", gone))[0] == 200
        assert (await ask(at, "DELETE", gone))[0] == 404
        assert (await ask(at, "POST", "/atoll/v1/simulate", asked))[0] == 404


async def test_what_cannot_be_asked_and_who_may_not() -> None:
    async with running() as at:
        path = "/atoll/v1/whatif"
        cases = [
            ({}, "fleet"),
            ({"fleet": "quickstart", "demand": {"chat": -1}}, "demand.chat"),
            ({"fleet": "quickstart", "seed": "x"}, "seed"),
        ]
        for asked, param in cases:
            status, said = await ask(at, "POST", path, asked)
            assert (status, said["error"]["param"]) == (400, param)
        assert (await ask(at, "POST", path, {"fleet": "nobody"}))[0] == 404
        for method, path in (("POST", "whatif"), ("POST", "simulate"), ("POST", "traces")):
            status, _ = await ask(
                at, method, f"/atoll/v1/{path}", {"fleet": "quickstart"}, role="viewer"
            )
            assert status == 403
        assert (await ask(at, "GET", "/atoll/v1/traces", role="viewer"))[0] == 200
        status, said = await ask(at, "POST", "/atoll/v1/traces", "no trace")
        assert status == 400


async def test_a_worker_whose_asker_goes_away_is_killed() -> None:
    runner = JobRunner(1, modules=())
    messages = AnsweringRunner(runner, Answers(), "k").messages(work_on, {})
    process = (await anext(messages)).said["process"]
    await messages.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    said = await runner.run(answer, {"asked": 1})
    assert said["process"] != process
    await runner.close()


async def test_a_fleet_is_planned_before_anybody_asks(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    began, may_end = asyncio.Event(), asyncio.Event()
    asked: list[object] = []

    class Jobs(JobRunner):
        async def warm(self) -> None:
            pass

        async def messages(
            self, job: NamedJob, arguments: Said
        ) -> AsyncGenerator[JobMessage, None]:
            asked.append((job, arguments.get("place", {}).get("path")))
            if job == BEFOREHAND:
                began.set()
                await may_end.wait()
            yield JobMessage("result", {"now": {"plan": {"usd_per_hour": 1.0}}})

    planner = PlanningService((file,), jobs=Jobs(2))
    await planner.start()
    await began.wait()
    answers = ask(PlannerApi(planner), "POST", "/atoll/v1/whatif", {"fleet": "small.yaml"})
    waiting = asyncio.create_task(answers)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert asked == [(BEFOREHAND, str(file))]
    may_end.set()
    _, said = await waiting
    assert [event for event, _ in said] == ["progress", "result"]
    assert asked[1:] == [(WHATIF, str(file))]
    # What is still at work is ended with the planner.
    may_end.clear()
    began.clear()
    await planner.start()
    await began.wait()
    await planner.close()
    assert planner.beforehand is not None
    assert planner.beforehand.cancelled()


async def test_an_answer_is_known_as_long_as_its_report_is() -> None:
    runner, answers = JobRunner(1, modules=()), Answers()
    first = [m async for m in AnsweringRunner(runner, answers, "k").messages(answer, {"asked": 1})]
    assert "html" not in first[-1].said
    report = first[-1].said["report"]
    assert answers.reports.get(report) == "<p>"
    again = [m async for m in AnsweringRunner(runner, answers, "k").messages(answer, {"asked": 1})]
    assert again == first
    for at in range(10):
        answers.reports.put(f"r-{at}", "", 0)
    assert answers.find("k") is None
    await runner.close()


def test_the_last_few_are_kept() -> None:
    kept: Recent[int] = Recent(2, max_letters=10)
    for at in range(3):
        kept.put(str(at), at, 1)
    assert [kept.get(str(at)) for at in range(3)] == [None, 1, 2]
    kept.put("large", 9, 100)
    assert (kept.get("2"), kept.get("large")) == (None, 9)


def test_a_file_that_changed_is_another_question(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a")
    asked = {"place": {"path": str(path)}, "ask": {}}
    before = key_of(answer, asked)
    assert key_of(answer, asked) == before
    path.write_text("ab")
    assert key_of(answer, asked) != before


async def test_traces_go_with_the_planner() -> None:
    planner = PlanningService(jobs=JobRunner(1, modules=()))
    _, path = planner.traces.receive(b"x")
    assert path.exists()
    await planner.close()
    assert not path.exists()
