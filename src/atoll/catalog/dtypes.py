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


BF16 = DType("bf16", 16.0)
FP16 = DType("fp16", 16.0)
FP32 = DType("fp32", 32.0)
# Scales per tensor or per channel are below a thousandth of the weights and counted as nothing.
FP8 = DType("fp8", 8.0)
INT8 = DType("int8", 8.0)
# Four bits, and a 16-bit scale for every 64 weights.
INT4 = DType("int4", 4.25)
# Four bits, and an 8-bit scale for every 32 weights (OCP microscaling).
MXFP4 = DType("mxfp4", 4.25)
# Four bits, and an 8-bit scale for every 16 weights; the 32-bit scale of a tensor is nothing.
NVFP4 = DType("nvfp4", 4.5)

DTYPES: Mapping[str, DType] = {
    dtype.name: dtype for dtype in (BF16, FP16, FP32, FP8, INT8, INT4, MXFP4, NVFP4)
}
KV_DTYPES = ("bf16", "fp16", "fp8", "int8")


def dtype_of(name: str | DType) -> DType:
    """The dtype of that name; a DType is returned as it is."""
    if isinstance(name, DType):
        return name
    try:
        return DTYPES[name]
    except KeyError:
        raise UnknownNameError("dtype", name, DTYPES) from None
