"""Real node processes over ZeroMQ: answers, a kill in the middle of one, cancelling, stopping."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'engine'")
pytest.importorskip("zmq", reason="needs the extra 'engine'")

from atoll.core.errors import UsageError
from atoll.core.request_parameters import OutputFormat, SamplingParams
from atoll.engine.node import NodeReady
from atoll.engine.pipeline_routes import LayerRouter
from atoll.engine.scheduler import GenerateRequest, NodeSpec, Scheduler, SchedulerSettings
from tests.engine.forked_node import ForkedNode
from tests.engine.models import LAYERS
from tests.engine.test_exact import PROMPTS

pytestmark = pytest.mark.engine

CUTS = ((0, 1), (0, 1), (1, 4))
START_S = 120.0


class Nodes:
    """Node processes of one model; whatever happens, none outlives the test."""

    def __init__(
        self, folder: Path, work: Path, cuts: Sequence[tuple[int, int]] = CUTS, tp: int = 1
    ) -> None:
        self.processes: list[ForkedNode | subprocess.Popen[bytes]] = []
        self.files = []
        for number, (start, end) in enumerate(cuts):
            config = {
                "name": f"n{number}",
                "model": str(folder),
                "start": start,
                "end": end,
                "kv_blocks": 64,
                "block_size": 4,
                "tp": tp,
                "ready_file": str(work / f"{number}.ready"),
                "log_level": "WARNING",
            }
            path = work / f"{number}.json"
            path.write_text(json.dumps(config))
            self.files.append(work / f"{number}.ready")
            command = [sys.executable, "-m", "atoll.engine.node", "--config", str(path)]
            # Several are forked; one is started as everywhere.
            self.processes.append(ForkedNode(path) if len(cuts) > 1 else subprocess.Popen(command))

    def specs(self) -> list[NodeSpec]:
        deadline = time.monotonic() + START_S
        while not all(file.exists() for file in self.files):
            assert time.monotonic() < deadline, "the nodes do not start"
            assert all(process.poll() is None for process in self.processes)
            time.sleep(0.05)
        found = self.ready()
        return [NodeSpec(name=r.name, endpoint=r.endpoint, start=r.start, end=r.end) for r in found]

    def ready(self) -> list[NodeReady]:
        return [NodeReady.from_json(file.read_text()) for file in self.files]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def nodes(tiny: Callable[[str], Any], tmp_path: Path) -> Iterator[Nodes]:
    started = Nodes(tiny("llama").folder, tmp_path)
    yield started
    started.close()


async def collect(scheduler: Scheduler, prompt: list[int], count: int, **more: Any) -> list[Any]:
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    request = GenerateRequest(tuple(prompt), sampling, **more)
    return [event async for event in scheduler.generate(request)]


async def scenario(scheduler: Scheduler, nodes: Nodes, model: Any) -> None:
    await scheduler.ready(30.0)
    # Several at once are exact.
    answers = await asyncio.gather(*(collect(scheduler, p, 12) for p in PROMPTS[:6]))
    for prompt, events in zip(PROMPTS, answers, strict=False):
        assert [e.token for e in events] == model.answer(prompt, 12)
    # A node killed in the middle of an answer: the answer goes on over its sibling.
    tokens, victim = [], None
    request = GenerateRequest(
        tuple(PROMPTS[9]), SamplingParams(max_tokens=24, ignore_eos=True), id="long"
    )
    async for event in scheduler.generate(request):
        tokens.append(event.token)
        if len(tokens) == 5:
            victim = 0
            nodes.processes[0].kill()
            nodes.processes[0].wait()
            os.kill(nodes.processes[1].pid, signal.SIGSTOP)
            await asyncio.sleep(0.3)
            os.kill(nodes.processes[1].pid, signal.SIGCONT)
    assert victim == 0
    assert tokens == model.answer(PROMPTS[9], 24)
    assert "n0" not in scheduler.alive()
    # Leaving an answer early frees its blocks.
    async for _ in scheduler.generate(
        GenerateRequest(tuple(PROMPTS[8]), SamplingParams(max_tokens=200, ignore_eos=True))
    ):
        break
    deadline = time.monotonic() + 60.0
    while any(scheduler.stats()[name].blocks_used for name in scheduler.alive()):
        assert time.monotonic() < deadline, "cancelling left blocks behind"
        await asyncio.sleep(0.05)
    # What cannot work is said at once.
    with pytest.raises(UsageError, match="empty"):
        await collect(scheduler, [], 4)
    guided = SamplingParams(guide=OutputFormat(kind="regex", text="[0-9]"))
    events = [e async for e in scheduler.generate(GenerateRequest((5, 6), guided))]
    assert "guided answers need tokenizer.json" in str(events[-1].error)


def test_nodes_serve_survive_and_stop(tiny: Callable[[str], Any], nodes: Nodes) -> None:
    model = tiny("llama")

    async def main() -> None:
        scheduler = Scheduler(
            nodes.specs(),
            LayerRouter(LAYERS),
            eos=(2,),
            max_length=240,
            settings=SchedulerSettings(stall_s=30.0),
        )
        await scheduler.start()
        try:
            await asyncio.wait_for(scenario(scheduler, nodes, model), 240.0)
        finally:
            await scheduler.close()

    asyncio.run(main())
    for process in nodes.processes[1:]:
        process.terminate()
    assert [process.wait(120.0) for process in nodes.processes[1:]] == [0, 0]


def test_a_node_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    config = tmp_path / "node.json"
    config.write_text(json.dumps({"name": "n", "model": "/no/such", "start": 0, "end": 1}))
    done = subprocess.run(
        [sys.executable, "-m", "atoll.engine.node", "--config", str(config)],
        capture_output=True,
        text=True,
        check=False,
        timeout=START_S,
    )
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith(
        "error: /no/such: model: there is no such model (fix: "
    )


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not just what is left of one that nobody has asked for."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_lost_rank_ends_its_node(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    model = tiny("llama")
    nodes = Nodes(model.folder, tmp_path, ((0, 4),), tp=2)

    async def main() -> None:
        scheduler = Scheduler(nodes.specs(), LayerRouter(LAYERS), eos=(2,), max_length=240)
        await scheduler.start()
        try:
            await scheduler.ready(30.0)
            answers = await asyncio.gather(*(collect(scheduler, p, 12) for p in PROMPTS[:6]))
            for prompt, events in zip(PROMPTS, answers, strict=False):
                assert [e.token for e in events] == model.answer(prompt, 12)
        finally:
            await scheduler.close()

    try:
        asyncio.run(asyncio.wait_for(main(), 240.0))
        (rank,) = nodes.ready()[0].rank_pids
        os.kill(rank, signal.SIGKILL)
        assert nodes.processes[0].wait(30.0) == 1
    finally:
        nodes.close()


@pytest.mark.slow
def test_answers_go_on_where_a_rank_is_lost(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    model = tiny("llama")
    nodes = Nodes(model.folder, tmp_path, ((0, 4), (0, 4)), tp=2)

    async def main() -> None:
        specs = nodes.specs()
        (rank,) = nodes.ready()[0].rank_pids
        scheduler = Scheduler(specs, LayerRouter(LAYERS), eos=(2,), max_length=240)
        await scheduler.start()
        try:
            await scheduler.ready(30.0)
            answers = [asyncio.create_task(collect(scheduler, p, 24)) for p in PROMPTS[5:9]]
            sampling = SamplingParams(max_tokens=24, ignore_eos=True)
            tokens = []
            async for event in scheduler.generate(GenerateRequest(tuple(PROMPTS[9]), sampling)):
                tokens.append(event.token)
                if len(tokens) == 5:
                    os.kill(rank, signal.SIGKILL)
            assert tokens == model.answer(PROMPTS[9], 24)
            for prompt, answer in zip(PROMPTS[5:9], answers, strict=True):
                assert [e.token for e in await answer] == model.answer(prompt, 24)
        finally:
            await scheduler.close()

    try:
        asyncio.run(asyncio.wait_for(main(), 240.0))
        # The other node ends when it is told to, and its ranks with it.
        nodes.processes[1].terminate()
        assert nodes.processes[1].wait(60.0) == 0
        assert not any(map(is_running, nodes.ready()[1].rank_pids))
    finally:
        nodes.close()


@pytest.mark.slow
def test_ranks_end_with_a_node_that_is_killed(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    nodes = Nodes(tiny("llama").folder, tmp_path, ((0, 4),), tp=2)
    try:
        nodes.specs()
        (ready,) = nodes.ready()
        nodes.processes[0].kill()
        nodes.processes[0].wait(30.0)
        deadline = time.monotonic() + 30.0
        while any(map(is_running, ready.rank_pids)):
            assert time.monotonic() < deadline, "a rank outlives its node"
            time.sleep(0.02)
    finally:
        nodes.close()
