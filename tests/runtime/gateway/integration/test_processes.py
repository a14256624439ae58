"""The gateway as a process of its own, before engines that are killed and stopped for real."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from atoll.core.errors import InputError
from atoll.runtime.gateway import standalone
from tests.runtime.gateway.engine import expected
from tests.runtime.gateway.harness import CHAT, chat
from tests.runtime.gateway.integration.conftest import ROOT, Fleet

LONG = 300


def client(fleet: Fleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="x", max_retries=0, timeout=120)


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGKILL, "atoll"), (signal.SIGSTOP, "vllm")])
def test_streams_survive_a_dead_and_a_frozen_engine(
    fleet: Fleet, number: signal.Signals, kind: str
) -> None:
    fleet.settings = {"deadlines": {"first_token_s": 1.0, "between_tokens_s": 1.0}}
    fleet.add_engine(kind=kind, step_ms=10)
    fleet.add_engine(kind=kind, step_ms=10)
    fleet.start(kind)
    asked = [f"question {i}" for i in range(6)]
    found: dict[str, tuple[str, Any]] = {}

    def ask(text: str) -> None:
        with client(fleet) as sdk:
            stream = sdk.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": text}],
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            said, usage = "", None
            for chunk in stream:
                said += "".join(c.delta.content or "" for c in chunk.choices)
                usage = chunk.usage or usage
            found[text] = (said, usage)

    threads = [threading.Thread(target=ask, args=(text,)) for text in asked]
    for thread in threads:
        thread.start()
    time.sleep(0.25)
    os.kill(fleet.engines[0].pid, number)
    for thread in threads:
        thread.join(25)
        assert not thread.is_alive()
    for text in asked:
        answer = expected(CHAT, chat(text))
        assert found[text][0] == answer.text
        assert found[text][1].completion_tokens == answer.usage["completion_tokens"]
        assert found[text][1].prompt_tokens == answer.usage["prompt_tokens"]
    time.sleep(0.3)
    requests = [line for line in fleet.log if line["event"] == "request"]
    assert len(requests) == len(asked)
    assert all(line["outcome"] == "ok" and line["status"] == 200 for line in requests)
    assert any(len(line["backends"]) > 1 for line in requests)


def test_config_is_followed_and_a_broken_one_changes_nothing(fleet: Fleet) -> None:
    fleet.add_engine()
    fleet.start()
    assert [b["id"] for b in fleet.get("/atoll/v1/status")["backends"]] == ["e0"]
    fleet.add_engine()
    fleet.write_config()

    def until(event: str) -> None:
        end = time.monotonic() + 60
        while not any(line["event"] == event for line in fleet.log):
            assert time.monotonic() < end, fleet.log
            time.sleep(0.05)

    until("config.changed")
    assert [b["id"] for b in fleet.get("/atoll/v1/status")["backends"]] == ["e0", "e1"]
    broken = fleet.folder / "new"
    broken.write_text("backends: [{id: 7}]")
    broken.replace(fleet.folder / "gateway.json")
    until("config.refused")
    assert [b["id"] for b in fleet.get("/atoll/v1/status")["backends"]] == ["e0", "e1"]
    with client(fleet) as sdk:
        assert sdk.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}]
        ).choices


def test_term_drains(fleet: Fleet) -> None:
    fleet.add_engine(step_ms=10)
    fleet.start()
    assert fleet.gateway is not None
    with client(fleet) as sdk:
        stream = sdk.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "drain"}], temperature=0, stream=True
        )
        said = "".join(c.delta.content or "" for c in next(stream).choices)
        fleet.gateway.send_signal(signal.SIGTERM)
        said += "".join(c.delta.content or "" for chunk in stream for c in chunk.choices)
    assert said == expected(CHAT, chat("drain")).text
    assert fleet.gateway.wait(10) == 0
    assert fleet.log[-1]["event"] == "gateway.stop"


def test_bad_config_is_one_line(fleet: Fleet) -> None:
    path = fleet.folder / "bad.yaml"
    path.write_text("deadlines: {nonsense: 1}")
    done = subprocess.run(
        [sys.executable, "-m", "atoll.runtime.gateway", "--config", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("text", ["port: nine", "limits: {body_bytes: 0}", "unknown: 1"])
def test_whatever_is_wrong_with_a_config_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        asyncio.run(standalone.run(path))
    assert len(str(refused.value).splitlines()) == 1
