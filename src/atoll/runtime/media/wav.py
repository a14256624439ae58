"""WAV files: read within bounds, and written, whole or as a stream of unknown length."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from atoll.runtime.media.media_errors import MediaError, unsupported
from atoll.runtime.media.media_limits import MediaLimits

if TYPE_CHECKING:
    from numpy.typing import NDArray
from atoll.runtime.media.media_errors import too_large

_PCM = 1
_FLOAT = 3
_A_LAW = 6
_MU_LAW = 7
_EXTENSIBLE = 0xFFFE
"""Format tags of the WAVE format."""
_DEPTHS = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64), _A_LAW: (8,), _MU_LAW: (8,)}
_SUBFORMAT_TAIL = bytes.fromhex("000000001000800000aa00389b71")
# Bounds on what a header may claim, and on the chunks that are looked through.
_MAX_CHANNELS = 32
_MAX_CHUNKS = 1000
_UNKNOWN_BYTES = 0x7FFFF000
"""Who does not know how long a sound will be writes a size from here on; it ends where the file ends."""
_STREAM_BYTES = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class WavFormat:
    """Sample format of a WAV file. `form` is 1 for integers, 3 for floats, 6 and 7 for A-law and mu-law."""

    form: int
    channels: int
    rate_hz: int
    bits: int

    @property
    def frame_bytes(self) -> int:
        """Bytes of one sample of every channel."""
        return self.channels * self.bits // 8


def read_wav(data: bytes, limits: MediaLimits) -> tuple[NDArray[np.float32], int]:
    """Return samples, mono in -1..1, and their rate in Hz; MediaError for what is no sound or too long."""
    wav: WavFormat | None = None
    # After "RIFF", the size of the file and "WAVE".
    at = 12
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(data):
            break
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"fmt ":
            wav = _read_format(data[at + 8 : at + 8 + size])
        elif name == b"data":
            if wav is None:
                raise MediaError("the wav has samples before it says what they are")
            # The claimed length is checked even where the file has less, unless it means that nobody knew.
            if size < _UNKNOWN_BYTES:
                check_seconds(size / wav.frame_bytes / wav.rate_hz, limits)
            size = min(size, len(data) - at - 8)
            frames = size // wav.frame_bytes
            check_seconds(frames / wav.rate_hz, limits)
            return _mono(data, at + 8, frames, wav), wav.rate_hz
        # Chunks begin at even places.
        at += 8 + size + size % 2
    raise MediaError("the wav has no samples")


def wav_header(rate_hz: int, data_bytes: int) -> bytes:
    """Return what stands before so many bytes of 16-bit mono samples."""
    # The field has 32 bits; that of a stream stays at the largest number.
    riff = min(_STREAM_BYTES, data_bytes + 36)
    form = struct.pack("<IHHIIHH", 16, _PCM, 1, rate_hz, rate_hz * 2, 2, 16)
    return struct.pack("<4sI4s4s20s4sI", b"RIFF", riff, b"WAVE", b"fmt ", form, b"data", data_bytes)


def wav_stream_header(rate_hz: int) -> bytes:
    """Return what stands before 16-bit mono samples of which nobody knows yet how many there will be."""
    return wav_header(rate_hz, _STREAM_BYTES)


def _read_format(chunk: bytes) -> WavFormat:
    if len(chunk) < 16:
        raise MediaError("the wav is cut off in its header")
    form, channels, rate_hz, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", chunk)
    if form == _EXTENSIBLE:
        # The form is in the first two bytes of the subformat; the rest is the same for all forms.
        if len(chunk) < 40 or chunk[26:40] != _SUBFORMAT_TAIL:
            raise unsupported("the wav's kind of samples is not read; send 16-bit PCM")
        form = int.from_bytes(chunk[24:26], "little")
    if form not in _DEPTHS or bits not in _DEPTHS[form]:
        raise unsupported(
            f"wav samples of form {form} with {bits} bits are not read; send 16-bit PCM"
        )
    if not 1 <= channels <= _MAX_CHANNELS:
        raise MediaError(f"the wav has {channels} channels; 1 to {_MAX_CHANNELS} are taken")
    check_rate(rate_hz)
    wav = WavFormat(form, channels, rate_hz, bits)
    if frame_bytes != wav.frame_bytes:
        raise MediaError(
            f"the wav says {frame_bytes} bytes a frame; {channels} x {bits} bits are {wav.frame_bytes}"
        )
    return wav


def _mono(data: bytes, start: int, frames: int, wav: WavFormat) -> NDArray[np.float32]:
    count = frames * wav.channels
    samples = _samples(data, start, count, wav).reshape(frames, wav.channels)
    # Extreme floats may overflow in the mean; what is not finite is refused below.
    with np.errstate(over="ignore", invalid="ignore"):
        mono = samples[:, 0] if wav.channels == 1 else samples.mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        raise MediaError("the wav has samples that are not numbers")
    return np.ascontiguousarray(mono.clip(-1.0, 1.0))


def _samples(data: bytes, start: int, count: int, wav: WavFormat) -> NDArray[np.float32]:
    if wav.form == _FLOAT:
        with np.errstate(over="ignore"):
            floats = np.frombuffer(data, f"<f{wav.bits // 8}", count, start)
            return floats.astype(np.float32)
    if wav.form in (_A_LAW, _MU_LAW):
        table = _a_law() if wav.form == _A_LAW else _mu_law()
        return table[np.frombuffer(data, np.uint8, count, start)]
    if wav.bits == 8:
        # Integers of 8 bits are unsigned, unlike wider ones.
        return (np.frombuffer(data, np.uint8, count, start).astype(np.float32) - 128.0) / 128.0
    if wav.bits == 24:
        # The three bytes become the upper ones of four, so that the sign is where numpy looks for it.
        wide = np.zeros((count, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8, 3 * count, start).reshape(count, 3)
        return wide.view("<i4")[:, 0].astype(np.float32) / 2.0**31
    integers = np.frombuffer(data, f"<i{wav.bits // 8}", count, start)
    return integers.astype(np.float32) / 2.0 ** (wav.bits - 1)


def _mu_law() -> NDArray[np.float32]:
    """Return the 256 values of G.711's mu-law."""
    # The code is stored with all its bits inverted.
    code = ~np.arange(256, dtype=np.uint8)
    exponent, mantissa = ((code >> 4) & 7).astype(np.int32), (code & 15).astype(np.int32)
    size = (((mantissa << 3) + 0x84) << exponent) - 0x84
    return np.where(code & 0x80, -size, size).astype(np.float32) / 32768.0


def _a_law() -> NDArray[np.float32]:
    """Return the 256 values of G.711's A-law."""
    # The code is stored with every other bit inverted.
    code = np.arange(256, dtype=np.uint8) ^ 0x55
    exponent, mantissa = ((code >> 4) & 7).astype(np.int32), (code & 15).astype(np.int32)
    small = (mantissa << 4) + 8
    size = np.where(exponent == 0, small, (small + 0x100) << np.maximum(exponent - 1, 0))
    return np.where(code & 0x80, size, -size).astype(np.float32) / 32768.0


MIN_RATE_HZ = 8_000
MAX_RATE_HZ = 192_000


def check_rate(rate_hz: int) -> None:
    """Refuse sounds of less than 8 or more than 192 thousand samples a second."""
    if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
        raise unsupported(
            f"sound of {rate_hz} Hz is not read; send {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz"
        )


def check_seconds(seconds: float, limits: MediaLimits) -> None:
    """Refuse sounds of no length, and longer ones than the limits allow."""
    if seconds <= 0:
        raise MediaError("the sound has no samples")
    if seconds > limits.audio_s:
        raise too_large(
            f"the sound is {seconds:.1f} s long; at most {limits.audio_s:g} s are taken"
        )
