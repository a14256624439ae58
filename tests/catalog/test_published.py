"""The models people ask for, against the figures their makers publish.

Parameters: the rounded figures of model cards and reports (`within` is how far rounding and layers that only
predict further tokens may take them). KV bytes per token: the published figure where there is one, else
2 x layers x KV heads x head width x 2 bytes by hand; a layer counts where it keeps keys and values.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from atoll.catalog.catalog import Catalog
from atoll.catalog.transformer import DeltaSpec, MlaSpec, TransformerSpec
from atoll.core.errors import InputError


class Figures(NamedTuple):
    """Billions of parameters in all and per token, KV bytes of a token, and who says so."""

    total: float
    active: float
    kv: int
    source: str
    within: float = 0.02


PUBLISHED = {
    "deepseek-v3": Figures(
        671,
        37,
        70272,
        "DeepSeek-V3 report; 'Insights into DeepSeek-V3' (ISCA'25) table 1: 70.272 KB",
    ),
    "llama-3.1-405b": Figures(405, 405, 516096, "Llama 3 report; the same table: 516.096 KB"),
    "kimi-k2": Figures(1000, 32, 61 * (512 + 64) * 2, "model card of Kimi-K2-Instruct", 0.03),
    "glm-4.5": Figures(355, 32, 92 * 2 * 8 * 128 * 2, "GLM-4.5 report", 0.06),
    "glm-4.5-air": Figures(106, 12, 46 * 2 * 8 * 128 * 2, "GLM-4.5 report", 0.13),
    "llama-3.1-70b": Figures(70.6, 70.6, 80 * 2 * 8 * 128 * 2, "model card of Llama-3.1-70B"),
    "llama-3.3-70b": Figures(70.6, 70.6, 80 * 2 * 8 * 128 * 2, "model card of Llama-3.3-70B"),
    "llama-4-scout": Figures(109, 17, 48 * 2 * 8 * 128 * 2, "model card, with the vision tower"),
    "llama-4-maverick": Figures(400, 17, 48 * 2 * 8 * 128 * 2, "model card of Llama-4-Maverick"),
    "qwen3-0.6b": Figures(0.6, 0.6, 28 * 2 * 8 * 128 * 2, "Qwen3 report"),
    "qwen3-1.7b": Figures(1.7, 1.7, 28 * 2 * 8 * 128 * 2, "Qwen3 report"),
    "qwen3-4b": Figures(4.0, 4.0, 36 * 2 * 8 * 128 * 2, "Qwen3 report"),
    "qwen3-8b": Figures(8.2, 8.2, 36 * 2 * 8 * 128 * 2, "Qwen3 report"),
    "qwen3-14b": Figures(14.8, 14.8, 40 * 2 * 8 * 128 * 2, "Qwen3 report"),
    "qwen3-32b": Figures(32.8, 32.8, 64 * 2 * 8 * 128 * 2, "Qwen3 report"),
    "qwen3-30b-a3b": Figures(30.5, 3.3, 48 * 2 * 4 * 128 * 2, "model card of Qwen3-30B-A3B"),
    "qwen3-235b-a22b": Figures(235, 22, 94 * 2 * 4 * 128 * 2, "model card of Qwen3-235B-A22B"),
    "qwen3-coder-480b-a35b": Figures(480, 35, 62 * 2 * 8 * 128 * 2, "model card", 0.02),
    # Active parameters are published as 3B, without the two embedding tables (0.6B).
    "qwen3-next-80b-a3b": Figures(80, 3.0 + 0.62, 12 * 2 * 2 * 256 * 2, "model card", 0.08),
    "gemma-3-1b": Figures(1.0, 1.0, 26 * 2 * 1 * 256 * 2, "Gemma 3 report"),
    # Table 1 of the report: embedding 675M and 3,209M beside it; likewise below.
    "gemma-3-4b": Figures(3.884, 3.884, 34 * 2 * 4 * 256 * 2, "Gemma 3 report"),
    "gemma-3-12b": Figures(11.771, 11.771, 48 * 2 * 8 * 256 * 2, "Gemma 3 report"),
    "gemma-3-27b": Figures(27.018, 27.018, 62 * 2 * 16 * 128 * 2, "Gemma 3 report"),
    "mistral-small-24b": Figures(23.6, 23.6, 40 * 2 * 8 * 128 * 2, "model card, safetensors total"),
    "mistral-large-123b": Figures(123, 123, 88 * 2 * 8 * 128 * 2, "model card of Mistral Large 2"),
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_and_kv_are_what_is_published(name: str) -> None:
    model, figures = Catalog.default().model(name), PUBLISHED[name]
    assert model.llm.total_params / 1e9 == pytest.approx(figures.total, rel=figures.within)
    assert model.llm.active_params / 1e9 == pytest.approx(figures.active, rel=figures.within)
    assert model.llm.kv_bytes_per_token == figures.kv


def test_long_context_is_what_the_models_were_released_with() -> None:
    catalog = Catalog.default()
    for name in ("llama-3.1-70b", "llama-3.3-70b", "mistral-large-123b", "gemma-3-27b"):
        assert catalog.model(name).llm.max_context == 131072
    assert catalog.model("llama-3-70b").llm.max_context == 8192
    assert catalog.model("llama-4-scout").llm.max_context == 10 * 2**20


def test_the_ids_of_releases_with_the_same_shapes_lead_to_one_model() -> None:
    catalog = Catalog.default()
    for name in ("deepseek-r1", "deepseek-ai/DeepSeek-R1-0528", "deepseek-ai/DeepSeek-V3.1"):
        assert catalog.model(name).name == "deepseek-v3"
    assert catalog.model("meta-llama/Llama-3.3-70B-Instruct").name == "llama-3.3-70b"


def test_nvfp4_weights_are_four_bits_and_a_scale_for_sixteen() -> None:
    llama = Catalog.default().model("llama-3.3-70b@nvfp4").llm
    matrices = sum(llama.attention_params + llama.mlp_params(i) for i in range(llama.layers))
    rest = llama.total_params - matrices
    assert llama.weight_bytes == pytest.approx(matrices * 4.5 / 8 + rest * 2)


class TestLatentAttention:
    def test_matrices_by_hand(self) -> None:
        mla = Catalog.default().model("deepseek-v3").llm.mla
        assert mla is not None
        # As in the DeepSeek-V3 report, per layer: W_DQ, W_UQ + W_QR, W_DKV + W_KR, W_UK + W_UV, W_O.
        assert mla.params(7168, 128) == (
            7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
        )

    def test_queries_without_a_rank_come_straight_from_the_hidden_state(self) -> None:
        mla = MlaSpec(q_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
        assert mla.params(2048, 16) == (
            2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
        )

    def test_the_cache_is_the_latent_and_takes_its_dtype(self) -> None:
        model = Catalog.default().model("deepseek-v3@kv=fp8").llm
        assert model.kv_bytes_per_token_layer == 576
        assert model.kv_width(1) == model.kv_width(8) == 576

    def test_heads_must_agree(self) -> None:
        mla = MlaSpec(0, 512, 128, 64, 128)
        with pytest.raises(InputError, match="latent attention has 1 KV head and head_dim 192"):
            TransformerSpec(2, 256, 4, 4, 64, 512, 1000, 4096, mla=mla)


class TestState:
    def test_bytes_of_a_sequence_by_hand(self) -> None:
        model = Catalog.default().model("qwen3-next-80b-a3b").llm
        # 32 heads of 128 x 128 in 32 bits, and three inputs of 8192 channels in 16 bits.
        assert model.state_bytes_per_layer == 32 * 128 * 128 * 4 + 3 * 8192 * 2
        assert model.state_bytes_per_sequence == 36 * model.state_bytes_per_layer
        assert [model.kv_tokens(i, 5000) for i in range(4)] == [0, 0, 0, 5000]

    def test_a_model_without_such_layers_keeps_none(self) -> None:
        assert Catalog.default().model("llama-3.1-8b").llm.state_bytes_per_sequence == 0.0

    def test_layers_outside_the_model_are_refused(self) -> None:
        delta = DeltaSpec(frozenset({0, 9}), 2, 4, 8, 8, 4)
        with pytest.raises(InputError, match="layer 9 of the delta rule in a model with 2"):
            TransformerSpec(2, 256, 4, 4, 64, 512, 1000, 4096, delta=delta)

    def test_value_heads_share_key_heads_evenly(self) -> None:
        with pytest.raises(InputError, match="3 value heads cannot share 2 key heads"):
            DeltaSpec(frozenset({0}), 2, 3, 8, 8, 4)


def test_chunks_bound_what_a_layer_keeps() -> None:
    scout = Catalog.default().model("llama-4-scout").llm
    assert [scout.kv_tokens(i, 100_000) for i in range(4)] == [8192, 8192, 8192, 100_000]
    assert scout.kv_tokens(0, 5000) == 5000
