"""The network with its own clock: messages take milliseconds, ticks come when they are due."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count

from atoll.fabric.registry.effects import Effect, RegistrySettings
from atoll.fabric.registry.records import SessionState
from tests.fabric.registry.network import Network, Node


class Clockwork(Network):
    """`pass_time` runs everything that is due; pushes get lost with probability `loss`."""

    def __init__(self, seed: int, *, loss: float = 0.0, skew_s: float = 0.0) -> None:
        super().__init__(seed, settings=RegistrySettings(), skew_s=skew_s)
        self.loss = loss
        self.pushes = 0
        self.exchanges = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._wake: dict[int, float] = {}

    def start(self, slot: str, state: SessionState = SessionState.SERVING) -> Node:
        node = super().start(slot, state)
        self.everybody_looks()
        return node

    def kill(self, node: Node) -> None:
        super().kill(node)
        self.everybody_looks()

    def move(self, nodes: Iterable[Node], part: int) -> None:
        """Cut nodes off, or bring them back."""
        for node in nodes:
            node.part = part
        self.everybody_looks()

    def everybody_looks(self) -> None:
        """Tokens are seen a few milliseconds later, by each at its own time."""
        for node in self.living:
            self.later(self.rng.uniform(0.002, 0.010), partial(self.look, node))

    def carry(self, node: Node, effects: Iterable[Effect]) -> None:
        before = len(node.sessions)
        super().carry(node, effects)
        if len(node.sessions) > before:  # a new session has a new token
            self.everybody_looks()
        while self.flying:
            to, data = self.flying.pop()
            self.pushes += 1
            if self.rng.random() >= self.loss:
                self.later(self.rng.uniform(0.001, 0.005), partial(self.arrive, to, data))
        while self.pulls:
            asker, peer = self.pulls.pop()
            self.later(0.004, partial(self.pull, asker, peer))
        self.wake(node)

    def wake(self, node: Node) -> None:
        due_s = node.registry.due_s - node.skew_s
        if due_s < self._wake.get(id(node), float("inf")):
            self._wake[id(node)] = due_s
            self.later(max(0.001, due_s - self.now_s), partial(self.woken, node))

    def woken(self, node: Node) -> None:
        self._wake.pop(id(node), None)
        if node.alive:
            self.tick(node)

    def arrive(self, node: Node, data: bytes) -> None:
        if node.alive:
            self.replay(node, data)

    def pull(self, asker: Node, sid: str) -> None:
        peer = next((n for n in self.living if n.sid == sid), None)
        if not asker.alive:
            return
        if peer is None:
            asker.registry.pull_failed(self.clock(asker))
            self.wake(asker)
            return
        self.exchanges += 1
        self.exchange(asker, peer)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + seconds, next(self._order), what))

    def pass_time(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._due and self._due[0][0] <= end_s:
            self.now_s, _, what = heapq.heappop(self._due)
            what()
        self.now_s = end_s

    def until(self, true: Callable[[], bool], max_s: float, step_s: float = 0.01) -> float:
        """Pass time until something is true and return how long it took, seconds."""
        start_s = self.now_s
        while not true():
            if self.now_s - start_s > max_s:
                raise AssertionError(f"not within {max_s} s")
            self.pass_time(step_s)
        return self.now_s - start_s

    def agreed(self) -> bool:
        """Whether every living replica holds the same."""
        return len({node.registry.hash for node in self.living}) == 1
