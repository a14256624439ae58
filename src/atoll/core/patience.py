"""How long a silent peer is waited for: one that waits for a core is slow, not dead.

A process that is killed closes its connections, which others see at once. Silence alone may be that of a
frozen or unreachable machine, or of a busy one. On a quiet machine a limit on it holds as it is; where this
process, or the peer, was late itself, it is longer by `_TIMES` that delay. Nothing here does I/O; time is a
parameter.
"""

from __future__ import annotations

import math

_TIMES = 3.0
"""Delays that come after one another are rarely more than so many times the longest of them."""
_HALF_S = 20.0
"""After this long half of a delay is forgotten."""
MAX_EXTRA_S = 30.0
"""No more than this is added to a limit: what is dead is found, however busy the machine is."""
_FORGET_S = 600.0
"""A peer that was not heard of for so long is unknown."""


class LongestDelay:
    """The longest delay lately, in seconds: each counts half after `_HALF_S`."""

    __slots__ = ("_at_s", "_delay_s")

    def __init__(self) -> None:
        self._delay_s = 0.0
        self._at_s = 0.0

    def note(self, delay_s: float, now_s: float) -> None:
        """Take in one."""
        if delay_s > self.at(now_s):
            self._delay_s, self._at_s = delay_s, now_s

    def at(self, now_s: float) -> float:
        """Return what it is now."""
        if not self._delay_s:
            return 0.0
        return self._delay_s * math.pow(2.0, -max(0.0, now_s - self._at_s) / _HALF_S)


class Patience:
    """Delays of this process and of its peers, by name.

    `every_s` is how often `tick` is called, and how often peers say something at the least.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._tick_s = math.inf
        self._here = LongestDelay()
        self._peers: dict[str, LongestDelay] = {}
        self._heard_s: dict[str, float] = {}
        self.excused_s = -math.inf
        """Until when silence of others is no fault of theirs: this process was late itself."""

    def tick(self, now_s: float) -> None:
        """Note that `every_s` should have passed since the last time."""
        late_s = now_s - self._tick_s - self._every_s
        self._tick_s = now_s
        if late_s > self._every_s:
            # What others said meanwhile is still to be read.
            self.excused_s = now_s
            self._here.note(late_s, now_s)
        if len(self._heard_s) > 64:
            self._forget(now_s)

    def hear(self, peer: str, now_s: float) -> None:
        """Note that a peer said something just now."""
        before_s = self._heard_s.get(peer, now_s)
        self._heard_s[peer] = now_s
        if now_s - before_s > 2 * self._every_s:
            self.tell(peer, now_s - before_s - self._every_s, now_s)

    def restart(self, peer: str) -> None:
        """Forget when a peer was heard: it died, and the time until the next one speaks is no delay."""
        self._heard_s.pop(peer, None)

    def tell(self, peer: str, delay_s: float, now_s: float) -> None:
        """Note how late a peer was, by its own word or by when it was heard."""
        if delay_s > 0.0:
            self._heard_s.setdefault(peer, now_s)
            self._peers.setdefault(peer, LongestDelay()).note(delay_s, now_s)

    def here_s(self, now_s: float) -> float:
        """Return how late this process was at most, lately."""
        return self._here.at(now_s)

    def extra_s(self, peer: str, now_s: float) -> float:
        """Return how much longer than otherwise a peer may be silent."""
        of_peer = self._peers.get(peer)
        delay_s = self._here.at(now_s) + (0.0 if of_peer is None else of_peer.at(now_s))
        return min(_TIMES * delay_s, MAX_EXTRA_S)

    def is_silent(self, peer: str, heard_s: float, limit_s: float, now_s: float) -> bool:
        """Whether a peer that was heard last at a time is silent for longer than a limit, in seconds."""
        if now_s - heard_s <= limit_s:
            return False
        since_s = max(heard_s, self.excused_s)
        return now_s - since_s > limit_s + self.extra_s(peer, now_s)

    def _forget(self, now_s: float) -> None:
        gone = [peer for peer, at_s in self._heard_s.items() if now_s - at_s > _FORGET_S]
        for peer in gone:
            del self._heard_s[peer]
            self._peers.pop(peer, None)
