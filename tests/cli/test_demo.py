"""What `atoll demo` computes on, and its last step with a tiny model instead of a small one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll import Fleet
from atoll.api.demo.controlled_fleet import DemoFleet, operate_here
from atoll.api.demo.shared_gpu import describe_device, share_gpu
from atoll.deploy.commands.node_commands import ServiceWeights
from atoll.deploy.local.local_placement import LocalGpus, place_here
from atoll.engine.node import NodeConfig
from atoll.plan.files.examples import find_example
from atoll.runtime.endpoints.endpoint import RunDirectory
from atoll.runtime.join import hardware
from atoll.runtime.join.hardware import GpuDevice
from atoll.runtime.local.local_endpoints import LocalModel, LocalOptions, build
from atoll.runtime.local.local_fleet import LivenessTracker


def test_as_many_instances_are_planned_as_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    fleet = DemoFleet("tiny", LocalModel("tiny", tmp_path), tmp_path)
    for rate_per_s, count in ((0.5, 1), (1.0, 1), (1.5, 2), (2.0, 2)):
        plan = fleet._plan(fleet._ask(rate_per_s))
        assert len(plan.instances) == count
        assert sum(route.share for route in plan.routes) == pytest.approx(1.0)
        assert {node.end for one in plan.instances for node in one.nodes} == {4}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ((), "they compute on CPU cores"),
        (("T4",), "they compute on T4 (GPU 0) of this machine and share its memory"),
        (("H200",) * 2, "they compute on H200 (GPU 0) of this machine and share its memory"),
        # One that the stage engine does not run on, and one that nobody knows.
        (("MI300X", "Unknown-GPU"), "they compute on CPU cores"),
    ],
)
def test_the_processes_share_a_gpu_where_one_is_here(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    kinds: tuple[str, ...],
    said: str,
) -> None:
    # Sockets have short paths, and a folder called like this test is long.
    tmp_path = tmp_path_factory.mktemp("d")
    torch = pytest.importorskip("torch", reason="needs the extra 'engine'")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path))
    devices = tuple(GpuDevice(at, kind, 16 * 2**30) for at, kind in enumerate(kinds))
    monkeypatch.setattr(hardware, "list_gpus", lambda: devices)
    folder = find_example("demo-local").parent
    plan = Fleet.load(folder / "demo-local.yaml").load_plan(folder / "demo-plan.json")
    gpus = LocalGpus.find()
    shared = share_gpu(plan, gpus.machines)
    weights = {"smollm2": ServiceWeights("/model", ("smollm2",))}
    names = {"smollm2": "smollm2-135m"}
    placed = place_here(shared, weights, names, gpus, shared.problem.catalog())
    assert describe_device(placed.runners) == said
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 30}')
    options = LocalOptions(runners={one.instance: one for one in placed.runners}, cores=(0,))
    (served,) = build(
        placed.plan,
        {"smollm2": LocalModel("/model", tmp_path)},
        RunDirectory(tmp_path),
        LivenessTracker(),
        options,
    )
    configs = [
        NodeConfig.from_json((tmp_path / f"smollm2-both-0.n{n}.json").read_text()) for n in range(4)
    ]
    on_gpu = "GPU" in said
    # The same layers, the same room and the same numbers, wherever they are.
    assert [(c.start, c.end) for c in configs] == [(0, 14), (14, 20), (20, 30), (20, 30)]
    assert {(c.kv_bytes, c.dtype, c.tp) for c in configs} == {(128 * 2**20, "float32", 1)}
    assert {c.device for c in configs} == {"cuda" if on_gpu else "cpu"}
    assert {c.steps.tokens for c in configs} == {512}
    seen = [
        node.command.surroundings().get("CUDA_VISIBLE_DEVICES") for node in served.endpoint.nodes
    ]
    assert seen == (["0"] * 4 if on_gpu else [None] * 4)


@pytest.mark.engine
@pytest.mark.slow
def test_a_replica_comes_when_twice_as_much_is_asked(tmp_path: Path) -> None:
    for package in ("torch", "transformers", "zmq", "tokenizers", "httptools", "zenoh"):
        pytest.importorskip(package, reason="needs the extras 'engine', 'fabric' and 'serve'")
    from tests.tiny_model import write_tiny_model

    folder = write_tiny_model(tmp_path / "model")
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    told: list[str] = []

    async def show() -> str:
        async with operate_here("tiny", LocalModel("tiny", folder), home) as fleet:
            await fleet.settle(1, told.append)
            fleet.ask_for(2.0)
            await fleet.settle(2, told.append)
            return fleet.describe_shares()

    shares = asyncio.run(show())
    assert shares.startswith("requests so far: 0 to tiny-0-")
    assert [line.rpartition(": ")[0] for line in told] == [
        "no plan is known yet",
        "what the fleet asks for has changed",
    ]
