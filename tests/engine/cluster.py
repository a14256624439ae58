"""A whole engine inside one process: nodes, a scheduler, and a hub that may reorder links."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from atoll.engine.engine_messages import Heartbeat, SchedulerHello
from atoll.engine.kv import BlockPool
from atoll.engine.model_stage import StageModel
from atoll.engine.node_core import CoreSettings, NodeCore
from atoll.engine.pipeline_routes import LayerRouter, NodeSpec, Router
from atoll.engine.ranked_stage import RankedStage
from atoll.engine.scheduler_core import (
    GenerateRequest,
    SchedulerCore,
    SchedulerSettings,
    TokenEvent,
)
from tests.engine.memory_hub import MemoryHub
from tests.engine.thread_ranks import ranked_stage


@dataclass
class NodeSetup:
    """One node of a test cluster."""

    start: int
    end: int
    blocks: int = 64
    block_size: int = 4
    prefix_caching: bool = True
    settings: CoreSettings = field(default_factory=lambda: CoreSettings(token_budget=24, chunk=7))
    tp: int = 1
    kv_dtype: Literal["fp8"] | None = None

    @property
    def kind(self) -> tuple[int | str | None, ...]:
        """By which setups are alike that can have the same stage."""
        return self.start, self.end, self.blocks, self.block_size, self.tp, self.kv_dtype


class StageCache:
    """Loads every (folder, start, end) once; caches are emptied by whoever opens a pool."""

    def __init__(self) -> None:
        self._stages: dict[
            tuple[str, tuple[int | str | None, ...]], list[StageModel | RankedStage]
        ] = {}

    def get(self, folder: Path, setup: NodeSetup, number: int) -> StageModel | RankedStage:
        copies = self._stages.setdefault((str(folder), setup.kind), [])

        def make(ranks: Any = None) -> StageModel:
            return StageModel(
                folder,
                setup.start,
                setup.end,
                blocks=setup.blocks,
                block_size=setup.block_size,
                kv_dtype=setup.kv_dtype,
                ranks=ranks,
            )

        while len(copies) <= number:
            copies.append(make() if setup.tp == 1 else ranked_stage(make, setup.tp))
        return copies[number]


STAGES = StageCache()


class Cluster:
    """Nodes n0, n1, ... and a scheduler; `run` drives them in a seeded random order."""

    def __init__(
        self,
        folder: Path,
        layers: int,
        setups: Sequence[NodeSetup],
        *,
        router: Router | None = None,
        seed: int = 0,
        settings: SchedulerSettings | None = None,
        eos: tuple[int, ...] = (),
        max_length: int = 240,
        matchers: Any = None,
    ) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.dead: set[str] = set()
        self.hub = MemoryHub(lost=lambda source, to: source in self.dead or to in self.dead)
        self.nodes: dict[str, NodeCore] = {}
        used: dict[tuple[int | str | None, ...], int] = {}
        specs = []
        for number, setup in enumerate(setups):
            name = f"n{number}"
            box = self.hub.mailbox(f"mem://{name}")
            stage = STAGES.get(folder, setup, used.get(setup.kind, 0))
            used[setup.kind] = used.get(setup.kind, 0) + 1
            self.nodes[box.endpoint] = NodeCore(
                name,
                box.endpoint,
                stage,
                BlockPool(setup.blocks, setup.block_size, prefix_caching=setup.prefix_caching),
                box.send,
                lambda: self.now_s,
                settings=setup.settings,
                matchers=matchers,
            )
            specs.append(
                NodeSpec(name=name, endpoint=box.endpoint, start=setup.start, end=setup.end)
            )
        self.boxes = {name: self.hub.mailbox(name) for name in self.nodes}
        self.inbox = self.hub.mailbox("mem://scheduler")
        self.events: dict[str, list[TokenEvent]] = {}
        self.scheduler = SchedulerCore(
            specs,
            router or LayerRouter(layers),
            self.inbox.endpoint,
            self.inbox.send,
            lambda event: self.events[event.request_id].append(event),
            eos=eos,
            max_length=max_length,
            # Nothing may lean on the stall limit: whatever hangs must be seen to hang.
            settings=settings or SchedulerSettings(dead_after_s=1.0, heartbeat_s=0.1, stall_s=1e9),
            owner="s",
            incarnation=1,
        )

    def submit(self, request: GenerateRequest) -> str:
        assert request.id is not None
        self.events[request.id] = []
        return self.scheduler.submit(request, self.now_s)

    def kill(self, name: str) -> None:
        self.dead.add(f"mem://{name}")

    def revive(self, name: str) -> None:
        self.dead.discard(f"mem://{name}")
        core = self.nodes[f"mem://{name}"]
        core.drop_all()
        core._incarnation += 1

    def step(self) -> bool:
        """Deliver one link's messages or run one node; time moves a little."""
        self.now_s += 0.01
        self.scheduler.tick(self.now_s)
        pairs = self.hub.pairs()
        order: list[Any] = [*pairs, *self.nodes]
        self.random.shuffle(order)
        moved = False
        for item in order[: max(1, len(order) // 2)]:
            if isinstance(item, tuple):
                moved |= self._deliver(*item)
            elif item not in self.dead:
                moved |= self.nodes[item].step()
        return moved

    def _deliver(self, source: str, to: str) -> bool:
        if to in self.dead or source in self.dead:
            self.hub.queues[source, to].clear()
            return False
        if to == self.inbox.endpoint:
            for message in self.inbox.receive(sender=source):
                self.scheduler.handle(message, self.now_s)
            return True
        core = self.nodes[to]
        for message in self.boxes[to].receive(sender=source):
            if isinstance(message, SchedulerHello):
                core.hear_owner(message)
                self.boxes[to].send(message.reply_to, Heartbeat(stats=core.stats()))
            else:
                core.handle(message)
        return True

    def run(self, until: Callable[[], bool] | None = None, most: int = 20_000) -> None:
        """Step until every request has ended (or `until`), failing if that never happens."""
        done = until or (lambda: all(e and e[-1].finish_reason for e in self.events.values()))
        for _ in range(most):
            if done():
                return
            self.step()
        raise AssertionError("the cluster does not come to an end")

    def settle(self) -> None:
        """Deliver what is still under way, then check that nothing is left behind."""
        for _ in range(50):
            for pair in self.hub.pairs():
                self._deliver(*pair)
        for endpoint, core in self.nodes.items():
            core.pool.check()
            if endpoint not in self.dead:
                assert core.idle
                assert core.pool.used == 0

    def tokens(self, request_id: str) -> list[int]:
        return [e.token for e in self.events[request_id] if e.token is not None]
