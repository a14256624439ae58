"""A member of a fabric: the registry kept by talking to others, and messages to them.

    fabric = await Fabric.connect(Access.open(token), metadata)
    await fabric.announce(State.SERVING)
    for peer in fabric.peers(): ...
    answer = await fabric.query(keys.req(peer.sid), b"...", timeout_s=2)
    await fabric.close()

Everything here belongs to one event loop: calls, callbacks and events all happen in it. The decisions are
the registry's; this module carries them out.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from atoll.core.bucket import TokenBucket
from atoll.core.errors import InputError
from atoll.core.patience import Patience
from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.identity.access import Access
from atoll.fabric.identity.identity import Identity, Verifier
from atoll.fabric.identity.record_trust import node_name, refusal, sign_record
from atoll.fabric.registry.effects import (
    Effect,
    Event,
    NewSession,
    Obituary,
    Publish,
    Pull,
    Refused,
    RegistrySettings,
    Revoked,
)
from atoll.fabric.registry.fabric_registry import Registry
from atoll.fabric.registry.peers import Load, Peer, decode_load, encode_load
from atoll.fabric.registry.records import Metadata, Record, SessionState
from atoll.fabric.registry.replica import Entry
from atoll.fabric.registry.sync import batch_records, encode_message
from atoll.fabric.transport.eviction import LinkEvictor
from atoll.fabric.transport.fabric_settings import FabricSettings
from atoll.fabric.transport.link import Declaration, FabricLink, Question
from atoll.telemetry.logs import Log, SilentLog

# Bytes that count as one message of a quota.
_ONE_BYTES = 2048


class Quota:
    """So many messages a second of every slot, and so many at once. `now_s` may be any clock."""

    def __init__(self, per_s: float, at_once: float) -> None:
        self._per_s = per_s
        self._at_once = at_once
        self._buckets: dict[str, TokenBucket] = {}

    def take(self, slot: str, now_s: float, size: int = 0) -> bool:
        """Whether the slot may say one thing more now, of so many bytes; large ones count for several."""
        bucket = self._buckets.get(slot)
        if bucket is None:
            bucket = self._buckets[slot] = TokenBucket(self._at_once, self._per_s, now_s)
        return bucket.take(now_s, 1 + size // _ONE_BYTES)


__all__ = ["Fabric", "Peer", "QueryIn", "Subscription"]

QueryIn = Question
Subscription = Declaration

_PULLS_AT_ONCE = 2
_SETTLE_S = 0.02
"""From a token's end to its counting: long enough to hear that it was a hub that went."""
_BEAT_S = 0.25
"""Between two looks how late this member is."""
_LOGGED_REFUSALS = 20
_LOGGED_EVERY_S = 10.0


class Fabric:
    """See the module; made by `connect`."""

    def __init__(
        self,
        access: Access,
        metadata: Metadata,
        state: SessionState,
        settings: FabricSettings,
        log: Log,
        link: FabricLink,
        observe: bool = False,
        hear_loads: bool = True,
    ) -> None:
        """Start the registry; `connect` is what callers use."""
        self.access = access
        self.identity: Identity = access.identity
        self.verifier: Verifier = access.verifier()
        self.settings = settings
        self.listeners: list[Callable[[str, Peer], None]] = []
        """Called with joined | changed | up | down | left and the peer."""
        self.on_renewed: list[Callable[[str, str], None]] = []
        """Called with the old and the new session id."""
        self.on_revoked: list[Callable[[], None]] = []
        """Called when certificates were revoked, once `verifier` and the registry know."""
        self.loads: dict[str, Load] = {}
        """The last load sample of each live session."""
        self._log = log
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._registry = Registry(
            self.identity.slot,
            self._apply_identity(metadata),
            sign=lambda *content: sign_record(self.identity, access.fabric_id, *content),
            verify=lambda record: refusal(self.verifier, record),
            rng=random.SystemRandom(),
            now_s=time.time(),
            state=state,
            settings=RegistrySettings(obituary_s=settings.obituary_s, pull_risen_s=0.2),
            observer=observe,
        )
        self._pushes = Quota(settings.pushes_per_s, settings.pushes_at_once)
        self._asks = Quota(settings.asks_per_s, settings.asks_at_once)
        self._view: dict[str, Peer] = {}
        self._shunned: frozenset[str] = frozenset()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._pulls: set[asyncio.Task[None]] = set()
        self._held_back: dict[str, asyncio.TimerHandle] = {}
        self._shaken_s = -settings.flap_s
        self.patience = Patience(_BEAT_S)
        """How late this member, and those at the other ends of its links, are."""
        self._beat: asyncio.TimerHandle | None = None
        self._first_sync = asyncio.Event()
        self._session: list[Declaration] = []
        self._refusals_logged = 0
        self._refusals_from_s = 0.0
        self._hears_loads = hear_loads
        self._left = False
        self._closing = False

    @classmethod
    async def connect(
        cls,
        access: Access,
        metadata: Metadata,
        *,
        state: SessionState = SessionState.JOIN,
        settings: FabricSettings | None = None,
        log: Log | None = None,
        listen: Sequence[str] = (),
        denied: frozenset[str] = frozenset(),
        observe: bool = False,
        hear_loads: bool = True,
    ) -> Fabric:
        """Join, and return once what the others know is known here too.

        Provider and role of `metadata` are replaced by the certificate's, and its name goes after the
        certificate's and a slash. With `listen` this member is a hub, and slots in `denied` may say
        nothing there. One that only wants to `observe` has no token and writes nothing at all. Who does not
        choose between nodes need not `hear_loads`: those of thousands are thousands a second. Raises
        UnreachableError if no hub answers.
        """
        settings = settings or FabricSettings()
        link = await FabricLink.open(access, settings, listen=listen, denied=denied)
        try:
            fabric = cls(
                access, metadata, state, settings, log or SilentLog(), link, observe, hear_loads
            )
            fabric._begin()
        except BaseException:
            await link.close()
            raise
        try:
            # A hub may be the first: it waits for nobody.
            async with asyncio.timeout(0 if listen else settings.first_sync_s):
                await fabric._first_sync.wait()
        except TimeoutError:
            pass  # alone so far
        except BaseException:
            await fabric.close()
            raise
        return fabric

    @property
    def sid(self) -> str:
        """This member's session id; it changes when the session is renewed."""
        return self._registry.sid

    @property
    def state(self) -> SessionState:
        """State that this member has announced."""
        return self._registry.own_entry.record.state

    @property
    def metadata(self) -> Metadata:
        """Description that this member gives of itself."""
        return self._registry.own_entry.metadata

    @property
    def connected(self) -> bool:
        """Whether there is a link to some hub this moment."""
        return bool(self._link.hubs())

    async def announce(
        self, state: SessionState | None = None, metadata: Metadata | None = None
    ) -> None:
        """Say what is new about this member; a state lower than before takes a new session."""
        own_metadata = None if metadata is None else self._apply_identity(metadata)
        self._do(self._registry.announce(time.time(), state, own_metadata))

    async def renew(self) -> str:
        """Take a new session and return its id; the old one is LEFT."""
        self._do(self._registry.renew(time.time()))
        return self.sid

    async def leave(self) -> None:
        """Say LEFT and drop the token; nothing can be announced after."""
        if self._left:
            return
        self._left = True
        self._do(self._registry.leave(time.time()))
        await self._link.flush()
        self._undeclare()

    async def close(self) -> None:
        """Stop; leaves first unless that is done."""
        if self._closing:
            return
        self._closing = True
        # Said while there is still a link to say it on.
        await self.leave()
        if self._timer is not None:
            self._timer.cancel()
        if self._beat is not None:
            self._beat.cancel()
        for handle in self._held_back.values():
            handle.cancel()
        for task in tuple(self._pulls):
            task.cancel()
        await asyncio.gather(*self._pulls, return_exceptions=True)
        await self._link.close()
        self._log.flush()

    def peers(self) -> tuple[Peer, ...]:
        """Return every other member that is not LEFT."""
        return tuple(self._peer(sid, entry) for sid, entry in self._registry.peers().items())

    def peer(self, sid: str) -> Peer | None:
        """Return one member, also a LEFT one if it is still known."""
        entry = self._registry.get(sid)
        return None if entry is None else self._peer(sid, entry)

    def recheck(self) -> None:
        """Verify everything again, after certificates were revoked in `verifier`."""
        self._do(self._put_out())
        self._call_revoked()

    def watch_links(self, noticed: Callable[[str], None]) -> LinkEvictor:
        """Watch who connects to this hub; `noticed` is called with slots that do."""
        return self._link.watch_links(noticed)

    def say_load(self, load: Load) -> None:
        """Tell everybody how busy this member is."""
        self._link.put(keys.load(self.sid), encode_load(load))

    def stats(self) -> dict[str, Any]:
        """Return figures for metrics: those of the registry and of the link."""
        return {
            **self._registry.stats(),
            "hubs": len(self._link.hubs()),
            "sent": self._link.sent,
            "queued": self._link.queued,
        }

    async def query(self, key: str, payload: bytes, timeout_s: float) -> bytes:
        """Ask one member; empty answers are tried again until `timeout_s`, then it is a TimeoutError."""
        return await self._link.query(key, payload, timeout_s)

    def put(self, key: str, payload: bytes) -> None:
        """Send; returns at once, keeps the order, lost if no hub is there."""
        self._link.put(key, payload)

    async def flush(self) -> None:
        """Wait until everything said so far is on its way; a second at most."""
        await self._link.flush()

    def subscribe(
        self, key: str, callback: Callable[[list[tuple[str, bytes]]], None]
    ) -> Subscription:
        """Call `callback` in the loop with whatever came in since the last call: (key, payload)."""
        return self._link.subscribe(key, callback)

    def queryable(self, key: str, callback: Callable[[QueryIn], None]) -> Subscription:
        """Call `callback` in the loop with each question asked under `key`."""
        return self._link.queryable(key, callback)

    # Joining and staying

    def _apply_identity(self, metadata: Metadata) -> Metadata:
        identity = self.identity
        return msgspec.structs.replace(
            metadata,
            name=node_name(identity.name, metadata.name),
            provider=identity.provider,
            role=identity.role,
        )

    def _begin(self) -> None:
        link = self._link
        # Heard before the token is shown, so that nothing said in answer is missed.
        link.hear(f"{keys.PREFIX}/reg/**", self._pushed)
        if self._hears_loads:
            link.hear(f"{keys.PREFIX}/load/**", self._loaded)
        self._declare()
        link.watch(f"{keys.PREFIX}/alive/**", self._tokens)
        self._tick()
        self._keep_beating()

    def _keep_beating(self) -> None:
        self.patience.tick(self._loop.time())
        self._link.cut_silent(self.patience)
        self._beat = self._loop.call_later(_BEAT_S, self._keep_beating)

    def _declare(self) -> None:
        if self._registry.observer:
            return
        # Answers first, then the token: who sees the token may ask at once. Taken back in reverse.
        self._session = [
            self._link.queryable(keys.sync(self.sid), self._asked),
            self._link.token(keys.alive(self.sid)),
        ]

    def _undeclare(self) -> None:
        for closer in reversed(self._session):
            closer.close()
        self._session = []

    def _tick(self) -> None:
        self._timer = None
        self._do(self._registry.tick(time.time()))

    def _schedule(self) -> None:
        due_s = self._registry.due_s
        if self._timer is not None:
            if due_s >= self._timer_s:  # it ticks too early at worst, which does no harm
                return
            self._timer.cancel()
        if not self._closing:
            self._timer_s = due_s
            # A pause even where the time is over: ticks must not fill the loop.
            self._timer = self._loop.call_later(max(0.001, due_s - time.time()), self._tick)

    # What comes in

    def _pushed(self, batch: list[tuple[str, bytes]]) -> None:
        now_s = time.time()
        effects: list[Effect] = []
        for key, data in batch:
            sid = keys.own_sid(key)
            if sid == self.sid:
                continue
            if sid is not None and keys.slot_of(sid) in self._shunned:
                effects.append(self._registry.refusals.add("revoked", sid))
                continue
            # Counted by slot, for which hubs vouch, and not by session: a slot may name any number of those.
            if sid is None or not self._pushes.take(keys.slot_of(sid), now_s, len(data)):
                effects.append(
                    self._registry.refusals.add("flood" if sid else "malformed", key[:80])
                )
                continue
            effects += self._registry.pushed(data, now_s)
        self._do(effects)

    def _loaded(self, batch: list[tuple[str, bytes]]) -> None:
        for key, data in batch:
            sid = keys.own_sid(key)
            if sid is None or sid == self.sid or not self._registry.alive(sid):
                continue
            load = decode_load(data)
            if load is not None:
                self.loads[sid] = load

    def _asked(self, question: Question) -> None:
        now_s = time.time()
        # One quota for all: a question does not say whose it is.
        if not self._asks.take("", now_s, len(question.payload)):
            return  # whoever is honest asks again, or another
        answer, effects = self._registry.answer(question.payload, now_s)
        question.reply(answer)
        self._do(effects)

    def _tokens(self, batch: list[tuple[str, bool]]) -> None:
        now_s = time.time()
        effects: list[Effect] = []
        for key, up in batch:
            slot, sid = keys.sender_of(key), keys.own_sid(key)
            if sid is None:  # a hub lets each slot name any session after its own
                if up:
                    effects.append(self._registry.refusals.add("token of another", key[:80]))
                continue
            if up and slot in self._shunned:
                continue
            if not up and (sid == self.sid or keys.is_hub(sid)):
                # The end of a hub's token, or of one's own, tells of a lost link, not of members that went.
                self._shaken_s = self._loop.time()
            if sid == self.sid:
                continue
            held = self._held_back.pop(sid, None)
            if held is not None:
                held.cancel()
            if not up:
                self._held_back[sid] = self._loop.call_later(_SETTLE_S, self._token_gone, slot, sid)
            elif held is not None:  # it may have missed what was said meanwhile
                # Down and up at once: the registry asks it again, and no listener hears of it.
                self._registry.token_down(slot, sid, now_s)
                up_again = self._registry.token_up(slot, sid, now_s)
                effects += [effect for effect in up_again if not isinstance(effect, Event)]
            else:
                effects += self._registry.token_up(slot, sid, now_s)
        self._do(effects)

    def _token_gone(self, slot: str, sid: str) -> None:
        # When a hub goes, everybody behind it seems to, this member's own token too; most are back as
        # soon as they have found another hub. Only then are others given that time.
        left_s = self._shaken_s + self.settings.flap_s - self._loop.time()
        if left_s > 0:
            self._held_back[sid] = self._loop.call_later(left_s, self._token_gone, slot, sid)
            return
        self._held_back.pop(sid, None)
        self.loads.pop(sid, None)
        self._do(self._registry.token_down(slot, sid, time.time()))

    # What is to be done

    def _do(self, effects: Iterable[Effect]) -> None:
        pending = list(effects)
        unpublished: list[Record] = []
        revoked = False
        # It grows on the way: a revocation adds effects that are carried out in the same pass.
        while pending:
            effect = pending.pop(0)
            if isinstance(effect, Publish):
                unpublished += effect.records
            elif isinstance(effect, Pull):
                self._pull(effect.sid)
            elif isinstance(effect, Event):
                self._tell(effect)
            elif isinstance(effect, NewSession):
                self._renewed(effect)
            elif isinstance(effect, Refused):
                self._refused(effect)
            elif isinstance(effect, Revoked):
                self._log.event("fabric.revoked", serials=sorted(effect.serials))
                self.verifier.revoke(int(serial, 16) for serial in effect.serials)
                pending += self._put_out()
                revoked = True
            elif isinstance(effect, Obituary):
                self._log.event("fabric.obituary", sid=effect.sid)
        while unpublished:  # in one message, if it fits
            records, _ = batch_records(unpublished)
            self._link.put(keys.reg(self.sid), encode_message(records))
            unpublished = unpublished[len(records) :]
        if revoked:
            self._call_revoked()
        if self._registry.synced:
            self._first_sync.set()
        self._schedule()

    def _put_out(self) -> list[Effect]:
        """Drop what revoked members said, their tokens too, and hear nothing more of them."""
        now_s = time.time()
        self._shunned = self.verifier.shunned()
        effects = self._registry.recheck(now_s)
        for sid in self._registry.tokens():
            if keys.slot_of(sid) in self._shunned:
                effects += self._registry.token_down(keys.slot_of(sid), sid, now_s)
                self.loads.pop(sid, None)
        return effects

    def _call_revoked(self) -> None:
        for callback in tuple(self.on_revoked):
            callback()

    def _pull(self, sid: str) -> None:
        # One that is left out comes again by the registry's own clock.
        if len(self._pulls) >= _PULLS_AT_ONCE or self._closing:
            return
        task = self._loop.create_task(self._exchange(sid))
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)

    async def _exchange(self, sid: str) -> None:
        exchange = self._registry.exchange()
        try:
            while exchange.ask is not None:
                answer = await self._link.query(keys.sync(sid), exchange.ask, self.settings.query_s)
                self._do(exchange.answered(answer, time.time()))
        except (TimeoutError, InputError):
            self._registry.pull_failed(time.time())
            self._schedule()

    def _tell(self, event: Event) -> None:
        entry = self._registry.get(event.sid)
        if entry is not None:
            peer = self._peer(event.sid, entry)
        elif event.sid in self._view:  # dropped from the registry altogether
            peer = self._view[event.sid]
        else:
            return
        if event.kind == "left":
            self._view.pop(event.sid, None)
            self.loads.pop(event.sid, None)
        self._log.event(f"fabric.{event.kind}", sid=peer.sid, name=peer.name)
        for listener in tuple(self.listeners):
            try:
                listener(event.kind, peer)
            except Exception as error:  # noqa: BLE001  one listener's bug must not stop the registry
                self._log.event("fabric.listener_failed", error=repr(error))

    def _renewed(self, effect: NewSession) -> None:
        self._log.event("fabric.renewed", old=effect.old, new=effect.new, cause=effect.cause)
        self._undeclare()
        self._declare()
        for callback in tuple(self.on_renewed):
            callback(effect.old, effect.new)

    def _refused(self, effect: Refused) -> None:
        now_s = time.monotonic()
        if now_s - self._refusals_from_s > _LOGGED_EVERY_S:
            self._refusals_from_s, self._refusals_logged = now_s, 0
        self._refusals_logged += 1
        if self._refusals_logged <= _LOGGED_REFUSALS:  # counted all, logged a few
            self._log.event("fabric.refused", reason=effect.reason, sid=effect.sid)

    def _peer(self, sid: str, entry: Entry) -> Peer:
        alive = self._registry.alive(sid)
        state = entry.record.state
        known = self._view.get(sid)
        if (
            known
            and known.metadata is entry.metadata
            and known.alive == alive
            and known.state is state
        ):
            return known
        metadata = entry.metadata
        peer = Peer(
            sid,
            entry.record.slot,
            metadata.name,
            metadata.provider,
            not self.access.is_open,
            state,
            metadata,
            alive,
            entry.since_s,
        )
        if state < SessionState.LEFT:
            self._view[sid] = peer
        return peer
