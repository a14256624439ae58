"""A fabric of thousands in one process: the real registries, a virtual network, a virtual clock.

Hubs and a sample of the members are real replicas: `Registry` with its merges, exchanges and timers. The
others (`SpeakingMember`) only speak: they have tokens, push their records, sign again, come and go as members
do, and what they would ask or answer falls to a member of the sample, so that each of the sample asks and
is asked as often as any member of a fabric of that size. Signatures are stubs; what checking one takes is
charged to the clock of whoever checks it. Every message passes a hub, which has so many bytes and messages a
second for all members, the ones outside of the sample included. Equal seeds give equal runs.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import msgspec

from atoll.fabric.identity.fabric_keys import is_hub
from atoll.fabric.registry import fabric_registry as registry_module
from atoll.fabric.registry import sync
from atoll.fabric.registry.effects import Effect, NewSession, Publish, Pull, RegistrySettings
from atoll.fabric.registry.fabric_registry import Registry
from atoll.fabric.registry.records import (
    Gpu,
    Hardware,
    Metadata,
    NodeService,
    Record,
    SessionState,
    decode_metadata,
    encode_metadata,
    farewell,
)
from atoll.fabric.registry.sync_exchange import SyncExchange

START_S = 1_800_000_000.0
VERIFY_S = 210e-6
"""Checking certificate and signature of one record, as measured; a known certificate."""
HANDLE_S = 30e-6
"""Anything else that a message takes."""
LATENCY_S = (0.002, 0.010)
HUB_BYTES_S = 1.25e9
"""What a hub sends: 10 Gbit/s."""
HUB_MESSAGE_S = 1e-6
"""Time of a hub for one message to one member: 8 us of CPU on 8 cores."""
HUB_CORES = 8
CONNECT_S, CONNECT_SLOT_S = 0.0015, 3.2e-6
"""CPU of a hub for a new link, and more for each slot of the fabric, as measured."""
_GROUPS = 10
HEADER_BYTES = 60
"""Key, headers and TLS of one message."""
CERTIFICATE_BYTES = 407
SIGNATURE_BYTES = 70
FLAP_S = 0.3
QUERY_S = 1.5
PULLS_AT_ONCE = 2
SETTINGS = RegistrySettings(pull_risen_s=0.2)


def describe(slot: str, note: str = "") -> Metadata:
    """Return what a node with four GPUs and one model says of itself."""
    if is_hub(slot):
        return Metadata(name=slot, provider="lab", role="hub")
    gpus = (Gpu("A100-80G", 4, 80 << 30),)
    model = NodeService("meta-llama/Llama-3.1-70B-Instruct", ("llama-70b",), "bf16", 131072)
    return Metadata(
        name=f"{slot}/gpu1",
        provider="lab",
        role="worker",
        region="eu-west",
        hardware=Hardware(gpus, "AMD EPYC 7742", 128, 512 << 30),
        engine="vllm",
        engine_version="0.9.1",
        services=(model,),
        max_inflight=256,
        labels={"note": note} if note else {},
    )


def sign(
    slot: str, sid: str, state: SessionState, rev: int, signed_s: float, body: bytes
) -> Record:
    """Return a record with a certificate and a signature of the usual sizes, both worth nothing."""
    certificate = slot.encode().ljust(CERTIFICATE_BYTES, b".")
    signature = slot.encode().ljust(SIGNATURE_BYTES, b"-")
    return Record(sid, state, rev, signed_s, body, certificate, signature)


@dataclass(eq=False, slots=True)
class SpeakingMember:
    """A member outside of the sample: what it last said, and where it is."""

    slot: str
    record: Record
    part: int = 0
    up: bool = True
    sign_s: float = 0.0
    side: int = 0


@dataclass(eq=False, slots=True)
class SampledMember:
    """A member of the sample, or a hub: a real replica, and what it costs."""

    slot: str
    registry: Registry
    up: bool = True
    part: int = 0
    seen: dict[str, str] = field(default_factory=dict)
    """Tokens as this member sees them: session -> slot."""
    pulls: int = 0
    woken_s: float = float("inf")
    busy_s: float = 0.0
    side: int = 0
    """Of the network, when it is cut in two: who was on one side answers for those there."""
    waiting: deque[Callable[[], None]] = field(default_factory=deque)
    verified: int = 0
    messages: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.sent_bytes + self.received_bytes


class RegistryWorld:
    """All of it; `pass_time` runs what is due."""

    def __init__(
        self, members: int, *, hubs: int, sample: int, seed: int = 1, flat: bool = False
    ) -> None:
        """Nobody is there yet; `flat` has replicas that differ tell all versions, without a tree."""
        self.rng = random.Random(seed)
        self.flat = flat
        self.members = members
        self.now_s = START_S
        self.hub_slots = [f"h{number}" for number in range(hubs)]
        self.slots = [f"m{number:03d}" for number in range(members)]
        # The sample is spread over the order in which members start.
        step = members / min(sample, members)
        self.chosen = {self.slots[int(number * step)] for number in range(min(sample, members))}
        self.weight = members / len(self.chosen)
        self.nodes: list[SampledMember] = []
        self.extras: dict[str, SpeakingMember] = {}
        self.by_sid: dict[str, SampledMember] = {}
        self.exchanges = 0
        self.hubs_up = 0
        self.hub_free_s = 0.0
        self.hub_bytes = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._fresh = count(members)

    # Time

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + seconds, next(self._order), what))

    def pass_time(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._due and self._due[0][0] <= end_s:
            self.now_s, _, what = heapq.heappop(self._due)
            what()
        self.now_s = end_s

    def until(self, true: Callable[[], bool], max_s: float, step_s: float = 0.05) -> float | None:
        """Pass time until something is true; return how long it took, or None: not in `max_s`."""
        start_s = self.now_s
        while not true():
            if self.now_s - start_s > max_s:
                return None
            self.pass_time(step_s)
        return self.now_s - start_s

    # Members

    @property
    def living(self) -> list[SampledMember]:
        return [node for node in self.nodes if node.up]

    def start(self, slot: str, state: SessionState = SessionState.SERVING) -> None:
        """Start a member: a real one if it is of the sample."""
        if slot in self.chosen or is_hub(slot):
            self._start_sampled(slot, state)
            return
        sid = f"{slot}-{self.rng.getrandbits(64):016x}"
        record = sign(slot, sid, state, 0, self.now_s, encode_metadata(describe(slot)))
        extra = self.extras[sid] = SpeakingMember(slot, record)
        extra.sign_s = self.now_s + self.rng.uniform(0.5, 1.0) * self._resign_after_s()
        self._token(sid, slot, True, 0)
        self.push(record, 0)
        self.later(self.rng.uniform(0.0, 0.04), partial(self._say_again, extra))
        self.later(extra.sign_s - self.now_s, partial(self._resign, extra))

    def _start_sampled(self, slot: str, state: SessionState) -> None:
        holder: list[SampledMember] = []

        def verify(_: Record) -> str | None:
            if holder:
                holder[0].verified += 1
                holder[0].busy_s = max(holder[0].busy_s, self.now_s) + VERIFY_S
            return None

        registry = Registry(
            slot,
            describe(slot),
            sign=partial(sign, slot),
            verify=verify,
            rng=random.Random(self.rng.getrandbits(64)),
            now_s=self.now_s,
            state=state,
            settings=SETTINGS,
        )
        node = SampledMember(slot, registry)
        holder.append(node)
        self.nodes.append(node)
        self.hubs_up += is_hub(slot)
        self.by_sid[registry.sid] = node
        self._token(registry.sid, slot, True, 0)
        self.carry(node, registry.tick(self.now_s))
        self.later(self._latency(), partial(self.see_all, node))

    def kill(self, sid: str) -> None:
        """End a member without a word."""
        if sid in self.extras:
            extra = self.extras.pop(sid)
            extra.up = False
            self._token(sid, extra.slot, False, extra.part)
        else:
            node = self.by_sid.pop(sid)
            node.up = False
            self.hubs_up -= is_hub(node.slot)
            self._token(sid, node.slot, False, node.part)

    def leave(self, sid: str) -> None:
        """End a member that says so."""
        if sid in self.extras:
            extra = self.extras[sid]
            body = encode_metadata(farewell(decode_metadata(extra.record.body)))
            record = sign(
                extra.slot, sid, SessionState.LEFT, extra.record.rev + 1, self.now_s, body
            )
            self.push(record, extra.part)
        else:
            node = self.by_sid[sid]
            self.carry(node, node.registry.leave(self.now_s))
        self.kill(sid)

    def announce(self, sid: str, note: str) -> None:
        """Have a member say something new."""
        if sid in self.extras:
            extra = self.extras[sid]
            self._raise(extra, encode_metadata(describe(extra.slot, note)))
        else:
            node = self.by_sid[sid]
            said = describe(node.slot, note)
            self.carry(node, node.registry.announce(self.now_s, metadata=said))

    def newcomer(self) -> None:
        """Start a member in a slot that nobody had."""
        self.start(f"m{next(self._fresh):03d}")

    def part_of(self, sid: str) -> int | None:
        """Return in which part of the network a living member is."""
        member = self.extras.get(sid) or self.by_sid.get(sid)
        return None if member is None else member.part

    def _raise(self, extra: SpeakingMember, body: bytes) -> None:
        held = extra.record
        extra.record = sign(extra.slot, held.sid, held.state, held.rev + 1, self.now_s, body)
        extra.sign_s = self.now_s + self.rng.uniform(0.5, 1.0) * self._resign_after_s()
        self.later(extra.sign_s - self.now_s, partial(self._resign, extra))
        self.push(extra.record, extra.part)

    def _resign(self, extra: SpeakingMember) -> None:
        if extra.up and self.now_s >= extra.sign_s - 1e-6:
            self._raise(extra, extra.record.body)

    def _resign_after_s(self) -> float:
        return SETTINGS.resign_after_s(len(self.extras) + len(self.by_sid))

    def _say_again(self, extra: SpeakingMember) -> None:
        if extra.up:
            self.push(extra.record, extra.part)

    def age(self) -> None:
        """Have everybody sign again at times as they are when all have been there for long."""
        for extra in self.extras.values():
            every_s = 0.75 * self._resign_after_s()
            extra.sign_s = self.now_s + self.rng.uniform(0.0, every_s)
            self.later(extra.sign_s - self.now_s, partial(self._resign, extra))
        for node in self.living:
            node.registry._resign_s = self.now_s + self.rng.uniform(
                0.0, 0.75 * self._resign_after_s()
            )
            self.carry(node, ())

    # The network

    def _latency(self) -> float:
        return self.rng.uniform(*LATENCY_S)

    def _through_hub(self, size: int) -> float:
        """Seconds from now until the hubs have passed on a message like this to all it stands for."""
        hubs = max(1, self.hubs_up)
        self.hub_bytes += size * self.weight
        took_s = self.weight * (size / HUB_BYTES_S + HUB_MESSAGE_S) / hubs
        self.hub_free_s = max(self.hub_free_s, self.now_s) + took_s
        return self.hub_free_s - self.now_s + self._latency()

    def push(self, record: Record, part: int, sender: SampledMember | None = None) -> None:
        """Deliver a record to everybody in a part of the network."""
        self._push((record,), part, sender)

    def _push(self, records: tuple[Record, ...], part: int, sender: SampledMember | None) -> None:
        size = len(sync.encode_message(records)) + HEADER_BYTES
        if sender is not None:
            sender.messages += 1
            sender.sent_bytes += size
        for node in self.nodes:
            if node.up and node.part == part and node is not sender:
                delay_s = self._through_hub(size)
                self.later(delay_s, partial(self._arrive, node, records, size, part))

    def _arrive(
        self, node: SampledMember, records: tuple[Record, ...], size: int, part: int
    ) -> None:
        if not node.up or node.part != part:
            return
        if self._wait(node, partial(self._arrive, node, records, size, part)):
            return
        self._received(node, size)
        self.carry(node, node.registry.merge(records, self.now_s))

    def _wait(self, node: SampledMember, what: Callable[[], None]) -> bool:
        """Whether the node is busy; then it takes this up once it is not."""
        if node.busy_s <= self.now_s:  # else what waits already comes first
            return False
        node.waiting.append(what)
        if len(node.waiting) == 1:
            self.later(node.busy_s - self.now_s, partial(self._go_on, node))
        return True

    def _go_on(self, node: SampledMember) -> None:
        while node.waiting and node.busy_s <= self.now_s:
            what = node.waiting[0]
            what()
            node.waiting.popleft()
        if node.waiting:
            self.later(node.busy_s - self.now_s, partial(self._go_on, node))

    def _received(self, node: SampledMember, size: int) -> None:
        node.messages += 1
        node.received_bytes += size
        node.busy_s = max(node.busy_s, self.now_s) + HANDLE_S

    def _token(self, sid: str, slot: str, up: bool, part: int) -> None:
        """Let everybody in a part see a token come or go."""
        for node in self.nodes:
            if node.up and node.part == part and node.registry.sid != sid:
                self.later(self._latency(), partial(self._see, node, sid, slot, up))

    def _see(self, node: SampledMember, sid: str, slot: str, up: bool) -> None:
        if not node.up or (up and self.part_of(sid) != node.part) or up == (sid in node.seen):
            return
        self._received(node, HEADER_BYTES)
        if up:
            node.seen[sid] = slot
            self.carry(node, node.registry.token_up(slot, sid, self.now_s))
        else:
            del node.seen[sid]
            self.carry(node, node.registry.token_down(slot, sid, self.now_s))

    def see_all(self, node: SampledMember, lost_s: float | None = None) -> None:
        """Bring what a node sees of tokens up to date; `lost_s`: its link was gone since then."""
        if not node.up:
            return
        there = {
            sid: extra.slot for sid, extra in self.extras.items() if extra.part == node.part
        } | {
            sid: other.slot
            for sid, other in self.by_sid.items()
            if other.part == node.part and other is not node
        }
        effects: list[Effect] = []
        registry = node.registry
        for sid, slot in tuple(node.seen.items()):
            if lost_s is not None or sid not in there:
                effects += registry.token_down(slot, sid, self.now_s)
                del node.seen[sid]
        for sid, slot in there.items():
            if sid not in node.seen:
                self._received(node, HEADER_BYTES)
                node.seen[sid] = slot
                effects += registry.token_up(slot, sid, self.now_s)
        self.carry(node, effects)

    def blink(self, sids: Iterable[str]) -> None:
        """Everybody sees the tokens of these members go and come back, as after the loss of their hub."""
        slots = {sid: (self.extras.get(sid) or self.by_sid[sid]).slot for sid in sids}
        for node in self.living:
            effects: list[Effect] = []
            for sid, slot in slots.items():
                if sid in node.seen and sid != node.registry.sid:
                    self._received(node, 2 * HEADER_BYTES)
                    node.registry.token_down(slot, sid, self.now_s)
                    effects += node.registry.token_up(slot, sid, self.now_s)
            self.carry(node, effects)

    # What a replica wants done

    def carry(self, node: SampledMember, effects: Iterable[Effect]) -> None:
        unpublished: list[Record] = []
        for effect in effects:
            if isinstance(effect, Publish):
                unpublished += effect.records
            elif isinstance(effect, Pull):
                self._pull(node, effect.sid)
            elif isinstance(effect, NewSession):
                self.by_sid.pop(effect.old, None)
                self.by_sid[effect.new] = node
                self._token(effect.old, node.slot, False, node.part)
                self._token(effect.new, node.slot, True, node.part)
        while unpublished:
            fitting, _ = sync.batch_records(unpublished)
            self._push(fitting, node.part, node)
            unpublished = unpublished[len(fitting) :]
        if node.up and node.registry.due_s < node.woken_s:
            node.woken_s = node.registry.due_s
            self.later(max(0.001, node.woken_s - self.now_s), partial(self._wake, node))

    def _wake(self, node: SampledMember) -> None:
        if node.up and self.now_s >= node.woken_s - 1e-6:
            node.woken_s = float("inf")
            self.carry(node, node.registry.tick(self.now_s))

    def _pull(self, node: SampledMember, sid: str) -> None:
        if node.pulls >= PULLS_AT_ONCE or not node.up:
            return
        peer = self.by_sid.get(sid)
        if peer is None and sid in self.extras:  # somebody of the sample answers in its stead
            side = self.extras[sid].side
            stand_ins = [
                other
                for other in self.nodes
                if other.up
                and other is not node
                and other.part == node.part
                and other.side == side
                and not is_hub(other.slot)
            ]
            peer = self.rng.choice(stand_ins) if stand_ins else None
        if peer is None or peer.part != node.part:
            self.later(QUERY_S, partial(self._failed, node))
            return
        node.pulls += 1
        self.exchanges += 1
        exchange = node.registry.exchange()
        if self.flat:
            exchange.ask = sync.encode_message(sync.SyncRequest(node.registry.hash))
        self._ask(node, peer, exchange)

    # What happens to it

    def lose_hub(self, note: str) -> None:
        """Kill the last hub; who was there is without one for a while, and every 50th member says something.

        They come back within half a second, as many at a time as the other hubs' handshakes allow.
        """
        number = len(self.hub_slots) - 1
        hub = next(node for node in self.nodes if node.slot == self.hub_slots[number])
        sids = self.truth_sids()
        lost = [sid for at, sid in enumerate(sids) if at % len(self.hub_slots) == number]
        lost = [sid for sid in lost if not is_hub(sid)]
        self.kill(hub.registry.sid)
        for at, sid in enumerate(lost):
            (self.extras.get(sid) or self.by_sid[sid]).part = -1 - at
        speakers = [sid for sid in sids[::50] if not is_hub(sid)]
        for sid in speakers:
            self.later(0.05, partial(self.announce, sid, note))
        connect_s = CONNECT_S + self.members * CONNECT_SLOT_S
        spread_s = 0.5 + len(lost) * connect_s / (HUB_CORES * max(1, self.hubs_up))
        for group in range(_GROUPS):
            back = partial(self._come_back, lost[group::_GROUPS], set(speakers))
            self.later(0.1 + spread_s * (group + 1) / _GROUPS, back)

    def _come_back(self, sids: Sequence[str], speakers: set[str]) -> None:
        for sid in sids:
            (self.extras.get(sid) or self.by_sid[sid]).part = 0
        self.blink(sids)
        for sid in sids:
            if sid in self.by_sid:
                self.see_all(self.by_sid[sid], self.now_s)
            elif sid in speakers:
                self.later(self.rng.uniform(0.0, 0.04), partial(self._say_again, self.extras[sid]))

    def divide(self) -> None:
        """Cut the network in two: every other member, and every other hub, is on the other side."""
        for at, sid in enumerate(self.truth_sids()):
            member = self.extras.get(sid) or self.by_sid[sid]
            member.part = member.side = at % 2
        for node in self.living:
            self.see_all(node)

    def join_again(self) -> None:
        """Heal the network."""
        for sid in self.truth_sids():
            (self.extras.get(sid) or self.by_sid[sid]).part = 0
        for node in self.living:
            self.later(self._latency(), partial(self.see_all, node))

    def _failed(self, node: SampledMember) -> None:
        node.registry.pull_failed(self.now_s)
        self.carry(node, ())

    def _ask(self, node: SampledMember, peer: SampledMember, exchange: SyncExchange) -> None:
        assert exchange.ask is not None
        size = len(exchange.ask) + HEADER_BYTES
        node.messages += 1
        node.sent_bytes += size
        self.later(self._through_hub(size), partial(self._answer, node, peer, exchange))

    def _answer(self, node: SampledMember, peer: SampledMember, exchange: SyncExchange) -> None:
        if not peer.up or not node.up or peer.part != node.part:
            node.pulls -= 1
            self.later(QUERY_S, partial(self._failed, node))
            return
        if self._wait(peer, partial(self._answer, node, peer, exchange)):
            return
        assert exchange.ask is not None
        self._received(peer, len(exchange.ask) + HEADER_BYTES)
        if is_hub(peer.slot):  # so many more ask it as the sample stands for
            peer.busy_s += (self.weight - 1) * HANDLE_S
        answer, effects = peer.registry.answer(exchange.ask, self.now_s)
        self.carry(peer, effects)
        size = len(answer) + HEADER_BYTES
        peer.messages += 1
        peer.sent_bytes += size
        self.later(
            self._through_hub(size), partial(self._answered, node, peer, exchange, answer, size)
        )

    def _answered(
        self,
        node: SampledMember,
        peer: SampledMember,
        exchange: SyncExchange,
        answer: bytes,
        size: int,
    ) -> None:
        if not node.up or node.part != peer.part:
            node.pulls -= 1
            self._failed(node)
            return
        if self._wait(node, partial(self._answered, node, peer, exchange, answer, size)):
            return
        self._received(node, size)
        self.carry(node, exchange.answered(answer, self.now_s))
        if exchange.ask is None:
            node.pulls -= 1
        else:
            self._ask(node, peer, exchange)

    # What should be known

    def truth_sids(self) -> list[str]:
        """Return the sessions of all living members."""
        return [*self.extras, *self.by_sid]

    def agreed(self) -> bool:
        """Whether all replicas hold the same, and the last word of everybody who lives."""
        living = self.living
        if len({node.registry.hash for node in living}) != 1:
            return False
        known = living[0].registry
        return all(
            (entry := known.get(sid)) is not None and entry.record == extra.record
            for sid, extra in self.extras.items()
        ) and all(
            (entry := known.get(sid)) is not None and entry.record == node.registry.own_entry.record
            for sid, node in self.by_sid.items()
        )


@contextmanager
def shared_records() -> Iterator[None]:
    """Have all replicas of this process share records, their metadata and hashes: none of them changes.

    Only memory and time of the simulation depend on it.
    """
    records: dict[Record, Record] = {}
    bodies: dict[bytes, Metadata] = {}
    tags: dict[Record, bytes] = {}
    plain = (sync.decode_ask, sync.decode_answer, sync.tag, decode_metadata)

    def intern(some: Sequence[Record]) -> tuple[Record, ...]:
        return tuple(records.setdefault(record, record) for record in some)

    def decode_ask(data: bytes) -> sync.SyncRequest:
        ask = plain[0](data)
        return msgspec.structs.replace(ask, give=intern(ask.give)) if ask.give else ask

    def decode_answer(data: bytes) -> sync.SyncReply:
        answer = plain[1](data)
        if not answer.records:
            return answer
        return msgspec.structs.replace(answer, records=intern(answer.records))

    def tag(record: Record) -> bytes:
        known = tags.get(record)
        if known is None:
            known = tags[records.setdefault(record, record)] = plain[2](record)
        return known

    def metadata(body: bytes) -> Metadata:
        known = bodies.get(body)
        if known is None:
            known = bodies[body] = plain[3](body)
        return known

    sync.decode_ask, sync.decode_answer, sync.tag = decode_ask, decode_answer, tag
    registry_module.decode_metadata = metadata  # type: ignore[attr-defined]
    try:
        yield
    finally:
        sync.decode_ask, sync.decode_answer, sync.tag = plain[:3]
        registry_module.decode_metadata = plain[3]  # type: ignore[attr-defined]
