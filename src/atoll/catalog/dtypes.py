"""How numbers are stored: names of formats and the bits a weight takes in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.core.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class DType:
    """How a number is stored; `bits_per_weight` includes scales and zero points."""

    name: str
    bits_per_weight: float

    @property
    def bytes_per_weight(self) -> float:
        """Bytes one weight takes on average."""
        return self.bits_per_weight / 8


def group_bits(
    name: str, bits: int, group: int | None, *, scale_bits: int = 16, zero_bits: int = 0
) -> DType:
    """`bits` per weight and, for every `group` weights, one scale and one zero point.

    Without a group, or with GPTQ's -1, one scale serves a row or a whole tensor: below a thousandth of
    the weights, and counted as nothing.
    """
    overhead = 0.0 if not group or group < 0 else (scale_bits + zero_bits) / group
    return DType(name, bits + overhead)


BF16 = DType("bf16", 16.0)
FP16 = DType("fp16", 16.0)
FP32 = DType("fp32", 32.0)
FP8 = DType("fp8", 8.0)
INT8 = DType("int8", 8.0)
# AWQ's and GPTQ's usual form: groups of 128 with a scale and a zero point.
INT4 = group_bits("int4", 4, 128, zero_bits=4)
# OCP microscaling: an 8-bit scale for every 32 weights.
MXFP4 = group_bits("mxfp4", 4, 32, scale_bits=8)
# The 32-bit scale of a whole tensor counts as nothing.
NVFP4 = group_bits("nvfp4", 4, 16, scale_bits=8)
# llama.cpp's: eight bits and a 16-bit scale for every 32 weights; six bits and two levels of scales.
Q8_0 = DType("q8_0", 8.5)
Q6_K = DType("q6_k", 6.5625)
# A mixture: 4.5 bits, but 6.5625 for values and half of the down projections, so 4.8 to 4.85 in a layer.
Q4_K_M = DType("q4_k_m", 4.85)

DTYPES: Mapping[str, DType] = {
    dtype.name: dtype
    for dtype in (BF16, FP16, FP32, FP8, INT8, INT4, MXFP4, NVFP4, Q8_0, Q6_K, Q4_K_M)
}
GGUF_OUTER: Mapping[str, DType] = {"q8_0": Q8_0, "q6_k": Q6_K, "q4_k_m": Q6_K}
"""Formats of GGUF files by name, with that of embedding and output matrix, which others leave in 16 bits."""
GGUF = "gguf"
"""Stands among checkpoints for GGUF files in a model's own precision."""
KV_DTYPES = ("bf16", "fp16", "fp8", "int8")


def dtype_of(name: str | DType) -> DType:
    """The dtype of that name; a DType is returned as it is."""
    if isinstance(name, DType):
        return name
    try:
        return DTYPES[name]
    except KeyError:
        raise UnknownNameError("dtype", name, DTYPES) from None
