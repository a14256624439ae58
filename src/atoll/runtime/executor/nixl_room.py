"""Pieces of a block of memory that is registered once: who has which, without touching a byte of it."""

from __future__ import annotations

ALIGN = 4096


class PieceRoom:
    """Offsets of a block that are free or taken, by first fit."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // ALIGN * ALIGN
        self._free = [(0, self.nbytes)] if self.nbytes else []
        self._taken: dict[int, int] = {}

    @property
    def taken_bytes(self) -> int:
        """Bytes of pieces that are not given back, with what rounds them up."""
        return sum(self._taken.values())

    def take(self, nbytes: int) -> int | None:
        """Return where a piece of so many bytes begins, or None where there is no such gap."""
        size = -(-max(nbytes, 1) // ALIGN) * ALIGN
        for number, (offset, free) in enumerate(self._free):
            if free >= size:
                rest = [(offset + size, free - size)] if free > size else []
                self._free[number : number + 1] = rest
                self._taken[offset] = size
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Free the piece that begins there; one that is not taken is a KeyError."""
        merged: list[tuple[int, int]] = []
        for begin, size in sorted([*self._free, (offset, self._taken.pop(offset))]):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = merged[-1][0], merged[-1][1] + size
            else:
                merged.append((begin, size))
        self._free = merged
