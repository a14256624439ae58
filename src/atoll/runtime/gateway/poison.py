"""Requests that kill backends: deaths are written down, and a request that causes them is sent no further.

A backend that dies while a request is there may have died of it, or of anything else: of a kill, a power
cut, another request. What speaks against a request is that backends die only where it is:

- A death counts against it only if all of it had been sent and not one token had come.
- Two different backends that died so are enough, if nothing else died within a minute. Where backends die
  elsewhere too, deaths are common and two say little; then it takes four.
- Deaths that are put down to a request found guilty do not excuse the next one. If that happens to many
  requests in a minute it is the backends that are bad, and deaths excuse again.

A request found guilty is refused for a minute if it comes again, byte for byte. Time is a parameter, in
seconds.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence

from atoll.runtime.pool.member import Member
from atoll.runtime.pool.pool import BackendPool

_ONE_DEATH_S = 1.0
"""Requests that lose the same backend within this saw the same death."""
_WINDOW_S = 60.0
"""How long deaths count, and how long a guilty request is known."""
_DEATHS_ALONE = 2
"""Deaths that convict a request where nothing else dies."""
_DEATHS_AMONG_OTHERS = 4
"""Deaths that convict a request where deaths are common, and two of them say little."""
_MAX_GUILTY = 2
"""Requests found guilty within the window; if there were more, backends are to blame."""
_MAX_DEATHS = 4096
"""Deaths that are remembered: a bound on memory and on each look through them."""
_MAX_KNOWN = 256
"""Guilty requests that are known again; more are judged anew each time."""


class BackendDeath:
    """One death of one backend."""

    __slots__ = ("at_s", "explained", "name")

    def __init__(self, name: str, at_s: float) -> None:
        self.name = name
        self.at_s = at_s
        self.explained = False
        """Whether a request was found guilty of it."""


class DeathBook:
    """The deaths of the last minute, and the requests that were found guilty."""

    def __init__(self) -> None:
        self._deaths: deque[BackendDeath] = deque(maxlen=_MAX_DEATHS)
        self.guilty: dict[bytes, float] = {}
        """Digests of bodies, and when they are forgotten."""

    def note(self, name: str, now_s: float) -> BackendDeath:
        """Write down that a backend died; whoever tells of the same death gets the same entry."""
        deaths = self._deaths
        while deaths and now_s - deaths[0].at_s > _WINDOW_S:
            deaths.popleft()
        # From the newest: those told of within a second of each other are the same death.
        for death in reversed(deaths):
            if now_s - death.at_s > _ONE_DEATH_S:
                break
            if death.name == name:
                return death
        death = BackendDeath(name, now_s)
        deaths.append(death)
        return death

    def is_guilty(self, deaths: Sequence[BackendDeath], now_s: float) -> bool:
        """Return whether a request with which these backends died is what killed them."""
        # By names: one backend that dies again and again may be what is bad.
        if len({death.name for death in deaths}) < _DEATHS_ALONE:
            return False
        common = self.are_common(deaths, now_s)
        return len(deaths) >= (_DEATHS_AMONG_OTHERS if common else _DEATHS_ALONE)

    def are_common(self, deaths: Sequence[BackendDeath], now_s: float) -> bool:
        """Return whether, besides those given, backends died within the last minute that nothing explains."""
        self._forget(now_s)
        bad_backends = len(self.guilty) >= _MAX_GUILTY
        return any(
            death not in deaths
            and now_s - death.at_s <= _WINDOW_S
            and (bad_backends or not death.explained)
            for death in self._deaths
        )

    def convict(self, deaths: Sequence[BackendDeath], body: bytes, now_s: float) -> None:
        """Put deaths down to a request, and know it again."""
        for death in deaths:
            death.explained = True
        # A bound on memory: those beyond are judged anew each time.
        if len(self.guilty) < _MAX_KNOWN:
            self.guilty[_digest(body)] = now_s + _WINDOW_S

    def knows(self, body: bytes, now_s: float) -> bool:
        """Return whether a request was found guilty a short while ago."""
        self._forget(now_s)
        return bool(self.guilty) and _digest(body) in self.guilty

    def _forget(self, now_s: float) -> None:
        for digest in [d for d, until_s in self.guilty.items() if until_s <= now_s]:
            del self.guilty[digest]


class Doubts:
    """Failures of one request that may be its own fault, or its backends'."""

    __slots__ = ("_failures", "deaths")

    def __init__(self) -> None:
        self.deaths: tuple[BackendDeath, ...] = ()
        """Of backends that had all of it and said nothing."""
        self._failures: tuple[tuple[Member, str], ...] = ()

    def note_death(self, death: BackendDeath) -> None:
        """A backend died that had the request."""
        if death not in self.deaths:
            self.deaths += (death,)

    def note_failure(self, member: Member, reason: str) -> None:
        """A backend answered with an internal error, or not in time; others may do the same."""
        self._failures += ((member, reason),)

    def settle(self, pool: BackendPool, answered_by: Member, now_s: float) -> None:
        """Hold failures against backends, now that another one could answer the request."""
        failures, self._failures = self._failures, ()
        for member, reason in failures:
            # One that failed it and then answered it is not to blame, and one that is gone cannot be.
            if member is not answered_by and not member.removed:
                pool.note_failure(member, now_s, reason)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
