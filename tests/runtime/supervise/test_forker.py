"""A nursery that is killed, its spare, its guards; nothing is loaded in it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from atoll.core.errors import UsageError
from atoll.runtime.supervise.agent import Agent, ProcessSpec, SupervisedProcess
from atoll.runtime.supervise.forker import Nursery
from atoll.runtime.supervise.process import Command
from atoll.runtime.supervise.supervision import ProcessState, RestartLimits
from tests.runtime.supervise.test_agent import SaidProbe, gone_within, is_alive, until

MODULE = "tests.runtime.supervise.sleeper"
QUICK = RestartLimits(ready_s=20, backoff_s=0.02, backoff_most_s=0.1, term_s=0.5)
UNLOADED = """
import sys
from atoll.runtime.supervise import nursery
nursery.warm = lambda folders: None
sys.exit(nursery.main(sys.argv[1:]))
"""


class Unloaded(Nursery):
    """Loads nothing, so that it is there in a moment."""

    modules = frozenset({MODULE})
    program = ("-c", UNLOADED)


def sleeper(tmp_path: Path, name: str = "p") -> ProcessSpec:
    log = tmp_path / f"{name}.log"
    return ProcessSpec(name, Command.of_module(MODULE, (), log), SaidProbe(log), QUICK)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def nursery_of(process: SupervisedProcess) -> int:
    """Return who forked the guard of a process."""
    assert process.pid
    return parent_of(parent_of(process.pid))


async def restarted(process: SupervisedProcess, killed: int) -> None:
    """Kill a process and wait until another is ready in its place."""
    before = process.pid
    os.kill(killed, signal.SIGKILL)
    await until(lambda: process.pid not in (None, before) and process.state is ProcessState.READY)


async def taken_over(nursery: Nursery, before: set[int]) -> None:
    """Wait until another process than these forks."""
    await until(lambda: nursery.pid is not None and nursery.pid not in before)


def run(nursery: Awaitable[Nursery], body: Callable[[Agent, Nursery], Awaitable[None]]) -> None:
    async def main() -> None:
        agent = Agent()
        found = agent.nursery = await nursery
        await body(agent, found)
        await agent.close()
        assert found.pid is None

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_spare_takes_the_place_of_a_nursery_that_was_killed(tmp_path: Path) -> None:
    async def body(agent: Agent, nursery: Nursery) -> None:
        agent.add(sleeper(tmp_path))
        await agent.ready(["p"])
        process = agent.processes["p"]
        seen: set[int] = set()
        for _ in range(3):
            assert nursery.pid is not None
            assert nursery_of(process) == nursery.pid
            seen |= {nursery.pid, process.pid or 0}
            os.kill(nursery.pid, signal.SIGKILL)
            await taken_over(nursery, seen)
            await restarted(process, process.pid or 0)
        assert nursery.starts == 1
        assert len(seen) == 6
        assert gone_within(list(seen))

    run(Unloaded.start([]), body)


def test_a_nursery_without_its_spare_is_started_again(tmp_path: Path) -> None:
    async def body(agent: Agent, nursery: Nursery) -> None:
        agent.add(sleeper(tmp_path))
        await agent.ready(["p"])
        process = agent.processes["p"]
        assert nursery.pid is not None
        # Both are of one group.
        os.killpg(os.getpgid(nursery.pid), signal.SIGKILL)
        await restarted(process, process.pid or 0)
        await until(lambda: nursery.starts == 2 and nursery.pid is not None)
        await restarted(process, process.pid or 0)
        assert nursery_of(process) == nursery.pid

    run(Unloaded.start([]), body)


def test_a_process_ends_with_its_guard_and_is_started_again(tmp_path: Path) -> None:
    async def body(agent: Agent, _nursery: Nursery) -> None:
        agent.add(sleeper(tmp_path))
        await agent.ready(["p"])
        process = agent.processes["p"]
        pid = process.pid
        assert pid is not None
        await restarted(process, parent_of(pid))
        assert not is_alive(pid)

    run(Unloaded.start([]), body)


def test_a_shared_nursery_is_found_again_by_those_who_use_it(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")

    async def body(agent: Agent, nursery: Nursery) -> None:
        other = Agent()
        other.nursery = Unloaded.connect(path)
        for each, name in ((agent, "p"), (other, "q")):
            each.add(sleeper(tmp_path, name))
            await each.ready([name])
        assert nursery.pid is not None
        assert nursery_of(other.processes["q"]) == nursery.pid
        os.kill(nursery.pid, signal.SIGKILL)
        await restarted(other.processes["q"], other.processes["q"].pid or 0)
        # Now without its spare: the socket of the dead one is still there.
        os.killpg(os.getpgid(nursery.pid), signal.SIGKILL)
        await until(lambda: nursery.starts == 2 and nursery.pid is not None)
        for each, name in ((agent, "p"), (other, "q")):
            await restarted(each.processes[name], each.processes[name].pid or 0)
            assert nursery_of(each.processes[name]) == nursery.pid
        await other.close()

    run(Unloaded.share([], path), body)
    assert not Path(path).exists()


def test_a_nursery_that_is_frozen_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.runtime.supervise.process._FORK_S", 0.2)

    async def body(agent: Agent, nursery: Nursery) -> None:
        frozen = nursery.pid
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        agent.add(sleeper(tmp_path))
        await agent.ready(["p"])
        assert nursery_of(agent.processes["p"]) != frozen
        os.kill(frozen, signal.SIGCONT)

    run(Unloaded.start([]), body)


def test_a_nursery_that_cannot_load_says_why() -> None:
    class Broken(Nursery):
        program = ("-c", "raise SystemExit('no torch here')")

    with pytest.raises(UsageError, match="cannot be loaded: no torch here"):
        asyncio.run(Broken.start([]))


def test_close_leaves_neither_nursery_nor_spare() -> None:
    async def main() -> list[int]:
        nursery = await Unloaded.start([])
        assert nursery.pid is not None
        spare = int(Path(f"/proc/{nursery.pid}/task/{nursery.pid}/children").read_text())
        found = [nursery.pid, spare]
        assert all(is_alive(pid) for pid in found)
        await nursery.close()
        return found

    assert gone_within(asyncio.run(main()))


def test_a_forked_process_does_not_die_of_who_has_left(tmp_path: Path) -> None:
    """It ignores what Python ignores: a write to a closed connection is an error, no more."""

    async def body(agent: Agent, nursery: Nursery) -> None:
        del nursery
        agent.add(sleeper(tmp_path))
        await agent.ready(["p"])
        process = agent.processes["p"]
        status = Path(f"/proc/{process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("SigIgn:")]
        assert int(line.split()[1], 16) >> (signal.SIGPIPE - 1) & 1

    run(Unloaded.start([]), body)
