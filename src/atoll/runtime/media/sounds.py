"""Sound from strangers, decoded within bounds; and sound written.

WAV is read here. FLAC, MP3 and Ogg are read where the extra "sound" is installed, by libsndfile; MP4, M4A,
WebM and AAC where "media" is, by FFmpeg (`av_files`), which also writes MP3 and Opus.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.runtime.media.av_files import READERS, decode_av_sound
from atoll.runtime.media.media_errors import MediaError, unsupported
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.media.pictures import check_bytes
from atoll.runtime.media.sniff import sniff
from atoll.runtime.media.wav import (
    check_rate,
    check_seconds,
    read_wav,
    wav_header,
    wav_stream_header,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "PCM_RATE_HZ",
    "SOUND_TYPES",
    "decode_sound",
    "encode_wav",
    "pcm16",
    "wav_stream_header",
]

PCM_RATE_HZ = 24_000
"""The rate of "pcm", which has no header to say it."""
SOUND_TYPES = {"wav": "audio/wav", "pcm": "audio/pcm", "mp3": "audio/mpeg", "opus": "audio/ogg"}
"""The formats that may be written, and what HTTP calls them; "mp3" and "opus" need the extra "media"."""
_PACKED_KINDS = ("flac", "mp3", "ogg")
_BLOCK_S = 10
_MAX_CHANNELS = 32
_UNKNOWN_FRAMES = 2**62


def decode_sound(data: bytes, limits: MediaLimits) -> tuple[NDArray[np.float32], int]:
    """Return samples, mono in -1..1, and their rate in Hz; MediaError for what is no sound or too long."""
    check_bytes(data, limits.audio_bytes, "sound")
    kind = sniff(data)
    if kind == "wav":
        return read_wav(data, limits)
    if kind in _PACKED_KINDS:
        return _decode_packed(data, kind, limits)
    if kind in READERS:
        return decode_av_sound(data, kind, limits)
    if kind is None:
        raise MediaError("no sound begins like this; send wav")
    raise unsupported(f"{kind} is not read as sound; send wav")


def pcm16(samples: NDArray[np.float32]) -> bytes:
    """Return samples of -1..1 as 16-bit integers, little end first; what is louder is clipped."""
    loudest = np.nan_to_num(samples, nan=0.0).clip(-1.0, 1.0)
    return np.rint(loudest * 32767.0).astype("<i2").tobytes()


def encode_wav(samples: NDArray[np.float32], rate_hz: int) -> bytes:
    """Return mono samples as a WAV file of 16 bits."""
    data = pcm16(samples)
    return wav_header(rate_hz, len(data)) + data


def _sound_library(what: str, param: str | None = None) -> Any:
    try:
        import soundfile
    except (ImportError, OSError):  # the second where there is no libsndfile
        raise MediaError(
            f"{what} needs the extra 'sound' on the server; use wav", param, "unsupported_media"
        ) from None
    return soundfile


def _decode_packed(data: bytes, kind: str, limits: MediaLimits) -> tuple[NDArray[np.float32], int]:
    library = _sound_library(f"reading {kind}")
    try:
        with library.SoundFile(io.BytesIO(data)) as file:
            rate_hz, channels = int(file.samplerate), int(file.channels)
            if file.format not in ("FLAC", "MP3", "OGG") or not 1 <= channels <= _MAX_CHANNELS:
                raise unsupported(f"this kind of {kind} is not read; send wav")
            check_rate(rate_hz)
            if file.frames >= _UNKNOWN_FRAMES:
                raise unsupported(f"the {kind} does not say how long it is; send wav")
            check_seconds(file.frames / rate_hz, limits)
            return _read_blocks(file, rate_hz, limits), rate_hz
    except MediaError:
        raise
    except Exception as error:  # at nonsense, a decoder may raise anything
        # The whole text of its own errors names an address in memory.
        said = str(getattr(error, "error_string", "") or "it is damaged")[:120]
        raise MediaError(f"the {kind} cannot be decoded: {said}") from error


def _read_blocks(file: Any, rate_hz: int, limits: MediaLimits) -> NDArray[np.float32]:
    """Read piece by piece: headers lie."""
    pieces: list[NDArray[np.float32]] = []
    frames = 0
    while len(block := file.read(_BLOCK_S * rate_hz, dtype="float32", always_2d=True)):
        frames += len(block)
        check_seconds(frames / rate_hz, limits)
        pieces.append(block.mean(axis=1, dtype=np.float32))
    check_seconds(frames / rate_hz, limits)
    mono = np.concatenate(pieces)
    if not np.isfinite(mono).all():
        raise MediaError("the sound has samples that are not numbers")
    return mono.clip(-1.0, 1.0)
