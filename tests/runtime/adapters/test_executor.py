"""Executors as processes."""

from pathlib import Path

from atoll.runtime.adapters.base import RunDirectory
from atoll.runtime.adapters.executor import executor_process
from atoll.runtime.adapters.probes import InstanceProbe
from atoll.runtime.executor.config import ExecutorConfig


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
    assert spec.command.module == "atoll.runtime.executor.process"
    assert spec.command.cpus == (0, 1)
    assert spec.command.surroundings()["OMP_NUM_THREADS"] == "2"
    assert spec.command.surroundings()["CUDA_VISIBLE_DEVICES"] == "1"
    path = Path(spec.command.arguments[-1])
    assert ExecutorConfig.from_json(path.read_text(), path=path) == config
    assert isinstance(spec.probe, InstanceProbe)
    assert spec.probe.url == "http://127.0.0.1:7002"
    # It may finish what runs before it is killed.
    assert spec.limits.term_s > config.drain_s
