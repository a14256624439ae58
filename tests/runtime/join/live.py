"""A hub, an observer and nodes on this machine, for tests that need the real thing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from atoll.fabric.identity.access import Access
from atoll.fabric.registry.peers import Peer
from atoll.fabric.registry.records import Metadata
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.transport.hub import Hub, hub_options
from atoll.fabric.tunnel.tunnel_client import TunnelClient
from atoll.fabric.tunnel.tunnel_frames import TunnelRequest
from atoll.runtime.endpoints.endpoint import RunDirectory
from atoll.runtime.http.listen_address import free_ports
from atoll.runtime.join.join_options import JoinOptions
from atoll.runtime.join.joined_node import JoinedNode
from tests.runtime.waiting import until


@dataclass
class Answer:
    """What a call brought."""

    status: int = 0
    body: bytes = b""
    over: str | None = None

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        self.status = status

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.over = "end"

    def on_lost(self, reason: str, *, unused: bool) -> None:
        self.over = reason


@dataclass
class World:
    """A fabric with an observer in it."""

    port: int
    observer: Fabric
    caller: TunnelClient
    folder: Path
    lines: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"open://127.0.0.1:{self.port}"

    def node(self, **options: object) -> JoinedNode:
        given = {"health_interval": 0.1, "health_failures": 2, "name": "n"} | options
        made = JoinOptions.parse(given)
        access = Access.open_at([f"127.0.0.1:{self.port}"], name="site", provider="uni")
        home = self.folder / f"home{len(list(self.folder.iterdir()))}"
        home.mkdir()
        return JoinedNode(made, access, RunDirectory(home), say=self.lines.append, environment={})

    def seen(self) -> Peer | None:
        """The node as the observer sees it."""
        return next((p for p in self.observer.peers() if p.metadata.role == "worker"), None)

    def serving(self, model: str = "org/m") -> bool:
        """Whether some node serves the model."""
        return any(
            peer.routable and any(service.model == model for service in peer.metadata.services)
            for peer in self.observer.peers()
        )

    async def ask(self, path: str = "/v1/completions", body: bytes = b'{"stream": true}') -> Answer:
        answer = Answer()
        self.answers.append(answer)
        peer = self.seen()
        assert peer is not None
        headers = ((b"content-type", b"application/json"),)
        self.caller.call(peer.sid, TunnelRequest(b"POST", path.encode(), headers, body), answer)
        await until(lambda: answer.over is not None)
        return answer


@contextlib.asynccontextmanager
async def world(folder: Path, role: str = "gateway", provider: str = "uni") -> AsyncIterator[World]:
    (port,) = free_ports(1)
    hub = await Hub.start(hub_options(None, listen=[f"127.0.0.1:{port}"]))
    access = Access.open_at([f"127.0.0.1:{port}"], name="eyes", provider=provider, role=role)
    assert role in ("gateway", "operator")
    metadata = Metadata(name="eyes", provider=provider, role=role)  # type: ignore[arg-type]
    observer = await Fabric.connect(access, metadata)
    caller = TunnelClient(observer)
    try:
        yield World(port, observer, caller, folder)
    finally:
        await caller.close()
        await observer.close()
        await hub.close()


def engine(*more: str, port: str = "{port}") -> tuple[str, ...]:
    """The command of an engine that answers as vLLM does."""
    return (sys.executable, "-m", "tests.runtime.join.shapes", "--port", port, *more)


def fake_vllm(folder: Path) -> Path:
    """Write a program `vllm` that serves `org/m` as vLLM does; returns the folder it is in."""
    programs = folder / "bin"
    programs.mkdir()
    program = programs / "vllm"
    # `vllm serve MODEL --host .. --port N ...`
    program.write_text(
        f"#!/bin/sh\nshift 2\nexec {sys.executable} -m tests.runtime.join.shapes --model org/m $@\n"
    )
    program.chmod(0o755)
    return programs
