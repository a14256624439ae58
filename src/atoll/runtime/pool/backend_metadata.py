"""Metadata of a backend that are JSON: the processes behind it, and the modalities of its models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

STAGES = "stages"
"""Metadata with all stages of a backend that runs a model in several processes, as JSON."""
MODALITIES = "modalities"
"""Metadata with what each model of a backend takes and makes, as JSON: {"MODEL": [["text"], ["audio"]]}."""
TEXT = (("text",), ("text",))
"""Taken and made where nobody says otherwise."""
_MAX_STAGES_BYTES = 256 * 2**10
_MAX_MODALITIES_BYTES = 64 * 2**10
_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Layer = Annotated[int, Meta(ge=0, le=1_000_000)]
_Kinds = Annotated[
    tuple[Annotated[str, Meta(min_length=1, max_length=32)], ...], Meta(max_length=8)
]
Modalities = tuple[tuple[str, ...], tuple[str, ...]]
_Read = TypeVar("_Read")


class BackendStage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process: the instance it belongs to, its layers [start, end), cores, and what was planned.

    One that runs parts of a model that are no layers says in `holds` which.
    """

    name: _Name
    instance: _Name
    layers: tuple[_Layer, _Layer] | None = None
    holds: Annotated[str, Meta(max_length=512)] = ""
    cores: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    planned: Annotated[str, Meta(max_length=128)] = ""
    """The type of node that a plan has for it, which is not what runs here where a CPU stands in."""


_decode_stages = msgspec.json.Decoder(tuple[BackendStage, ...]).decode
_decode_modalities = msgspec.json.Decoder(dict[str, tuple[_Kinds, _Kinds]]).decode


def write_stages(stages: Iterable[BackendStage]) -> str:
    """Return stages as the text of metadata."""
    return msgspec.json.encode(tuple(stages)).decode()


def read_stages(text: str) -> tuple[BackendStage, ...]:
    """Return the stages in the text of metadata; none where it is no such text."""
    return _read(_decode_stages, text, _MAX_STAGES_BYTES, ())


def write_modalities(known: Mapping[str, tuple[Sequence[str], Sequence[str]]]) -> str:
    """Return what models take and make as the text of metadata."""
    return msgspec.json.encode(dict(known)).decode()


def read_modalities(text: str) -> dict[str, Modalities]:
    """Return what is known of each model; nothing where the text says nothing."""
    return _read(_decode_modalities, text, _MAX_MODALITIES_BYTES, {})


def _read(decode: Callable[[str], _Read], text: str, max_bytes: int, nothing: _Read) -> _Read:
    # Anybody may write metadata: what is too large or wrong counts as nothing.
    if not text or len(text) > max_bytes:
        return nothing
    try:
        return decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return nothing
