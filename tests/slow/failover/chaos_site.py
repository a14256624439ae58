"""The site of the check of kills: replicas of a tiny model, hubs, members, two gateways, all supervised.

    two instances, three nodes each, forked from a fork server, every process with its supervisor
    two members (`atoll join`), which offer one instance each
    two hubs of a fabric, by which members and gateways meet
    two gateways with one database of keys and usage, and one journal

Whatever ends is started again by the same agent that `atoll serve` has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.deploy.local.daemon import process_start
from atoll.runtime.http.listen_address import free_ports
from atoll.runtime.supervise.agent import Agent, ProcessSpec, SupervisedProcess
from atoll.runtime.supervise.fork_client import ForkServer
from atoll.runtime.supervise.supervised_process import Command
from atoll.runtime.supervise.supervision import ProcessState, RestartLimits
from atoll.runtime.supervise.supervisor import descendants
from tests.slow.failover.chaos_fleet import SERVICE, tiny_plan
from tests.slow.processes import ask_atoll

HUBS = GATEWAYS = 2
RESUME_S = 30.0
"""How long a gateway looks for another replica: the limit after which there may be an error."""
_SUBREAPER = 36
_LIMITS = RestartLimits(ready_s=60.0, unwell=3, term_s=15.0)
_GATEWAY = {
    "deadlines": {
        "first_token_s": 5.0,
        "between_tokens_s": 4.0,
        "retry_s": RESUME_S,
        "resume_s": RESUME_S,
    },
    "queue_s": RESUME_S,
    "access_log": False,
}


@dataclass(slots=True)
class PortProbe:
    """Ready is a process that listens at a port of this machine."""

    port: int
    every_s: float = 30.0

    def reset(self) -> None:
        """Do nothing: each look stands for itself."""

    async def check(self, pid: int) -> str | None:
        """Connect; returns what is wrong, or None."""
        del pid
        try:
            _, writer = await asyncio.wait_for(
                asyncio.open_connection("127.0.0.1", self.port), timeout=5.0
            )
        except (OSError, TimeoutError) as error:
            await asyncio.sleep(0.05)
            return str(error) or "no answer"
        writer.transport.abort()
        return None


@dataclass(slots=True)
class WordProbe:
    """Ready is a process that has said a word since it was started."""

    log: Path
    word: bytes
    every_s: float = 2.0
    _from: int = 0
    _heard: bool = False

    def reset(self) -> None:
        """Forget what was said before."""
        self._heard = False
        self._from = self.log.stat().st_size if self.log.exists() else 0

    async def check(self, pid: int) -> str | None:
        """Look for the word; returns what is wrong, or None."""
        del pid
        if not self._heard and self.log.exists():
            with self.log.open("rb") as stream:
                stream.seek(self._from)
                self._heard = self.word in stream.read()
        return None if self._heard else "silent"


class ReplicaClock:
    """For how long there was no replica, and when."""

    def __init__(self) -> None:
        self._since_s: float | None = time.monotonic()
        self._spans: list[tuple[float, float]] = []

    def note(self, *, any_up: bool) -> None:
        """Take in whether any replica is complete now."""
        now_s = time.monotonic()
        if any_up and self._since_s is not None:
            self._spans.append((self._since_s, now_s))
            self._since_s = None
        elif not any_up and self._since_s is None:
            self._since_s = now_s

    def longest_s(self, begun_s: float, ended_s: float) -> float:
        """Return the longest time within a span in which no replica was complete, in seconds."""
        spans = [*self._spans]
        if self._since_s is not None:
            spans.append((self._since_s, time.monotonic()))
        cut = [min(end, ended_s) - max(start, begun_s) for start, end in spans]
        return max([0.0, *cut])


class ChaosSite:
    """The processes, in a folder; `strike` kills one of a kind."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.agent = Agent(self._changed)
        self.clock = ReplicaClock()
        self.key = ""
        self.killed_s: dict[str, list[float]] = {}
        """When each process was killed, by its name."""
        self.started: set[tuple[int, str]] = set()
        """Every process ever seen, with when it was born."""
        self._fostered: set[int] = set()
        self._model = model
        self._logs = folder / "logs"
        self._logs.mkdir()
        self._hub_ports = free_ports(HUBS)
        self.ports = free_ports(GATEWAYS)
        self._database = f"sqlite:///{folder / 'accounts.db'}"
        self._replicas: dict[str, tuple[str, ...]] = {}

    async def open(self) -> None:
        """Start everything and wait until it serves."""
        from atoll.fabric.identity.authority import Authority
        from atoll.runtime.endpoints.endpoint import RunDirectory
        from atoll.runtime.local.fleet_state import new_home
        from atoll.runtime.local.local_endpoints import LocalModel, LocalOptions, build
        from atoll.runtime.local.local_fleet import LivenessTracker

        # Whatever loses its parent is ours, so that none is missed at the end.
        _adopt_orphans()
        authority = Authority.create(
            self.folder / "fabric", "chaos", [f"127.0.0.1:{p}" for p in self._hub_ports], slots=16
        )
        self.home = RunDirectory(new_home())
        made = build(
            tiny_plan(),
            {SERVICE: LocalModel(str(self._model), self._model)},
            self.home,
            LivenessTracker(),
            LocalOptions(kv_bytes=8 * 2**20, dead_after_s=1.5, silent_s=5.0),
        )
        loading = asyncio.create_task(ForkServer.start([str(self._model)]))
        for number, port in enumerate(self._hub_ports):
            token = self.folder / "fabric" / f"hub-h{number}.token"
            hub = ("hub", f"@{token}", "--listen", f"127.0.0.1:{port}")
            self.agent.add(self._atoll(f"hub-{number}", hub, PortProbe(port)))
        created = await ask_atoll("keys", "create", "chaos", "--db", self._database, "--json")
        self.key = str(created["key"])
        self.agent.fork_server = await loading
        for each in made:
            for spec in each.endpoint.processes:
                self.agent.add(spec)
        await self.agent.ready(list(self.agent.processes))
        for each in made:
            backend = each.endpoint.backend
            token = self._token(
                f"member-{backend.id}", authority.issue(backend.id, "lab", "worker")
            )
            name = f"member-{backend.id}"
            join = ("join", "--fabric", f"@{token}", "--url", backend.url, "--name", backend.id)
            probe = WordProbe(self._log(name), b"serving ")
            self.agent.add(self._atoll(name, (*join, "--health-interval", "1s"), probe))
            nodes = tuple(spec.name for spec in each.endpoint.processes)
            self._replicas[backend.id] = (*nodes, name)
        config = self.folder / "gateway.json"
        config.write_text(
            json.dumps(_GATEWAY | {"streams": {"folder": str(self.folder / "streams")}})
        )
        for number, port in enumerate(self.ports):
            name = f"gateway-{number}"
            token = self._token(name, authority.issue(name, "lab", "gateway"))
            gateway = (
                *("gateway", "--fabric", f"@{token}", "--db", self._database, "--port", str(port)),
                *("--name", name, "--journal", str(self.folder / "journal")),
                *("--config", str(config), "--log", str(self._logs / f"{name}.jsonl")),
            )
            self.agent.add(self._atoll(name, gateway, PortProbe(port)))
        await self.agent.ready(list(self.agent.processes))

    def _atoll(
        self, name: str, arguments: tuple[str, ...], probe: PortProbe | WordProbe
    ) -> ProcessSpec:
        command = Command(
            (sys.executable, "-m", "atoll", *arguments),
            self._log(name),
            {"XDG_RUNTIME_DIR": str(self.home.folder)},
        )
        return ProcessSpec(name, command, probe, _LIMITS)

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _token(self, name: str, token: Any) -> Path:
        path = self.folder / f"{name}.token"
        path.touch(mode=0o600)
        path.write_text(token.pack())
        return path

    def _changed(self, process: SupervisedProcess) -> None:
        del process
        self.clock.note(any_up=any(self._is_whole(each) for each in self._replicas))

    def _is_whole(self, replica: str) -> bool:
        return all(self.is_ready(name) for name in self._replicas[replica])

    def is_ready(self, name: str) -> bool:
        """Whether a process is ready."""
        process = self.agent.processes.get(name)
        return process is not None and process.state is ProcessState.READY

    # Blows

    def victims(self, kind: str) -> list[str]:
        """Return the processes of a kind that may be killed now.

        Of hubs and gateways one is left: a fabric without hubs, or a site without a gateway, serves nobody.
        """
        if kind == "fork_server":
            # Three times out of four it is the one that forks, else its spare.
            fork_server = self.agent.fork_server
            return (
                [*["fork_server"] * 3, "spare"]
                if fork_server is not None and fork_server.pid
                else []
            )
        names = [name for name in self.agent.processes if self._kind(name) == kind]
        if kind == "supervisor":
            names = [name for name in self.agent.processes if self._kind(name) in _GUARDED]
        elif kind in ("hub", "gateway"):
            names = names if all(self.is_ready(name) for name in names) else []
        return [name for name in names if self.agent.processes[name].pid]

    def workers(self) -> list[int]:
        """Return the processes that serve: nodes, instances, members, hubs, gateways; no supervisors."""
        return [p.pid for p in self.agent.processes.values() if p.pid]

    def gateway_logs(self) -> list[Path]:
        """Return what gateways have written down."""
        return sorted(self._logs.glob("gateway-*.jsonl"))

    @staticmethod
    def _kind(name: str) -> str:
        first = name.partition("-")[0]
        if first in ("hub", "gateway", "member"):
            return first
        return "node" if "/" in name else "instance"

    def strike(self, kind: str, name: str) -> bool:
        """Kill a process; returns whether there was one."""
        if kind == "fork_server":
            pid = self.agent.fork_server.pid if self.agent.fork_server is not None else None
            if pid and name == "spare":
                pid = _spare_of(pid)
        else:
            pid = self.agent.processes[name].pid
        if pid and kind == "supervisor":
            pid = _parent(pid)
        if not pid or pid == os.getpid():
            return False
        self.watch()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.killed_s.setdefault(name, []).append(time.monotonic())
        return True

    def was_killed(self, name: str, begun_s: float, ended_s: float) -> bool:
        """Whether a process was killed within a span of time."""
        return any(begun_s <= at_s <= ended_s for at_s in self.killed_s.get(name, ()))

    def watch(self) -> None:
        """Note every process there is, so that none is forgotten."""
        for pid in descendants(os.getpid()):
            parent = _parent(pid)
            if born := process_start(pid):
                self.started.add((pid, born))
                if parent != os.getpid():
                    self._fostered.add(pid)
            elif parent == os.getpid() and pid in self._fostered:
                # It was ours only after its parent had been killed: nobody else waits for it.
                self._fostered.discard(pid)
                with contextlib.suppress(OSError):
                    os.waitpid(pid, os.WNOHANG)

    # The end

    async def heal(self, max_s: float = 180.0) -> None:
        """Wait until all is ready again: a gateway writes down what it died with when it starts again."""
        async with asyncio.timeout(max_s):
            await self.agent.ready(list(self.agent.processes))

    async def close(self) -> None:
        """Stop gateways first, so that they write their books, then all else."""
        self.watch()
        for kind in ("gateway", "member", "instance"):
            names = [name for name in self.agent.processes if self._kind(name) == kind]
            await self.agent.stop(names)
        await self.agent.close()

    def leftovers(self) -> int:
        """Return how many of all processes ever started still run."""
        return sum(process_start(pid) == born for pid, born in self.started)

    async def operations(self) -> list[dict[str, Any]]:
        """Return the ledger: a row for every request."""
        rows = await ask_atoll("usage", "--by", "operation", "--db", self._database, "--json")
        return list(rows)


_GUARDED = ("node", "instance")


def _adopt_orphans() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int) -> int:
    fields = _fields(pid)
    return int(fields[1]) if fields else 0


def _spare_of(fork_server: int) -> int:
    """Return the spare of a fork server: of all that it has forked, what is still of its group."""
    same = (
        pid for pid in descendants(fork_server) if _fields(pid)[2:3] == _fields(fork_server)[2:3]
    )
    return next(same, 0)
