"""Hashes of parts of a map: a tree over the random digits of session ids, kept up to date.

A place is what such digits begin with: "" is everything, "3" a sixteenth, "3f" a sixteenth of that. The
hash of a place is that of the set of records in it, whatever their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atoll.fabric.registry.sync import DEPTH, HASH_BYTES, LEAF

_DIGITS = "0123456789abcdef"
_RANDOM = 16  # digits at the end of a session id


def place_of(sid: str, depth: int = DEPTH) -> str:
    """Return the place of so many digits that a session lies in."""
    return sid[-_RANDOM : depth - _RANDOM]


class DigestTree:
    """Hash and number of records of every place."""

    def __init__(self) -> None:
        self._hashes: dict[str, int] = {}
        self._sizes: dict[str, int] = {}

    def replace(self, sid: str, old: bytes | None, new: bytes | None) -> None:
        """Have the record with hash `new` in place of `old`; None: there is none."""
        mask = int.from_bytes(old or b"", "big") ^ int.from_bytes(new or b"", "big")
        change = (new is not None) - (old is not None)
        hashes, sizes = self._hashes, self._sizes
        for depth in range(DEPTH + 1):
            place = place_of(sid, depth)
            hashes[place] = hashes.get(place, 0) ^ mask
            if change:
                sizes[place] = sizes.get(place, 0) + change

    def hash(self, place: str = "") -> bytes:
        """Return the hash of a place."""
        return self._hashes.get(place, 0).to_bytes(HASH_BYTES, "big")

    def parts(self, place: str) -> tuple[bytes, ...] | None:
        """Return the hashes of the sixteen parts of a place; None if it is too small to be divided."""
        if len(place) >= DEPTH or self._sizes.get(place, 0) <= LEAF:
            return None
        return tuple(self.hash(place + digit) for digit in _DIGITS)

    def differing(self, digests: Mapping[str, Iterable[bytes]]) -> list[str]:
        """Return those parts of places whose hashes are others here."""
        return [
            place + digit
            for place, parts in digests.items()
            for digit, theirs in zip(_DIGITS, parts, strict=True)
            if theirs != self.hash(place + digit)
        ]
