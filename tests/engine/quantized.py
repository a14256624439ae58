"""Tiny checkpoints in 8 and 4 bits, in the layouts that their makers write, and the same weights expanded.

Packing is written out number by number as in those programs, apart from the engine's own reading.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
GROUP = 16
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Stored = tuple[dict[str, Tensor], Tensor]
"""Tensors of a matrix by the ends of their names, and the weights that they stand for."""


def pack_rows(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Numbers [n, m] below 2 ** bits in 32-bit words along m: int32 [n, m * bits / 32]."""
    many = 32 // bits
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // many, dtype=torch.int64)
    for place in range(many):
        source = place if order is None else order[place]
        words |= numbers[:, source::many].long() << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def quantize(
    weight: Tensor, bits: int, group: int, *, symmetric: bool, order: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes [o, d], scales and zero points [o, groups], the group of each column, and what they stand for."""
    outputs, depth = weight.shape
    columns = torch.arange(depth) // group
    groups = columns if order is None else columns[order.argsort()]
    scales = torch.empty(outputs, depth // group, dtype=torch.float16)
    zeros = torch.full((outputs, depth // group), 1 << (bits - 1))
    most = (1 << bits) - 1
    for number in range(depth // group):
        part = weight[:, groups == number]
        if symmetric:
            scales[:, number] = part.abs().amax(1) / ((most - 1) / 2)
        else:
            low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scales[:, number] = (high - low) / most
            zeros[:, number] = (-low / scales[:, number].float()).round().clamp(1, most)
    wide, zero = scales.float()[:, groups], zeros[:, groups]
    codes = ((weight / wide).round() + zero).clamp(0, most).to(torch.int64)
    return codes, scales, zeros, groups, (codes - zero) * wide


def awq(weight: Tensor) -> Stored:
    """AutoAWQ's GEMM layout."""
    codes, scales, zeros, _, dense = quantize(weight, 4, GROUP, symmetric=False)
    return {
        "qweight": pack_rows(codes.t(), 4, _AWQ_ORDER),
        "qzeros": pack_rows(zeros.t(), 4, _AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }, dense


def gptq(
    weight: Tensor, bits: int = 4, *, reordered: bool = False, less: int = 1, zeros: bool = True
) -> Stored:
    """AutoGPTQ's layout: zero points are one less than they mean in its first form."""
    order = None
    if reordered:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
    codes, scales, points, groups, dense = quantize(
        weight, bits, GROUP, symmetric=not zeros, order=order
    )
    return {
        "qweight": pack_rows(codes, bits).t().contiguous(),
        "qzeros": pack_rows(points.t() - less, bits),
        "scales": scales.t().contiguous(),
        "g_idx": groups.to(torch.int32),
    }, dense


def packed(weight: Tensor, *, symmetric: bool) -> Stored:
    """compressed-tensors' pack-quantized."""
    codes, scales, zeros, _, dense = quantize(weight, 4, GROUP, symmetric=symmetric)
    tensors = {
        "weight_packed": pack_rows(codes, 4),
        "weight_scale": scales.to(torch.float16),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_rows(zeros.t(), 4).t().contiguous()
    return tensors, dense


def int8(weight: Tensor) -> Stored:
    """compressed-tensors' int-quantized, a scale for each row."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes * scales


def fp8(weight: Tensor, sides: tuple[int, int], scale: str = "weight_scale") -> Stored:
    """E4M3 with a scale for each block of `sides`; (0, 0): one for all."""
    rows, columns = (side or length for side, length in zip(sides, weight.shape, strict=True))
    blocks = weight.unfold(0, rows, rows).unfold(1, columns, columns)
    scales = blocks.abs().amax((-1, -2)) / 448.0
    wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    codes = (weight / wide).to(FP8)
    stored = scales.reshape(()) if sides == (0, 0) else scales
    return {"weight": codes, scale: stored}, codes.float() * wide


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks [..., d / 32, 16] and exponents [..., d / 32] of weights [..., d], as GPT-OSS has them."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1).clamp_min(1e-9) / 6.0).log2().ceil()
    scaled = groups / torch.exp2(exponents).unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - values).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = codes[..., ::2] | (codes[..., 1::2] << 4)
    return blocks.to(torch.uint8), (exponents + 127).to(torch.uint8)


def _compressed(weights: dict[str, Any], form: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


@dataclass(frozen=True)
class Variant:
    """A way to store matrices: what config.json says of it, and how one is stored."""

    config: dict[str, Any] = field(default_factory=dict)
    store: Callable[[Tensor], Stored] | None = None


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
VARIANTS: dict[str, Variant] = {
    "fp8-tensor": Variant(
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, lambda w: fp8(w, (0, 0))
    ),
    "fp8-channel": Variant(
        _compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized"),
        lambda w: fp8(w, (1, 0)),
    ),
    "fp8-block": Variant(
        {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"},
        lambda w: fp8(w, (8, 8), "weight_scale_inv"),
    ),
    "awq": Variant({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "gptq": Variant(_GPTQ, gptq),
    "gptq-v2": Variant(_GPTQ | {"checkpoint_format": "gptq_v2"}, lambda w: gptq(w, less=0)),
    "gptq-order": Variant(_GPTQ | {"desc_act": True}, lambda w: gptq(w, reordered=True)),
    "gptq-8": Variant(_GPTQ | {"bits": 8}, lambda w: gptq(w, 8)),
    "w4a16": Variant(
        _compressed(_INT4 | {"symmetric": True}, "pack-quantized"),
        lambda w: packed(w, symmetric=True),
    ),
    "w4a16-zeros": Variant(
        _compressed(_INT4 | {"symmetric": False}, "pack-quantized"),
        lambda w: packed(w, symmetric=False),
    ),
    "int8": Variant(
        _compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized"), int8
    ),
}


def _is_matrix(name: str, tensor: Tensor) -> bool:
    return ".layers." in name and name.endswith("_proj.weight") and tensor.dim() == 2


def write_quantized(plain: Path, variant: str, folder: Path) -> tuple[Path, Path]:
    """Write a plain checkpoint in a variant, and once more with what that stands for in 32 bits."""
    how = VARIANTS[variant]
    assert how.store is not None
    stored: dict[str, Tensor] = {}
    expanded: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not _is_matrix(name, tensor):
            stored[name] = expanded[name] = tensor
            continue
        tensors, dense = how.store(tensor.float())
        stem = name.removesuffix(".weight")
        stored |= {f"{stem}.{end}": each.contiguous() for end, each in tensors.items()}
        expanded[name] = dense.contiguous()
    return (
        _write(plain, folder / "stored", stored, how.config),
        _write(plain, folder / "expanded", expanded, {}),
    )


def write_mxfp4(plain: Path, folder: Path) -> Path:
    """Write a plain GPT-OSS checkpoint with its experts in MXFP4."""
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = mxfp4(tensor.float().transpose(1, 2))
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            stored[name] = tensor
    return _write(plain, folder / "stored", stored, {"quant_method": "mxfp4"})


def _write(
    plain: Path, folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]
) -> Path:
    shutil.copytree(plain, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if quantization:
        config["quantization_config"] = quantization
    path.write_text(json.dumps(config))
    return folder
