"""Who owns the sequences of a node: schedulers that say hello, and what tells that one is gone.

A node goes on with what it was given until somebody says otherwise. Whoever gave it may have died: its
connection breaks and it says no more, or another process with its name comes in its place. Silence alone is
no death, for a busy machine is slow; it counts only after a long time.
"""

from __future__ import annotations

from dataclasses import dataclass

BROKEN_S = 2.0
"""A scheduler whose connection broke and that has said nothing since then for so long is gone."""
SILENT_S = 120.0
"""So is one that says nothing for so long, whatever its connection does."""


@dataclass(slots=True)
class _Owner:
    name: str
    incarnation: int
    heard_s: float
    broken_s: float | None = None


class SequenceOwners:
    """The schedulers of a node by their endpoints, which are those that answers go to."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}

    def hear(self, endpoint: str, name: str, incarnation: int, now_s: float) -> list[str]:
        """Note a hello; returns endpoints of schedulers before this one, which are gone.

        They were at its endpoint, or elsewhere with its name, if it has one.
        """
        before = [
            other
            for other, owner in self._owners.items()
            if owner.incarnation != incarnation
            and (other == endpoint or (name and owner.name == name))
        ]
        for other in before:
            del self._owners[other]
        self._owners[endpoint] = _Owner(name, incarnation, now_s)
        return before

    def note_broken(self, endpoint: str, now_s: float) -> None:
        """Note that the connection to a scheduler broke."""
        owner = self._owners.get(endpoint)
        if owner is not None and owner.broken_s is None:
            owner.broken_s = now_s

    def take_gone(self, now_s: float) -> list[str]:
        """Return the endpoints of schedulers that are gone by now, and forget them."""
        gone = [
            endpoint
            for endpoint, owner in self._owners.items()
            if now_s - owner.heard_s > SILENT_S
            or (owner.broken_s is not None and now_s - owner.broken_s > BROKEN_S)
        ]
        for endpoint in gone:
            del self._owners[endpoint]
        return gone
