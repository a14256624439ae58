"""How fast and how long a sound may be."""

from __future__ import annotations

from atoll.runtime.media.errors import MediaError, too_large, unsupported
from atoll.runtime.media.limits import MediaLimits

LEAST_RATE_HZ = 8_000
MOST_RATE_HZ = 192_000


def check_rate(rate_hz: int) -> None:
    """Refuse sounds of less than 8 or more than 192 thousand samples a second."""
    if not LEAST_RATE_HZ <= rate_hz <= MOST_RATE_HZ:
        raise unsupported(
            f"sound of {rate_hz} Hz is not read; send {LEAST_RATE_HZ} to {MOST_RATE_HZ} Hz"
        )


def check_seconds(seconds: float, limits: MediaLimits) -> None:
    """Refuse sounds of no length, and longer ones than the limits allow."""
    if seconds <= 0:
        raise MediaError("the sound has no samples")
    if seconds > limits.audio_s:
        raise too_large(
            f"the sound is {seconds:.1f} s long; at most {limits.audio_s:g} s are taken"
        )
