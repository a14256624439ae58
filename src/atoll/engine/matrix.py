"""A weight matrix in the format it is stored in: its bytes, its cuts, its product.

Layers and ranks know a matrix by this alone. Formats of 8 and 4 bits stay as they are in memory: where the
hardware does not multiply in the format, a product expands the weights tile by tile, in a kernel for a few
rows on a GPU and slab by slab (`SLAB_WEIGHTS`) elsewhere, and never the whole matrix.

| format | of a weight | scales |
|---|---|---|
| `PlainMatrix` | 16 or 32 bits | none |
| `Fp8Matrix` | e4m3 | 32 bits for a row, or for a block of rows and columns |
| `IntMatrix` | 4 or 8 bits less a zero point | as stored, for a group of columns in a row |
| `Mxfp4Matrix` | e2m1 | a power of two in 8 bits, for 32 columns in a row |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor, nn

from atoll.core.errors import UsageError
from atoll.engine.matrix_tiles import MatrixTiles
from atoll.engine.torch_ops import FP8, FP8_MAX

SLAB_WEIGHTS = {"cpu": 2**20, "cuda": 2**24}
"""Weights that a product expands at a time, by the kind of device."""
STREAMED_ROWS = 64
"""Rows up to which a GPU expands weights inside the kernel that multiplies them."""
_FP8_SIDE = 16
"""Both sides of a matrix are multiples of it where the hardware multiplies in FP8."""
_NATIVE_FP8 = (8, 9)
"""Least compute capability that multiplies in FP8: Ada."""
_MX_GROUP = 32
_MX_BIAS = 127
_MX_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Matrix(ABC):
    """Weights [outputs, depth] in some format."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Outputs and depth."""

    @property
    def outputs(self) -> int:
        """How many numbers a product gives for a row."""
        return self.shape[0]

    @property
    def depth(self) -> int:
        """How many numbers of a row a product reads."""
        return self.shape[1]

    @abstractmethod
    def rows(self, start: int, end: int) -> Matrix:
        """Return the matrix of the outputs [start, end); it may share memory with this one."""

    @abstractmethod
    def columns(self, start: int, end: int) -> Matrix:
        """Return the matrix of the inputs [start, end)."""

    def take(self, axis: int, ranges: Sequence[tuple[int, int]]) -> Matrix:
        """Return ranges [start, end) of rows (axis 0) or columns (1), one after another, as one."""
        if axis == 0:
            return join([self.rows(start, end) for start, end in ranges])
        if len(ranges) != 1:
            raise UsageError("columns of a matrix are cut in one piece")
        return self.columns(*ranges[0])

    @abstractmethod
    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return all weights expanded [outputs, depth]: of small matrices and slabs of large ones."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Return everything it holds."""

    @property
    def bytes(self) -> int:
        """Bytes of memory: weights with their scales and zero points."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors())

    @abstractmethod
    def own(self, device: torch.device) -> Matrix:
        """Return it on a device, in memory of its own: not in that of a file or of a larger matrix."""

    def joined(self, others: Sequence[Matrix]) -> Matrix | None:
        """Return it with others of the same format below, as one; None: they do not fit together."""
        del others
        return None

    def tiles(self) -> MatrixTiles | None:
        """Return it as a kernel expands it; None: no kernel does."""
        return None

    def product(self, x: Tensor) -> Tensor:
        """Return [..., outputs] of [..., depth]."""
        if x.is_cuda and x.numel() // self.depth <= STREAMED_ROWS:
            tiles = self.tiles()
            if tiles is not None:
                from atoll.engine import triton_ops

                return triton_ops.stream_tiles(x, tiles)
        out = x.new_empty((*x.shape[:-1], self.outputs))
        # Even, as two rows share a byte of zero points.
        slab = max(2, SLAB_WEIGHTS[x.device.type] // self.depth // 2 * 2)
        for start in range(0, self.outputs, slab):
            end = min(start + slab, self.outputs)
            out[..., start:end] = nn.functional.linear(x, self.rows(start, end).dense(x.dtype))
        return out


class _Stored(Matrix):
    """A matrix that is a dataclass of tensors and numbers."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return everything it holds."""
        values = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return tuple(value for value in values if isinstance(value, Tensor))

    def own(self, device: torch.device) -> Self:
        """Return it on a device, in memory of its own."""
        changed = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changed[field.name] = value.to(device, copy=True).contiguous()
        return replace(self, **changed)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True, eq=False)
class PlainMatrix(_Stored):
    """Weights as they are."""

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and depth."""
        return self.weight.shape[0], self.weight.shape[1]

    def rows(self, start: int, end: int) -> PlainMatrix:
        """Return the matrix of the outputs [start, end)."""
        return PlainMatrix(self.weight[start:end])

    def columns(self, start: int, end: int) -> PlainMatrix:
        """Return the matrix of the inputs [start, end)."""
        return PlainMatrix(self.weight[:, start:end])

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return all weights expanded."""
        return self.weight.to(dtype)

    def joined(self, others: Sequence[Matrix]) -> Matrix | None:
        """Return it with others of the same format below."""
        alike = [each.weight for each in others if isinstance(each, PlainMatrix)]
        return PlainMatrix(torch.cat([self.weight, *alike])) if len(alike) == len(others) else None

    def product(self, x: Tensor) -> Tensor:
        """Return [..., outputs] of [..., depth]."""
        return nn.functional.linear(x, self.weight)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Matrix(_Stored):
    """E4M3 weights; a weight is its code times the scale of its block of `block` (rows, columns).

    With a scale for each row (`block` (1, 0): all columns) Ada and later multiply in FP8, and rows that come
    in are turned into FP8 by a scale of their own. Else weights are expanded, and rows stay as they are.
    `skipped` are the rows and columns of the first block that a cut has left out.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int] = (1, 0)
    skipped: tuple[int, int] = (0, 0)

    @classmethod
    def quantize(cls, weight: Tensor) -> Fp8Matrix:
        """Return plain weights in FP8, with a scale for each row."""
        codes, scales = quantize_rows(weight)
        return cls(codes, scales)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and depth."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def by_row(self) -> bool:
        """Whether every row has one scale."""
        return self.block == (1, 0)

    def rows(self, start: int, end: int) -> Fp8Matrix:
        """Return the matrix of the outputs [start, end)."""
        side = self.block[0]
        first, last = start + self.skipped[0], end + self.skipped[0]
        scales = self.scales[first // side : -(-last // side)]
        return Fp8Matrix(self.codes[start:end], scales, self.block, (first % side, self.skipped[1]))

    def columns(self, start: int, end: int) -> Fp8Matrix:
        """Return the matrix of the inputs [start, end)."""
        codes, side = self.codes[:, start:end], self.block[1]
        if not side:
            return Fp8Matrix(codes, self.scales, self.block, self.skipped)
        first, last = start + self.skipped[1], end + self.skipped[1]
        scales = self.scales[:, first // side : -(-last // side)]
        return Fp8Matrix(codes, scales, self.block, (self.skipped[0], first % side))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return all weights expanded."""
        scales = self.scales
        for axis, (side, skipped, length) in enumerate(
            zip(self.block, self.skipped, self.codes.shape, strict=True)
        ):
            if side > 1:
                wide = scales.repeat_interleave(side, axis)
                scales = wide.narrow(axis, skipped, length)
        return (self.codes.float() * scales).to(dtype)

    def joined(self, others: Sequence[Matrix]) -> Matrix | None:
        """Return it with others of the same format below."""
        alike = [self, *(each for each in others if isinstance(each, Fp8Matrix))]
        if len(alike) <= len(others) or any(each.block != self.block for each in alike):
            return None
        # Blocks must end where the next matrix begins.
        if any(each.outputs % each.block[0] for each in alike[:-1]):
            return None
        if any(each.skipped != (0, self.skipped[1]) for each in alike):
            return None
        codes = torch.cat([each.codes for each in alike])
        return replace(self, codes=codes, scales=torch.cat([each.scales for each in alike]))

    def tiles(self) -> MatrixTiles | None:
        """Return it as a kernel expands it."""
        codes, group = self.codes.view(torch.uint8), self.block[1] or self.depth
        side, skipped = self.block[0], self.skipped
        return MatrixTiles("fp8", 8, codes, self.scales, group, side=side, skipped=skipped)

    def product(self, x: Tensor) -> Tensor:
        """Return [..., outputs] of [..., depth]."""
        even = self.outputs % _FP8_SIDE == 0 and self.depth % _FP8_SIDE == 0
        if x.is_cuda and self.by_row and even and multiplies_fp8(x.device):
            return self.product_in_fp8(x)
        return Matrix.product(self, x)

    def product_in_fp8(self, x: Tensor) -> Tensor:
        """Return the product with rows that are turned into FP8 as well, as the hardware multiplies."""
        flat = x.reshape(-1, self.depth)
        codes, scales = quantize_rows(flat)
        # Scales of rows want a result in bfloat16.
        out = torch._scaled_mm(
            codes,
            self.codes.t(),
            scale_a=scales,
            scale_b=self.scales.t(),
            out_dtype=torch.bfloat16,
        )
        return out.to(x.dtype).view(*x.shape[:-1], self.outputs)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in FP8 with the scale of each [rows, 1]: the largest number of a row becomes 448."""
    wide = rows.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp_min_(1e-12) / FP8_MAX
    return (wide / scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales


@lru_cache(maxsize=16)
def multiplies_fp8(device: torch.device) -> bool:
    """Whether a GPU multiplies in FP8."""
    return torch.cuda.get_device_capability(device) >= _NATIVE_FP8


@dataclass(frozen=True, slots=True, eq=False)
class IntMatrix(_Stored):
    """Whole numbers of 4 or 8 bits in groups of columns: a weight is (code - zero point) * scale.

    codes: uint8 [outputs, depth * bits / 8], of two numbers in a byte the first in its low half.
    scales: [outputs, groups], in the format they are stored in.
    zeros: uint8 [outputs * bits / 8, groups], of two rows in a byte the first in its low half; None: the
    middle (8 or 128). `shift` is added to each: GPTQ's first form stores one less than it means.
    group: columns that share a scale. `group_of` says of each column (int32 [depth]) to which group it
    belongs where they are not in order. `skipped` are the columns of the first group that a cut has left out.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    group_of: Tensor | None = None
    skipped: int = 0
    shift: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and depth."""
        return self.codes.shape[0], self.codes.shape[1] * self._in_byte

    @property
    def _in_byte(self) -> int:
        return 8 // self.bits

    def rows(self, start: int, end: int) -> IntMatrix:
        """Return the matrix of the outputs [start, end)."""
        zeros = self.zeros
        if zeros is not None:
            _check_cut(start, self._in_byte)
            zeros = zeros[start // self._in_byte : -(-end // self._in_byte)]
        return replace(
            self, codes=self.codes[start:end], scales=self.scales[start:end], zeros=zeros
        )

    def columns(self, start: int, end: int) -> IntMatrix:
        """Return the matrix of the inputs [start, end)."""
        _check_cut(start, self._in_byte)
        _check_cut(end, self._in_byte)
        codes = self.codes[:, start // self._in_byte : end // self._in_byte]
        if self.group_of is not None:
            return replace(self, codes=codes, group_of=self.group_of[start:end])
        first, last = start + self.skipped, end + self.skipped
        groups = slice(first // self.group, -(-last // self.group))
        zeros = None if self.zeros is None else self.zeros[:, groups]
        scales, skipped = self.scales[:, groups], first % self.group
        return replace(self, codes=codes, scales=scales, zeros=zeros, skipped=skipped)

    def groups(self) -> Tensor:
        """Return the group of each column: int64 [depth]."""
        if self.group_of is not None:
            return self.group_of.long()
        columns = torch.arange(self.depth, device=self.codes.device)
        return (columns + self.skipped) // self.group

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return all weights expanded."""
        groups = self.groups()
        codes = self.codes if self.bits == 8 else unpack_nibbles(self.codes)
        scales = self.scales.float().index_select(1, groups)
        if self.zeros is None:
            return ((codes.float() - 2.0 ** (self.bits - 1)) * scales).to(dtype)
        zeros = self.zeros
        if self.bits == 4:
            zeros = unpack_nibbles(zeros.t()).t()[: self.outputs]
        zeros = zeros.float().index_select(1, groups) + self.shift
        return ((codes.float() - zeros) * scales).to(dtype)

    def joined(self, others: Sequence[Matrix]) -> Matrix | None:
        """Return it with others of the same format below."""
        alike = [self, *(each for each in others if isinstance(each, IntMatrix))]
        if len(alike) <= len(others) or not all(self._fits(each) for each in alike):
            return None
        if self.zeros is not None and any(each.outputs % self._in_byte for each in alike[:-1]):
            return None
        zeros = [each.zeros for each in alike if each.zeros is not None]
        return replace(
            self,
            codes=torch.cat([each.codes for each in alike]),
            scales=torch.cat([each.scales for each in alike]),
            zeros=torch.cat(zeros) if zeros else None,
        )

    def tiles(self) -> MatrixTiles | None:
        """Return it as a kernel expands it."""
        return MatrixTiles(
            *("int", self.bits, self.codes, self.scales, self.group),
            skipped=(0, self.skipped),
            zeros=self.zeros,
            shift=self.shift,
            group_of=self.group_of,
        )

    def _fits(self, other: IntMatrix) -> bool:
        numbers = (other.bits, other.group, other.skipped, other.shift, other.scales.dtype)
        if numbers != (self.bits, self.group, self.skipped, self.shift, self.scales.dtype):
            return False
        if (other.zeros is None) != (self.zeros is None):
            return False
        if self.group_of is None or other.group_of is None:
            return self.group_of is other.group_of
        return self.group_of.equal(other.group_of)


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Matrix(_Stored):
    """E2M1 weights with a power of two for every 32 columns of a row, as OCP's microscaling has them.

    codes: uint8 [outputs, depth / 2], of two weights in a byte the first in its low half; scales: uint8
    [outputs, depth / 32], exponents from -127 on.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and depth."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    def rows(self, start: int, end: int) -> Mxfp4Matrix:
        """Return the matrix of the outputs [start, end)."""
        return Mxfp4Matrix(self.codes[start:end], self.scales[start:end])

    def columns(self, start: int, end: int) -> Mxfp4Matrix:
        """Return the matrix of the inputs [start, end)."""
        _check_cut(start, _MX_GROUP)
        _check_cut(end, _MX_GROUP)
        return Mxfp4Matrix(
            self.codes[:, start // 2 : end // 2],
            self.scales[:, start // _MX_GROUP : end // _MX_GROUP],
        )

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return all weights expanded."""
        values = torch.tensor(
            [*_MX_VALUES, *(-each for each in _MX_VALUES)], device=self.codes.device
        )
        weights = values[unpack_nibbles(self.codes).long()].view(*self.scales.shape, _MX_GROUP)
        exponents = self.scales.int().unsqueeze(-1) - _MX_BIAS
        return torch.ldexp(weights, exponents).flatten(1).to(dtype)

    def joined(self, others: Sequence[Matrix]) -> Matrix | None:
        """Return it with others of the same format below."""
        alike = [self, *(each for each in others if isinstance(each, Mxfp4Matrix))]
        if len(alike) <= len(others):
            return None
        codes = torch.cat([each.codes for each in alike])
        return Mxfp4Matrix(codes, torch.cat([each.scales for each in alike]))

    def tiles(self) -> MatrixTiles | None:
        """Return it as a kernel expands it."""
        return MatrixTiles("mxfp4", 4, self.codes, self.scales, _MX_GROUP)


@dataclass(frozen=True, slots=True, eq=False)
class StackedMatrix(Matrix):
    """Matrices of unlike formats, their outputs one after another."""

    parts: tuple[Matrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and depth."""
        return sum(part.outputs for part in self.parts), self.parts[0].depth

    def tensors(self) -> tuple[Tensor, ...]:
        """Return everything it holds."""
        return tuple(tensor for part in self.parts for tensor in part.tensors())

    def rows(self, start: int, end: int) -> Matrix:
        """Return the matrix of the outputs [start, end)."""
        kept, at = [], 0
        for part in self.parts:
            low, high = max(start - at, 0), min(end - at, part.outputs)
            if low < high:
                kept.append(part.rows(low, high))
            at += part.outputs
        return StackedMatrix(tuple(kept))

    def columns(self, start: int, end: int) -> Matrix:
        """Return the matrix of the inputs [start, end)."""
        return StackedMatrix(tuple(part.columns(start, end) for part in self.parts))

    def own(self, device: torch.device) -> Matrix:
        """Return it on a device, in memory of its own."""
        return StackedMatrix(tuple(part.own(device) for part in self.parts))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return all weights expanded."""
        return torch.cat([part.dense(dtype) for part in self.parts])

    def product(self, x: Tensor) -> Tensor:
        """Return [..., outputs] of [..., depth]."""
        return torch.cat([part.product(x) for part in self.parts], -1)


def join(matrices: Sequence[Matrix]) -> Matrix:
    """Return one matrix with the outputs of several, one after another."""
    first, *others = matrices
    if not others:
        return first
    joined = first.joined(others)
    return StackedMatrix(tuple(matrices)) if joined is None else joined


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the numbers of 4 bits in bytes, the low half first: [..., n] becomes [..., 2 n]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def pack_nibbles(numbers: Tensor) -> Tensor:
    """Return numbers below 16 in uint8, two in a byte: [..., 2 n] becomes [..., n]."""
    return numbers[..., ::2] | (numbers[..., 1::2] << 4)


def _check_cut(at: int, step: int) -> None:
    if at % step:
        raise UsageError(f"a matrix of this format is cut at multiples of {step}, not at {at}")
