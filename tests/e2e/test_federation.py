"""The whole of it, from the command line: two sites behind firewalls, two engines, one address."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.sites import Site, sites

pytestmark = [pytest.mark.slow, pytest.mark.engine]

ROOT = Path(__file__).parents[2]
MODEL = "smollm2"
TOKEN = "of-the-test"
READY_S = 120.0
ATOLL = (sys.executable, "-m", "atoll")


@dataclass
class Federation:
    """What runs, and how to reach it."""

    folder: Path
    at: dict[str, Site]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    url: str = ""

    def run(self, *arguments: str) -> str:
        """Run an `atoll` command here and return what it printed."""
        done = subprocess.run(
            [*ATOLL, *arguments], check=False, capture_output=True, text=True, env=self._env()
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, name: str, site: Site | None, arguments: Sequence[str]) -> None:
        """Start a command at a site, in a process group of its own."""
        command = list(arguments) if site is None else site.command(arguments)
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._env(), start_new_session=True, cwd=ROOT
            )

    def kill(self, name: str) -> None:
        """End a process as a power cut would."""
        process = self.processes[name]
        os.killpg(process.pid, 9)
        process.wait()

    def nodes(self) -> list[dict[str, Any]]:
        """Return what the registry says."""
        said = self.run("nodes", "--fabric", f"@{self.folder}/front.token", "--json")
        found: list[dict[str, Any]] = json.loads(said)
        return found

    def wait_for(self, what: str, ready: Any) -> None:
        """Wait until `ready()`; shows the logs if that never comes."""
        until = time.monotonic() + READY_S
        while not ready():
            dead = [n for n, p in self.processes.items() if p.poll() is not None]
            assert not dead, f"{dead[0]} ended:\n{self.logs()}"
            assert time.monotonic() < until, f"never: {what}\n{self.logs()}"
            time.sleep(0.5)

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def stop(self) -> None:
        """End everything."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)

    def _env(self) -> dict[str, str]:
        return {
            **os.environ,
            "ATOLL_STATE": str(self.folder / "state"),
            "ATOLL_ADMIN_TOKEN": TOKEN,
            "COLUMNS": "120",
        }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    pytest.importorskip("xllamacpp", reason="needs the extra 'llamacpp'")
    pytest.importorskip("torch", reason="needs the extra 'engine'")
    from atoll.engine.weights.sources import DEFAULT_MODEL
    from atoll.engines.llamacpp import ENGINE as LLAMACPP
    from atoll.runtime.endpoints.endpoint import gguf_file

    weights = gguf_file(LLAMACPP, DEFAULT_MODEL)
    with sites("hub", "lausanne", "zurich") as at:
        fed = Federation(tmp_path_factory.mktemp("federation"), at)
        try:
            _bring_up(fed, weights)
            yield fed
        finally:
            fed.stop()


def _bring_up(fed: Federation, weights: Path) -> None:
    folder, hub = fed.folder, fed.at["hub"]
    authority = str(folder / "authority")
    fed.run(
        "fabric", "init", "--folder", authority, "--name", "swiss", "--hub", f"{hub.address}:7447"
    )
    for name, provider, role in (
        ("lausanne", "EPFL", "worker"),
        ("zurich", "ETH", "worker"),
        ("front", "swiss", "gateway"),
    ):
        token = str(folder / f"{name}.token")
        fed.run(
            *("fabric", "issue", name, "--folder", authority),
            *("--provider", provider, "--role", role, "--out", token),
        )
    fed.start("hub", hub, [*ATOLL, "hub", f"@{authority}/hub-h0.token"])
    port = free_port()
    fed.url = f"http://127.0.0.1:{port}"
    database = f"sqlite:///{folder}/accounts.db"
    fed.start(
        "gateway",
        None,
        [
            *(*ATOLL, "gateway", "--fabric", f"@{folder}/front.token", "--port", str(port)),
            *("--db", database, "--log", str(folder / "requests.log")),
        ],
    )
    # One site runs a pipeline of several processes with uneven layers, the other llama.cpp.
    fed.start(
        "lausanne",
        fed.at["lausanne"],
        [
            *(*ATOLL, "join", "--fabric", f"@{folder}/lausanne.token", "--region", "ch-west"),
            *("--precision", "fp32", "--"),
            *(*ATOLL, "serve", "examples/demo-plan.json", "--model", str(weights)),
            *("--port", "{port}"),
        ],
    )
    fed.start(
        "zurich",
        fed.at["zurich"],
        [
            *(*ATOLL, "join", "--fabric", f"@{folder}/zurich.token", "--region", "ch-north"),
            *("--precision", "int4", "--"),
            *(sys.executable, "-m", "atoll.engines.llamacpp"),
            *("--model", str(weights), "--alias", MODEL, "--port", "{port}"),
        ],
    )
    fed.wait_for("both nodes serve", lambda: len(_serving(fed)) == 2)


def _serving(fed: Federation) -> list[dict[str, Any]]:
    return [n for n in fed.nodes() if n["state"] == "serving" and n["services"]]


def _client(fed: Federation, key: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{fed.url}/v1", api_key=key, max_retries=0, timeout=120)


def _key(fed: Federation, name: str, *options: str) -> str:
    database = f"sqlite:///{fed.folder}/accounts.db"
    said = json.loads(fed.run("keys", "create", name, "--db", database, "--json", *options))
    key: str = said["key"]
    # Gateways hear of it about once a second.
    time.sleep(2.5)
    return key


def _ask(client: Any, **more: Any) -> Any:
    return client.completions.with_raw_response.create(
        model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0, **more
    )


def test_workers_listen_to_nobody_outside(federation: Federation) -> None:
    for name in ("lausanne", "zurich"):
        site = federation.at[name]
        if site.namespace is None:
            pytest.skip("sites share a network here: namespaces cannot be made")
        assert site.listeners() == []


def test_each_provider_answers_by_policy_and_says_so(federation: Federation) -> None:
    client = _client(federation, _key(federation, "anna"))
    for provider, precision in (("EPFL", "fp32"), ("ETH", "int4")):
        answer = _ask(client, extra_headers={"x-atoll-providers": provider})
        assert "Paris" in answer.parse().choices[0].text
        assert answer.headers["x-atoll-provider"] == provider
        assert answer.headers["x-atoll-precision"] == precision


def test_a_stream_outlives_its_site(federation: Federation) -> None:
    client = _client(federation, _key(federation, "ben"))
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me a long story about a lighthouse."}],
        max_tokens=120,
        temperature=0,
        stream=True,
        extra_headers={"x-atoll-session": "story"},
    )
    pieces, killed = 0, False
    finish = None
    for chunk in stream:
        pieces += bool(chunk.choices and chunk.choices[0].delta.content)
        if chunk.choices and chunk.choices[0].finish_reason:
            finish = chunk.choices[0].finish_reason
        if pieces == 10 and not killed:
            killed = True
            federation.kill(_serving_site(federation))
    assert killed
    assert finish in ("length", "stop")
    assert pieces > 20


def _serving_site(fed: Federation) -> str:
    asked = urllib.request.Request(
        f"{fed.url}/atoll/v1/status", headers={"authorization": f"Bearer {TOKEN}"}
    )
    with urllib.request.urlopen(asked) as page:
        backends = json.load(page)["backends"]
    busy = next(b for b in backends if b["inflight"])
    node = busy["metadata"]["node"]
    return "lausanne" if "lausanne" in node else "zurich"
