"""How quickly a fabric of many processes agrees: who is there, who died, who is back.

Every node is a process of its own on loopback, with its own certificate, behind two hubs; TLS both ways.
A figure counts when ALL nodes have seen it: each writes down when it did, and the last one counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.fabric.identity.authority import Authority, write_secret
from atoll.runtime.http.listen_address import free_ports
from benchmarks.process_cpu import read_cpu_s
from benchmarks.report import ROOT, Figure, finish

_START_S = 120.0
_SEEN_S = 20.0
_STARTS_AT_ONCE = 4
_PAUSE_S = 0.2
_SPEAKS = 4
"""Every so manieth node says something new while there is no hub."""


@dataclass(slots=True)
class Process:
    """A node or hub, and the lines it has printed."""

    name: str
    process: asyncio.subprocess.Process
    lines: list[dict[str, Any]] = field(default_factory=list)
    sid: str = ""

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")

    def cpu_s(self) -> float:
        return read_cpu_s([self.process.pid])

    def send(self, number: signal.Signals) -> float:
        now = time.time()
        self.process.send_signal(number)
        return now


class Bench:
    """Starts everything and waits for what it should see."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.ports = free_ports(2)
        self.authority = Authority.create(
            folder / "fabric", "bench", [f"127.0.0.1:{port}" for port in self.ports]
        )
        self.wanted = nodes
        self.nodes: list[Process] = []
        self.hubs: list[Process] = []
        self.started = 0
        self.rounds = 0
        self.heal_cpu_s: list[float] = []
        """CPU of everybody from a hub's return until all know, one for each time."""
        self._readers: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()

    async def start_hub(self, number: int) -> float:
        """Start a hub and return when its port was open."""
        token = self.authority.folder / f"hub-h{number}.token"
        address = f"127.0.0.1:{self.ports[number]}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "atoll", "hub", f"@{token}"),
            *("--listen", address),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        self.hubs.append(Process(f"h{number}", process))
        opened = await _opened(self.ports[number])
        line = await asyncio.wait_for(process.stdout.readline(), _START_S)
        if b" listens at " not in line:
            raise RuntimeError(f"hub {number} did not start: {line!r}")
        return opened

    async def start_node(self, expect: int = 0) -> Process:
        """Start a node; it says when it sees `expect` others."""
        name = f"n{self.started}"
        self.started += 1
        token = self.folder / f"{name}.token"
        write_secret(token, self.authority.issue(name, f"site{self.started % 4}", "worker").pack())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.fabric_node", f"@{token}", name, "0"),
            str(expect),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        node = Process(name, process)
        reader = asyncio.create_task(self._read(node))
        self._readers.add(reader)
        self.nodes.append(node)
        ready = await self.first(node, lambda line: line["what"] == "ready", _START_S)
        node.sid = ready["sid"]
        return node

    async def _read(self, node: Process) -> None:
        assert node.process.stdout is not None
        while line := await node.process.stdout.readline():
            node.lines.append(json.loads(line))
            self._news.set()

    async def first(
        self,
        node: Process,
        test: Callable[[dict[str, Any]], bool],
        timeout_s: float = _SEEN_S,
        start: int = 0,
    ) -> dict[str, Any]:
        """Wait for a line of a node."""
        deadline = time.monotonic() + timeout_s
        while True:
            for line in node.lines[start:]:
                if test(line):
                    return line
            left = deadline - time.monotonic()
            if left <= 0 or node.process.returncode is not None:
                raise TimeoutError(f"{node.name} did not see it; last: {node.lines[-3:]}")
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), min(left, 1.0))

    async def last(
        self,
        nodes: Iterable[Process],
        test: Callable[[dict[str, Any]], bool],
        marks: dict[str, int],
    ) -> float:
        """Wait until every node has such a line after its mark; return the time of the last."""
        found = [await self.first(node, test, start=marks[node.name]) for node in nodes]
        return max(float(line["t"]) for line in found)

    def marks(self) -> dict[str, int]:
        return {node.name: len(node.lines) for node in self.nodes}

    async def complete(self, marks: dict[str, int]) -> float:
        """Wait until every node has said `complete`; return when the last one did."""
        return await self.last(self.nodes, lambda line: line["what"] == "complete", marks)

    def expect(self, label: str = "", speakers: Sequence[Process] = ()) -> dict[str, int]:
        """Have every node say when it sees all others, and the speakers with their label."""
        marks = self.marks()
        for node in self.nodes:
            others = sum(1 for speaker in speakers if speaker is not node)
            node.tell(f"expect {len(self.nodes) - 1} {label or '-'} {others}")
        return marks

    async def start(self) -> None:
        for number in range(len(self.ports)):
            await self.start_hub(number)
        while len(self.nodes) < self.wanted:
            batch = min(_STARTS_AT_ONCE, self.wanted - len(self.nodes))
            await asyncio.gather(*(self.start_node() for _ in range(batch)))
        await self.complete(self.expect())

    async def close(self) -> None:
        for one in (*self.nodes, *self.hubs):
            with contextlib.suppress(ProcessLookupError):
                one.process.kill()
            await one.process.wait()
        await asyncio.gather(*self._readers)

    # What is measured

    async def idle(self, seconds: float) -> float:
        """CPU of all processes together, in cores, while nothing happens."""
        await asyncio.sleep(3.0)
        everybody = [*self.nodes, *self.hubs]
        before = sum(one.cpu_s() for one in everybody)
        began = time.monotonic()
        await asyncio.sleep(seconds)
        used = sum(one.cpu_s() for one in everybody) - before
        return used / (time.monotonic() - began)

    async def register(self, count: int) -> list[float]:
        """Seconds until everybody sees a new session, for one session after the other."""
        took: list[float] = []
        for number in range(count):
            node = self.nodes[number % len(self.nodes)]
            marks = self.marks()
            node.tell("renew")
            new = await self.first(
                node, lambda line: line["what"] == "renewed", start=marks[node.name]
            )
            node.sid = new["sid"]
            others = [other for other in self.nodes if other is not node]
            seen = await self.last(others, _shows(node.sid, True), marks)
            took.append(seen - float(new["began"]))
            await asyncio.sleep(_PAUSE_S)
        return took

    async def _masked(self, node: Process, number: signal.Signals) -> float:
        marks = self.marks()
        sid = node.sid
        at = node.send(number)
        self.nodes.remove(node)
        return await self.last(self.nodes, _shows(sid, False), marks) - at

    async def kill(self, count: int) -> list[float]:
        """Seconds until everybody masks a killed node."""
        took = []
        for _ in range(count):
            node = self.nodes[0]
            took.append(await self._masked(node, signal.SIGKILL))
            await node.process.wait()
            await asyncio.sleep(0.1)
        return took

    async def silence(self, count: int) -> list[float]:
        """Seconds until everybody masks a stopped node; it goes on afterwards and must be back."""
        took = []
        for _ in range(count):
            node = self.nodes[0]
            took.append(await self._masked(node, signal.SIGSTOP))
            node.send(signal.SIGCONT)
            self.nodes.append(node)
            await self.complete(self.expect())
        return took

    async def heal(self, seconds: float) -> float:
        """Seconds after the hubs are back until everybody knows what was said without them."""
        for hub in self.hubs:
            hub.process.kill()
            await hub.process.wait()
        self.hubs.clear()
        await asyncio.sleep(seconds)
        speakers = self.nodes[::_SPEAKS]
        self.rounds += 1
        for node in speakers:
            node.tell(f"announce {self.rounds}")
        await asyncio.sleep(0.5)
        marks = self.expect(str(self.rounds), speakers)
        back = await self.start_hub(0)
        before = self._cpu_s()
        healed = await self.complete(marks) - back
        self.heal_cpu_s.append(self._cpu_s() - before)
        await self.start_hub(1)
        return healed

    def _cpu_s(self) -> float:
        return sum(one.cpu_s() for one in (*self.nodes, *self.hubs))

    async def hub_lost(self) -> float:
        """Seconds from the death of one of two hubs until everybody sees everybody again."""
        await asyncio.sleep(1.0)
        marks = self.marks()
        # The first is where all went when it alone was back.
        at = self.hubs[0].send(signal.SIGKILL)
        await asyncio.sleep(3.0)
        await self.complete(self.expect())
        seen = [
            float(line["t"])
            for node in self.nodes
            for line in node.lines[marks[node.name] :]
            if line["what"] in ("up", "down")
        ]
        return max(seen, default=at) - at

    async def late(self, count: int) -> list[float]:
        """Seconds from a newcomer's first step to its knowing everybody."""
        took = []
        for _ in range(count):
            expect = len(self.nodes)
            node = await self.start_node(expect)
            line = await self.first(node, lambda line: line["what"] == "complete")
            took.append(float(line["t"]) - float(line["since"]))
        return took


async def measure(nodes: int, quick: bool) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), nodes)
        try:
            await bench.start()
            print(f"{nodes} nodes, {len(bench.hubs)} hubs: everybody knows everybody")
            idle = await bench.idle(20.0)
            registered = sorted(await bench.register(20 if quick else 100))
            p99 = registered[int(0.99 * (len(registered) - 1))]
            middle = registered[len(registered) // 2]
            print(f"registered: median {middle * 1e3:.1f} ms, most {registered[-1] * 1e3:.1f} ms")
            silent = await bench.silence(2 if quick else 6)
            print("silent:", ", ".join(f"{one:.2f}" for one in silent), "s")
            await asyncio.sleep(1.0)  # who was silent has just lost its link, and is patient
            killed = await bench.kill(3 if quick else 10)
            print("killed:", ", ".join(f"{one * 1e3:.0f}" for one in killed), "ms")
            late = await bench.late(3 if quick else 10)
            print("late:", ", ".join(f"{one:.3f}" for one in late), "s")
            healed = [
                await bench.heal(3.0 if one == 0 else 8.0) for one in range(1 if quick else 3)
            ]
            print("healed:", ", ".join(f"{one:.2f}" for one in healed), "s")
            moved = await bench.hub_lost()
        finally:
            await bench.close()
    cores = len(os.sched_getaffinity(0))
    return [
        Figure("register_ms_p99", p99 * 1e3, 100, "seen by all; over new sessions"),
        Figure("kill_ms_max", max(killed) * 1e3, 200, "masked by all"),
        Figure("silent_s_max", max(silent), 2.5, "masked by all"),
        Figure(
            "heal_s",
            max(healed),
            1,
            f"most of {len(healed)}; all hubs gone, from the first that listens again",
        ),
        Figure("heal_cpu_s", max(bench.heal_cpu_s), None, "all processes; wall beside it: heal_s"),
        Figure(
            "heal_beyond_cpu_s",
            max(
                wall_s - cpu_s / cores
                for wall_s, cpu_s in zip(healed, bench.heal_cpu_s, strict=True)
            ),
            2,
            f"heal_s less what {cores} cores need for the work",
        ),
        Figure("late_join_s", max(late), 0.5, "from the first step of connecting"),
        Figure("idle_cores", idle, 0.1, "all nodes and hubs together"),
        Figure("hub_lost_s", moved, None, "one hub of two killed: until all have moved"),
        Figure("nodes", nodes),
    ]


def _shows(sid: str, up: bool) -> Callable[[dict[str, Any]], bool]:
    return lambda line: line.get("sid") == sid and line["up"] is up


async def _opened(port: int) -> float:
    """Wait until a port takes connections and return when it did."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return time.time()
        await asyncio.sleep(0.005)
    raise TimeoutError(f"nothing listens at port {port}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer nodes, under three minutes")
    parser.add_argument("--nodes", type=int, help="how many (default 40; quick: 12)")
    given = parser.parse_args()
    nodes = given.nodes or (12 if given.quick else 40)
    finish(asyncio.run(measure(nodes, given.quick)))


if __name__ == "__main__":
    main()
