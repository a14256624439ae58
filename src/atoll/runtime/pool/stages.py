"""The stages of an instance as a backend's metadata say them: which process holds which layers, on what."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

STAGES = "stages"
"""Metadata with all stages of a backend that runs a model in several processes, as JSON."""
_MOST_BYTES = 256 * 2**10
_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Layer = Annotated[int, Meta(ge=0, le=1_000_000)]


class BackendStage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process: the instance it belongs to, its layers [start, end), cores, and what was planned."""

    name: _Name
    instance: _Name
    layers: tuple[_Layer, _Layer]
    cores: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    planned: Annotated[str, Meta(max_length=128)] = ""
    """The type of node that a plan has for it, which is not what runs here where a CPU stands in."""


_decode = msgspec.json.Decoder(tuple[BackendStage, ...]).decode


def write_stages(stages: Iterable[BackendStage]) -> str:
    """Return stages as the text of metadata."""
    return msgspec.json.encode(tuple(stages)).decode()


def read_stages(text: str) -> tuple[BackendStage, ...]:
    """Return the stages in the text of metadata; none where it is no such text."""
    if not text or len(text) > _MOST_BYTES:
        return ()
    try:
        return _decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return ()
