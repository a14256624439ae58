"""Reading the `quantization_config` of a Hugging Face config: which weights are stored how."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.catalog.fields import ConfigFields
from atoll.catalog.transformer import FP8, INT8, MXFP4, DType
from atoll.core.errors import UnknownNameError

# Where each group of weights lives in a checkpoint, for a layer i.
_MODULES = {
    "attention": ("model.layers.{i}.self_attn.q_proj", "model.layers.{i}.self_attn.qkv_proj"),
    "mlp": ("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.gate_up_proj"),
    "expert": (
        "model.layers.{i}.mlp.experts.0.gate_proj",
        "model.layers.{i}.block_sparse_moe.experts.0.w1",
        "model.layers.{i}.mlp.experts.gate_up_proj",
    ),
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """Dtypes that differ from the model's own; None leaves a group as it is."""

    attention: DType | None = None
    mlp: DType | None = None
    expert: DType | None = None
    kv: DType | None = None


def grouped(
    name: str, bits: int, group: int | None, *, scale_bits: int = 16, zero_bits: int = 0
) -> DType:
    """`bits` per weight and, for every `group` weights, one scale and one zero point."""
    overhead = 0.0 if not group or group < 0 else (scale_bits + zero_bits) / group
    return DType(name, bits + overhead)


def read_quantization(fields: ConfigFields, layers: int) -> Quantization:
    """The dtypes a `quantization_config` asks for; an empty answer where there is none."""
    kv = _kv_dtype(fields.text("kv_cache_dtype"))
    config = fields.section("quantization_config")
    if config is None:
        return Quantization(kv=kv)
    method = config.text("quant_method")
    if method is None and (config.flag("load_in_4bit") or config.flag("load_in_8bit")):
        method = "bitsandbytes"
    known: dict[str, Callable[[ConfigFields], DType | None]] = {
        "mxfp4": lambda _: MXFP4,
        "fp8": _fp8,
        "fbgemm_fp8": lambda _: FP8,
        "awq": _awq,
        "gptq": _gptq,
        "compressed-tensors": _compressed,
        "bitsandbytes": _bitsandbytes,
        "modelopt": _modelopt,
    }
    if method not in known:
        raise UnknownNameError(
            "quantisation method", str(method), known, field="quantization_config.quant_method"
        )
    dtype = known[method](config)
    if dtype is None:
        return Quantization(kv=kv or _kv_scheme(config))
    skipped = [
        *config.texts("modules_to_not_convert"),
        *config.texts("ignore"),
        *config.texts("ignored_layers"),
        *config.texts("llm_int8_skip_modules"),
        *config.texts("exclude_modules"),
    ]
    kept = {group for group in _MODULES if _is_skipped(group, skipped, layers, config)}
    # MXFP4 is defined for experts alone; no engine stores attention or dense MLPs in it.
    only_experts = method == "mxfp4"
    return Quantization(
        attention=None if only_experts or "attention" in kept else dtype,
        mlp=None if only_experts or "mlp" in kept else dtype,
        expert=None if "expert" in kept else dtype,
        kv=kv or _kv_scheme(config),
    )


def _fp8(config: ConfigFields) -> DType:
    block = config.wholes("weight_block_size")
    if not block:
        return FP8
    size = 1
    for side in block:
        size *= side
    return grouped("fp8", 8, size, scale_bits=32)


def _awq(config: ConfigFields) -> DType:
    bits = config.whole("bits", default=config.whole("w_bit", default=4, most=8), most=8)
    group = config.group("group_size", default=config.group("q_group_size", default=128))
    zero = bits if config.flag("zero_point", default=True) else 0
    return grouped(f"int{bits}", bits, group, zero_bits=zero)


def _gptq(config: ConfigFields) -> DType:
    bits = config.whole("bits", default=4, most=8)
    # GPTQ stores zero points even when the scheme is symmetric.
    return grouped(f"int{bits}", bits, config.group("group_size", default=128), zero_bits=bits)


def _compressed(config: ConfigFields) -> DType | None:
    groups = config.section("config_groups")
    for name in groups.names() if groups is not None else ():
        group = groups.section(name) if groups is not None else None
        weights = None if group is None else group.section("weights")
        if weights is None:
            continue
        bits = weights.whole("num_bits", default=8, most=16)
        size = weights.group("group_size", default=None)
        if weights.text("type") == "float":
            # 4-bit floats come with 8-bit scales (NVFP4, MXFP4).
            return FP8 if bits == 8 else grouped(f"fp{bits}", bits, size, scale_bits=8)
        zero = 0 if weights.flag("symmetric", default=True) else bits
        return grouped(f"int{bits}", bits, size, zero_bits=zero)
    return None


def _bitsandbytes(config: ConfigFields) -> DType | None:
    if config.flag("load_in_4bit", default=config.flag("_load_in_4bit")):
        # 64 weights share a scale: 32 bits, or 8 bits and a share of a second scale per 256.
        double = config.flag("bnb_4bit_use_double_quant")
        return DType("int4", 4 + (8 / 64 + 32 / (64 * 256) if double else 32 / 64))
    if config.flag("load_in_8bit", default=config.flag("_load_in_8bit")):
        return INT8
    return None


def _modelopt(config: ConfigFields) -> DType:
    algorithm = (config.text("quant_algo") or "FP8").upper()
    if algorithm in ("FP8", "FP8_PB_WO"):
        return FP8
    if algorithm == "NVFP4":
        return grouped("nvfp4", 4, 16, scale_bits=8)
    raise UnknownNameError(
        "ModelOpt algorithm", algorithm, ("FP8", "NVFP4"), field="quantization_config.quant_algo"
    )


def _kv_dtype(name: str | None) -> DType | None:
    if name is None or name in ("auto", "bfloat16", "float16"):
        return None
    if name.startswith("fp8"):
        return FP8
    if name == "int8":
        return INT8
    raise UnknownNameError("KV cache dtype", name, ("auto", "fp8", "int8"), field="kv_cache_dtype")


def _kv_scheme(config: ConfigFields) -> DType | None:
    scheme = config.section("kv_cache_scheme")
    if scheme is not None and scheme.whole("num_bits", default=16, most=16) == 8:
        return FP8 if scheme.text("type") == "float" else INT8
    algorithm = config.text("kv_cache_quant_algo")
    return FP8 if algorithm is not None and algorithm.upper() == "FP8" else None


def _is_skipped(group: str, patterns: Sequence[str], layers: int, config: ConfigFields) -> bool:
    """Whether the patterns leave out this group in every layer (first, middle and last are asked).

    A pattern for single layers does not count: the answer is then off by those layers.
    """
    sample = {0, layers // 2, layers - 1}
    return all(
        any(
            _matches(pattern, module.format(i=i), config)
            for module in _MODULES[group]
            for pattern in patterns
        )
        for i in sample
    )


def _matches(pattern: str, module: str, config: ConfigFields) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise config.error(
                f"{pattern!r} is not a regular expression: {error}", "ignore"
            ) from None
    # Parts of a dotted name, "*" standing for one part; a pattern matches any run of them.
    parts, name = pattern.strip(".").split("."), module.split(".")
    if parts == [""]:
        return False
    return any(
        all(p in ("*", n) for p, n in zip(parts, name[start:], strict=False))
        for start in range(len(name) - len(parts) + 1)
    )
