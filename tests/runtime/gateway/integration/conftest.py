"""Gateways and engines as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from atoll.runtime.http.listen_address import free_ports

ROOT = Path(__file__).resolve().parents[4]
_TOKEN = "of-the-test"


@dataclass
class Fleet:
    """Engine processes and a gateway process before them."""

    folder: Path
    port: int = 0
    engines: list[subprocess.Popen[str]] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    gateway: subprocess.Popen[str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def add_engine(self, *, step_ms: float = 5.0, kind: str = "vllm") -> None:
        command = [
            sys.executable,
            "-m",
            "tests.runtime.gateway.engine",
            "--step-ms",
            str(step_ms),
            "--kind",
            kind,
        ]
        started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.engines.append(started)
        assert started.stdout is not None
        self.urls.append(started.stdout.readline().strip())

    def write_config(self, kind: str = "vllm") -> None:
        backends = [
            {"id": f"e{i}", "url": u, "models": ["m"], "kind": kind}
            for i, u in enumerate(self.urls)
        ]
        path = self.folder / "gateway.json.new"
        path.write_text(json.dumps(self.settings | {"port": self.port, "backends": backends}))
        path.replace(self.folder / "gateway.json")

    def start(self, kind: str = "vllm") -> None:
        (self.port,) = free_ports(1)
        self.write_config(kind)
        command = [
            sys.executable,
            "-m",
            "atoll.runtime.gateway",
            "--config",
            str(self.folder / "gateway.json"),
        ]
        log = (self.folder / "log").open("w")
        environment = os.environ | {"ATOLL_ADMIN_TOKEN": _TOKEN}
        self.gateway = subprocess.Popen(command, cwd=ROOT, stderr=log, text=True, env=environment)
        log.close()
        until = time.monotonic() + 60
        while True:
            try:
                self.get("/v1/models")
                return
            except OSError:
                assert time.monotonic() < until, (self.folder / "log").read_text()
                assert self.gateway.poll() is None, (self.folder / "log").read_text()
                time.sleep(0.05)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]

    def get(self, path: str) -> Any:
        asked = urllib.request.Request(
            self.url + path, headers={"authorization": f"Bearer {_TOKEN}"}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)

    def stop(self) -> None:
        for process in (*self.engines, self.gateway):
            if process is None:
                continue
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    try:
        yield made
    finally:
        made.stop()
