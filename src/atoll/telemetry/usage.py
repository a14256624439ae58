"""What a request used: written down once, when it ends, however it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class UsageRecord(NamedTuple):
    """The tokens of one request of a client, over all instances that worked on it.

    `estimated` says that the engine's own count never came (the client left, the stream broke) and that
    completion tokens are those delivered, as far as the gateway could see them.
    """

    request_id: str
    model: str
    endpoint: str
    stream: bool
    status: int
    prompt_tokens: int
    completion_tokens: int
    estimated: bool
    backends: tuple[str, ...]
    """In the order of use; more than one after a failover."""
    started_s: float
    """Unix time of the request."""
    seconds: float
    first_token_s: float | None
    """From the request to the first byte of the answer."""
    outcome: str
    """`ok`, `error` (answered with an error), `truncated` (a stream that could not go on), `cancelled`."""


OnUsage = Callable[[UsageRecord], None]
