from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.transformer import (
    BF16,
    DTYPES,
    FP8,
    INT4,
    MXFP4,
    MoeSpec,
    TransformerSpec,
    dtype_of,
)
from atoll.core.errors import InputError, UnknownNameError


def spec(**changes: object) -> TransformerSpec:
    values: dict[str, object] = {
        "layers": 4,
        "hidden": 64,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 16,
        "intermediate": 96,
        "vocab": 1000,
        "max_context": 2048,
    } | changes
    return TransformerSpec(**values)  # type: ignore[arg-type]


@st.composite
def specs(draw: st.DrawFn) -> TransformerSpec:
    layers = draw(st.integers(1, 6))
    kv_heads = draw(st.integers(1, 4))
    moe = None
    if draw(st.booleans()):
        experts = draw(st.integers(1, 8))
        moe = MoeSpec(
            experts=experts,
            top_k=draw(st.integers(1, experts)),
            intermediate=draw(st.integers(1, 64)),
            shared_intermediate=draw(st.integers(0, 64)),
            dense_layers=frozenset(draw(st.sets(st.integers(0, layers - 1)))),
            router_bias=draw(st.booleans()),
        )
    dtypes = st.sampled_from(list(DTYPES.values()))
    return TransformerSpec(
        layers=layers,
        hidden=draw(st.integers(1, 64)),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 32)),
        intermediate=draw(st.integers(1, 64)),
        vocab=draw(st.integers(1, 512)),
        max_context=4096,
        tied_embeddings=draw(st.booleans()),
        windows=tuple(
            draw(st.lists(st.none() | st.integers(1, 99), min_size=layers, max_size=layers))
        ),
        qkv_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        gated_mlp=draw(st.booleans()),
        sinks=draw(st.booleans()),
        moe=moe,
        attention_dtype=draw(dtypes),
        mlp_dtype=draw(dtypes),
        expert_dtype=draw(dtypes),
    )


def test_a_tiny_model_counted_by_hand() -> None:
    tiny = spec(layers=1, hidden=4, heads=2, kv_heads=1, head_dim=3, intermediate=5, vocab=7)
    attention = 4 * 6 + 2 * 4 * 3 + 6 * 4
    assert tiny.layer_params(0) == attention + 3 * 4 * 5 + 2 * 4
    assert tiny.total_params == tiny.layer_params(0) + 2 * 7 * 4 + 4
    biased = replace(tiny, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, sinks=True)
    extra = (6 + 3 + 3) + 4 + (5 + 5 + 4) + (3 + 3) + 2
    assert biased.total_params == tiny.total_params + extra


def test_tied_embedding_counts_once_but_the_head_is_still_there() -> None:
    apart, tied = spec(), spec(tied_embeddings=True)
    assert apart.total_params - tied.total_params == 1000 * 64
    assert tied.head_params == apart.head_params == 1000 * 64
    assert tied.head_bytes == 1000 * 64 * 2


@given(specs())
def test_parts_add_up(llm: TransformerSpec) -> None:
    head = 0 if llm.tied_embeddings else llm.head_params
    outer = llm.embedding_params + head + llm.final_norm_params
    assert llm.total_params == sum(map(llm.layer_params, range(llm.layers))) + outer
    assert llm.active_params <= llm.total_params
    assert llm.range_weight_bytes(0, llm.layers) == pytest.approx(
        sum(map(llm.layer_weight_bytes, range(llm.layers)))
    )
    if llm.moe is None:
        assert llm.active_params == llm.total_params


@given(specs())
def test_bytes_are_twice_the_params_in_bf16(llm: TransformerSpec) -> None:
    assert llm.with_weights("bf16").weight_bytes == 2 * llm.total_params


@given(specs())
def test_narrower_weights_never_weigh_more(llm: TransformerSpec) -> None:
    sizes = [llm.with_weights(name).weight_bytes for name in ("fp32", "bf16", "fp8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    assert llm.with_kv_dtype("fp8").kv_bytes_per_token * 2 == llm.kv_bytes_per_token


@given(specs())
def test_equality_hash_and_pickle(llm: TransformerSpec) -> None:
    twin = replace(llm)
    assert twin == llm
    assert hash(twin) == hash(llm)
    assert replace(llm, vocab=llm.vocab + 1) != llm
    assert pickle.loads(pickle.dumps(llm)) == llm
    assert llm != "a model"


def test_hash_survives_a_pickle_to_another_process() -> None:
    # String hashes differ between processes; a stored one would make equal specs differ there.
    script = (
        "import pickle, sys; from atoll.catalog.models import default_models;"
        "llm = pickle.loads(sys.stdin.buffer.read());"
        "assert llm == default_models()['gpt-oss-20b'].llm; assert {llm: 1}[llm]"
    )
    from atoll.catalog.models import default_models

    data = pickle.dumps(default_models()["gpt-oss-20b"].llm)
    subprocess.run(
        [sys.executable, "-c", script], input=data, check=True, env={"PYTHONHASHSEED": "7"}
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layers": 0}, "layers"),
        ({"layers": 10**9}, "layers"),
        ({"hidden": -1}, "hidden"),
        ({"hidden": 2.5}, "hidden"),
        ({"heads": True}, "heads"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"windows": (None,)}, "windows"),
        ({"windows": (0, None, None, None)}, "windows"),
        ({"vocab": 10**30}, "vocab"),
        ({"moe": MoeSpec(4, 2, 8, dense_layers=frozenset({9}))}, "dense_layers"),
    ],
)
def test_impossible_shapes(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as caught:
        spec(**changes)
    assert caught.value.field == field


def test_impossible_experts() -> None:
    with pytest.raises(InputError, match="top_k 5 exceeds 4 experts"):
        MoeSpec(4, 5, 8)


def test_dense_layers_of_a_mixture() -> None:
    llm = spec(moe=MoeSpec(4, 2, 8, dense_layers=frozenset({0})))
    assert not llm.is_moe_layer(0)
    assert llm.layer_params(0) == spec().layer_params(0)
    assert llm.layer_active_params(0) == llm.layer_params(0)
    assert llm.layer_params(1) - llm.layer_active_params(1) == 2 * llm.expert_params


def test_dtypes() -> None:
    assert dtype_of("fp8") is FP8
    assert dtype_of(BF16) is BF16
    assert (INT4.bits_per_weight, MXFP4.bits_per_weight) == (4 + 20 / 128, 4.25)
    with pytest.raises(UnknownNameError, match="did you mean fp8"):
        dtype_of("fp88")
