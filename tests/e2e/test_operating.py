"""A fleet's whole life from the command line, on loopback: up, ask, grow, a killed controller, down."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]
FLEET = """\
name: lab
models:
  chat: {model: llama-3.1-8b, ttft: 1500ms, tpot: 80ms, rate: 1/s, lengths: 512x128}
pool:
  offers:
    - {region: here, node_type: L4:1, available: 4, usd_per_hour: 0.80}
settings: {max_nodes_per_instance: 1}
"""
_PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("torch", "transformers", "zmq", "tokenizers", "httptools", "zenoh"):
        pytest.importorskip(package, reason="needs the extras 'engine', 'fabric' and 'serve'")
    from benchmarks.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


class Site:
    """A user with a state folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{k: v for k, v in os.environ.items() if k != "ATOLL_FABRIC"},
            "ATOLL_STATE": str(folder / "state"),
        }

    def run(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "atoll", *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S * 2,
            check=False,
        )
        assert done.returncode == code, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout if code == 0 else done.stderr

    @contextlib.contextmanager
    def running(self, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        with (self.folder / "said.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "atoll", *words],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def standing(self) -> dict[str, Any]:
        (found,) = json.loads(self.run("status", "lab", "--json"))
        operated: dict[str, Any] = found["operated"]
        return operated

    def ready(self) -> set[str]:
        rows = self.standing()["instances"]
        return {row["instance"] for row in rows if row["state"] == "ready"}

    def history(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = json.loads(
            self.run("history", "lab", "--last", "500", "--json")
        )
        return events

    def set_rate(self, text: str) -> None:
        path = self.folder / "lab.yaml"
        path.write_text(re.sub(r"rate: [^,]+", f"rate: {text}", FLEET))


def until(reached: Any, what: str) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not reached():
        assert time.monotonic() < end_s, f"not {what} after {_PATIENCE_S} s"
        time.sleep(0.5)


def processes_of(folder: Path) -> list[str]:
    """Command lines of all processes that have something to do with a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            if str(folder) in text and path.parent.name != str(os.getpid()):
                found.append(text)
    return found


def ask(url: str) -> str:
    body = {"model": "chat", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
    asked = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
        return text


def test_a_fleet_lives_grows_survives_its_controller_and_ends(tmp_path: Path, tiny: Path) -> None:
    site = Site(tmp_path)
    site.set_rate("1/s")
    try:
        live(site, tiny)
    finally:
        subprocess.run(
            [sys.executable, "-m", "atoll", "down", "lab", "--yes", "--now"],
            env=site.environment,
            cwd=tmp_path,
            capture_output=True,
            check=False,
        )
    assert processes_of(tmp_path / "state") == []


def live(site: Site, tiny: Path) -> None:
    stand_in = ("--stand-in", "--stand-in-model", str(tiny))
    said = site.run("up", "lab.yaml", *stand_in, "--yes", "--port", "0", "--json")
    came = json.loads(said.splitlines()[-1])
    url = came["url"]
    assert len(ask(url)) == 8
    first = site.ready()
    assert first == set(came["instances"])
    # No secret is on a command line.
    tokens = [
        "".join(path.read_text().split())
        for path in (site.folder / "state" / "fleets" / "lab" / "fabric").glob("*.token")
    ]
    lines = processes_of(site.folder / "state")
    assert len(tokens) >= 3
    assert lines
    assert not [token for token in tokens for line in lines if token in line]

    # The fleet file asks for more while a controller runs; it is killed as soon as it has begun to act.
    with site.running("operate", "lab", "--yes", "--look", "1s") as controller:
        until(lambda: "controller" in {event["kind"] for event in site.history()}, "operated")
        site.set_rate("4/s")
        until(
            lambda: [e for e in site.history() if e["kind"] == "start"][len(first) :],
            "growing",
        )
        controller.send_signal(signal.SIGKILL)
        controller.wait()
    assert len(ask(url)) == 8
    # The next one takes over at once, and what was begun is not begun again.
    site.run("operate", "lab", "--yes", "--once")
    wanted = {e["instance"] for e in site.history() if e["kind"] == "start"}
    until(lambda: site.ready() == wanted, "all of it ready")
    assert len(wanted) > len(first)
    assert first < wanted
    standing = site.standing()
    assert standing["errors"] == []
    assert len(ask(url)) == 8
    # The gateway tells what it saw, and what was promised.
    (seen,) = standing["traffic"]
    assert seen["service"] == "chat"
    assert seen["requests_per_s"] > 0.0
    assert seen["judged"] >= 1

    # A broken file changes nothing and is told.
    (site.folder / "lab.yaml").write_text("models: {")
    assert "lab.yaml" in site.run("operate", "lab", "--yes", "--once", code=3)
    assert site.ready() == wanted
    name = min(wanted)
    assert "node.announced" in site.run("logs", name)

    # SIGTERM ends the controller and not the fleet.
    site.set_rate("4/s")
    with site.running("operate", "lab", "--yes", "--look", "1s") as controller:
        until(lambda: site.standing()["controller"] is not None, "operated again")
        controller.terminate()
        assert controller.wait(timeout=_PATIENCE_S) == 0
    assert site.ready() == wanted
    assert site.standing()["controller"] is None

    site.run("down", "lab", "--yes")
    assert not site.standing()["up"]
    last = site.history()[-1]
    assert (last["kind"], last["text"]) == ("note", "taken down")
