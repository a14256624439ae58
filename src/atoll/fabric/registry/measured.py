"""Measurement of a machine, as it tells it in labels of its record: JSON, in pieces that labels hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_LABEL = "atoll.measured."
_PIECE = 256
_MAX_PIECES = 16
"""Of the 32 labels that a record may have."""


def pack_measured(measured: Mapping[str, Any]) -> dict[str, str]:
    """Return a measurement as labels; none where it is too long for them."""
    text = json.dumps(measured, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    if len(pieces) > _MAX_PIECES:
        return {}
    return {f"{_LABEL}{number}": piece for number, piece in enumerate(pieces)}


def unpack_measured(labels: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the measurement that labels tell of, None where they tell of none that can be read."""
    pieces: list[str] = []
    while len(pieces) < _MAX_PIECES and (piece := labels.get(f"{_LABEL}{len(pieces)}")) is not None:
        pieces.append(piece)
    try:
        found = json.loads("".join(pieces)) if pieces else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
