"""How two replicas find out what the other lacks: a hash of everything, then of the parts that differ.

    asker                                          answerer
    SyncRequest(hash, places=[""])           ->
                                             <-    SyncReply(hash)                   equal: done
                                             <-    SyncReply(hash, digests)          large: hashes of 16 parts
    SyncRequest(hash, places=[those that     ->
      differ])
                                             <-    SyncReply(hash, versions)         small: what is in it
    SyncRequest(hash, want=..., give=...)    ->    merges what it is given
                                             <-    SyncReply(hash, records, rest)    rest: did not fit
    SyncRequest(hash, want=rest)             ->    ... until nothing is left

A place is the start of the random digits of session ids ("": all of them), so the registry is a tree of
hashes. Two equal replicas exchange two messages of some twenty bytes, whatever their size; two that differ
in one of n records, O(log n). Who asks without places, as earlier versions do, gets all versions at once.
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
MAX_WANTED = 10_000
HASH_BYTES = 16
DEPTH = 3
"""Digits of the longest place: 4096 of them."""
LEAF = 64
"""Sessions of a place that are told one by one, rather than by hashes of its parts."""
WANTED_AT_ONCE = 1000
"""Records asked for in one message: about as many as fit into the answer."""
_MAX_PLACES = 16**DEPTH

Place = Annotated[str, Meta(pattern=r"\A[0-9a-f]{0,3}\Z")]
Hash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]


Digest = Annotated[tuple[Hash, ...], Meta(min_length=16, max_length=16)]


class Version(Struct, frozen=True, array_like=True):
    """Which record of a session a replica holds; `tag` tells those of equal rank apart."""

    state: SessionState
    rev: int
    tag: Hash


class SyncRequest(Struct, frozen=True, array_like=True):
    """Message of an asker."""

    hash: Hash
    want: Annotated[tuple[str, ...], Meta(max_length=MAX_WANTED)] = ()
    give: tuple[Record, ...] = ()
    places: Annotated[tuple[Place, ...], Meta(max_length=_MAX_PLACES)] = ()

    @property
    def compares(self) -> bool:
        """Whether this asks what the other holds, rather than for records."""
        return not self.want and not self.give


class SyncReply(Struct, frozen=True, array_like=True):
    """Answer to it; `versions` is None unless the hashes differ.

    It has the sessions of all places that were asked for, except those in `digests`, which are larger: of
    these there is the hash of each part.
    """

    hash: Hash
    versions: dict[str, Version] | None = None
    records: tuple[Record, ...] = ()
    rest: tuple[str, ...] = ()
    digests: Annotated[dict[Place, Digest], Meta(max_length=_MAX_PLACES)] = {}


def tag(record: Record) -> bytes:
    """Return a hash of one record with everything in it."""
    return hashlib.blake2b(encode(record), digest_size=HASH_BYTES).digest()


def size(record: Record) -> int:
    """Return about how many bytes a record takes, without encoding it."""
    return len(record.body) + len(record.certificate) + len(record.signature) + 64


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
