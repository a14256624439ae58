"""Settings of a registry, the effects it asks its driver to carry out, and the records it refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from atoll.fabric.registry.records import Record, SessionState
from atoll.fabric.registry.sync import Version

Sign = Callable[[str, SessionState, int, float, bytes], Record]
"""(sid, state, rev, signed_s, body) -> the record, signed with this member's key."""
Verify = Callable[[Record], str | None]
"""Why a record is refused, in a word or two; None if certificate and signature are good."""


_SMALL_FABRIC = 1000
"""Sessions up to which owners sign as often as set; in larger fabrics the more rarely."""
_RARER_MAX = 6.0


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """How patient a registry is. All times are seconds."""

    pull_every_s: float = 5.0
    """Between exchanges with a random live peer, give or take half."""
    pull_first_s: float = 0.03
    """From the first token seen to the first exchange, at most."""
    pull_risen_s: float = 0.6
    """From a peer's token to an exchange with it, at most; tokens in between share it."""
    doubt_s: float = 5.0
    """Records pushed less than this before a peer's token went may not have reached it, in seconds."""
    pull_again_s: float = 0.5
    """After an exchange that failed, give or take half."""
    obituary_s: float = 60.0
    """How long a hub waits for a token before it writes LEFT."""
    obituary_spread_s: float = 10.0
    """Hubs wait up to this much longer, each its own time, so that one of them writes."""
    resign_s: float = 3600.0
    """Owners sign again at least so often, in a fabric of up to `_SMALL_FABRIC` sessions."""
    max_age_s: float = 24 * 3600.0
    """Records signed longer ago are refused."""
    skew_s: float = 300.0
    """By how much clocks of members may differ."""
    gap_s: float = 5.0
    """A longer pause between ticks counts as not having watched."""
    max_slot_records: int = 4096
    """Most sessions of one slot in `max_age_s`."""
    max_slot_bytes: int = 16 * 1024 * 1024
    """Most that their records may take together."""

    def resign_after_s(self, sessions: int) -> float:
        """Return how often an owner signs again where there are so many sessions.

        Everybody hears of it, so it is rarer where there are many: at most six times, which leaves an owner
        four tries before its record is too old.
        """
        return self.resign_s * min(max(1.0, sessions / _SMALL_FABRIC), _RARER_MAX)


class Publish(NamedTuple):
    """Push these records to everybody, in several messages if there are many (`sync.batched`)."""

    records: tuple[Record, ...]


class Pull(NamedTuple):
    """Run an exchange with this peer."""

    sid: str


class NewSession(NamedTuple):
    """This member has another session id now; cause: left, cloned, back or renewed."""

    old: str
    new: str
    cause: str


class Obituary(NamedTuple):
    """This hub has declared a session LEFT."""

    sid: str


class Speaks(NamedTuple):
    """This member speaks for its site from now on, or (False) no more: its token in the part of all."""

    begins: bool


class Event(NamedTuple):
    """Something about a peer is new: joined, changed, up, down or left."""

    kind: str
    sid: str


class Refused(NamedTuple):
    """A record or token was not taken."""

    reason: str
    sid: str


class Revoked(NamedTuple):
    """All serials that hubs have revoked."""

    serials: frozenset[str]


Effect = Publish | Pull | NewSession | Obituary | Speaks | Event | Refused | Revoked


_SHUN_S = 60.0
_MAX = 1024
_FORGED = frozenset(
    {"signature", "foreign", "certificate", "session of another", "forged provider"}
)


class Refusals:
    """Counts by reason, and the hashes of the last records that were refused."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.forged = 0
        """Those that nobody honest sends, nor passes on."""
        self._until_s: dict[bytes, float] = {}

    def add(self, reason: str, sid: str) -> Refused:
        """Count a refusal and return it."""
        self.counts[reason] += 1
        self.forged += reason in _FORGED
        return Refused(reason, sid)

    def shun(self, tag: bytes, now_s: float) -> None:
        """Remember a record that was refused."""
        if len(self._until_s) >= _MAX:
            self._until_s.pop(next(iter(self._until_s)))
        self._until_s[tag] = now_s + _SHUN_S

    def filter_refused(
        self, sids: list[str], theirs: Mapping[str, Version], now_s: float
    ) -> list[str]:
        """Return those sessions of which a peer holds a record that was not refused lately."""
        return [sid for sid in sids if self._until_s.get(theirs[sid].tag, 0.0) <= now_s]
