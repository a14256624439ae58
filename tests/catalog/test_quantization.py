from __future__ import annotations

from collections.abc import Mapping

import pytest

from atoll.catalog.fields import ConfigFields
from atoll.catalog.quantization import Quantization, read_quantization
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
        compressed({"num_bits": 8, "type": "float"}, ignore=["re:("]),
    ],
)
def test_bad_values(quantization: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"quantization_config\."):
        read(quantization)
