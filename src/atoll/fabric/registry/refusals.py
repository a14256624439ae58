"""What a registry did not take: counted by reason, and not asked for again for a while."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from atoll.fabric.registry.effects import Refused
from atoll.fabric.registry.sync import Version

_SHUN_S = 60.0
_MOST = 1024
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
        if len(self._until_s) >= _MOST:
            self._until_s.pop(next(iter(self._until_s)))
        self._until_s[tag] = now_s + _SHUN_S

    def filter_refused(
        self, sids: list[str], theirs: Mapping[str, Version], now_s: float
    ) -> list[str]:
        """Return those sessions of which a peer holds a record that was not refused lately."""
        return [sid for sid in sids if self._until_s.get(theirs[sid].tag, 0.0) <= now_s]
