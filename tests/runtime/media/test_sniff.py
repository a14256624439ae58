"""The kind of a file by its first bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.media.sniff import sniff


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n", "png"),
        (b"\x89PNG\n", None),
        (b"\xff\xd8\xff\xe0", "jpeg"),
        (b"GIF87a", "gif"),
        (b"GIF88a", None),
        (b"BM", "bmp"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "webp"),
        (b"RIFF\x10\0\0\0WAVEfmt ", "wav"),
        (b"RIFF\x10\0\0\0AVI LIST", "avi"),
        (b"RIFF\x10\0\0\0ACON", None),
        (b"fLaC\0", "flac"),
        (b"OggS\0", "ogg"),
        (b"ID3\x04", "mp3"),
        (b"\xff\xfb\x90\x64", "mp3"),
        (b"\xff\xf3\x40\xc4", "mp3"),
        (b"\xff\xf1\x50\x80", "aac"),
        (b"\xff\xff\xff\xff", None),
        (b"\xff\xfb\xf0\x00", None),
        (b"\xff\xeb\x90\x64", None),
        (b"\0\0\0\x18ftypmp42", "mp4"),
        (b"\0\0\0\x18ftypisom", "mp4"),
        (b"\0\0\0\x18ftypM4A ", "m4a"),
        (b"\0\0\0\x18ftypheic", "heic"),
        (b"\0\0\0\x08moov", "mp4"),
        (b"\x1aE\xdf\xa3", "webm"),
        (b"%PDF-1.7", "pdf"),
        (b"<svg>", None),
        (b"PK\x03\x04", None),
        (b"", None),
    ],
)
def test_kinds(start: bytes, kind: str | None) -> None:
    assert sniff(start) == kind
    assert sniff(start + b"\0" * 100) == kind


@given(st.binary(max_size=16))
def test_nothing_is_too_strange(data: bytes) -> None:
    kind = sniff(data)
    assert kind is None or (kind.isalnum() and len(data) >= 2)
