"""Lists of models as Anthropic's clients read them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

_VERSION = b"anthropic-version"


def is_asked(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether it is a client of Anthropic's that asks: all of them say which version they speak."""
    return _VERSION in headers


def describe(name: str, created_s: float) -> dict[str, object]:
    """Return one model; `created_s` is a Unix time."""
    created = datetime.fromtimestamp(int(created_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


def listing(names: list[str], created_s: float) -> dict[str, object]:
    """Return all of them, on one page."""
    return {
        "data": [describe(name, created_s) for name in names],
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }
