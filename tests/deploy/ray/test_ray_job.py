"""The life of an instance in a Ray cluster, and of the command of one of its nodes; no Ray is needed."""

from __future__ import annotations

import asyncio
import os
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from atoll.deploy.ray import ray_job, ray_server, ray_stop
from atoll.deploy.ray.ray_job import InstanceJob, NodeLostError, assign_machines
from atoll.deploy.ray.ray_jobs import read_state
from atoll.deploy.ray.ray_node import NodeRunner
from atoll.deploy.ray.ray_package import RayCommand, RayNode, RayOrder, RayState
from atoll.deploy.target import DeployError

ORDER = RayOrder(
    job="j",
    commands=tuple(
        RayCommand(node=f"n{at}", argv=("x",), gpus=1, accelerator="L4", env={}) for at in range(2)
    ),
    ready_s=10.0,
    drain_s=10.0,
    schedule_s=10.0,
)
READY = {"state": "ready"}


class FakeGroup:
    """Nodes whose looks are given beforehand, the last one again and again."""

    def __init__(self, *looks: Sequence[Mapping[str, str] | Exception]) -> None:
        self.looks = [list(each) for each in looks]
        self.room = asyncio.Event()
        self.room.set()
        self.refusal: Exception | None = None
        self.drained: list[str] = []

    async def place(self) -> Sequence[RayNode]:
        await self.room.wait()
        if self.refusal is not None:
            raise self.refusal
        return [RayNode(node=f"n{at}", machine=f"id{at}", host=f"m{at}") for at in range(2)]

    async def start(self) -> None:
        return

    async def look(self, node: str) -> Mapping[str, str]:
        told = self.looks[int(node[1:])]
        look = told[0] if len(told) == 1 else told.pop(0)
        if isinstance(look, Exception):
            raise look
        return look

    async def drain(self, node: str) -> None:
        self.drained.append(node)
        if isinstance(self.looks[int(node[1:])][0], Exception):
            raise NodeLostError("gone")
        self.looks[int(node[1:])] = [{"state": "draining"}, {"state": "gone"}]


async def live(group: FakeGroup, *, drain_when: str | None = None) -> tuple[int, list[RayState]]:
    said: list[RayState] = []
    job: InstanceJob

    def say(state: RayState) -> None:
        said.append(state)
        if state.state == drain_when:
            job.drain()

    job = InstanceJob(ORDER, group, say, clock=lambda: 7.0, look_s=0.001)
    return await job.run(), said


async def test_an_instance_is_ready_when_all_nodes_are_and_gone_when_they_have_ended() -> None:
    group = FakeGroup([{"state": "starting"}, {"state": "starting"}, READY], [READY])
    code, said = await live(group, drain_when="ready")
    assert code == 0
    assert [(each.state, each.reason) for each in said] == [
        ("starting", "waits for 1 L4 + 1 L4"),
        ("starting", ""),
        ("ready", ""),
        ("draining", ""),
        ("gone", "was drained"),
    ]
    assert group.drained == ["n0", "n1"]
    assert [each.host for each in said[-1].nodes] == ["m0", "m1"]
    # Whoever reads the log finds the last of them.
    assert read_state("".join(f"noise\n{each.line()}\n" for each in said)) == said[-1]


async def test_an_instance_that_waits_for_room_ends_at_once() -> None:
    group = FakeGroup([READY], [READY])
    group.room.clear()
    code, said = await live(group, drain_when="starting")
    assert (code, said[-1].state, group.drained) == (0, "gone", [])


@pytest.mark.parametrize(
    ("looks", "kind", "reason"),
    [
        (
            [{"state": "failed", "reason": "ended with code 3", "last": "oh no"}],
            "settings",
            "n1 ended with code 3: oh no",
        ),
        (
            [{"state": "failed", "reason": "ended by signal 9", "last": "x"}],
            "memory",
            "n1 ended by signal 9: x",
        ),
        (
            [READY, READY, {"state": "failed", "reason": "ended with code 3", "last": "x"}],
            "ended",
            "n1 ended with code 3: x",
        ),
        (
            [READY, NodeLostError("n1 was lost: m1 has left the cluster")],
            "ended",
            "n1 was lost: m1 has left the cluster",
        ),
    ],
)
async def test_one_lost_node_is_a_lost_instance(
    looks: list[Mapping[str, str] | Exception], kind: str, reason: str
) -> None:
    code, said = await live(FakeGroup([READY], looks))
    assert (code, said[-1].state, said[-1].kind, said[-1].reason) == (1, "failed", kind, reason)


async def test_no_room_in_time_is_a_want_of_capacity() -> None:
    group = FakeGroup([READY], [READY])
    group.refusal = DeployError("no room for 1 L4 came within 10 s", kind="capacity")
    code, said = await live(group)
    assert (code, said[-1].kind) == (1, "capacity")


async def test_a_node_that_is_lost_while_it_drains_has_ended() -> None:
    lost = NodeLostError("gone")

    class Losing(FakeGroup):
        async def drain(self, node: str) -> None:
            self.drained.append(node)
            self.looks[int(node[1:])] = [lost]
            raise lost

    group = Losing([READY], [READY])
    code, said = await live(group, drain_when="ready")
    assert (code, said[-1].state, group.drained) == (0, "gone", ["n0", "n1"])


def spread(*sizes: tuple[int, str | None], avoid: tuple[str, ...] = ()) -> RayOrder:
    """Return an order of one command that has the nodes of all for its workers."""
    commands = tuple(
        RayCommand(node=f"n{at}", argv=() if at else ("vllm",), gpus=gpus, accelerator=kind, env={})
        for at, (gpus, kind) in enumerate(sizes)
    )
    return ORDER.model_copy(update={"commands": commands, "avoid": avoid})


FREE = {
    "a": {"GPU": 8.0, "accelerator_type:H100": 1.0},
    "b": {"GPU": 3.0, "accelerator_type:H100": 1.0},
    "c": {"GPU": 4.0, "accelerator_type:L4": 1.0},
    "head": {"CPU": 4.0},
}


@pytest.mark.parametrize(
    ("sizes", "avoid", "machines"),
    [
        # The smallest machine that will do, so that large ones stay whole.
        (((2, "H100"), (4, "L4")), (), ["b", "c"]),
        (((2, "H100"), (8, "H100")), (), ["b", "a"]),
        (((4, "H100"), (4, "H100")), (), ["a", "a"]),
        (((2, "H100"), (4, "L4")), ("b",), ["a", "c"]),
        (((4, None), (8, None)), (), ["c", "a"]),
        (((8, "H100"), (4, "H100")), (), None),
        (((1, "T4"), (1, "L4")), (), None),
    ],
)
def test_each_node_of_rays_workers_has_one_machine(
    sizes: tuple[tuple[int, str | None], ...], avoid: tuple[str, ...], machines: list[str] | None
) -> None:
    assert assign_machines(spread(*sizes, avoid=avoid), FREE) == machines


def test_rays_workers_have_a_bundle_each() -> None:
    order = spread((2, "H100"), (1, "L4"))
    bundle = {"CPU": 1.0, "GPU": 1.0, "accelerator_type:H100": 0.001}
    assert order.spread
    assert order.bundles(order.commands[0]) == [bundle, bundle]
    assert not ORDER.spread


async def test_nodes_of_rays_workers_are_told_nothing() -> None:
    group, order = FakeGroup([READY], []), spread((1, "L4"), (1, "L4"))
    said: list[RayState] = []
    job = InstanceJob(order, group, said.append, look_s=0.001)
    running = asyncio.create_task(job.run())
    async with asyncio.timeout(10):
        while not said or said[-1].state != "ready":
            await asyncio.sleep(0)
    job.drain()
    assert await running == 0
    assert group.drained == ["n0"]


def test_a_server_for_rays_workers_must_be_in_a_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ATOLL_RAY_GROUP", raising=False)
    assert ray_server.main(["--", "vllm", "serve"]) == 2
    assert "ATOLL_RAY_GROUP is not set" in capsys.readouterr().err


def test_a_server_runs_the_command_line_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[object] = [None, 3, "no GPU"]
    given: list[list[str]] = []

    def main() -> None:
        given.append(list(sys.argv))
        raise SystemExit(ends.pop(0))

    module = types.ModuleType("vllm.entrypoints.cli.main")
    monkeypatch.setattr(module, "main", main, raising=False)
    for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.cli"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setenv("A", "before")
    server = ray_server.ServerActor()
    assert [server.serve(["vllm", "serve"], {"A": "b"}) for _ in range(3)] == [0, 3, 1]
    assert given[0] == ["vllm", "serve"]
    assert os.environ["A"] == "b"
    assert server.pid() == os.getpid()


def runner(folder: Path, *argv: str, **env: str) -> NodeRunner:
    return NodeRunner(
        "n0", argv, env, ["TOKEN"], ready_s=30.0, drain_s=30.0, log="n0.log", folder=str(folder)
    )


async def look_until(node: NodeRunner, state: str) -> dict[str, str]:
    async with asyncio.timeout(30):
        while (look := await node.look())["state"] != state:
            await asyncio.sleep(0.01)
    return look


async def test_a_node_runs_its_command_and_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As Ray does in its workers.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    program = (
        "import http.server as h, os, sys; print(os.environ['A'], os.environ['TOKEN'],"
        " os.environ['ATOLL_ADDRESS'], 'OMP_NUM_THREADS' in os.environ, flush=True);"
        " h.HTTPServer(('127.0.0.1', int(sys.argv[1])), h.SimpleHTTPRequestHandler).serve_forever()"
    )
    node = runner(tmp_path, sys.executable, "-c", program, "{port}", A="b")
    await node.start("10.1.2.3")
    await look_until(node, "ready")
    said = (tmp_path / "n0.log").read_text().splitlines()[0]
    assert said == f"b {tmp_path / 'secrets' / 'TOKEN'} 10.1.2.3 False"
    await node.drain()
    await look_until(node, "gone")


async def test_a_command_that_ends_says_how(tmp_path: Path) -> None:
    node = runner(tmp_path, sys.executable, "-c", "print('oh no'); raise SystemExit(3)")
    await node.start()
    assert await look_until(node, "failed") == {
        "state": "failed",
        "reason": "ended with code 3",
        "last": "oh no",
    }


def test_without_ray_a_job_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "order.json").write_text(ORDER.to_json())
    assert ray_job.main() == 6
    said = read_state(capsys.readouterr().out)
    assert said is not None
    assert (said.state, said.kind) == ("failed", "image")
    assert "pip install 'atoll[ray]'" in said.reason
    assert ray_stop.main(["j", "n0"]) == 6
    assert "pip install 'atoll[ray]'" in capsys.readouterr().err


def test_an_order_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ray_job.main() != 0
    said = read_state(capsys.readouterr().out)
    assert said is not None
    assert (said.state, said.kind) == ("failed", "settings")
