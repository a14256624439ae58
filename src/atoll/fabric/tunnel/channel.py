"""One end of a channel: numbered packets that arrive once and in order, whatever happens on the way.

It does no I/O and knows no clock: bytes and times come in, packets to send are collected. Packets are
kept until the other side has acknowledged them. A receiver that sees a gap (a hub was lost with what was
in it) says RESUME and gets everything again from there; `KEEP` packets tell what was sent last, so that
a loss at the very end is seen too. Packets that come early wait for those before them.
"""

from __future__ import annotations

from collections import deque
from struct import error

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from atoll.fabric.tunnel.tunnel_frames import (
    CLOSE,
    DATA,
    FRAME,
    KEEP,
    NEXT,
    PACKET,
    PING,
    RESUME,
    TunnelError,
    split_frames,
)
from atoll.fabric.tunnel.tunnel_settings import TunnelSettings

_RESUME_S = 0.1
_RESEND_S = 0.5
"""How often to ask for what is missing, and how often to send the same again."""
# Packets after which an acknowledgement goes out, even where nothing else does.
_ACK_PACKETS = 256
_MIN = 256
"""Least size that a waiting packet counts as, in bytes."""


class ForgedError(TunnelError):
    """A packet that the other side did not make; the channel is none the worse for it."""


class PacketCipher:
    """Seals contents for the other side and opens what it sealed.

    ChaCha20-Poly1305 with one key for each direction; kind and number of a packet are its nonce.
    """

    def __init__(self, out_key: bytes, in_key: bytes) -> None:
        self._seal = ChaCha20Poly1305(out_key).encrypt
        self._open = ChaCha20Poly1305(in_key).decrypt

    def seal(self, header: bytes, content: bytes) -> bytes:
        """Return the content, sealed together with the header."""
        return self._seal(_nonce(header), content, header)

    def open(self, header: bytes, content: bytes) -> bytes:
        """Return the content; raises ForgedError if anything was changed."""
        try:
            return self._open(_nonce(header), content, header)
        except InvalidTag:
            raise ForgedError("a packet that was not sealed by the other side") from None


def _nonce(header: bytes) -> bytes:
    # A number is used once for a kind and direction, so no nonce comes twice under one key.
    return b"\0\0\0" + header[0:1] + header[9:17]


def channel_of(packet: bytes) -> int:
    """Return the channel a packet says it belongs to; -1 if it is none."""
    return int.from_bytes(packet[1:9], "little") if len(packet) >= PACKET.size else -1


class Channel:
    """See the module. `number` names the channel; both ends have the same."""

    __slots__ = (
        "_acked",
        "_box",
        "_control_in",
        "_control_out",
        "_due",
        "_early",
        "_early_bytes",
        "_expected",
        "_frames",
        "_frames_bytes",
        "_kept",
        "_kept_bytes",
        "_next",
        "_resent_from",
        "_resent_s",
        "_resume_from",
        "_resume_s",
        "_said_s",
        "_settings",
        "_taken",
        "_taken_bytes",
        "bytes_in",
        "bytes_out",
        "closed",
        "duplicates",
        "gaps",
        "heard_s",
        "number",
        "outbox",
        "packets_in",
        "packets_out",
        "resent",
    )

    def __init__(
        self, number: int, box: PacketCipher, settings: TunnelSettings, now_s: float
    ) -> None:
        self.number = number
        self._box = box
        self._settings = settings
        self.outbox: list[bytes] = []
        """Packets to be sent, in order."""
        self.heard_s = now_s
        """When the other side last said anything."""
        self.closed = False
        """Whether the other side has said CLOSE."""
        self._frames: list[bytes | memoryview] = []
        self._frames_bytes = 0
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._next = self._expected = self._acked = 0
        self._early: dict[int, bytes] = {}
        self._early_bytes = 0
        self._control_out = self._control_in = 0
        self._taken = self._taken_bytes = 0
        self._due = False
        self._said_s = now_s
        self._resume_from, self._resume_s = -1, 0.0
        self._resent_from, self._resent_s = -1, 0.0
        self.packets_in = self.packets_out = self.resent = self.duplicates = self.gaps = 0
        self.bytes_in = self.bytes_out = 0

    # Out

    @property
    def room(self) -> int:
        """How many bytes of bodies may be pushed now."""
        return self._settings.channel_window - self._kept_bytes - self._frames_bytes

    @property
    def pending(self) -> bool:
        """Whether `flush` would return anything."""
        return self._due or bool(self._frames or self.outbox)

    @property
    def settled(self) -> bool:
        """Whether the other side has acknowledged everything."""
        return not self._kept and not self._frames

    def push(self, kind: int, stream: int, payload: bytes | memoryview = b"") -> None:
        """Add a frame to the next packet; small ones go even where there is no `room`.

        Raises TunnelError if the other side has acknowledged nothing for far too long.
        """
        size = len(payload)
        if self._frames_bytes + size > self._settings.packet_bytes and self._frames:
            self._pack()
        self._frames.append(FRAME.pack(kind, stream, size))
        if size:
            self._frames.append(payload)
        self._frames_bytes += size + FRAME.size

    def flush(self, now_s: float) -> list[bytes]:
        """Return the packets to be sent now."""
        if self._frames:
            self._pack()
        if self._due:
            self._control(KEEP)
        out = self.outbox
        if out:
            self.outbox = []
            self._said_s = now_s
        return out

    def _pack(self) -> None:
        header = PACKET.pack(DATA, self.number, self._next, self._expected)
        packet = header + self._box.seal(header, b"".join(self._frames))
        self._next += 1
        self._frames.clear()
        self._frames_bytes = 0
        self._kept.append(packet)
        self._kept_bytes += len(packet)
        self.packets_out += 1
        self.bytes_out += len(packet)
        self.outbox.append(packet)
        self._reset_acknowledging()
        # Small frames go without `room`, so the window alone bounds nothing.
        if self._kept_bytes > 2 * self._settings.channel_window:
            raise TunnelError("the other side acknowledges nothing")

    def _control(self, kind: int) -> None:
        header = PACKET.pack(kind, self.number, self._control_out, self._expected)
        self._control_out += 1
        self.outbox.append(header + self._box.seal(header, NEXT.pack(self._next)))
        self._reset_acknowledging()

    def _reset_acknowledging(self) -> None:
        self._due = False
        self._taken = self._taken_bytes = 0
        self._acked = self._expected

    # In

    def receive(self, packet: bytes, now_s: float) -> list[tuple[int, int, bytes]]:
        """Take a packet; return its frames, none if it is out of turn.

        Raises ForgedError if it was not made by the other side, TunnelError if it breaks the rules.
        """
        header = packet[: PACKET.size]
        try:
            kind, _, number, ack = PACKET.unpack(header)
        except error:
            raise ForgedError("not a packet") from None
        if kind == DATA and number < self._expected:
            # Seen before: sent again because our acknowledgement was lost, or by somebody else.
            self.duplicates += 1
            self._due = True
            return []
        content = self._box.open(header, packet[PACKET.size :])
        if kind != DATA:
            self._take_control(kind, number, ack, content, now_s)
            return []
        self.heard_s = now_s
        if ack > self._next - len(self._kept):
            self._forget(ack)
        if number > self._expected:
            self._wait(number, content)
            self._gap(now_s)
            return []
        frames = split_frames(content)
        self._took(len(packet))
        while self._early:
            waited = self._early.pop(self._expected, None)
            if waited is None:
                self._gap(now_s)
                break
            self._early_bytes -= max(len(waited), _MIN)
            frames += split_frames(waited)
            self._took(len(waited))
        return frames

    def _took(self, size: int) -> None:
        self._expected += 1
        self._taken += 1
        self._taken_bytes += size
        self.packets_in += 1
        self.bytes_in += size
        # After a quarter of the window, so that the other side does not run out of room.
        if self._taken >= _ACK_PACKETS or self._taken_bytes * 4 >= self._settings.channel_window:
            self._due = True

    def _wait(self, number: int, content: bytes) -> None:
        """Keep a packet that came early, as long as that is not too much; it is sent again anyway."""
        if number not in self._early and self._early_bytes < self._settings.channel_window:
            self._early[number] = content
            self._early_bytes += max(len(content), _MIN)

    def _take_control(self, kind: int, number: int, ack: int, content: bytes, now_s: float) -> None:
        # Control packets have numbers of their own: one that comes late knows less than those before it.
        if number < self._control_in:
            self.duplicates += 1
            return
        if len(content) != NEXT.size or kind > PING:
            raise TunnelError("not a packet")
        self._control_in = number + 1
        self.heard_s = now_s
        self._forget(ack)
        # More was sent than has arrived: a loss at the very end.
        if NEXT.unpack(content)[0] > self._expected:
            self._gap(now_s)
        elif self._expected > self._acked or kind == PING:
            self._due = True
        if kind == RESUME:
            self._resend(ack, now_s)
        elif kind == CLOSE:
            self.closed = True

    def _forget(self, ack: int) -> None:
        """Drop what has arrived; `ack` is what the other side expects next."""
        if ack > self._next:
            raise TunnelError("an acknowledgement of what was never sent")
        kept = self._kept
        for _ in range(ack - (self._next - len(kept))):
            self._kept_bytes -= len(kept.popleft())

    def _gap(self, now_s: float) -> None:
        """Ask for what is missing, once for every `_RESUME_S` without progress."""
        if self._resume_from == self._expected and now_s < self._resume_s + _RESUME_S:
            return
        self._resume_from, self._resume_s = self._expected, now_s
        self.gaps += 1
        self._control(RESUME)

    def _resend(self, start: int, now_s: float) -> None:
        # The same is asked for again and again until it arrives, which takes a while on a slow link.
        if start == self._resent_from and now_s < self._resent_s + _RESEND_S:
            return
        self._resent_from, self._resent_s = start, now_s
        self.resent += len(self._kept)
        # What is in the outbox already has not been sent even once.
        waiting = set(map(id, self.outbox))
        # Before what waits: the other side takes packets in order.
        self.outbox[:0] = [p for p in self._kept if id(p) not in waiting]

    # Time

    def tick(self, now_s: float, *, busy: bool) -> None:
        """Say something if it is time: `busy` means that streams are open."""
        # A little early: a tick that comes just too soon would double the pause.
        if now_s - self._said_s < self._settings.keep_alive_s * 0.9:
            return
        if busy or self._kept or self._expected > self._acked:
            self._due = True

    def ping(self) -> None:
        """Have the other side say something at once."""
        self._control(PING)

    def close(self) -> None:
        """Say that nothing more comes."""
        self._control(CLOSE)
