"""Reads matrices in 8 and 4 bits out of a model folder, in the layouts that checkpoints have them in.

Which layout a matrix has is told by the tensors that are stored of it, so that parts which a checkpoint
leaves in 16 bits need no list:

| stored | written by | read as |
|---|---|---|
| `weight` in E4M3 with `weight_scale` or `weight_scale_inv` | FP8 of all kinds | `Fp8Matrix` |
| `qweight`, `qzeros`, `scales` | AWQ | `IntMatrix` |
| `qweight`, `qzeros`, `scales`, `g_idx` | GPTQ | `IntMatrix` |
| `weight_packed` in 32 bits with `weight_scale` | compressed-tensors | `IntMatrix` |
| `weight` in 8 bits with `weight_scale` | compressed-tensors | `IntMatrix` |
| `weight_packed` in bytes with `weight_scale` in bytes | compressed-tensors | `Mxfp4Matrix` |
| `*_blocks`, `*_scales` of experts | GPT-OSS | `Mxfp4Matrix` |

Scales that checkpoints fixed for what comes in (`input_scale`) are not read: every row gets its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from atoll.core.errors import InputError
from atoll.engine.matrix import (
    Fp8Matrix,
    IntMatrix,
    Matrix,
    Mxfp4Matrix,
    PlainMatrix,
    join,
    pack_nibbles,
    unpack_nibbles,
)
from atoll.engine.torch_ops import FP8
from atoll.engine.weights.reader import WeightReader

AtLoad = Literal["fp8"]
"""Formats that weights are turned into as they are loaded."""
_METHODS = frozenset(
    {"fp8", "fbgemm_fp8", "awq", "gptq", "compressed-tensors", "mxfp4", "modelopt"}
)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which place of eight AWQ stores the first, second, ... of eight neighbours."""
_BITS = (4, 8)
_MIDDLE = 128
_BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """How a folder's configuration says that matrices are stored, as far as tensors do not tell."""

    method: str = ""
    bits: int = 4
    group: int | None = None
    zero_shift: int = 0
    block: tuple[int, int] = _BLOCK

    @classmethod
    def read(cls, folder: str | Path) -> QuantizationScheme:
        """Read the `quantization_config` of config.json; InputError: it names a method that is not read."""
        path = Path(folder) / "config.json"
        config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        said = config.get("quantization_config")
        if said is None:
            said = (config.get("text_config") or {}).get("quantization_config")
        if not said:
            return cls()
        method = str(said.get("quant_method"))
        bits = said.get("bits", said.get("w_bit", 4))
        version = str(said.get("version") or "gemm").lower()
        if (
            method not in _METHODS
            or bits not in _BITS
            or (method == "awq" and (version != "gemm" or bits != 4))
        ):
            words = f"{method} of {bits} bits" + (f", {version}" if method == "awq" else "")
            raise InputError(
                f"the stage engine reads no weights quantised by {words}",
                path=path,
                field="quantization_config",
                hint=f"use a checkpoint of {', '.join(sorted(_METHODS))} in 8 or 4 bits",
            )
        group = said.get("group_size", said.get("q_group_size"))
        first_form = method == "gptq" and said.get("checkpoint_format", "gptq") != "gptq_v2"
        rows, columns = said.get("weight_block_size") or _block_of(said) or _BLOCK
        return cls(method, bits, group, int(first_form), (rows, columns))


class MatrixReader:
    """The matrices of a model folder; those in 16 bits only where they are quantised `at_load`."""

    def __init__(self, reader: WeightReader, at_load: AtLoad | None = None) -> None:
        self._reader = reader
        self._scheme = QuantizationScheme.read(reader.folder)
        self._at_load = at_load
        self.folder = reader.folder

    def read_linear(self, name: str) -> Matrix | None:
        """Return the matrix of the linear layer `name`; None: it is to be read as a plain tensor."""
        return self._read(name)

    def read_experts(
        self, name: str, count: int, *, transposed: bool
    ) -> tuple[list[Matrix], list[Matrix]] | None:
        """Return gate and up in one, and down, of each expert below `name`; None: they are plain tensors.

        `transposed`: plain tensors of all experts are stored as [experts, depth, outputs].
        """
        if f"{name}.gate_up_proj_blocks" in self._reader:
            return self._blocks(f"{name}.gate_up_proj"), self._blocks(f"{name}.down_proj")
        if self._read(f"{name}.0.down_proj") is not None:
            gate_up = [
                join([self._need(f"{name}.{expert}.{kind}_proj") for kind in ("gate", "up")])
                for expert in range(count)
            ]
            return gate_up, [self._need(f"{name}.{expert}.down_proj") for expert in range(count)]
        if self._at_load is None or f"{name}.gate_up_proj" not in self._reader:
            return None
        stacks = (self._reader.read(f"{name}.{kind}_proj") for kind in ("gate_up", "down"))
        first, second = (
            [self._quantize(each.t() if transposed else each) for each in stack] for stack in stacks
        )
        return first, second

    def _need(self, name: str) -> Matrix:
        matrix = self._read(name)
        # Of one expert in 16 bits among others the reader says that it is missing, if it is.
        return PlainMatrix(self._reader.read(f"{name}.weight")) if matrix is None else matrix

    def _read(self, name: str) -> Matrix | None:
        stored = self._reader
        if f"{name}.qweight" in stored:
            tensors = [stored.read(f"{name}.{each}") for each in ("qweight", "qzeros", "scales")]
            if self._scheme.method == "awq":
                return self._awq(*tensors)
            return self._gptq(name, *tensors)
        if f"{name}.weight_packed" in stored:
            return self._packed(name)
        scales = next(
            (
                stored.read(f"{name}.{each}")
                for each in ("weight_scale", "weight_scale_inv")
                if f"{name}.{each}" in stored
            ),
            None,
        )
        if f"{name}.weight" not in stored:
            return None
        if scales is None:
            return self._quantize(stored.read(f"{name}.weight")) if self._at_load else None
        weight = stored.read(f"{name}.weight")
        if weight.dtype == FP8:
            return self._fp8(weight, scales.float())
        if weight.dtype == torch.int8 and f"{name}.weight_zero_point" not in stored:
            # Around zero: as codes without a sign they are around the middle.
            codes = weight.view(torch.uint8) ^ _MIDDLE
            wide = _by_row(scales, weight.shape[0])
            return IntMatrix(codes, wide, None, 8, weight.shape[1] // wide.shape[1])
        raise self._unknown(name)

    def _fp8(self, weight: Tensor, scales: Tensor) -> Matrix:
        if scales.numel() == 1 or scales.shape in ((len(weight),), (len(weight), 1)):
            return Fp8Matrix(weight, _by_row(scales, weight.shape[0]))
        return Fp8Matrix(weight, scales, self._scheme.block)

    def _quantize(self, weight: Tensor) -> Matrix:
        return Fp8Matrix.quantize(weight)

    def _awq(self, qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Matrix:
        codes = pack_nibbles(_awq_numbers(qweight).t().contiguous())
        zeros = pack_nibbles(_awq_numbers(qzeros)).t().contiguous()
        depth, groups = qweight.shape[0], scales.shape[0]
        return IntMatrix(codes, scales.t().contiguous(), zeros, 4, depth // groups)

    def _gptq(self, name: str, qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Matrix:
        bits = self._scheme.bits
        codes = qweight.t().contiguous().view(torch.uint8)
        zeros = qzeros.view(torch.uint8).t().contiguous()
        depth = qweight.shape[0] * 32 // bits
        group = self._scheme.group or depth // scales.shape[0]
        if group < 0:
            group = depth
        order = self._order(f"{name}.g_idx", group)
        own = scales.t().contiguous()
        return IntMatrix(codes, own, zeros, bits, group, order, shift=self._scheme.zero_shift)

    def _packed(self, name: str) -> Matrix:
        stored = self._reader
        packed, scales = (
            stored.read(f"{name}.{each}") for each in ("weight_packed", "weight_scale")
        )
        if packed.dtype == torch.uint8:
            if f"{name}.weight_global_scale" in stored or scales.itemsize != 1:
                raise self._unknown(name)
            return Mxfp4Matrix(packed, scales.view(torch.uint8))
        codes = packed.contiguous().view(torch.uint8)
        outputs, depth = (int(side) for side in stored.read(f"{name}.weight_shape"))
        bits = 8 * codes.shape[1] // depth
        if bits not in _BITS or bits * depth != 8 * codes.shape[1]:
            raise self._unknown(name)
        zeros = None
        if f"{name}.weight_zero_point" in stored:
            points = stored.read(f"{name}.weight_zero_point")
            zeros = points.t().contiguous().view(torch.uint8).t().contiguous()
        wide = _by_row(scales, outputs)
        group = depth // wide.shape[1]
        return IntMatrix(
            codes, wide, zeros, bits, group, self._order(f"{name}.weight_g_idx", group)
        )

    def _order(self, name: str, group: int) -> Tensor | None:
        """The group of each column where columns were ordered anew; None: they stand as they come."""
        if name not in self._reader:
            return None
        groups = self._reader.read(name).to(torch.int32)
        plain = torch.arange(len(groups), dtype=torch.int32) // group
        return None if groups.equal(plain) or bool((groups < 0).any()) else groups

    def _blocks(self, name: str) -> list[Matrix]:
        blocks, scales = (self._reader.read(f"{name}_{each}") for each in ("blocks", "scales"))
        return [
            Mxfp4Matrix(codes.flatten(1), own) for codes, own in zip(blocks, scales, strict=True)
        ]

    def _unknown(self, name: str) -> InputError:
        return InputError(
            f"the matrix {name!r} is stored in a format that the stage engine does not read",
            path=self._reader.folder,
            field="quantization_config",
            hint="use a checkpoint in fp8, int8, int4 or mxfp4",
        )


def _block_of(said: Mapping[str, Any]) -> list[int] | None:
    """The block of weights that share a scale, as compressed-tensors writes it."""
    for group in (said.get("config_groups") or {}).values():
        block: list[int] | None = (group.get("weights") or {}).get("block_structure")
        if block:
            return block
    return None


def _by_row(scales: Tensor, outputs: int) -> Tensor:
    """Scales [outputs, groups], of which a tensor that has one alone gives it to every row."""
    if scales.numel() == 1:
        return scales.reshape(1, 1).repeat(outputs, 1)
    return scales.reshape(outputs, -1)


def _awq_numbers(packed: Tensor) -> Tensor:
    """The numbers of 4 bits in [n, m] of 32 bits, in order: uint8 [n, 8 m]."""
    nibbles = unpack_nibbles(packed.contiguous().view(torch.uint8))
    return nibbles.view(*packed.shape, 8)[..., list(_AWQ_ORDER)].flatten(1)
