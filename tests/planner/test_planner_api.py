"""The planner: who may ask what, what it lists, and jobs that tell how far they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.planner import jobs
from atoll.planner.jobs import JobRunner, stream_job
from atoll.planner.planner_service import PlannerRequest, PlannerRoute, PlanningService
from atoll.runtime.http.handlers import Answer, EventStream
from atoll.runtime.openai import ApiError
from tests.planner.asking import ask, events, open_answer, running
from tests.planner.planner_jobs import JOBS


async def ask_job(planner: PlanningService, asked: PlannerRequest) -> Answer:
    return stream_job(planner.jobs, JOBS[asked.names["job"]], asked.object())


EXTRA = PlannerRoute("POST", "test/{job}", "member", ask_job, "A job")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    return tmp_path


async def test_every_fleet_there_is_is_listed() -> None:
    async with running() as at:
        status, said = await ask(at, "GET", "/atoll/v1/fleets")
        assert status == 200
        assert {fleet["kind"] for fleet in said["fleets"]} == {"example"}
        pieces = at.listen()
        heard = [await anext(pieces), await anext(pieces)]
        assert events(heard[1]) == [("fleets", said)]
        await pieces.aclose()


async def test_refusals_are_in_openais_format() -> None:
    async with running(EXTRA) as at:
        cases = [
            ("GET", "/atoll/v1/nothing", {}, 404),
            ("PUT", "/atoll/v1/fleets", {}, 405),
            ("GET", "/atoll/v1/fleets/nobody", {}, 404),
            ("POST", "/atoll/v1/test/count", {"role": "viewer"}, 403),
            ("GET", "/atoll/v1/fleets/quickstart/history?last=2&last=3", {}, 400),
            ("GET", "/atoll/v1/fleets/quickstart/history?lats=2", {}, 400),
        ]
        for method, path, headers, expected in cases:
            status, said = await ask(at, method, path, **headers)
            assert status == expected
            assert set(said["error"]) == {"message", "type", "code", "param"}
        status, said = await ask(at, "POST", "/atoll/v1/test/count", [1])
        assert (status, said["error"]["code"]) == (400, "invalid_json")
        huge = "x" * (3 * 2**20)
        assert (await ask(at, "POST", "/atoll/v1/test/count", {"to": huge}))[0] == 413


async def test_job_tells_how_far_it_is_and_its_result() -> None:
    async with running(EXTRA) as at:
        headers = {"role": "member"}
        status, said = await ask(at, "POST", "/atoll/v1/test/count", {"to": 3}, **headers)
        assert status == 200
        assert [kind for kind, _ in said] == ["progress"] * 3 + ["result"]
        assert said[-1][1]["sum"] == 3
        _, again = await ask(at, "POST", "/atoll/v1/test/count", {"to": 0})
        # A worker is kept for the next job.
        assert again[-1][1]["process"] == said[-1][1]["process"]
        _, said = await ask(at, "POST", "/atoll/v1/test/refuse", {})
        ((kind, error),) = said
        assert kind == "error"
        assert error["error"]["param"] == "thing"
        assert "name another" in error["error"]["message"]
        _, said = await ask(at, "POST", "/atoll/v1/test/fail", {})
        assert said[0][1]["error"]["message"] == "internal error"
        _, said = await ask(at, "POST", "/atoll/v1/test/die", {})
        assert "has ended" in said[0][1]["error"]["message"]
        _, said = await ask(at, "POST", "/atoll/v1/test/count", {"to": 2})
        assert said[-1][1]["sum"] == 1


async def test_job_whose_asker_goes_away_ends() -> None:
    async with running(EXTRA) as at:
        answer = await open_answer(at, "POST", "/atoll/v1/test/wait", {})
        assert isinstance(answer, EventStream)
        said = b""
        while not (told := events(said)):
            said += await anext(answer.pieces)
        await answer.pieces.aclose()
        with pytest.raises(ProcessLookupError):
            os.kill(told[0][1]["process"], 0)
        _, said = await ask(at, "POST", "/atoll/v1/test/count", {"to": 2})
        assert said[-1][1]["sum"] == 1


async def test_job_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    runner = JobRunner(1, limit_s=0.0, modules=())
    with pytest.raises(ApiError) as caught:
        await runner.run(JOBS["wait"], {})
    assert (caught.value.status, caught.value.code) == (504, "timeout")
    await runner.close()


async def test_job_that_takes_too_much_memory_is_refused() -> None:
    async with running(EXTRA) as at:
        _, said = await ask(at, "POST", "/atoll/v1/test/swell", {})
        assert "ask for less" in said[-1][1]["error"]["message"]
        _, said = await ask(at, "POST", "/atoll/v1/test/count", {"to": 2})
        worker = said[-1][1]["process"]
        assert Path(f"/proc/{worker}/oom_score_adj").read_text().strip() == "1000"


async def test_too_many_questions_are_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_MAX_WAITING", 0)

    async with running(EXTRA) as at:
        status, said = await ask(at, "POST", "/atoll/v1/test/count", {"to": 2})
        assert (status, said["error"]["type"]) == (429, "rate_limit_error")
