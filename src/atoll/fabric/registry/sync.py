"""How two replicas find out what the other lacks: a hash of everything first, details if it differs.

    asker                                          answerer
    SyncRequest(hash)                        ->
                                             <-    SyncReply(hash)                  equal: done
                                             <-    SyncReply(hash, versions)        else
    SyncRequest(hash, want=..., give=...)    ->    merges what it is given
                                             <-    SyncReply(hash, records, rest)   rest: did not fit
    SyncRequest(hash, want=rest)             ->    ... until nothing is left

One idle exchange is two messages of some twenty bytes, whatever the size of the registry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from atoll.core.errors import InputError
from atoll.fabric.registry.records import Record, SessionState, check_record, encode, merge

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
BATCH_BYTES = 1024 * 1024
"""Records in one message, roughly; what does not fit goes into the next."""
MOST_WANTED = 10_000
HASH_BYTES = 16

Hash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]


class Version(Struct, frozen=True, array_like=True):
    """Which record of a session a replica holds; `tag` tells those of equal rank apart."""

    state: SessionState
    rev: int
    tag: Hash


class SyncRequest(Struct, frozen=True, array_like=True):
    """What an asker sends."""

    hash: Hash
    want: Annotated[tuple[str, ...], Meta(max_length=MOST_WANTED)] = ()
    give: tuple[Record, ...] = ()

    @property
    def first(self) -> bool:
        """Whether this opens an exchange, so that versions may be the answer."""
        return not self.want and not self.give


class SyncReply(Struct, frozen=True, array_like=True):
    """What comes back; `versions` is None unless the hashes differ."""

    hash: Hash
    versions: dict[str, Version] | None = None
    records: tuple[Record, ...] = ()
    rest: tuple[str, ...] = ()


def tag(record: Record) -> bytes:
    """Return a hash of one record with everything in it."""
    return hashlib.blake2b(encode(record), digest_size=HASH_BYTES).digest()


def size(record: Record) -> int:
    """Return about how many bytes a record takes, without encoding it."""
    return len(record.body) + len(record.certificate) + len(record.signature) + 64


def toggle(whole: bytes, member: bytes) -> bytes:
    """Return the hash of a set after one member, given by its own hash, was added or removed."""
    mixed = int.from_bytes(whole, "big") ^ int.from_bytes(member, "big")
    return mixed.to_bytes(HASH_BYTES, "big")


def compare(
    ours: Mapping[str, Version], theirs: Mapping[str, Version]
) -> tuple[list[str], list[str]]:
    """Return the sessions of which (they hold the greater record, I hold the greater one).

    Two different records of equal state and rev are in both lists: only the content decides.
    """
    want = [sid for sid, other in theirs.items() if _behind(ours.get(sid), other)]
    give = [sid for sid, version in ours.items() if _behind(theirs.get(sid), version)]
    return want, give


def _behind(held: Version | None, other: Version) -> bool:
    if held is None:
        return True
    if held.tag == other.tag:
        return False
    return (held.state, held.rev) <= (other.state, other.rev)


def batch_records(records: Iterable[Record]) -> tuple[tuple[Record, ...], tuple[str, ...]]:
    """Return the records that fit into one message, at least one, and the ids of the rest."""
    fitting: list[Record] = []
    rest: list[str] = []
    used = 0
    for record in records:
        used += size(record)
        if fitting and used > BATCH_BYTES:
            rest.append(record.sid)
        else:
            fitting.append(record)
    return tuple(fitting), tuple(rest)


def latest(records: Iterable[Record]) -> Iterable[Record]:
    """Return the greatest record of each session: nobody honest sends two, and each costs to verify."""
    by_session: dict[str, Record] = {}
    for record in records:
        held = by_session.get(record.sid)
        by_session[record.sid] = record if held is None else merge(held, record)
    return by_session.values()


T = TypeVar("T")
_ENCODER = msgspec.msgpack.Encoder()
_ASK: msgspec.msgpack.Decoder[SyncRequest] = msgspec.msgpack.Decoder(SyncRequest)
_ANSWER: msgspec.msgpack.Decoder[SyncReply] = msgspec.msgpack.Decoder(SyncReply)
_RECORDS: msgspec.msgpack.Decoder[tuple[Record, ...]] = msgspec.msgpack.Decoder(tuple[Record, ...])


def encode_message(message: SyncRequest | SyncReply | tuple[Record, ...]) -> bytes:
    """Write a message; a tuple of records is what is pushed under `reg/`."""
    return _ENCODER.encode(message)


def decode_ask(data: bytes) -> SyncRequest:
    """Read an ask; raises InputError."""
    ask = _read(_ASK, data)
    for record in ask.give:
        check_record(record)
    return ask


def decode_answer(data: bytes) -> SyncReply:
    """Read an answer; raises InputError."""
    answer = _read(_ANSWER, data)
    for record in answer.records:
        check_record(record)
    return answer


def decode_records(data: bytes) -> tuple[Record, ...]:
    """Read what was pushed under `reg/`; raises InputError."""
    return tuple(check_record(record) for record in _read(_RECORDS, data))


def _read(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise InputError(f"a message of {len(data)} bytes is too large")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise InputError(f"not a valid message: {error}") from None
