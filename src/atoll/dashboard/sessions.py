"""Who is logged in: sessions in memory, and how often an address may try to log in.

A browser has a session's id, 256 random bits; we keep only its SHA-256, so that what is read out of memory
logs nobody in. A session ends when it was not used for a time, at the latest some days after its start, and
with the process.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from atoll.core.bucket import TokenBucket
from atoll.core.roles import Role
from atoll.runtime.openai import ApiError

IDLE_S = 12 * 3600.0
ABSOLUTE_S = 7 * 24 * 3600.0
Kind = Literal["key", "link", "header"]
"""How somebody logged in."""
_MAX = 10_000
_MAX_OF_ONE = 100
"""Sessions of one person: nobody pushes others out by logging in again and again."""
_TRIES = 10
_TRIES_PER_S = 1 / 30
_MAX_ADDRESSES = 10_000
_MAX_GOOD = 4096
"""Keys that are known to have logged in."""


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A key that was made for a session that has none of its own."""

    id: str
    text: str = field(repr=False)


@dataclass(slots=True, eq=False)
class LoginSession:
    """Somebody who is logged in; times are of the clock that the store is given, in seconds."""

    kind: Kind
    name: str
    role: Role
    owner: str | None = None
    key: str | None = field(default=None, repr=False)
    """The API key that was shown; nobody but the gateway is told."""
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    keys_needed: bool = False
    accounts: bool = False
    made: SessionKey | None = None
    making: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    pages: int = 0
    """Open pages that are told what happens."""
    started_s: float = 0.0
    seen_s: float = 0.0
    checked_s: float = 0.0
    """When the gateway was last asked what the session's key may do."""
    ended: bool = False
    over_because: str = "the session is over: log in again"

    @property
    def who(self) -> tuple[str, str]:
        """Whose session it is: what one may have of something is counted by this."""
        return self.kind, self.owner or self.key or ""

    def check_csrf(self, token: bytes | None) -> None:
        """Raise ApiError unless a request shows the token that only our pages know."""
        if token is None or not hmac.compare_digest(token, self.csrf.encode()):
            raise ApiError(
                403,
                "the header x-csrf-token is missing or of another session",
                kind="permission_error",
                code="csrf",
            )


class SessionStore:
    """All sessions; the one that was unused for longest makes room for a new one."""

    def __init__(
        self,
        *,
        idle_s: float = IDLE_S,
        absolute_s: float = ABSOLUTE_S,
        most: int = _MAX,
        max_of_one: int = _MAX_OF_ONE,
    ) -> None:
        self._idle_s = idle_s
        self._absolute_s = absolute_s
        self._most = most
        self._max_of_one = max_of_one
        self._by_hash: dict[bytes, LoginSession] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def __iter__(self) -> Iterator[LoginSession]:
        return iter(tuple(self._by_hash.values()))

    def add(self, session: LoginSession, now_s: float) -> tuple[str, list[LoginSession]]:
        """Keep a session; returns its id, which only the browser keeps, and the sessions that ended."""
        gone = self.expire(now_s)
        who = session.who
        own = [h for h, kept in self._by_hash.items() if kept.who == who]
        if len(own) >= self._max_of_one:
            gone.append(self._end_oldest(own))
        while len(self._by_hash) >= self._most:
            gone.append(self._end_oldest(list(self._by_hash)))
        text = secrets.token_urlsafe(32)
        session.started_s = session.seen_s = session.checked_s = now_s
        self._by_hash[_hash(text)] = session
        return text, gone

    def find(self, text: str | None, now_s: float) -> LoginSession | None:
        """Return the session of an id, which counts as used now, or None."""
        if text is None:
            return None
        found = self._by_hash.get(_hash(text))
        if found is None or self.is_over(found, now_s):
            return None
        found.seen_s = now_s
        return found

    def is_over(self, session: LoginSession, now_s: float) -> bool:
        """Whether a session has ended or is too old."""
        return (
            session.ended
            or now_s - session.seen_s > self._idle_s
            or now_s - session.started_s > self._absolute_s
        )

    def expire(self, now_s: float) -> list[LoginSession]:
        """Forget sessions that are over, and return them."""
        over = [h for h, session in self._by_hash.items() if self.is_over(session, now_s)]
        return [self._end(each) for each in over]

    def end(self, session: LoginSession) -> None:
        """Forget a session."""
        for each, kept in tuple(self._by_hash.items()):
            if kept is session:
                self._end(each)

    def _end_oldest(self, among: list[bytes]) -> LoginSession:
        return self._end(min(among, key=lambda h: self._by_hash[h].seen_s))

    def _end(self, hashed: bytes) -> LoginSession:
        session = self._by_hash.pop(hashed)
        session.ended = True
        session.key = None
        return session


class ProgramSessions:
    """Which session a key has that programs show with every request; keys are kept as their SHA-256."""

    def __init__(self) -> None:
        self._ids: dict[bytes, str] = {}

    def find(self, key: str) -> str | None:
        """Return the id of the session of a key, which may be over, or None."""
        return self._ids.get(_hash(key))

    def keep(self, key: str, session_id: str) -> None:
        """Have a key stand for a session from now on."""
        self._ids.pop(_hash(key), None)
        self._ids[_hash(key)] = session_id
        if len(self._ids) > _MAX:
            del self._ids[next(iter(self._ids))]


class LoginLimiter:
    """How often an address may fail to log in: some times at once, then twice a minute.

    Many people may have one address. Whoever shows a key that has logged in before is not kept waiting for
    the mistakes of others.
    """

    def __init__(self, tries: int = _TRIES, per_s: float = _TRIES_PER_S) -> None:
        self._tries = tries
        self._per_s = per_s
        self._buckets: dict[str, TokenBucket] = {}
        self._good: dict[bytes, None] = {}
        """Digests of keys that have logged in, the last one last."""

    def try_once(self, address: str, now_s: float, key: str = "") -> None:
        """Count a try as a failure until it is known; ApiError where an address has failed too often."""
        bucket = self._buckets.get(address)
        if key and self._good.pop(_hash(key), False) is None:
            # Known again once it is good again: one that was revoked is like others from then on.
            if bucket is not None:
                bucket.charge(now_s, 1.0)
            return
        if bucket is not None and (wait_s := bucket.wait_s(now_s)) > 0:
            raise ApiError(
                429,
                "too many failed logins from this address",
                kind="rate_limit_error",
                code="login_limit",
                retry_after_s=int(wait_s) + 1,
            )
        if address not in self._buckets and len(self._buckets) >= _MAX_ADDRESSES:
            full = [a for a, b in self._buckets.items() if b.full_s(now_s) <= 0]
            for each in full or list(self._buckets)[: _MAX_ADDRESSES // 10]:
                del self._buckets[each]
        bucket = self._buckets.setdefault(address, TokenBucket(self._tries, self._per_s, now_s))
        bucket.charge(now_s, 1.0)

    def note_success(self, address: str, now_s: float, key: str = "") -> None:
        """Count the last try no more: it did not fail."""
        bucket = self._buckets.get(address)
        if bucket is not None:
            bucket.charge(now_s, -1.0)
        if key:
            self._good[_hash(key)] = None
            if len(self._good) > _MAX_GOOD:
                del self._good[next(iter(self._good))]


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
