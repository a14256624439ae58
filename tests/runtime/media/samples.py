"""Small files of every kind, made here."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def colours(width: int = 24, height: int = 16) -> NDArray[np.uint8]:
    """A picture whose four corners differ, in flat areas that survive JPEG."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = (250, 20, 20)
    pixels[: height // 2, width // 2 :] = (20, 250, 20)
    pixels[height // 2 :, : width // 2] = (20, 20, 250)
    pixels[height // 2 :, width // 2 :] = (240, 240, 30)
    return pixels


def picture(kind: str, pixels: NDArray[np.uint8] | None = None, **options: Any) -> bytes:
    stream = io.BytesIO()
    if kind == "webp":
        options.setdefault("lossless", True)
    Image.fromarray(colours() if pixels is None else pixels).save(stream, kind, **options)
    return stream.getvalue()


def moving(kind: str, count: int, size: int = 8) -> bytes:
    """Frames of rising grey."""
    frames = [
        Image.fromarray(np.full((size, size, 3), 10 * number, np.uint8)) for number in range(count)
    ]
    stream = io.BytesIO()
    lossless = {"lossless": True} if kind == "webp" else {}
    frames[0].save(
        stream, kind, save_all=True, append_images=frames[1:], duration=40, loop=0, **lossless
    )
    return stream.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, pixels: bytes, *between: bytes) -> bytes:
    """A PNG of 8-bit grey with other chunks before its pixels, which are packed already."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = (chunk(b"IHDR", header), *between, chunk(b"IDAT", pixels), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def wav(
    data: bytes,
    *,
    form: int = 1,
    channels: int = 1,
    rate_hz: int = 16_000,
    bits: int = 16,
    claimed: int | None = None,
    extensible: bool = False,
) -> bytes:
    """A WAV file whose header may claim another size than its data has."""
    frame = channels * bits // 8
    head = struct.pack("<HHIIHH", form, channels, rate_hz, rate_hz * frame, frame, bits)
    if extensible:
        tail = bytes.fromhex("000000001000800000aa00389b71")
        head = struct.pack("<H", 0xFFFE) + head[2:] + struct.pack("<HHI", 22, bits, 4)
        head += struct.pack("<H", form) + tail
    size = len(data) if claimed is None else claimed
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head
    body += b"LIST" + struct.pack("<I", 3) + b"abc\0"  # odd sizes are padded
    body += b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", min(2**32 - 1, len(body))) + body


def avi(frames: list[bytes]) -> bytes:
    """An AVI that holds nothing but its frames."""
    packed = b"".join(
        b"00dc" + struct.pack("<I", len(frame)) + frame + b"\0" * (len(frame) % 2)
        for frame in frames
    )
    lists = b"LIST" + struct.pack("<I", 8) + b"hdrlabcd"
    lists += b"LIST" + struct.pack("<I", len(packed) + 4) + b"movi" + packed
    return b"RIFF" + struct.pack("<I", len(lists) + 4) + b"AVI " + lists
