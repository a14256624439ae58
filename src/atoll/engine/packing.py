"""Linear layers whose weights lie in the order the CPU's matrix kernels read them.

A decode step multiplies a handful of rows with every weight. The general routine then spends most
of its time re-arranging the weights; arranged once, the same product takes about half the time.
"""

from __future__ import annotations

from typing import Any

import torch

_ROWS = 8
_SMALLEST = 1 << 14


class PackedLinear(torch.nn.Module):  # type: ignore[misc]
    """A linear layer over oneDNN's own weight layout; gives what the original layer gave."""

    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Kept out of the module's parameters: the layout is opaque and cannot be moved or cast.
        self._packed = (torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS),)
        self._bias = (bias,)

    def forward(self, rows: Any) -> Any:
        """Multiply; any leading shape."""
        return torch.ops.mkldnn._linear_pointwise(
            rows, self._packed[0], self._bias[0], "none", [], ""
        )


def can_pack(device: Any, dtype: Any) -> bool:
    """Whether packing is possible here: a CPU with oneDNN, float32 or bfloat16."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(dtype == torch.float32)


def pack_linears(module: Any) -> None:
    """Replace every plain linear layer inside `module` by its packed form."""
    for name, child in list(module.named_children()):
        if type(child) is torch.nn.Linear and child.weight.numel() >= _SMALLEST:
            bias = None if child.bias is None else child.bias.data
            setattr(module, name, PackedLinear(child.weight.data, bias))
        else:
            pack_linears(child)


def pack(linear: Any) -> Any:
    """Return the packed form of one linear layer."""
    return PackedLinear(linear.weight.data, None if linear.bias is None else linear.bias.data)
