"""Kills under load, and a fleet whose own process is killed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.supervise.test_agent import gone_within
from tests.slow.failover.chaos_fleet import chaos, tiny_plan

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[3]


# `tests/slow` has more of them.
def test_kills_are_not_seen(tiny_folder: Path, forks: str) -> None:
    kills = 6
    # A seed that strikes in another way each time.
    seen = asyncio.run(chaos(kills, 156, tiny_folder, forks=forks))
    assert seen.kills == kills
    assert len(seen.ways) == 6
    found = (seen.errors, seen.truncated, seen.token_mismatch, seen.hung, seen.orphans)
    assert found == (0, 0, 0, 0, 0), seen.notes
    assert seen.ledger_diff == 0
    assert seen.requests > kills


@pytest.fixture
def short() -> Iterator[str]:
    """A folder with a path short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="a") as folder:
        yield folder


def test_kill_9_of_serve_leaves_nothing(tiny_folder: Path, tmp_path: Path, short: str) -> None:
    from atoll.runtime.supervise.supervisor import descendants

    plan = tmp_path / "plan.json"
    plan.write_text(tiny_plan().to_json())
    serve = subprocess.Popen(
        [
            *(sys.executable, "-m", "atoll", "serve", str(plan), "--json", "--port", "0"),
            *("--model", str(tiny_folder)),
        ],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"XDG_RUNTIME_DIR": short},
    )
    assert serve.stdout is not None
    with serve.stdout:
        state = json.loads(serve.stdout.readline())
        assert len(state["endpoints"]) == 2
        pids = descendants(serve.pid)
        # A fork server and its spare, and a supervisor and a process each for six nodes and two instances.
        assert len(pids) == 2 + 2 * 8
        serve.kill()
        serve.wait()
    assert gone_within(pids)
