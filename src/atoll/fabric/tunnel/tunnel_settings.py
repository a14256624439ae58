"""Times and sizes of the tunnel. Both sides count for themselves: nobody trusts the other's limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TunnelSettings:
    """How much and how long. Times are seconds, sizes bytes."""

    handshake_s: float = 3.0
    """How long the opening of a channel may take."""
    accept_s: float = 15.0
    """How long a worker may take to say that it has a request."""
    keep_alive_s: float = 0.25
    """A side that has open streams says something at least this often."""
    stall_s: float = 1.5
    """A worker that is silent for so long has lost its streams."""
    offline_s: float = 8.0
    """The same if this side had no hub meanwhile: nobody else could be reached either."""
    caller_gone_s: float = 10.0
    """A caller that is silent for so long has lost interest."""
    down_s: float = 0.3
    """Time left of all these once the fabric says that the other side is gone; longer than a flap."""
    body_s: float = 30.0
    """How long a worker waits for the next piece of a request."""
    quiet_s: float = 900.0
    """A stream in which nothing moves for so long is ended, by either side."""
    idle_s: float = 60.0
    """A caller closes a channel without streams after this long, a worker after three times that."""
    fresh_s: float = 3600.0
    """Calls go to a new channel, with new keys, once theirs is so old."""
    confirm_s: float = 10.0
    """A channel that was opened and never used is forgotten after this long."""

    stream_window: int = 256 * 2**10
    """Bytes that a worker may send of one stream before the caller has used them."""
    channel_window: int = 4 * 2**20
    """Bytes of packets that one side keeps until the other has acknowledged them."""
    packet_bytes: int = 64 * 2**10
    """Frames are put together up to this much."""
    unsent_bytes: int = 2 * 2**20
    """A handler that sends on while its stream is not writable is stopped here."""
    body_bytes: int = 32 * 2**20
    """The largest request."""
    bodies_bytes: int = 512 * 2**20
    """Open requests of one slot together."""
    head_bytes: int = 64 * 2**10
    """Method, path and headers of a request, or the head of an answer."""
    channel_streams: int = 1024
    """Open streams of a channel."""
    slot_streams: int = 2048
    """Open streams of all the channels of one slot, at a worker."""
    slot_channels: int = 64
    """Channels of one slot, at a worker."""
    handshakes_per_s: int = 2000
    """More than that, from whomever, are not looked at."""
    slot_handshakes_per_s: int = 200
    """More than that, of one slot, are not answered."""
