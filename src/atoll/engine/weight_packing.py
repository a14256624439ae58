"""Linear layers whose weights lie in the order the CPU's matrix kernels read them.

A decode step multiplies a handful of rows with every weight. The general routine then spends most
of its time re-arranging the weights; arranged once, the same product takes about half the time. A single row
is the exception: the plain weights, read once from end to end, are faster than any arrangement. So small
models keep both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ROWS = 8
_SMALLEST = 1 << 14
KEPT_BYTES = 2**30
"""A stage of fewer bytes of weights keeps them plain, too; a larger one would take too much memory."""


class PackedLinear(nn.Module):
    """A linear layer over oneDNN's own weight layout; gives what the original layer gave.

    With `keep` it has the plain weights as well, for single rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, keep: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Kept out of the module's parameters: the layout is opaque and cannot be moved or cast.
        self._packed = (torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS),)
        self._bias = (bias,)
        self._plain = (weight.contiguous() if keep else None,)

    def forward(self, rows: Tensor) -> Tensor:
        """Multiply; any leading shape."""
        packed, plain, bias = self._packed[0], self._plain[0], self._bias[0]
        if plain is not None and rows.numel() == self.in_features:
            return nn.functional.linear(rows, plain, bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
        return product


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packing is possible here: a CPU with oneDNN, float32 or bfloat16."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(dtype == torch.float32)


def pack_linears(module: nn.Module, *, keep: bool = False) -> None:
    """Replace every plain linear layer inside `module` by its packed form."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear and child.weight.numel() >= _SMALLEST:
            setattr(module, name, pack(child, keep=keep))
        else:
            pack_linears(child, keep=keep)


def pack(linear: nn.Linear, *, keep: bool = False) -> PackedLinear:
    """Return the packed form of one linear layer."""
    # Not `linear.bias`: by its types there always is one.
    bias = linear._parameters["bias"]
    return PackedLinear(linear.weight.data, None if bias is None else bias.data, keep=keep)
