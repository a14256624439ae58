"""Executors as processes."""

from pathlib import Path

from atoll.runtime.endpoints.endpoint import RunDirectory
from atoll.runtime.endpoints.probes import InstanceProbe
from atoll.runtime.executor.executor_config import ExecutorConfig
from atoll.runtime.graph_server.graph_config import GraphServerConfig
from atoll.runtime.supervise.fork_client import ForkServer
from atoll.runtime.supervise.supervision import Action, Supervision
from atoll.runtime.task_fleet.task_endpoint import executor_process


def test_a_process_has_its_configuration_its_cores_and_a_probe(tmp_path: Path) -> None:
    config = ExecutorConfig(
        name="ears-0",
        components={"hibari": {"voices": ["heart"]}},
        address="127.0.0.1:7001",
        health_port=7002,
        store=str(tmp_path / "store"),
        token_file=str(tmp_path / "token"),
        threads=2,
        cpus=(0, 1),
        drain_s=3.0,
    )
    home = RunDirectory(tmp_path)
    spec = executor_process(config, home, {"CUDA_VISIBLE_DEVICES": "1"})
    assert spec.name == "ears-0"
    assert spec.command.module == "atoll.runtime.executor.executor_process"
    assert spec.command.cpus == (0, 1)
    assert spec.command.surroundings()["OMP_NUM_THREADS"] == "2"
    assert spec.command.surroundings()["CUDA_VISIBLE_DEVICES"] == "1"
    path = Path(spec.command.arguments[-1])
    assert ExecutorConfig.from_json(path.read_text(), path=path) == config
    assert isinstance(spec.probe, InstanceProbe)
    assert spec.probe.url == "http://127.0.0.1:7002"
    # It may finish what runs before it is killed.
    assert spec.limits.term_s > config.drain_s
    # It is forked from a process that has loaded its code, where there is one.
    assert spec.command.module in ForkServer.modules


def test_one_that_is_killed_again_and_again_is_back_while_answers_wait(tmp_path: Path) -> None:
    config = ExecutorConfig(
        name="mind-0",
        components={"smollm2": {}},
        address="127.0.0.1:7001",
        health_port=7002,
        store=str(tmp_path / "store"),
        token_file=str(tmp_path / "token"),
    )
    watched = Supervision(executor_process(config, RunDirectory(tmp_path)).limits)
    patience_s = GraphServerConfig.model_fields["patience_s"].default
    now_s, paused_s = 0.0, 0.0
    for _ in range(50):
        began_s = now_s
        while watched.tick(now_s) is not Action.START:
            now_s += 0.05
        paused_s = max(paused_s, now_s - began_s)
        watched.ready(now_s)
        watched.exited(128 + 9, now_s)
    assert 0.0 < paused_s < patience_s / 3
    # One that has served for a while is back at once.
    now_s += paused_s
    assert watched.tick(now_s) is Action.START
    watched.ready(now_s)
    watched.exited(128 + 9, now_s + 15.0)
    assert watched.tick(now_s + 15.5) is Action.START
