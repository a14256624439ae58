"""The kind of a file by its first bytes. What a client calls it is never trusted."""

from __future__ import annotations

_STARTS: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"BM", "bmp"),
    (b"fLaC", "flac"),
    (b"OggS", "ogg"),
    (b"ID3", "mp3"),
    (b"\x1aE\xdf\xa3", "webm"),
    (b"II*\x00", "tiff"),
    (b"MM\x00*", "tiff"),
    (b"%PDF-", "pdf"),
)
_RIFF = {b"WAVE": "wav", b"AVI ": "avi", b"WEBP": "webp"}
_MPEG_BOXES = {b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"}
_SOUND_BRANDS = {b"M4A ", b"M4B "}
_PICTURE_BRANDS = {b"avif": "avif", b"avis": "avif", b"heic": "heic", b"heix": "heic"}


def sniff(data: bytes) -> str | None:
    """Return "png", "jpeg", "wav", "mp4" and so on by the magic bytes, or None for what nobody knows."""
    if data[:4] in (b"RIFF", b"RF64"):
        return _RIFF.get(data[8:12])
    for start, kind in _STARTS:
        if data.startswith(start):
            return kind
    if data[4:8] in _MPEG_BOXES:
        brand = data[8:12] if data[4:8] == b"ftyp" else b""
        return "m4a" if brand in _SOUND_BRANDS else _PICTURE_BRANDS.get(brand, "mp4")
    return _mpeg_audio(data)


def _mpeg_audio(data: bytes) -> str | None:
    """Tell MP3 and AAC by the header of a frame: eleven bits of synchronisation, then what it holds."""
    if len(data) < 4 or data[0] != 0xFF or data[1] & 0xE0 != 0xE0:
        return None
    version, layer = (data[1] >> 3) & 3, (data[1] >> 1) & 3
    if layer == 0:
        return "aac" if data[1] & 0xF6 == 0xF0 else None
    if version == 1 or data[2] >> 4 == 15 or (data[2] >> 2) & 3 == 3:
        return None
    return "mp3" if layer == 1 else None
