"""What a member says of its load: small, unsigned, a few times a second at most, never in the registry."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_MAX_BYTES = 256
_Count = Annotated[int, Meta(ge=0, le=1_000_000)]


class Load(msgspec.Struct, frozen=True, array_like=True):
    """One sample. It steers routing only; nothing is paid or trusted by it."""

    running: _Count = 0
    """Requests being served."""
    waiting: _Count = 0
    """Requests in the engine's queue."""
    capacity: _Count | None = None
    """Requests it would take at once."""
    tokens_per_s: Annotated[float, Meta(ge=0.0, le=1e12)] = 0.0
    """Tokens delivered a second, lately."""
    kv_used: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    """Share of the cache in use, 0 to 1."""
    at_s: float = 0.0
    """When it was taken, Unix time by the sender's clock."""


_decode = msgspec.msgpack.Decoder(Load).decode
encode_load = msgspec.msgpack.Encoder().encode


def decode_load(data: bytes) -> Load | None:
    """Read a sample; None if it is not one."""
    if len(data) > _MAX_BYTES:
        return None
    try:
        return _decode(data)
    except msgspec.MsgspecError:
        return None
