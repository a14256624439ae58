"""The gateway alone, by its file: it follows what changes there, and drains when it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from atoll.runtime.gateway import standalone
from atoll.runtime.gateway.__main__ import main
from atoll.runtime.http.http_client import fetch
from tests.runtime.gateway.engine import ScriptedEngine, expected
from tests.runtime.gateway.harness import CHAT, chat
from tests.runtime.waiting import until


class Alone:
    """A gateway that runs by a file in this process, and what it has logged."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.path = folder / "gateway.json"
        self.socket = folder / "admin.sock"
        self._capfd = capfd
        self._lines: list[dict[str, Any]] = []

    def write(self, *backends: dict[str, object]) -> None:
        settings = {"port": 0, "admin_socket": str(self.socket), "backends": backends}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(settings))
        new.replace(self.path)

    def logged(self, event: str) -> list[dict[str, Any]]:
        self._lines += map(json.loads, self._capfd.readouterr().err.splitlines())
        return [line for line in self._lines if line["event"] == event]

    async def backends(self) -> list[str]:
        _, page = await fetch("http://localhost/atoll/v1/status", unix_socket=self.socket)
        return [backend["id"] for backend in json.loads(page)["backends"]]


async def ask(sdk: openai.AsyncOpenAI, text: str) -> str:
    stream = await sdk.chat.completions.create(
        model="m", messages=[{"role": "user", "content": text}], temperature=0, stream=True
    )
    return "".join([c.delta.content or "" async for chunk in stream for c in chunk.choices])


async def test_it_loses_an_engine_follows_its_file_and_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(standalone, "_LOOK_S", 0.05)
    alone = Alone(tmp_path, capfd)
    engines = [ScriptedEngine(step_s=0.01) for _ in range(2)]
    urls = [await engine.start() for engine in engines]
    backends: list[dict[str, object]] = [
        {"id": f"e{n}", "url": url, "models": ["m"], "kind": "vllm"} for n, url in enumerate(urls)
    ]
    alone.write(*backends)
    ready = asyncio.get_running_loop().create_future()
    gateway = asyncio.create_task(standalone.run(alone.path, ready))
    host, port = await ready
    async with openai.AsyncOpenAI(
        base_url=f"http://{host}:{port}/v1", api_key="x", max_retries=0
    ) as sdk:
        asked = [f"question {i}" for i in range(6)]
        answers = [asyncio.create_task(ask(sdk, text)) for text in asked]
        await until(lambda: engines[0].running == engines[1].running == 3)
        await engines[0].stop()
        for text, answer in zip(asked, answers, strict=True):
            assert await answer == expected(CHAT, chat(text)).text
        await until(lambda: len(alone.logged("request")) == len(asked))
        lines = alone.logged("request")
        assert all(line["outcome"] == "ok" and line["status"] == 200 for line in lines)
        assert any(len(line["backends"]) > 1 for line in lines)

        assert await alone.backends() == ["e0", "e1"]
        alone.write(*backends[1:])
        await until(lambda: alone.logged("config.changed"))
        assert await alone.backends() == ["e1"]
        alone.write({"id": 7})
        await until(lambda: alone.logged("config.refused"))
        assert await alone.backends() == ["e1"]

        running = asyncio.create_task(ask(sdk, "drain"))
        await until(lambda: engines[1].running)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == expected(CHAT, chat("drain")).text
    assert await gateway == 0
    assert alone.logged("gateway.stop")
    await engines[1].stop()


@pytest.mark.parametrize(
    "text", ["port: nine", "limits: {body_bytes: 0}", "deadlines: {nonsense: 1}", "unknown: 1"]
)
def test_whatever_is_wrong_with_a_config_is_one_line(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["gateway", "--config", str(path)])
    for name in ("freeze", "set_threshold"):
        monkeypatch.setattr(gc, name, lambda *_: None)
    assert main() != 0
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1
