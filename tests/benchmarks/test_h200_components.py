"""The script that measures encoders and diffusion blocks: shapes as published, files as promised."""

from __future__ import annotations

import csv
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'engine'")

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.hardware import h200_components as components
from benchmarks.hardware.h200_components import FULL, TINY, Chain
from benchmarks.hardware.h200_components_fidelity import read_rows, spec_of
from benchmarks.hardware.h200_harness import Bench, attention_reference, relative_error

pytestmark = pytest.mark.engine
NAMES = ["vit-l-14", "internvit-6b", "qwen-image", "whisper-large"]
MODES = ["graph", "eager", "host"]


def by_name(chains: tuple[Chain, ...], name: str) -> Chain:
    return next(chain for chain in chains if chain.name == name)


def test_the_sweep_is_the_one_asked_for() -> None:
    assert [chain.name for chain in FULL.chains] == NAMES
    assert [len(list(chain.points)) for chain in FULL.chains] == [28, 5, 16, 3]
    assert FULL.chains[0].tokens == (257, 577, 1025, 4097)
    for chain in (*FULL.chains, *TINY.chains):
        assert chain.hidden % chain.heads == 0
        for values in (chain.tokens, chain.text, chain.batches):
            assert list(values) == sorted(set(values))


@pytest.mark.parametrize(
    ("name", "layers", "billions"),  # of whole models: the chain's layers, scaled to theirs
    [
        ("vit-l-14", 24, 0.307),
        ("internvit-6b", 48, 5.9),
        ("qwen-image", 60, 20.4),
        ("whisper-large", 32, 0.63),
    ],
)
def test_weights_are_as_many_as_published(name: str, layers: int, billions: float) -> None:
    chain = by_name(FULL.chains, name)
    with torch.device("meta"):
        module = components.build(chain)
    count = sum(parameter.numel() for parameter in module.parameters())
    assert count * layers / chain.layers / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_operations_are_those_torch_counts(name: str) -> None:
    chain = by_name(TINY.chains, name)
    bench = Bench(dry=True, deadline=0.0)
    tokens, text, batch = list(chain.points)[-1]
    module = components.load(chain, bench)
    inputs = components.make_inputs(chain, bench, tokens, text, batch)
    counter = FlopCounterMode(display=False)
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), counter:
        out = module(*inputs)
    assert out.shape == (batch, tokens, chain.hidden)
    beside = 0  # patches, or the modulation of both streams
    if chain.kind == "vit":
        beside = 2 * batch * (tokens - 1) * 3 * components.PATCH**2 * chain.hidden
    elif chain.kind == "blocks":
        beside = chain.layers * 2 * 2 * batch * 6 * chain.hidden**2
    assert chain.flop(tokens, text, batch) + beside == counter.get_total_flops()


def test_attention_is_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 7, 3, 8) for _ in range(3))
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    want = attention_reference(torch, swapped[0], swapped[1], swapped[2], causal=False)
    assert relative_error(components.attend(q, k, v), want.transpose(1, 2).flatten(2)) < 1e-5


def test_rotation_keeps_lengths_and_turns_by_the_angle() -> None:
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).view(1, 1, 1, 4)
    angles = torch.tensor([[torch.pi / 2, torch.pi]])
    out = components.rotate(x, torch.polar(torch.ones_like(angles), angles))
    assert out.flatten().tolist() == pytest.approx([0.0, 1.0, 0.0, -2.0], abs=1e-6)


def test_streams_hear_each_other_and_the_time() -> None:
    chain = by_name(TINY.chains, "qwen-image")
    bench = Bench(dry=True, deadline=0.0)
    module = components.load(chain, bench)
    inputs: Any = components.make_inputs(chain, bench, 8, 3, 1)
    text, image, time, turns = inputs
    with torch.inference_mode():
        out = module(text, image, time, turns)
        for other in ((-text, image, time), (text, -image, time), (text, image, -time)):
            assert relative_error(module(*other, turns), out) > 1e-3


def test_patches_are_cut_in_rows() -> None:
    chain = by_name(TINY.chains, "vit-l-14")
    bench = Bench(dry=True, deadline=0.0)
    module: Any = components.load(chain, bench).float()
    pixels = torch.randn(2, 3, 28, 28)
    kernel = module.patches.weight.view(chain.hidden, 3, components.PATCH, components.PATCH)
    want = torch.nn.functional.conv2d(pixels, kernel, stride=components.PATCH)
    seen: list[torch.Tensor] = []
    module.patches.register_forward_hook(lambda _module, _args, out: seen.append(out))
    with torch.inference_mode():
        module(pixels)
        assert relative_error(seen[0], want.flatten(2).transpose(1, 2)) < 1e-5


@pytest.mark.slow
def test_tiny_run_writes_what_is_promised(tmp_path: Path) -> None:
    assert components.main(["--tiny", "--out", str(tmp_path)]) == 0
    with (tmp_path / "h200_components.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert ",".join(rows[0]) == (
        "chain,mode,batch,tokens_per_item,text_tokens,layers,median_us,p90_us,per_layer_us"
    )
    assert [name for name, _ in groupby(row["chain"] for row in rows)] == NAMES
    points = [(chain, point) for chain in TINY.chains for point in chain.points]
    rates = [(TINY.chains[0], (n, 0, TINY.rate_batch)) for n in TINY.chains[0].tokens]
    want = {(c.name, mode, b, n, t, c.layers) for c, (n, t, b) in points for mode in MODES}
    want |= {(c.name, "end_to_end", b, n, t, c.layers) for c, (n, t, b) in rates}
    whole = ("batch", "tokens_per_item", "text_tokens", "layers")
    found = [(row["chain"], row["mode"], *(int(row[column]) for column in whole)) for row in rows]
    assert len(found) == len(want) == 3 * 16 + 2
    assert set(found) == want
    for row in rows:
        median, p90, layer = (float(row[c]) for c in ("median_us", "p90_us", "per_layer_us"))
        assert 0.0 < median <= p90
        assert layer == pytest.approx(median / int(row["layers"]), abs=1e-3)
    meta = json.loads((tmp_path / "h200_components_meta.json").read_text(encoding="utf-8"))
    assert meta["tiny"] is True
    assert meta["errors"] == meta["case_errors"] == meta["cut_short"] == {}
    assert set(meta["images_per_s"]) == {"28px batch 2", "42px batch 2"}
    assert list(meta["relative_error_to_math"]) == NAMES
    for key in ("date_utc", "torch", "python", "host_cpu"):
        assert meta[key]


def test_a_run_out_of_time_says_so(tmp_path: Path) -> None:
    assert components.main(["--tiny", "--budget-s", "0", "--out", str(tmp_path)]) == 1
    meta = json.loads((tmp_path / "h200_components_meta.json").read_text(encoding="utf-8"))
    assert list(meta["cut_short"]) == NAMES


def test_predictions_are_made_for_the_shapes_that_were_measured() -> None:
    for chain in FULL.chains:
        spec = spec_of(chain.name)
        assert (spec.hidden, spec.heads, spec.intermediate) == (
            chain.hidden,
            chain.heads,
            chain.mlp,
        )
    points = {(c.name, *point) for c in FULL.chains for point in c.points}
    assert {
        (r.chain, r.tokens, r.text, r.batch) for r in read_rows() if r.mode == "graph"
    } == points
