"""The planner on loopback: who may ask what, what it lists, and jobs that tell how far they are."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from pathlib import Path

import pytest

from atoll.core.errors import InputError
from atoll.planner import jobs
from atoll.planner.jobs import JobRunner, stream_job
from atoll.planner.planner_server import PlannerAddress, PlannerOptions
from atoll.planner.planner_service import PlannerRequest, PlannerRoute, PlanningService
from atoll.runtime.http.handlers import Answer
from atoll.runtime.http.listen_address import own_socket
from atoll.runtime.openai import ApiError
from tests.planner.asking import ask, running
from tests.planner.planner_jobs import JOBS


async def ask_job(planner: PlanningService, asked: PlannerRequest) -> Answer:
    return stream_job(planner.jobs, JOBS[asked.names["job"]], asked.object())


EXTRA = PlannerRoute("POST", "/atoll/v1/test/{job}", "member", ask_job, "A job")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    return tmp_path


async def test_socket_is_its_users_alone_and_goes_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "planner.sock"

    async with running(PlannerOptions(socket=path)) as at:
        assert at == PlannerAddress(socket=str(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        status, said = await ask(at, "GET", "/atoll/v1/fleets")
        assert status == 200
        assert {fleet["kind"] for fleet in said["fleets"]} == {"example"}
        with pytest.raises(InputError, match="listens"):
            async with running(PlannerOptions(socket=path)):
                pass
    assert not path.exists()


def test_sockets_that_dead_desks_left_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = own_socket("planner", os.getpid()).parent
    left, living = folder / "planner-1.sock", folder / "planner-2.sock"
    (folder / "planner-3.sock").write_text("not a socket")
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as listening:
        dead.bind(str(left))
        listening.bind(str(living))
        listening.listen()
        path = own_socket("planner", os.getpid())
        assert path.name == f"planner-{os.getpid()}.sock"
        assert sorted(each.name for each in folder.iterdir()) == [
            "planner-2.sock",
            "planner-3.sock",
        ]


async def test_port_needs_the_token() -> None:
    async with running(PlannerOptions(port=0)) as at:
        status, said = await ask(at, "GET", "/atoll/v1/fleets")
        assert (status, said["error"]["code"]) == (401, "invalid_token")
        wrong = {"authorization": "Bearer x"}
        assert (await ask(at, "GET", "/atoll/v1/fleets", **wrong))[0] == 401
        right = {"authorization": f"Bearer {at.token}"}
        assert (await ask(at, "GET", "/atoll/v1/fleets", **right))[0] == 200


async def test_refusals_are_in_openais_format(tmp_path: Path) -> None:
    async with running(PlannerOptions(socket=tmp_path / "s"), EXTRA) as at:
        cases = [
            ("GET", "/atoll/v1/nothing", {}, 404),
            ("PUT", "/atoll/v1/fleets", {}, 405),
            ("GET", "/atoll/v1/fleets/nobody", {}, 404),
            ("POST", "/atoll/v1/test/count", {"x_atoll_role": "viewer"}, 403),
            ("GET", "/atoll/v1/fleets", {"x_atoll_role": "king"}, 400),
        ]
        for method, path, headers, expected in cases:
            status, said = await ask(at, method, path, **headers)
            assert status == expected
            assert set(said["error"]) == {"message", "type", "code", "param"}
        status, said = await ask(at, "POST", "/atoll/v1/test/count", [1])
        assert (status, said["error"]["message"]) == (400, "the body must be a JSON object")
        huge = "x" * (3 * 2**20)
        assert (await ask(at, "POST", "/atoll/v1/test/count", {"to": huge}))[0] == 413


async def test_job_tells_how_far_it_is_and_its_result(tmp_path: Path) -> None:
    async with running(PlannerOptions(socket=tmp_path / "s"), EXTRA) as at:
        headers = {"x_atoll_role": "member"}
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


async def test_job_whose_asker_goes_away_ends(tmp_path: Path) -> None:
    async with running(PlannerOptions(socket=tmp_path / "s"), EXTRA) as at:
        assert at.socket is not None
        reader, writer = await asyncio.open_unix_connection(at.socket)
        head = "POST /atoll/v1/test/wait HTTP/1.1\r\nhost: planner\r\ncontent-length: 2\r\n\r\n{}"
        writer.write(head.encode())
        await reader.readuntil(b"data: ")
        worker = os.pidfd_open(json.loads(await reader.readline())["process"])
        try:
            writer.close()
            ended = asyncio.Event()
            asyncio.get_running_loop().add_reader(worker, ended.set)
            await ended.wait()
            asyncio.get_running_loop().remove_reader(worker)
        finally:
            os.close(worker)
        _, said = await ask(at, "POST", "/atoll/v1/test/count", {"to": 2})
        assert said[-1][1]["sum"] == 1


async def test_job_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    runner = JobRunner(1, limit_s=0.0, modules=())
    with pytest.raises(ApiError) as caught:
        await runner.run(JOBS["wait"], {})
    assert (caught.value.status, caught.value.code) == (504, "timeout")
    await runner.close()


async def test_job_that_takes_too_much_memory_is_refused(tmp_path: Path) -> None:
    async with running(PlannerOptions(socket=tmp_path / "s"), EXTRA) as at:
        _, said = await ask(at, "POST", "/atoll/v1/test/swell", {})
        assert "ask for less" in said[-1][1]["error"]["message"]
        _, said = await ask(at, "POST", "/atoll/v1/test/count", {"to": 2})
        worker = said[-1][1]["process"]
        assert Path(f"/proc/{worker}/oom_score_adj").read_text().strip() == "1000"


async def test_too_many_questions_are_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_MAX_WAITING", 0)

    async with running(PlannerOptions(socket=tmp_path / "s"), EXTRA) as at:
        status, said = await ask(at, "POST", "/atoll/v1/test/count", {"to": 2})
        assert (status, said["error"]["type"]) == (429, "rate_limit_error")
