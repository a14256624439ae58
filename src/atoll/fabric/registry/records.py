"""Records of the registry: one signed record per session, and the order that merges them.

A session is one life of one process; its id `sid` is "<slot>-<16 hex>" and says who owns it. A
record moves only upwards: JOIN < SERVING < DOWN < LEFT, then by `rev`, then by content, so that two
records of a session always have a greater one and every replica picks the same. The order is total
over distinct records, which makes `merge` a join semilattice: commutative, associative, idempotent.

Everything that comes from outside is bounded here: the size of a record, of every text and of every
list, and no text holds control characters, so that a name cannot rewrite a terminal.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from atoll.core.errors import InputError
from atoll.fabric.identity.fabric_keys import is_sid, slot_of

MAX_RECORD_BYTES = 64 * 1024
MAX_BODY_BYTES = 48 * 1024
_PLAIN = r"\A[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*\Z"

Text = Annotated[str, Meta(max_length=128, pattern=_PLAIN)]
LongText = Annotated[str, Meta(max_length=2048, pattern=_PLAIN)]
Serial = Annotated[str, Meta(pattern=r"\A[0-9a-f]{1,64}\Z")]
Count = Annotated[int, Meta(ge=0, le=1_000_000)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
Money = Annotated[float, Meta(ge=0.0, le=1e9)]
UnixSeconds = Annotated[float, Meta(ge=0.0, le=1e11)]

Role = Literal["hub", "worker", "gateway", "operator"]
Stability = Literal["spot", "batch", "standard", "reserved"]
STABILITIES: tuple[Stability, ...] = ("spot", "batch", "standard", "reserved")
"""From the least to the most dependable."""
Kind = Literal["llm", "embedding", "generic"]


class SessionState(IntEnum):
    """Where a session is in its life; it never goes back."""

    JOIN = 0
    SERVING = 1
    DOWN = 2
    LEFT = 3


class Gpu(Struct, frozen=True):
    """`count` equal GPUs; `type` is the catalog's name where it is known, else the driver's."""

    type: Text
    count: Annotated[int, Meta(ge=1, le=1024)]
    memory_bytes: Bytes
    """Memory of one of them."""


class Hardware(Struct, frozen=True):
    """Hardware of a node, as read from the machine."""

    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=16)] = ()
    cpu: Text = ""
    cpus: Count = 0
    memory_bytes: Bytes = 0


class NodeService(Struct, frozen=True):
    """A model that a node answers for."""

    model: Annotated[str, Meta(min_length=1, max_length=256, pattern=_PLAIN)]
    aliases: Annotated[
        tuple[Annotated[str, Meta(max_length=256, pattern=_PLAIN)], ...], Meta(max_length=32)
    ] = ()
    precision: Text = "unknown"
    context: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None
    """Most tokens of prompt and answer together; None if not known."""
    layers: tuple[Count, Count] | None = None
    """Layer range [start, end) if the node runs only a part of the model."""
    kind: Kind = "llm"


class SiteService(Struct, frozen=True, array_like=True):
    """A service of a site, as the site's speaker tells it to all."""

    model: Annotated[str, Meta(min_length=1, max_length=256, pattern=_PLAIN)]
    kind: Kind
    serving: Count
    """Members that serve it."""
    room: Count
    """Requests that these take at once, as far as they say."""
    busy: Annotated[float, Meta(ge=0.0, le=1.0)]
    """Share of it in use, lately, in quarters."""
    ask: Annotated[tuple[Annotated[str, Meta(max_length=32)], ...], Meta(max_length=4)] = ()
    """Sessions of gateways of the site, or else of hubs."""


class Metadata(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Description that a session gives of itself."""

    name: Annotated[str, Meta(min_length=1, max_length=128, pattern=_PLAIN)]
    provider: Text
    role: Role
    region: Text = ""
    site: Text = ""
    hardware: Hardware = Hardware()
    engine: Text = ""
    engine_version: Text = ""
    services: Annotated[tuple[NodeService, ...], Meta(max_length=64)] = ()
    weight: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None
    """Share of the traffic that a plan gives the node."""
    max_inflight: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    price_usd_per_hour: Money | None = None
    usd_per_mtoken_in: Money | None = None
    usd_per_mtoken_out: Money | None = None
    stability: Stability = "standard"
    direct: Annotated[str, Meta(max_length=512, pattern=_PLAIN)] | None = None
    """URL at which the node may be reached without the tunnel."""
    ends_s: UnixSeconds | None = None
    """When the node ends, as Unix time, if it knows."""
    accept: LongText | None = None
    """Whose requests it takes: "any", "self", "allow:A,B" or "deny:A,B"; None is "any"."""
    revoked: Annotated[tuple[Serial, ...], Meta(max_length=1024)] = ()
    """Serials of revoked certificates, as lower-case hex; heeded in records of hubs only."""
    labels: Annotated[
        dict[
            Annotated[str, Meta(max_length=64, pattern=_PLAIN)],
            Annotated[str, Meta(max_length=256, pattern=_PLAIN)],
        ],
        Meta(max_length=32),
    ] = {}
    summary: Annotated[tuple[SiteService, ...], Meta(max_length=256)] | None = None
    """Of the whole site, from its speaker; None: this is a member and speaks of itself."""


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One session's state as its owner (or, for LEFT, a hub) signed it."""

    sid: str
    state: SessionState
    rev: Annotated[int, Meta(ge=0, lt=1 << 53)]
    signed_s: UnixSeconds
    body: Annotated[bytes, Meta(max_length=MAX_BODY_BYTES)]
    """Metadata in msgpack (`encode_metadata`)."""
    certificate: Annotated[bytes, Meta(max_length=8192)]
    """DER."""
    signature: Annotated[bytes, Meta(max_length=512)]

    @property
    def slot(self) -> str:
        """The slot that owns the session."""
        return slot_of(self.sid)

    @property
    def content(self) -> tuple[int, int, float, bytes]:
        """Signed content, in the order in which it counts."""
        return (int(self.state), self.rev, self.signed_s, self.body)

    @property
    def rank(self) -> tuple[int, int, float, bytes, bytes, bytes]:
        """The total order of a session's records."""
        return (*self.content, self.certificate, self.signature)


def merge(a: Record, b: Record) -> Record:
    """Return the greater of two records of one session; the same whichever comes first."""
    if a.sid != b.sid:
        raise InputError(f"records of two sessions do not merge: {a.sid} and {b.sid}")
    return a if a.rank >= b.rank else b


def signed_bytes(
    fabric: str, sid: str, state: SessionState, rev: int, signed_s: float, body: bytes
) -> bytes:
    """Return the bytes that a record's signature is over; `fabric` is the federation's id."""
    return _ENCODER.encode(("atoll-record-v1", fabric, sid, int(state), rev, float(signed_s), body))


def encode(record: Record) -> bytes:
    """Write a record as msgpack."""
    return _ENCODER.encode(record)


def decode(data: bytes) -> Record:
    """Read a record; anything oversized, malformed or unknown raises InputError."""
    if len(data) > MAX_RECORD_BYTES:
        raise InputError(
            f"a record of {len(data)} bytes is too large", hint=f"at most {MAX_RECORD_BYTES} bytes"
        )
    return check_record(_read(_RECORD, data, "record"))


def check_record(record: Record) -> Record:
    """Return a record that was decoded inside another message if its id is well formed."""
    if not is_sid(record.sid):
        raise InputError(f"{record.sid[:60]!r} is not a session id", hint="<slot>-<16 hex digits>")
    return record


def encode_metadata(metadata: Metadata) -> bytes:
    """Write metadata as a record's body; raises InputError if it breaks a limit."""
    body = _ENCODER.encode(metadata)
    decode_metadata(body)
    return body


def decode_metadata(body: bytes) -> Metadata:
    """Read a record's body; fields of later versions are skipped, broken limits raise InputError."""
    if len(body) > MAX_BODY_BYTES:
        raise InputError(
            f"metadata of {len(body)} bytes is too large", hint=f"at most {MAX_BODY_BYTES} bytes"
        )
    return _read(_METADATA, body, "metadata")


def farewell(metadata: Metadata) -> Metadata:
    """Return the little that is kept of a session that has left: who it was."""
    return Metadata(name=metadata.name, provider=metadata.provider, role=metadata.role)


T = TypeVar("T")
_ENCODER = msgspec.msgpack.Encoder(order="deterministic")
_RECORD: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
_METADATA: msgspec.msgpack.Decoder[Metadata] = msgspec.msgpack.Decoder(Metadata)


def _read(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise InputError(f"not a valid {what}: {error}") from None


def as_dict(metadata: Metadata) -> dict[str, Any]:
    """Return metadata as plain dicts and lists, every field present; for JSON."""
    fields = {name: getattr(metadata, name) for name in metadata.__struct_fields__}
    if metadata.summary is None:
        # Nothing that a member says of itself.
        del fields["summary"]
    plain: dict[str, Any] = msgspec.to_builtins(fields)
    return plain
