"""Reading the `quantization_config` of a Hugging Face config: which weights are stored how."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from atoll.catalog.dtypes import DTYPES, FP8, INT8, KV_DTYPES, MXFP4, NVFP4, DType, group_bits
from atoll.catalog.fields import ConfigFields
from atoll.core.errors import UnknownNameError

# Where each group of weights lives in a checkpoint, for a layer i.
_MODULES = {
    "attention": (
        "model.layers.{i}.self_attn.q_proj",
        "model.layers.{i}.self_attn.qkv_proj",
        "model.layers.{i}.self_attn.q_a_proj",
    ),
    "mlp": ("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.gate_up_proj"),
    "expert": (
        "model.layers.{i}.mlp.experts.0.gate_proj",
        "model.layers.{i}.block_sparse_moe.experts.0.w1",
        "model.layers.{i}.mlp.experts.gate_up_proj",
    ),
}

_INTEGER_BITS = (2, 3, 4, 8)
_RULE_CHARACTERS = 200
_RULE_CHOICES = 32
# The innermost group without a repeat or a look-ahead: its choices can be written out.
_GROUP = re.compile(r"(?<!\\)\((?:\?:)?([^()?]*)\)(?![*+?{])")
_RULE_PART = re.compile(
    r"(?P<any>(?:\.|\\[dDwWS]|\[0-9\]|\[\^\\?\.\])(?:[*+]|\{[0-9,]*\})\??)"
    r"|\\(?P<escaped>[^A-Za-z0-9])(?![*+?{])"
    r"|(?P<plain>[A-Za-z0-9_./:-])(?![*+?{])"
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """Dtypes that differ from the model's own; None leaves a group as it is."""

    attention: DType | None = None
    mlp: DType | None = None
    expert: DType | None = None
    kv: DType | None = None


def read_quantization(fields: ConfigFields, layers: int) -> Quantization:
    """The dtypes a `quantization_config` asks for; an empty answer where there is none."""
    kv = _kv_dtype(fields.text("kv_cache_dtype"))
    config = fields.section("quantization_config")
    if config is None:
        return Quantization(kv=kv)
    method = config.text("quant_method")
    # Configs of bitsandbytes may leave the method out.
    if method is None and (config.flag("load_in_4bit") or config.flag("load_in_8bit")):
        method = "bitsandbytes"
    known: dict[str, Callable[[ConfigFields], DType | None]] = {
        "mxfp4": lambda _: MXFP4,
        "fp8": _fp8,
        "fbgemm_fp8": lambda _: FP8,
        "awq": _awq,
        "gptq": _gptq,
        "compressed-tensors": _read_compressed,
        "bitsandbytes": _bitsandbytes,
        "modelopt": _modelopt,
        "modelopt_fp4": lambda _: NVFP4,
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
    kept = {group for group in _MODULES if _is_skipped(group, skipped, layers)}
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
    return group_bits("fp8", 8, size, scale_bits=32)


def _awq(config: ConfigFields) -> DType:
    bits = _integer_bits(config, "bits" if config.has("bits") else "w_bit")
    group = config.group("group_size", default=config.group("q_group_size", default=128))
    zero = bits if config.flag("zero_point", default=True) else 0
    return group_bits(f"int{bits}", bits, group, zero_bits=zero)


def _gptq(config: ConfigFields) -> DType:
    bits = _integer_bits(config, "bits")
    # GPTQ stores zero points even when the scheme is symmetric.
    return group_bits(f"int{bits}", bits, config.group("group_size", default=128), zero_bits=bits)


def _integer_bits(config: ConfigFields, name: str) -> int:
    bits = config.whole(name, default=4)
    if bits not in _INTEGER_BITS:
        known = ", ".join(map(str, _INTEGER_BITS))
        raise config.error(
            f"{bits} is not a number of bits per weight", name, hint=f"use one of {known}"
        )
    return bits


def _read_compressed(config: ConfigFields) -> DType | None:
    groups = config.section("config_groups")
    for name in groups.names() if groups is not None else ():
        group = groups.section(name) if groups is not None else None
        weights = None if group is None else group.section("weights")
        if weights is None:
            continue
        bits = weights.whole("num_bits", default=8, max_value=16)
        size = weights.group("group_size", default=None)
        if weights.text("type") == "float":
            # 4-bit floats come with 8-bit scales, for 16 weights (NVFP4) or for 32 (MXFP4).
            known = {(4, 16): NVFP4, (4, 32): MXFP4}.get((bits, size or 0))
            if known is not None:
                return known
            return FP8 if bits == 8 else group_bits(f"fp{bits}", bits, size, scale_bits=8)
        zero = 0 if weights.flag("symmetric", default=True) else bits
        return group_bits(f"int{bits}", bits, size, zero_bits=zero)
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
        return NVFP4
    raise UnknownNameError(
        "ModelOpt algorithm", algorithm, ("FP8", "NVFP4"), field="quantization_config.quant_algo"
    )


def _kv_dtype(name: str | None) -> DType | None:
    if name is None or name in ("auto", "bfloat16", "float16"):
        return None
    known = "fp8" if name.startswith("fp8") else name
    if known not in KV_DTYPES:
        raise UnknownNameError("KV cache dtype", name, ("auto", *KV_DTYPES), field="kv_cache_dtype")
    return DTYPES[known]


def _kv_scheme(config: ConfigFields) -> DType | None:
    scheme = config.section("kv_cache_scheme")
    if scheme is not None and scheme.whole("num_bits", default=16, max_value=16) == 8:
        return FP8 if scheme.text("type") == "float" else INT8
    algorithm = config.text("kv_cache_quant_algo")
    known = (algorithm or "").lower()
    return DTYPES[known] if known in KV_DTYPES else None


def _is_skipped(group: str, patterns: Sequence[str], layers: int) -> bool:
    """Whether the patterns leave out this group in every layer (first, middle and last are asked).

    A pattern for single layers does not count: the answer is then off by those layers.
    """
    sample = {0, layers // 2, layers - 1}
    return all(
        any(
            _matches(pattern, module.format(i=i))
            for module in _MODULES[group]
            for pattern in patterns
        )
        for i in sample
    )


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        if len(pattern) > _RULE_CHARACTERS:
            return False
        return any(rule.matches(module) for rule in _rules(pattern[3:]))
    # Parts of a dotted name, "*" standing for one part or its end; a pattern matches any run of them.
    parts, name = pattern.strip(".").split("."), module.split(".")
    if parts == [""]:
        return False
    return any(
        all(
            p == n or (p.endswith("*") and n.startswith(p[:-1]))
            for p, n in zip(parts, name[start:], strict=False)
        )
        for start in range(len(name) - len(parts) + 1)
    )


@dataclass(frozen=True, slots=True)
class _Rule:
    """Plain texts that a name must hold in this order, from its start on; anything in between."""

    texts: tuple[str, ...]
    to_end: bool

    def matches(self, name: str) -> bool:
        first, *rest = self.texts
        if not name.startswith(first):
            return False
        at = len(first)
        last = rest.pop() if self.to_end and rest else None
        for text in rest:
            place = name.find(text, at)
            if place < 0:
                return False
            at = place + len(text)
        if last is not None:
            # The last text must not overlap what matched before it.
            return len(name) - len(last) >= at and name.endswith(last)
        return not self.to_end or at == len(name)


@lru_cache(maxsize=1024)
def _rules(expression: str) -> tuple[_Rule, ...]:
    r"""A regular expression as the rules it stands for, any of which may match.

    The expression comes with a file from anywhere and is never run: a few characters can keep a
    regular-expression engine busy for years. Understood is what checkpoints use: names, wildcards
    such as `.*` and `\d+`, groups of choices, and the anchors. A dot alone means a dot. What asks
    for more matches nothing.
    """
    rules = (_rule(choice) for choice in _choices(expression))
    return tuple(rule for rule in rules if rule is not None)


def _choices(expression: str) -> list[str]:
    """The expression once for every way to choose from its groups; none if they are too many."""
    done: list[str] = []
    todo = [expression]
    while todo:
        text = todo.pop()
        group = _GROUP.search(text)
        if group is None:
            done += text.split("|")
        else:
            before, after = text[: group.start()], text[group.end() :]
            todo += [f"{before}{choice}{after}" for choice in group[1].split("|")]
        # Choices multiply: a short expression can stand for millions.
        if len(done) + len(todo) > _RULE_CHOICES:
            return []
    return done


def _rule(expression: str) -> _Rule | None:
    body = expression.removeprefix("^")
    to_end = body.endswith("$") and not body.endswith("\\$")
    body = body.removesuffix("$") if to_end else body
    texts, at = [""], 0
    while at < len(body):
        part = _RULE_PART.match(body, at)
        if part is None:
            # What is not understood matches nothing.
            return None
        if part["any"]:
            texts.append("")
        else:
            texts[-1] += part["escaped"] or part["plain"]
        at = part.end()
    return _Rule(tuple(texts), to_end)
