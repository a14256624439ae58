"""Rows of hidden states that came together from the stage before."""

from __future__ import annotations

from typing import Any, NamedTuple


class RowSlice(NamedTuple):
    """Rows [row, row + length) of a tensor; cut out only where they are needed alone."""

    source: Any
    row: int
    length: int

    def cut(self) -> Any:
        """Return the rows."""
        return self.source[self.row : self.row + self.length]
