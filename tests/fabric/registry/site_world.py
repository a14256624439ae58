"""A fabric by site in one process: the real registries, records and messages, a virtual network and clock.

Members of some sites, all hubs and all gateways are real (`SitedRegistry`). Members of other sites only
speak: they show tokens, push their records, sign again and go, and one of each says the site's summary; what
is asked of them is answered by a hub. Records are really signed and encoded; each signature is really checked
once, and what checking it takes is charged to the clock of everybody who would. Every message passes a hub,
which has so many bytes and messages a second for all who hear it. Equal seeds give equal runs, but for the
bytes of signatures.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count

import msgspec

from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.identity.identity import OPEN_FABRIC, Identity, Verifier
from atoll.fabric.identity.record_trust import refusal, sign_record
from atoll.fabric.registry import fabric_registry as registry_module
from atoll.fabric.registry import sync
from atoll.fabric.registry.effects import NewSession, Publish, Pull, RegistrySettings, Speaks
from atoll.fabric.registry.records import (
    Gpu,
    Hardware,
    Metadata,
    NodeService,
    Record,
    SessionState,
    SiteService,
    decode_metadata,
    encode_metadata,
    farewell,
)
from atoll.fabric.registry.sites import ALL, LOOK_S, Placed, SitedRegistry
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
HEADER_BYTES = 60
"""Key, headers and TLS of one message."""
QUERY_S = 1.5
SETTINGS = RegistrySettings(pull_risen_s=0.2)
SETTLE_S = 0.02
"""From a token's end to its counting, as in the transport."""


def describe(slot: str) -> Metadata:
    """Return what a node with four GPUs and one model says of itself."""
    if keys.is_hub(slot):
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
    )


@dataclass(eq=False, slots=True)
class RealMember:
    """A member, gateway or hub whose registries are real, and what it costs."""

    name: str
    registry: SitedRegistry
    follows: bool
    up: bool = True
    side: int = 0
    woken_s: float = float("inf")
    busy_s: float = 0.0
    messages: int = 0
    bytes: int = 0
    verified: int = 0

    def hears(self, part: str) -> bool:
        return self.follows or part in (ALL, self.registry.site)


@dataclass(eq=False, slots=True)
class SpeakingMember:
    """A member that only speaks: its last record."""

    part: str
    identity: Identity
    record: Record


class SiteWorld:
    """All of it; `pass_time` runs what is due."""

    def __init__(
        self, *, hubs: int = 2, gateways: int = 1, by_site: bool = True, seed: int = 1
    ) -> None:
        self.rng = random.Random(seed)
        self.by_site = by_site
        self.now_s = START_S
        self.nodes: list[RealMember] = []
        self.extras: dict[str, SpeakingMember] = {}
        self.site_sizes: dict[str, int] = {}
        self._hubs = hubs
        self._hub_free_s = 0.0
        self._identities: dict[str, Identity] = {}
        self._verdicts: dict[bytes, str | None] = {}
        self._verifier = Verifier(OPEN_FABRIC, None)
        self._tokens: dict[tuple[str, str], int] = {}
        """Side of the network of all that are up, by part and session."""
        self._owners: dict[tuple[str, str], RealMember] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._slots = count()
        for number in range(hubs):
            self.start(f"h{number}", "hub")
        for number in range(gateways):
            self.start(f"gateway{number}", "gateway")

    # Time

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + seconds, next(self._order), what))

    def pass_time(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._due and self._due[0][0] <= end_s:
            self.now_s, _, what = heapq.heappop(self._due)
            what()
        self.now_s = end_s

    def until(
        self, true: Callable[[], bool], max_s: float = 120.0, step_s: float = 0.02
    ) -> float | None:
        """Pass time until something is true; return how long it took, or None: not in `max_s`."""
        start_s = self.now_s
        while not true():
            if self.now_s - start_s > max_s:
                return None
            self.pass_time(step_s)
        return self.now_s - start_s

    # Members

    @property
    def living(self) -> list[RealMember]:
        return [node for node in self.nodes if node.up]

    def identity(self, owner: str, role: str) -> Identity:
        """Return the certificate of a hub, a gateway or a site: nodes of a site share one token."""
        held = self._identities.get(owner)
        if held is None:
            slot = owner if role == "hub" else keys.member_slot(next(self._slots))
            held = self._identities[owner] = Identity.self_made(slot, owner, "lab", role)
        return held

    def describe(self, name: str, site: str, role: str = "worker") -> Metadata:
        """Return what a member says of itself: a node with four GPUs, say."""
        owner = site if role == "worker" else name
        said = (
            describe("m000")
            if role == "worker"
            else Metadata(name=name, provider="lab", role="hub")
        )
        named = f"{owner}/{name}" if role == "worker" else name
        return msgspec.structs.replace(
            said, name=named, provider="lab", role=self.identity(owner, role).role, site=site
        )

    def start(self, name: str, role: str = "worker", site: str = "") -> RealMember:
        """Start a real member."""
        identity = self.identity(site if role == "worker" else name, role)
        holder: list[RealMember] = []

        def verify(record: Record) -> str | None:
            if holder:
                holder[0].verified += 1
                holder[0].busy_s = max(holder[0].busy_s, self.now_s) + VERIFY_S
            return self.verdict(record)

        is_worker = role == "worker"
        registry = SitedRegistry(
            identity.slot,
            self.describe(name, site, role),
            sign=partial(sign_record, identity, OPEN_FABRIC),
            verify=verify,
            rng=random.Random(self.rng.getrandbits(64)),
            now_s=self.now_s,
            state=SessionState.SERVING,
            settings=SETTINGS,
            site=keys.part_of(site) if is_worker and self.by_site else ALL,
            follows=self.by_site and not is_worker,
        )
        node = RealMember(name, registry, registry._follows)
        holder.append(node)
        self.nodes.append(node)
        self.site_sizes[registry.site] = self.site_sizes.get(registry.site, 0) + 1
        self._show(node, registry.site, up=True)
        self.carry(node, registry.tick(self.now_s))
        self.later(self._latency(), partial(self._see_all, node))
        return node

    def speak(self, name: str, site: str, summary: tuple[SiteService, ...] | None = None) -> str:
        """Start a member that only speaks, of its site or (with a summary) for it; return its session."""
        identity = self.identity(site, "worker")
        part = ALL if summary is not None or not self.by_site else keys.part_of(site)
        said = msgspec.structs.replace(self.describe(name, site), summary=summary)
        if summary is not None:
            said = msgspec.structs.replace(farewell(said), site=site, summary=summary)
        sid = keys.new_sid(identity.slot, self.rng.randbytes(8))
        extra = SpeakingMember(
            part, identity, self._sign(identity, sid, SessionState.SERVING, 0, said)
        )
        self.extras[sid] = extra
        self.site_sizes[part] = self.site_sizes.get(part, 0) + 1
        self._token(part, sid, 0, up=True)
        self.push(part, (extra.record,), 0)
        self._resign_later(sid)
        return sid

    def say(self, sid: str, summary: tuple[SiteService, ...]) -> None:
        """Have the speaker of a site say something new."""
        extra = self.extras[sid]
        said = msgspec.structs.replace(
            farewell(self.describe("x", extra.identity.name)),
            site=extra.identity.name,
            summary=summary,
        )
        rev = extra.record.rev + 1
        extra.record = self._sign(extra.identity, sid, SessionState.SERVING, rev, said)
        self.push(extra.part, (extra.record,), 0)

    def hush(self, sid: str) -> None:
        """End one that only speaks; it says so."""
        extra = self.extras.pop(sid)
        self.site_sizes[extra.part] -= 1
        gone = farewell(self.describe("x", extra.identity.name))
        record = self._sign(extra.identity, sid, SessionState.LEFT, extra.record.rev + 1, gone)
        self.push(extra.part, (record,), 0)
        self._token(extra.part, sid, 0, up=False)

    def kill(self, node: RealMember) -> None:
        """End a real member without a word."""
        node.up = False
        registry = node.registry
        self.site_sizes[registry.site] -= 1
        self._show(node, registry.site, up=False)
        if registry.speaks:
            self._show(node, ALL, up=False)

    def verdict(self, record: Record) -> str | None:
        """Return why a record is refused; really checked once."""
        if record.signature not in self._verdicts:
            self._verdicts[record.signature] = refusal(self._verifier, record)
        return self._verdicts[record.signature]

    def _sign(
        self, identity: Identity, sid: str, state: SessionState, rev: int, said: Metadata
    ) -> Record:
        body = encode_metadata(said)
        return sign_record(identity, OPEN_FABRIC, sid, state, rev, self.now_s, body)

    def _resign_later(self, sid: str) -> None:
        size = self.site_sizes[self.extras[sid].part]
        seconds = self.rng.uniform(0.5, 1.0) * SETTINGS.resign_after_s(size)
        self.later(seconds, partial(self._resign, sid))

    def _resign(self, sid: str) -> None:
        extra = self.extras.get(sid)
        if extra is not None:
            held = extra.record
            extra.record = sign_record(
                *(extra.identity, OPEN_FABRIC, sid, held.state, held.rev + 1, self.now_s, held.body)
            )
            self.push(extra.part, (extra.record,), 0)
            self._resign_later(sid)

    # The network

    def divide(self, far: Iterable[RealMember]) -> None:
        """Cut these off from all others; who only speaks is on the near side."""
        for node in far:
            node.side = 1
        self._look_again()

    def heal(self) -> None:
        """Join the network again."""
        for node in self.nodes:
            node.side = 0
        self._look_again()

    def _look_again(self) -> None:
        own = {(p, part.sid): n.side for n in self.living for p, part in n.registry.parts.items()}
        self._tokens = {at: own.get(at, 0) for at in self._tokens}
        for node in self.living:
            self.later(self._latency() + SETTLE_S, partial(self._see_all, node))

    def _latency(self) -> float:
        return self.rng.uniform(*LATENCY_S)

    def _through_hub(self, size: int, listeners: int) -> float:
        took_s = listeners * (size / HUB_BYTES_S + HUB_MESSAGE_S) / self._hubs
        self._hub_free_s = max(self._hub_free_s, self.now_s) + took_s
        return self._hub_free_s - self.now_s

    def push(
        self, part: str, records: tuple[Record, ...], side: int, sender: RealMember | None = None
    ) -> None:
        """Bring records to all who hear a part."""
        size = len(sync.encode_message(records)) + HEADER_BYTES
        if sender is not None:
            sender.messages += 1
            sender.bytes += size
        everybody = sum(self.site_sizes.values())
        listeners = everybody if part == ALL else self.site_sizes.get(part, 0) + self._hubs
        delay_s = self._through_hub(size, listeners)
        for node in self.nodes:
            if node.up and node is not sender and node.side == side and node.hears(part):
                arrive = partial(self._arrive, node, part, records, size)
                self.later(delay_s + self._latency(), arrive)

    def _arrive(self, node: RealMember, part: str, records: tuple[Record, ...], size: int) -> None:
        if not node.up:
            return
        if node.busy_s > self.now_s:
            self.later(node.busy_s - self.now_s, partial(self._arrive, node, part, records, size))
            return
        self._received(node, size)
        registry = node.registry.part(part, records[0].slot, self.now_s)
        if registry is not None:
            self.carry(node, [(part, one) for one in registry.merge(records, self.now_s)])

    def _received(self, node: RealMember, size: int) -> None:
        node.messages += 1
        node.bytes += size
        node.busy_s = max(node.busy_s, self.now_s) + HANDLE_S

    def _show(self, node: RealMember, part: str, *, up: bool) -> None:
        sid = node.registry.parts[part].sid
        self._owners[part, sid] = node
        self._token(part, sid, node.side, up=up)

    def _token(self, part: str, sid: str, side: int, *, up: bool) -> None:
        if up:
            self._tokens[part, sid] = side
        elif self._tokens.pop((part, sid), None) is None:
            return
        for node in self.nodes:
            if node.up and node.side == side and node.hears(part):
                late_s = self._latency() + (0.0 if up else SETTLE_S)
                self.later(late_s, partial(self._see, node, part, sid))

    def _see(self, node: RealMember, part: str, sid: str) -> None:
        """Have a member see whether a token is up."""
        if not node.up:
            return
        self._received(node, HEADER_BYTES)
        slot, registry = keys.slot_of(sid), node.registry
        if self._tokens.get((part, sid)) == node.side:
            self.carry(node, registry.token_up(part, slot, sid, self.now_s))
        else:
            self.carry(node, registry.token_down(part, slot, sid, self.now_s))

    def _see_all(self, node: RealMember) -> None:
        seen = set(node.registry.tokens())
        there = {at for at, side in self._tokens.items() if side == node.side and node.hears(at[0])}
        for part, sid in sorted(seen ^ there):
            self._see(node, part, sid)

    # What registries want done

    def carry(self, node: RealMember, effects: Iterable[Placed]) -> None:
        for part, effect in effects:
            if isinstance(effect, Publish):
                self.push(part, effect.records, node.side, node)
            elif isinstance(effect, Pull):
                self._pull(node, part, effect.sid)
            elif isinstance(effect, NewSession):
                self._token(part, effect.old, node.side, up=False)
                if not node.registry.parts[part].observer:
                    self._show(node, part, up=True)
            elif isinstance(effect, Speaks):
                self._show(node, ALL, up=effect.begins)
        due_s = node.registry.due_s
        if node.up and due_s < node.woken_s:
            node.woken_s = due_s
            self.later(max(0.001, due_s - self.now_s), partial(self._wake, node))

    def _wake(self, node: RealMember) -> None:
        if node.up and self.now_s >= node.woken_s - 1e-6:
            node.woken_s = float("inf")
            self.carry(node, node.registry.tick(self.now_s))

    def _pull(self, node: RealMember, part: str, sid: str) -> None:
        peer = self._owners.get((part, sid))
        if peer is None and (part, sid) in self._tokens:
            # A hub answers for those who only speak.
            helpers = (n for n in self.nodes if n.follows and n is not node)
            peer = next((n for n in helpers if part in n.registry.parts), None)
        if peer is not None and not (peer.up and peer.side == node.side):
            peer = None
        exchange = node.registry.parts[part].exchange()
        self._ask(node, peer, part, exchange)

    def _ask(
        self, node: RealMember, peer: RealMember | None, part: str, exchange: SyncExchange
    ) -> None:
        assert exchange.ask is not None
        size = len(exchange.ask) + HEADER_BYTES
        node.messages += 1
        node.bytes += size
        if peer is None:
            self.later(QUERY_S, partial(self._failed, node, part))
            return
        delay_s = self._through_hub(size, 1) + self._latency()
        self.later(delay_s, partial(self._answer, node, peer, part, exchange))

    def _answer(
        self, node: RealMember, peer: RealMember, part: str, exchange: SyncExchange
    ) -> None:
        if not peer.up or not node.up or peer.side != node.side:
            self.later(QUERY_S, partial(self._failed, node, part))
            return
        assert exchange.ask is not None
        self._received(peer, len(exchange.ask) + HEADER_BYTES)
        answer, effects = peer.registry.parts[part].answer(exchange.ask, self.now_s)
        self.carry(peer, [(part, effect) for effect in effects])
        size = len(answer) + HEADER_BYTES
        peer.messages += 1
        peer.bytes += size
        delay_s = self._through_hub(size, 1) + self._latency()
        self.later(delay_s, partial(self._answered, node, peer, part, exchange, answer))

    def _answered(
        self, node: RealMember, peer: RealMember, part: str, exchange: SyncExchange, answer: bytes
    ) -> None:
        if not node.up:
            return
        self._received(node, len(answer) + HEADER_BYTES)
        effects = exchange.answered(answer, self.now_s)
        self.carry(node, [(part, effect) for effect in effects])
        if exchange.ask is not None:
            self._ask(node, peer, part, exchange)

    def _failed(self, node: RealMember, part: str) -> None:
        if node.up:
            node.registry.parts[part].pull_failed(self.now_s)
            self.carry(node, ())

    # What should be known

    def knows(self, node: RealMember, sid: str) -> bool:
        """Whether a member may send requests to a session as far as it knows."""
        entry = node.registry.get(sid)
        return (
            entry is not None
            and entry.record.state is SessionState.SERVING
            and node.registry.alive(sid)
        )

    def agreed(self) -> bool:
        """Whether all who keep a part hold the same of it, and all know of the same sites."""
        hashes: dict[str, set[bytes]] = {}
        for node in self.living:
            for part, registry in node.registry.parts.items():
                hashes.setdefault(part, set()).add(registry.hash)
        views = {
            tuple(sorted((s, v.serving) for s, v in n.registry.sites().items()))
            for n in self.living
        }
        return all(len(some) == 1 for some in hashes.values()) and len(views) == 1


LONGEST_LOOK_S = 1.5 * LOOK_S
"""A speaker tells of what changed no later than this."""


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
