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
    Event,
    NewSession,
    Obituary,
    Publish,
    Pull,
    Refused,
    RegistrySettings,
    Revoked,
    Speaks,
)
from atoll.fabric.registry.peers import Load, Peer, decode_load, encode_load
from atoll.fabric.registry.records import Metadata, Record, SessionState
from atoll.fabric.registry.replica import Entry
from atoll.fabric.registry.sites import ALL, Placed, SitedRegistry, SiteSummary
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
        own_metadata = self._apply_identity(metadata)
        # Workers keep to their site; all others, and who only looks, see everybody.
        keeps_to_site = access.by_site and own_metadata.role == "worker" and not observe
        self._follows = access.by_site and not keeps_to_site
        place = own_metadata.site or own_metadata.region or own_metadata.provider
        self._registry = SitedRegistry(
            self.identity.slot,
            own_metadata,
            sign=lambda *content: sign_record(self.identity, access.fabric_id, *content),
            verify=lambda record: refusal(self.verifier, record),
            rng=random.SystemRandom(),
            now_s=time.time(),
            state=state,
            settings=RegistrySettings(obituary_s=settings.obituary_s, pull_risen_s=0.2),
            observer=observe,
            site=keys.part_of(place) if keeps_to_site else ALL,
            follows=self._follows,
        )
        self._registry.loads = self.loads
        self._pushes = Quota(settings.pushes_per_s, settings.pushes_at_once)
        self._asks = Quota(settings.asks_per_s, settings.asks_at_once)
        self._view: dict[str, Peer] = {}
        self._shunned: frozenset[str] = frozenset()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._pulls: set[asyncio.Task[None]] = set()
        self._held_back: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._shaken_s = -settings.flap_s
        self.patience = Patience(_BEAT_S)
        """How late this member, and those at the other ends of its links, are."""
        self._beat: asyncio.TimerHandle | None = None
        self._first_sync = asyncio.Event()
        self._sessions: dict[str, list[Declaration]] = {}
        self._site_loads: Declaration | None = None
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
        return self._registry.home.own_entry.record.state

    @property
    def metadata(self) -> Metadata:
        """Description that this member gives of itself."""
        return self._registry.home.own_entry.metadata

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
        for part in tuple(self._sessions):
            self._undeclare(part)

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

    def sites(self) -> dict[str, SiteSummary]:
        """Return what is known of sites from afar, by name; of a fabric that is not by site nothing."""
        return self._registry.sites()

    def recheck(self) -> None:
        """Verify everything again, after certificates were revoked in `verifier`."""
        self._do(self._put_out())
        self._call_revoked()

    def watch_links(self, noticed: Callable[[str], None]) -> LinkEvictor:
        """Watch who connects to this hub; `noticed` is called with slots that do."""
        return self._link.watch_links(noticed)

    def say_load(self, load: Load) -> None:
        """Tell everybody how busy this member is."""
        self._link.put(keys.in_part(self._registry.site, keys.load(self.sid)), encode_load(load))

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
        parts = self._heard_parts()
        for part in parts:
            link.hear(f"{part}/reg/**", self._pushed)
            if self._hears_loads:
                link.hear(f"{part}/load/**", self._loaded)
        self._declare(self._registry.site)
        for part in parts:
            link.watch(f"{part}/alive/**", self._tokens)
        self._tick()
        self._keep_beating()

    def _heard_parts(self) -> list[str]:
        """Return what keys begin with of which this member hears."""
        if self._follows:
            return [keys.PREFIX, f"{keys.PREFIX}/site/*"]
        own = keys.in_part(self._registry.site, keys.PREFIX)
        return [keys.PREFIX] if own == keys.PREFIX else [keys.PREFIX, own]

    def _keep_beating(self) -> None:
        self.patience.tick(self._loop.time())
        self._link.cut_silent(self.patience)
        self._beat = self._loop.call_later(_BEAT_S, self._keep_beating)

    def _declare(self, part: str) -> None:
        registry = self._registry.parts[part]
        if registry.observer:
            return
        # Answers first, then the token: who sees the token may ask at once. Taken back in reverse.
        self._sessions[part] = [
            self._link.queryable(keys.in_part(part, keys.sync(registry.sid)), self._asked),
            self._link.token(keys.in_part(part, keys.alive(registry.sid))),
        ]

    def _undeclare(self, part: str) -> None:
        for closer in reversed(self._sessions.pop(part, [])):
            closer.close()

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
        effects: list[Placed] = []
        for where, data in batch:
            part, key = keys.split_part(where)
            sid = keys.own_sid(key)
            if sid == self.sid:
                continue
            if sid is not None and keys.slot_of(sid) in self._shunned:
                effects.append((part, self._registry.refusals.add("revoked", sid)))
                continue
            # Counted by slot, for which hubs vouch, and not by session: a slot may name any number of those.
            if sid is None or not self._pushes.take(keys.slot_of(sid), now_s, len(data)):
                reason = "flood" if sid else "malformed"
                effects.append((part, self._registry.refusals.add(reason, key[:80])))
                continue
            effects += self._registry.pushed(part, keys.slot_of(sid), data, now_s)
        self._do(effects)

    def _loaded(self, batch: list[tuple[str, bytes]]) -> None:
        for key, data in batch:
            sid = keys.own_sid(keys.split_part(key)[1])
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
        part, _ = keys.split_part(question.key)
        registry = self._registry.parts.get(part)
        if registry is None:
            return
        answer, effects = registry.answer(question.payload, now_s)
        question.reply(answer)
        self._do((part, effect) for effect in effects)

    def _tokens(self, batch: list[tuple[str, bool]]) -> None:
        now_s = time.time()
        effects: list[Placed] = []
        for where, up in batch:
            part, key = keys.split_part(where)
            slot, sid = keys.sender_of(key), keys.own_sid(key)
            if sid is None:  # a hub lets each slot name any session after its own
                if up:
                    effects.append(
                        (part, self._registry.refusals.add("token of another", key[:80]))
                    )
                continue
            if up and slot in self._shunned:
                continue
            if not up and (sid == self.sid or keys.is_hub(sid)):
                # The end of a hub's token, or of one's own, tells of a lost link, not of members that went.
                self._shaken_s = self._loop.time()
            if sid == self.sid:
                continue
            held = self._held_back.pop((part, sid), None)
            if held is not None:
                held.cancel()
            if not up:
                self._held_back[part, sid] = self._loop.call_later(
                    _SETTLE_S, self._token_gone, part, slot, sid
                )
            elif held is not None:  # it may have missed what was said meanwhile
                # Down and up at once: the registry asks it again, and no listener hears of it.
                self._registry.token_down(part, slot, sid, now_s)
                up_again = self._registry.token_up(part, slot, sid, now_s)
                effects += [placed for placed in up_again if not isinstance(placed[1], Event)]
            else:
                effects += self._registry.token_up(part, slot, sid, now_s)
        self._do(effects)

    def _token_gone(self, part: str, slot: str, sid: str) -> None:
        # When a hub goes, everybody behind it seems to, this member's own token too; most are back as
        # soon as they have found another hub. Only then are others given that time.
        left_s = self._shaken_s + self.settings.flap_s - self._loop.time()
        if left_s > 0:
            again = self._loop.call_later(left_s, self._token_gone, part, slot, sid)
            self._held_back[part, sid] = again
            return
        self._held_back.pop((part, sid), None)
        self.loads.pop(sid, None)
        self._do(self._registry.token_down(part, slot, sid, time.time()))

    # What is to be done

    def _do(self, effects: Iterable[Placed]) -> None:
        pending = list(effects)
        unpublished: dict[str, list[Record]] = {}
        revoked = False
        # It grows on the way: a revocation adds effects that are carried out in the same pass.
        while pending:
            part, effect = pending.pop(0)
            if isinstance(effect, Publish):
                unpublished.setdefault(part, []).extend(effect.records)
            elif isinstance(effect, Pull):
                self._pull(part, effect.sid)
            elif isinstance(effect, Event):
                self._tell(part, effect)
            elif isinstance(effect, NewSession | Speaks):
                self._turn(part, effect)
            elif isinstance(effect, Refused):
                self._refused(effect)
            elif isinstance(effect, Revoked):
                self._log.event("fabric.revoked", serials=sorted(effect.serials))
                self.verifier.revoke(int(serial, 16) for serial in effect.serials)
                pending += self._put_out()
                revoked = True
            elif isinstance(effect, Obituary):
                self._log.event("fabric.obituary", sid=effect.sid)
        for part, records in unpublished.items():
            self._publish(part, records)
        if revoked:
            self._call_revoked()
        if self._registry.synced:
            self._first_sync.set()
        self._schedule()

    def _publish(self, part: str, records: list[Record]) -> None:
        key = keys.in_part(part, keys.reg(self._registry.parts[part].sid))
        while records:  # in one message, if it fits
            fitting, _ = batch_records(records)
            self._link.put(key, encode_message(fitting))
            records = records[len(fitting) :]

    def _turn(self, part: str, effect: NewSession | Speaks) -> None:
        if isinstance(effect, NewSession):
            self._renewed(part, effect)
        else:
            self._speak(effect)

    def _speak(self, effect: Speaks) -> None:
        """Show the token of the site's speaker, and hear the site's loads, or no more."""
        self._undeclare(ALL)
        if self._site_loads is not None:
            self._site_loads.close()
            self._site_loads = None
        if effect.begins:
            self._declare(ALL)
            if not self._hears_loads:
                key = keys.in_part(self._registry.site, f"{keys.PREFIX}/load/**")
                self._site_loads = self._link.hear(key, self._loaded)
        self._log.event("fabric.speaks" if effect.begins else "fabric.silent", sid=self.sid)

    def _put_out(self) -> list[Placed]:
        """Drop what revoked members said, their tokens too, and hear nothing more of them."""
        now_s = time.time()
        self._shunned = self.verifier.shunned()
        effects = self._registry.recheck(now_s)
        for part, sid in self._registry.tokens():
            if keys.slot_of(sid) in self._shunned:
                effects += self._registry.token_down(part, keys.slot_of(sid), sid, now_s)
                self.loads.pop(sid, None)
        return effects

    def _call_revoked(self) -> None:
        for callback in tuple(self.on_revoked):
            callback()

    def _pull(self, part: str, sid: str) -> None:
        # One that is left out comes again by the registry's own clock.
        if len(self._pulls) >= _PULLS_AT_ONCE or self._closing:
            return
        task = self._loop.create_task(self._exchange(part, sid))
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)

    async def _exchange(self, part: str, sid: str) -> None:
        registry = self._registry.parts[part]
        exchange = registry.exchange()
        key = keys.in_part(part, keys.sync(sid))
        try:
            while exchange.ask is not None:
                answer = await self._link.query(key, exchange.ask, self.settings.query_s)
                self._do((part, effect) for effect in exchange.answered(answer, time.time()))
        except (TimeoutError, InputError):
            registry.pull_failed(time.time())
            self._schedule()

    def _tell(self, part: str, event: Event) -> None:
        entry = self._registry.parts[part].get(event.sid)
        if entry is not None and entry.metadata.summary is not None:
            return  # a site from afar: it is no member, and says so in `sites`
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

    def _renewed(self, part: str, effect: NewSession) -> None:
        self._log.event("fabric.renewed", old=effect.old, new=effect.new, cause=effect.cause)
        self._undeclare(part)
        self._declare(part)
        if part != self._registry.site:
            return
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
