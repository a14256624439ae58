"""Usage of a request: written down once, when it ends, however it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Attempt(NamedTuple):
    """One backend's share of a request: what it delivered to the client, and at which price."""

    backend: str
    node: str | None = None
    """Name of the node in the fabric; None for a backend without one."""
    provider: str | None = None
    tokens: int = 0
    """Completion tokens of this backend that reached the client."""
    seconds: float = 0.0
    outcome: str = "ok"
    """`ok`, `failed` (another went on), `error`, `cancelled`."""
    usd_per_mtoken_in: float | None = None
    """Announced price of a million prompt tokens when the attempt began; None if there is none."""
    usd_per_mtoken_out: float | None = None


class UsageRecord(NamedTuple):
    """The tokens, sound and pictures of one request of a client, over all instances that worked on it.

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
    key_id: str | None = None
    """The API key that asked; None without keys."""
    attempts: tuple[Attempt, ...] = ()
    """Work of each backend, in the order of use; empty where nobody asks for it."""
    audio_seconds: float = 0.0
    """Of sound that was heard. What stands from here on is new: records without it are read as well."""
    speech_seconds: float = 0.0
    """Of speech that was made, and that the client has."""
    image_pixels: int = 0
    """Seen or drawn."""
    bytes_in: int = 0
    """Of the body that a service which is no model got; 0 for models. New, as above."""
    bytes_out: int = 0
    """And of what the client got from it."""


OnUsage = Callable[[UsageRecord], None]
