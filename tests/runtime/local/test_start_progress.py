"""Whoever waits for nodes of the stage engine is told how far they are."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from pathlib import Path

import pytest

from atoll.deploy.commands import stage_node
from atoll.runtime.endpoints.endpoint import Endpoint, RunDirectory
from atoll.runtime.endpoints.probes import NodeProbe
from atoll.runtime.gateway import GatewaySettings
from atoll.runtime.local.local_fleet import LivenessTracker, LocalFleet, ServiceEndpoint
from atoll.runtime.local.serving import StartProgress
from atoll.runtime.pool.member import Backend
from atoll.runtime.supervise.agent import ProcessSpec
from atoll.runtime.supervise.supervised_process import Command

WARMING = "warming: 12 of 33 (512 rows of prompts and decodes)"
# Ready only when somebody has heard how far it is.
NODE = f"""
import json, os, sys, time
print("INFO a/n0: {WARMING}", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
with open(sys.argv[2], "w") as stream:
    json.dump({{"pid": os.getpid()}}, stream)
time.sleep(600)
"""


def starting(home: RunDirectory) -> tuple[Endpoint, Path]:
    """A node that says how far it is, and the file that lets it be ready."""
    heard, ready = home.folder / "heard", home.file("a/n0", ".ready")
    command = Command((sys.executable, "-c", NODE, str(heard), str(ready)), home.log("a/n0"))
    probe = NodeProbe(ready, "a/n0", lambda _node: 0.0, 8.0)
    backend = Backend(id="a", url="http://127.0.0.1:9", models=("m",))
    return Endpoint(backend, ("a",), (ProcessSpec("a/n0", command, probe),)), heard


def test_a_fleet_that_starts_says_how_far_its_nodes_are(tmp_path: Path) -> None:
    home, lines = RunDirectory(tmp_path), list[str]()
    endpoint, heard = starting(home)

    def say(line: str) -> None:
        lines.append(line)
        if WARMING in line:
            heard.touch()

    async def run() -> None:
        fleet = LocalFleet(
            *("fleet", [ServiceEndpoint(endpoint, "m", {})], home, GatewaySettings(port=0)),
            LivenessTracker(),
            on_progress=StartProgress(say, say),
        )
        await asyncio.wait_for(fleet.start(), 60.0)
        await fleet.stop(0.0)

    asyncio.run(run())
    assert f"starting: 0 of 1 ready; waiting for a/n0 ({WARMING})" in lines
    assert "starting: 1 of 1 ready; waiting for " in lines


def test_the_log_of_a_node_that_a_target_started_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, _ = starting(RunDirectory(tmp_path))

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().write(text)

    log = Log()
    monkeypatch.setattr(sys, "stderr", log)
    assert asyncio.run(asyncio.wait_for(stage_node._serve(endpoint, None, None), 60.0)) == 0
    assert log.getvalue() == f"a/n0: {WARMING}\n"
