"""Engines of others under `atoll join`, behind a gateway, all started from the command line."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.real.counting_model import CONTEXT, CountingModel
from tools.real_engines import RealEngine

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
MODEL = "counting"
READY_S = 900.0
CORES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What vLLM is told on cores that others use too."""
_ATOLL = (sys.executable, "-m", "atoll")
_ASK_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back from a request; `body` is JSON where it was."""

    status: int
    headers: Mapping[str, str]
    body: Any


@dataclass(frozen=True, slots=True)
class Door:
    """An address to ask at, and headers to send along."""

    port: int
    headers: Mapping[str, str] = field(default_factory=dict)

    def get(self, path: str) -> Answer:
        """Ask for a page."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: Json) -> Answer:
        """Ask, and return the whole answer."""
        return self._ask("POST", path, body)

    def stream(self, path: str, body: Json) -> Stream:
        """Ask for a stream."""
        return Stream(*self._send("POST", path, {**body, "stream": True}))

    def _ask(self, method: str, path: str, body: Json | None) -> Answer:
        connection, response = self._send(method, path, body)
        with closing(connection), response:
            raw = response.read()
        try:
            said = json.loads(raw)
        except ValueError:
            said = raw.decode(errors="replace")
        return Answer(response.status, _lower(response), said)

    def _send(
        self, method: str, path: str, body: Json | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ASK_S)
        headers = {"content-type": "application/json", **self.headers}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            return connection, connection.getresponse()
        except BaseException:
            # It does so by itself only where the other side has closed it.
            connection.close()
            raise


class Stream:
    """A stream of events as it comes; each is read from its line `data:`."""

    def __init__(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        self._connection = connection
        self._response = response
        self.status = response.status
        self.headers = _lower(response)

    def __iter__(self) -> Iterator[Json]:
        """Yield events until the stream ends; what is no stream is one event with the answer."""
        try:
            if self.status != 200:
                yield {"error": self._response.read().decode(errors="replace")}
                return
            for line in self._response:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield json.loads(line[5:])
        finally:
            self.close()

    def close(self) -> None:
        """Leave before the end."""
        # The connection has let go of an answer after which it is closed.
        self._response.close()
        self._connection.close()


def _lower(response: http.client.HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}


@dataclass
class Fleet:
    """A hub, a gateway and nodes, each a process group of its own."""

    folder: Path
    model: CountingModel
    hub_port: int = 0
    port: int = 0
    engine_ports: dict[str, int] = field(default_factory=dict)
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        """Start hub and gateway."""
        self.hub_port, self.port = free_port(), free_port()
        self._start("hub", [*_ATOLL, "hub", "--open", "--listen", f"127.0.0.1:{self.hub_port}"])
        self._start(
            "gateway",
            [
                *(*_ATOLL, "gateway", "--fabric", self.fabric, "--open", "--no-affinity"),
                # Everybody in turn: who serves does not depend on who was fast before.
                *("--policy", "iwrr"),
                *("--port", str(self.port), "--log", str(self.folder / "requests.jsonl")),
            ],
        )
        self.wait_for("the gateway answers", lambda: _answers(self.port))

    @property
    def fabric(self) -> str:
        """What members are told of the fabric."""
        return f"open://127.0.0.1:{self.hub_port}"

    def door(self, node: str | None = None) -> Door:
        """Return the gateway, for one node alone or for whichever it chooses."""
        return Door(self.port, {"x-atoll-node": node} if node else {})

    def direct(self, node: str) -> Door:
        """Return the engine of a node, without the gateway."""
        return Door(self.engine_ports[node])

    def join(self, engine: RealEngine) -> None:
        """Start an engine under `atoll join`, as a node of its name."""
        command, environment = _command(engine, self.model)
        port = self.engine_ports[engine.name] = free_port()
        arguments = [
            *(*_ATOLL, "join", "--fabric", self.fabric, "--name", engine.name),
            *("--ready", f"{READY_S:.0f}s", "--port", str(port), "--", *command),
        ]
        self._start(engine.name, arguments, {**engine.environment, **environment})

    def join_atoll(self, name: str = "atoll") -> None:
        """Have a node join that waits, and assign it Atoll's own engine."""
        self._start(
            name,
            [
                *(*_ATOLL, "join", "--fabric", self.fabric, "--name", name),
                *("--models", str(self.model.folder.parent)),
            ],
        )
        self.wait_for(f"{name} is there", lambda: any(n["name"] == name for n in self.nodes()))
        self.run(
            *("assign", name, "--fabric", self.fabric, "--engine", "atoll"),
            *("--model", str(self.model.folder), "--name", MODEL, "--wait", f"{READY_S:.0f}s"),
            # Room for 4,096 tokens, so that something may have to wait.
            *("--arg", "kv-mib=16"),
        )

    def wait_until_serving(self, *names: str) -> None:
        """Wait until these nodes serve, and the gateway uses them."""

        def serving() -> bool:
            there = {node["name"] for node in self.nodes() if node["state"] == "serving"}
            return there >= set(names) and all(self._passes(name) for name in names)

        self.wait_for(f"{', '.join(names)} serve", serving)

    def _passes(self, name: str) -> bool:
        body = {"model": MODEL, "prompt": "Count", "max_tokens": 1}
        return self.door(name).post("/v1/completions", body).status == 200

    def nodes(self) -> list[Json]:
        """Return what the registry says."""
        found: list[Json] = json.loads(self.run("nodes", "--fabric", self.fabric, "--json"))
        return found

    def kill(self, name: str) -> None:
        """End a node, its engine included, as a power cut would."""
        process = self._processes.pop(name)
        for group in groups_below(process.pid):
            os.killpg(group, signal.SIGKILL)
        process.wait()

    def run(self, *arguments: str) -> str:
        """Run an `atoll` command and return what it printed."""
        done = subprocess.run(
            [*_ATOLL, *arguments], check=False, capture_output=True, text=True, env=self._env({})
        )
        assert done.returncode == 0, f"{done.stderr}\n{self.logs()}"
        return done.stdout

    def wait_for(self, what: str, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`; shows the logs if that never comes."""
        until_s = time.monotonic() + READY_S
        while not ready():
            dead = [n for n, p in self._processes.items() if p.poll() is not None]
            assert not dead, f"{dead[0]} ended:\n{self.logs()}"
            assert time.monotonic() < until_s, f"never: {what}\n{self.logs()}"
            time.sleep(0.5)

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.rglob("*.log"))
        )

    def stop(self) -> None:
        """End everything: nodes first, so that engines end with them."""
        for name, process in reversed(self._processes.items()):
            groups = groups_below(process.pid)
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                sys.stderr.write(f"{name} had to be killed\n")
            for group in groups:
                try:
                    os.killpg(group, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()

    def _start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                list(arguments),
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self._env(environment or {}),
                start_new_session=True,
            )

    def _env(self, environment: Mapping[str, str]) -> dict[str, str]:
        paths = [str(ROOT / "src"), environment.get("PYTHONPATH", "")]
        return {
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "ATOLL_STATE": str(self.folder / "state"),
            "COLUMNS": "120",
        }


def _command(engine: RealEngine, model: CountingModel) -> tuple[list[str], dict[str, str]]:
    """Return the command of an engine and what its environment needs."""
    if engine.name == "llamacpp":
        module = (engine.python, "-m", "atoll.engines.llamacpp")
        return [*module, "--model", str(model.gguf), "--alias", MODEL, "--port", "{port}"], {}
    if engine.name == "sglang":
        return [
            *(engine.python, "-m", "sglang.launch_server", "--model-path", str(model.folder)),
            *("--host", "127.0.0.1", "--port", "{port}", "--served-model-name", MODEL),
            *("--enable-metrics", "--tool-call-parser", "qwen25", "--mem-fraction-static", "0.3"),
        ], {}
    return [
        *(str(Path(engine.python).with_name("vllm")), "serve", str(model.folder)),
        *("--host", "127.0.0.1", "--port", "{port}", "--served-model-name", MODEL),
        *("--max-model-len", str(CONTEXT), "--max-num-seqs", "4", "--dtype", "float32"),
        *("--enforce-eager", "--enable-prompt-embeds", "--enable-auto-tool-choice"),
        *("--tool-call-parser", "hermes"),
    ], {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def groups_below(pid: int) -> list[int]:
    """Return the process groups of a process and all below it, the deepest first."""
    children: dict[int, list[int]] = {}
    groups: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(stat.parent.name)
        children.setdefault(int(fields[1]), []).append(number)
        groups[number] = int(fields[2])
    found, left = [], [pid]
    while left:
        number = left.pop()
        left += children.get(number, [])
        if number in groups:
            found.append(groups[number])
    return list(dict.fromkeys(reversed(found)))


def _answers(port: int) -> bool:
    try:
        return Door(port).get("/health").status == 200
    except OSError:
        return False


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
