"""Configuration of an executor process: its components, their devices, and where it listens."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from atoll.core.frozen import Frozen


class ExecutorConfig(Frozen):
    """One executor.

    components: names of the registry, with options for each. address: where it takes invocations,
    "host:port". health_port: where /health, /metrics and /atoll/v1/status answer, on the same host unless
    `health_host` names another. store:
    a folder of its own for arrays, emptied at the start; `store_bytes` is the most it may hold. token_file:
    what callers must know (one line). threads: cores that each component may keep busy. cpus: the cores of
    the process; none means any. max_waiting: invocations that may wait for one component before more are
    refused. nixl: whether arrays come from executors of other machines by NIXL. drain_s: how long what runs
    may take at SIGTERM. ready_file: written with the process id once every component has run its example.
    """

    name: str = Field(min_length=1)
    components: dict[str, dict[str, Any]] = Field(min_length=1)
    address: str
    health_port: int = Field(ge=0, le=65535)
    health_host: str | None = None
    store: str
    store_bytes: int = Field(512 * 2**20, ge=2**20)
    token_file: str
    device: str = "cpu"
    threads: int = Field(1, ge=1)
    cpus: tuple[int, ...] = ()
    max_waiting: int = Field(256, ge=1)
    nixl: Literal["auto", "always", "never"] = "auto"
    drain_s: float = Field(20.0, ge=0)
    ready_file: str | None = None
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
