"""The agent with real processes: small scripts that behave in every way a process can."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.supervise.agent import Agent, ProcessError, ProcessSpec
from atoll.runtime.supervise.start_watch import StartWatch
from atoll.runtime.supervise.supervised_process import Command, last_lines
from atoll.runtime.supervise.supervision import ProcessState, RestartLimits
from atoll.runtime.supervise.supervisor import RotatingLog
from tests.runtime.waiting import until

QUICK = RestartLimits(ready_s=5, backoff_s=0.02, backoff_max_s=0.1, tries=2, unwell=1, term_s=0.5)
# Prints its pid and those of its children, one of which has left the group.
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
away = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("pids", os.getpid(), child.pid, away.pid, flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


@dataclass
class SaidProbe:
    """Ready once the log holds a word."""

    log: Path
    word: str = "up"
    every_s: float = 0.02
    problem: str | None = None
    resets: list[float] = field(default_factory=list)

    def reset(self) -> None:
        self.resets.append(time.monotonic())

    async def check(self, pid: int) -> str | None:
        if self.problem is not None:
            return self.problem
        said = self.log.read_text() if self.log.exists() else ""
        return None if self.word in said else "not yet"


def script(
    tmp_path: Path, text: str, name: str = "p", limits: RestartLimits = QUICK
) -> ProcessSpec:
    log = tmp_path / f"{name}.log"
    word = "pids" if "pids" in text else "up"
    command = Command((sys.executable, "-c", text), log, cpus=(min(os.sched_getaffinity(0)),))
    return ProcessSpec(name, command, SaidProbe(log, word), limits)


def pids_in(log: Path) -> list[int]:
    line = next(line for line in log.read_text().splitlines() if line.startswith("pids"))
    return [int(word) for word in line.split()[1:]]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone_within(pids: list[int], seconds: float = 60.0) -> bool:
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        if not any(is_alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def test_starts_pins_and_stops(tmp_path: Path) -> None:
    async def run() -> None:
        changes: list[ProcessState] = []
        agent = Agent(lambda keeper: changes.append(keeper.state))
        text = "import os,time; print('up', os.sched_getaffinity(0), flush=True); time.sleep(600)"
        agent.add(script(tmp_path, text))
        await agent.ready(["p"])
        pid = agent.processes["p"].pid
        assert pid is not None
        assert is_alive(pid)
        await agent.close()
        assert not is_alive(pid)
        assert changes == [
            ProcessState.STARTING,
            ProcessState.READY,
            ProcessState.STOPPING,
            ProcessState.STOPPED,
        ]

    asyncio.run(run())
    core = min(os.sched_getaffinity(0))
    assert last_lines(tmp_path / "p.log") == (f"up {{{core}}}",)


async def test_restarts_what_was_killed(tmp_path: Path) -> None:
    agent = Agent()
    agent.add(script(tmp_path, "import time; print('up', flush=True); time.sleep(600)"))
    await agent.ready(["p"])
    keeper = agent.processes["p"]
    first = keeper.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: keeper.pid not in (None, first) and keeper.state is ProcessState.READY)
    assert keeper.reason == ""
    assert keeper.restarts == 1
    await agent.close()


LOADING = """
import time
until_s = time.monotonic() + 1.5
while time.monotonic() < until_s:
    print("loading", flush=True)
    time.sleep(0.02)
print("up", flush=True)
time.sleep(600)
"""


async def test_a_start_that_gets_somewhere_takes_as_long_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.runtime.supervise.agent._WATCH_S", 0.05)
    agent = Agent()
    try:
        agent.add(script(tmp_path, LOADING, limits=QUICK.model_copy(update={"ready_s": 0.7})))
        await agent.ready(["p"])
        assert agent.processes["p"].restarts == 0
    finally:
        await agent.close()


def test_what_is_read_and_said_is_getting_somewhere(tmp_path: Path) -> None:
    log, weights = tmp_path / "log", tmp_path / "weights"
    weights.write_bytes(bytes(2**21))
    watch = StartWatch(os.getpid(), log)
    watch.advances()
    assert not watch.advances()
    log.write_text("loading")
    assert watch.advances()
    if Path("/proc/self/io").exists():
        weights.read_bytes()
        assert watch.advances()
    assert not watch.advances()
    assert watch.take_delay_s() >= 0.0


def test_a_stubborn_process_is_killed_in_the_end(tmp_path: Path) -> None:
    async def run() -> float:
        agent = Agent()
        agent.add(script(tmp_path, STUBBORN))
        await agent.ready(["p"])
        begun_s = time.monotonic()
        await agent.close()
        return time.monotonic() - begun_s

    assert asyncio.run(asyncio.wait_for(run(), 60)) > 0.4


async def test_an_unwell_process_is_started_anew(tmp_path: Path) -> None:
    agent = Agent()
    managed = script(tmp_path, "import time; print('up', flush=True); time.sleep(600)")
    probe = managed.probe
    assert isinstance(probe, SaidProbe)
    agent.add(managed)
    await agent.ready(["p"])
    probe.problem = "gives no token"
    await until(lambda: len(probe.resets) == 2)
    probe.problem = None
    await agent.ready(["p"])
    assert agent.processes["p"].restarts == 1
    await agent.close()


async def test_a_fatal_error_is_not_tried_again_and_shows_the_last_line(tmp_path: Path) -> None:
    agent = Agent()
    agent.add(
        script(tmp_path, "import sys; sys.stderr.write('error: no such model\\n'); sys.exit(3)")
    )
    with pytest.raises(ProcessError, match="ended with code 3: error: no such model") as caught:
        await agent.ready(["p"])
    assert caught.value.lines == ("error: no such model",)
    assert agent.processes["p"].restarts == 0
    await agent.close()


async def test_a_command_that_is_not_there_is_fatal(tmp_path: Path) -> None:
    agent = Agent()
    log = tmp_path / "p.log"
    agent.add(ProcessSpec("p", Command(("no-such-program",), log), SaidProbe(log), QUICK))
    with pytest.raises(ProcessError, match="no-such-program"):
        await agent.ready(["p"])
    await agent.close()


def test_descendants_go_with_the_process(tmp_path: Path) -> None:
    async def run() -> list[int]:
        agent = Agent()
        agent.add(script(tmp_path, FAMILY))
        await agent.ready(["p"])
        pids = pids_in(tmp_path / "p.log")
        assert all(is_alive(pid) for pid in pids)
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: not any(is_alive(pid) for pid in pids))
        await agent.close()
        return pids

    assert len(asyncio.run(run())) == 3


def test_logs_are_rotated(tmp_path: Path) -> None:
    text = """
print("up")
for i in range(400):
    print(f"{i:099d}", flush=True)
import time
time.sleep(600)
"""

    async def run() -> None:
        agent = Agent()
        managed = script(tmp_path, text)
        log = managed.command.log
        command = Command(managed.command.arguments, log, log_bytes=10_000, log_keep=2)
        agent.add(ProcessSpec("p", command, SaidProbe(log, f"{399:099d}"), QUICK))
        await agent.ready(["p"])
        await agent.close()

    asyncio.run(run())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.log", "p.log.1", "p.log.2"]
    assert all(path.stat().st_size <= 10_000 for path in tmp_path.iterdir())


@given(st.lists(st.binary(max_size=30), max_size=8), st.integers(20, 200))
def test_every_line_of_a_log_has_the_mark(pieces: list[bytes], most: int) -> None:
    said = b"".join(pieces).replace(b"\r", b"")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        log = RotatingLog(str(path), 1 << 20, 1, mark="[x] ")
        for piece in pieces:
            log.write(piece.replace(b"\r", b""))
        log.close()
        found = path.read_bytes().split(b"\n")
        assert all(line.startswith(b"[x] ") for line in found[:-1])
        assert not found[-1] or found[-1].startswith(b"[x] ")
        assert b"\n".join(line.removeprefix(b"[x] ") for line in found) == said
        # Where the file is full, too: lines move to the next one whole.
        small = RotatingLog(str(Path(folder) / "small"), most, 1000, mark="[x] ")
        for piece in pieces:
            small.write(piece.replace(b"\r", b"")[:10])
        small.close()
        files = [each for each in Path(folder).iterdir() if each.name.startswith("small")]
        assert all(each.stat().st_size <= most for each in files)


AGENT = """
import asyncio, sys
from pathlib import Path
from tests.runtime.supervise.test_agent import FAMILY, STUBBORN, script
from atoll.runtime.supervise.agent import Agent

async def main():
    agent = Agent()
    folder = Path(sys.argv[1])
    agent.add(script(folder, FAMILY, "family"))
    agent.add(script(folder, STUBBORN.replace('"up"', '"pids", __import__("os").getpid()'), "stubborn"))
    await agent.ready(["family", "stubborn"])
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_kill_9_of_the_agent_leaves_no_child(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert agent.stdout is not None
    with agent.stdout:
        assert agent.stdout.readline() == b"ready\n"
        pids = pids_in(tmp_path / "family.log") + pids_in(tmp_path / "stubborn.log")
        assert len(pids) == 4
        assert all(is_alive(pid) for pid in pids)
        agent.kill()
        agent.wait()
    assert gone_within(pids)
