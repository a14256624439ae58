"""Configuration of a graph server: its services, the executors behind them, and the paths of requests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from pydantic import Field

from atoll.core.frozen import Frozen
from atoll.plan.plan import RequestPath
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.realtime.realtime_limits import RealtimeLimits
from atoll.workload.classes import INPUTS, OUTPUTS

EXECUTORS_MISSING = "executors_missing"
"""Code of the error with which /health says that components have no executor."""
Endpoint = Literal["chat", "transcriptions", "speech", "images", "embeddings"]
ENDPOINT_PATHS: dict[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/audio/speech": "speech",
    "/v1/images/generations": "images",
    "/v1/embeddings": "embeddings",
}
_BRINGS: dict[str, tuple[str, ...]] = {"chat": INPUTS, "transcriptions": ("audio",)}
_GIVES: dict[str, tuple[str, ...]] = {
    "chat": ("text", "audio"),
    "speech": ("audio",),
    "images": ("image",),
}


def modalities(endpoints: Collection[str]) -> tuple[list[str], list[str]]:
    """Return what can be brought to these endpoints, and what they give."""
    inputs = {m for endpoint in endpoints for m in _BRINGS.get(endpoint, ("text",))}
    outputs = {m for endpoint in endpoints for m in _GIVES.get(endpoint, ("text",))}
    return [m for m in INPUTS if m in inputs], [m for m in OUTPUTS if m in outputs]


class ExecutorAddress(Frozen):
    """An executor of the plan: its id there, where it listens, what it runs."""

    id: str = Field(min_length=1)
    address: str
    components: tuple[str, ...] = Field(min_length=1)


class GraphService(Frozen):
    """A service, named as requests name their model.

    tasks: the composite task that answers each endpoint, as "module:Class" of trusted code. options: what
    their `setup` may look at. parts: which components a part of the plan's model stands for. paths: the
    plan's, whose steps name parts and executors; without any, every executor that runs a component is asked.
    stand_in: instead of what it answers, where its components are not those of the planned model.
    """

    name: str = Field(min_length=1)
    tasks: dict[Endpoint, str] = Field(min_length=1)
    options: dict[str, Any] = Field(default_factory=dict)
    parts: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    paths: tuple[RequestPath, ...] = ()
    stand_in: str | None = None


class GraphServerConfig(Frozen):
    """One graph server.

    executors: those that stand before it begins; whoever runs it may name others later. store: a folder of
    its own for what clients send, emptied at the start. routing: "static" assigns paths by the plan's weights
    when a request comes; "dynamic" asks every executor for its queue before each invocation, to compare.
    request_s: the longest a request may take. patience_s: how long an invocation waits for an executor to
    come back before it is given up.
    """

    name: str = Field(min_length=1)
    host: str = "127.0.0.1"
    port: int = Field(ge=0, le=65535)
    services: tuple[GraphService, ...] = Field(min_length=1)
    executors: tuple[ExecutorAddress, ...] = ()
    address: str = "127.0.0.1:0"
    """Where executors on other hosts fetch what clients sent."""
    store: str
    store_bytes: int = Field(512 * 2**20, ge=2**20)
    token_file: str
    limits: MediaLimits = MediaLimits()
    realtime: RealtimeLimits = RealtimeLimits()
    routing: Literal["static", "dynamic"] = "static"
    request_s: float = Field(600.0, gt=0)
    patience_s: float = Field(30.0, gt=0)
    max_requests: int = Field(256, ge=1)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
