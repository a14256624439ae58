from __future__ import annotations

import re
import time
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.fields import ConfigFields
from atoll.catalog.quantization import _MODULES, Quantization, read_quantization
from atoll.core.errors import InputError, UnknownNameError


def read(quantization: Mapping[str, object] | None, **more: object) -> Quantization:
    return read_quantization(ConfigFields({"quantization_config": quantization, **more}), layers=4)


def bits(quantization: dict[str, object]) -> float:
    dtype = read(quantization).attention
    assert dtype is not None
    return dtype.bits_per_weight


def test_none() -> None:
    assert read(None) == Quantization()


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8"}, 8.0),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
        ({"quant_method": "fbgemm_fp8"}, 8.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}, 4.125),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8.0),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 4 + 1 / 8 + 32 / 16384),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
    ],
)
def test_bits(quantization: dict[str, object], expected: float) -> None:
    assert bits(quantization) == pytest.approx(expected)


def compressed(weights: dict[str, object], **more: object) -> dict[str, object]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, **more}


def test_compressed_tensors() -> None:
    assert bits(compressed({"num_bits": 8, "type": "float"})) == 8.0
    assert bits(compressed({"num_bits": 8, "type": "int", "strategy": "channel"})) == 8.0
    assert bits(compressed({"num_bits": 4, "type": "int", "group_size": 128})) == 4.125
    asymmetric = {"num_bits": 4, "type": "int", "group_size": 64, "symmetric": False}
    assert bits(compressed(asymmetric)) == 4 + 20 / 64
    assert bits(compressed({"num_bits": 4, "type": "float", "group_size": 16})) == 4.5
    activations_only = {"quant_method": "compressed-tensors", "config_groups": {}}
    assert read(activations_only) == Quantization()


def test_left_out_modules() -> None:
    fp8: dict[str, object] = {"quant_method": "fp8"}
    kept = read(fp8 | {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    assert kept.attention is None
    assert kept.mlp is not None
    by_pattern = read(compressed({"num_bits": 8, "type": "float"}, ignore=["re:.*self_attn.*"]))
    assert by_pattern.attention is None
    assert by_pattern.expert is not None
    some_layers = read(fp8 | {"ignored_layers": ["model.layers.0.self_attn.q_proj"]})
    assert some_layers.attention is not None
    router = read(fp8 | {"modules_to_not_convert": ["gate", "lm_head", ""]})
    assert router == read(fp8)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_integer_bits(bits: int) -> None:
    for method, name in (("awq", "bits"), ("awq", "w_bit"), ("gptq", "bits")):
        found = read({"quant_method": method, name: bits, "group_size": -1})
        assert found.attention is not None
        assert found.attention.bits_per_weight == pytest.approx(bits)
        assert found.attention.name == f"int{bits}"


def left_out(*patterns: str, layers: int = 40) -> set[str]:
    """The groups of weights that the patterns keep as they are."""
    fields = ConfigFields(
        {
            "quantization_config": compressed(
                {"num_bits": 8, "type": "float"}, ignore=[f"re:{pattern}" for pattern in patterns]
            )
        }
    )
    found = read_quantization(fields, layers)
    return {name for name in ("attention", "mlp", "expert") if getattr(found, name) is None}


# Patterns of published checkpoints, and close relatives.
EXPRESSIONS = [
    ".*lm_head",
    ".*self_attn",
    ".*self_attn.*",
    "self_attn",
    "^model\\.layers\\.\\d+\\.self_attn.*",
    "model.layers.*.self_attn.*",
    "model.layers.[0-9]+.self_attn.q_proj$",
    ".*self_attn.(q|k|v|o)_proj$",
    ".*self_attn\\.(?:k|v)_proj.*",
    ".*q_proj",
    ".*mlp.gate$",
    ".*mlp\\.gate",
    ".*mlp\\.(gate|up|gate_up|down)_proj.*",
    ".*(self_attn|mlp).*",
    "(.*self_attn.*|.*experts.*)",
    ".*self_attn.*|.*experts.*",
    ".*\\.((self_attn)|(mlp\\.(gate|up)_proj))",
    ".*mlp.experts.*",
    "model\\.layers\\.[^.]+\\.mlp\\.experts\\.\\d+\\..*",
    ".*block_sparse_moe.gate",
    ".*shared_expert_gate$",
    ".*router",
    "vision_model.*",
    "multi_modal_projector.*",
    "model\\.layers\\.0\\..*",
    "model.layers.(0|20|39).mlp.*",
    ".*proj$",
    ".*",
    "model$",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_mean_what_an_engine_makes_of_them(expression: str) -> None:
    layers = 40
    expected = {
        group
        for group, modules in _MODULES.items()
        if all(
            any(re.match(expression, module.format(i=i)) for module in modules)
            for i in (0, layers // 2, layers - 1)
        )
    }
    assert left_out(expression, layers=layers) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "(a+)+$",
        "(.*)*" * 30 + "x",
        "(.*.*.*.*)*x",
        ".*" * 90 + "x$",
        "(m|mo|mod|mode|model)" * 30 + "$",
        "((((((((((a|b)|c)|d)|e)|f)|g)|h)|i)|j)|k)" * 4,
        "(a{1,9999}){1,9999}",
        "(" * 190,
        "(",
        "[",
        "\\",
        "a**",
        "^(?!.*experts).*",
        "(?P<n>.*)(?P=n)",
        "m" * 1_000_000,
    ],
)
def test_an_expression_from_anywhere_is_never_run(
    expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: object) -> None:
        raise AssertionError("a user's expression reached the engine")

    for name in ("compile", "match", "search", "fullmatch"):
        monkeypatch.setattr(re, name, run)
    start = time.process_time()
    assert left_out(expression) == set()
    assert time.process_time() - start < 1.0


@given(st.text("amodel.*+?()|[]{}\\\\^$0-9_self_attn", max_size=60))
def test_any_expression_has_an_answer(expression: str) -> None:
    assert left_out(expression) <= {"attention", "mlp", "expert"}


def test_mxfp4_is_for_experts() -> None:
    found = read({"quant_method": "mxfp4"})
    assert (found.attention, found.mlp) == (None, None)
    assert found.expert is not None
    assert found.expert.name == "mxfp4"


def test_kv_cache() -> None:
    def kv(quantization: dict[str, object] | None, **more: object) -> str | None:
        dtype = read(quantization, **more).kv
        return None if dtype is None else dtype.name

    assert kv(None, kv_cache_dtype="fp8_e4m3") == "fp8"
    assert kv(None, kv_cache_dtype="auto") is None
    assert kv(None, kv_cache_dtype="int8") == "int8"
    scheme = {"num_bits": 8, "type": "float"}
    assert kv(compressed({"num_bits": 8, "type": "float"}, kv_cache_scheme=scheme)) == "fp8"
    assert kv({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}) == "fp8"
    assert kv({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}) == "int8"
    with pytest.raises(UnknownNameError, match="KV cache dtype"):
        kv(None, kv_cache_dtype="int2")


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "awq", "bits": 99},
        {"quant_method": "gptq", "group_size": 0},
        {"quant_method": "gptq", "group_size": "big"},
        {"quant_method": 4},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "fp8", "modules_to_not_convert": "lm_head"},
        {"quant_method": "compressed-tensors", "config_groups": []},
        {"quant_method": "awq", "bits": 5},
        {"quant_method": "awq", "w_bit": 16},
        {"quant_method": "awq", "bits": 0},
        {"quant_method": "gptq", "bits": 1},
        {"quant_method": "gptq", "bits": 6},
        {"quant_method": "gptq", "bits": "4"},
    ],
)
def test_bad_values(quantization: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"quantization_config\."):
        read(quantization)


def float4(group: int) -> dict[str, object]:
    weights = {"num_bits": 4, "type": "float", "group_size": group}
    return {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}}


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt_fp4"}, "nvfp4"),
        (float4(16), "nvfp4"),
        (float4(32), "mxfp4"),
        (float4(64), "fp4"),
    ],
)
def test_four_bit_floats_go_by_their_groups(quantization: dict[str, object], name: str) -> None:
    found = read(quantization).expert
    assert found is not None
    assert found.name == name


def test_attention_left_wide_layer_by_layer_with_a_star_at_the_end() -> None:
    """As ModelOpt writes it for DeepSeek-R1: experts in NVFP4, attention as it was."""
    left = ["lm_head", *(f"model.layers.{i}.self_attn*" for i in range(4))]
    found = read({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": left})
    assert found.attention is None
    assert found.expert is not None
    fewer = read({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": left[:-1]})
    assert fewer.attention is not None
    assert read({"quant_method": "modelopt_fp4", "ignore": ["model.layers.*.mlp*"]}).expert is None
