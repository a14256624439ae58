"""`atoll gateway` as a process: with a fabric, keys, a log and a trace; and what it refuses to do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.main import run
from atoll.runtime.http.http_client import fetch
from tests.runtime.gateway.engine import ScriptedEngine
from tests.runtime.gateway.harness import CHAT
from tests.runtime.join.live import world

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


async def test_a_gateway_with_keys_in_front_of_a_node_without_a_port(
    processes: Processes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path))

    async def command(*arguments: str) -> Any:
        """Run a command in this process, and return what it said as JSON."""
        assert await asyncio.to_thread(run, [*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    key = (await command("keys", "create", "test"))["key"]
    body = {"model": "gpt", "messages": [{"role": "user", "content": "hello"}]}
    engine = ScriptedEngine()
    (tmp_path / "nodes").mkdir()
    async with world(tmp_path / "nodes") as here:
        node = here.node(url=await engine.start())
        await node.start()
        gateway = processes.start(
            *("atoll", "gateway", "--fabric", here.address, "--port", "0", "--json"),
            *("--log", str(tmp_path / "log"), "--record", str(tmp_path / "trace.jsonl")),
            *("--alias", "gpt=m"),
        )
        said = json.loads(await asyncio.to_thread(processes.line, gateway))
        chats, fabric = (said["url"] + path for path in (CHAT, "/atoll/v1/fabric"))
        status, answer, headers = await asyncio.to_thread(ask, chats, body, key)
        async with asyncio.timeout(90):
            while status != 200:
                await asyncio.sleep(0.1)
                status, answer, headers = await asyncio.to_thread(ask, chats, body, key)
        assert headers["x-atoll-model"] == "m"
        assert headers["x-atoll-provider-verified"] == "no"
        assert (await asyncio.to_thread(ask, chats, body))[0] == 401
        assert (await asyncio.to_thread(ask, fabric, None, key))[0] == 403
        _, page = await fetch(fabric, unix_socket=Path(said["admin_socket"]))
        nodes = json.loads(page)["nodes"]
        assert [n["services"][0]["model"] for n in nodes if n["services"]] == ["m"]
        gateway.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(gateway.wait, 15) == 0, processes.errors()
        await node.leave()
        await node.close()
    await engine.stop()
    log = (tmp_path / "log").read_text()
    assert key not in log + processes.errors()
    events = [json.loads(line) for line in log.splitlines()]
    assert [e["model"] for e in events if e["event"] == "request" and e["status"] == 200] == ["m"]
    trace = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert trace
    assert "hello" not in json.dumps(trace)
    (used,) = await command("usage")
    assert used["completion_tokens"] == answer["usage"]["completion_tokens"] > 0


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
