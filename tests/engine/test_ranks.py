"""Nodes with several ranks give, token for token, what transformers gives on the whole model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.seeds import examples, slow_except

pytest.importorskip("torch", reason="needs the extra 'engine'")

import torch

from atoll.core.errors import UsageError
from atoll.engine.model_stage import load_config
from atoll.engine.node_core import CoreSettings
from atoll.engine.rank_cut import RankCut, TensorPiece
from atoll.engine.weights.reader import WeightReader
from tests.engine.cluster import Cluster, NodeSetup
from tests.engine.models import ARCHITECTURES, LAYERS, Tiny
from tests.engine.split_router import SplitRouter
from tests.engine.test_embeds import ask_embedded
from tests.engine.test_exact import REQUESTS, Wanderer, ask, check

pytestmark = pytest.mark.engine

QUICK = ("llama", "gpt-oss")
"""Architectures that cut their tensors in ways of their own; the others run with the slow tests."""
Layout = tuple[tuple[int, int, int], ...]
"""Nodes: first layer, end, ranks."""
LAYOUTS: tuple[Layout, ...] = (
    ((0, 4, 2),),
    ((0, 4, 4),),
    ((0, 1, 4), (1, 4, 1)),
    ((0, 3, 2), (3, 4, 4)),
    ((0, 2, 1), (0, 2, 2), (2, 4, 2)),
    ((0, 3, 4), (1, 4, 2), (0, 4, 1)),
)


@pytest.mark.parametrize("architecture", slow_except(QUICK, ARCHITECTURES))
def test_every_architecture_is_exact_over_ranks(
    tiny: Callable[[str], Any], architecture: str
) -> None:
    model = tiny(architecture)
    # The second has more ranks than there are KV heads.
    setups = [NodeSetup(0, 1, tp=2), NodeSetup(1, 4, tp=4)]
    cluster = Cluster(model.folder, LAYERS, setups, seed=3)
    check(cluster, ask(cluster, [(4, 8, 9), (9, 8, 3), (4, 5, 0)]), model)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_architecture_is_exact_over_all_layouts(
    tiny: Callable[[str], Any], architecture: str, layout: Layout
) -> None:
    model = tiny(architecture)
    setups = [NodeSetup(start, end, tp=tp) for start, end, tp in layout]
    cluster = Cluster(model.folder, LAYERS, setups, seed=3)
    check(cluster, ask(cluster, [(4, 12, 9), (7, 10, 0), (9, 12, 3), (4, 8, 0)]), model)


@examples(3)
@given(data=st.data())
def test_any_layout_over_ranks_is_exact(tiny: Callable[[str], Any], data: st.DataObject) -> None:
    run_any_layout(tiny("llama"), data)


@pytest.mark.slow
@given(data=st.data())
def test_any_of_many_layouts_over_ranks_is_exact(
    tiny: Callable[[str], Any], data: st.DataObject
) -> None:
    run_any_layout(tiny("llama"), data)


def run_any_layout(model: Tiny, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    seed = data.draw(st.integers(0, 10_000))
    limits = CoreSettings(
        token_budget=data.draw(st.integers(1, 32)), chunk=data.draw(st.integers(1, 16))
    )
    blocks, caching = data.draw(st.sampled_from((12, 64))), data.draw(st.booleans())
    setups = [
        NodeSetup(start, end, blocks, prefix_caching=caching, settings=limits, tp=tp)
        for start, end, tp in layout
    ]
    router = Wanderer(seed) if data.draw(st.booleans()) else None
    cluster = Cluster(model.folder, LAYERS, setups, router=router, seed=seed)
    check(cluster, ask(cluster, data.draw(REQUESTS)), model)


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gpt-oss", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "sides",
    [
        (((0, 4, 4),), ((0, 1, 1), (1, 4, 2))),
        (((0, 3, 1), (3, 4, 2)), ((0, 4, 4),)),
    ],
)
def test_kv_goes_between_unlike_ranks(
    tiny: Callable[[str], Any], architecture: str, sides: tuple[Layout, Layout]
) -> None:
    model = tiny(architecture)
    setups = [NodeSetup(start, end, tp=tp) for side in sides for start, end, tp in side]
    names = [f"n{i}" for i in range(len(setups))]
    router = SplitRouter(LAYERS, names[: len(sides[0])], names[len(sides[0]) :])
    cluster = Cluster(model.folder, LAYERS, setups, router=router, seed=5)
    check(cluster, ask(cluster, [(4, 8, 9), (9, 8, 0), (7, 6, 3)]), model)


def test_vectors_in_prompts_reach_every_rank(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, [NodeSetup(0, 2, tp=2), NodeSetup(2, 4)], seed=1)
    check(cluster, ask_embedded(cluster, model, random.Random(2), 3), model)


def test_ranks_may_cut_through_a_group_of_query_heads(tmp_path: Path) -> None:
    # Two query heads a rank and three for each KV head; columns and tokens that three does not divide.
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 50}
    model = Tiny(tmp_path, "qwen3", **sizes)
    cluster = Cluster(tmp_path, LAYERS, [NodeSetup(0, 4, tp=3)], seed=1)
    check(cluster, ask(cluster, [(4, 8, 0), (9, 8, 0)]), model)


def test_what_cannot_be_split_is_refused(tiny: Callable[[str], Any]) -> None:
    config = load_config(tiny("llama").folder)
    with pytest.raises(UsageError, match="4 attention heads cannot be split over 3 GPUs"):
        RankCut(config, 0, 3)
    config.model_type = "olmo2"
    with pytest.raises(UsageError, match="models of the type olmo2 run on one GPU a node"):
        RankCut(config, 0, 2)


def test_columns_are_handed_out_in_whole_groups(tiny: Callable[[str], Any]) -> None:
    config = load_config(tiny("llama").folder)
    config.intermediate_size, config.vocab_size = 896, 5000
    cuts = [RankCut(config, rank, 4) for rank in range(4)]
    assert [c.config.intermediate_size for c in cuts] == [128, 256, 256, 256]
    assert [c.config.vocab_size for c in cuts] == [1280, 1280, 1280, 1160]


@pytest.mark.parametrize("architecture", ["phi3", "qwen3-moe", "mixtral", "gpt-oss"])
def test_pieces_of_all_ranks_are_the_whole_model(
    tiny: Callable[[str], Any], architecture: str
) -> None:
    model = tiny(architecture)
    reader, config = WeightReader(model.folder), load_config(model.folder)
    cuts = [RankCut(config, rank, 2) for rank in range(2)]
    for name, whole in model.model.named_parameters():
        pieces = [cut.piece(name) for cut in cuts]
        for piece in pieces:
            if piece is None:
                assert torch.equal(reader.read(name), whole)
            elif piece.ranges:
                assert torch.equal(reader.read(name, piece), sliced(whole, piece))
        cut = [piece for piece in pieces if piece is not None]
        if len(cut) == len(cuts):
            taken = [i for piece in cut for a, b in piece.ranges for i in range(a, b)]
            assert sorted(taken) == list(range(whole.shape[cut[0].dim]))


def sliced(whole: torch.Tensor, piece: TensorPiece) -> torch.Tensor:
    return torch.cat([whole.narrow(piece.dim, a, b - a) for a, b in piece.ranges], piece.dim)
