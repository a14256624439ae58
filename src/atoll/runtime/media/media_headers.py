"""The size of a picture out of its header, before any decoder sees it.

Decoders set aside memory for what a header claims, some as soon as a file is opened. So headers are read
here first, by code that only looks.
"""

from __future__ import annotations

from atoll.runtime.media.media_errors import MediaError, unsupported

_MAX_CHUNKS = 100_000
_MAX_SEGMENTS = 1000
_MAX_SCANS = 100
"""Every scan of a progressive JPEG passes over the whole picture; a stranger's may be twenty bytes long."""
_BMP_PLAIN = (0, 3, 6)
"""As numbers, with or without masks. Packed ones are unpacked step by step, which takes long."""
_PNG_STILL = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"eXIf"))
_PNG_MOVING = _PNG_STILL | {b"acTL", b"fcTL", b"fdAT"}
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE = frozenset((0x00, 0x01, *range(0xD0, 0xD9)))


def picture_size(data: bytes, kind: str) -> tuple[int, int]:
    """Return width and height in pixels as the header of a `kind` ("png", "jpeg", ...) claims them."""
    readers = {"png": _png, "jpeg": _jpeg, "gif": _gif, "bmp": _bmp, "webp": _webp}
    if kind not in readers:
        raise unsupported(f"pictures of the kind {kind} are not read; send png, jpeg, webp or gif")
    try:
        width, height = readers[kind](data)
    except IndexError:
        raise MediaError(f"the {kind} is cut off in its header") from None
    if width < 1 or height < 1:
        raise MediaError(f"the {kind} is {width} x {height} pixels: there is nothing in it")
    return width, height


def png_chunks(data: bytes, *, moving: bool = False) -> tuple[bytes, int]:
    """Return a PNG with nothing but its pixels, and how many frames it has.

    Texts, profiles and other annexes, which may unpack to anything, are left out; frames of an animation
    too, unless `moving`.
    """
    kept, frames, at = [data[:8]], 0, 8
    wanted = _PNG_MOVING if moving else _PNG_STILL
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(data):
            break
        length, name = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8]
        end = at + 12 + length
        frames += name == b"fcTL"
        if name in wanted:
            kept.append(data[at:end])
        if name == b"IEND":
            break
        at = end
    else:
        raise MediaError(f"the png has more than {_MAX_CHUNKS} chunks")
    return b"".join(kept), max(1, frames)


def gif_blocks(data: bytes) -> tuple[bytes, list[tuple[int, int]]]:
    """Return a GIF with nothing but its frames, and how far right and down each of them reaches.

    Comments and other annexes are left out. Ends quietly where the file does: what is cut off is the
    decoder's to complain about.
    """
    at = 13 + _colours(data[10])
    kept, frames, blocks = [data[:at]], [], 0
    while at < len(data) and data[at] in (0x21, 0x2C):
        start, is_frame = at, data[at] == 0x2C
        if is_frame:
            if at + 10 > len(data):
                break
            left, top, width, height = (_little(data, at + 1 + 2 * part, 2) for part in range(4))
            frames.append((left + width, top + height))
            at += 11 + _colours(data[at + 9])
        else:
            at += 2
        while at < len(data) and data[at]:
            at += data[at] + 1
            blocks += 1
            if blocks > 4 * _MAX_CHUNKS:
                raise MediaError("the gif is cut into too many blocks")
        at += 1
        blocks += 1
        if is_frame or data[start + 1 : start + 2] == b"\xf9":
            kept.append(data[start:at])
    return b"".join((*kept, b";")), frames


def _colours(flags: int) -> int:
    """Return the bytes of a colour table that flags of a GIF announce."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _little(data: bytes, at: int, size: int) -> int:
    if at + size > len(data):
        raise IndexError
    return int.from_bytes(data[at : at + size], "little")


def _big(data: bytes, at: int, size: int) -> int:
    if at + size > len(data):
        raise IndexError
    return int.from_bytes(data[at : at + size])


def _png(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise MediaError("the png does not begin with its header")
    return _big(data, 16, 4), _big(data, 20, 4)


def _jpeg(data: bytes) -> tuple[int, int]:
    if data.count(b"\xff\xda") > _MAX_SCANS:
        raise MediaError(f"the jpeg has more than {_MAX_SCANS} scans")
    size, at = None, 2
    # Decoders take time for every annex, and more for each than for the one before.
    for _ in range(_MAX_SEGMENTS):
        if data[at] != 0xFF:
            raise MediaError("the jpeg has something else between its segments")
        while data[at + 1] == 0xFF:
            at += 1
        marker = data[at + 1]
        if marker in (0xD9, 0xDA):
            break
        if marker in _JPEG_FRAMES:
            if size is not None:
                raise MediaError("the jpeg says its size twice")
            size = _big(data, at + 7, 2), _big(data, at + 5, 2)
        at += 2 if marker in _JPEG_BARE else 2 + max(2, _big(data, at + 2, 2))
    else:
        raise MediaError(f"the jpeg has more than {_MAX_SEGMENTS} segments before its pixels")
    if size is None:
        raise MediaError("the jpeg says no size before its pixels")
    return size


def _gif(data: bytes) -> tuple[int, int]:
    width, height = _little(data, 6, 2), _little(data, 8, 2)
    # A frame may reach beyond the screen that the header announces; decoders then grow the screen.
    _, reach = gif_blocks(data)
    return max(width, *(x for x, _ in reach), 0), max(height, *(y for _, y in reach), 0)


def _bmp(data: bytes) -> tuple[int, int]:
    if _little(data, 14, 4) == 12:
        return _little(data, 18, 2), _little(data, 20, 2)
    if _little(data, 30, 4) not in _BMP_PLAIN:
        raise unsupported("bmp is read only if its pixels are not packed; send png")
    width, height = _little(data, 18, 4), _little(data, 22, 4)
    return width, min(height, 2**32 - height)  # a negative height: the first line is the upper one


def _webp(data: bytes) -> tuple[int, int]:
    form = data[12:16]
    if form == b"VP8X":
        return _little(data, 24, 3) + 1, _little(data, 27, 3) + 1
    if form == b"VP8L":
        bits = _little(data, 21, 4)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if form == b"VP8 ":
        return _little(data, 26, 2) & 0x3FFF, _little(data, 28, 2) & 0x3FFF
    raise MediaError("the webp begins with no picture")
