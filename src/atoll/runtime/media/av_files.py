"""MP4, WebM, M4A and AAC from strangers, and MP3 and Opus written: by FFmpeg (PyAV), of the extra "media".

FFmpeg is large and is attacked often, so little of it is used: the reader of the kind that the first bytes
say, a few decoders, one thread, no other files and no network. What a file claims (streams, rate, length,
pixels) is checked before a decoder is called, and what comes of it again while it is decoded.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.runtime.media.media_errors import MediaError, too_large, unsupported
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.media.wav import check_rate, check_seconds

if TYPE_CHECKING:
    from numpy.typing import NDArray

READERS = {"mp4": "mov", "m4a": "mov", "webm": "matroska", "aac": "aac"}
"""FFmpeg's names of what is read, by kind of file."""
WRITERS = {"mp3": ("mp3", "libmp3lame"), "opus": ("ogg", "libopus")}
"""FFmpeg's file and encoder of what is written."""
_SOUND_CODECS = frozenset({"aac", "alac", "flac", "mp3", "mp3float", "opus", "libopus", "vorbis"})
_VIDEO_CODECS = frozenset({"av1", "h264", "hevc", "libdav1d", "mpeg4", "vp8", "vp9"})
_MAX_CHANNELS = 32
_MAX_STREAMS = 8
_MAX_PACKETS = 100_000
_MAX_PIXELS = 250_000_000
"""Of all frames that are decoded: some seconds of work."""
_PROBE_BYTES = 2**20
_MPEG_RATES = frozenset({8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000})
_OPUS_RATES = frozenset({8000, 12000, 16000, 24000, 48000})
_BIT_RATES = {"mp3": 96_000, "opus": 48_000}
"""Of speech in one channel, which neither makes worse to hear."""


def need_av(what: str, param: str | None = None) -> Any:
    """Return PyAV; MediaError where it is not installed."""
    try:
        import av
    except (ImportError, OSError):  # the second where its libraries do not fit the machine
        raise MediaError(
            f"{what} needs the extra 'media' on the server; use wav", param, "unsupported_media"
        ) from None
    return av


def decode_av_sound(data: bytes, kind: str, limits: MediaLimits) -> tuple[NDArray[np.float32], int]:
    """Return the first sound of a file, mono in -1..1, and its rate in Hz; or MediaError."""
    av = need_av(f"reading {kind}")
    try:
        with _open(av, data, kind, limits) as file:
            stream = _first(file.streams.audio, kind, "sound", _SOUND_CODECS)
            rate_hz = int(stream.rate or 0)
            check_rate(rate_hz)
            if not 1 <= stream.channels <= _MAX_CHANNELS:
                raise unsupported(f"the {kind} has {stream.channels} channels; send one or two")
            for claimed_s in _claimed_s(file, stream):
                check_seconds(claimed_s, limits)
            return _mono(av, file, stream, rate_hz, limits), rate_hz
    except MediaError:
        raise
    except Exception as error:  # at nonsense, a decoder may raise anything
        raise _broken(kind, error) from error


def decode_av_video(data: bytes, kind: str, limits: MediaLimits) -> list[NDArray[np.uint8]]:
    """Return up to `limits.video_frames` frames, evenly spaced, upright, the first among them; or MediaError.

    Of a video whose frames are too many to decode them all, they are key frames.
    """
    av = need_av(f"reading {kind} as video")
    try:
        with _open(av, data, kind, limits) as file:
            stream = _first(file.streams.video, kind, "pictures", _VIDEO_CODECS)
            size = stream.codec_context.width * stream.codec_context.height
            _check_pixels(size, kind, limits)
            for claimed_s in _claimed_s(file, stream):
                if claimed_s > limits.video_s:
                    raise too_large(
                        f"the {kind} is {claimed_s:.1f} s long; at most {limits.video_s:g} s are taken"
                    )
            frames, keys = _count(file, stream, kind)
        alone = frames * size > _MAX_PIXELS
        count = keys if alone else frames
        if count * size > _MAX_PIXELS:
            raise too_large(
                f"the key frames of the {kind} are {count * size} pixels; at most {_MAX_PIXELS} are taken"
            )
        # Packets were counted to the end: the second reader begins at the start again.
        with _open(av, data, kind, limits) as file:
            stream = file.streams.video[0]
            if alone:
                stream.codec_context.skip_frame = "NONKEY"
            taken = min(count, limits.video_frames)
            wanted = {position * count // taken for position in range(taken)}
            shown = [
                _pixels(frame, limits.video_side)
                for number, frame in enumerate(_frames(file, stream, kind, count, limits))
                if number in wanted
            ]
    except MediaError:
        raise
    except Exception as error:  # as above
        raise _broken(kind, error) from error
    if not shown:
        raise MediaError(f"the {kind} has no frames")
    return shown


class SoundWriter:
    """Writes mono samples as MP3 or as Opus in Ogg, piece by piece or as one file."""

    def __init__(self, form: str, rate_hz: int, *, streamed: bool) -> None:
        av = need_av(f"writing {form}")
        container, codec = WRITERS[form]
        self._av, self._rate_hz = av, rate_hz
        self._sink: Any = _Pipe() if streamed else io.BytesIO()
        # Who streams cannot go back to write how long it has become.
        options = {"id3v2_version": "0", **({"write_xing": "0"} if streamed else {})}
        self._file = av.open(
            self._sink, "w", format=container, options=options if form == "mp3" else {}
        )
        rates = _MPEG_RATES if form == "mp3" else _OPUS_RATES
        self._stream = self._file.add_stream(codec, rate=rate_hz if rate_hz in rates else 48_000)
        self._stream.layout = "mono"
        self._stream.bit_rate = _BIT_RATES[form]
        self._given = 0

    def add(self, samples: NDArray[np.float32]) -> bytes:
        """Take samples; returns what there is to send, nothing where the file is written as one."""
        loud = np.nan_to_num(samples, nan=0.0).clip(-1.0, 1.0).astype(np.float32)
        if len(loud):
            frame = self._av.AudioFrame.from_ndarray(loud[None, :], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = self._rate_hz, self._given
            self._given += len(loud)
            self._file.mux(self._stream.encode(frame))
        return self._taken()

    def end(self) -> bytes:
        """Return the rest, or the whole file."""
        self._file.mux(self._stream.encode(None))
        self._file.close()
        return self._taken() if isinstance(self._sink, _Pipe) else self._sink.getvalue()

    def _taken(self) -> bytes:
        return self._sink.take() if isinstance(self._sink, _Pipe) else b""


class _Pipe:
    """What is written, until somebody takes it; nobody can go back in it."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        """Take what comes."""
        self._pieces.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        """Return what has come since."""
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


def _open(av: Any, data: bytes, kind: str, limits: MediaLimits) -> Any:
    # Looking for what a file holds decodes a little of it: within the same limits.
    of_streams = {"max_pixels": str(limits.image_pixels), "threads": "1"}
    file = av.open(
        io.BytesIO(data),
        format=READERS[kind],
        container_options={
            "max_streams": str(_MAX_STREAMS),
            "probesize": str(_PROBE_BYTES),
            "protocol_whitelist": "",
        },
        stream_options=[of_streams] * _MAX_STREAMS,
    )
    for stream in file.streams:
        if stream.type in ("audio", "video"):
            stream.codec_context.thread_count = 1
            stream.codec_context.options = of_streams
    return file


def _first(streams: Any, kind: str, what: str, codecs: frozenset[str]) -> Any:
    if not streams:
        raise MediaError(f"the {kind} has no {what}")
    context = streams[0].codec_context
    if context is None or context.name not in codecs:
        named = "of an unknown kind" if context is None else context.name
        raise unsupported(f"the {what} in the {kind} is {named}, which is not read")
    return streams[0]


def _claimed_s(file: Any, stream: Any) -> Iterator[float]:
    """Yield how long a file and its stream say they are; some do not say it."""
    if file.duration:
        yield file.duration / 1e6
    if stream.duration and stream.time_base:
        yield float(stream.duration * stream.time_base)


def _mono(
    av: Any, file: Any, stream: Any, rate_hz: int, limits: MediaLimits
) -> NDArray[np.float32]:
    resampler = av.AudioResampler(format="fltp", rate=rate_hz)
    pieces: list[NDArray[np.float32]] = []
    count = 0
    for frame in _heard(av, file, stream):
        # A rate that changes on the way would be resampled to many times as much.
        if frame.sample_rate != rate_hz:
            raise MediaError(f"the sound changes from {rate_hz} to {frame.sample_rate} Hz")
        for part in resampler.resample(frame):
            # Its own way to one channel keeps the power, and clips what is loud in all of them.
            samples = part.to_ndarray().mean(axis=0, dtype=np.float32)
            count += len(samples)
            check_seconds(count / rate_hz, limits)
            pieces.append(samples)
    check_seconds(count / rate_hz, limits)
    mono = np.concatenate(pieces)
    if not np.isfinite(mono).all():
        raise MediaError("the sound has samples that are not numbers")
    return mono.clip(-1.0, 1.0)


def _heard(av: Any, file: Any, stream: Any) -> Iterator[Any]:
    decoder = stream.codec_context
    if decoder.name == "opus":
        # FFmpeg's own decoder of Opus gives some sounds half as loud again as they are.
        decoder = av.CodecContext.create("libopus", "r")
        decoder.extradata = stream.codec_context.extradata
        decoder.thread_count = 1
    for packet in file.demux(stream):
        yield from decoder.decode(packet if packet.size else None)


def _count(file: Any, stream: Any, kind: str) -> tuple[int, int]:
    """Return how many frames and key frames there are, without decoding any."""
    frames = keys = 0
    for number, packet in enumerate(file.demux()):
        if number >= _MAX_PACKETS:
            raise too_large(f"the {kind} has more than {_MAX_PACKETS} pieces")
        if packet.stream.index == stream.index and packet.size:
            frames += 1
            keys += bool(packet.is_keyframe)
    return frames, keys


def _frames(file: Any, stream: Any, kind: str, most: int, limits: MediaLimits) -> Iterator[Any]:
    for number, frame in enumerate(file.decode(stream)):
        if number >= most:
            return
        _check_pixels(frame.width * frame.height, kind, limits)
        yield frame


def _check_pixels(pixels: int, kind: str, limits: MediaLimits) -> None:
    if pixels < 1:
        raise MediaError(f"the pictures of the {kind} have no size")
    if pixels > limits.image_pixels:
        raise too_large(
            f"the pictures of the {kind} are {pixels} pixels; at most {limits.image_pixels} are taken"
        )


def _pixels(frame: Any, max_side: int) -> NDArray[np.uint8]:
    """Return a frame as [height, width, 3], upright, no side longer than `max_side`."""
    scale = min(1.0, max_side / max(frame.width, frame.height))
    width, height = (max(1, round(side * scale)) for side in (frame.width, frame.height))
    small = frame.reformat(width=width, height=height, format="rgb24", interpolation="AREA")
    # Degrees to the left, in quarters: how the camera was held.
    return np.ascontiguousarray(np.rot90(small.to_ndarray(), round(frame.rotation / 90) % 4))


def _broken(kind: str, error: Exception) -> MediaError:
    said = str(getattr(error, "strerror", "") or "it is damaged")[:120]
    return MediaError(f"the {kind} cannot be decoded: {said}")
