"""What is attacked: gateways as users run them, a proxy, engines, and a real instance of the tiny model.

Two gateways run as processes: `open` asks for no keys, `keyed` has accounts on SQLite and small limits, so
that floods reach them. Behind both are two fake engines, backends that misbehave and, where asked for, an
instance of the tiny model with two nodes. `proxied` is a plain reverse proxy before `open`. `unattacked` is
a third gateway with an engine of its own: what its client waits, it waits for the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import ROOT
from benchmarks.serving.fake_engine import MODEL
from benchmarks.serving.gateway_peers import CACHE, Proxy, UnavailableError, nginx
from tests.slow.attacks.attacks_engine import MIRROR, NARROW, POISON, WAYS, HostileBackend
from tests.slow.attacks.attacks_wire import HOST, head_of, talk
from tests.slow.processes import ask_atoll, dies_with_parent
from tests.slow.tcp_server import Relay

if TYPE_CHECKING:
    from atoll.runtime.local.local_fleet import LocalFleet

MIB = 2**20
TINY = "tiny"
ECHO = "echo"
HOSTILE = (*WAYS, "early")
UNATTACKED = "unattacked"
BODY_BYTES = 32 * MIB
ANSWER_BYTES = 64 * MIB
BUFFERED_BYTES = {"open": 128 * MIB, "keyed": 64 * MIB}
"""What bodies of requests may hold of each gateway together."""
CONNECTIONS = {"open": 4000, "keyed": 1500}
REQUESTS = 64
"""Running at `keyed` at the same time."""
NARROW_INFLIGHT = 4
HEALTH_S = 5.0
DEADLINES = {
    "header_s": 3.0,
    "body_s": 8.0,
    "idle_s": 20.0,
    "client_s": 3.0,
    "first_token_s": 5.0,
    "between_tokens_s": 3.0,
    "answer_s": 5.0,
    "retry_s": 1.0,
    "resume_s": 2.0,
}
"""Shorter than by default, in seconds: what is slow on purpose shall not make the run slow."""
_START_S = 120.0
_EXPIRES_S = 15.0
_LOOK_S = 0.05


@dataclass
class Server:
    """A process that must neither end nor grow."""

    name: str
    pid: int
    idle_bytes: int = 0

    def resident(self) -> int:
        """Return the bytes it has in memory; 0: it is gone."""
        return _memory(self.pid, "VmRSS:")

    def peak(self) -> int:
        """Return the most it had in memory since `forget_peak`."""
        return _memory(self.pid, "VmHWM:")

    def forget_peak(self) -> None:
        """Begin to measure the peak anew."""
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")


class PlainProxy(Relay):
    """A reverse proxy that says who asked first on a connection, and passes all else on as it is."""

    async def begin(self, reader: asyncio.StreamReader, there: asyncio.StreamWriter) -> None:
        """Add X-Forwarded-For to the first request."""
        there.write(await reader.readuntil(b"\r\n") + b"x-forwarded-for: 203.0.113.7\r\n")

    def end(self, writer: asyncio.StreamWriter) -> None:
        """Pass on half of a close."""
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()


def _memory(pid: int, field: str) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


class AttackedSite:
    """All processes of the check, in a folder."""

    def __init__(self, folder: Path, *, with_model: bool) -> None:
        self.folder = folder
        self.ports: dict[str, int] = {}
        self.key = self.viewer_key = self.expired_key = ""
        self.expired_s = 0.0
        """When, on the monotonic clock, that key has expired for certain."""
        self.servers: dict[str, Server] = {}
        self.hostile: dict[str, HostileBackend] = {}
        self.mirror = HostileBackend(None)
        self.proxy_kind = ""
        self._with_model = with_model
        self._fleet: LocalFleet | None = None
        self._home: Path | None = None
        self._processes: list[Process] = []
        self._watcher: Process | None = None
        self._proxy: PlainProxy | None = None
        self._nginx: Proxy | None = None
        self._pids: dict[str, int | None] = {}

    async def open(self) -> None:
        """Start everything."""
        backends = await self._start_engines()
        if self._with_model:
            backends.append(await self._start_model())
        database = f"sqlite:///{self.folder / 'accounts.db'}"
        self.key = await self._new_key(database, "attacks")
        self.viewer_key = await self._new_key(database, "looks", "--role", "viewer")
        expires = ("--expires", f"{_EXPIRES_S:.0f}s")
        self.expired_key = await self._new_key(database, "old", *expires)
        self.expired_s = time.monotonic() + _EXPIRES_S
        accounts = ("--db", database, "--journal", str(self.folder / "journal"))
        await asyncio.gather(
            self._start_gateway("open", backends, "--open"),
            self._start_gateway("keyed", backends, *accounts),
            self._start_gateway(UNATTACKED, [await self._start_engine("fake-2")], "--open"),
        )
        await self._start_proxy()

    async def _new_key(self, database: str, name: str, *options: str) -> str:
        runtime = {"XDG_RUNTIME_DIR": str(self.folder)}
        words = ("keys", "create", name, *options, "--db", database, "--json")
        return str((await ask_atoll(*words, **runtime))["key"])

    async def _start_engines(self) -> list[dict[str, Any]]:
        backends = [await self._start_engine(f"fake-{number}") for number in range(2)]
        self.hostile = {way: HostileBackend(way) for way in HOSTILE}
        await self.mirror.open()
        backends.append(_backend(MIRROR, self.mirror.port, [MIRROR], services=[MIRROR]))
        narrow = _backend(NARROW, self.mirror.port, [NARROW])
        backends.append(narrow | {"max_inflight": NARROW_INFLIGHT})
        for way, backend in self.hostile.items():
            await backend.open()
            backends.append(_backend(way, backend.port, [f"hostile-{way}"]))
        port = self.hostile["resets"].port
        backends += [_backend(f"{POISON}-{number}", port, [POISON]) for number in range(4)]
        return backends

    async def _start_engine(self, name: str) -> dict[str, Any]:
        process = await self._start(
            "-m", "benchmarks.fake_engine", "--step-ms", "20", stdout=PIPE, log="engine"
        )
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), _START_S))
        return _backend(name, port, [MODEL, "speech", "image"], services=[ECHO])

    async def _start_model(self) -> dict[str, Any]:
        """Start one instance of the tiny model, cut in two."""
        from atoll.runtime.endpoints.endpoint import RunDirectory
        from atoll.runtime.gateway import GatewaySettings
        from atoll.runtime.local.fleet_state import new_home
        from atoll.runtime.local.local_endpoints import LocalModel, LocalOptions, build
        from atoll.runtime.local.local_fleet import LivenessTracker, LocalFleet
        from tests.slow.failover.chaos_fleet import SERVICE, tiny_plan

        model = await self._tiny_model()
        plan = tiny_plan()
        plan = plan.model_copy(update={"instances": plan.instances[:1], "routes": plan.routes[:1]})
        home, liveness = RunDirectory(new_home()), LivenessTracker()
        self._home = home.folder
        options = LocalOptions(kv_bytes=8 * MIB, dead_after_s=3.0, silent_s=10.0)
        named = build(plan, {SERVICE: LocalModel(str(model), model)}, home, liveness, options)
        settings = GatewaySettings(port=0)
        self._fleet = LocalFleet("attacks", named, home, settings, liveness, warm=(str(model),))
        await self._fleet.start()
        port = int(named[0].endpoint.backend.url.rpartition(":")[2])
        self.ports["instance"] = port
        for name, process in self._fleet.agent.processes.items():
            self._pids[name] = process.pid
            assert process.pid is not None
            self.servers[name] = Server(name, process.pid)
        return _backend("tiny-a", port, [TINY]) | {"kind": "atoll"}

    async def _tiny_model(self) -> Path:
        """Return the folder of the tiny model, written once by a process of its own."""
        text = (ROOT / "tests" / "tiny_model.py").read_bytes()
        folder = CACHE / f"tiny-{hashlib.sha256(text).hexdigest()[:12]}"
        if not (folder / "written").exists():
            code = (
                "import sys; from pathlib import Path; from tests.tiny_model import "
                "write_tiny_model; write_tiny_model(Path(sys.argv[1]))"
            )
            process = await self._start("-c", code, str(folder), stdout=DEVNULL, log="tiny")
            if await process.wait():
                raise RuntimeError((self.folder / "tiny.log").read_text()[-2000:])
            (folder / "written").touch()
        return folder

    async def _start_gateway(self, name: str, backends: list[dict[str, Any]], *more: str) -> None:
        limits = {
            "buffered_bytes": BUFFERED_BYTES.get(name, BUFFERED_BYTES["open"]),
            "connections": CONNECTIONS.get(name, CONNECTIONS["open"]),
            "body_bytes": BODY_BYTES,
            "answer_bytes": ANSWER_BYTES,
        }
        if name == "keyed":
            limits["requests"] = REQUESTS
        config = {
            "deadlines": DEADLINES,
            "limits": limits,
            "queue_s": 1.0,
            "health": {"interval_s": 1.0, "timeout_s": 5.0, "failures": 3},
            "outliers": {"base_ejection_s": 0.5, "max_ejection_s": 0.5},
            "backends": backends,
        }
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(config))
        log = ("--log", str(self.folder / f"{name}.jsonl"))
        process = await self._start(
            "-m", "atoll", "gateway", "--config", str(path), "--port", "0", "--json",
            *log, *more, stdout=PIPE, log=name,
        )  # fmt: skip
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), _START_S)
        if not line:
            raise RuntimeError(f"{name}: {(self.folder / f'{name}.log').read_text()[-2000:]}")
        self.ports[name] = int(json.loads(line)["url"].rpartition(":")[2])
        self.servers[name] = Server(name, process.pid)

    async def _start_proxy(self) -> None:
        """Start nginx where there is one, else a proxy of a few lines."""
        try:
            home = self.folder / "nginx"
            home.mkdir()
            self._nginx = await asyncio.to_thread(nginx, home, self.ports["open"])
            self.ports["proxied"], self.proxy_kind = self._nginx.port, "nginx"
        except UnavailableError:
            self._proxy = PlainProxy(self.ports["open"])
            await self._proxy.open()
            self.ports["proxied"], self.proxy_kind = self._proxy.port, "plain"

    async def _start(self, *arguments: str, stdout: int, log: str, stdin: int = DEVNULL) -> Process:
        with (self.folder / f"{log}.log").open("ab") as sink:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                cwd=ROOT,
                stdin=stdin,
                stdout=stdout,
                stderr=sink,
                env=os.environ | {"XDG_RUNTIME_DIR": str(self.folder)},
                preexec_fn=dies_with_parent,
            )
        self._processes.append(process)
        return process

    async def watch(self, gaps: Path) -> None:
        """Start the well-behaved clients; what they wait is told in a file."""
        gaps.touch()
        clients = [
            f"open={self.ports['open']},{MODEL}",
            f"keyed={self.ports['keyed']},{MODEL},{self.key}",
            f"{UNATTACKED}={self.ports[UNATTACKED]},{MODEL}",
        ]
        if self._with_model:
            clients.append(f"model={self.ports['open']},{TINY}")
        self._watcher = await self._start(
            "-m", "benchmarks.attacks_watcher", str(gaps), *clients,
            stdout=DEVNULL, stdin=PIPE, log="watcher",
        )  # fmt: skip

    async def warm_up(self) -> None:
        """Ask a little of everything, so that what is loaded late is there, and note the memory of that."""
        from tests.slow.attacks.attacks_wire import chat_body, request_of

        models = [MODEL, MIRROR, *([TINY] if self._with_model else [])]
        for name, key in (("open", None), ("keyed", self.key)):
            for model in models:
                for content in ("Hello", "Hello " * 100):
                    for _ in range(10):
                        sent = request_of(chat_body(model, content), key=key)
                        await talk(self.ports[name], [sent], quiet_s=0.0)
        await asyncio.sleep(0.5)
        self.note_idle()

    def note_idle(self) -> None:
        """Take what every server has in memory now as what it needs when nothing happens."""
        for server in self.servers.values():
            server.idle_bytes = server.resident()

    async def down(self) -> list[str]:
        """Return which servers ended, were restarted, or do not say in time that they are well."""
        wrong = []
        for name, server in self.servers.items():
            if not server.resident():
                wrong.append(f"{name} ended")
        if self._fleet is not None:
            for name, process in self._fleet.agent.processes.items():
                if process.pid != self._pids[name]:
                    wrong.append(f"{name} was restarted ({process.reason})")
                    self._pids[name] = process.pid
                    if process.pid is not None:
                        self.servers[name] = Server(
                            name, process.pid, self.servers[name].idle_bytes
                        )
        names = ["open", "keyed", *(["instance"] if self._with_model else [])]
        replies = await asyncio.gather(*(self._health(name) for name in names))
        return wrong + [why for why in replies if why]

    async def _health(self, name: str) -> str:
        reply = await talk(
            self.ports[name], [head_of("GET", "/health") + b"\r\n"], read_s=HEALTH_S, quiet_s=0.0
        )
        return "" if reply.status == 200 else f"/health of {name}: {reply.describe()[:120]}"

    async def released(self, within_s: float) -> str:
        """Wait until the mirror answers nobody any more; return how many it does, if it still does."""
        until_s = time.monotonic() + within_s
        await asyncio.sleep(0.3)
        while self.mirror.running and time.monotonic() < until_s:
            await asyncio.sleep(0.1)
        left = self.mirror.running
        return f"{left} requests are still at the backend" if left else ""

    async def close(self) -> None:
        """End everything."""
        if self._fleet is not None:
            await self._fleet.stop(2.0)
        if self._nginx is not None:
            await asyncio.to_thread(self._nginx.stop)
        if self._proxy is not None:
            self._proxy.close()
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
        await asyncio.gather(*(process.wait() for process in self._processes))
        for backend in (self.mirror, *self.hostile.values()):
            backend.close()
        if self._home is not None:
            from atoll.runtime.local.fleet_state import remove_home

            remove_home(self._home)


def _backend(
    name: str, port: int, models: list[str], services: list[str] | None = None
) -> dict[str, Any]:
    made: dict[str, Any] = {"id": name, "url": f"http://{HOST}:{port}", "models": models}
    return made | ({"services": services} if services else {}) | {"kind": "vllm"}
