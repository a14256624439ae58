"""A fleet whose own process is killed; fleets that lose nodes under load are in `tests/slow/failover`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.supervise.test_agent import gone_within
from tests.served_fleet import one_instance

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def short() -> Iterator[str]:
    """A folder with a path short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="a") as folder:
        yield folder


def test_kill_9_of_serve_leaves_nothing(tiny_folder: Path, tmp_path: Path, short: str) -> None:
    from atoll.runtime.supervise.supervisor import descendants

    plan = tmp_path / "plan.json"
    plan.write_text(one_instance().to_json())
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
        assert len(state["endpoints"]) == 1
        pids = descendants(serve.pid)
        # A fork server and its spare, and a supervisor and a process each for three nodes and an instance.
        assert len(pids) == 2 + 2 * 4
        serve.kill()
        serve.wait()
    assert gone_within(pids)
