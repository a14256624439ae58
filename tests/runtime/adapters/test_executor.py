from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.core.errors import InputError
from atoll.plan.plan import Instance, Node
from atoll.runtime.adapters.base import MachineShare, RunDirectory
from atoll.runtime.adapters.executor import ExecutorPlace, executor_process, list_components
from atoll.runtime.executor.config import ExecutorConfig
from atoll.runtime.local.build import free_ports
from atoll.runtime.supervise.agent import Agent
from tests.runtime.executor.integration.harness import ROOT, TOKEN, TOYS
from tests.runtime.local.test_placing import instance

PARTS = {"ears": ("moonshine-encoder", "moonshine-decoder"), "voice": ("hibari",)}


def planned(role: str = "omni/ears+voice/serve") -> Instance:
    node = Node(
        id="n0", node_type="T4:4", market="owned", start=0, end=1, tp=1, slot=0, gpu_ids=(2,)
    )
    return Instance(
        id="omni/e0",
        service="omni",
        role=role,
        region="here",
        stages=1,
        nodes=(node,),
        flows=(),
        throughput_per_s=1.0,
        usd_per_hour=0.0,
    )


def test_a_planned_executor_becomes_a_process(tmp_path: Path) -> None:
    place = ExecutorPlace(7001, 7002, tmp_path / "stores", tmp_path / "token", device="cuda:0")
    share = MachineShare(cpus={"omni/e0": (0, 1)})
    spec, address = executor_process(
        planned(), PARTS, {"hibari": {"voice": "heart"}}, place, RunDirectory(tmp_path), share
    )
    assert spec.command.environment == {"CUDA_VISIBLE_DEVICES": "2"}
    assert spec.command.cpus == (0, 1)
    assert spec.command.module == "atoll.runtime.executor.process"
    assert address.address == "127.0.0.1:7001"
    assert address.components == ("moonshine-encoder", "moonshine-decoder", "hibari")
    path = Path(spec.command.arguments[-1])
    config = ExecutorConfig.from_json(path.read_text(), path=path)
    assert config.components == {
        "moonshine-encoder": {},
        "moonshine-decoder": {},
        "hibari": {"voice": "heart"},
    }
    assert (config.threads, config.cpus, config.device) == (2, (0, 1), "cuda:0")
    assert Path(config.store).parent == tmp_path / "stores"
    # Another fleet's executor of the same name has another store.
    (tmp_path / "b").mkdir()
    other, _ = executor_process(planned(), PARTS, {}, place, RunDirectory(tmp_path / "b"), share)
    others = ExecutorConfig.from_json(Path(other.command.arguments[-1]).read_text())
    assert others.store != config.store


def test_what_is_no_executor_or_names_no_components_is_refused(tmp_path: Path) -> None:
    place = ExecutorPlace(7001, 7002, tmp_path, tmp_path / "token")
    home = RunDirectory(tmp_path)
    with pytest.raises(InputError, match="no executor"):
        executor_process(instance([(0, 32)]), PARTS, {}, place, home, MachineShare())
    with pytest.raises(InputError, match="'eyes', and no component"):
        list_components(planned("omni/ears+eyes/serve"), PARTS)


def test_an_agent_starts_it_waits_until_it_runs_and_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    (tmp_path / "token").write_text(TOKEN)
    port, health_port = free_ports(2)
    place = ExecutorPlace(port, health_port, tmp_path / "stores", tmp_path / "token")
    parts = {"ears": (f"{TOYS}:Doubler",), "voice": (f"{TOYS}:NumberStream",)}
    spec, _ = executor_process(planned(), parts, {}, place, RunDirectory(tmp_path), MachineShare())

    async def main() -> None:
        agent = Agent()
        agent.add(spec)
        await agent.ready([spec.name])
        (store,) = (tmp_path / "stores").iterdir()
        await agent.stop([spec.name])
        await agent.close()
        assert not store.exists(), "it ended in good order"

    asyncio.run(main())
