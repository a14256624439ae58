"""What a node runs next: pure bookkeeping over the sequences it holds, no model and no sockets.

A sequence on a node is a `ResidentSequence`. On the first hop of its route it has tokens and is run whenever
it knows more tokens than it has run; on later hops it has a queue of chunks that came from the hop
before. Every stage batches on its own: whatever is ready when it looks is run together, decodes
before prefill chunks, up to a token budget.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from atoll.engine.kv import BlockTable
from atoll.engine.messages import Hop, OpenBody
from atoll.routing.decisions import BY_LENGTH, urgency


@dataclass(slots=True)
class Chunk:
    """Rows that came from the hop before: hidden states of positions from `position` on."""

    position: int
    count: int
    sample: bool
    data: Any


@dataclass(slots=True)
class ResidentSequence:
    """One sequence at one hop on this node.

    `tokens` are those this node knows, from the start. `waiting` holds a first hop back until the
    others have said how much of the prefix they hold; `kv_missing` counts (layer, position) pairs
    of KV that a decode hop still waits for.
    """

    body: OpenBody
    tokens: list[int]
    table: BlockTable
    waiting: bool = False
    kv_missing: int = 0
    kv_length: int = 0
    kv_pushed: int = 0
    queue: deque[Chunk] = field(default_factory=deque)
    chooser: Any = None
    flight: int | None = None
    active_s: float = 0.0
    came_s: float = 0.0
    fresh: bool = True

    @property
    def key(self) -> tuple[int, int]:
        """The sequence and the hop."""
        return self.body.seq, self.body.hop

    @property
    def hop(self) -> Hop:
        """This node's part of the route."""
        return self.body.route[self.body.hop]

    @property
    def is_first(self) -> bool:
        """Whether this is where tokens become hidden states."""
        return self.body.hop == 0

    @property
    def is_last(self) -> bool:
        """Whether this is where hidden states become tokens."""
        return self.body.hop == len(self.body.route) - 1

    @property
    def age(self) -> tuple[int, int]:
        """Smaller is older; the youngest gives way first."""
        return self.body.arrival, self.body.seq

    @property
    def left(self) -> int:
        """How many known tokens a first hop has still to run."""
        return len(self.tokens) - self.table.length

    @property
    def decodes(self) -> bool:
        """Whether a first hop's next run is the step of a single sampled token."""
        return self.left == 1 and len(self.tokens) > self.body.prompt_length

    def know(self, position: int, token: int) -> None:
        """Learn the token at `position` if it is the next unknown one."""
        if position == len(self.tokens):
            self.tokens.append(token)


@dataclass(slots=True)
class BatchUnit:
    """A resident and the rows of it that go into the next batch."""

    resident: ResidentSequence
    position: int
    count: int
    sample: bool
    data: Any = None

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.position + self.count


class DecodeGroups:
    """Decode groups that are under way through the later hops.

    A first hop that starts a new group whenever a few tokens are back soon has many small groups,
    and every one of them reads all weights. With a limit the ready ones wait and go together. A
    group much later than usual is not waited for: its route may be dead.
    """

    def __init__(self, limit: int, patience_s: float = 0.25) -> None:
        self.limit = limit
        self._patience_s = patience_s
        self._groups: dict[int, tuple[float, set[tuple[int, int]]]] = {}
        self._next = 0
        self._usual_s: float | None = None

    def start(self, members: Iterable[ResidentSequence], now_s: float) -> None:
        """Note that these residents left together."""
        group = set()
        for member in members:
            member.flight = self._next
            group.add(member.key)
        if group:
            self._groups[self._next] = (now_s, group)
            self._next += 1

    def land(self, member: ResidentSequence, now_s: float) -> None:
        """Note that a resident's token is back, or that it is gone."""
        flight, member.flight = member.flight, None
        if flight is None or flight not in self._groups:
            return
        started_s, group = self._groups[flight]
        group.discard(member.key)
        if not group:
            del self._groups[flight]
            took_s = now_s - started_s
            usual = self._usual_s
            self._usual_s = took_s if usual is None else 0.8 * usual + 0.2 * took_s

    def may_start(self, now_s: float) -> bool:
        """Whether another decode group may leave now."""
        patience_s = self._patience_s + 4.0 * (self._usual_s or 0.0)
        late = [f for f, (started_s, _) in self._groups.items() if now_s - started_s > patience_s]
        for flight in late:
            del self._groups[flight]
        return len(self._groups) < self.limit

    @property
    def count(self) -> int:
        """How many groups are under way."""
        return len(self._groups)


class PromptOrder:
    """In which order prompts run: that of `routing.decisions.urgency`, the same as in the simulator.

    `promise_s` is the time to the first token that is promised; without one the oldest goes first. What a
    prompt takes is foretold by the seconds per token of the steps before. A prompt that has begun goes on
    before others begin, and so does one whose answer had begun when it was sent back.
    """

    def __init__(self, promise_s: float | None = None, order: int = BY_LENGTH) -> None:
        self._promise_s = promise_s
        self._order = order
        self._token_s = 0.0

    def learn(self, units: Iterable[BatchUnit], took_s: float) -> None:
        """Take in how long a batch took, if prompts were most of it."""
        counts = [unit.count for unit in units]
        rows, prompts = sum(counts), sum(count for count in counts if count > 1)
        if 2 * prompts > rows:
            mean_s = took_s / rows
            self._token_s += (0.2 if self._token_s else 1.0) * (mean_s - self._token_s)

    def key(self, unit: BatchUnit, now_s: float) -> tuple[float, tuple[int, int]]:
        """Return where a prompt stands: the least goes first."""
        resident = unit.resident
        if self._promise_s is None:
            return 0.0, resident.age
        answers = len(resident.tokens) > resident.body.prompt_length
        if not resident.fresh or answers:
            return -math.inf, resident.age
        service_s = self._token_s * (resident.body.prompt_length - unit.position)
        found = urgency(self._order, now_s, resident.came_s, self._promise_s, service_s)
        return found, resident.age


def pick(
    residents: Iterable[ResidentSequence],
    budget: int,
    chunk: int,
    in_flight: DecodeGroups,
    now_s: float,
    order: PromptOrder | None = None,
) -> list[BatchUnit]:
    """Choose the next batch: decodes first, then chunks, oldest first, at most `budget` rows.

    With an `order` the chunks come in that. `chunk` bounds the rows of one sequence's prefill in a
    batch. The first unit is taken even if it alone is over the budget, for what comes from another
    hop cannot be cut.
    """
    decodes: list[BatchUnit] = []
    others: list[BatchUnit] = []
    may_decode = in_flight.may_start(now_s)
    for resident in residents:
        if resident.waiting or resident.kv_missing:
            continue
        if resident.is_first:
            if resident.left <= 0:
                continue
            # A sequence on one node alone is back as soon as it is run; there is no flight.
            if resident.decodes and (may_decode or resident.is_last):
                decodes.append(BatchUnit(resident, resident.table.length, 1, True))
            elif not resident.decodes:
                count = min(resident.left, chunk)
                done = count == resident.left
                others.append(BatchUnit(resident, resident.table.length, count, done))
        elif resident.queue:
            head = resident.queue[0]
            unit = BatchUnit(resident, head.position, head.count, head.sample, head.data)
            (decodes if head.count == 1 else others).append(unit)
    prompts = order or PromptOrder()
    others.sort(key=lambda unit: prompts.key(unit, now_s))
    return _within(decodes + others, budget)


def _within(units: list[BatchUnit], budget: int) -> list[BatchUnit]:
    chosen: list[BatchUnit] = []
    left = budget
    for unit in units:
        if unit.count > left and chosen:
            if unit.resident.is_first and left > 0 and unit.count > 1:
                chosen.append(BatchUnit(unit.resident, unit.position, left, False))
                left = 0
            continue
        chosen.append(unit)
        left -= unit.count
    return chosen
