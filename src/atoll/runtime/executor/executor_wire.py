"""Frames and their contents: bytes to messages and back, without sockets.

A frame is a header of 16 bytes and a body in MessagePack. Little-endian:

    magic "AX" | version u8 | 0 u8 | length u32 | crc32 of the body u32 | crc32 of these 12 bytes u32

So a damaged header is found before its length is believed, and a damaged body before it is read. Handles are
MessagePack extensions; nothing else but plain data is read or written. What comes from outside is looked
through before anything is made of it: depth, number of items, keys and extensions have limits.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar, cast

import msgspec

from atoll.core.errors import AtollError
from atoll.runtime.executor.executor_messages import (
    MAX_FRAME_BYTES,
    VERSION,
    CallerHello,
    ExecutorWelcome,
    FromExecutor,
    ToExecutor,
)
from atoll.tasks.values import Handle, Value

HEADER_BYTES = 16
MAX_DEPTH = 32
"""How deep lists and dictionaries may be nested in a value."""
MAX_ITEMS = 2**18
"""How many values a message may hold, those inside others counted."""
_ITEM_MEMORY = 64
_MAGIC = b"AX"
_HEAD = struct.Struct("<2sBBII")
_CHECK = struct.Struct("<I")
_HANDLE = 1
_MAX_ID = 64
_PLAIN = (bool, int, float, str, bytes)
_Message = TypeVar("_Message")

_Short = Annotated[str, msgspec.Meta(max_length=_MAX_ID)]
_Long = Annotated[str, msgspec.Meta(max_length=4096)]
_Shape = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=8)]
_Sum = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class WireError(AtollError):
    """A message that is none of this protocol, received or to be sent; the connection ends."""


class _PackedHandle(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A handle as it is written."""

    id: _Short
    owner: _Long
    address: _Long
    host: _Long
    path: _Long
    dtype: _Short
    shape: _Shape
    crc32: _Sum
    data: bytes


_ENCODER = msgspec.msgpack.Encoder()
_HANDLES = msgspec.msgpack.Decoder(_PackedHandle)


def pack_value(value: Value, depth: int = 0) -> Any:
    """Return a value as MessagePack can write it; what is not a value is refused."""
    if value is None or type(value) in _PLAIN:
        return value
    if depth >= MAX_DEPTH:
        raise WireError(f"a value is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Handle):
        return _pack_handle(value)
    if isinstance(value, dict):
        if not all(type(key) is str for key in value):
            raise WireError("a dictionary has keys that are not texts")
        return {key: pack_value(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [pack_value(item, depth + 1) for item in value]
    if isinstance(value, _PLAIN):
        return value
    raise WireError(
        f"a {type(value).__name__} cannot be sent", hint="put arrays into a store and send handles"
    )


def _pack_handle(handle: Handle) -> msgspec.msgpack.Ext:
    packed = _PackedHandle(
        handle.id,
        handle.owner,
        handle.address,
        handle.host,
        handle.path,
        handle.dtype,
        list(handle.shape),
        handle.crc32,
        handle.data,
    )
    return msgspec.msgpack.Ext(_HANDLE, _ENCODER.encode(packed))


def _unpack(code: int, data: memoryview) -> Handle:
    if code != _HANDLE:
        raise WireError(f"there is no extension {code}")
    try:
        p = _HANDLES.decode(data)
        return Handle(
            *(p.id, p.owner, p.address, p.host, p.path, p.dtype, tuple(p.shape), p.crc32, p.data)
        )
    except (msgspec.MsgspecError, AtollError) as error:
        raise WireError(f"a handle cannot be read: {error}") from error


def encode_frame(message: msgspec.Struct, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return the frame of a message whose values are packed; one too long is refused."""
    try:
        body = _ENCODER.encode(message)
    except (msgspec.MsgspecError, OverflowError, TypeError, UnicodeError) as error:
        raise WireError(f"a message cannot be written: {error}") from error
    if len(body) > max_bytes:
        raise WireError(
            f"a message of {len(body)} bytes is longer than {max_bytes}",
            hint="put what is long into a store and send its handle",
        )
    head = _HEAD.pack(_MAGIC, VERSION, 0, len(body), zlib.crc32(body))
    return b"".join((head, _CHECK.pack(zlib.crc32(head)), body))


class FrameDecoder:
    """Cuts a stream of bytes into the bodies of frames; damaged or too long ones are refused at once."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()
        self._body: tuple[int, int] | None = None
        """Length and checksum of the body that comes next, once its header is read."""

    @property
    def is_between(self) -> bool:
        """Whether no frame has come in part."""
        return not self._buffer and self._body is None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take what came and yield every body that is whole; `WireError` ends it for good."""
        self._buffer += data
        while (body := self._next()) is not None:
            yield body

    def _next(self) -> bytes | None:
        buffer = self._buffer
        if self._body is None:
            if len(buffer) < HEADER_BYTES:
                return None
            self._body = self._read_header(bytes(buffer[:HEADER_BYTES]))
            del buffer[:HEADER_BYTES]
        length, checksum = self._body
        if len(buffer) < length:
            return None
        body = bytes(memoryview(buffer)[:length])
        del buffer[:length]
        self._body = None
        if zlib.crc32(body) != checksum:
            raise WireError("a frame is damaged")
        return body

    def _read_header(self, header: bytes) -> tuple[int, int]:
        magic, version, zero, length, checksum = _HEAD.unpack_from(header)
        if magic != _MAGIC:
            raise WireError("not the protocol of executors")
        (own,) = _CHECK.unpack_from(header, _HEAD.size)
        if own != zlib.crc32(header[: _HEAD.size]):
            raise WireError("the header of a frame is damaged")
        if version != VERSION or zero:
            raise WireError(f"version {version} of the protocol is not {VERSION}")
        if length > self.max_bytes:
            raise WireError(f"a frame of {length} bytes is longer than {self.max_bytes}")
        return length, checksum


_HELLO = msgspec.msgpack.Decoder(CallerHello, ext_hook=_unpack)
_WELCOME = msgspec.msgpack.Decoder(ExecutorWelcome, ext_hook=_unpack)
_TO: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToExecutor, ext_hook=_unpack)
_FROM: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromExecutor, ext_hook=_unpack)


def decode_hello(body: bytes) -> CallerHello:
    """Return the first message of a caller."""
    look_through(body)
    return _decode(_HELLO, body)


def decode_welcome(body: bytes) -> ExecutorWelcome:
    """Return the first message of an executor."""
    look_through(body)
    return _decode(_WELCOME, body)


def decode_call(body: bytes) -> tuple[ToExecutor, int]:
    """Return a later message of a caller, and about how many bytes of memory it takes."""
    items = look_through(body)
    return cast("ToExecutor", _decode(_TO, body)), len(body) + items * _ITEM_MEMORY


def decode_answer(body: bytes) -> FromExecutor:
    """Return a later message of an executor."""
    look_through(body)
    return cast("FromExecutor", _decode(_FROM, body))


def _decode(decoder: msgspec.msgpack.Decoder[_Message], body: bytes) -> _Message:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise WireError(f"a message cannot be read: {error}") from error


_SCALARS = {
    **dict.fromkeys((*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3), 0),
    0xCA: 4,
    0xCB: 8,
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
}
"""First byte of a number, a truth value or nothing: bytes that follow."""
_TEXTS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}


def look_through(body: bytes) -> int:
    """Return how many values a body holds, without making any of them.

    One that is not a single value of MessagePack within the limits is refused.
    """
    at, seen = 0, 0
    # What is still open: items to come, and whether the next of them is a key.
    left: list[int] = [1]
    keyed: list[bool] = [False]
    try:
        while left:
            if not left[-1]:
                left.pop()
                keyed.pop()
                continue
            is_key = keyed[-1] and left[-1] % 2 == 0
            left[-1] -= 1
            seen += 1
            at, items, is_map, is_text = _step(body, at)
            if is_key and not is_text:
                raise WireError("a dictionary has keys that are not texts")
            if items:
                if len(left) > MAX_DEPTH + 2:
                    raise WireError(f"a message is nested more than {MAX_DEPTH} deep")
                left.append(items)
                keyed.append(is_map)
                if items > len(body) - at or seen + items > MAX_ITEMS:
                    raise WireError("a message claims more items than it may have")
    except IndexError:
        raise WireError("a message ends too early") from None
    if at != len(body):
        raise WireError("a message is followed by something else" if at < len(body) else "cut off")
    return seen


def _step(body: bytes, at: int) -> tuple[int, int, bool, bool]:
    """Return where the value at `at` ends or its items begin, how many those are, and what it is."""
    kind = body[at]
    at += 1
    size = _SCALARS.get(kind)
    if size is not None:
        return at + size, 0, False, False
    if 0xA0 <= kind < 0xC0:
        return at + (kind & 0x1F), 0, False, True
    if kind < 0x90:
        return at, 2 * (kind & 0x0F), True, False
    if kind < 0xA0:
        return at, kind & 0x0F, False, False
    for table in (_TEXTS, _BYTES, _LISTS, _MAPS, _EXTENSIONS, _FIXED_EXTENSIONS):
        width = table.get(kind)
        if width is None:
            continue
        if table is _FIXED_EXTENSIONS:
            count = width
        else:
            count = int.from_bytes(body[at : at + width], "big")
            at += width
        if table is _EXTENSIONS or table is _FIXED_EXTENSIONS:
            if body[at] != _HANDLE:
                raise WireError("there is no such extension")
            return at + 1 + count, 0, False, False
        if table is _LISTS or table is _MAPS:
            return at, count * (2 if table is _MAPS else 1), table is _MAPS, False
        return at + count, 0, False, table is _TEXTS
    raise WireError("a message is not MessagePack")
