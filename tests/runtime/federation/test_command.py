"""`atoll gateway` as a process: with a fabric, keys, a log and a trace; and what it refuses to do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.main import run
from atoll.runtime.http.http_client import fetch
from atoll.runtime.http.listen_address import free_ports

ROOT = Path(__file__).resolve().parents[3]


class Processes:
    """A hub, a node and what else is started; all of it ends with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stack = ExitStack()

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        errors = (self.folder / f"stderr{len(list(self.folder.glob('stderr*')))}").open("w")
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"ATOLL_STATE": str(self.folder)} | environment,
        )
        errors.close()
        self.stack.callback(self._end, process)
        return process

    def _end(self, process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()

    def line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said, self.errors()
        return said

    def errors(self) -> str:
        return "\n".join(p.read_text() for p in sorted(self.folder.glob("stderr*")))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    with made.stack:
        yield made


def ask(url: str, body: dict[str, Any] | None = None, key: str = "") -> tuple[int, Any, Any]:
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"content-type": "application/json"}
        | ({"authorization": f"Bearer {key}"} if key else {}),
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), error.headers


def test_a_gateway_with_keys_in_front_of_a_node_without_a_port(
    processes: Processes, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    fabric = f"open://127.0.0.1:{port}"
    hub = processes.start("atoll", "hub", "--open", "--listen", f"127.0.0.1:{port}")
    processes.line(hub)
    engine = processes.start("tests.runtime.gateway.engine", "--kind", "vllm")
    url = processes.line(engine).strip()
    processes.start(
        *("atoll", "join", "--fabric", fabric, "--url", url, "--name", "n"),
        *("--health-interval", "200ms"),
    )
    made = subprocess.run(
        [sys.executable, "-m", "atoll", "keys", "create", "test", "--json"],
        cwd=ROOT,
        env=os.environ | {"ATOLL_STATE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    key = json.loads(made.stdout)["key"]
    gateway = processes.start(
        *("atoll", "gateway", "--fabric", fabric, "--port", "0", "--json"),
        *("--log", str(tmp_path / "log"), "--record", str(tmp_path / "trace.jsonl")),
        *("--alias", "gpt=m"),
    )
    said = json.loads(processes.line(gateway))
    at = said["url"]
    body = {"model": "gpt", "messages": [{"role": "user", "content": "hello"}]}
    until = time.monotonic() + 90
    status, answer, headers = ask(f"{at}/v1/chat/completions", body, key)
    while status != 200:
        assert time.monotonic() < until, (status, answer, processes.errors())
        time.sleep(0.1)
        status, answer, headers = ask(f"{at}/v1/chat/completions", body, key)
    assert headers["x-atoll-model"] == "m"
    assert headers["x-atoll-provider-verified"] == "no"
    assert ask(f"{at}/v1/chat/completions", body)[0] == 401
    assert ask(f"{at}/atoll/v1/fabric", None, key)[0] == 403
    _, page = asyncio.run(fetch(f"{at}/atoll/v1/fabric", unix_socket=Path(said["admin_socket"])))
    nodes = json.loads(page)["nodes"]
    assert [n["services"][0]["model"] for n in nodes if n["services"]] == ["m"]
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(15) == 0, processes.errors()
    log = (tmp_path / "log").read_text()
    assert key not in log + processes.errors()
    events = [json.loads(line) for line in log.splitlines()]
    assert [e["model"] for e in events if e["event"] == "request" and e["status"] == 200] == ["m"]
    trace = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert trace
    assert "hello" not in json.dumps(trace)
    used = subprocess.run(
        [sys.executable, "-m", "atoll", "usage", "--json"],
        cwd=ROOT,
        env=os.environ | {"ATOLL_STATE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer["usage"]["completion_tokens"] > 0
    assert str(answer["usage"]["completion_tokens"]) in used.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--open", "--host", "0.0.0.0"], "without keys anybody"),
        (["--open", "--alias", "x"], "--alias"),
        (["--open", "--policy", "best"], "policy"),
        (["--open"], "no fabric is named"),
        (["--open", "--fabric", "nonsense"], "fabric"),
    ],
)
def test_what_is_refused(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("ATOLL_FABRIC", raising=False)
    assert run(["gateway", *arguments, "--port", "0"]) != 0
    errors = capsys.readouterr().err
    assert said in errors
    assert len(errors.strip().splitlines()) == 1
