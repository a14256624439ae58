"""The processes of the check of churn: hubs, nodes, a gateway with accounts. All die with this one."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from atoll.runtime.http.listen_address import free_ports
from benchmarks.report import ROOT
from tests.slow.processes import ask_atoll, dies_with_parent

HUBS = 2
PROVIDERS = ("alps", "basel", "como")
"""Each has one certificate, which all of its nodes use."""
KINDS = ("vllm", "atoll", "sglang")
_START_S = 30.0
_LOOK_S = 0.02


async def _python(*arguments: str | Path, output: Path) -> Process:
    """Start Python in the repository; what it says goes to a file."""
    with output.open("wb") as sink:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *map(str, arguments),
            cwd=ROOT,
            stdin=DEVNULL,
            stdout=sink,
            stderr=STDOUT,
            preexec_fn=dies_with_parent,
        )


async def _said(process: Process, what: str, output: Path) -> None:
    """Wait until a process has said something; it has half a minute for it."""
    for _ in range(round(_START_S / _LOOK_S)):
        text = output.read_text(errors="replace")
        if what in text:
            return
        if process.returncode is not None:
            break
        await asyncio.sleep(_LOOK_S)
    raise RuntimeError(f"a process did not say {what!r}: {output.read_text()[-2000:]}")


def kill(process: Process) -> None:
    """Kill a process, whatever state it is in."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()


class Ledger(NamedTuple):
    """What the database says."""

    requests: int
    tokens: int
    """Of answers, by requests."""
    attempted: int
    """The same, by the nodes that gave them."""
    moved: int
    """Requests whose answer came from more than one node."""


NO_LEDGER = Ledger(0, 0, 0, 0)


@dataclass
class Node:
    """A node as the check knows it."""

    process: Process
    kind: str
    stopped: bool = False


class Site:
    """A fabric of two hubs in a folder, and the processes of it."""

    def __init__(self, folder: Path, width: int, step_s: float) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.logs.mkdir()
        self._width = width
        self._step_s = step_s
        self._ports = free_ports(HUBS)
        self._hubs: list[Process] = []
        self._all: list[Process] = []
        self._started = 0
        self._gateway: Process | None = None
        self._database = f"sqlite:///{folder / 'accounts.db'}"

    async def open(self) -> None:
        """Make certificates and start the hubs."""
        from atoll.fabric.identity.authority import Authority

        authority = Authority.create(
            self.folder / "fabric", "churn", [f"127.0.0.1:{port}" for port in self._ports], slots=16
        )
        for provider in PROVIDERS:
            self._token(provider).write_text(authority.issue(provider, provider, "worker").pack())
        self._token("gateway").write_text(authority.issue("gate", "churn", "gateway").pack())
        self._hubs = [await self._start_hub(number) for number in range(HUBS)]

    async def _start(self, *arguments: str | Path, output: Path) -> Process:
        process = await _python(*arguments, output=output)
        self._all.append(process)
        return process

    def _token(self, name: str) -> Path:
        return self.folder / f"{name}.token"

    async def _start_hub(self, number: int) -> Process:
        output = self.logs / f"hub-{number}.log"
        token = self.folder / "fabric" / f"hub-h{number}.token"
        process = await self._start(
            "-m", "atoll", "hub", f"@{token}",
            "--listen", f"127.0.0.1:{self._ports[number]}",
            output=output,
        )  # fmt: skip
        await _said(process, " listens at ", output)
        return process

    async def strike_hub(self, number: int, away_s: float) -> None:
        """Kill a hub and bring it back after a while."""
        kill(self._hubs[number])
        await self._hubs[number].wait()
        await asyncio.sleep(away_s)
        self._hubs[number] = await self._start_hub(number)

    async def start_node(self) -> Node:
        """Start a node and wait until it serves."""
        number, self._started = self._started, self._started + 1
        kind = KINDS[number % len(KINDS)]
        output = self.logs / f"node-{number}.log"
        process = await self._start(
            "-m", "benchmarks.churn_node", f"@{self._token(PROVIDERS[number % len(PROVIDERS)])}",
            "--kind", kind, "--width", str(self._width), "--step-ms", str(self._step_s * 1e3),
            output=output,
        )  # fmt: skip
        await _said(process, "ready", output)
        return Node(process, kind)

    async def start_gateway(self) -> tuple[int, str]:
        """Start the gateway; return its port and a key for it."""
        output = self.logs / "gateway.log"
        created = await ask_atoll("keys", "create", "churn", "--db", self._database, "--json")
        key = str(created["key"])
        (port,) = free_ports(1)
        self._gateway = await self._start(
            "-m", "atoll", "gateway", "--fabric", f"@{self._token('gateway')}",
            "--db", self._database, "--port", str(port),
            "--log", self.logs / "gateway.jsonl", "--journal", self.folder / "journal", "--json",
            output=output,
        )  # fmt: skip
        await _said(self._gateway, '"url"', output)
        return port, key

    async def stop_gateway(self) -> None:
        """Let the gateway write its books and end."""
        if self._gateway is not None:
            self._gateway.terminate()
            await asyncio.wait_for(self._gateway.wait(), _START_S)

    async def ledger(self) -> Ledger:
        """Return what the database says that clients got."""
        operations, attempts = [
            await ask_atoll("usage", "--by", by, "--db", self._database, "--json")
            for by in ("operation", "attempt")
        ]
        delivering = Counter(
            row["operation_id"] for row in attempts if row["completion_tokens"] > 0
        )
        return Ledger(
            len(operations),
            sum(row["completion_tokens"] for row in operations),
            sum(row["completion_tokens"] for row in attempts),
            sum(count > 1 for count in delivering.values()),
        )

    async def close(self) -> None:
        """Kill what is left, nodes too."""
        for process in self._all:
            kill(process)
        await asyncio.gather(*(process.wait() for process in self._all))
