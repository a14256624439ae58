"""The life of a node against a real hub: joined, served, withdrawn, down, back, left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.cli.assign import find_node, send_order
from atoll.core.errors import UnknownNameError, UsageError
from atoll.fabric.identity.access import Access
from atoll.fabric.registry.records import SessionState
from atoll.runtime.endpoints.endpoint import RunDirectory
from atoll.runtime.join.assignment import Assignment
from atoll.runtime.join.deadline import LAST_S
from atoll.runtime.join.join_options import JoinOptions
from atoll.runtime.join.joined_node import JoinedNode
from atoll.runtime.supervise.agent import ProcessError
from tests.runtime.join.live import engine, fake_vllm, world
from tests.runtime.join.shapes import SHAPES, Shaped
from tests.runtime.supervise.test_agent import gone_within
from tests.runtime.waiting import until

ROOT = Path(__file__).resolve().parents[3]


async def stop(node: JoinedNode) -> None:
    await node.leave()
    await node.close()


def engine_pid(node: JoinedNode) -> int:
    pid = node._agent.processes["engine"].pid
    assert pid is not None
    return pid


async def test_a_wrapped_engine_is_served_withdrawn_restored_and_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    sick = tmp_path / "sick"

    async with world(tmp_path) as here:
        command = engine("--sick", str(sick), "--pause-ms", "30", "--tokens", "20")
        node = here.node(command=command, region="eu", price="$2/h", ends="2h", max_inflight=4)
        await node.start()
        await until(here.seen)
        first = here.seen()
        assert first is not None
        assert first.state is SessionState.JOIN
        assert first.metadata.hardware.cpus >= 1
        await until(here.serving)
        peer = here.seen()
        assert peer is not None
        assert (peer.name, peer.metadata.region, peer.metadata.max_inflight) == (
            "site/n",
            "eu",
            4,
        )
        assert (peer.metadata.engine, peer.metadata.engine_version) == ("vllm", "0.10.1.1")
        assert peer.metadata.services[0].context == 8192
        assert peer.metadata.ends_s == pytest.approx(time.time() + 7200, abs=30)

        sick.touch()
        await until(lambda: not here.serving())
        withdrawn = here.seen()
        assert withdrawn is not None
        assert (withdrawn.state, withdrawn.sid) == (SessionState.SERVING, peer.sid)
        assert (await here.ask()).status == 503
        sick.unlink()
        await until(here.serving)

        asking = asyncio.create_task(here.ask())
        await until(lambda: node.bridge is not None and node.bridge.inflight == 1)
        leaving = asyncio.create_task(node.leave())
        await until(lambda: not here.serving())
        answer = await asking
        assert (answer.status, answer.over) == (200, "end")
        assert answer.body.count(b"data: ") == 21
        await leaving
        await until(lambda: here.seen() is None)
        left = here.observer.peer(peer.sid)
        assert left is not None
        assert left.state is SessionState.LEFT
        pid = engine_pid(node)
        await node.close()
        assert gone_within([pid])


@pytest.mark.slow
async def test_an_engine_that_dies_is_down_and_comes_back_as_another_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)

    async with world(tmp_path) as here:
        node = here.node(command=engine("--pause-ms", "20", "--tokens", "500"))
        await node.start()
        await until(here.serving)
        before = here.seen()
        assert before is not None
        events: list[tuple[str, SessionState]] = []
        here.observer.listeners.append(lambda _what, p: events.append((p.sid, p.state)))
        asking = asyncio.create_task(here.ask())
        await until(lambda: node.bridge is not None and node.bridge.inflight == 1)
        os.kill(engine_pid(node), signal.SIGKILL)
        answer = await asking
        assert answer.over is not None
        assert "the engine failed" in answer.over
        await until(lambda: (before.sid, SessionState.DOWN) in events)
        await until(here.serving)
        after = here.seen()
        assert after is not None
        assert after.sid != before.sid
        assert (before.sid, SessionState.LEFT) in events or here.observer.peer(before.sid) is None
        # The tunnel has followed.
        node.bridge.open = True  # type: ignore[union-attr]
        small = await here.ask(body=b"{}")
        assert small.status == 200
        await stop(node)


async def test_a_node_that_may_not_start_its_engine_again_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    async with world(tmp_path) as here:
        node = here.node(command=engine(), restart=False)
        await node.start()
        await until(here.serving)
        os.kill(engine_pid(node), signal.SIGKILL)
        with pytest.raises(ProcessError, match="ended by signal 9"):
            async with asyncio.timeout(60):
                await node.wait_ended()
        await node.close()
        await until(lambda: here.seen() is None)


async def test_an_engine_that_cannot_start_ends_the_node(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        node = here.node(command=("no-such-engine", "--port", "{port}"))
        await node.start()
        with pytest.raises(ProcessError, match="no-such-engine"):
            async with asyncio.timeout(60):
                await node.wait_ended()
        await node.close()
        await until(lambda: here.seen() is None)


async def test_a_port_that_is_taken_is_said_at_once(tmp_path: Path) -> None:
    server = Shaped(SHAPES["vllm"]("org/m"))
    url = await server.start()
    async with world(tmp_path) as here:
        node = here.node(command=engine(port=url.rpartition(":")[2]))
        with pytest.raises(UsageError, match="already"):
            await node.start()
        await node.close()
    await server.stop()


async def test_a_server_that_runs_already_and_a_generic_service(tmp_path: Path) -> None:
    server = Shaped(SHAPES["sglang"]("org/m") | {"/ocr/page": {"text": "hello"}})
    url = await server.start()
    async with world(tmp_path) as here:
        node = here.node(url=url, aliases={"gpt-4o": "org/m"}, accept="self")
        await node.start()
        await until(here.serving)
        peer = here.seen()
        assert peer is not None
        assert peer.metadata.engine == "sglang"
        assert peer.metadata.services[0].aliases == ("gpt-4o",)
        assert (await here.ask(body=b"{}")).status == 200
        assert (await here.ask("/ocr/page")).status == 404
        await stop(node)
        await until(lambda: here.seen() is None)

        node = here.node(url=url, service="ocr", generic=True)
        await node.start()
        await until(lambda: here.serving("ocr"))
        answer = await here.ask("/ocr/page")
        assert answer.body == b'{"text": "hello"}'
        await server.stop()
        await until(lambda: not here.serving("ocr"))
        await stop(node)


async def test_an_operator_assigns_a_waiting_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = fake_vllm(tmp_path)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.chdir(ROOT)

    def _sid(here: object) -> str:
        peer = here.seen()  # type: ignore[attr-defined]
        assert peer is not None
        return str(peer.sid)

    async with world(tmp_path, "operator") as here:
        node = here.node(gpus="L4:1")
        await node.start()
        await until(here.seen)
        peer = find_node(here.observer.peers(), "n")
        with pytest.raises(UnknownNameError):
            find_node(here.observer.peers(), "other")
        assert peer.state is SessionState.JOIN
        assert peer.metadata.hardware.gpus[0].type == "L4"
        bad = Assignment(model="org/m", settings={"trust-remote-code": "yes"})
        refused = await send_order(here.observer, peer.sid, bad)
        assert not refused.accepted
        assert "trust-remote-code" in refused.message
        good = await send_order(here.observer, peer.sid, Assignment(model="org/m"))
        assert good.accepted
        await until(here.serving)
        assert (await here.ask(body=b"{}")).status == 200
        ended = await send_order(here.observer, _sid(here), Assignment())
        assert ended.accepted
        await until(lambda: (p := here.seen()) is not None and p.state is SessionState.JOIN)
        assert not here.serving()
        # It can be had again.
        await until(lambda: not node._assigning.locked())
        again = await send_order(here.observer, _sid(here), Assignment(model="org/m"))
        assert again.accepted
        await until(here.serving)
        await stop(node)


async def test_a_node_leaves_before_its_end(tmp_path: Path) -> None:
    server = Shaped(SHAPES["vllm"]("org/m"))
    url = await server.start()
    async with world(tmp_path) as here:
        with pytest.raises(UsageError, match="time is up"):
            await here.node(url=url, ends="3s").start()
        node = here.node(url=url, ends="1h")
        await node.start()
        await until(here.serving)
        node.deadline.asked_s = time.time() + LAST_S + 0.5
        async with asyncio.timeout(60):
            await node.wait_ended()
        assert here.lines[-1] == "this node's time is up"
        await stop(node)
        await until(lambda: here.seen() is None)
    await server.stop()


async def test_an_open_fabric_beyond_this_machine_takes_no_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_INSECURE", "1")
    access = Access.open("open://192.0.2.1:7447")

    node = JoinedNode(JoinOptions(), access, RunDirectory(tmp_path))
    with pytest.raises(UsageError, match="anybody"):
        await node.start()


def joined(here_address: str, *more: str, tokens: int = 40) -> subprocess.Popen[str]:
    command = engine("--pause-ms", "20", "--tokens", str(tokens))
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "atoll", "join", "--fabric", here_address, "--name", "n"),
            *("--health-interval", "200ms", *more, "--", *command),
        ],
        cwd=ROOT,
        env=os.environ | {"ATOLL_FABRIC": "secret"},
        stderr=subprocess.PIPE,
        text=True,
    )


def pids_below(process: subprocess.Popen[str]) -> list[int]:
    from atoll.runtime.supervise.supervisor import descendants

    return descendants(process.pid)


async def test_the_command_heeds_signals(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        process = joined(here.address, "--notice", "90s")
        await until(here.serving)
        pids = pids_below(process)
        environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in pids]
        assert not any(b"ATOLL_FABRIC=" in environment for environment in environments)
        process.send_signal(signal.SIGUSR1)
        await until(lambda: (p := here.seen()) is not None and p.metadata.ends_s is not None)
        peer = here.seen()
        assert peer is not None
        assert peer.metadata.ends_s == pytest.approx(time.time() + 90, abs=60)
        asking = asyncio.create_task(here.ask())
        await until(lambda: here.answers and here.answers[-1].body)
        process.send_signal(signal.SIGTERM)
        answer = await asking
        assert answer.over == "end"
        assert answer.body.count(b"data: ") == 41
        await until(lambda: process.poll() is not None)
        assert process.returncode == 0
        _, said = process.communicate()
        assert "serving org/m (vllm 0.10.1.1)" in said
        assert said.rstrip().endswith("left")
        assert gone_within(pids)


@pytest.mark.slow
async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        process = joined(here.address, "--drain", "60s", tokens=2000)
        await until(here.serving)
        pids = pids_below(process)
        asking = asyncio.create_task(here.ask())
        await until(lambda: here.answers and here.answers[-1].body)
        process.send_signal(signal.SIGINT)
        await until(lambda: not here.serving())
        await asyncio.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        await until(lambda: process.poll() is not None)
        process.communicate()
        assert gone_within(pids)
        answer = await asking
        assert answer.over != "end"
        await until(lambda: here.seen() is None)


@pytest.mark.slow
async def test_kill_9_leaves_no_engine_and_masks_the_node(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        process = joined(here.address)
        await until(here.serving)
        pids = pids_below(process)
        assert pids
        process.kill()
        await until(lambda: not here.serving())
        process.communicate()
        assert gone_within(pids)
