"""A fork server that is killed, its spare, its supervisor; nothing is loaded in it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from atoll.core.errors import UsageError
from atoll.runtime.supervise.agent import Agent, ProcessSpec, SupervisedProcess
from atoll.runtime.supervise.fork_client import ForkServer
from atoll.runtime.supervise.supervised_process import Command
from atoll.runtime.supervise.supervision import ProcessState, RestartLimits
from tests.runtime.supervise.test_agent import SaidProbe, gone_within, is_alive
from tests.runtime.waiting import until

MODULE = "tests.runtime.supervise.sleeper"
QUICK = RestartLimits(ready_s=20, backoff_s=0.02, backoff_max_s=0.1, term_s=0.5)
UNLOADED = """
import sys
from atoll.runtime.supervise import fork_server
fork_server.warm = lambda folders: None
sys.exit(fork_server.main(sys.argv[1:]))
"""


class Unloaded(ForkServer):
    """Loads nothing, so that it is there in a moment."""

    modules = frozenset({MODULE})
    program = ("-c", UNLOADED)


def sleeper(tmp_path: Path, name: str = "p") -> ProcessSpec:
    log = tmp_path / f"{name}.log"
    return ProcessSpec(name, Command.of_module(MODULE, (), log), SaidProbe(log), QUICK)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def fork_server_of(process: SupervisedProcess) -> int:
    """Return who forked the supervisor of a process."""
    assert process.pid
    return parent_of(parent_of(process.pid))


async def restarted(process: SupervisedProcess, killed: int) -> None:
    """Kill a process and wait until another is ready in its place."""
    before = process.pid
    os.kill(killed, signal.SIGKILL)
    await until(lambda: process.pid not in (None, before) and process.state is ProcessState.READY)


async def taken_over(fork_server: ForkServer, before: set[int]) -> None:
    """Wait until another process than these forks."""
    await until(lambda: fork_server.pid is not None and fork_server.pid not in before)


@asynccontextmanager
async def forking(fork_server: Awaitable[ForkServer]) -> AsyncIterator[tuple[Agent, ForkServer]]:
    """An agent whose processes are forked from this one, which goes with it."""
    agent = Agent()
    found = agent.fork_server = await fork_server
    async with asyncio.timeout(120):
        yield agent, found
    await agent.close()
    assert found.pid is None


async def test_a_spare_takes_the_place_of_a_nursery_that_was_killed(tmp_path: Path) -> None:
    async with forking(Unloaded.start([])) as (agent, fork_server):
        agent.add(sleeper(tmp_path))
        await agent.ready(["p"])
        process = agent.processes["p"]
        seen: set[int] = set()
        for _ in range(3):
            assert fork_server.pid is not None
            assert fork_server_of(process) == fork_server.pid
            seen |= {fork_server.pid, process.pid or 0}
            os.kill(fork_server.pid, signal.SIGKILL)
            await taken_over(fork_server, seen)
            await restarted(process, process.pid or 0)
        assert fork_server.starts == 1
        assert len(seen) == 6
        assert gone_within(list(seen))


async def test_a_nursery_without_its_spare_is_started_again(tmp_path: Path) -> None:
    async with forking(Unloaded.start([])) as (agent, fork_server):
        agent.add(sleeper(tmp_path))
        await agent.ready(["p"])
        process = agent.processes["p"]
        assert fork_server.pid is not None
        # Both are of one group.
        os.killpg(os.getpgid(fork_server.pid), signal.SIGKILL)
        await restarted(process, process.pid or 0)
        await until(lambda: fork_server.starts == 2 and fork_server.pid is not None)
        await restarted(process, process.pid or 0)
        assert fork_server_of(process) == fork_server.pid


async def test_a_process_ends_with_its_guard_and_is_started_again(tmp_path: Path) -> None:
    async with forking(Unloaded.start([])) as (agent, _fork_server):
        agent.add(sleeper(tmp_path))
        await agent.ready(["p"])
        process = agent.processes["p"]
        pid = process.pid
        assert pid is not None
        await restarted(process, parent_of(pid))
        assert not is_alive(pid)


async def test_a_reader_that_left_ends_nobody(tmp_path: Path) -> None:
    async with forking(Unloaded.start([])) as (agent, _fork_server):
        agent.add(sleeper(tmp_path))
        await agent.ready(["p"])
        status = Path(f"/proc/{agent.processes['p'].pid}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        # As in every program of Python: writing to who is gone is an error, not the end.
        assert ignored >> (signal.SIGPIPE - 1) & 1


async def test_a_shared_nursery_is_found_again_by_those_who_use_it(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")

    async with forking(Unloaded.share([], path)) as (agent, fork_server):
        other = Agent()
        other.fork_server = Unloaded.connect(path)
        for each, name in ((agent, "p"), (other, "q")):
            each.add(sleeper(tmp_path, name))
            await each.ready([name])
        assert fork_server.pid is not None
        assert fork_server_of(other.processes["q"]) == fork_server.pid
        os.kill(fork_server.pid, signal.SIGKILL)
        await restarted(other.processes["q"], other.processes["q"].pid or 0)
        # Now without its spare: the socket of the dead one is still there.
        os.killpg(os.getpgid(fork_server.pid), signal.SIGKILL)
        await until(lambda: fork_server.starts == 2 and fork_server.pid is not None)
        for each, name in ((agent, "p"), (other, "q")):
            await restarted(each.processes[name], each.processes[name].pid or 0)
            assert fork_server_of(each.processes[name]) == fork_server.pid
        await other.close()
    assert not Path(path).exists()


async def test_a_nursery_that_is_frozen_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.runtime.supervise.supervised_process._FORK_S", 0.2)
    async with forking(Unloaded.start([])) as (agent, fork_server):
        frozen = fork_server.pid
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        agent.add(sleeper(tmp_path))
        await agent.ready(["p"])
        assert fork_server_of(agent.processes["p"]) != frozen
        os.kill(frozen, signal.SIGCONT)


def test_a_nursery_that_cannot_load_says_why() -> None:
    class Broken(ForkServer):
        program = ("-c", "raise SystemExit('no torch here')")

    with pytest.raises(UsageError, match="cannot be loaded: no torch here"):
        asyncio.run(Broken.start([]))


def test_close_leaves_neither_nursery_nor_spare() -> None:
    async def main() -> list[int]:
        fork_server = await Unloaded.start([])
        assert fork_server.pid is not None
        spare = int(Path(f"/proc/{fork_server.pid}/task/{fork_server.pid}/children").read_text())
        found = [fork_server.pid, spare]
        assert all(is_alive(pid) for pid in found)
        await fork_server.close()
        return found

    assert gone_within(asyncio.run(main()))
