"""A front as a process and a backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.errors import InputError
from atoll.runtime.adapters.base import RunDirectory
from atoll.runtime.adapters.front import front_endpoint
from atoll.runtime.front.config import ExecutorAddress, FrontConfig, FrontService


def config(port: int) -> FrontConfig:
    return FrontConfig(
        name="omni/front-0",
        port=port,
        services=(FrontService(name="omni", tasks={"chat": "x:Y"}),),
        executors=(ExecutorAddress(id="x", address="127.0.0.1:1", components=("chat",)),),
        store="store",
        token_file="token",
    )


def test_a_front_is_one_process_and_one_backend(tmp_path: Path) -> None:
    endpoint = front_endpoint(config(4321), RunDirectory(tmp_path), weight=2.0)
    assert endpoint.backend.kind == "tasks"
    assert endpoint.backend.models == ("omni",)
    assert endpoint.backend.url == "http://127.0.0.1:4321"
    assert endpoint.backend.weight == 2.0
    (process,) = endpoint.processes
    file = Path(process.command.arguments[-1])
    assert FrontConfig.from_json(file.read_text()) == config(4321)
    assert "atoll.runtime.front.process" in process.command.arguments


def test_its_port_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="port"):
        front_endpoint(config(0), RunDirectory(tmp_path))
