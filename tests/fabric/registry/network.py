"""Registries in a network that loses, repeats, reorders and splits; nothing in it is real.

Time moves only when told. Whatever is pushed lies in `flying` once per addressee until somebody
delivers, repeats or drops it. Tokens are seen by whoever can reach their owner, but each member looks
when it is told to. After every step, what must never happen is checked in every replica.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from atoll.fabric.registry import sync
from atoll.fabric.registry.effects import (
    Effect,
    NewSession,
    Publish,
    Pull,
    Refused,
    RegistrySettings,
)
from atoll.fabric.registry.fabric_registry import Registry
from atoll.fabric.registry.records import Metadata, Record, SessionState

START_S = 1_800_000_000.0


def metadata(slot: str, **more: object) -> Metadata:
    role = "hub" if slot.startswith("h") else "worker"
    return Metadata(**{"name": slot, "provider": "p", "role": role, **more})  # type: ignore[arg-type]


def signer(slot: str) -> Callable[[str, SessionState, int, float, bytes], Record]:
    """A signature is the signer's name: enough where nobody forges."""
    name = slot.encode()

    def sign(sid: str, state: SessionState, rev: int, signed_s: float, body: bytes) -> Record:
        return Record(sid, state, rev, signed_s, body, name, b"by " + name)

    return sign


def verify(record: Record) -> str | None:
    by = record.certificate.decode()
    if record.signature != b"by " + record.certificate:
        return "signature"
    if by != record.slot and not (by.startswith("h") and record.state is SessionState.LEFT):
        return "session of another"
    return None


@dataclass
class Node:
    """A process: alive until killed, and in a part of the network."""

    registry: Registry
    skew_s: float
    alive: bool = True
    part: int = 0
    tokens: dict[str, str] = field(default_factory=dict)
    """Tokens seen, by session, with the slot that wrote them."""
    gone: set[str] = field(default_factory=set)
    """Sessions this replica has ever seen LEFT."""
    checked: bytes = b""
    sessions: list[NewSession] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    @property
    def sid(self) -> str:
        return self.registry.sid


class Broken(AssertionError):  # noqa: N818
    """Something happened that must never happen."""


class Network:
    """All processes, and what flies between them."""

    def __init__(
        self, seed: int, *, settings: RegistrySettings | None = None, skew_s: float = 0.0
    ) -> None:
        # Steps may be hours apart here, and are watched all the same.
        self.settings = settings or RegistrySettings(gap_s=float("inf"))
        self.skew_s = skew_s
        self.rng = random.Random(seed)
        self.now_s = START_S
        self.nodes: list[Node] = []
        self.flying: list[tuple[Node, bytes]] = []
        self.said: list[bytes] = []
        """Everything ever pushed: what an eavesdropper may say again."""
        self.pulls: list[tuple[Node, str]] = []

    @property
    def living(self) -> list[Node]:
        return [node for node in self.nodes if node.alive]

    def start(self, slot: str, state: SessionState = SessionState.SERVING) -> Node:
        skew_s = self.rng.uniform(-self.skew_s, self.skew_s)
        registry = Registry(
            slot,
            metadata(slot),
            sign=signer(slot),
            verify=verify,
            rng=self.rng,
            now_s=self.now_s + skew_s,
            state=state,
            settings=self.settings,
        )
        node = Node(registry, skew_s)
        self.nodes.append(node)
        self.tick(node)
        return node

    def clock(self, node: Node) -> float:
        return self.now_s + node.skew_s

    # What may happen

    def kill(self, node: Node) -> None:
        node.alive = False
        self.flying = [(to, data) for to, data in self.flying if to is not node]

    def tick(self, node: Node) -> None:
        self.carry(node, node.registry.tick(self.clock(node)))

    def announce(self, node: Node, state: SessionState, engine: str) -> None:
        if node.registry.own_entry.record.state is SessionState.LEFT:
            return
        said = metadata(node.registry.slot, engine=engine)
        self.carry(node, node.registry.announce(self.clock(node), state, said))

    def leave(self, node: Node) -> None:
        self.carry(node, node.registry.leave(self.clock(node)))

    def look(self, node: Node) -> None:
        """See which tokens are up: those of living processes that have not left, in my part."""
        registry = node.registry
        up = {
            other.sid: other.registry.slot
            for other in self.living
            if other is not node
            and other.part == node.part
            and other.registry.own_entry.record.state < SessionState.LEFT
        }
        now_s = self.clock(node)
        for sid in [s for s in node.tokens if s not in up]:
            self.carry(node, registry.token_down(node.tokens[sid], sid, now_s))
        for sid in [s for s in up if s not in node.tokens]:
            self.carry(node, registry.token_up(up[sid], sid, now_s))
        node.tokens = up

    def deliver(self, index: int, *, keep: bool = False) -> None:
        """Deliver one of the flying messages; `keep` delivers it again later."""
        node, data = self.flying[index]
        if not keep:
            self.flying[index] = self.flying[-1]
            self.flying.pop()
        self.carry(node, node.registry.pushed(data, self.clock(node)))

    def drop(self, index: int) -> None:
        self.flying[index] = self.flying[-1]
        self.flying.pop()

    def replay(self, node: Node, data: bytes) -> None:
        self.carry(node, node.registry.pushed(data, self.clock(node)))

    def exchange(self, asker: Node, peer: Node, *, lost_after: int | None = None) -> None:
        """Compare two replicas; `lost_after` so many answers, the rest is lost."""
        if asker.part != peer.part:
            asker.registry.pull_failed(self.clock(asker))
            return
        exchange, answers = asker.registry.exchange(), 0
        while exchange.ask is not None:
            answer, effects = peer.registry.answer(exchange.ask, self.clock(peer))
            self.carry(peer, effects)
            if answers == lost_after:
                asker.registry.pull_failed(self.clock(asker))
                return
            answers += 1
            self.carry(asker, exchange.answered(answer, self.clock(asker)))

    def carry(self, node: Node, effects: Iterable[Effect]) -> None:
        """Do what a replica asks for, then check it."""
        for effect in effects:
            if isinstance(effect, Publish):
                data = sync.encode_message(effect.records)
                self.said.append(data)
                near = (n for n in self.nodes if n.alive and n.part == node.part and n is not node)
                self.flying.extend((other, data) for other in near)
            elif isinstance(effect, Pull):
                self.pulls.append((node, effect.sid))
            elif isinstance(effect, NewSession):
                node.sessions.append(effect)
            elif isinstance(effect, Refused):
                node.refused.append(effect)
        self.check(node)

    # What must never happen

    def check(self, node: Node) -> None:
        if node.checked == node.registry.hash:
            return
        node.checked = node.registry.hash
        for sid, entry in node.registry.entries().items():
            if entry.record.state is SessionState.LEFT:
                node.gone.add(sid)
            elif sid in node.gone:
                raise Broken(f"{sid} came back to life at {node.sid}")
        own = node.registry.own_entry.record
        if own.state is SessionState.LEFT and own.certificate.decode() != node.registry.slot:
            raise Broken(f"{node.sid} lives on as a dead session")

    def settle(self) -> None:
        """Let the network heal and time pass; then everybody must know exactly who is there."""
        for node in self.living:
            node.part = 0
        while self.flying:
            self.deliver(len(self.flying) - 1)
        patience_s = self.settings.obituary_s + self.settings.obituary_spread_s + 1.0
        for last in (False, False, True):
            living = self.living
            for node in living:
                self.look(node)
            for asker, peer in pairwise(living):
                self.exchange(peer, asker)
                self.exchange(living[0], peer)
            self.now_s += patience_s
            for node in living:
                self.look(node)
                self.tick(node)
            while self.flying:
                self.deliver(len(self.flying) - 1)
            if last or len({node.registry.hash for node in living}) == 1:
                break
        self.check_settled()

    def check_settled(self) -> None:
        living = [n for n in self.living if n.registry.own_entry.record.state < SessionState.LEFT]
        truth = {node.sid: node.registry.own_entry.record for node in living}
        for node in self.living:
            known = {
                sid: entry.record
                for sid, entry in node.registry.entries().items()
                if entry.record.state < SessionState.LEFT
            }
            for sid in known.keys() - truth.keys():
                raise Broken(f"{node.sid} believes in the ghost {sid}")
            for sid in truth.keys() - known.keys():
                raise Broken(f"{node.sid} does not know {sid}")
            for sid, record in truth.items():
                if known[sid] != record:
                    raise Broken(f"{node.sid} knows an old record of {sid}")
                if not node.registry.alive(sid):
                    raise Broken(f"{node.sid} masks {sid}, which is there")
        if len({node.registry.hash for node in self.living}) > 1:
            raise Broken("replicas differ")
