"""The replicated registry: what is known of every session, and what to do next.

`Registry` is pure. It does no I/O; `now_s` (Unix time) and randomness are parameters, signing and
verifying are injected. What happened goes in (records, tokens, ticks), effects come out, and the
driver carries them out:

    Publish(records)             put them under `reg/<my slot>/<my sid>`, for everybody
    Pull(sid)                    run an `exchange` with that peer
    NewSession(old, new, cause)  my session id is another one now: move token and queryables
    Obituary(sid)                for the log: this hub has declared a silent session LEFT
    Event(kind, sid)             joined | changed | up | down | left, of a peer
    Refused(reason, sid)         a record or token was not taken; log and count it
    Revoked(serials)             hubs revoke these certificates: tell the verifier, then `recheck`

Rules that keep it right:

  * Records of a session merge by `records.merge`; only its owner raises it, except that a hub may
    write LEFT after `obituary_s` without a token. So nothing ever goes back, whatever is lost,
    repeated, reordered or partitioned.
  * A record signed more than `max_age_s` ago is refused, owners sign again every `resign_s`, and
    records are forgotten only some time later than that (`skew_s` twice). So when LEFT is forgotten,
    every older record of that session is too old to be taken.
  * Whoever sees its own session LEFT while it lives, or a record of it that it never wrote, takes a
    new session, once: the old one is no longer its own.
  * Liveness is local: a peer counts as alive while its token is up here. It is never replicated.
  * Only watched time counts: when the clock jumps or the process was stopped, timers are moved.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from atoll.core.errors import InputError, UsageError
from atoll.fabric.identity.fabric_keys import is_hub, is_sid, slot_of
from atoll.fabric.registry import sync
from atoll.fabric.registry.effects import (
    Effect,
    Event,
    NewSession,
    Obituary,
    Publish,
    Pull,
    Refusals,
    RegistrySettings,
    Revoked,
    Sign,
    Verify,
)
from atoll.fabric.registry.records import (
    Metadata,
    Record,
    SessionState,
    decode_metadata,
    encode_metadata,
    farewell,
)
from atoll.fabric.registry.replica import Entry, Replica, entry_of, foreign
from atoll.fabric.registry.sync_exchange import SyncExchange, one_of

_COUNTS = ("merged", "known", "exchanges", "exchanges_failed", "sessions_taken", "obituaries")
_NEVER = float("inf")
MAX_QUESTIONS_TO_STRANGER = 3
"""How often the owner of a token without a record is asked for it."""
MAX_FORGED = 8
"""Forged records of one message that are verified; each costs a signature check."""
CROWD = 45
"""Tokens from which on questions of those who return together are spread over more time."""
_FORGET_EVERY_S = 60.0


class Registry:
    """One replica; see the module."""

    def __init__(
        self,
        slot: str,
        metadata: Metadata,
        *,
        sign: Sign,
        verify: Verify,
        rng: random.Random,
        now_s: float,
        state: SessionState = SessionState.JOIN,
        settings: RegistrySettings | None = None,
        observer: bool = False,
    ) -> None:
        """Start a session of `slot` in `state`; the first tick publishes it.

        A slot of a hub (h0, h1, ...) makes this replica write obituaries. `rng` must not be
        predictable outside of tests: it makes session ids. An observer keeps its own record to
        itself: it reads along and leaves no trace.
        """
        self.settings = settings or RegistrySettings()
        self.slot = slot
        self.observer = observer
        self.sid = ""
        self.synced = False
        """Whether an exchange with some peer was completed."""
        self.counts: Counter[str] = Counter()
        self.refusals = Refusals()
        self.last_sync_s: float | None = None
        self.spread_s: float | None = None
        """How old the last pushed record was when it arrived here, by both clocks."""
        self._sign, self._verify, self._rng = sign, verify, rng
        self._map = Replica()
        self._entries = self._map.entries
        self._tokens: dict[str, float] = {}
        self._shown: Counter[str] = Counter()  # tokens of a slot
        self._silent: dict[str, float] = {}  # since when it was missed
        self._risen: dict[str, bool] = {}  # whether it was here before
        self._strange: Counter[str] = Counter()
        self._failed = 0
        self._revoked: frozenset[str] = frozenset()
        patience = self.settings
        # Hubs wait for different times, so that one writes the obituary and the others hear of it.
        self._patience_s = patience.obituary_s + rng.uniform(0.0, patience.obituary_spread_s)
        self._ticked_s = self._written_s = self._publish_s = now_s
        self._resign_s = self._risen_s = _NEVER
        self._pull_s = now_s + self._about(self.settings.pull_every_s)
        self._forget_s = now_s + _FORGET_EVERY_S
        self._begin(state, metadata, now_s)

    # What is known

    @property
    def own_entry(self) -> Entry:
        """This member's own entry."""
        return self._own_entry

    @property
    def hash(self) -> bytes:
        """Hash of everything held; equal replicas have equal hashes."""
        return self._map.hash

    def get(self, sid: str) -> Entry | None:
        """Return what is known of a session; None if nothing."""
        return self._entries.get(sid)

    def alive(self, sid: str) -> bool:
        """Whether the session's token is up here; this member itself is always alive."""
        return sid == self.sid or sid in self._tokens

    def tokens(self) -> tuple[str, ...]:
        """Return the sessions of others whose tokens are up here."""
        return tuple(self._tokens)

    def entries(self) -> dict[str, Entry]:
        """Return every session known, LEFT ones and (of a member) its own too."""
        return dict(self._entries)

    def peers(self) -> dict[str, Entry]:
        """Return every other session that has not left."""
        known = self._entries.items()
        return {s: e for s, e in known if s != self.sid and e.record.state < SessionState.LEFT}

    def stats(self) -> dict[str, object]:
        """Return figures for metrics."""
        states = Counter(entry.record.state.name.lower() for entry in self._entries.values())
        return {
            "sessions": {state.name.lower(): states[state.name.lower()] for state in SessionState},
            "alive": len(self._tokens) + 1,
            "refused": dict(self.refusals.counts),
            **{name: self.counts[name] for name in _COUNTS},
            "last_sync_s": self.last_sync_s,
            "spread_s": self.spread_s,
            "hash": self._map.hash.hex(),
        }

    # What this member says of itself

    def announce(
        self, now_s: float, state: SessionState | None = None, metadata: Metadata | None = None
    ) -> list[Effect]:
        """Raise this member's record; a lower state than before takes a new session."""
        entry = self.own_entry
        if entry.record.state is SessionState.LEFT:
            raise UsageError("a session that has left says nothing more", hint="renew it first")
        state = entry.record.state if state is None else state
        metadata = entry.metadata if metadata is None else metadata
        if state < entry.record.state:
            return self.renew(now_s, "back", state, metadata)
        if (state, metadata) == (entry.record.state, entry.metadata):
            return []
        return self._raise(state, metadata, now_s)

    def renew(
        self,
        now_s: float,
        cause: str = "renewed",
        state: SessionState | None = None,
        metadata: Metadata | None = None,
    ) -> list[Effect]:
        """Take a new session in `state` (default: as it was); the old one is LEFT."""
        entry = self.own_entry
        effects: list[Effect] = []
        if entry.record.state < SessionState.LEFT:
            effects += self._raise(SessionState.LEFT, farewell(entry.metadata), now_s)
        if state is None:
            state = (
                SessionState.JOIN if entry.record.state is SessionState.LEFT else entry.record.state
            )
        return effects + self._restart(cause, state, metadata or entry.metadata, now_s)

    def leave(self, now_s: float) -> list[Effect]:
        """Say LEFT; nothing can be announced after."""
        entry = self.own_entry
        if entry.record.state is SessionState.LEFT:
            return []
        return self._raise(SessionState.LEFT, farewell(entry.metadata), now_s)

    # What others say

    def merge(self, records: Iterable[Record], now_s: float) -> list[Effect]:
        """Take in records, however they came: pushed, pulled, twice, late or out of order."""
        effects: list[Effect] = []
        forged = self.refusals.forged
        for record in sync.latest(records):
            effects += self._merge(record, now_s)
            if self.refusals.forged - forged >= MAX_FORGED:
                break  # of a liar nothing more is worth verifying
        return effects

    def pushed(self, data: bytes, now_s: float) -> list[Effect]:
        """Take in what a peer put under `reg/`."""
        try:
            records = sync.decode_records(data)
        except InputError:
            return [self.refusals.add("malformed", "")]
        before = self.counts["merged"]
        effects = self.merge(records, now_s)
        if self.counts["merged"] > before:
            self.spread_s = max(0.0, now_s - max(record.signed_s for record in records))
        return effects

    def token_up(self, slot: str, sid: str, now_s: float) -> list[Effect]:
        """A token of `sid` appeared, written by `slot`."""
        if not is_sid(sid) or slot_of(sid) != slot:
            return [self.refusals.add("token of another", sid[:60])]
        if sid == self.sid or sid in self._tokens:
            return []
        if self._shown[slot] >= self.settings.max_slot_records:
            return [self.refusals.add("too many tokens", sid)]
        self._shown[slot] += 1
        first = not self._tokens
        self._tokens[sid] = now_s
        silent_s = self._silent.pop(sid, None)
        crowd = max(1.0, (len(self._tokens) / CROWD) ** 2)  # where all return, and ask, at once
        # The first token: nothing is known yet, so ask almost at once.
        wait_s = self.settings.pull_first_s if first else self.settings.pull_risen_s * crowd
        self._risen[sid] = silent_s is not None or sid in self._entries
        self._risen_s = min(self._risen_s, now_s + self._rng.uniform(0.0, wait_s))
        # What was pushed while it was away, or while this member was, it may not have heard.
        since_s = now_s if silent_s is None else silent_s
        doubtful = self._written_s >= since_s - self.settings.doubt_s
        if doubtful and (first or silent_s is not None):  # many that come back share one push
            soon_s = now_s + self._rng.uniform(0.0 if first else wait_s / 2, wait_s)
            self._publish_s = min(self._publish_s, soon_s)
        return self._of_peer("up", sid)

    def token_down(self, slot: str, sid: str, now_s: float) -> list[Effect]:
        """A token of `sid` disappeared."""
        if slot_of(sid) != slot or self._tokens.pop(sid, None) is None:
            return []
        self._shown[slot] -= 1
        self._strange.pop(sid, None)
        self._watch(sid, now_s)
        return self._of_peer("down", sid)

    def recheck(self, now_s: float) -> list[Effect]:
        """Verify peers again (certificates were revoked) and drop those that no longer pass.

        What is LEFT stays so: dropping it could bring an older record back.
        """
        effects: list[Effect] = []
        for sid, entry in self.peers().items():
            reason = self._verify(entry.record)
            if reason is not None:
                effects += [self.refusals.add(reason, sid), *self._drop(sid)]
                self.refusals.shun(entry.version.tag, now_s)
        return effects

    # Exchanges

    def exchange(self) -> SyncExchange:
        """Start to compare with a peer, the one a `Pull` names."""
        return SyncExchange(self)

    def answer(self, data: bytes, now_s: float) -> tuple[bytes, list[Effect]]:
        """Answer a peer's `sync/` question."""
        try:
            ask = sync.decode_ask(data)
        except InputError:
            return sync.encode_message(sync.SyncReply(self._map.hash)), [
                self.refusals.add("malformed", "")
            ]
        effects = self.merge(ask.give, now_s)
        if ask.compares:
            return sync.encode_message(self._map.describe(ask)), effects
        records, rest = self._map.fetch(ask.want)
        return sync.encode_message(sync.SyncReply(self._map.hash, None, records, rest)), effects

    def differing(self, digests: Mapping[str, sync.Digest]) -> list[str]:
        """Return the parts of places whose hashes are others than a peer's."""
        return self._map.tree.differing(digests)

    def lacking(
        self, places: Sequence[str], theirs: Mapping[str, sync.Version], now_s: float
    ) -> tuple[list[str], list[str]]:
        """Return which sessions to ask of a peer that holds `theirs` in these places, and to give to it."""
        want, give = sync.compare(self._map.versions(places), theirs)
        return self.refusals.filter_refused(want, theirs, now_s), give

    def fetch(self, sids: Iterable[str]) -> tuple[tuple[Record, ...], tuple[str, ...]]:
        """Return the records of these sessions that fit into one message, and the ids of the rest."""
        return self._map.fetch(sids)

    def exchanged(self, now_s: float) -> None:
        """An exchange was completed."""
        self.synced = True
        self.last_sync_s = now_s
        self.counts["exchanges"] += 1
        self._failed = 0
        # A token without a record: whoever answered did not know it yet, so ask its owner.
        for sid in [sid for sid in self._tokens if sid not in self._entries]:
            if self._strange[sid] < MAX_QUESTIONS_TO_STRANGER:
                self._strange[sid] += 1
                self._risen[sid] = False
                self._risen_s = min(self._risen_s, now_s + self.settings.pull_risen_s)

    def pull_failed(self, now_s: float) -> None:
        """An exchange got no answer, or a wrong one: try somebody else soon."""
        self.counts["exchanges_failed"] += 1
        self._failed = min(self._failed + 1, 3)
        # Four times the first pause at most.
        again_s = self.settings.pull_again_s * 2.0 ** (self._failed - 1)
        self._pull_s = min(self._pull_s, now_s + self._about(again_s))

    # Time

    @property
    def due_s(self) -> float:
        """When `tick` has something to do next, Unix time; ticking earlier or later does no harm."""
        due_s = min(self._publish_s, self._resign_s, self._risen_s, self._forget_s)
        if self._tokens:
            due_s = min(due_s, self._pull_s)
        if is_hub(self.slot) and self._silent:
            due_s = min(due_s, min(self._silent.values()) + self._patience_s)
        # So that the gap after which time counts as unwatched is never reached by waiting.
        return min(due_s, self._ticked_s + self.settings.gap_s / 2)

    def tick(self, now_s: float) -> list[Effect]:
        """Do whatever is due."""
        self._follow_clock(now_s)
        effects: list[Effect] = []
        if now_s >= self._resign_s:
            # Before publishing: `_raise` publishes, too, which settles both.
            self._resign_s = _NEVER
            if self.own_entry.record.state < SessionState.LEFT:
                effects += self._raise(self.own_entry.record.state, self.own_entry.metadata, now_s)
        if now_s >= self._publish_s:
            effects += self._publish()
        if now_s >= min(self._risen_s, self._pull_s):
            effects += self._pull(now_s)
        if is_hub(self.slot):
            effects += self._bury(now_s)
        if now_s >= self._forget_s:
            effects += self._forget(now_s)
        return effects

    def _follow_clock(self, now_s: float) -> None:
        jump_s = now_s - self._ticked_s
        self._ticked_s = now_s
        if 0.0 <= jump_s <= self.settings.gap_s:
            return
        # Time that nobody watched is no silence: what was counted so far stays.
        self._silent = {sid: since_s + jump_s for sid, since_s in self._silent.items()}
        # What was said meanwhile may have been missed, so ask now.
        self._pull_s = self._forget_s = now_s
        if abs(jump_s) > self.settings.skew_s:  # what was signed by the other clock may be refused
            self._resign_s = now_s

    def _pull(self, now_s: float) -> list[Effect]:
        # A newcomer whose record has arrived is no reason to ask: it asks by itself.
        risen = [sid for sid, before in self._risen.items() if before or sid not in self._entries]
        risen = [sid for sid in risen if sid in self._tokens]
        self._risen, self._risen_s = {}, _NEVER
        if self.synced and not risen and now_s < self._pull_s:
            return []
        among = risen or list(self._tokens)
        if not self.synced:  # a hub knows more than somebody who has just joined as well
            among = [sid for sid in self._tokens if is_hub(sid)] or among
        self._pull_s = now_s + self._about(self.settings.pull_every_s)
        return [Pull(one_of(among, self._shown, self._rng))] if among else []

    def _bury(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        dead = [s for s, since_s in self._silent.items() if now_s - since_s >= self._patience_s]
        records: list[Record] = []
        for sid in dead:
            entry = self._entries[sid]
            body = encode_metadata(farewell(entry.metadata))
            record = self._sign(sid, SessionState.LEFT, entry.record.rev, now_s, body)
            effects += [Obituary(sid), *self._store(record, farewell(entry.metadata), now_s)]
            records.append(record)
            self.counts["obituaries"] += 1
        return [*effects, Publish(tuple(records))] if records else effects

    def _forget(self, now_s: float) -> list[Effect]:
        self._forget_s = now_s + _FORGET_EVERY_S
        # Later than a record is refused by any clock: see the module.
        oldest_s = now_s - self.settings.max_age_s - 2 * self.settings.skew_s
        effects: list[Effect] = []
        for sid, entry in list(self._entries.items()):
            if sid != self.sid and entry.record.signed_s < oldest_s:
                effects += self._drop(sid)
        return effects

    # The map

    def _merge(self, record: Record, now_s: float) -> list[Effect]:
        held = self._entries.get(record.sid)
        # What is known already is sorted out first: a signature costs far more to check.
        if held is not None and record.rank <= held.record.rank:
            self.counts["known"] += 1
            return []
        try:
            reason = self._objection(record, held, now_s)
            metadata = decode_metadata(record.body)
        except InputError:
            reason, metadata = "malformed", None
        if reason is not None or metadata is None:
            self.refusals.shun(sync.tag(record), now_s)
            return [self.refusals.add(reason or "malformed", record.sid)]
        self.counts["merged"] += 1
        effects = self._store(record, metadata, now_s)
        if record.sid == self.sid and held is not None and foreign(record, held.record):
            # Never written by this process: buried while alive, or a copy of it runs elsewhere.
            cause = "left" if record.state is SessionState.LEFT else "cloned"
            effects += self._restart(cause, held.record.state, held.metadata, now_s)
            self._watch(record.sid, now_s)
            effects += self._of_peer("joined", record.sid)
        # Only hubs revoke: what it says of itself and its slot must agree.
        if metadata.revoked and metadata.role == "hub" and is_hub(record.sid):
            effects += self._revoke(metadata)
        return effects

    def _objection(self, record: Record, held: Entry | None, now_s: float) -> str | None:
        # From the cheapest check to the dearest: the signature comes last.
        if now_s - record.signed_s > self.settings.max_age_s:
            return "stale"
        if record.signed_s - now_s > self.settings.skew_s:
            return "from the future"
        if held is None and self._map.per_slot[record.slot] >= self.settings.max_slot_records:
            return "too many sessions"
        more = sync.size(record) - (0 if held is None else sync.size(held.record))
        room = self.settings.max_slot_bytes - self._map.bytes_per_slot[record.slot]
        # A record that is no larger than the one held is taken even where the slot is over its limit.
        if more > max(0, room):
            return "too large together"
        return self._verify(record)

    def _revoke(self, metadata: Metadata) -> list[Effect]:
        serials = self._revoked.union(metadata.revoked)
        if serials == self._revoked:
            return []
        self._revoked = serials
        return [Revoked(serials)]

    def _store(self, record: Record, metadata: Metadata, now_s: float) -> list[Effect]:
        sid = record.sid
        held = self._entries.get(sid)
        entry = self._map.put(record, metadata, now_s)
        if sid == self.sid:
            self._own_entry = entry
        if record.state is SessionState.LEFT:
            self._silent.pop(sid, None)
            newly = held is not None and held.record.state < SessionState.LEFT
            return [Event("left", sid)] if newly and sid != self.sid else []
        self._watch(sid, now_s)
        return self._of_peer("joined" if held is None else "changed", sid)

    def _drop(self, sid: str) -> list[Effect]:
        entry = self._map.drop(sid)
        self._silent.pop(sid, None)
        return [Event("left", sid)] if entry.record.state < SessionState.LEFT else []

    def _watch(self, sid: str, now_s: float) -> None:
        """Remember since when a session that should have a token has none."""
        entry = self._entries.get(sid)
        if entry is not None and entry.record.state < SessionState.LEFT and not self.alive(sid):
            self._silent.setdefault(sid, now_s)

    def _of_peer(self, kind: str, sid: str) -> list[Effect]:
        entry = self._entries.get(sid)
        if sid == self.sid or entry is None or entry.record.state is SessionState.LEFT:
            return []
        return [Event(kind, sid)]

    # This member's own session

    def _begin(self, state: SessionState, metadata: Metadata, now_s: float) -> None:
        self.sid = f"{self.slot}-{self._rng.getrandbits(64):016x}"
        self.counts["sessions_taken"] += 1
        self._write(state, 0, metadata, now_s)

    def _restart(
        self, cause: str, state: SessionState, metadata: Metadata, now_s: float
    ) -> list[Effect]:
        old = self.sid
        self._begin(state, metadata, now_s)
        return [NewSession(old, self.sid, cause), *self._publish()]

    def _raise(self, state: SessionState, metadata: Metadata, now_s: float) -> list[Effect]:
        self._write(state, self.own_entry.record.rev + 1, metadata, now_s)
        return self._publish()

    def _write(self, state: SessionState, rev: int, metadata: Metadata, now_s: float) -> None:
        record = self._sign(self.sid, state, rev, now_s, encode_metadata(metadata))
        self._written_s = now_s
        patience_s = self.settings.resign_after_s(len(self._entries))
        # By chance, so that members that joined together do not sign together.
        self._resign_s = now_s + self._rng.uniform(0.5, 1.0) * patience_s
        if self.observer:
            self._own_entry = entry_of(record, metadata, now_s)
        else:
            self._store(record, metadata, now_s)

    def _publish(self) -> list[Effect]:
        self._publish_s = _NEVER
        return [] if self.observer else [Publish((self._own_entry.record,))]

    def _about(self, seconds: float) -> float:
        return seconds * self._rng.uniform(0.5, 1.5)
