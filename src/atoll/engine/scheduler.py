"""The scheduler of an instance: takes requests, streams tokens, survives its nodes. For asyncio.

scheduler = Scheduler(nodes, LayerRouter(30), codec=TextCodec(folder))
await scheduler.start()
async for event in scheduler.generate(GenerateRequest(tuple(tokens))):
    print(event.text, end="")
await scheduler.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

from atoll.core.errors import UsageError
from atoll.engine.engine_messages import NodeStats
from atoll.engine.mailbox import ZmqMailbox
from atoll.engine.pipeline_routes import NodeSpec, Router
from atoll.engine.scheduler_core import (
    GenerateRequest,
    SchedulerCore,
    SchedulerSettings,
    TokenEvent,
)
from atoll.engine.text import TextCodec, TextStream

_TICK_S = 0.05

__all__ = ["GenerateRequest", "NodeSpec", "Scheduler", "SchedulerSettings", "TokenEvent"]


class Scheduler:
    """Requests in, token events out, over nodes that may come and go.

    With a codec, events carry text and stop strings work, and end tokens and the longest length
    are taken from the model folder unless given. Nodes drop what an earlier scheduler with the name `owner`
    left behind.
    """

    def __init__(
        self,
        nodes: Iterable[NodeSpec],
        router: Router,
        *,
        codec: TextCodec | None = None,
        eos: tuple[int, ...] | None = None,
        max_length: int | None = None,
        settings: SchedulerSettings | None = None,
        bind: str = "tcp://127.0.0.1:*",
        context: Any = None,
        owner: str = "",
    ) -> None:
        self._codec = codec
        self._mailbox = ZmqMailbox(bind, context)
        self._queues: dict[str, asyncio.Queue[TokenEvent]] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        known_eos = codec.eos if codec is not None else ()
        known_length = codec.max_length if codec is not None else 2048
        self._core = SchedulerCore(
            nodes,
            router,
            self._mailbox.endpoint,
            self._mailbox.send,
            self._emit,
            eos=known_eos if eos is None else eos,
            max_length=max_length or known_length,
            settings=settings,
            owner=owner,
            # A new number for each start, as nodes have: by it they know that what ran before is nobody's.
            incarnation=secrets.randbits(62),
        )

    @property
    def endpoint(self) -> str:
        """Where nodes send to."""
        return self._mailbox.endpoint

    @property
    def running(self) -> int:
        """How many requests are on nodes."""
        return self._core.running

    @property
    def queued(self) -> int:
        """How many requests wait for a route or for room."""
        return self._core.queued

    async def start(self) -> None:
        """Begin to listen and to watch the nodes."""
        asyncio.get_running_loop().add_reader(self._mailbox.fileno, self._drain)
        for node in self._core.nodes:
            self._mailbox.watch(node.endpoint)
        self._tick()
        self._ticker = asyncio.create_task(self._keep_ticking())

    async def close(self) -> None:
        """Cancel what runs and stop listening."""
        self.cancel_all()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
            asyncio.get_running_loop().remove_reader(self._mailbox.fileno)
            self._ticker = None
        self._mailbox.close()

    async def ready(self, timeout_s: float, names: Iterable[str] | None = None) -> None:
        """Wait until the named nodes (None: all) live; a UsageError says which do not."""
        wanted = {node.name for node in self._core.nodes} if names is None else set(names)
        deadline_s = time.monotonic() + timeout_s
        while not wanted <= self._core.alive:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                silent = ", ".join(sorted(wanted - self._core.alive))
                raise UsageError(f"no sign of life within {timeout_s:g} s from {silent}")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left_s, 1.0))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """Stream the answer; leaving the iteration early cancels the request and frees its room."""
        if request.sampling.stop and self._codec is None:
            raise UsageError("stop strings need a tokenizer", field="stop")
        name = request.id or secrets.token_hex(8)
        queue: asyncio.Queue[TokenEvent] = asyncio.Queue()
        text = self._codec.stream(request.sampling.stop) if self._codec is not None else None
        if name in self._queues:
            raise UsageError(f"a request with the id {name!r} is running", field="id")
        self._queues[name] = queue
        try:
            self._core.submit(replace(request, id=name), time.monotonic())
            while True:
                event = _with_text(await queue.get(), text)
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            del self._queues[name]
            self._core.cancel(name)

    def cancel(self, request_id: str) -> None:
        """End a request; its stream ends with the reason "cancelled"."""
        self._core.cancel(request_id)

    def cancel_all(self) -> None:
        """End every request."""
        for request_id in list(self._queues):
            self._core.cancel(request_id)

    def stats(self) -> dict[str, NodeStats]:
        """Last statistics that each node reported."""
        return self._core.stats

    def alive(self) -> frozenset[str]:
        """The names of the nodes that give signs of life."""
        return self._core.alive

    def lost(self, name: str) -> None:
        """Act at once on news that a node has died."""
        self._core.lost(name, time.monotonic())

    def add_node(self, node: NodeSpec) -> None:
        """Use one more node, or one that came back elsewhere."""
        self._core.add_node(node)
        self._mailbox.watch(node.endpoint)

    def remove_node(self, name: str) -> None:
        """Stop using a node; what runs there goes on elsewhere."""
        endpoints = {node.name: node.endpoint for node in self._core.nodes}
        self._core.remove_node(name, time.monotonic())
        if name in endpoints:
            self._mailbox.forget(endpoints[name])

    def _emit(self, event: TokenEvent) -> None:
        queue = self._queues.get(event.request_id)
        if queue is not None:
            queue.put_nowait(event)

    def _drain(self) -> None:
        now_s = time.monotonic()
        before = self._core.alive
        for message in self._mailbox.receive(0.0):
            self._core.handle(message, now_s)
        if self._core.alive != before:
            self._changed.set()

    def _tick(self) -> None:
        # What a dying node still managed to say counts before the news of its end.
        self._drain()
        now_s = time.monotonic()
        broken = set(self._mailbox.take_broken())
        for node in self._core.nodes:
            if node.endpoint in broken:
                self._core.lost(node.name, now_s)
        self._core.tick(now_s)
        # Sending may have read the descriptor's edge; look once more.
        self._drain()

    async def _keep_ticking(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._tick()


def _with_text(event: TokenEvent, text: TextStream | None) -> TokenEvent:
    """Add the text a token brings; a stop string ends the answer."""
    if text is None:
        return event
    shown, stopped = "", False
    if event.token is not None:
        step = text.push(event.token)
        shown, stopped = step.text, step.stopped
    if stopped:
        return replace(event, text=shown, finish_reason="stop")
    if event.finish_reason is not None:
        shown += text.finish()
    return replace(event, text=shown)
