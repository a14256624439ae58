"""How a kernel expands a tile of a matrix in 8 or 4 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MatrixTiles:
    """Codes in bytes with their scales, as `triton_kernels.expanded_linear` reads them.

    `side` rows and `group` columns share a scale; `skipped` are the rows and columns before the first that
    belong to its block. Zero points and `group_of` are those of whole numbers, as in `IntMatrix`.
    """

    kind: Literal["fp8", "int", "mxfp4"]
    bits: int
    codes: Tensor
    scales: Tensor
    group: int
    side: int = 1
    skipped: tuple[int, int] = (0, 0)
    zeros: Tensor | None = None
    shift: int = 0
    group_of: Tensor | None = None
