"""The engine's nodes in virtual time: real cores and messages, stages that take as long as they are told.

A node handles what has come when its step is over, as a process does; messages take `hop_s`. Nodes with the
same `place` share one device: their steps never overlap.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from atoll.core.request_parameters import SamplingParams
from atoll.engine.batcher import MaxInFlight
from atoll.engine.engine_messages import Hop, Message, Open, OpenBody, Sampled
from atoll.engine.frames import decode, encode
from atoll.engine.kv import BlockPool
from atoll.engine.model_stage import SequenceRows, StageOutput
from atoll.engine.node_core import CoreSettings, NodeCore

SCHEDULER = "mem://scheduler"
VOCABULARY = 8


@dataclass(frozen=True)
class VirtualStage:
    """Seconds of a step: some, and some more for every row; `place` as in `CoreSettings`."""

    fixed_s: float
    row_s: float
    place: int = 0


class TimedStage:
    """One layer that computes nothing and takes its time."""

    def __init__(self, number: int, total: int, speed: VirtualStage) -> None:
        self.start, self.end, self.total = number, number + 1, total
        self.vocabulary, self.width = VOCABULARY, 1
        self._speed = speed
        self.blocks = 2048
        self.took_s = 0.0

    def forward(self, batch: Sequence[SequenceRows]) -> StageOutput:
        rows = sum(each.count for each in batch)
        self.took_s = self._speed.fixed_s + self._speed.row_s * rows
        if self.end < self.total:
            return StageOutput(tuple(torch.zeros(each.count, 1) for each in batch))
        asked = tuple(i for i, each in enumerate(batch) if each.sample)
        logits = torch.zeros(len(asked), VOCABULARY) if asked else None
        return StageOutput((None,) * len(batch), logits, asked)


class VirtualNode:
    """A core, what has come for it, and until when it is busy."""

    def __init__(self, world: VirtualPipeline, number: int, total: int, speed: Any) -> None:
        self.endpoint = f"mem://{number}"
        self.stage: Any = speed
        if isinstance(speed, VirtualStage):
            self.stage = TimedStage(number, total, speed)
        self.place = speed.place or -1 - number
        self.inbox: deque[list[Any]] = deque()
        self._world = world
        self.core = NodeCore(
            str(number),
            self.endpoint,
            self.stage,
            BlockPool(self.stage.blocks, 16, prefix_caching=False),
            self._send,
            lambda: world.now_s + self.stage.took_s,
            settings=CoreSettings(max_in_flight=world.max_in_flight, place=speed.place),
        )

    def _send(self, to: str, message: Message) -> None:
        self._world.deliver(self._world.now_s + self.stage.took_s, to, message)

    def run(self) -> float:
        """Handle what has come and run a step; returns how long it takes (0: nothing to do)."""
        while self.inbox:
            self.core.handle(decode(self.inbox.popleft()))
        self.core.step()
        took_s = float(self.stage.took_s)
        self.stage.took_s = 0.0
        return took_s


class VirtualPipeline:
    """Nodes in a row, and sequences that never end.

    A stage is a `VirtualStage`, or whatever can take the place of a `StageModel` and has `blocks`, a `place`,
    and `took_s`, the seconds of its latest step.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        max_in_flight: MaxInFlight = "auto",
        hop_s: float = 0.001,
    ) -> None:
        self.now_s = 0.0
        self.max_in_flight = max_in_flight
        self._hop_s = hop_s
        self.nodes = [VirtualNode(self, i, len(stages), s) for i, s in enumerate(stages)]
        self._by_endpoint = {node.endpoint: node for node in self.nodes}
        self._free_s: dict[int, float] = defaultdict(float)
        self._events: list[tuple[float, int, str, list[Any] | None]] = []
        self._count = 0
        self.token_s: dict[int, list[float]] = defaultdict(list)

    @property
    def first(self) -> NodeCore:
        return self.nodes[0].core

    def deliver(self, left_s: float, to: str, message: Message) -> None:
        """Let a message leave at a time."""
        if to == SCHEDULER:
            if isinstance(message, Sampled):
                for seq in message.table[:, 0].tolist():
                    self.token_s[seq].append(left_s)
            return
        self._push(left_s + self._hop_s, to, [bytes(part) for part in encode(message)])

    def open(self, seq: int, at_s: float) -> None:
        """Start a sequence."""
        route = tuple(
            Hop(
                node=str(i),
                endpoint=node.endpoint,
                start=node.stage.start,
                end=node.stage.end,
            )
            for i, node in enumerate(self.nodes)
        )
        body = OpenBody(
            seq=seq,
            epoch=0,
            route=route,
            prompt_length=1,
            max_length=2000,
            arrival=seq,
            reply_to=SCHEDULER,
            sampling=SamplingParams(max_tokens=2000, ignore_eos=True),
        )
        parts = [bytes(part) for part in encode(Open(body, np.array([1], np.int64)))]
        self._push(at_s, self.nodes[0].endpoint, parts)

    def run(self, until_s: float) -> None:
        """Let time pass."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, to, parts = heapq.heappop(self._events)
            node = self._by_endpoint[to]
            if parts is not None:
                node.inbox.append(parts)
            if self.now_s < self._free_s[node.place]:
                # It, or whoever shares its device, is at work: it looks again when that is over.
                if parts is not None:
                    self._push(self._free_s[node.place], to, None)
                continue
            took_s = node.run()
            if took_s:
                self._free_s[node.place] = self.now_s + took_s
                for other in self.nodes:
                    if other.place == node.place:
                        self._push(self.now_s + took_s, other.endpoint, None)

    def mean_tpot_s(self, from_s: float) -> float:
        """Mean seconds between tokens of a sequence from a time on."""
        gaps = [b - a for times in self.token_s.values() for a, b in pairwise(times) if a >= from_s]
        return float(np.mean(gaps))

    def _push(self, at_s: float, to: str, parts: list[Any] | None) -> None:
        heapq.heappush(self._events, (at_s, self._count, to, parts))
        self._count += 1


def measure_tpot(
    stages: Sequence[VirtualStage],
    sequences: int,
    max_in_flight: MaxInFlight = "auto",
    *,
    rounds: int = 60,
    hop_s: float = 0.001,
) -> float:
    """Return the mean TPOT of so many sequences that begin one after another."""
    pipeline = VirtualPipeline(stages, max_in_flight, hop_s)
    alone_s = sum(s.fixed_s + s.row_s for s in stages)
    for seq in range(sequences):
        pipeline.open(seq, 0.37 * seq * alone_s)
    begun_s = sequences * alone_s
    pipeline.run(begun_s + rounds * 2.0 * alone_s)
    return pipeline.mean_tpot_s(begun_s + rounds * alone_s)
