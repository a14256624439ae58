"""What a registry is given and what it asks its driver to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from atoll.fabric.registry.records import Record, SessionState

Sign = Callable[[str, SessionState, int, float, bytes], Record]
"""(sid, state, rev, signed_s, body) -> the record, signed with this member's key."""
Verify = Callable[[Record], str | None]
"""Why a record is refused, in a word or two; None if certificate and signature are good."""


_FEW = 1000
_RARER_MOST = 6.0


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
    """What was pushed so long before a peer's token went may not have reached it."""
    pull_again_s: float = 0.5
    """After an exchange that failed, give or take half."""
    obituary_s: float = 60.0
    """How long a hub waits for a token before it writes LEFT."""
    obituary_spread_s: float = 10.0
    """Hubs wait up to this much longer, each its own time, so that one of them writes."""
    resign_s: float = 3600.0
    """Owners sign again at least so often, in a fabric of up to `_FEW` sessions; see `resign_after_s`."""
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
        return self.resign_s * min(max(1.0, sessions / _FEW), _RARER_MOST)


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


Effect = Publish | Pull | NewSession | Obituary | Event | Refused | Revoked
