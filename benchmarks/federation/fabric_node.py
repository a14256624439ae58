"""One node of `benchmarks.fabric`: joins, does as it is told on stdin, says on stdout what it sees and when.

    announce N    say label N, and print when
    expect C N K  print as soon as C nodes are routable, K of them with label N
    renew         take a new session
    show          print figures and what is known of everybody
    quit
Each line out is JSON with `t`, Unix time: all run on one machine, so all clocks are one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import msgspec

from atoll.fabric.identity.access import Access
from atoll.fabric.registry.peers import Peer
from atoll.fabric.registry.records import Metadata, SessionState
from atoll.fabric.transport.fabric import Fabric

_WRITE_S = 0.05


class Node:
    """What it expects and what it has seen."""

    def __init__(self, name: str, label: str) -> None:
        self.name = name
        self.label = label
        self.fabric: Fabric
        self.expected = 0
        self.wanted = ""
        self.labelled = 0
        self.since = 0.0
        self.checking = False
        self.lines: list[dict[str, object]] = []

    def say(self, what: str, **more: object) -> None:
        # Written a little later, so that writing does not slow down what is measured.
        if not self.lines:
            asyncio.get_running_loop().call_later(_WRITE_S, self.write)
        self.lines.append({"t": time.time(), "what": what, "node": self.name, **more})

    def write(self) -> None:
        sys.stdout.write("".join(json.dumps(line) + "\n" for line in self.lines))
        sys.stdout.flush()
        self.lines.clear()

    def saw(self, kind: str, peer: Peer) -> None:
        self.say(kind, sid=peer.sid, up=peer.routable)
        if self.expected and not self.checking:
            self.checking = True
            asyncio.get_running_loop().call_soon(self.check)

    def check(self) -> None:
        self.checking = False
        if not self.expected:
            return
        peers = [p for p in self.fabric.peers() if p.routable and "n" in p.metadata.labels]
        labelled = sum(1 for peer in peers if peer.metadata.labels["n"] == self.wanted)
        if len(peers) >= self.expected and labelled >= self.labelled:
            self.say("complete", label=self.wanted, since=self.since)
            self.expected = 0

    def expect(self, count: int, label: str, labelled: int) -> None:
        self.expected, self.wanted, self.labelled = count, label, labelled
        self.check()

    def metadata(self) -> Metadata:
        return Metadata(name=self.name, provider="", role="worker", labels={"n": self.label})

    async def run(self, token: str, expect: int) -> None:
        loop = asyncio.get_running_loop()
        commands = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        began = time.time()
        self.fabric = await Fabric.connect(
            Access.open(token), self.metadata(), state=SessionState.SERVING
        )
        self.fabric.listeners.append(self.saw)
        self.say("ready", up=False, sid=self.fabric.sid, began=began)
        if expect:
            self.since = began
            self.expect(expect, self.label, 0)
        while command := (await commands.readline()).decode().split():
            await self.obey(command)
        await self.fabric.close()

    async def obey(self, command: list[str]) -> None:
        if command[0] == "announce":
            self.label = command[1]
            self.say("announcing", label=self.label)
            await self.fabric.announce(
                metadata=msgspec.structs.replace(self.fabric.metadata, labels={"n": self.label})
            )
        elif command[0] == "expect":
            self.expect(int(command[1]), command[2], int(command[3]))
        elif command[0] == "show":
            peers = [(p.name, p.alive, p.metadata.labels.get("n")) for p in self.fabric.peers()]
            self.say("shown", peers=peers, label=self.label, stats=self.fabric.stats())
        elif command[0] == "renew":
            began = time.time()
            await self.fabric.renew()
            self.say("renewed", up=False, sid=self.fabric.sid, began=began)


if __name__ == "__main__":
    asyncio.run(Node(sys.argv[2], sys.argv[3]).run(sys.argv[1], int(sys.argv[4])))
