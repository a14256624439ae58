"""Sound: every form of WAV, headers that lie, and what is written."""

from __future__ import annotations

import struct
import sys
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.runtime.media.media_errors import MediaError
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.media.sounds import (
    decode_sound,
    encode_wav,
    pcm16,
    wav_stream_header,
)
from tests.runtime.media.samples import wav

LIMITS = MediaLimits()
TONE = (0.5 * np.sin(np.arange(400) / 7.0)).astype(np.float32)


def packed(samples: NDArray[np.float32], form: int, bits: int) -> bytes:
    if form == 3:
        return samples.astype(np.float32 if bits == 32 else np.float64).tobytes()
    if bits == 8:
        return np.rint(samples * 127 + 128).astype(np.uint8).tobytes()
    whole = np.rint(samples.astype(np.float64) * (2 ** (bits - 1) - 1)).astype(np.int32)
    return b"".join(int(value).to_bytes(bits // 8, "little", signed=True) for value in whole)


def refused(data: bytes, limits: MediaLimits = LIMITS) -> MediaError:
    with pytest.raises(MediaError) as caught:
        decode_sound(data, limits)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize(("form", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
def test_every_form_gives_its_samples(
    form: int, bits: int, channels: int, extensible: bool
) -> None:
    # Channels differ, and their mean is the tone.
    apart = np.linspace(-0.2, 0.2, channels) if channels > 1 else np.zeros(1)
    many = (TONE[:, None] + apart).astype(np.float32)
    data = wav(
        packed(many.reshape(-1), form, bits),
        form=form,
        bits=bits,
        channels=channels,
        rate_hz=22_050,
        extensible=extensible,
    )
    samples, rate_hz = decode_sound(data, LIMITS)
    assert rate_hz == 22_050
    assert samples.dtype == np.float32
    assert samples.shape == TONE.shape
    assert abs(samples - TONE).max() < (0.01 if bits == 8 else 1e-4)


def test_the_telephone_laws() -> None:
    # Values of G.711: silence, the loudest of both signs, and one in the middle.
    mu, _ = decode_sound(wav(b"\xff\x80\x00\xaf", form=7, bits=8), LIMITS)
    assert np.allclose(mu * 32768, [0, 32124, -32124, 4092], atol=1)
    a, _ = decode_sound(wav(b"\xd5\xaa\x2a\x85", form=6, bits=8), LIMITS)
    assert np.allclose(a * 32768, [8, 32256, -32256, 4224], atol=1)


def test_a_header_that_claims_hours_is_refused_without_reading_on() -> None:
    ten_hours = 10 * 3600 * 2 * 16_000
    error = refused(wav(b"\0" * 100, claimed=ten_hours))
    assert error.code == "media_too_large"
    assert "36000.0 s" in error.message
    real = wav(b"\0" * (2 * 16_000 + 2))
    assert refused(real, MediaLimits(audio_s=1.0)).code == "media_too_large"
    assert len(decode_sound(real, MediaLimits(audio_s=1.001))[0]) == 16_001


@pytest.mark.parametrize("claimed", [2**32 - 1, 2**31 - 1, 1000])
def test_a_sound_ends_where_its_file_ends(claimed: int) -> None:
    data = wav(pcm16(TONE), claimed=claimed)
    assert len(decode_sound(data, LIMITS)[0]) == 400
    # The length is then known from the bytes, and checked all the same.
    assert refused(data, MediaLimits(audio_s=0.01)).code == "media_too_large"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "invalid_media"),
        (wav(b""), "invalid_media"),
        (wav(b"\0"), "invalid_media"),
        (wav(b"\0\0")[:40], "invalid_media"),
        (wav(b"\0\0", rate_hz=7999), "unsupported_media"),
        (wav(b"\0\0", rate_hz=192_001), "unsupported_media"),
        (wav(b"\0\0", rate_hz=0), "unsupported_media"),
        (wav(b"\0\0", form=2), "unsupported_media"),
        (wav(b"\0\0", bits=12), "unsupported_media"),
        (wav(b"\0\0", form=2, extensible=True), "unsupported_media"),
        (wav(b"\0\0", channels=0), "invalid_media"),
        (wav(b"\0" * 200, channels=33), "invalid_media"),
        (wav(b"\0\0\x80\x7f" * 4, form=3, bits=32), "invalid_media"),
        (wav(struct.pack("<d", 1e300) + b"\0" * 8, form=3, bits=64), "invalid_media"),
        (b"RIFF\0\0\0\0WAVEdata\x02\0\0\0\0\0", "invalid_media"),
        (b"RIFF\0\0\0\0WAVE" + b"junk\0\0\0\0" * 1001, "invalid_media"),
        (b"garbage", "invalid_media"),
        (b"\x89PNG\r\n\x1a\n", "unsupported_media"),
        (b"\0\0\0\x18ftypheic", "unsupported_media"),
    ],
)
def test_what_is_no_sound(data: bytes, code: str) -> None:
    assert refused(data).code == code


def test_too_many_bytes_are_not_looked_at() -> None:
    assert refused(wav(b"\0" * 100), MediaLimits(audio_bytes=100)).code == "media_too_large"


@given(
    changes=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 255)), max_size=8),
    length=st.integers(0, 200),
)
def test_damaged_files_give_a_sound_or_one_error(
    changes: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(wav(pcm16(TONE), extensible=length % 3 == 0))
    for at, value in changes:
        data[at] = value
    if length % 2:
        del data[length:]
    try:
        samples, rate_hz = decode_sound(bytes(data), LIMITS)
    except MediaError:
        return
    assert 0 < len(samples) <= len(data)
    assert 8_000 <= rate_hz <= 192_000
    assert np.isfinite(samples).all()
    assert abs(samples).max() <= 1


@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=50))
def test_what_is_written_is_read_again(values: list[float]) -> None:
    samples = np.array(values, np.float32)
    again, rate_hz = decode_sound(encode_wav(samples, 24_000), LIMITS)
    assert rate_hz == 24_000
    assert abs(again - samples.clip(-1, 1)).max() < 1e-4
    stream = wav_stream_header(24_000) + pcm16(samples[:20]) + pcm16(samples[20:])
    assert np.array_equal(decode_sound(stream, LIMITS)[0], again)


def test_samples_that_are_not_numbers_are_silence() -> None:
    assert pcm16(np.array([np.nan, np.inf, -np.inf], np.float32)) == b"\0\0\xff\x7f\x01\x80"


def test_without_the_library_packed_sound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    for data in (b"fLaC" + b"\0" * 40, b"OggS" + b"\0" * 40, b"ID3\4\0\0\0\0\0\0"):
        error = refused(data)
        assert error.code == "unsupported_media"
        assert "'sound'" in error.message


def test_packed_sound() -> None:
    library = pytest.importorskip("soundfile", reason="needs the extra 'sound'")

    def pack(samples: NDArray[np.float32]) -> bytes:
        stream = BytesIO()
        library.write(stream, samples, 16_000, "PCM_16", format="FLAC")
        return stream.getvalue()

    data = pack(TONE)
    samples, rate_hz = decode_sound(data, LIMITS)
    assert rate_hz == 16_000
    assert abs(samples - TONE).max() < 1e-3
    long = pack(np.zeros(16_000 * 30, np.float32))
    assert len(long) < 10_000, "silence packs well"
    assert refused(long, MediaLimits(audio_s=29)).code == "media_too_large"
    unknown = bytearray(long)  # how many samples there are: 36 bits
    unknown[21] &= 0xF0
    unknown[22:26] = b"\0\0\0\0"
    assert "how long" in refused(bytes(unknown)).message
    unknown[22:26] = b"\xff\xff\xff\xff"
    assert refused(bytes(unknown)).code == "media_too_large"
    for damaged in (data[:4], data[:20], data[:42] + b"\xff" * 60):
        assert "0x" not in refused(damaged).message
