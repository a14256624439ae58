"""Configs as published on Hugging Face, with the parameter totals their checkpoints have."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.catalog.hf_config import model_from_config, supported_architectures
from atoll.catalog.models import EncoderSpec, ModelSpec
from atoll.core.errors import AtollError, InputError, UnknownNameError
from tests.seeds import examples

Config = dict[str, object]


def config(
    architecture: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
    context: int,
    **more: object,
) -> Config:
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "torch_dtype": "bfloat16",
        **more,
    }


GPT_OSS_20B = config(
    "GptOssForCausalLM",
    24,
    2880,
    64,
    8,
    2880,
    201088,
    131072,
    attention_bias=True,
    head_dim=64,
    layer_types=["sliding_attention", "full_attention"] * 12,
    num_experts_per_tok=4,
    num_local_experts=32,
    sliding_window=128,
    tie_word_embeddings=False,
    quantization_config={
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
)
QWEN25_VL_7B = config(
    "Qwen2_5_VLForConditionalGeneration",
    28,
    3584,
    28,
    4,
    18944,
    152064,
    128000,
    sliding_window=32768,
    use_sliding_window=False,
    tie_word_embeddings=False,
    vision_config={
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
)
MLA: Config = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
}
LLAMA4: Config = {
    "num_hidden_layers": 48,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
    "no_rope_layers": [],
    "vocab_size": 202048,
    "max_position_embeddings": 1048576,
    "torch_dtype": "bfloat16",
}
# name: (config, published number of parameters)
PUBLISHED: dict[str, tuple[Config, int]] = {
    "Llama-3.1-8B": (
        config("LlamaForCausalLM", 32, 4096, 32, 8, 14336, 128256, 131072, mlp_bias=False),
        8030261248,
    ),
    "Llama-3.2-1B": (
        config("LlamaForCausalLM", 16, 2048, 32, 8, 8192, 128256, 131072, tie_word_embeddings=True),
        1235814400,
    ),
    "Mistral-7B-v0.1": (
        config("MistralForCausalLM", 32, 4096, 32, 8, 14336, 32000, 32768, sliding_window=4096),
        7241732096,
    ),
    "Mixtral-8x7B-v0.1": (
        config(
            "MixtralForCausalLM",
            32,
            4096,
            32,
            8,
            14336,
            32000,
            32768,
            sliding_window=None,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        46702792704,
    ),
    "Qwen2.5-7B": (
        config(
            "Qwen2ForCausalLM",
            28,
            3584,
            28,
            4,
            18944,
            152064,
            131072,
            sliding_window=131072,
            use_sliding_window=False,
            max_window_layers=28,
        ),
        7615616512,
    ),
    "Qwen2.5-0.5B": (
        config("Qwen2ForCausalLM", 24, 896, 14, 2, 4864, 151936, 32768, tie_word_embeddings=True),
        494032768,
    ),
    "Qwen1.5-MoE-A2.7B": (
        config(
            "Qwen2MoeForCausalLM",
            24,
            2048,
            16,
            16,
            5632,
            151936,
            8192,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            decoder_sparse_step=1,
        ),
        14315784192,
    ),
    "Qwen2.5-VL-7B": (QWEN25_VL_7B, 8292166656),
    "Qwen3-8B": (
        config("Qwen3ForCausalLM", 36, 4096, 32, 8, 12288, 151936, 40960, head_dim=128),
        8190735360,
    ),
    "Qwen3-30B-A3B": (
        config(
            "Qwen3MoeForCausalLM",
            48,
            2048,
            32,
            4,
            6144,
            151936,
            40960,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            mlp_only_layers=[],
        ),
        30532122624,
    ),
    "Phi-4": (
        config("Phi3ForCausalLM", 40, 5120, 40, 10, 17920, 100352, 16384, sliding_window=None),
        14659507200,
    ),
    "Phi-3-mini-4k": (
        config("Phi3ForCausalLM", 32, 3072, 32, 32, 8192, 32064, 4096, sliding_window=2047),
        3821079552,
    ),
    "Gemma-7B": (
        config("GemmaForCausalLM", 28, 3072, 16, 16, 24576, 256000, 8192, head_dim=256),
        8537680896,
    ),
    "Gemma-2-9B": (
        config(
            "Gemma2ForCausalLM",
            42,
            3584,
            16,
            8,
            14336,
            256000,
            8192,
            head_dim=256,
            sliding_window=4096,
        ),
        9241705984,
    ),
    "Gemma-3-1B": (
        config(
            "Gemma3ForCausalLM",
            26,
            1152,
            4,
            1,
            6912,
            262144,
            32768,
            head_dim=256,
            sliding_window=512,
            sliding_window_pattern=6,
        ),
        999885952,
    ),
    "gpt-oss-20b": (GPT_OSS_20B, 20914757184),
    "granite-3.1-8b": (
        config(
            "GraniteForCausalLM", 40, 4096, 32, 8, 12800, 49155, 131072, tie_word_embeddings=True
        ),
        8170848256,
    ),
    "OLMo-2-1124-7B": (
        config("Olmo2ForCausalLM", 32, 4096, 32, 32, 11008, 100352, 4096),
        7298617344,
    ),
    "starcoder2-7b": (
        config("Starcoder2ForCausalLM", 32, 4608, 36, 4, 18432, 49152, 16384, sliding_window=4096),
        7173923840,
    ),
    "DeepSeek-V2-Lite": (
        config(
            "DeepseekV2ForCausalLM", 27, 2048, 16, 16, 10944, 102400, 163840,
            q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
            v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
            moe_intermediate_size=1408, first_k_dense_replace=1, topk_method="greedy",
        ),
        15706484224,
    ),
    "DeepSeek-V3": (
        config(
            "DeepseekV3ForCausalLM", 61, 7168, 128, 128, 18432, 129280, 163840, **MLA,
            n_routed_experts=256, first_k_dense_replace=3,
            quantization_config={
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            },
        ),
        671026419200,
    ),
    "GLM-4.5-Air": (
        config(
            "Glm4MoeForCausalLM", 46, 4096, 96, 8, 10944, 151552, 131072, head_dim=128,
            attention_bias=True, use_qk_norm=False, moe_intermediate_size=1408,
            n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8,
            first_k_dense_replace=1,
        ),
        106852251264,
    ),
    # Of the checkpoint's 108,641,793,536 the vision tower and its projector are 871,932,416.
    "Llama-4-Scout": (
        {
            "architectures": ["Llama4ForConditionalGeneration"],
            "text_config": LLAMA4 | {"num_local_experts": 16, "interleave_moe_layer_step": 1},
            "vision_config": {"hidden_size": 1408},
        },
        108641793536 - 871932416,
    ),
    # The same tower: 401,583,781,376 in all.
    "Llama-4-Maverick": (
        {"architectures": ["Llama4ForCausalLM"]}
        | LLAMA4
        | {"num_local_experts": 128, "interleave_moe_layer_step": 2},
        401583781376 - 871932416,
    ),
    "Qwen3-Next-80B-A3B": (
        config(
            "Qwen3NextForCausalLM", 48, 2048, 16, 2, 5120, 151936, 262144, head_dim=256,
            num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
            shared_expert_intermediate_size=512, full_attention_interval=4,
            linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16,
            linear_num_value_heads=32, linear_value_head_dim=128, decoder_sparse_step=1,
        ),
        79674391296,
    ),
    # The published text section leaves out what the class has by default. Of the checkpoint's
    # 4,300,079,472 the vision tower and its projector are 419,816,304.
    "Gemma-3-4B": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                "num_hidden_layers": 34, "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
        },
        4300079472 - 419816304,
    ),
    "Mistral-Small-3.1-24B": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": {
                "num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 32,
                "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 32768,
                "vocab_size": 131072, "max_position_embeddings": 131072, "sliding_window": None,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1024, "num_hidden_layers": 24},
        },
        23572403200,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_totals(name: str) -> None:
    given_config, total = PUBLISHED[name]
    assert model_from_config(given_config).total_params == total


def test_every_supported_architecture_is_tested() -> None:
    tested = {str(entry["architectures"]) for entry, _ in PUBLISHED.values()}
    assert tested == {str([name]) for name in supported_architectures()}


def windows(name: str) -> list[int | None]:
    return list(model_from_config(PUBLISHED[name][0]).llm.windows)


def test_windows() -> None:
    assert windows("Llama-3.1-8B") == [None] * 32
    assert windows("Mistral-7B-v0.1") == [4096] * 32
    assert windows("Qwen2.5-7B") == [None] * 28
    assert windows("Phi-3-mini-4k") == [2047] * 32
    assert windows("Gemma-2-9B") == [4096, None] * 21
    assert windows("Gemma-3-1B") == [None if (i + 1) % 6 == 0 else 512 for i in range(26)]
    assert windows("gpt-oss-20b") == [128, None] * 12
    assert windows("Gemma-3-4B") == [None if (i + 1) % 6 == 0 else 1024 for i in range(34)]
    assert windows("Llama-4-Scout") == [8192, 8192, 8192, None] * 12
    assert windows("Qwen3-Next-80B-A3B") == [0, 0, 0, None] * 12
    assert windows("DeepSeek-V3") == [None] * 61


def test_the_kinds_of_layers_may_be_listed() -> None:
    given_config = PUBLISHED["Llama-4-Maverick"][0]
    kinds = ["chunked_attention"] * 3 + ["full_attention"]
    listed = model_from_config(given_config | {"layer_types": kinds * 12})
    assert listed.llm == model_from_config(given_config).llm
    given_config = PUBLISHED["Qwen3-Next-80B-A3B"][0]
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    listed = model_from_config(given_config | {"layer_types": kinds * 12})
    assert listed.llm == model_from_config(given_config).llm
    full = model_from_config(given_config | {"layer_types": ["full_attention"] * 48})
    assert full.llm.delta is None


def test_no_rope_layers_must_cover_the_layers() -> None:
    with pytest.raises(InputError, match="2 entries for 48 layers"):
        model_from_config(PUBLISHED["Llama-4-Maverick"][0] | {"no_rope_layers": [1, 0]})


def test_only_the_language_model_of_a_multimodal_class_is_read() -> None:
    model = model_from_config(PUBLISHED["Gemma-3-4B"][0])
    assert [component.name for component in model.graph.components] == ["llm"]
    assert model.note is not None
    assert "vision tower beside it is not counted" in model.note
    assert model_from_config(PUBLISHED["Llama-4-Maverick"][0]).note is None


def test_shared_experts_and_dense_layers() -> None:
    maverick = model_from_config(PUBLISHED["Llama-4-Maverick"][0]).llm.moe
    assert maverick is not None
    assert maverick.dense_layers == frozenset(range(0, 48, 2))
    lite = model_from_config(PUBLISHED["DeepSeek-V2-Lite"][0]).llm
    assert lite.moe is not None
    assert (lite.moe.shared_intermediate, lite.moe.router_bias) == (2816, False)
    assert lite.moe.dense_layers == frozenset({0})
    dense = PUBLISHED["DeepSeek-V3"][0] | {"n_routed_experts": None}
    assert model_from_config(dense).llm.moe is None


def test_qwen_windows_start_at_max_window_layers() -> None:
    changed = PUBLISHED["Qwen2.5-7B"][0] | {"use_sliding_window": True, "max_window_layers": 20}
    assert list(model_from_config(changed).llm.windows) == [None] * 20 + [131072] * 8


def test_gpt_oss_equals_the_catalog() -> None:
    assert model_from_config(GPT_OSS_20B).llm == Catalog.default().model("gpt-oss-20b").llm


def test_vision_language_equals_the_catalog() -> None:
    model, known = model_from_config(QWEN25_VL_7B), Catalog.default().model("qwen2.5-vl-7b")
    assert model.components == known.components
    assert model.graph == known.graph
    assert isinstance(model.components["vision"], EncoderSpec)


def test_vision_language_with_a_text_section() -> None:
    text = {k: v for k, v in QWEN25_VL_7B.items() if k not in ("architectures", "vision_config")}
    nested = {
        "architectures": QWEN25_VL_7B["architectures"],
        "text_config": text,
        "vision_config": QWEN25_VL_7B["vision_config"],
    }
    assert model_from_config(nested).total_params == 8292166656


def test_every_second_layer_dense() -> None:
    sparse = PUBLISHED["Qwen3-30B-A3B"][0] | {"decoder_sparse_step": 2}
    moe = model_from_config(sparse).llm.moe
    assert moe is not None
    assert moe.dense_layers == frozenset(range(0, 48, 2))
    dense = PUBLISHED["Qwen3-30B-A3B"][0] | {"mlp_only_layers": list(range(48))}
    assert model_from_config(dense).llm.moe is None


class TestFiles:
    def write(self, folder: Path, data: object) -> Path:
        folder.mkdir(exist_ok=True)
        path = folder / "config.json"
        path.write_text(json.dumps(data) if not isinstance(data, str) else data)
        return path

    def test_file_and_folder(self, tmp_path: Path) -> None:
        folder = tmp_path / "My-Model"
        path = self.write(folder, PUBLISHED["Llama-3.1-8B"][0])
        assert model_from_config(path).name == "My-Model"
        assert model_from_config(folder).llm == model_from_config(path, "x/y").llm
        assert model_from_config(str(folder), name="mine").name == "mine"

    def test_a_folder_name_that_is_no_name(self, tmp_path: Path) -> None:
        folder = tmp_path / "my model (1)"
        self.write(folder, PUBLISHED["Llama-3.1-8B"][0])
        assert model_from_config(folder).name == "llama"

    def test_a_bad_name(self) -> None:
        with pytest.raises(InputError, match="not a valid name"):
            model_from_config(PUBLISHED["Llama-3.1-8B"][0], name="no good")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "not valid JSON"),
            ("[]", "must be a mapping"),
            ('{"a": NaN}', "NaN is not a JSON number"),
            ('{"hidden_size": 1, "hidden_size": 2}', "hidden_size: this key is given twice"),
            ('{"hidden_size": ' + "1" * 5000 + "}", "not valid JSON"),
            ('{"a": ' + "[" * 100_000, "not valid JSON"),
        ],
    )
    def test_bad_files(self, tmp_path: Path, text: str, message: str) -> None:
        path = self.write(tmp_path, text)
        with pytest.raises(InputError, match=message) as caught:
            model_from_config(path)
        assert caught.value.path == str(path)
        assert "\n" not in str(caught.value)

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="cannot read the file"):
            model_from_config(tmp_path / "nothing.json")

    def test_errors_name_file_and_field(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, PUBLISHED["Llama-3.1-8B"][0] | {"hidden_size": "big"})
        with pytest.raises(InputError) as caught:
            model_from_config(path)
        assert str(caught.value).startswith(f"{path}: hidden_size: 'big' is not a whole number")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers: this field is required"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is not a whole number"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers"),
        ({"num_attention_heads": 31}, "do not divide"),
        ({"num_key_value_heads": 5}, "kv_heads: 32 heads cannot share 5"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": 10**400}, "a huge number is not a whole number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"layer_types": ["full_attention"]}, "1 entries for 32 layers"),
        ({"layer_types": ["mamba"] * 32}, "unknown kind 'mamba'"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window: this field is required"),
        ({"architectures": None}, "architectures: this field is required"),
        ({"architectures": "LlamaForCausalLM"}, "not a list of texts"),
        ({"torch_dtype": 16}, "torch_dtype"),
    ],
)
def test_bad_fields(changes: Config, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model_from_config(PUBLISHED["Llama-3.1-8B"][0] | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalML"]}, "did you mean LlamaForCausalLM"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "unknown architecture"),
        ({"architectures": None, "model_type": "mamba"}, "unknown model type"),
        ({"torch_dtype": "float17"}, "unknown torch dtype"),
        ({"kv_cache_dtype": "int2"}, "unknown KV cache dtype"),
        ({"quantization_config": {"quant_method": "magic"}}, "unknown quantisation method"),
    ],
)
def test_unknown_names(changes: Config, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message) as caught:
        model_from_config(PUBLISHED["Llama-3.1-8B"][0] | changes)
    assert " more" not in str(caught.value)  # the list is whole


def test_the_model_type_stands_in_for_the_architecture() -> None:
    named = PUBLISHED["Qwen3-8B"][0] | {"architectures": None, "model_type": "qwen3"}
    assert model_from_config(named).architecture == "Qwen3ForCausalLM"


def test_dtype_may_carry_its_module() -> None:
    half = PUBLISHED["Llama-3.1-8B"][0] | {"torch_dtype": "torch.float16"}
    assert model_from_config(half).llm.activation_dtype.name == "fp16"


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["fp8", "sliding_attention", "re:(", "re:.*", "awq", "bitsandbytes", "int8"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["quant_method", "bits", "group_size", "ignore", "weights", "num_bits"])
            | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
KEYS = sorted(
    {"kv_cache_dtype", "text_config", "dtype", "model_type", "use_bias"}.union(
        *(entry for entry, _ in PUBLISHED.values())
    )
)


def outcome(candidate: Config) -> ModelSpec | AtollError:
    """The model, or the error that explains why there is none; anything else fails the test."""
    try:
        return model_from_config(candidate)
    except AtollError as error:
        return error


@examples(200)
@given(
    name=st.sampled_from(sorted(PUBLISHED)),
    drop=st.sets(st.sampled_from(KEYS), max_size=3),
    put=st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=3),
)
def test_mutilated_configs_give_a_model_or_a_clear_error(
    name: str, drop: set[str], put: Config
) -> None:
    broken = copy.deepcopy(PUBLISHED[name][0])
    for key in drop:
        broken.pop(key, None)
    broken |= put
    found = outcome(broken)
    if isinstance(found, ModelSpec):
        assert found.llm.total_params > 0
    else:
        assert "\n" not in str(found)


@examples(75)
@given(junk=st.dictionaries(st.sampled_from([*KEYS, "quant_method"]), JUNK, max_size=8))
def test_junk_is_refused_in_one_line(junk: Config) -> None:
    quantised = PUBLISHED["Mixtral-8x7B-v0.1"][0] | {"quantization_config": junk}
    for candidate in (junk, quantised):
        assert "\n" not in str(outcome(candidate))
