"""The gateway as a process of its own, before engines that are killed for real."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from atoll.runtime.gateway.__main__ import main
from tests.runtime.gateway.engine import expected
from tests.runtime.gateway.harness import CHAT, chat
from tests.runtime.gateway.integration.conftest import Fleet


def test_a_gateway_loses_an_engine_follows_its_config_and_drains(fleet: Fleet) -> None:
    fleet.add_engine(step_ms=10)
    fleet.add_engine(step_ms=10)
    fleet.start()
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="x", max_retries=0, timeout=120) as sdk:
        lose_an_engine(fleet, sdk)
        follow_the_config(fleet)
        drain_at_term(fleet, sdk)


def lose_an_engine(fleet: Fleet, sdk: openai.OpenAI) -> None:
    """Streams go on where one of two engines is killed."""
    asked = [f"question {i}" for i in range(6)]
    found: dict[str, tuple[str, Any]] = {}

    def ask(text: str) -> None:
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
    fleet.engines[0].kill()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for text in asked:
        answer = expected(CHAT, chat(text))
        assert found[text][0] == answer.text
        assert found[text][1].completion_tokens == answer.usage["completion_tokens"]
        assert found[text][1].prompt_tokens == answer.usage["prompt_tokens"]
    logged = until(fleet, "request", len(asked))
    assert len(logged) == len(asked)
    assert all(line["outcome"] == "ok" and line["status"] == 200 for line in logged)
    assert any(len(line["backends"]) > 1 for line in logged)


def follow_the_config(fleet: Fleet) -> None:
    """Backends are those of the file, of which a broken one changes nothing."""
    assert [b["id"] for b in fleet.get("/atoll/v1/status")["backends"]] == ["e0", "e1"]
    fleet.urls.pop(0)
    fleet.write_config()
    until(fleet, "config.changed")
    (backend,) = fleet.get("/atoll/v1/status")["backends"]
    broken = fleet.folder / "new"
    broken.write_text("backends: [{id: 7}]")
    broken.replace(fleet.folder / "gateway.json")
    until(fleet, "config.refused")
    (same,) = fleet.get("/atoll/v1/status")["backends"]
    assert same["url"] == backend["url"] == fleet.urls[0]


def drain_at_term(fleet: Fleet, sdk: openai.OpenAI) -> None:
    """What runs ends, and then the gateway does."""
    assert fleet.gateway is not None
    stream = sdk.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "drain"}], temperature=0, stream=True
    )
    said = "".join(c.delta.content or "" for c in next(stream).choices)
    fleet.gateway.send_signal(signal.SIGTERM)
    said += "".join(c.delta.content or "" for chunk in stream for c in chunk.choices)
    assert said == expected(CHAT, chat("drain")).text
    assert fleet.gateway.wait(10) == 0
    assert fleet.log[-1]["event"] == "gateway.stop"


def until(fleet: Fleet, event: str, count: int = 1) -> list[dict[str, Any]]:
    """Wait until an event was logged so many times, and return all of its kind."""
    end = time.monotonic() + 60
    while len(lines := [line for line in fleet.log if line["event"] == event]) < count:
        assert time.monotonic() < end, fleet.log
        time.sleep(0.05)
    return lines


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
