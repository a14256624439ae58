"""A graph server as a process and a backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.errors import InputError
from atoll.runtime.endpoints.endpoint import RunDirectory
from atoll.runtime.graph_server.graph_config import ExecutorAddress, GraphServerConfig, GraphService
from atoll.runtime.task_fleet.task_endpoint import graph_server_endpoint


def config(port: int) -> GraphServerConfig:
    return GraphServerConfig(
        name="omni/graph-server-0",
        port=port,
        services=(GraphService(name="omni", tasks={"chat": "x:Y"}),),
        executors=(ExecutorAddress(id="x", address="127.0.0.1:1", components=("chat",)),),
        store="store",
        token_file="token",
    )


def test_a_graph_server_is_one_process_and_one_backend(tmp_path: Path) -> None:
    endpoint = graph_server_endpoint(config(4321), RunDirectory(tmp_path), weight=2.0)
    assert endpoint.backend.kind == "tasks"
    assert endpoint.backend.models == ("omni",)
    assert endpoint.backend.url == "http://127.0.0.1:4321"
    assert endpoint.backend.weight == 2.0
    (process,) = endpoint.processes
    file = Path(process.command.arguments[-1])
    assert GraphServerConfig.from_json(file.read_text()) == config(4321)
    assert "atoll.runtime.graph_server.graph_server_process" in process.command.arguments


def test_its_port_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="port"):
        graph_server_endpoint(config(0), RunDirectory(tmp_path))
