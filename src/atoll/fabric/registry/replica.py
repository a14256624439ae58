"""The map that a registry keeps: session id -> greatest record seen, with a hash of the whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from atoll.fabric.registry import sync
from atoll.fabric.registry.records import Metadata, Record, SessionState


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
    """Entries by session id; the hash of all and the sums per slot are kept up to date."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.per_slot: Counter[str] = Counter()
        self.bytes_per_slot: Counter[str] = Counter()
        self.hash = bytes(sync.HASH_BYTES)

    def put(self, record: Record, metadata: Metadata, now_s: float) -> Entry:
        """Replace what is held of the session, whatever it is, and return the new entry."""
        held = self.entries.get(record.sid)
        entry = entry_of(record, metadata, now_s)
        if held is None:
            self.per_slot[record.slot] += 1
        else:
            self.bytes_per_slot[record.slot] -= sync.size(held.record)
            self.hash = sync.toggle(self.hash, held.version.tag)
            if held.record.state is record.state:
                entry = Entry(record, metadata, entry.version, held.since_s)
        self.hash = sync.toggle(self.hash, entry.version.tag)
        self.bytes_per_slot[record.slot] += sync.size(record)
        self.entries[record.sid] = entry
        return entry

    def drop(self, sid: str) -> Entry:
        """Forget a session and return what was known of it."""
        entry = self.entries.pop(sid)
        self.hash = sync.toggle(self.hash, entry.version.tag)
        self.per_slot[entry.record.slot] -= 1
        self.bytes_per_slot[entry.record.slot] -= sync.size(entry.record)
        return entry

    def versions(self) -> dict[str, sync.Version]:
        """Return which record of each session is held."""
        return {sid: entry.version for sid, entry in self.entries.items()}


def foreign(record: Record, current: Record) -> bool:
    """Whether a greater record of one's session, which one has not left, says what one never said."""
    return current.state < SessionState.LEFT and record.content != current.content
