"""The pieces of a stream as one value."""

from __future__ import annotations

from typing import cast

from atoll.tasks.values import Value


def join_pieces(pieces: list[Value]) -> Value:
    """Return texts joined, anything else as a list; no pieces at all are an empty list."""
    if pieces and all(isinstance(piece, str) for piece in pieces):
        return "".join(cast("list[str]", pieces))
    return list(pieces)
