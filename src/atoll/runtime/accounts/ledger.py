"""From a finished request to rows: which tokens count, for whom, and what they cost.

Tokens are counted once: the attempts of a request share its completion tokens out among them, and its
prompt belongs to one of them, however often it was sent. Money is whole nano-dollars (1e-9 US dollars): at
0.15 dollars a million, a token costs 150 of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.runtime.accounts.journal import FinishedRequest
from atoll.runtime.accounts.key_limits import NOTHING, Counted, day_of, periods_of
from atoll.telemetry.usage_record import Attempt, UsageRecord

Row = dict[str, object]
_LARGEST = 2**63 - 1
_NAME = 512


class TokenPrice(NamedTuple):
    """US dollars for a million tokens."""

    usd_per_mtoken_in: float
    usd_per_mtoken_out: float


NO_PRICES: Mapping[str, TokenPrice] = {}


@dataclass(slots=True)
class LedgerRows:
    """Rows for the database of some finished requests."""

    operations: list[Row] = field(default_factory=list)
    attempts: list[Row] = field(default_factory=list)
    counters: dict[tuple[str, str], Counted] = field(default_factory=dict)
    """Usage by key and period."""


def rows_of(
    finished: Iterable[FinishedRequest], prices: Mapping[str, TokenPrice] = NO_PRICES
) -> LedgerRows:
    """Return the rows for finished requests; a request given twice counts once."""
    rows = LedgerRows()
    counted_ops: set[str] = set()
    for done in finished:
        if done.op in counted_ops:
            continue
        counted_ops.add(done.op)
        day = day_of(done.finished_s)
        if done.key_id is not None:
            used = Counted(done.tokens, done.audio_ms + done.speech_ms, done.pixels)
            for period in periods_of(day):
                at = (done.key_id, period)
                rows.counters[at] = rows.counters.get(at, NOTHING) + used
        if done.record is not None:
            parts = shares(done.record, prices)
            rows.attempts += [_attempt_row(done.op, n, part) for n, part in enumerate(parts)]
            if parts:
                # Nothing that is no text moves: all of it is from the backend that came last.
                rows.attempts[-1].update(_media(done))
            cost = sum(part.cost_nusd for part in parts)
            rows.operations.append(_operation_row(done, done.record, day, cost))
    return rows


class AttemptShare(NamedTuple):
    """Part of a request's usage that belongs to one of its attempts."""

    attempt: Attempt
    prompt_tokens: int
    completion_tokens: int
    cost_nusd: int


def shares(record: UsageRecord, prices: Mapping[str, TokenPrice] = NO_PRICES) -> list[AttemptShare]:
    """Share the tokens of a request out among its attempts; they add up to exactly its own.

    What each attempt says it delivered is believed as far as the total goes; what is left over (the
    engine's count is the finer one) belongs to the attempt that came last. The prompt belongs to the
    first attempt that delivered anything, else to the last.
    """
    # Without details the last backend stands for all of them.
    attempts = record.attempts or tuple(
        Attempt(name, outcome=record.outcome) for name in record.backends[-1:]
    )
    used = record.prompt_tokens or record.completion_tokens or _has_media(record)
    # Whatever was used belongs to some attempt, so that the sums agree.
    if not attempts and used:
        attempts = (Attempt("", outcome=record.outcome),)
    left = record.completion_tokens
    tokens = []
    for attempt in attempts:
        tokens.append(min(max(attempt.tokens, 0), left))
        left -= tokens[-1]
    if tokens:
        tokens[-1] += left
    # The prompt counts once, however often it was sent.
    first = next((i for i, count in enumerate(tokens) if count), len(tokens) - 1)
    fallback = prices.get(record.model)
    attempt_shares = []
    for i, (attempt, count) in enumerate(zip(attempts, tokens, strict=True)):
        prompt = record.prompt_tokens if i == first else 0
        cost = cost_nusd(attempt, prompt, count, fallback)
        attempt_shares.append(AttemptShare(attempt, prompt, count, cost))
    return attempt_shares


def _has_media(record: UsageRecord) -> bool:
    return bool(record.audio_seconds or record.speech_seconds or record.image_pixels)


def cost_nusd(
    attempt: Attempt, prompt_tokens: int, completion_tokens: int, fallback: TokenPrice | None
) -> int:
    """Return what tokens cost at the price the node announced, or at a fallback price.

    Exact for prices with up to six digits after the point, then rounded to whole nano-dollars.
    """
    price_in, price_out = attempt.usd_per_mtoken_in, attempt.usd_per_mtoken_out
    if fallback is not None:
        price_in = fallback.usd_per_mtoken_in if price_in is None else price_in
        price_out = fallback.usd_per_mtoken_out if price_out is None else price_out
    pico = prompt_tokens * _pico(price_in) + completion_tokens * _pico(price_out)
    return min((pico + 500) // 1000, _LARGEST)


def _pico(usd_per_mtoken: float | None) -> int:
    """Return the price of a token in 1e-12 US dollars; what is no price is 0."""
    if usd_per_mtoken is None or not 0.0 <= usd_per_mtoken < math.inf:
        return 0
    return round(usd_per_mtoken * 1e6)


def _operation_row(done: FinishedRequest, record: UsageRecord, day: str, cost: int) -> Row:
    return {
        "id": done.op,
        "request_id": _text(record.request_id),
        "key_id": done.key_id,
        "model": _text(record.model),
        "endpoint": _text(record.endpoint),
        "stream": record.stream,
        "status": record.status,
        "outcome": record.outcome[:16],
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "estimated": record.estimated,
        "cost_nusd": min(cost, _LARGEST),
        "started_s": record.started_s,
        "seconds": record.seconds,
        "first_token_s": record.first_token_s,
        "day": day,
        **_media(done),
        "bytes_in": done.bytes_in,
        "bytes_out": done.bytes_out,
    }


def _media(done: FinishedRequest) -> Row:
    return {
        "audio_ms": done.audio_ms,
        "speech_ms": done.speech_ms,
        "image_pixels": done.pixels,
    }


def _attempt_row(op: str, number: int, share: AttemptShare) -> Row:
    attempt = share.attempt
    return {
        "operation_id": op,
        "number": number,
        "backend": _text(attempt.backend),
        "node": None if attempt.node is None else _text(attempt.node),
        "provider": None if attempt.provider is None else _text(attempt.provider),
        "prompt_tokens": share.prompt_tokens,
        "completion_tokens": share.completion_tokens,
        "seconds": attempt.seconds,
        "outcome": attempt.outcome[:16],
        "cost_nusd": share.cost_nusd,
        "audio_ms": 0,
        "speech_ms": 0,
        "image_pixels": 0,
    }


def _text(value: str) -> str:
    # PostgreSQL knows no NUL in text.
    return value[:_NAME].replace("\0", "")
