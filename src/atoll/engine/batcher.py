"""Batches of a node: pure bookkeeping over the sequences it holds, no model and no sockets.

A sequence on a node is a `ResidentSequence`. On the first hop of its route it has tokens and is run whenever
it knows more tokens than it has run; on later hops it has a queue of chunks that came from the hop
before. Every stage batches on its own: whatever is ready when it looks is run together, decodes
before prefill chunks, up to a token budget.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from atoll.engine.embeds import PromptEmbeds
from atoll.engine.engine_messages import Hop, OpenBody
from atoll.engine.kv import BlockTable
from atoll.engine.rows import RowSlice
from atoll.routing.decisions import PROMPT_ORDER, free_slot, urgency

MaxInFlight = Annotated[int, Field(ge=0)] | Literal["auto", "free"]
"""Decode groups under way from a first hop: so many, as `routing.pacing` says, or any number (free, 0)."""
_SLOTS = 32
"""Groups for which there is room from the start."""


@dataclass(slots=True)
class Chunk:
    """Rows that came from the hop before: hidden states of positions from `position` on."""

    position: int
    count: int
    sample: bool
    data: RowSlice


@dataclass(slots=True)
class ResidentSequence:
    """One sequence at one hop on this node.

    `tokens` are those this node knows, from the start. `waiting` holds a first hop back until the
    others have said how much of the prefix they hold; `kv_missing` counts (layer, position) pairs
    of KV that a decode hop still waits for; `flight` is the decode group it is out with, `landed` grows with
    the time its latest token came back. `embeds` are the vectors of a prompt that a first hop has still to
    read, `reader` what a last hop has read of a prompt that is wanted itself. `way` names the nodes of the
    route to the pacer of a first hop. `drawn` counts tokens that the device has chosen and the host has not
    read; the latest is in row `source` of `StageModel.chosen`.
    """

    body: OpenBody
    tokens: list[int]
    table: BlockTable
    embeds: PromptEmbeds | None = None
    waiting: bool = False
    kv_missing: int = 0
    kv_length: int = 0
    kv_pushed: int = 0
    queue: deque[Chunk] = field(default_factory=deque)
    chooser: Any = None
    reader: Any = None
    flight: int | None = None
    landed: int = -1
    way: tuple[int, ...] = ()
    drawn: int = 0
    source: int | None = None
    active_s: float = 0.0
    came_s: float = 0.0
    fresh: bool = True
    """Whether none of it has run here."""

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
    def is_alone(self) -> bool:
        """Whether it runs on this node alone."""
        return len(self.body.route) == 1

    @property
    def age(self) -> tuple[int, int]:
        """Smaller is older; the youngest gives way first."""
        return self.body.arrival, self.body.seq

    @property
    def left(self) -> int:
        """How many tokens, known or drawn, a first hop has still to run."""
        count = len(self.tokens) + self.drawn
        # The answer ends with the token that is on its way, whichever that is.
        if self.drawn and count - self.body.prompt_length >= self.body.sampling.max_tokens:
            return 0
        return count - self.table.length

    @property
    def answers(self) -> bool:
        """Whether its prompt is done and tokens of its answer are known or drawn."""
        return len(self.tokens) + self.drawn > self.body.prompt_length

    @property
    def decodes(self) -> bool:
        """Whether a first hop's next run is the step of a single sampled token."""
        return self.left == 1 and self.answers

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


@dataclass(slots=True)
class DecodeGroup:
    """Decodes that left together: where they are counted, how many, since when, and those still out.

    `is_alone` while no other group has been out at the same time: nothing can have held it up.
    """

    slot: int
    size: int
    started_s: float
    out: set[tuple[int, int]]
    is_alone: bool


class DecodeGroups:
    """Decode groups that are under way through the later hops.

    A first hop that starts a new group whenever a few tokens are back soon has many small groups, and every
    one of them reads all weights and waits for the others. With a limit the ready ones wait and go together,
    up to their share of all sequences. `limit` is a number, None for none, or a function of the sequences
    that decode. A group much later than usual is not waited for: its route may be dead.
    """

    def __init__(self, limit: int | Callable[[int], int] | None, patience_s: float = 0.25) -> None:
        self._limit = limit
        self._patience_s = patience_s
        self._groups: dict[int, DecodeGroup] = {}
        self._flying = np.zeros(_SLOTS, np.int64)
        self._next = 0
        self._landed = 0
        self._usual_s: float | None = None

    def start(self, members: Iterable[ResidentSequence], now_s: float) -> None:
        """Note that these residents left together."""
        out = set()
        for member in members:
            member.flight = self._next
            out.add(member.key)
        if not out:
            return
        # Without a limit there may be any number of groups: the room doubles.
        if len(self._groups) == len(self._flying):
            self._flying = np.concatenate([self._flying, np.zeros_like(self._flying)])
        slot = free_slot(self._flying, len(self._flying))
        self._flying[slot] = len(out)
        # From now on several are out: the time of none of them tells how long one takes undisturbed.
        for group in self._groups.values():
            group.is_alone = False
        self._groups[self._next] = DecodeGroup(slot, len(out), now_s, out, not self._groups)
        self._next += 1

    def land(self, member: ResidentSequence, now_s: float) -> tuple[int, float] | None:
        """Note that a resident's token is back, or that it is gone.

        If it was the last of a group that was out alone, returns how many those were and their seconds.
        """
        flight, member.flight = member.flight, None
        # A count, not a time: residents that land with the same message still have an order.
        member.landed, self._landed = self._landed, self._landed + 1
        group = None if flight is None else self._groups.get(flight)
        if flight is None or group is None:
            return None
        group.out.discard(member.key)
        self._flying[group.slot] = len(group.out)
        if group.out:
            return None
        del self._groups[flight]
        took_s = now_s - group.started_s
        usual = self._usual_s
        # A moving mean: one slow group moves it by a fifth of the difference.
        self._usual_s = took_s if usual is None else 0.8 * usual + 0.2 * took_s
        return (group.size, took_s) if group.is_alone else None

    def room(self, sequences: int, now_s: float) -> int:
        """Return how many decodes may leave together now, 0 if none, of so many sequences that decode."""
        # First, so that a lost group does not keep its slot from those that are ready.
        self._give_up_late(now_s)
        limit = self._limit(sequences) if callable(self._limit) else self._limit
        if limit is None:
            return sequences
        # Where the limit is above the number of slots, there are fewer groups than it allows.
        if limit <= len(self._flying) and free_slot(self._flying, limit) < 0:
            return 0
        # A share for each of the groups, so that together they hold all sequences.
        return -(-sequences // limit)

    def _give_up_late(self, now_s: float) -> None:
        # The fixed part is for the first groups, when nothing is known of what is usual.
        patience_s = self._patience_s + 4.0 * (self._usual_s or 0.0)
        for flight, group in list(self._groups.items()):
            if now_s - group.started_s > patience_s:
                del self._groups[flight]
                self._flying[group.slot] = 0

    @property
    def count(self) -> int:
        """How many groups are under way."""
        return len(self._groups)


class Picked(NamedTuple):
    """The next batch, and whether decodes wait for a group that is under way."""

    units: list[BatchUnit]
    held_back: bool


class PromptOrder:
    """In which order prompts run: that of `routing.decisions.urgency`, the same as in the simulator.

    `promise_s` is the time to the first token that is promised; without one the oldest goes first. What a
    prompt takes from here to the end of its route is foretold by the seconds per token of the steps before,
    later layers taking as long as those here. A prompt that has begun goes on before others begin, and so
    does one whose answer had begun when it was sent back.
    """

    def __init__(self, promise_s: float | None = None, order: int = PROMPT_ORDER) -> None:
        self._promise_s = promise_s
        self._order = order
        self._token_s = 0.0

    def learn(self, units: Iterable[BatchUnit], took_s: float) -> None:
        """Take in how long a batch took, if prompts were most of it."""
        counts = [unit.count for unit in units]
        rows, prompts = sum(counts), sum(count for count in counts if count > 1)
        # Steps that are mostly decodes say little about the cost of a prompt.
        if 2 * prompts > rows:
            mean_s = took_s / rows
            # The first measurement is taken as it is; later ones are averaged in.
            self._token_s += (0.2 if self._token_s else 1.0) * (mean_s - self._token_s)

    def key(self, unit: BatchUnit, now_s: float) -> tuple[float, tuple[int, int]]:
        """Return where a prompt stands: the least goes first."""
        resident = unit.resident
        if self._promise_s is None:
            return 0.0, resident.age
        if not resident.fresh or resident.answers:
            return -math.inf, resident.age
        hop = resident.hop
        # How many times as many layers as this hop has are still to be passed.
        passes = (resident.body.route[-1].end - hop.start) / (hop.end - hop.start)
        service_s = self._token_s * (resident.body.prompt_length - unit.position) * passes
        found = urgency(self._order, now_s, resident.came_s, self._promise_s, service_s)
        return found, resident.age


def pick(
    residents: Iterable[ResidentSequence],
    budget: int,
    chunk: int,
    in_flight: DecodeGroups,
    now_s: float,
    order: PromptOrder | None = None,
    max_sequences: int | None = None,
) -> Picked:
    """Choose the next batch: decodes first, then chunks, oldest first, at most `budget` rows.

    With an `order` the chunks come in that. `chunk` bounds the rows of one sequence's prefill in a
    batch. The first unit is taken even if it alone is over the budget, for what comes from another
    hop cannot be cut. No more than `max_sequences` are in a batch, and of those whose only hop this is no
    more have begun at a time, as in the simulator: in a pipeline the limit is that of each of its batches.
    """
    begun = 0
    decodes: list[BatchUnit] = []
    paced: list[BatchUnit] = []
    others: list[BatchUnit] = []
    decoding = 0
    for resident in residents:
        # A sequence on one node alone is back as soon as it is run; there is no flight.
        is_paced = resident.is_first and not resident.is_last and resident.answers
        decoding += is_paced
        begun += resident.is_alone and not resident.fresh
        if resident.waiting or resident.kv_missing:
            continue
        if resident.is_first:
            if resident.left <= 0:
                continue
            if resident.decodes:
                unit = BatchUnit(resident, resident.table.length, 1, True)
                (paced if is_paced else decodes).append(unit)
            else:
                count = min(resident.left, chunk)
                # Only the chunk that ends the prompt asks for a token.
                done = count == resident.left
                others.append(BatchUnit(resident, resident.table.length, count, done))
        elif resident.queue:
            head = resident.queue[0]
            unit = BatchUnit(resident, head.position, head.count, head.sample, head.data)
            (decodes if head.count == 1 else others).append(unit)
    # Decodes that pass several hops are held to the limit of groups that are out.
    held_back = False
    if paced:
        # Who came back first goes first, or those at the end would never fit.
        paced.sort(key=lambda unit: unit.resident.landed)
        room = in_flight.room(decoding, now_s)
        held_back = room == 0
        decodes = paced[:room] + decodes
    prompts = order or PromptOrder()
    others.sort(key=lambda unit: prompts.key(unit, now_s))
    units = decodes + others
    # Sequences that have begun keep their places; others begin while there are places left.
    if max_sequences is not None:
        units = _with_places(units, max_sequences - begun)
    return Picked(_within(units, budget, max_sequences or budget), held_back)


def _with_places(units: list[BatchUnit], places: int) -> list[BatchUnit]:
    """Return the units without those of sequences that would begin where no more may."""
    chosen: list[BatchUnit] = []
    for unit in units:
        if unit.resident.is_alone and unit.resident.fresh:
            if places <= 0:
                continue
            places -= 1
        chosen.append(unit)
    return chosen


def _within(units: list[BatchUnit], budget: int, max_units: int) -> list[BatchUnit]:
    """Return the first units that have at most `budget` rows together, and are `max_units` at most."""
    chosen: list[BatchUnit] = []
    left = budget
    for unit in units:
        if len(chosen) >= max_units:
            break
        # A prompt can be cut at its first hop; what came from another hop waits, while smaller units may
        # still fit.
        if unit.count > left and chosen:
            if unit.resident.is_first and left > 0 and unit.count > 1:
                chosen.append(BatchUnit(unit.resident, unit.position, left, False))
                left = 0
            continue
        chosen.append(unit)
        left -= unit.count
    return chosen
