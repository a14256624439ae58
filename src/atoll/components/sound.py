"""Sound as components hand it on: checked, mono, at the rate a model wants, cut where it is quiet.

A sound is `{"samples": float32 array [n], mono, in -1..1, "rate_hz": int}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import gcd
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.components.base import BadInputError

Samples: TypeAlias = NDArray[np.float32]
"""Sound pressure over time, one number per sample, full scale at -1 and 1."""
MIN_RATE_HZ = 8_000
MAX_RATE_HZ = 192_000
_LOUDEST = 8.0
"""Filters overshoot full scale a little; numbers far beyond it are integers that nobody scaled."""
_ZERO_CROSSINGS = 24
"""Of the sinc on each side: the sharpness of the resampling filter, and its cost."""
_KAISER_BETA = 9.0
_PASSED = 0.94
"""Part of the band that is kept; the filter falls off in the rest, so that little is folded back."""
_BLOCK = 8_192
"""Resampled at once: bounds the working memory, whatever the length."""
_MAX_KEPT = 1_000
"""Filter banks with more filters belong to rates that nobody uses twice; they are not kept."""
_QUIET_FRAME_S = 0.02
_QUIET_S = 0.2
"""Quiet is looked for in stretches of this length."""


def read_sound(value: object, *, max_s: float, param: str = "audio") -> tuple[Samples, int]:
    """Check a sound that came from outside; returns its samples and its rate in Hz.

    max_s: the longest sound that is taken, in seconds.
    """
    if not isinstance(value, Mapping) or "samples" not in value or "rate_hz" not in value:
        raise BadInputError('a sound is {"samples": array, "rate_hz": int}', param)
    rate_hz, samples = value["rate_hz"], value["samples"]
    if isinstance(rate_hz, bool) or not isinstance(rate_hz, int | np.integer):
        raise BadInputError(
            "the rate must be a whole number of samples a second", f"{param}.rate_hz"
        )
    if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
        raise BadInputError(
            f"the rate must be {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz, not {rate_hz}",
            f"{param}.rate_hz",
        )
    return _read_samples(samples, int(rate_hz), max_s, f"{param}.samples"), int(rate_hz)


def _read_samples(samples: Any, rate_hz: int, max_s: float, param: str) -> Samples:
    if not isinstance(samples, np.ndarray) or samples.dtype != np.float32:
        kind = samples.dtype if isinstance(samples, np.ndarray) else type(samples).__name__
        raise BadInputError(f"samples must be an array of float32, not {kind}", param)
    if samples.ndim != 1:
        raise BadInputError(f"samples must be mono, of shape [n], not {list(samples.shape)}", param)
    if not samples.size:
        raise BadInputError("the sound is empty", param)
    if samples.size > max_s * rate_hz:
        raise BadInputError(
            f"the sound lasts {samples.size / rate_hz:.1f} s; at most {max_s:g} s are taken", param
        )
    # One pass for both: a comparison with NaN is false.
    if not np.abs(samples).max() <= _LOUDEST:
        if np.isfinite(samples).all():
            raise BadInputError("samples must be fractions of full scale, in -1..1", param)
        raise BadInputError("samples must be finite", param)
    return samples


def resample(samples: Samples, from_hz: int, to_hz: int) -> Samples:
    """Return the sound at another rate: ceil(n * to_hz / from_hz) samples, beginning at the same instant.

    Each sample is the sum of those around it, weighted by a windowed sinc. Frequencies that the new rate
    cannot carry are filtered out; those below 4/5 of what both rates carry are kept within a thousandth.
    """
    if from_hz == to_hz:
        return np.ascontiguousarray(samples, dtype=np.float32)
    common = gcd(from_hz, to_hz)
    up, down = to_hz // common, from_hz // common
    filters = _filters(up, down) if up <= _MAX_KEPT else _make_filters(up, down)
    reach = filters.shape[1] // 2
    # Silence around the sound: the first and last samples have neighbours, too.
    padded = np.zeros(samples.size + 2 * reach, np.float32)
    padded[reach : reach + samples.size] = samples
    windows = np.lib.stride_tricks.sliding_window_view(padded, filters.shape[1])
    wanted = -(-samples.size * up // down)
    result = np.empty(wanted, np.float32)
    for start in range(0, wanted, _BLOCK):
        at = np.arange(start, min(start + _BLOCK, wanted), dtype=np.int64) * down
        # For each new sample: the old ones around it, and the filter for its place between two of them.
        np.einsum(
            "ij,ij->i",
            windows[at // up],
            filters[at % up],
            out=result[start : start + at.size],
        )
    return result


@lru_cache(maxsize=16)
def _filters(up: int, down: int) -> Samples:
    return _make_filters(up, down)


def _make_filters(up: int, down: int) -> Samples:
    """Return [up, taps]: the weights for each place that a new sample can have between two old ones."""
    band = _PASSED * min(1.0, up / down)
    reach = int(np.ceil(_ZERO_CROSSINGS / band))
    taps = np.arange(-reach, reach + 1)
    filters = np.empty((up, taps.size), np.float32)
    # In parts, to bound the working memory.
    for start in range(0, up, _BLOCK // 64):
        places = np.arange(start, min(start + _BLOCK // 64, up))[:, None] / up
        distance = taps - places
        inside = np.clip(1.0 - (distance / reach) ** 2, 0.0, None)
        weights = np.sinc(band * distance) * np.i0(_KAISER_BETA * np.sqrt(inside))
        weights[np.abs(distance) > reach] = 0.0
        # Each filter sums to 1, so that a constant stays what it is.
        filters[start : start + places.shape[0]] = weights / weights.sum(axis=1, keepdims=True)
    return filters


def cut_at_quiet(samples: Samples, rate_hz: int, max_s: float) -> list[Samples]:
    """Cut a long sound into pieces of at most `max_s` seconds, each cut in the quietest place near its end.

    The pieces, one after another, are the whole again. No piece but an only one is shorter than a second or a
    quarter of `max_s`, whichever is less.
    """
    if max_s * rate_hz < 4:
        raise BadInputError(f"pieces of {max_s} s are too short", "max_s")
    max_samples = int(max_s * rate_hz)
    min_samples = max(1, int(min(1.0, max_s / 4) * rate_hz))
    pieces: list[Samples] = []
    rest = samples
    while rest.size > max_samples:
        # Not in the first half, so that pieces do not get short; and what is left over is not too short,
        # either.
        earliest = max(min_samples, max_samples // 2)
        latest = max(earliest, min(max_samples, rest.size - min_samples))
        at = _quietest(rest, earliest, latest, rate_hz)
        pieces.append(rest[:at])
        rest = rest[at:]
    return [*pieces, rest]


def _quietest(samples: Samples, earliest: int, latest: int, rate_hz: int) -> int:
    """Return where in earliest..latest the sound around is quietest; the last such place."""
    frame = max(1, int(_QUIET_FRAME_S * rate_hz))
    around = max(1, round(_QUIET_S / _QUIET_FRAME_S))
    begin = max(0, earliest - frame * around // 2)
    heard = samples[begin : latest + frame * around // 2].astype(np.float64)
    frames = heard.size // frame
    if frames <= around:
        return latest
    energy = np.square(heard[: frames * frame]).reshape(frames, frame).sum(axis=1)
    # Sums over a moving stretch, from one running sum.
    sums = np.cumsum(np.concatenate(([0.0], energy)))
    stretches = sums[around:] - sums[:-around]
    last = stretches.size - 1 - int(np.argmin(stretches[::-1]))
    middle = begin + last * frame + frame * around // 2
    return int(min(max(middle, earliest), latest))
