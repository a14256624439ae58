"""Handling of a node's messages: opens sequences, runs batches, passes results on. No sockets.

The core is driven from outside (`handle` a message, `step` once) and speaks through a `send`
function, so that the same code runs in a process of its own and inside a test.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import AtollError
from atoll.engine.batch_pacing import RoutePacer, StepReporter, node_key
from atoll.engine.batcher import (
    BatchUnit,
    Chunk,
    DecodeGroups,
    MaxInFlight,
    PromptOrder,
    ResidentSequence,
    pick,
)
from atoll.engine.compile_count import compiled
from atoll.engine.device_copy import HostCopy
from atoll.engine.embeds import PromptEmbeds, marked
from atoll.engine.engine_messages import (
    Activations,
    Evicted,
    Failed,
    KvTransfer,
    Message,
    NodeStats,
    Open,
    OpenBody,
    Opened,
    Pooled,
    Release,
    Sampled,
    SampledBody,
    SchedulerHello,
    Scored,
    StepReport,
    Table,
    Tokens,
    table_of,
)
from atoll.engine.guidance import MatcherFactory
from atoll.engine.kv import BlockPool, OutOfBlocks
from atoll.engine.launched_step import LaunchedStep
from atoll.engine.model_stage import SequenceRows, StageModel, StageOutput
from atoll.engine.prompt_reader import PromptReader
from atoll.engine.ranked_stage import RankedStage
from atoll.engine.rows import RowSlice
from atoll.engine.sequence_owners import SequenceOwners
from atoll.engine.token_sampling import SampledToken, Sampler, choose_batch, choose_tokens

_LOG = logging.getLogger(__name__)

Send = Callable[[str, Message], None]


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Limits of a node: rows in a batch, rows of one prefill chunk, decode groups under way.

    `max_sequences` are in a batch at most, and of those that this node runs alone no more run at a time.
    `place` is the cores or the GPU it runs on (`pacing.place_key`); 0 is one of its own.
    `promised_ttft_s` is the time to the first token by which prompts are ordered (`batcher.PromptOrder`).
    With `scheduling` "async" a step of sequences that run on this node alone is launched before the tokens of
    the one before are read, if the device can choose all tokens of both by itself. Ranks are always "sync".
    """

    token_budget: int = 512
    chunk: int = 256
    max_sequences: int | None = None
    max_in_flight: MaxInFlight = "auto"
    orphan_s: float = 300.0
    place: int = 0
    promised_ttft_s: float | None = None
    scheduling: Literal["sync", "async"] = "sync"


class NodeCore:
    """The sequences of one node and the stage that runs them."""

    def __init__(
        self,
        name: str,
        endpoint: str,
        stage: StageModel | RankedStage,
        pool: BlockPool,
        send: Send,
        clock: Callable[[], float],
        *,
        settings: CoreSettings | None = None,
        matchers: MatcherFactory | None = None,
        incarnation: int = 0,
    ) -> None:
        self.name, self.endpoint = name, endpoint
        self.stage, self.pool = stage, pool
        self.settings = settings or CoreSettings()
        self._order = PromptOrder(self.settings.promised_ttft_s)
        self._send, self._clock, self._matchers = send, clock, matchers
        self._incarnation = incarnation
        # Keyed by the hop as well: a route may come through this node more than once.
        self._residents: dict[tuple[int, int], ResidentSequence] = {}
        # Sequences released before their Open arrived over a slower path: seq -> epoch.
        self._released: dict[int, int] = {}
        self._owners = SequenceOwners()
        self._pacer: RoutePacer | None = None
        limit: int | Callable[[int], int] | None = None
        if self.settings.max_in_flight == "auto":
            self._pacer = RoutePacer(self.settings.token_budget)
            limit = self._pacer.batches
        elif self.settings.max_in_flight != "free":
            limit = self.settings.max_in_flight or None
        self._in_flight = DecodeGroups(limit)
        self._reporter = StepReporter(endpoint, self.settings.place)
        # Where tokens stay for the next step, if steps are launched ahead; and the step that was.
        self._chosen: Tensor | None = None
        if self.settings.scheduling == "async" and not isinstance(stage, RankedStage):
            self._chosen = stage.chosen
        self._launched: LaunchedStep | None = None
        self._ended_s = -math.inf
        self.held_back = False
        self.steps = self.tokens = self.preemptions = 0
        self.busy_s = 0.0
        # It is made when everything is warm, just before the node is ready.
        self._compiled_before = compiled()

    @property
    def idle(self) -> bool:
        """Whether no sequence is here."""
        return not self._residents

    def stats(self) -> NodeStats:
        """Return figures about now."""
        waiting = sum(r.waiting or r.kv_missing > 0 or r.fresh for r in self._residents.values())
        return NodeStats(
            name=self.name,
            endpoint=self.endpoint,
            incarnation=self._incarnation,
            start=self.stage.start,
            end=self.stage.end,
            block_size=self.pool.block_size,
            blocks=self.pool.count,
            blocks_used=self.pool.used,
            running=len(self._residents) - waiting,
            waiting=waiting,
            steps=self.steps,
            tokens=self.tokens,
            preemptions=self.preemptions,
            prefix_hits=self.pool.hits,
            prefix_lookups=self.pool.lookups,
            busy_s=self.busy_s,
            compiled_after_ready=compiled() - self._compiled_before,
        )

    def handle(self, message: Message) -> None:
        """Take one message; what concerns an unknown or older sequence is ignored."""
        match message:
            case Open():
                self._open(message)
            case Opened():
                self._opened(message)
            case Activations():
                self._activations(message)
            case Tokens():
                self._tokens(message)
            case Release():
                for seq, epoch in message.table.tolist():
                    self._release(seq, epoch)
            case KvTransfer():
                self._kv(message)
            case _:
                _LOG.warning("%s: unexpected %s", self.name, type(message).__name__)

    def hear_owner(self, hello: SchedulerHello) -> None:
        """Note that a scheduler lives; what one before it left is dropped."""
        gone = self._owners.hear(hello.reply_to, hello.owner, hello.incarnation, self._clock())
        self._drop_owned(gone)

    def note_broken(self, endpoint: str) -> None:
        """Note that the connection to a scheduler broke."""
        self._owners.note_broken(endpoint, self._clock())

    def _drop_owned(self, endpoints: list[str]) -> None:
        if endpoints:
            for resident in list(self._residents.values()):
                if resident.body.reply_to in endpoints:
                    self._drop(resident)

    def purge(self) -> None:
        """Drop sequences of schedulers that are gone, and those nobody has touched for long."""
        self._drop_owned(self._owners.take_gone(self._clock()))
        limit_s = self._clock() - self.settings.orphan_s
        for resident in list(self._residents.values()):
            if resident.active_s < limit_s:
                self._drop(resident)
        # Bounded: a Release may name sequences whose Open never comes. The latest are kept.
        self._released = dict(list(self._released.items())[-10_000:])

    def drop_all(self) -> None:
        """Forget every sequence and free its blocks."""
        for resident in list(self._residents.values()):
            self._drop(resident)

    # Opening and closing

    def _open(self, message: Open) -> None:
        body = message.body
        # The Release overtook this Open; opened now, its blocks would stay taken until the purge.
        if self._released.get(body.seq, -1) >= body.epoch:
            return
        # What an older epoch left here gives way; an Open older than what runs here comes too late.
        for resident in [r for r in self._residents.values() if r.body.seq == body.seq]:
            if resident.body.epoch > body.epoch:
                return
            if resident.body.epoch < body.epoch:
                self._drop(resident)
        problem = self._refusal(body, message.tokens) or self._refusal_of_embeds(message)
        if problem is not None:
            self._fail(body, problem)
            return
        hop = body.route[body.hop]
        tokens = [int(token) for token in message.tokens]
        # A block holds the layers of this hop alone, so they are part of what its prefix is known by.
        seed = f"{hop.start}-{hop.end}".encode()
        # Nothing is shared where the KV of every position comes from elsewhere, or every position must be
        # run.
        whole = body.read is not None and body.read.whole
        known = [] if body.expects_kv or whole else tokens
        table = self.pool.open(known, seed, body.max_length)
        now_s = self._clock()
        resident = ResidentSequence(
            body,
            tokens,
            table,
            embeds=_vectors(message),
            active_s=now_s,
            came_s=now_s - body.waited_s,
        )
        self._residents[resident.key] = resident
        if self._pacer is not None and resident.is_first and not resident.is_last:
            resident.way = tuple(node_key(hop.endpoint) for hop in body.route)
            self._pacer.note_way(resident.way)
        # Only the last hop chooses tokens.
        if resident.is_last and not self._make_chooser(resident):
            return
        if body.expects_kv:
            # One count for every layer and position: transfers come in any order and may hold several of
            # both.
            resident.kv_length = len(tokens)
            resident.kv_missing = (hop.end - hop.start) * len(tokens)
            if not self._make_room(resident, len(tokens), set()):
                return
        # The first hop proposes what it has; each later one can only shorten it, so the last knows what all
        # have.
        hit = table.length if resident.is_first else min(body.hit, table.length)
        if not body.expects_kv:
            self.pool.truncate(table, hit)
        self._announce(resident, hit, message)

    def _announce(self, resident: ResidentSequence, hit: int, message: Open) -> None:
        """Pass the Open on, or answer it at the end of the route."""
        body = resident.body
        if not resident.is_last:
            # With nothing to skip there is nothing to agree on.
            resident.waiting = resident.is_first and hit > 0
            agree = body.agree or resident.waiting
            passed = body.model_copy(update={"hop": body.hop + 1, "hit": hit, "agree": agree})
            self._post(body.route[body.hop + 1].endpoint, Open(passed, message.tokens))
            return
        opened = Opened(seq=body.seq, epoch=body.epoch, hit=hit)
        # The scheduler opens the side of the prompt when it has this answer.
        if body.expects_kv:
            self._send(body.reply_to, opened)
        # The first hop holds back its rows until it has this; the scheduler says how much was not computed.
        elif body.agree:
            self._post(body.route[0].endpoint, opened)
        if hit and not body.expects_kv:
            self._send(body.reply_to, opened)

    def _refusal(self, body: OpenBody, tokens: Table) -> str | None:
        known = len(tokens)
        if body.hop >= len(body.route):
            return f"hop {body.hop} of a route of {len(body.route)}"
        hop = body.route[body.hop]
        if not self.stage.start <= hop.start < hop.end <= self.stage.end:
            return (
                f"asked for layers [{hop.start}, {hop.end}), holds "
                f"[{self.stage.start}, {self.stage.end})"
            )
        if body.hop == 0 and hop.start != 0:
            return f"a route begins at layer {hop.start}"
        if body.hop and body.route[body.hop - 1].end != hop.start:
            return f"a route jumps from layer {body.route[body.hop - 1].end} to {hop.start}"
        if body.hop == len(body.route) - 1 and hop.end != self.stage.total:
            return f"a route ends at layer {hop.end} of {self.stage.total}"
        if not 0 < body.prompt_length <= known:
            return f"a prompt of {body.prompt_length} in {known} tokens"
        if int(tokens.max()) >= self.stage.vocabulary:
            return f"a token is not in the vocabulary of {self.stage.vocabulary}"
        # One position more than is known: there must be room for a token of the answer.
        if -(-(known + 1) // self.pool.block_size) > self.pool.count:
            return (
                f"{known} tokens need more than the {self.pool.count} KV blocks of "
                f"{self.pool.block_size} positions there are"
            )
        return None

    def _refusal_of_embeds(self, message: Open) -> str | None:
        body, embeds = message.body, message.embeds
        marks = marked(message.tokens)
        reads = body.hop == 0 and not body.expects_kv
        # Negative tokens mark vectors: only a prompt has them, and only the first hop that reads it needs
        # them.
        if len(marks) and (int(marks[-1]) >= body.prompt_length or (reads and embeds is None)):
            return f"a token is not in the vocabulary of {self.stage.vocabulary}"
        if embeds is None:
            return None
        if not reads:
            return "vectors came where none are read"
        if embeds.shape[1] != self.stage.width:
            return f"vectors of the prompt are {embeds.shape[1]} wide, the model {self.stage.width}"
        return None if np.isfinite(embeds).all() else "a vector of the prompt is not finite"

    def _make_chooser(self, resident: ResidentSequence) -> bool:
        """Make ready what a last hop needs; False if what is asked for cannot be done."""
        body = resident.body
        if body.read is not None:
            resident.reader = PromptReader(body.read, resident.tokens, body.prompt_length)
        try:
            resident.chooser = Sampler(
                body.sampling, body.eos, resident.tokens, body.prompt_length, self._matchers
            )
        except Exception as error:  # noqa: BLE001 - one request must not end the node
            self._drop(resident)
            self._fail(body, _told(error), refused=True)
            return False
        return True

    def _opened(self, message: Opened) -> None:
        resident = self._find(message.seq, message.epoch, 0)
        if resident is not None:
            self.pool.truncate(resident.table, message.hit)
            resident.waiting = False

    def _release(self, seq: int, epoch: int) -> None:
        if self._released.get(seq, -1) < epoch:
            # Taken out first, so that it goes to the end: the purge keeps the latest.
            self._released.pop(seq, None)
            self._released[seq] = epoch
        for resident in [r for r in self._residents.values() if r.body.seq == seq]:
            if resident.body.epoch <= epoch:
                self._drop(resident)

    def _drop(self, resident: ResidentSequence) -> None:
        if self._residents.pop(resident.key, None) is not None:
            self._in_flight.land(resident, self._clock())
            self.pool.close(resident.table)

    def _find(self, seq: int, epoch: int, hop: int) -> ResidentSequence | None:
        resident = self._residents.get((seq, hop))
        if resident is None or resident.body.epoch != epoch:
            return None
        resident.active_s = self._clock()
        return resident

    def _fail(self, body: OpenBody, message: str, *, refused: bool = False) -> None:
        failed = Failed(
            seq=body.seq, epoch=body.epoch, node=self.name, message=message, refused=refused
        )
        self._send(body.reply_to, failed)

    def _post(self, to: str, message: Message) -> None:
        """Send, or hand over at once when it is for this very node."""
        if to == self.endpoint:
            self.handle(message)
        else:
            self._send(to, message)

    # What comes in while a sequence runs

    def _activations(self, message: Activations) -> None:
        row = 0
        for seq, epoch, hop, position, count, sample, token in message.table.tolist():
            data = RowSlice(message.hidden, row, count)
            row += count
            resident = self._find(seq, epoch, hop)
            if resident is None:
                continue
            # Rows must follow those that wait here, or else those that have run.
            ahead = (
                resident.queue[-1].position + resident.queue[-1].count if resident.queue else None
            )
            # While KV still comes, the table is not committed: rows then follow the prompt whose KV it is.
            ran = resident.kv_length if resident.kv_missing else resident.table.length
            expected = ran if ahead is None else ahead
            # A gap can never be filled: what is missing was lost on the way.
            if position > expected or message.hidden.shape[1] != self.stage.width:
                self._fail(resident.body, f"rows at {position} came where {expected} was due")
                self._drop(resident)
                continue
            # The agreed prefix is shorter than the one that is known here: run on from where the rows begin.
            if position < expected and ahead is None and not resident.kv_length:
                self.pool.truncate(resident.table, position)
            # A decode brings its token, so that full blocks of the answer become known on later hops, too.
            if token >= 0:
                resident.know(position, token)
            resident.queue.append(Chunk(position, count, bool(sample), data))
        self._reporter.pass_on(message.reports)

    def _tokens(self, message: Tokens) -> None:
        if self._pacer is not None:
            # Reports of a whole route arrive at its first hop together with the tokens.
            for row in message.reports.tolist():
                self._pacer.hear(StepReport(*row))
        for seq, epoch, position, token in message.table.tolist():
            resident = self._find(seq, epoch, 0)
            if resident is not None:
                resident.know(position, token)
                self._land(resident)

    def _land(self, resident: ResidentSequence) -> None:
        group = self._in_flight.land(resident, self._clock())
        if group is not None and self._pacer is not None:
            self._pacer.note_return(*group)

    def _kv(self, message: KvTransfer) -> None:
        seq, epoch, hop, first, last, position = message.table[0].tolist()
        resident = self._find(seq, epoch, hop)
        if resident is None:
            return
        inside = resident.hop.start <= first < last <= resident.hop.end
        inside = inside and message.data.shape[3:] == self.stage.kv_shape
        end = position + message.data.shape[2]
        # The blocks were taken when the sequence was opened; nothing may be written past them.
        if (
            not inside
            or not 0 <= position < end <= len(resident.table.blocks) * self.pool.block_size
        ):
            self._fail(resident.body, f"KV of layers [{first}, {last}) came unasked")
            self._drop(resident)
            return
        self.stage.write_kv(range(first, last), resident.table, position, message.data)
        resident.kv_missing -= (last - first) * (end - position)
        if resident.kv_missing == 0:
            # The first token of the answer may have come before the last of the KV.
            length = resident.kv_length
            self.pool.commit(resident.table, length, resident.tokens[:length])

    # Running

    def step(self) -> bool:
        """Run one batch and pass on what it gives; False if there was nothing to run.

        A batch that can go ahead is launched, and what is passed on is what the one before it gave.
        """
        began_s = self._clock()
        if self._launched is not None:
            self._launched.look(began_s)
        self._renew_pace()
        # Choose a batch, and give blocks to what is in it; some may be dropped for that.
        picked = pick(
            self._residents.values(),
            self.settings.token_budget,
            self.settings.chunk,
            self._in_flight,
            began_s,
            self._order,
            self.settings.max_sequences,
        )
        self.held_back = picked.held_back
        ahead = self._goes_ahead(picked.units)
        # What is missing comes with the tokens of the step before: what they are, or blocks of who ends.
        if self._launched is not None and not (ahead and self._fits(picked.units)):
            self._collect()
            return True
        units = self._with_room(picked.units)
        if not units:
            return False
        # Rows for the same receiver lie together, so they leave as one piece.
        units.sort(key=lambda unit: (unit.resident.hop.start, self._next_endpoint(unit)))
        output = self.stage.forward([self._rows(unit) for unit in units])
        # The books are brought up to date before anything leaves: a message to this very node is handled at
        # once.
        for unit in units:
            self._ran(unit)
        if ahead:
            launched = self._launch(units, output, began_s)
            if self._launched is not None:
                self._collect()
            self._launched = launched
            return True
        self._push_kv(units)
        # Scores leave before the first token does: the scheduler joins them to its event.
        self._read([(units[i], normed) for i, normed in output.kept])
        self._pass_on(units, output)
        if output.logits is not None:
            self._sample([units[i] for i in output.sampled], output.logits)
        for unit in units:
            if unit.sample and unit.resident.body.kv_to:
                # The prompt is done here; the answer goes on elsewhere.
                self._drop(unit.resident)
        self._measure(units, began_s, self._clock())
        return True

    def _measure(self, units: list[BatchUnit], began_s: float, ended_s: float) -> None:
        """Note how long a step took, for the order of prompts and for the pace of decode groups."""
        self.steps += 1
        self.tokens += sum(unit.count for unit in units)
        # While the step before still ran, this one only waited for the device.
        took_s = ended_s - max(began_s, self._ended_s)
        self._ended_s = ended_s
        self._order.learn(units, took_s)
        self.busy_s += took_s
        report = self._reporter.measure([(u.count, u.sample) for u in units], took_s)
        if self._pacer is not None and report is not None:
            self._pacer.hear(report)

    # Steps ahead of their tokens

    def _goes_ahead(self, units: list[BatchUnit]) -> bool:
        """Whether the device can run these and choose their tokens without the host."""
        room = 0 if self._chosen is None else len(self._chosen)
        return 0 < len(units) <= room and all(map(_needs_no_host, units))

    def _fits(self, units: list[BatchUnit]) -> bool:
        """Whether there are blocks for all of these and nobody must give way."""
        missing = (self.pool.missing(unit.resident.table, unit.end) for unit in units)
        return sum(missing) <= self.pool.free

    def _launch(self, units: list[BatchUnit], output: StageOutput, began_s: float) -> LaunchedStep:
        """Have the device choose the tokens of a step, and keep them for the next one."""
        assert self._chosen is not None
        sampled = [units[i] for i in output.sampled]
        tokens = self._chosen[:0]
        if output.logits is not None and sampled:
            choosers = [unit.resident.chooser for unit in sampled]
            with torch.inference_mode():
                tokens = choose_tokens(output.logits, choosers, [unit.end for unit in sampled])
                self._chosen[: len(sampled)] = tokens
        for row, unit in enumerate(sampled):
            unit.resident.drawn += 1
            unit.resident.source = row
        launched = LaunchedStep(units, sampled, HostCopy(tokens), began_s)
        launched.look(self._clock())
        return launched

    def _collect(self) -> None:
        """Read the tokens of the step that was launched, and pass them on."""
        launched, self._launched = self._launched, None
        assert launched is not None
        tokens = launched.tokens.wait().tolist()
        launched.look(self._clock())
        chosen: list[tuple[BatchUnit, SampledToken]] = []
        for unit, token in zip(launched.sampled, tokens, strict=True):
            resident = unit.resident
            # It was released since, or ended with the token before: nobody wants this one.
            if self._residents.get(resident.key) is not resident:
                continue
            resident.drawn -= 1
            choice = resident.chooser.take(token)
            if not choice.finish:
                # A block may be full of rows whose last token is known only now.
                self.pool.commit(resident.table, resident.table.length, resident.tokens)
            chosen.append((unit, choice))
        self._return_tokens(chosen)
        self._measure(launched.units, launched.began_s, launched.done_s)

    def _renew_pace(self) -> None:
        if self._pacer is not None and self._pacer.stale:
            ways = [resident.way for resident in self._residents.values() if resident.way]
            if ways:
                self._pacer.rebuild(ways)

    def _next_endpoint(self, unit: BatchUnit) -> str:
        body = unit.resident.body
        return "" if unit.resident.is_last else body.route[body.hop + 1].endpoint

    def _rows(self, unit: BatchUnit) -> SequenceRows:
        resident = unit.resident
        data, embeds, source = unit.data, None, None
        if resident.is_first:
            data = resident.tokens[unit.position : unit.end]
            if not data:
                data, source = [0], resident.source
        if resident.embeds is not None:
            given = resident.embeds.between(unit.position, unit.end)
            embeds = None if given is None else (torch.tensor(given[0]), torch.tensor(given[1]))
        hop, reader = resident.hop, resident.reader
        # Of a prompt that is pooled a vector is wanted, so no logits are computed.
        sample = unit.sample and (reader is None or not reader.pools)
        keep = reader is not None and unit.position < resident.body.prompt_length
        return SequenceRows(
            hop.start,
            hop.end,
            unit.position,
            unit.count,
            resident.table,
            data,
            sample,
            embeds,
            keep,
            source,
        )

    def _ran(self, unit: BatchUnit) -> None:
        resident = unit.resident
        resident.fresh = False
        resident.active_s = self._clock()
        self.pool.commit(resident.table, unit.end, resident.tokens)
        # All vectors have run: they are large and not needed any more.
        if resident.embeds is not None and unit.end >= resident.embeds.end:
            resident.embeds = None
        if not resident.is_first:
            resident.queue.popleft()

    def _with_room(self, units: list[BatchUnit]) -> list[BatchUnit]:
        """Give every unit its blocks, dropping the youngest sequences where there are too few."""
        chosen = {unit.resident.key for unit in units}
        # From the oldest on, so that it is the younger ones that give way.
        for unit in sorted(units, key=lambda u: u.resident.age):
            if unit.resident.key in chosen:
                self._make_room(unit.resident, unit.end, chosen)
        return [unit for unit in units if unit.resident.key in chosen]

    def _make_room(
        self, resident: ResidentSequence, positions: int, chosen: set[tuple[int, int]]
    ) -> bool:
        while True:
            try:
                self.pool.grow(resident.table, positions)
            except OutOfBlocks:
                # Who ends with the step under way gives its blocks back.
                if self._launched is not None:
                    self._collect()
                    continue
                # The one that asks may be the youngest itself, though it holds no block yet.
                holders = [r for r in self._residents.values() if r.table.blocks] or [resident]
                victim = max((*holders, resident), key=lambda r: r.age)
                # Nobody else holds any: to start it anew would not help, so it fails.
                if len(holders) == 1 and holders[0] is resident:
                    self._fail(
                        resident.body, f"{positions} positions do not fit this node's KV blocks"
                    )
                else:
                    self._report_eviction(victim)
                chosen.discard(victim.key)
                self._drop(victim)
                if victim is resident:
                    return False
            else:
                return True

    def _report_eviction(self, victim: ResidentSequence) -> None:
        self.preemptions += 1
        body = victim.body
        self._send(body.reply_to, Evicted(seq=body.seq, epoch=body.epoch, node=self.name))

    def _pass_on(self, units: list[BatchUnit], output: StageOutput) -> None:
        rows: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        sources: dict[str, list[int]] = defaultdict(list)
        passing = set()
        leaving = []
        for number, unit in enumerate(units):
            if output.joined is None and output.hidden[number] is None:
                continue
            resident, body = unit.resident, unit.resident.body
            to = body.route[body.hop + 1].endpoint
            # Hops know the tokens of the prompt from the Open; those of the answer come with their rows.
            token = resident.tokens[unit.position] if unit.count == 1 else -1
            row = (body.seq, body.epoch, body.hop + 1, unit.position, unit.count)
            rows[to].append((*row, int(unit.sample), token))
            sources[to].append(number)
            # Rows that pass through take the reports of the hops before along.
            if not resident.is_first:
                passing.add(to)
            elif unit.sample and resident.answers:
                leaving.append(resident)
        self._in_flight.start(leaving, self._clock())
        if self._pacer is not None:
            self._pacer.note_group(resident.way for resident in leaving)
        for to, table in rows.items():
            joined = output.of(sources[to])
            reports = self._reporter.table(is_start=to not in passing)
            self._post(to, Activations(table_of(table, Activations.columns), joined, reports))

    def _push_kv(self, units: list[BatchUnit]) -> None:
        """Send what is newly written to the decode nodes that will want it."""
        for unit in units:
            resident, body = unit.resident, unit.resident.body
            start, resident.kv_pushed = resident.kv_pushed, unit.end
            for number, hop in enumerate(body.kv_to):
                # The two sides may divide the layers differently: each pair of hops shares a range, maybe an
                # empty one.
                first, last = max(hop.start, resident.hop.start), min(hop.end, resident.hop.end)
                if first >= last:
                    continue
                data = self.stage.read_kv(range(first, last), resident.table, start, unit.end)
                row = (body.seq, body.epoch, number, first, last, start)
                self._post(hop.endpoint, KvTransfer(table_of([row], KvTransfer.columns), data))

    def _read(self, kept: list[tuple[BatchUnit, Tensor]]) -> None:
        """Take in what is wanted of prompts themselves; tell the scheduler what is ready."""
        for unit, normed in kept:
            resident, body = unit.resident, unit.resident.body
            with torch.inference_mode():
                scored = resident.reader.take(unit.position, normed, self.stage)
            if scored is not None:
                row = (body.seq, body.epoch, unit.position + 1)
                self._send(body.reply_to, Scored(table_of([row], Scored.columns), *scored))
            if resident.reader.pools and unit.sample:
                table = table_of([(body.seq, body.epoch)], Pooled.columns)
                self._send(body.reply_to, Pooled(table, resident.reader.vector()[None]))
                self._drop(resident)

    def _sample(self, units: list[BatchUnit], logits: Tensor) -> None:
        if not units:
            return
        with torch.inference_mode():
            choices = choose_batch(logits, [unit.resident.chooser for unit in units])
        chosen: list[tuple[BatchUnit, SampledToken]] = []
        for unit, choice in zip(units, choices, strict=True):
            if isinstance(choice, SampledToken):
                chosen.append((unit, choice))
            else:
                self._fail(unit.resident.body, str(choice), refused=True)
                self._drop(unit.resident)
        self._return_tokens(chosen)

    def _return_tokens(self, chosen: list[tuple[BatchUnit, SampledToken]]) -> None:
        """Tell the first hop, which can go on at once, and the scheduler, which streams."""
        back: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        reports: dict[str, list[tuple[BatchUnit, SampledToken]]] = defaultdict(list)
        for unit, choice in chosen:
            body = unit.resident.body
            reports[body.reply_to].append((unit, choice))
            unit.resident.know(unit.end, choice.token)
            if choice.finish:
                self._drop(unit.resident)
                continue
            # Where the answer runs on other nodes, theirs is the first hop to be told.
            first = (body.kv_to or body.route)[0].endpoint
            # A sequence that runs here from first to last hop knows its token already.
            if body.kv_to or not unit.resident.is_first:
                back[first].append((body.seq, body.epoch, unit.end, choice.token))
        for to, rows in back.items():
            self._post(to, Tokens(table_of(rows, Tokens.columns), self._reporter.table()))
        for to, report in reports.items():
            self._send(to, _sample_rows(report))


def _needs_no_host(unit: BatchUnit) -> bool:
    """Whether the host has nothing to do for these rows between two steps."""
    resident = unit.resident
    if not resident.is_alone or resident.body.kv_to:
        return False
    if resident.reader is not None and unit.position < resident.body.prompt_length:
        return False
    return not unit.sample or resident.chooser.is_simple


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"


def _vectors(message: Open) -> PromptEmbeds | None:
    if message.embeds is None:
        return None
    return PromptEmbeds(marked(message.tokens), message.embeds)


def _sample_rows(report: list[tuple[BatchUnit, SampledToken]]) -> Sampled:
    rows = [
        (u.resident.body.seq, u.resident.body.epoch, u.end, choice.token, choice.finish)
        for u, choice in report
    ]
    return Sampled(
        table_of(rows, Sampled.columns),
        np.array([choice.logprob for _, choice in report], dtype=np.float32),
        SampledBody(top={i: list(c.top) for i, (_, c) in enumerate(report) if c.top}),
    )
