"""`atoll planner` as a process: it can be asked, and ends with whoever started it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.runtime.http.http_client import fetch
from tests.planner.planner_process import start_planner

ROOT = Path(__file__).resolve().parents[2]


def test_planner_beside_a_process_answers_and_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    fleet = tmp_path / "mine.yaml"
    fleet.write_text("models: {}\n")
    with start_planner([fleet], socket=tmp_path / "s") as planner:
        assert planner.is_alive()
        path = "http://planner/atoll/v1/fleets"
        status, body = asyncio.run(fetch(path, unix_socket=planner.socket, timeout_s=30.0))
        assert status == 200
        assert {"name": "mine.yaml", "kind": "file"} in json.loads(body)["fleets"]
    assert not planner.is_alive()
    assert not (tmp_path / "s").exists()


def test_planner_ends_with_a_killed_parent(tmp_path: Path) -> None:
    text = (
        "import sys, os, time; from pathlib import Path; "
        "from tests.planner.planner_process import start_planner\n"
        f"d = start_planner(socket=Path({str(tmp_path / 's')!r})); print(d.process.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    environment = os.environ | {"ATOLL_STATE": str(tmp_path / "state")}
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, env=environment, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            assert select.select([handle], [], [], 60.0)[0]
        finally:
            os.close(handle)
