"""KV cache in 8 bits: half the bytes, and what is read is what was stored, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'engine'")

import torch

from atoll.engine import torch_ops
from atoll.engine.frames import from_torch, to_torch
from atoll.engine.kv import BlockTable
from atoll.engine.model_stage import SequenceRows, StageModel
from tests.engine.cluster import Cluster, NodeSetup
from tests.engine.models import LAYERS
from tests.engine.split_router import SplitRouter
from tests.engine.test_exact import ask

pytestmark = pytest.mark.engine

FP8 = torch.float8_e4m3fn
TOKENS = [5, 17, 40, 8, 77, 23, 61, 3, 90, 14, 52, 31]


def run(stage: StageModel) -> Any:
    """Hidden states of a prompt in two parts and of a decoded token after it."""
    table = BlockTable(b"", blocks=[1, 0, 2], contiguous=False)
    found = []
    for start, count in ((0, 6), (6, 5), (11, 1)):
        rows = SequenceRows(0, 3, start, count, table, TOKENS[start : start + count])
        found.append(stage.forward([rows]).of([0]).clone())
    return torch.cat(found)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_attention_reads_what_was_stored_rounded_to_8_bits(
    tiny: Callable[[str], Any], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny(architecture).folder
    small = StageModel(folder, 0, 3, blocks=4, block_size=4, kv_dtype="fp8")
    plain = StageModel(folder, 0, 3, blocks=4, block_size=4)
    assert small.cache.keys[0].dtype == FP8
    found, exact = run(small), run(plain)
    store = torch_ops.store_rows

    def rounded(into: Any, slots: Any, rows: Any) -> None:
        store(into, slots, rows.to(FP8).to(rows.dtype))

    for module in ("torch_ops", "attention"):
        monkeypatch.setattr(f"atoll.engine.{module}.store_rows", rounded)
    torch.testing.assert_close(found, run(plain), rtol=1e-5, atol=1e-5)
    apart = (found - exact).norm() / exact.norm()
    assert 0.0 < apart < 0.2


def test_a_cache_of_so_many_bytes_holds_four_times_what_float32_does(
    tiny: Callable[[str], Any],
) -> None:
    folder = tiny("llama").folder
    blocks = [
        StageModel(folder, 0, 2, kv_bytes=2**16, block_size=4, kv_dtype=kind).cache.blocks
        for kind in ("fp8", None)
    ]
    assert blocks[0] == 4 * blocks[1]


def test_numbers_beyond_the_format_become_its_largest() -> None:
    stored = torch.zeros(3, 1, 2, dtype=FP8)
    torch_ops.store_rows(stored, torch.tensor([2]), torch.tensor([[[1e6, -460.0]]]))
    assert stored.float()[2, 0].tolist() == [448.0, -448.0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_kv_in_8_bits_is_handed_over_as_it_is(tiny: Callable[[str], Any], ranks: int) -> None:
    folder = tiny("llama").folder
    wanted = [(4, 8, 9), (9, 8, 0), (7, 6, 3)]

    def answers(cuts: list[tuple[int, int, int]], router: Any = None) -> list[list[int]]:
        setups = [NodeSetup(a, b, tp=tp, kv_dtype="fp8") for a, b, tp in cuts]
        cluster = Cluster(folder, LAYERS, setups, router=router, seed=5)
        asked = ask(cluster, wanted)
        cluster.run()
        return [cluster.tokens(name) for name in asked]

    split = SplitRouter(LAYERS, ["n0"], ["n1", "n2"])
    apart = answers([(0, 4, ranks), (0, 1, 1), (1, 4, ranks)], split)
    assert apart == answers([(0, 4, 1)])


def test_kv_in_8_bits_travels_in_bytes() -> None:
    data = torch.randn(2, 2, 3, 1, 4).to(FP8)
    array = from_torch(data)
    assert array.nbytes == data.numel()
    assert torch.equal(to_torch(array).view(torch.uint8), data.view(torch.uint8))
