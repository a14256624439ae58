"""What endpoints of this machine say of themselves to those who watch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.runtime.endpoints.endpoint import RunDirectory
from atoll.runtime.gateway.console.shown_machines import find_pipelines, list_machines
from atoll.runtime.local.local_endpoints import LocalModel, LocalOptions, build
from atoll.runtime.local.local_fleet import LivenessTracker
from atoll.runtime.pool.member import STAND_IN, Backend
from tests.runtime.gateway.console.viewing import View
from tests.runtime.local.test_placing import instance, plan


def backend_of(folder: Path, engine: str = "atoll") -> Backend:
    config = {"num_hidden_layers": 32, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    made = plan(instance([(0, 20), (20, 32)] if engine == "atoll" else [(0, 32)]))
    (service,) = {each.service for each in made.instances}
    options = LocalOptions(engine=engine, cores=(0, 1, 2))
    models = {service: LocalModel("hf://org/name", folder, "tiny instead of large")}
    (named,) = build(made, models, RunDirectory(folder), LivenessTracker(), options)
    return named.endpoint.backend


def test_pipeline_of_a_local_fleet_can_be_drawn(tmp_path: Path) -> None:
    backend = backend_of(tmp_path)
    metadata = backend.metadata
    assert (metadata["precision"], metadata["context"], metadata["cores"]) == ("fp32", "2048", "3")
    assert metadata[STAND_IN] == "tiny instead of large"
    assert "gpus" not in metadata  # what was planned is not here
    view = View()
    view.pool.add(backend)
    machines = list_machines(view)
    (pipeline,) = find_pipelines(machines)
    assert (pipeline.instance, pipeline.layers) == (backend.id, 32)
    assert [stage.layers for stage in pipeline.stages] == [(0, 20), (20, 32)]
    assert {stage.machine for stage in pipeline.stages} == {m.id for m in machines[1:]}
    assert sum(m.cpus or 0 for m in machines[1:]) == machines[0].cpus == 3
    assert all(machine.planned for machine in machines[1:])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engine_in_one_process_has_no_stages(tmp_path: Path, engine: str) -> None:
    view = View()
    view.pool.add(backend_of(tmp_path, engine))
    (machine,) = list_machines(view)
    assert (machine.engine, machine.cpus) == (engine, 3)
    assert machine.services[0].precision is None  # the engine chooses it
