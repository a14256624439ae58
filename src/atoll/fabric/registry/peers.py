"""Other members as seen from here, and their load: small unsigned samples that are never in the registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.fabric.registry.records import Metadata, SessionState

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
    gpu_used: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """Share of the time that its GPUs compute, lately."""
    memory_used: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """Share of the memory of its GPUs in use."""


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


@dataclass(frozen=True, slots=True)
class Peer:
    """One member as seen from here, this moment."""

    sid: str
    slot: str
    name: str
    provider: str
    verified: bool
    """Whether name and provider are those of a certificate."""
    state: SessionState
    metadata: Metadata
    alive: bool
    """Whether its token is up here."""
    since_s: float
    """Unix time it came into this state as far as this member knows."""

    @property
    def routable(self) -> bool:
        """Whether requests may be sent to it."""
        return self.alive and self.state is SessionState.SERVING
