"""Wire format of the tunnel: packets of a channel, and frames of streams in them.

    packet   kind u8 | channel u64 | number u64 | ack u64 | content, sealed
    content  of DATA: frames, one after the other; of other kinds: the number of the next DATA packet
    frame    kind u8 | stream u32 | length u32 | that many bytes

All numbers are little-endian. DATA packets are numbered from 0 without gaps; the other kinds count for
themselves, so that no nonce is used twice. `ack` is the number of the DATA packet expected next.
"""

from __future__ import annotations

import re
from struct import Struct, error

import msgspec

from atoll.core.errors import AtollError


class TunnelError(AtollError):
    """The other side broke the protocol."""


# Packets.
DATA, KEEP, RESUME, CLOSE, PING = range(5)
"""Frames; nothing new; send again from `ack` on; no more of this channel; say something at once."""
PACKET = Struct("<BQQQ")
NEXT = Struct("<Q")

# Frames, to a worker.
SUBMIT, BODY, CANCEL, CREDIT = range(1, 5)
"""A request and the beginning of its body; more of that; stop; so many bytes more may be sent."""
# Frames, to a caller.
ACCEPT, HEAD, CHUNK, END, FAIL = range(16, 21)
"""The request is here; the answer begins; a piece; its end; why there is no more of it."""
FRAME = Struct("<BII")
AMOUNT = Struct("<I")


class TunnelRequest(msgspec.Struct, frozen=True):
    """A request as HTTP has it; `path` with its query, header names in small letters."""

    method: bytes
    path: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class RequestHead(msgspec.Struct, frozen=True, array_like=True):
    """All of a request but its body, of which only the size is known."""

    method: bytes
    path: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body_bytes: int


class AnswerHead(msgspec.Struct, frozen=True, array_like=True):
    """How an answer begins."""

    status: int
    content_type: bytes
    retry_after: bytes


_LINE = re.compile(rb"[\t -~]{0,256}")
encode = msgspec.msgpack.Encoder().encode
_submit_head = msgspec.msgpack.Decoder(RequestHead).decode
_answer_head = msgspec.msgpack.Decoder(AnswerHead).decode


def decode_submit(payload: bytes, max_bytes: int) -> tuple[RequestHead, bytes]:
    """Return the head of a request and the part of its body that came with it."""
    try:
        (size,) = AMOUNT.unpack_from(payload)
        if size > max_bytes or size > len(payload) - AMOUNT.size:
            raise TunnelError(f"a head of {size} bytes")
        head = _submit_head(payload[AMOUNT.size : AMOUNT.size + size])
    except (error, msgspec.MsgspecError) as problem:
        raise TunnelError(f"not a request: {problem}") from None
    if head.body_bytes < 0:
        raise TunnelError("a body of less than nothing")
    return head, payload[AMOUNT.size + size :]


def encode_submit(head: RequestHead, piece: bytes) -> bytes:
    """Return a SUBMIT frame's payload: the head, and as much of the body as goes with it."""
    data = encode(head)
    return AMOUNT.pack(len(data)) + data + piece


def decode_answer(payload: bytes) -> AnswerHead:
    """Read how an answer begins."""
    try:
        head = _answer_head(payload)
    except msgspec.MsgspecError as problem:
        raise TunnelError(f"not the head of an answer: {problem}") from None
    if not 200 <= head.status <= 599:
        raise TunnelError(f"status {head.status}")
    # They become headers of an answer: a line end in them would begin another one.
    if not all(map(_LINE.fullmatch, (head.content_type, head.retry_after))):
        raise TunnelError("a header that is not one short line")
    return head


def decode_amount(payload: bytes) -> int:
    """Read a number of bytes."""
    if len(payload) != AMOUNT.size:
        raise TunnelError("not a number")
    (amount,) = AMOUNT.unpack(payload)
    return int(amount)


def split_frames(content: bytes) -> list[tuple[int, int, bytes]]:
    """Return the frames in a DATA packet: kind, stream, payload."""
    frames: list[tuple[int, int, bytes]] = []
    at, end, size, unpack = 0, len(content), FRAME.size, FRAME.unpack_from
    try:
        while at < end:
            kind, stream, length = unpack(content, at)
            at += size
            payload = content[at : at + length]
            if len(payload) != length:
                raise TunnelError("a frame is cut off")
            frames.append((kind, stream, payload))
            at += length
    except error:
        raise TunnelError("a frame is cut off") from None
    return frames
