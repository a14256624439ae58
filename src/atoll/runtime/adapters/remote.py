"""Anything that speaks OpenAI's API already, wherever it runs: nothing to start."""

from __future__ import annotations

from atoll.runtime.adapters.base import Endpoint
from atoll.runtime.pool.member import Backend


def remote_endpoint(
    name: str, url: str, models: tuple[str, ...], *, api_key: str | None = None, weight: float = 1.0
) -> Endpoint:
    """Return an endpoint that is there already."""
    metadata = {"api_key": api_key} if api_key else {}
    backend = Backend(
        id=name, url=url, models=models, weight=weight, kind="openai", metadata=metadata
    )
    return Endpoint(backend, ())
