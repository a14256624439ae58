"""What models take and make, as a backend's metadata say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

MODALITIES = "modalities"
"""Metadata with what each model of a backend takes and makes, as JSON: {"MODEL": [["text"], ["audio"]]}."""
TEXT = (("text",), ("text",))
"""What is taken and made where nobody says."""
_MOST_BYTES = 64 * 2**10
_Kinds = Annotated[
    tuple[Annotated[str, Meta(min_length=1, max_length=32)], ...], Meta(max_length=8)
]
_decode = msgspec.json.Decoder(dict[str, tuple[_Kinds, _Kinds]]).decode

Modalities = tuple[tuple[str, ...], tuple[str, ...]]


def write_modalities(known: Mapping[str, tuple[Sequence[str], Sequence[str]]]) -> str:
    """Return what models take and make as the text of metadata."""
    return msgspec.json.encode(dict(known)).decode()


def read_modalities(text: str) -> dict[str, Modalities]:
    """Return what is known of each model; nothing where the text says nothing."""
    if not text or len(text) > _MOST_BYTES:
        return {}
    try:
        return _decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return {}
