"""W3C trace context (https://www.w3.org/TR/trace-context): which request a span belongs to."""

from __future__ import annotations

import os
import re

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_POOLED = 64
_pool: list[str] = []


def new_trace() -> str:
    """Return the header of a new, unsampled trace."""
    if not _pool:
        # One draw for many.
        drawn = os.urandom(24 * _POOLED).hex()
        _pool.extend(
            f"00-{drawn[at : at + 32]}-{drawn[at + 32 : at + 48]}-00"
            for at in range(0, len(drawn), 48)
        )
    return _pool.pop()


def child_of(traceparent: str) -> str:
    """Return the header for a call made on behalf of a request that came with `traceparent`.

    The trace id and its flags stay, the span is new. Where the header is not valid a new trace begins.
    """
    new = new_trace()
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is not None and _valid(*match.groups()):
        return f"00-{match[2]}-{new[36:52]}-{match[4]}"
    return new


def _valid(version: str, trace: str, span: str, flags: str, more: str | None) -> bool:
    del flags
    if version == "ff" or (version == "00" and more is not None):
        return False
    return trace.strip("0") != "" and span.strip("0") != ""
