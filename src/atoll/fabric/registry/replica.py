"""The map that a registry keeps: session id -> greatest record seen, with hashes of the whole and of parts.

Hashes form a tree over the random digits of session ids. A place is what such digits begin with: "" is
everything, "3" a sixteenth, "3f" a sixteenth of that. Its hash is that of the set of records in it, whatever
their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from atoll.fabric.registry import sync
from atoll.fabric.registry.records import Metadata, Record, SessionState
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


@dataclass(frozen=True, slots=True)
class Entry:
    """One session as this replica knows it."""

    record: Record
    metadata: Metadata
    version: sync.Version
    since_s: float
    """When it came into its state here, Unix time."""


def entry_of(record: Record, metadata: Metadata, since_s: float) -> Entry:
    """Return the entry of a record."""
    version = sync.Version(record.state, record.rev, sync.tag(record))
    return Entry(record, metadata, version, since_s)


class Replica:
    """Entries by session id; hashes of all and of parts, and sums per slot, are kept up to date."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.per_slot: Counter[str] = Counter()
        self.bytes_per_slot: Counter[str] = Counter()
        self.hash = bytes(sync.HASH_BYTES)
        self.tree = DigestTree()

    def put(self, record: Record, metadata: Metadata, now_s: float) -> Entry:
        """Replace what is held of the session, whatever it is, and return the new entry."""
        held = self.entries.get(record.sid)
        entry = entry_of(record, metadata, now_s)
        if held is None:
            self.per_slot[record.slot] += 1
        else:
            self.bytes_per_slot[record.slot] -= sync.size(held.record)
            if held.record.state is record.state:
                entry = Entry(record, metadata, entry.version, held.since_s)
        before = None if held is None else held.version.tag
        self.tree.replace(record.sid, before, entry.version.tag)
        self.hash = self.tree.hash()
        self.bytes_per_slot[record.slot] += sync.size(record)
        self.entries[record.sid] = entry
        return entry

    def drop(self, sid: str) -> Entry:
        """Forget a session and return what was known of it."""
        entry = self.entries.pop(sid)
        self.tree.replace(sid, entry.version.tag, None)
        self.hash = self.tree.hash()
        self.per_slot[entry.record.slot] -= 1
        self.bytes_per_slot[entry.record.slot] -= sync.size(entry.record)
        return entry

    def versions(self, places: Iterable[str] = ("",)) -> dict[str, sync.Version]:
        """Return which record of each session in these places is held."""
        wanted = frozenset(places)
        if not wanted:
            return {}
        if "" in wanted:
            return {sid: entry.version for sid, entry in self.entries.items()}
        return {
            sid: entry.version
            for depth in sorted({len(place) for place in wanted})
            for sid, entry in self.entries.items()
            if place_of(sid, depth) in wanted
        }

    def describe(self, ask: sync.SyncRequest) -> sync.SyncReply:
        """Answer what is held in the places asked for; who names none is told everything."""
        if ask.hash == self.hash:
            return sync.SyncReply(self.hash)
        divided = {place: self.tree.parts(place) for place in ask.places}
        digests = {place: parts for place, parts in divided.items() if parts is not None}
        told = [place for place in ask.places if place not in digests] if ask.places else ("",)
        return sync.SyncReply(self.hash, self.versions(told), digests=digests)

    def fetch(self, sids: Iterable[str]) -> tuple[tuple[Record, ...], tuple[str, ...]]:
        """Return the records of these sessions that fit into one message, and the ids of the rest."""
        held = (self.entries.get(sid) for sid in sids)
        return sync.batch_records(entry.record for entry in held if entry is not None)


def foreign(record: Record, current: Record) -> bool:
    """Whether a greater record of one's session, which one has not left, says what one never said."""
    return current.state < SessionState.LEFT and record.content != current.content
