"""Values between tasks and components: plain data, and handles for what is big.

Everything here can be written down without pickling: None, truth values, numbers, texts, bytes, lists, and
dictionaries with text keys. Tensors, sound and pictures stay where they were made and travel as handles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias, cast

from atoll.core.errors import InputError

ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Number formats that arrays may have, and bytes per number."""
NOT_SUMMED = 0
"""In place of the checksum of an array that has none."""
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class Handle:
    """An array that stays where it was made, by name.

    id: 32 hexadecimal digits, random. owner: the process that keeps it. address: where it is fetched from
    over the wire, "host:port". path: its file, for readers on the same `host` (an identity of the running
    system, not its name); "" where there is none. crc32: of its bytes; `NOT_SUMMED` where nobody summed
    them up, as stores do not: files are found by size and name, and frames of the wire have checksums of
    their own. data: the bytes themselves where they are few: such an array needs no keeper and is never lost.
    """

    id: str
    owner: str
    address: str
    host: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    crc32: int
    data: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        """Refuse what no array could be."""
        if self.dtype not in ITEM_BYTES:
            raise InputError(f"no array is of {self.dtype[:20]!r}", field="dtype")
        if len(self.shape) > _MAX_DIMENSIONS or any(size < 0 for size in self.shape):
            raise InputError(f"no array has the shape {self.shape[:10]}", field="shape")
        if self.data and len(self.data) != self.nbytes:
            raise InputError(f"{len(self.data)} bytes for {self.nbytes}", field="data")

    @property
    def is_inline(self) -> bool:
        """Whether it carries the whole array with it."""
        return len(self.data) == self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


Value: TypeAlias = (
    "bool | int | float | str | bytes | list[Value] | dict[str, Value] | Handle | None"
)
"""Values that may be handed over between processes."""


def handles_in(value: Value) -> Iterator[Handle]:
    """Yield every handle in a value, in a fixed order."""
    if isinstance(value, Handle):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from handles_in(part)
    elif isinstance(value, list):
        for part in value:
            yield from handles_in(part)


def join_pieces(pieces: list[Value]) -> Value:
    """Return texts joined, anything else as a list; no pieces at all are an empty list."""
    if pieces and all(isinstance(piece, str) for piece in pieces):
        return "".join(cast("list[str]", pieces))
    return list(pieces)
