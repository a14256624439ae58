"""How often, and for how long, a request looks for another backend. Decides only; time is a parameter."""

from __future__ import annotations

_MOST_DIED = 8
"""Nodes that may vanish under one request between two tokens: it might be what kills them."""
_MOST_BROKEN = 64
"""A request moves so often at most, though each backend gave it a token: a bad one could go on for ever."""
_BACKOFF_S = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)


class RetryBudget:
    """What is left to one request after backends failed it."""

    __slots__ = ("_broken", "_died", "_missed", "until_s")

    def __init__(self) -> None:
        self._broken = 0
        """Streams that broke off after a token."""
        self._died = 0
        """Nodes that vanished under the request since its last token."""
        self._missed = 0
        """Searches for a backend since the last token."""
        self.until_s: float | None = None
        """When the search ends; None: it has not begun."""

    def note_progress(self) -> None:
        """Begin anew: the backend that failed had given a token."""
        self._broken += 1
        self._missed = self._died = 0
        self.until_s = None

    def restart_search(self) -> None:
        """Begin anew: a backend was found."""
        self._missed = 0
        self.until_s = None

    def excuse_death(self) -> bool:
        """Return whether a node that vanished costs the request no try."""
        excused = self._died < _MOST_DIED
        self._died += excused
        return excused

    @property
    def is_spent(self) -> bool:
        """Whether the request has moved too often."""
        return self._broken > _MOST_BROKEN

    def next_wait_s(self, now_s: float, search_s: float) -> float | None:
        """Return how long to wait before the next try, or None: the search has gone on for `search_s`."""
        if self.until_s is None:
            self.until_s = now_s + search_s
        if now_s >= self.until_s:
            return None
        self._missed += 1
        return _BACKOFF_S[min(self._missed, len(_BACKOFF_S)) - 1]
