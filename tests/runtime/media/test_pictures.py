"""Pictures: the same pixels out of every kind, and bombs that do not go off."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("PIL", reason="needs the extra 'components'")

from PIL import Image

from atoll.runtime.media.media_errors import MediaError
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.media.pictures import decode_picture, encode_png
from atoll.runtime.media.sniff import sniff
from atoll.runtime.media.video import decode_video
from tests.runtime.media.samples import avi, chunk, colours, moving, picture, png

LIMITS = MediaLimits()
KINDS = ("png", "jpeg", "webp", "gif", "bmp")


def refused(data: bytes, limits: MediaLimits = LIMITS) -> MediaError:
    with pytest.raises(MediaError) as caught:
        decode_picture(data, limits)
    assert "\n" not in caught.value.message
    return caught.value


def said(work: Callable[[], object]) -> str:
    """What was wrong, if anything was; errors of other kinds are not ours."""
    try:
        work()
    except MediaError as error:
        return error.message
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_its_pixels(kind: str) -> None:
    data = picture(kind, quality=95) if kind == "jpeg" else picture(kind)
    assert sniff(data) == kind
    seen = decode_picture(data, LIMITS)
    assert seen.dtype == np.uint8
    assert seen.shape == (16, 24, 3)
    assert seen.flags.c_contiguous
    corners = (slice(2, 6), slice(2, 10)), (slice(10, 14), slice(14, 22))
    for corner in corners:
        gap = seen[corner].astype(int) - colours()[corner].astype(int)
        assert abs(gap).max() <= (12 if kind == "jpeg" else 0)


def test_what_is_written_is_read_again() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    assert np.array_equal(decode_picture(encode_png(noise), LIMITS), noise)


@pytest.mark.parametrize("held", range(1, 9))
def test_pictures_are_turned_as_the_camera_says(held: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = held
    data = picture("png", exif=exif)
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.array_equal(decode_picture(data, LIMITS), wanted)


def test_what_is_transparent_is_white() -> None:
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[0, 0] = (255, 0, 0, 255)
    pixels[0, 1] = (0, 0, 0, 127)
    seen = decode_picture(picture("png", pixels), LIMITS)
    assert seen[0, 0].tolist() == [255, 0, 0]
    assert seen[1, 1].tolist() == [255, 255, 255]
    assert abs(seen[0, 1].astype(int) - 128).max() <= 1


def test_sixteen_bits_of_grey_are_not_all_white() -> None:
    ramp = (np.arange(4, dtype=np.uint16) * 16384).reshape(1, 4)
    stream = io.BytesIO()
    Image.fromarray(ramp).save(stream, "png")
    assert decode_picture(stream.getvalue(), LIMITS)[0, :, 0].tolist() == [0, 64, 128, 192]


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_long_sides_are_shrunk(kind: str) -> None:
    limits = MediaLimits(image_side=64)
    seen = decode_picture(picture(kind, colours(400, 200)), limits)
    assert seen.shape == (32, 64, 3)
    assert abs(seen[4, 4].astype(int) - (250, 20, 20)).max() <= 12


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["RGBA", "I;16"])
def test_a_large_picture_takes_little_more_than_itself(mode: str) -> None:
    """It is converted a few rows at a time: three copies of all of it were made."""
    program = """
import io, resource, sys
from PIL import Image
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.media.pictures import decode_picture
stream = io.BytesIO()
Image.new(sys.argv[1], (5000, 3600)).save(stream, "png")
data = stream.getvalue()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
assert decode_picture(data, MediaLimits()).shape == (1475, 2048, 3)
print((peak() - before) / 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, mode],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    # The picture itself has 72 MB at most, and had 72 when it was written.
    assert float(done.stdout) < 90


def test_the_first_frame_of_a_moving_picture() -> None:
    for kind in ("gif", "webp", "png"):
        assert not decode_picture(moving(kind, 3), LIMITS).any()


def test_limits_are_checked_before_anything_is_decoded() -> None:
    assert refused(b"").code == "invalid_media"
    data = picture("png")
    assert refused(data, MediaLimits(image_bytes=len(data) - 1)).code == "media_too_large"
    for kind in KINDS:
        assert decode_picture(picture(kind), MediaLimits(image_pixels=24 * 16)).size
        error = refused(picture(kind), MediaLimits(image_pixels=24 * 16 - 1))
        assert error.code == "media_too_large"
        assert "24 x 16" in error.message


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"hello, I am a picture", "invalid_media"),
        (b"%PDF-1.7 ...", "unsupported_media"),
        (b"II*\0 tiff", "unsupported_media"),
        (b"\0\0\0\x18ftypavif", "unsupported_media"),
        (b"RIFF\0\0\0\0WAVEfmt ", "unsupported_media"),
        (b"GIF89a", "invalid_media"),
        (b"\xff\xd8\xff\xd9", "invalid_media"),
        (b"BM" + b"\0" * 60, "invalid_media"),
    ],
)
def test_what_is_no_picture(data: bytes, code: str) -> None:
    assert refused(data).code == code


def claims(kind: str) -> bytes:
    """A small file that claims 60000 x 60000 pixels (16383 x 16383, the most there is, for WebP)."""
    data = bytearray(picture(kind))
    if kind == "png":
        data[16:24] = struct.pack(">II", 60_000, 60_000)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    elif kind == "jpeg":
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = struct.pack(">HH", 60_000, 60_000)
    elif kind == "gif":
        at = data.index(b"\x2c\0\0\0\0")
        data[at + 5 : at + 9] = struct.pack("<HH", 60_000, 60_000)
    elif kind == "bmp":
        data[18:26] = struct.pack("<ii", 60_000, -60_000)
    else:
        data[21:25] = struct.pack("<I", 16382 | 16382 << 14)
    return bytes(data)


def peak_bytes(work: Callable[[], object]) -> int:
    """What Python, numpy and Pillow's buffers in Python took at most, in bytes."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_that_claims_to_be_huge_is_not_opened(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **options: object) -> None:
        raise AssertionError("the decoder was asked")

    monkeypatch.setattr(Image, "open", never)
    assert refused(claims(kind)).code == "media_too_large"


def test_bombs_in_the_annexes_of_a_png_are_not_unpacked() -> None:
    bomb = zlib.compress(b"\0" * 20_000_000, 1)
    pixels = zlib.compress(b"\0\x80" * 4)
    texts = (
        chunk(b"zTXt", b"a\0\0" + bomb),
        chunk(b"iTXt", b"a\0\1\0\0\0" + bomb),
        chunk(b"iCCP", b"a\0\0" + bomb),
    )
    data = png(1, 4, pixels, *texts)
    assert peak_bytes(lambda: decode_picture(data, LIMITS)) < 5_000_000
    assert decode_picture(data, LIMITS)[0, 0].tolist() == [128, 128, 128]


def test_pixels_that_unpack_to_more_than_the_header_says_stop_there() -> None:
    bomb = zlib.compress(b"\0" * 20_000_000, 1)
    data = png(1, 4, bomb)
    assert peak_bytes(lambda: decode_picture(data, LIMITS)) < 5_000_000
    assert decode_picture(data, LIMITS).shape == (4, 1, 3)


def test_crumbs_are_refused() -> None:
    crumbs = png(1, 1, zlib.compress(b"\0\0"), chunk(b"IDAT", b"") * 100_001)
    assert "chunks" in refused(crumbs).message
    scans = picture("jpeg") + b"\xff\xda" * 101
    assert "scans" in refused(scans).message
    gif = picture("gif")[:-1] + b"\x21\xfe" + b"\x01a" * 400_001
    assert "blocks" in refused(gif).message
    jpeg = picture("jpeg")
    annex, tables = b"\xff\xe1\0\x09Exif\0\0a", jpeg.index(b"\xff\xc4")
    assert decode_picture(jpeg[:2] + annex * 100 + jpeg[2:], LIMITS).size
    assert "segments" in refused(jpeg[:2] + annex * 1000 + jpeg[2:]).message
    assert "segments" in refused(jpeg[:tables] + annex * 1000 + jpeg[tables:]).message
    assert "between" in refused(jpeg[:tables] + b"junk" + jpeg[tables:]).message
    assert "twice" in refused(jpeg[:tables] + b"\xff\xc0\0\x0b" + b"\1" * 9 + jpeg[tables:]).message
    packed = bytearray(picture("bmp"))
    packed[30] = 1
    assert "packed" in refused(bytes(packed)).message


def test_comments_of_a_gif_do_not_reach_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    gif = moving("gif", 3)
    at = gif.index(b"\x21")
    long = gif[:at] + b"\x21\xfe" + (b"\xff" + b"a" * 255) * 1000 + b"\0" + gif[at:]
    opened: list[int] = []
    real = Image.open

    def watched(stream: io.BytesIO, formats: list[str]) -> Image.Image:
        opened.append(len(stream.getvalue()))
        return real(stream, formats=formats)

    monkeypatch.setattr(Image, "open", watched)
    assert not decode_picture(long, LIMITS).any()
    assert len(decode_video(long, LIMITS)) == 3
    assert opened
    assert max(opened) <= len(gif)


@given(
    kind=st.sampled_from([*KINDS, "moving gif", "moving webp", "moving png", "avi"]),
    changes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=8),
    length=st.integers(0, 2000),
)
def test_damaged_files_give_a_picture_or_one_error(
    kind: str, changes: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(SAMPLES[kind])
    for at, value in changes:
        data[at % len(data)] = value
    if length < len(data) and length % 2:
        del data[length:]
    for decode in (decode_picture, decode_video):
        message = said(lambda: decode(bytes(data), MediaLimits(image_pixels=100_000)))  # noqa: B023
        assert "\n" not in message
        assert "0x" not in message, "an address in memory"


SAMPLES = {kind: picture(kind) for kind in KINDS} | {
    "moving gif": moving("gif", 3),
    "moving webp": moving("webp", 3),
    "moving png": moving("png", 3),
    "avi": avi([picture("jpeg")] * 2),
}


def first_greys(data: bytes, limits: MediaLimits = LIMITS) -> list[int]:
    return [int(frame[0, 0, 0]) for frame in decode_video(data, limits)]


@pytest.mark.parametrize("kind", ["gif", "webp", "png"])
def test_frames_of_moving_pictures(kind: str) -> None:
    data = moving(kind, 10)
    assert first_greys(data) == [10 * number for number in range(10)]
    assert first_greys(data, MediaLimits(video_frames=5)) == [0, 20, 40, 60, 80]
    assert first_greys(data, MediaLimits(video_frames=1)) == [0]
    small = decode_video(data, MediaLimits(video_side=4))
    assert {frame.shape for frame in small} == {(4, 4, 3)}


def test_frames_of_an_avi() -> None:
    frames = [picture("jpeg", np.full((8, 8, 3), 20 * number, np.uint8)) for number in range(6)]
    assert first_greys(avi(frames), MediaLimits(video_frames=3)) == [0, 40, 80]
    with pytest.raises(MediaError, match="other than JPEGs"):
        decode_video(avi([b"\0\0\1\xb6 mpeg"]), LIMITS)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "invalid_media"),
        (avi([]), "invalid_media"),
        (b"GIF89a\x01\0\x01\0\0\0\0;", "invalid_media"),
        (b"\0\0\0\x18ftypmp42", "unsupported_media"),
        (b"\x1aE\xdf\xa3webm", "unsupported_media"),
        (b"nothing", "unsupported_media"),
        (claims("gif"), "media_too_large"),
    ],
)
def test_what_is_no_video(data: bytes, code: str) -> None:
    with pytest.raises(MediaError) as caught:
        decode_video(data, LIMITS)
    assert caught.value.code == code


def test_a_video_of_too_many_frames_or_pixels() -> None:
    frame = b"\x2c\0\0\0\0\x01\0\x01\0\0\x02\x02\x44\x01\0"
    head = b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff"
    with pytest.raises(MediaError, match="10001 frames"):
        decode_video(head + frame * 10_001 + b";", LIMITS)
    large = b"GIF89a\x88\x13\x88\x13" + head[10:]  # 5000 x 5000
    with pytest.raises(MediaError, match="275000000 pixels"):
        decode_video(large + frame * 11 + b";", LIMITS)
    with pytest.raises(MediaError, match="288000000 pixels"):
        decode_video(avi([picture("jpeg", np.zeros((6000, 6000), np.uint8))] * 8), LIMITS)
