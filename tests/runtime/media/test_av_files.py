"""MP4, WebM, M4A and AAC read and MP3 and Opus written, within bounds; and refused without the extra."""

from __future__ import annotations

import sys
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from atoll.runtime.media.av_files import WRITERS, SoundWriter, _heard, need_av
from atoll.runtime.media.media_errors import MediaError
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.media.sounds import decode_sound
from atoll.runtime.media.video import decode_video
from tests.runtime.media.samples import colours

LIMITS = MediaLimits()
RATE_HZ = 24_000
TONE = (0.5 * np.sin(np.arange(RATE_HZ) * 0.1)).astype(np.float32)
UNTURNED = (0x10000, 0, 0, 0, 0x10000)
"""A 3 x 3 matrix of an MP4, but for its end: as the camera wrote it."""
TURNED = (0, 0x10000, 0, -0x10000, 0)
"""A quarter to the right."""


def library() -> Any:
    return pytest.importorskip("av", reason="needs the extra 'media'")


@cache
def made(kind: str, picture: str | None, sound: str | None, frames: int = 20) -> bytes:
    """A file of one second of a tone, and of frames that grow lighter."""
    av = library()
    data = BytesIO()
    with av.open(data, "w", format=kind) as file:
        streams = [file.add_stream(picture, rate=10)] if picture else []
        if sound:
            streams.append(file.add_stream(sound, rate=48_000))
            streams[-1].layout = "stereo"
        if picture:
            streams[0].width, streams[0].height, streams[0].pix_fmt = 64, 48, "yuv420p"
            for number in range(frames):
                shown = np.full((48, 64, 3), 10 * number, np.uint8)
                frame = av.VideoFrame.from_ndarray(shown, format="rgb24")
                file.mux(streams[0].encode(frame))
        if sound:
            both = np.stack([np.repeat(TONE, 2)] * 2)
            frame = av.AudioFrame.from_ndarray(both, format="fltp", layout="stereo")
            frame.sample_rate = 48_000
            file.mux(streams[-1].encode(frame))
        for stream in streams:
            file.mux(stream.encode(None))
    return data.getvalue()


KINDS = (("mp4", "libx264", "aac"), ("webm", "libvpx", "libopus"))


@pytest.mark.parametrize(
    ("kind", "picture", "sound"), [*KINDS, ("ipod", None, "aac"), ("adts", None, "aac")]
)
def test_sound_is_read_as_loud_as_it_is(kind: str, picture: str | None, sound: str) -> None:
    samples, rate_hz = decode_sound(made(kind, picture, sound), LIMITS)
    assert rate_hz == 48_000
    assert len(samples) / rate_hz == pytest.approx(1.0, abs=0.05)
    assert samples.std() == pytest.approx(TONE.std(), abs=0.02)


@pytest.mark.parametrize(("kind", "picture", "sound"), KINDS)
def test_frames_are_evenly_spaced_from_the_first_on(kind: str, picture: str, sound: str) -> None:
    data = made(kind, picture, sound)
    shown = decode_video(data, MediaLimits(video_frames=5, video_side=32))
    assert {frame.shape for frame in shown} == {(24, 32, 3)}
    assert [frame.mean() for frame in shown] == pytest.approx([0, 40, 80, 120, 160], abs=6)


def test_a_video_is_upright_as_its_camera_says() -> None:
    av = library()
    data = BytesIO()
    with av.open(data, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        frame = av.VideoFrame.from_ndarray(colours(48, 32), format="rgb24")
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))

    def matrix(parts: tuple[int, ...]) -> bytes:
        return b"".join(part.to_bytes(4, "big", signed=True) for part in parts)

    at = data.getvalue().index(matrix(UNTURNED), data.getvalue().index(b"tkhd"))
    turned = bytearray(data.getvalue())
    turned[at : at + 20] = matrix(TURNED)
    (plain,), (right,) = decode_video(data.getvalue(), LIMITS), decode_video(bytes(turned), LIMITS)
    assert right.shape == (48, 32, 3)
    assert np.array_equal(right, np.rot90(plain, -1))


def test_too_much_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    library()
    data = made(*KINDS[0])
    monkeypatch.setattr("atoll.runtime.media.av_files._mono", None)
    monkeypatch.setattr("atoll.runtime.media.av_files._frames", None)
    for decode, limits, said in (
        (decode_sound, MediaLimits(audio_s=0.5), "s long"),
        (decode_video, MediaLimits(video_s=0.5), "s long"),
        (decode_video, MediaLimits(image_pixels=1000), "3072 pixels"),
        (decode_video, MediaLimits(video_bytes=1000), "bytes"),
    ):
        with pytest.raises(MediaError, match=said) as caught:
            decode(data, limits)
        assert caught.value.code == "media_too_large"


def test_of_a_long_video_key_frames_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    data = made("mp4", "libx264", None, 26)
    # The encoder makes a key frame of every twelfth.
    monkeypatch.setattr("atoll.runtime.media.av_files._MAX_PIXELS", 64 * 48 * 10)
    shown = decode_video(data, LIMITS)
    assert 1 <= len(shown) <= 10
    assert shown[0].mean() == pytest.approx(0, abs=6)
    monkeypatch.setattr("atoll.runtime.media.av_files._MAX_PIXELS", 1000)
    with pytest.raises(MediaError, match="key frames"):
        decode_video(data, LIMITS)


def test_what_is_not_there_or_not_read_is_said() -> None:
    with pytest.raises(MediaError, match="the mp4 has no sound"):
        decode_sound(made("mp4", "libx264", None), LIMITS)
    with pytest.raises(MediaError, match="the mp4 has no pictures"):
        decode_video(made("mp4", None, "aac"), LIMITS)
    with pytest.raises(MediaError, match="is ac3, which is not read") as caught:
        decode_sound(made("mp4", None, "ac3"), LIMITS)
    assert caught.value.code == "unsupported_media"


@pytest.mark.parametrize(("kind", "picture", "sound"), KINDS)
def test_damaged_files_end_in_errors_of_one_line(kind: str, picture: str, sound: str) -> None:
    data = made(kind, picture, sound)
    draw = np.random.default_rng(7)
    small = MediaLimits(video_frames=2, audio_s=20, video_s=20, image_pixels=10_000)
    for turn in range(60):
        bad = bytearray(data[: len(data) // 2] if turn % 10 == 0 else data)
        for at in draw.integers(0, len(bad) if turn % 2 else 600, 1 + turn % 8):
            bad[at] = draw.integers(256)
        for decode in (decode_sound, decode_video):
            said = ""
            try:
                decode(bytes(bad), small)
            except MediaError as error:
                said = error.message
            assert "\n" not in said
            assert "0x" not in said


def written(form: str, streamed: bool, samples: NDArray[np.float32], rate_hz: int) -> bytes:
    writer = SoundWriter(form, rate_hz, streamed=streamed)
    pieces = [writer.add(part) for part in np.array_split(samples, 3)]
    assert any(pieces) is streamed
    return b"".join([*pieces, writer.end()])


@pytest.mark.parametrize("rate_hz", [22_050, 24_000, 96_000])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("form", sorted(WRITERS))
def test_speech_is_written_piece_by_piece_or_whole(form: str, streamed: bool, rate_hz: int) -> None:
    av = library()
    data = written(form, streamed, np.tile(TONE, 4), rate_hz)
    seconds = 4 * len(TONE) / rate_hz
    with av.open(BytesIO(data)) as file:
        if not streamed:
            assert file.duration / 1e6 == pytest.approx(seconds, abs=0.1)
        stream = file.streams.audio[0]
        heard = np.concatenate([f.to_ndarray()[0] for f in _heard(av, file, stream)])
        if heard.dtype == np.int16:
            heard = heard / 2**15
        assert len(heard) / stream.rate == pytest.approx(seconds, abs=0.1)
        assert heard.std() == pytest.approx(TONE.std(), abs=0.03)


def test_without_the_library_it_is_refused_by_the_name_of_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    box = (24).to_bytes(4, "big") + b"ftyp"
    sounds = (box + b"M4A " + bytes(12), box + b"isom" + bytes(12), b"\x1aE\xdf\xa3", b"\xff\xf1PP")
    asked = [(decode_sound, data) for data in sounds] + [
        (decode_video, data) for data in sounds[1:3]
    ]
    for decode, data in asked:
        with pytest.raises(MediaError, match="needs the extra 'media' on the server") as caught:
            decode(data, LIMITS)
        assert caught.value.code == "unsupported_media"
    with pytest.raises(MediaError, match="writing mp3 needs the extra 'media'"):
        need_av("writing mp3")
