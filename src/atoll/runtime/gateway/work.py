"""What requests cost: work in tokens, sound in seconds, and what each backend did of it."""

from __future__ import annotations

from atoll.runtime.pool.member import Member
from atoll.telemetry.usage import Attempt

_SPEECH_BYTES_S = 48_000
"""A second of speech in a stream of events: 16 bits, one channel, 24 kHz."""
_PROMPT_WORK = 1 / 64
"""What reading a token takes, against writing one."""


def work_of(prompt_tokens: float, completion_tokens: float) -> float:
    """Return what a request costs a backend, in tokens written."""
    return 1.0 + completion_tokens + _PROMPT_WORK * prompt_tokens


def spoken_seconds(base64_chars: int) -> float:
    """Return how long so much sound lasts, if it is 16-bit, mono, at 24 kHz."""
    return base64_chars * 3 / 4 / _SPEECH_BYTES_S


def share_of(member: Member, model: str, tokens: int, seconds: float, outcome: str) -> Attempt:
    """Return what a backend did for a request: tokens written, in so many seconds, and how it ended."""
    offer, facts = member.offer(model), member.facts
    return Attempt(
        member.name,
        offer.node or None,
        offer.provider or None,
        tokens,
        seconds,
        outcome,
        None if facts is None else facts.usd_per_mtoken_in,
        None if facts is None else facts.usd_per_mtoken_out,
    )
