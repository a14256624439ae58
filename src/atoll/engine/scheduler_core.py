"""The scheduler's decisions: who starts where, what a lost node means, when a request is over.

No sockets and no clock: messages and the time come in, messages and token events go out. A request
whose node is lost, or was dropped to make room, starts anew under the next epoch with everything
generated so far as part of its prompt; the client sees a pause and nothing else.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from atoll.core.errors import AtollError, UsageError
from atoll.core.patience import Patience
from atoll.core.request_parameters import SamplingParams
from atoll.engine.embeds import PromptEmbeds
from atoll.engine.engine_messages import (
    FINISH_CODES,
    Evicted,
    Failed,
    Heartbeat,
    Hop,
    Message,
    NodeStats,
    Open,
    OpenBody,
    Opened,
    PipelineRoute,
    Pooled,
    ReadOrder,
    Release,
    Sampled,
    SchedulerHello,
    Scored,
    table_of,
)
from atoll.engine.pipeline_routes import NodeSpec, RouteQuery, Router
from atoll.engine.prompt_reading import PromptReading, join_scores

FinishReason = Literal["stop", "length", "error", "cancelled"]
_FINISH: dict[int, FinishReason] = {
    FINISH_CODES.index("stop"): "stop",
    FINISH_CODES.index("length"): "length",
}


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Prompt tokens and how to go on from them. `deadline_s` bounds the whole answer.

    `generated` are tokens of the answer that are known already (it began elsewhere): they count
    against `max_tokens` and in penalties, and the first event is the one after them. `embeds` are vectors
    that are read instead of the prompt's tokens at their positions. `read` asks for something of the prompt
    itself, which comes with the first event.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    id: str | None = None
    deadline_s: float | None = None
    generated: tuple[int, ...] = ()
    embeds: PromptEmbeds | None = None
    read: ReadOrder | None = None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of an answer, or its end.

    `index` counts tokens of the answer from 0. The last event has a finish reason; its token is
    None where the answer ends without one more (an error, a cancellation, a stop string).
    `top` holds (token, natural log probability) pairs. An error that is `refused` lies in what was asked.
    `reading` is what was wanted of the prompt itself; where that is a vector, nothing else comes.
    `cached` are tokens of the prompt that were not computed, since nodes held them.
    """

    request_id: str
    index: int
    token: int | None = None
    text: str = ""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    restarts: int = 0
    refused: bool = False
    reading: PromptReading | None = None
    cached: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Deadlines and limits, in seconds unless named otherwise.

    A node is lost after `dead_after_s` without a sign of life, later where delays were seen (`Patience`). A
    request that makes no progress for `stall_s` is started anew elsewhere; one that finds no route for
    `no_route_s` fails.
    """

    heartbeat_s: float = 0.25
    dead_after_s: float = 2.0
    stall_s: float = 60.0
    no_route_s: float = 60.0
    max_restarts: int = 20
    max_queued: int = 4096
    kv_fill: float = 0.97


@dataclass(slots=True)
class _Live:
    request: GenerateRequest
    id: str
    seq: int
    arrival: int
    tokens: list[int]
    sampling: SamplingParams
    started_s: float
    progress_s: float
    epoch: int = 0
    route: PipelineRoute | None = None
    opening: bool = False
    restarts: int = 0
    prefill_base: int = 0
    cached: int = 0
    early: dict[int, TokenEvent] = field(default_factory=dict)
    scores: dict[int, Scored] = field(default_factory=dict)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def hops_needed(self) -> tuple[Hop, ...]:
        """Return the hops whose loss would hurt; prompts' nodes stop mattering after two tokens."""
        if self.route is None:
            return ()
        # The prompt's side chooses the first token; a second one shows that the other side runs by itself.
        if self.route.decode is not None and len(self.tokens) - self.prefill_base >= 2:
            return self.route.decode
        return self.route.hops


class SchedulerCore:
    """Requests, nodes and their state. `send` posts a message, `emit` hands an event to a client."""

    def __init__(
        self,
        nodes: Iterable[NodeSpec],
        router: Router,
        endpoint: str,
        send: Callable[[str, Message], None],
        emit: Callable[[TokenEvent], None],
        *,
        eos: tuple[int, ...] = (),
        max_length: int = 2048,
        settings: SchedulerSettings | None = None,
        owner: str = "",
        incarnation: int = 0,
    ) -> None:
        self.endpoint = endpoint
        self._hello = SchedulerHello(reply_to=endpoint, owner=owner, incarnation=incarnation)
        self.settings = settings or SchedulerSettings()
        self._router, self._send, self._emit = router, send, emit
        self._eos, self._max_length = eos, max_length
        self._nodes: dict[str, NodeSpec] = {node.name: node for node in nodes}
        self._stats: dict[str, NodeStats] = {}
        self._beat_s: dict[str, float] = {}
        self._patience = Patience(self.settings.heartbeat_s)
        self._alive: set[str] = set()
        self._live: dict[int, _Live] = {}
        self._ids: dict[str, int] = {}
        self._queue: list[_Live] = []
        self._arrivals = 0
        self._hello_s = -math.inf

    # What others ask

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        """Every node, alive or not."""
        return tuple(self._nodes.values())

    @property
    def alive(self) -> frozenset[str]:
        """The names of nodes that give signs of life."""
        return frozenset(self._alive)

    @property
    def stats(self) -> dict[str, NodeStats]:
        """Last statistics that each node reported."""
        return dict(self._stats)

    @property
    def running(self) -> int:
        """How many requests are on nodes."""
        return len(self._live) - len(self._queue)

    @property
    def queued(self) -> int:
        """How many requests wait for a route or for room."""
        return len(self._queue)

    def submit(self, request: GenerateRequest, now_s: float) -> str:
        """Take a request and return its id; what cannot work is a UsageError at once."""
        length = len(request.prompt)
        if length == 0:
            raise UsageError("the prompt is empty", field="prompt")
        pools = request.read is not None and request.read.pool is not None
        # A prompt that is only pooled may fill the last position, too: no token follows.
        if length >= self._max_length + pools:
            raise UsageError(
                f"the prompt has {length} tokens, the model takes {self._max_length - 1}",
                field="prompt",
                hint="shorten it",
            )
        if len(self._queue) >= self.settings.max_queued:
            raise UsageError("too many requests are waiting", hint="try again later")
        name = request.id or secrets.token_hex(8)
        if name in self._ids:
            raise UsageError(f"a request with the id {name!r} is running", field="id")
        embeds, prompt = request.embeds, request.prompt
        tokens = list(prompt) if embeds is None else embeds.mark(prompt)
        sampling = request.sampling
        update: dict[str, object] = {
            "max_tokens": max(1, min(sampling.max_tokens, self._max_length - length))
        }
        if sampling.seed is None:
            # Drawn here, so that a restart goes on with the same luck.
            update["seed"] = secrets.randbits(62)
        live = _Live(
            request=request,
            id=name,
            seq=secrets.randbits(62),
            arrival=self._arrivals,
            tokens=[*tokens, *request.generated],
            sampling=sampling.model_copy(update=update),
            started_s=now_s,
            progress_s=now_s,
        )
        self._arrivals += 1
        self._live[live.seq] = live
        self._ids[name] = live.seq
        self._queue.append(live)
        self._admit(now_s)
        return name

    def cancel(self, request_id: str) -> None:
        """End a request and free its blocks; unknown ids are ignored."""
        seq = self._ids.get(request_id)
        if seq is not None:
            self._end(self._live[seq], "cancelled")

    def add_node(self, node: NodeSpec) -> None:
        """Make a node known, or known anew."""
        self._nodes[node.name] = node
        self._send(node.endpoint, self._hello)

    def remove_node(self, name: str, now_s: float) -> None:
        """Forget a node; what runs there goes on elsewhere."""
        self.lost(name, now_s)
        self._nodes.pop(name, None)
        self._stats.pop(name, None)

    def lost(self, name: str, now_s: float) -> None:
        """Treat a node as dead until it gives a sign of life again."""
        self._alive.discard(name)
        self._beat_s.pop(name, None)
        for live in list(self._live.values()):
            if any(hop.node == name for hop in live.hops_needed()):
                self._restart(live, f"node {name} was lost", now_s)
        self._admit(now_s)

    # What nodes say

    def handle(self, message: Message, now_s: float) -> None:
        """Act on one message of a node; those of earlier epochs are ignored."""
        match message:
            case Sampled():
                self._sampled(message, now_s)
            case Heartbeat(stats=stats):
                self._beaten(stats, now_s)
            case Opened():
                self._opened(message, now_s)
            case Evicted():
                live = self._current(message.seq, message.epoch)
                if live is not None:
                    live.restarts -= 1  # making room is no failure
                    self._restart(live, f"no room on {message.node}", now_s)
            case Failed():
                live = self._current(message.seq, message.epoch)
                if live is not None:
                    why = f"{message.node}: {message.message}"
                    self._end(live, "error", why, refused=message.refused)
            case Pooled():
                self._pooled(message)
            case Scored():
                seq, epoch, position = message.table[0].tolist()
                live = self._current(seq, epoch)
                if live is not None:
                    live.scores[position] = message
                    live.progress_s = now_s
            case _:
                return
        # Whatever was said may have freed room, or a node.
        self._admit(now_s)

    def tick(self, now_s: float) -> None:
        """Do what time asks for: say hello, notice silence, stalls and deadlines."""
        limits = self.settings
        if now_s - self._hello_s >= limits.heartbeat_s:
            self._hello_s = now_s
            for node in self._nodes.values():
                self._send(node.endpoint, self._hello)
        # Find nodes that have been silent for too long; where this process or the node waits for a core, that
        # is longer.
        self._patience.tick(now_s)
        for name in sorted(self._alive):
            heard_s = self._beat_s.get(name, -math.inf)
            if self._patience.is_silent(name, heard_s, limits.dead_after_s, now_s):
                self.lost(name, now_s)
        # Then requests: the deadline holds for all, the other limits depend on whether one waits or runs.
        waiting = {live.seq for live in self._queue}
        for live in list(self._live.values()):
            deadline_s = live.request.deadline_s
            if deadline_s is not None and now_s - live.started_s > deadline_s:
                self._end(live, "error", f"the deadline of {deadline_s:g} s has passed")
            elif live.seq in waiting:
                if now_s - live.progress_s > limits.no_route_s:
                    self._end(live, "error", self._why_waiting())
            elif now_s - live.progress_s > limits.stall_s:
                self._restart(live, f"no token for {limits.stall_s:g} s", now_s)
        self._admit(now_s)

    def _why_waiting(self) -> str:
        silent = sorted(set(self._nodes) - self._alive)
        return f"no route within {self.settings.no_route_s:g} s" + (
            f"; silent nodes: {', '.join(silent)}" if silent else "; the nodes are full"
        )

    def _beaten(self, stats: NodeStats, now_s: float) -> None:
        node = self._nodes.get(stats.name)
        if node is None:
            return
        # A new incarnation within the deadline: the node was started anew and holds nothing of ours.
        before = self._stats.get(stats.name)
        if before is not None and before.incarnation != stats.incarnation:
            self._patience.restart(stats.name)
        self._patience.hear(stats.name, now_s)
        if (
            before is not None
            and before.incarnation != stats.incarnation
            and stats.name in self._alive
        ):
            self.lost(stats.name, now_s)
        self._stats[stats.name] = stats
        self._beat_s[stats.name] = now_s
        self._alive.add(stats.name)

    def _opened(self, message: Opened, now_s: float) -> None:
        live = self._current(message.seq, message.epoch)
        if live is not None and live.opening:
            live.opening = False
            self._open_prefill(live, now_s)
        elif live is not None:
            live.cached = min(message.hit, len(live.request.prompt))

    def _sampled(self, message: Sampled, now_s: float) -> None:
        for row, (seq, epoch, position, token, finish) in enumerate(message.table.tolist()):
            live = self._current(seq, epoch)
            # A token that is known already is not told twice.
            if live is None or position < len(live.tokens):
                continue
            logprob = float(message.logprobs[row])
            # Where prompts and answers run on different nodes, the second token may come first.
            live.early[position] = TokenEvent(
                request_id=live.id,
                index=position - len(live.request.prompt),
                token=token,
                logprob=None if math.isnan(logprob) else logprob,
                top=tuple((t, p) for t, p in message.body.top.get(row, [])),
                finish_reason=_FINISH.get(finish),
                restarts=live.restarts,
                cached=live.cached,
            )
            live.progress_s = now_s
            self._deliver(live)

    def _pooled(self, message: Pooled) -> None:
        for (seq, epoch), vector in zip(message.table.tolist(), message.vectors, strict=True):
            live = self._current(seq, epoch)
            if live is None:
                continue
            self._forget(live)
            self._emit(
                TokenEvent(
                    request_id=live.id,
                    index=0,
                    finish_reason="stop",
                    restarts=live.restarts,
                    reading=PromptReading(vector),
                )
            )

    def _deliver(self, live: _Live) -> None:
        """Hand on the tokens that are next in order."""
        while (event := live.early.pop(len(live.tokens), None)) is not None:
            if live.scores:
                # They came before the first token: the same node said both.
                reading = join_scores(live.scores, len(live.request.prompt))
                live.scores = {}
                event = replace(event, reading=reading)
            if event.token is not None:
                live.tokens.append(event.token)
            self._emit(event)
            if event.finish_reason is not None:
                self._forget(live)
                return

    def _current(self, seq: int, epoch: int) -> _Live | None:
        live = self._live.get(seq)
        return live if live is not None and live.epoch == epoch and live.route else None

    # Starting, restarting, ending

    def _admit(self, now_s: float) -> None:
        """Start queued requests in order, as far as there are routes and room."""
        while self._queue:
            live = self._queue[0]
            load = self._load()
            try:
                route = self._router(
                    RouteQuery(
                        request_id=live.id,
                        prompt_length=len(live.tokens),
                        nodes=tuple(n for n in self._nodes.values() if n.name in self._alive),
                        stats=self._stats,
                        load=load,
                        attempt=live.restarts,
                    )
                )
            except AtollError as error:
                self._end(live, "error", str(error))
                continue
            # The first in the queue holds back those behind it: a long request is not overtaken for ever.
            if route is None or not self._fits(route, len(live.tokens), load):
                return
            self._queue.pop(0)
            self._start(live, route, now_s)

    def _load(self) -> dict[str, int]:
        load: dict[str, int] = {}
        for live in self._live.values():
            for hop in live.hops_needed():
                load[hop.node] = load.get(hop.node, 0) + len(live.tokens)
        return load

    def _fits(self, route: PipelineRoute, length: int, load: dict[str, int]) -> bool:
        """Whether every node has room, as far as this scheduler can tell.

        A node with nothing of ours is always tried: it will say itself if the request is too long.
        """
        for hop in route.hops:
            stats = self._stats.get(hop.node)
            taken = load.get(hop.node, 0)
            if stats is None or taken == 0:
                continue
            # Every sequence leaves half a block unused on average.
            room = self.settings.kv_fill * stats.blocks * stats.block_size
            if taken + length + stats.block_size > room:
                return False
        return True

    def _start(self, live: _Live, route: PipelineRoute, now_s: float) -> None:
        if live.request.read is not None and live.request.read.pool is not None:
            # There is no answer that could go on elsewhere.
            route = PipelineRoute(prefill=route.prefill)
        live.route, live.progress_s, live.prefill_base = route, now_s, len(live.tokens)
        if route.decode is None:
            self._open(live, route.prefill, now_s)
            return
        # The decode side is made ready first, so that KV never arrives before it is expected.
        live.opening = True
        self._open(live, route.decode, now_s, expects_kv=True)

    def _open_prefill(self, live: _Live, now_s: float) -> None:
        if live.route is not None:
            self._open(live, live.route.prefill, now_s, kv_to=live.route.decode or ())

    def _open(
        self,
        live: _Live,
        hops: tuple[Hop, ...],
        now_s: float,
        *,
        kv_to: tuple[Hop, ...] = (),
        expects_kv: bool = False,
    ) -> None:
        body = OpenBody(
            seq=live.seq,
            epoch=live.epoch,
            route=hops,
            prompt_length=len(live.request.prompt),
            max_length=len(live.request.prompt) + live.sampling.max_tokens,
            arrival=live.arrival,
            waited_s=now_s - live.started_s,
            reply_to=self.endpoint,
            sampling=live.sampling,
            eos=self._eos,
            kv_to=kv_to,
            expects_kv=expects_kv,
            # What is read of a prompt came with the first token, so nothing is read again after that.
            read=None if expects_kv or live.generated else live.request.read,
        )
        tokens = np.array(live.tokens, dtype=np.int64)
        embeds = live.request.embeds
        # Where the KV of the prompt comes from elsewhere, nobody reads its vectors.
        rows = None if embeds is None or expects_kv else embeds.rows
        self._send(hops[0].endpoint, Open(body, tokens, rows))

    def _restart(self, live: _Live, why: str, now_s: float) -> None:
        """Take a request off its nodes and queue it, in order of arrival, under the next epoch."""
        # It is off its nodes already.
        if live in self._queue:
            return
        # Under the old epoch: a Release that comes late must not end the next attempt.
        self._release(live)
        live.epoch += 1
        live.restarts += 1
        live.route, live.opening, live.progress_s, live.cached = None, False, now_s, 0
        # Tokens that came too early and scores belong to the old route; they come again.
        live.early.clear()
        live.scores.clear()
        if live.restarts > self.settings.max_restarts:
            self._end(live, "error", f"given up after {live.restarts} restarts: {why}")
            return
        self._queue.append(live)
        # It keeps its place: a restart does not send it behind those who came later.
        self._queue.sort(key=lambda other: other.arrival)

    def _release(self, live: _Live) -> None:
        if live.route is None:
            return
        table = table_of([(live.seq, live.epoch)], Release.columns)
        # A node that several hops share is told once.
        for endpoint in dict.fromkeys(hop.endpoint for hop in live.route.hops):
            self._send(endpoint, Release(table))

    def _forget(self, live: _Live) -> None:
        self._release(live)
        self._live.pop(live.seq, None)
        self._ids.pop(live.id, None)
        if live in self._queue:
            self._queue.remove(live)

    def _end(
        self,
        live: _Live,
        reason: FinishReason,
        error: str | None = None,
        *,
        refused: bool = False,
    ) -> None:
        self._forget(live)
        self._emit(
            TokenEvent(
                request_id=live.id,
                index=live.generated,
                finish_reason=reason,
                error=error,
                restarts=live.restarts,
                refused=refused,
            )
        )
