"""Real executor processes with small components, and a real graph server before them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.runtime.executor.executor_config import ExecutorConfig
from atoll.runtime.graph_server.graph_config import ExecutorAddress, GraphServerConfig, GraphService
from atoll.runtime.graph_server.graph_server import TaskGraphServer
from atoll.runtime.http.listen_address import free_ports
from tests.runtime.graph_server.toys import HERE

TOKEN = "integration-token-0123456789"
READY_S = 60.0
NAMES = {
    "encoder": f"{HERE}:ToyEncoder",
    "decoder": f"{HERE}:ToyDecoder",
    "chat": f"{HERE}:ToyChat",
    "voice": f"{HERE}:ToyVoice",
}


class ExecutorFarm:
    """Executor processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token_file = folder / "token"
        self.token_file.write_text(TOKEN + "\n")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses: dict[str, ExecutorAddress] = {}

    def start(self, name: str, parts: str, word_s: float = 0.0) -> None:
        """Start an executor of these parts."""
        address = f"127.0.0.1:{free_ports(1)[0]}"
        components = {NAMES[part]: {"word_s": word_s} for part in parts.split()}
        config = ExecutorConfig(
            name=name,
            components=components,
            address=address,
            health_port=0,
            store=str(self.folder / f"{name}.store"),
            token_file=str(self.token_file),
            ready_file=str(self.folder / f"{name}.ready"),
            drain_s=1.0,
        )
        path = self.folder / f"{name}.json"
        path.write_text(config.to_json())
        log = (self.folder / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            (
                sys.executable,
                "-m",
                "atoll.runtime.executor.executor_process",
                "--config",
                str(path),
            ),
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        log.close()
        self.addresses[name] = ExecutorAddress(
            id=name, address=address, components=tuple(components)
        )

    def ready(self, *names: str) -> None:
        """Wait until executors run."""
        until_s = time.monotonic() + READY_S
        for name in names or self.processes:
            while not (self.folder / f"{name}.ready").exists():
                log = (self.folder / f"{name}.log").read_text()
                assert self.processes[name].poll() is None, log
                assert time.monotonic() < until_s, log
                time.sleep(0.02)

    def stored(self) -> int:
        """Return how many arrays lie in all stores."""
        return sum(1 for _ in self.folder.glob("*.store/*.array"))

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def graph_server_config(self, service: dict[str, Any], **changes: Any) -> GraphServerConfig:
        """Return a graph server over all executors."""
        settings = {
            "name": "graph-server-0",
            "port": 0,
            "services": (GraphService(name="omni", **service),),
            "executors": tuple(self.addresses.values()),
            "store": str(self.folder / "graph-server.store"),
            "token_file": str(self.token_file),
        }
        return GraphServerConfig(**(settings | changes))

    @asynccontextmanager
    async def serve(self, service: dict[str, Any], **changes: Any) -> AsyncIterator[str]:
        """Run a graph server over all executors; yields its URL."""
        server = TaskGraphServer(self.graph_server_config(service, **changes), TOKEN)
        host, port = await server.start()
        try:
            async with asyncio.timeout(READY_S):
                while server.missing():
                    await asyncio.sleep(0.02)
            yield f"http://{host}:{port}"
        finally:
            await server.close(1.0)


async def sse(url: str, body: Any) -> AsyncGenerator[Any, None]:
    """Yield the events of a stream as they come, "[DONE]" as it is."""
    host, port = url.removeprefix("http://").split("/")[0].split(":")
    path = "/" + url.split("/", 3)[3]
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.0\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    try:
        headers = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in headers.split(b"\r\n")[0], headers + await reader.read()
        while True:
            event = await reader.readline()
            if not event:
                return
            if event == b"\n":
                continue
            text = event.decode().strip().removeprefix("data: ")
            yield text if text == "[DONE]" else json.loads(text)
    finally:
        writer.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExecutorFarm]:
    """Two executors that share the work: one hears and speaks, one thinks."""
    made = ExecutorFarm(tmp_path_factory.mktemp("pair"))
    made.start("ears-0", "encoder decoder voice")
    made.start("think-0", "chat", word_s=0.01)
    made.ready()
    yield made
    made.close()
