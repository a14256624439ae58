"""Real members of a fabric by site, each a process: how long joins and deaths take, memory and CPU of each.

A process that has loaded the code is forked for every member, so that what they have in common is there once;
`rss` counts that in each of them, `own` (what a process has alone) does not. Nodes of a site share a token.
Figures are of the last member to know; each writes down when it did.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.fabric.identity.access import Access
from atoll.fabric.identity.authority import Authority, write_secret
from atoll.fabric.registry.peers import Peer
from atoll.fabric.registry.records import Metadata, NodeService, SessionState
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.transport.fabric_settings import FabricSettings
from benchmarks.process_cpu import read_cpu_s
from benchmarks.report import ROOT

SITES = 6
_FORK_S = 0.15
_ALL_S = 240.0
_IDLE_S = 20.0
_WATCH_S = 1.0
_LEASE_S = 20.0
"""More than usual: hundreds of processes on two cores are late, and would be cut off for it."""
_SAMPLE = 24
"""Processes whose memory is read: reading it costs time of its own."""


class Reporter:
    """A member in a process of its own, and what it says on stdout of what it sees."""

    def __init__(self, name: str, expects: int) -> None:
        self.name = name
        self.expects = expects
        self.fabric: Fabric
        self._complete = False
        self._told: dict[str, int] = {}

    def say(self, what: str, **more: object) -> None:
        line = json.dumps({"t": time.time(), "what": what, "name": self.name, **more}) + "\n"
        os.write(1, line.encode())

    def saw(self, kind: str, peer: Peer) -> None:
        if self._complete and kind in ("down", "joined"):
            self.say(kind, sid=peer.sid)
        elif not self._complete:
            self.check()

    def check(self) -> None:
        seen = sum(p.routable and p.metadata.role == "worker" for p in self.fabric.peers())
        if not self._complete and seen >= self.expects:
            self._complete = True
            self.say("complete", seen=seen)

    async def run(self, access: Access, site: str) -> None:
        role = access.identity.role
        services = (NodeService(model="m"),) if role == "worker" else ()
        metadata = Metadata(
            name=self.name, provider="", role="worker", site=site, services=services
        )
        settings = FabricSettings(connect_s=120.0, query_s=10.0, lease_s=_LEASE_S)
        self.say("dials")
        self.fabric = await Fabric.connect(
            access,
            metadata,
            state=SessionState.SERVING,
            settings=settings,
            hear_loads=role == "gateway",
        )
        self.fabric.listeners.append(self.saw)
        self.say("ready", sid=self.fabric.sid, pid=os.getpid())
        self.check()
        while True:
            await asyncio.sleep(_WATCH_S)
            told = {name: one.serving for name, one in self.fabric.sites().items()}
            if told != self._told:
                self._told = told
                self.say("told", sites=told)


def fork_members(folder: Path, count: int) -> None:
    """Fork all members, and one more for each line on stdin; ends with stdin."""
    tokens = [Access.open(f"@{folder}/site{number}.token") for number in range(SITES)]
    gateway = Access.open(f"@{folder}/gateway.token")
    gc.freeze()

    def fork(reporter: Reporter, access: Access, site: str) -> None:
        if os.fork() == 0:
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(reporter.run(access, site))
            os._exit(0)

    fork(Reporter("gateway", count), gateway, "")
    for number in range(count):
        at = number % SITES
        members = len(range(at, count, SITES))
        fork(Reporter(f"n{number}", members - 1), tokens[at], f"site{at}")
        time.sleep(_FORK_S)
    for _ in sys.stdin:
        fork(Reporter("late", 10**6), tokens[0], "site0")


class ProcessFabric:
    """Hubs and members, and the lines these have said."""

    def __init__(self, folder: Path, count: int) -> None:
        ports = [_free_port(), _free_port()]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        authority = Authority.create(folder / "fabric", "bench", addresses, by_site=True)
        for number in range(SITES):
            access = authority.issue(f"site{number}", "lab", "worker")
            write_secret(folder / f"site{number}.token", access.pack())
        write_secret(folder / "gateway.token", authority.issue("g", "lab", "gateway").pack())
        self.count = count
        self.hubs = [
            subprocess.Popen(
                (
                    *(sys.executable, "-m", "atoll", "hub"),
                    *(f"@{authority.folder}/hub-h{number}.token", "--listen", address),
                ),
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for number, address in enumerate(addresses)
        ]
        for port in ports:
            _wait_for(port)
        self.began_s = time.time()
        self.parent = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.federation.member_processes",
                str(folder),
                str(count),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.parent.stdout is not None
        os.set_blocking(self.parent.stdout.fileno(), False)
        self.lines: list[dict[str, Any]] = []
        self._rest = b""

    def read(self) -> None:
        assert self.parent.stdout is not None
        data = self._rest + (self.parent.stdout.read() or b"")
        *whole, self._rest = data.split(b"\n")
        self.lines += [json.loads(line) for line in whole]

    def until(self, true: Callable[[], bool], seconds: float = _ALL_S) -> bool:
        """Read on until something is true; returns whether it was in time."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.read()
            if true():
                return True
            time.sleep(0.1)
        return False

    def said(self, what: str, since_s: float = 0.0, **more: object) -> dict[str, dict[str, Any]]:
        """Return the first such line of each member."""
        found: dict[str, dict[str, Any]] = {}
        for line in self.lines:
            if line["what"] == what and line["t"] >= since_s and more.items() <= line.items():
                found.setdefault(line["name"], line)
        return found

    @property
    def pids(self) -> list[int]:
        return [line["pid"] for line in self.said("ready").values()]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.parent.pid, signal.SIGKILL)
        self.parent.wait()
        for hub in self.hubs:
            hub.kill()
            hub.wait()


def run_processes(count: int) -> dict[str, float | None]:
    """Start so many members and return what was measured; fewer where memory does not allow."""
    with tempfile.TemporaryDirectory() as folder:
        fabric = ProcessFabric(Path(folder), count)
        try:
            return _measure(fabric)
        finally:
            fabric.close()


def _measure(fabric: ProcessFabric) -> dict[str, float | None]:
    count, name = fabric.count, f"processes{fabric.count}"
    figures: dict[str, float | None] = dict.fromkeys(
        [f"{name}_{kind}" for kind in ("agree_s", "join_s", "death_s", "told_s", "started")]
    )
    complete = fabric.until(lambda: len(fabric.said("complete")) == count + 1)
    ready = fabric.said("ready")
    figures[f"{name}_started"] = len(ready) - 1.0
    if complete:
        last_s = max(line["t"] for line in fabric.said("dials").values())
        agreed_s = max(line["t"] for line in fabric.said("complete").values())
        figures[f"{name}_agree_s"] = max(0.0, agreed_s - last_s)
    # Speakers are settled and have told everybody.
    everybody = {f"site{at}": len(range(at, count, SITES)) for at in range(SITES)}
    fabric.until(lambda: len(fabric.said("told", sites=everybody)) == count + 1, 90.0)
    rss, own = zip(*map(_memory_mb, fabric.pids[:_SAMPLE]), strict=True)
    figures |= {f"{name}_rss_mb": statistics.fmean(rss), f"{name}_own_mb": statistics.fmean(own)}
    everything = (*fabric.pids, *(hub.pid for hub in fabric.hubs))
    cpu_s = figures[f"{name}_start_cpu_s"] = read_cpu_s(everything)
    time.sleep(_IDLE_S)
    figures[f"{name}_idle_cores"] = (read_cpu_s(everything) - cpu_s) / _IDLE_S
    # One more, and one less; of each those who are there and have to know.
    near = len(range(0, count, SITES)) + 1
    assert fabric.parent.stdin is not None
    fabric.parent.stdin.write(b"one\n")
    fabric.parent.stdin.flush()
    if fabric.until(lambda: "late" in fabric.said("ready"), 60.0):
        late = fabric.said("ready")["late"]
        if fabric.until(lambda: len(fabric.said("joined", sid=late["sid"])) >= near, 60.0):
            knew = fabric.said("joined", sid=late["sid"]).values()
            dialled_s = fabric.said("dials")["late"]["t"]
            figures[f"{name}_join_s"] = max(line["t"] for line in knew) - dialled_s
    victim = ready["n0"]
    killed_s = time.time()
    os.kill(victim["pid"], signal.SIGKILL)
    # The newcomer has not seen all that it waits for, and says nothing.
    if fabric.until(lambda: len(fabric.said("down", sid=victim["sid"])) >= near - 1, 60.0):
        knew = fabric.said("down", sid=victim["sid"]).values()
        figures[f"{name}_death_s"] = max(line["t"] for line in knew) - killed_s
    told = everybody
    if fabric.until(lambda: len(fabric.said("told", killed_s, sites=told)) >= count, 60.0):
        knew = fabric.said("told", killed_s, sites=told).values()
        figures[f"{name}_told_s"] = max(line["t"] for line in knew) - killed_s
    return figures


def _memory_mb(pid: int) -> tuple[float, float]:
    """Return what a process has in memory, and what of it it has alone, in MB."""
    fields = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    )
    kb = {name: float(value.split()[0]) for name, value in fields.items()}
    return kb["Rss"] / 1000, (kb["Private_Clean"] + kb["Private_Dirty"]) / 1000


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def _wait_for(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.1)
    raise RuntimeError(f"no hub listens at {port}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("count", type=int)
    given = parser.parse_args()
    fork_members(given.folder, given.count)
