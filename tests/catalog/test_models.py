"""The shapes must reproduce the parameter and byte counts computed elsewhere, exactly."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from atoll.catalog.catalog import Catalog
from atoll.catalog.media import EncoderSpec, GeneratorSpec
from atoll.catalog.models import ModelSpec, default_models
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import InputError, UnknownNameError

REFERENCE = Path(__file__).resolve().parents[3] / "shared/data/reference/model_configs.json"

# name: (total, active, bytes of weights, KV bytes per token in 16 bit)
EXPECTED: dict[str, tuple[int, int, int, int]] = {
    "phi-4-14b": (14659507200, 14659507200, 29319014400, 204800),
    "gpt-oss-20b": (20914757184, 4187440704, 13761264768, 49152),
    "gpt-oss-120b": (116829156672, 5711982912, 65248815744, 73728),
    "qwen3-32b": (32762123264, 32762123264, 65524246528, 262144),
    "qwen3-235b-a22b": (235093634560, 22190763520, 470187269120, 192512),
    "llama-3-70b": (70553706496, 70553706496, 141107412992, 327680),
    "llama-3.1-8b": (8030261248, 8030261248, 16060522496, 131072),
    "llama-3.2-1b": (1235814400, 1235814400, 2471628800, 32768),
    "llama-3.2-3b": (3212749824, 3212749824, 6425499648, 114688),
    "llama-2-13b": (13015864320, 13015864320, 26031728640, 819200),
    "llama-2-70b": (68976648192, 68976648192, 137953296384, 327680),
    "llama-1-30b": (32528943616, 32528943616, 65057887232, 1597440),
    "codellama-34b": (33743970304, 33743970304, 67487940608, 196608),
    "qwen2.5-vl-7b": (8292166656, 8292166656, 16584333312, 57344),
    "qwen2.5-vl-32b": (33452718336, 33452718336, 66905436672, 262144),
    "internvl3-38b": (38388164992, 38388164992, 76776329984, 262144),
    "smollm2-135m": (134515008, 134515008, 269030016, 23040),
}
# name: (language model, vision encoder)
PARTS: dict[str, tuple[int, int | None]] = {
    "qwen2.5-vl-7b": (7615616512, 676550144),
    "qwen2.5-vl-32b": (32763876352, 688841984),
    "internvl3-38b": (32759882752, 5628282240),
    "qwen2.5-omni-7b": (7615616512, 676550144),
    "qwen3-omni-30b": (30532646912, None),
}
EXPERTS = {
    "gpt-oss-20b": 19116933120,
    "gpt-oss-120b": 114701598720,
    "qwen3-235b-a22b": 227096395776,
    "qwen3-omni-30b": 28991029248,
}


def expert_params(llm: TransformerSpec) -> int:
    assert llm.moe is not None
    layers = sum(llm.is_moe_layer(i) for i in range(llm.layers))
    return layers * llm.moe.experts * llm.expert_params


@pytest.mark.parametrize("name", EXPECTED)
def test_counts_are_exact(name: str) -> None:
    total, active, weight_bytes, kv_bytes = EXPECTED[name]
    model = Catalog.default().model(name)
    assert model.total_params == total
    assert model.active_params == active
    assert model.weight_bytes == weight_bytes
    assert model.llm.kv_bytes_per_token == kv_bytes


@pytest.mark.parametrize("name", sorted(default_models()))
def test_every_reference_total_is_reproduced(name: str) -> None:
    model = Catalog.default().model(name)
    for key, found in (
        ("params_total", model.total_params),
        ("params_active", model.active_params),
        ("weight_bytes_native", model.weight_bytes),
        ("params_experts", expert_params(model.llm) if model.has_llm and model.llm.moe else None),
    ):
        fact = model.facts.get(f"reference.{key}")
        assert fact is None or fact.value == found, key


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_exact(name: str) -> None:
    language, vision = PARTS[name]
    model = Catalog.default().model(name)
    assert model.llm.total_params == language
    encoder = model.components["vision"]
    assert isinstance(encoder, EncoderSpec)
    assert encoder.total_params == vision


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_exact(name: str) -> None:
    assert expert_params(Catalog.default().model(name).llm) == EXPERTS[name]


def test_qwen3_omni_active_language_params() -> None:
    assert Catalog.default().model("qwen3-omni-30b").llm.active_params == 3353556992


def expert_biases(llm: TransformerSpec) -> int:
    """Biases of all routed experts; only gpt-oss has any."""
    if llm.moe is None or not llm.mlp_bias:
        return 0
    return llm.layers * llm.moe.experts * (2 * llm.moe.intermediate + llm.hidden)


def reference_models() -> dict[str, dict[str, object]]:
    if not REFERENCE.exists():
        pytest.skip("needs ../shared/data/reference/model_configs.json beside the repository")
    models: dict[str, dict[str, object]] = json.loads(REFERENCE.read_text())["models"]
    return models


def test_every_model_of_the_reference_is_here_with_its_numbers() -> None:
    """Compare with the data file itself, where a checkout has it."""
    catalog = Catalog.default()
    reference = reference_models()
    assert len(reference) == 20
    for display, entry in reference.items():
        model = catalog.model(display)
        # The reference names base models, also where chat models are their instruct versions.
        assert catalog.model(str(entry["hf_id"]).split()[0]) == model
        assert entry["arch"] == model.architecture
        for key, found in (
            ("params_total", model.total_params),
            ("params_active", model.active_params),
            ("weight_bytes_native", model.weight_bytes),
            ("params_language", model.llm.total_params if model.has_llm else None),
        ):
            known = entry.get(key)
            if isinstance(known, int):
                # It counts biases of experts at the experts' 4.25 bits; checkpoints have them in 16.
                biases = expert_biases(model.llm) if key == "weight_bytes_native" else 0
                assert found == known + biases * (16 - 4.25) / 8, (display, key)
        if isinstance(entry.get("params_experts"), int):
            assert expert_params(model.llm) == entry["params_experts"]


def test_every_shape_of_the_reference_is_taken_over() -> None:
    names = {
        "num_hidden_layers": "layers",
        "hidden_size": "hidden",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "intermediate",
        "vocab_size": "vocab",
        "max_position_embeddings": "max_context",
        "tie_word_embeddings": "tied_embeddings",
        "qkv_bias": "qkv_bias",
        "qk_norm": "qk_norm",
        "attention_sinks": "sinks",
        "kv_bytes_per_token_per_layer_16bit": "kv_bytes_per_token_layer",
    }
    for display, entry in reference_models().items():
        text = entry.get("text")
        if not isinstance(text, dict):
            continue
        llm = Catalog.default().model(display).llm
        for key, attribute in names.items():
            if key in text:
                assert getattr(llm, attribute) == text[key], (display, key)


def test_gpt_oss_slides_on_even_layers() -> None:
    llm = Catalog.default().model("gpt-oss-120b").llm
    assert llm.windows == tuple(128 if i % 2 == 0 else None for i in range(36))
    assert llm.kv_tokens(0, 4096) == 128
    assert llm.kv_tokens(1, 4096) == 4096
    assert llm.kv_tokens(0, 100) == 100
    assert llm.expert_dtype.name == "mxfp4"
    assert llm.attention_dtype.name == "bf16"


def test_any_to_any_graphs() -> None:
    omni = Catalog.default().model("qwen2.5-omni-7b")
    assert [c.name for c in omni.graph.topological_order()] == [
        "vision",
        "audio",
        "llm",
        "talker",
        "vocoder",
    ]
    image = Catalog.default().model("qwen-image")
    assert not image.has_llm
    dit = image.components["dit"]
    assert isinstance(dit, GeneratorSpec)
    assert dit.params == 20430401088
    assert dit.weight_bytes == 40860802176
    with pytest.raises(InputError, match="qwen-image has no llm"):
        _ = image.llm


def test_what_is_not_public_stays_unknown() -> None:
    omni = Catalog.default().model("qwen2.5-omni-7b")
    assert omni.total_params is None
    assert omni.weight_bytes is None
    talker = omni.components["talker"]
    assert isinstance(talker, GeneratorSpec)
    assert talker.params is None
    assert "params" in talker.unknown
    assert omni.facts["talker.heads"].confidence == "low"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("Qwen-3 32B", "qwen3-32b"),
        ("GPT-OSS 20B", "gpt-oss-20b"),
        ("Llama-3 70B", "llama-3-70b"),
        ("phi-4", "phi-4-14b"),
        ("Phi4-14B", "phi-4-14b"),
        ("LLaMA-1 30B", "llama-1-30b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
    ],
)
def test_names_people_use(spelling: str, name: str) -> None:
    assert Catalog.default().model(spelling).name == name


def test_unknown_model_suggests() -> None:
    with pytest.raises(UnknownNameError, match="did you mean qwen3-32b"):
        Catalog.default().model("qwen3-33b")


class TestVariants:
    def test_fp8_weights_keep_embedding_and_head(self) -> None:
        catalog = Catalog.default()
        wide, narrow = catalog.model("llama-3-70b").llm, catalog.model("llama-3-70b@fp8").llm
        assert narrow.embedding_bytes == wide.embedding_bytes
        norms = 80 * 2 * 8192 * 2
        assert narrow.range_weight_bytes(0, 80) - norms == (
            (wide.range_weight_bytes(0, 80) - norms) / 2
        )
        assert narrow.kv_bytes_per_token == wide.kv_bytes_per_token
        assert narrow.total_params == wide.total_params

    def test_kv_variant(self) -> None:
        catalog = Catalog.default()
        model = catalog.model("Llama-3-70B@fp8,kv=fp8")
        assert model.name == "llama-3-70b@fp8,kv=fp8"
        assert model.llm.kv_bytes_per_token == 327680 / 2
        assert catalog.model("llama-3-70b@kv=fp8").llm.attention_dtype.name == "bf16"

    def test_variant_equals_the_methods(self) -> None:
        catalog = Catalog.default()
        by_name = catalog.model("qwen3-32b@int4,kv=fp8").llm
        assert by_name == catalog.model("qwen3-32b").llm.with_weights("int4").with_kv_dtype("fp8")

    def test_int4_bits(self) -> None:
        llm = Catalog.default().model("qwen3-32b").llm.with_weights("int4")
        assert llm.attention_dtype.bits_per_weight == 4 + (16 + 4) / 128

    def test_variants_drop_the_native_bytes(self) -> None:
        model = Catalog.default().model("gpt-oss-20b@fp8")
        assert "reference.weight_bytes_native" not in model.facts
        assert model.facts["llm.expert_dtype"].value == "fp8"

    @pytest.mark.parametrize("name", ["llama-3-70b@", "llama-3-70b@fp7", "llama-3-70b@kv=int4"])
    def test_unknown_dtype(self, name: str) -> None:
        with pytest.raises(UnknownNameError, match="dtype"):
            Catalog.default().model(name)

    def test_unknown_variant(self) -> None:
        with pytest.raises(InputError, match="no variant"):
            Catalog.default().model("llama-3-70b@tp=2")

    def test_no_llm_no_variant(self) -> None:
        with pytest.raises(InputError, match="no llm"):
            Catalog.default().model("qwen-image@fp8")


def test_models_are_hashable_and_picklable() -> None:
    models = default_models()
    assert len(set(models.values())) == len(models) >= 44
    assert pickle.loads(pickle.dumps(models)) == models


def test_graph_and_shapes_must_agree() -> None:
    model = Catalog.default().model("llama-3.1-8b")
    with pytest.raises(InputError, match="the graph names"):
        ModelSpec(
            name="x",
            aliases=(),
            hf_id=None,
            architecture="x",
            graph=model.graph,
            components={"other": model.llm},
        )
