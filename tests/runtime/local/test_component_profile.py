"""Components are built as the catalog says, timed as documented, and become rates that fleet files take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="needs the extra 'engine'")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from atoll.catalog import Catalog
from atoll.catalog.media import EncoderSpec, GeneratorSpec
from atoll.catalog.models import ComponentSpec, ModelSpec
from atoll.core.errors import InputError, UnknownNameError
from atoll.core.graph import Component, ComponentGraph, ComponentKind
from atoll.runtime.local.component_modules import (
    CONV_FLOPS,
    EncoderLayer,
    attend,
    conv_positions,
    rotate,
    segments_of,
)
from atoll.runtime.local.component_profile import (
    BatchSeconds,
    ComponentProfile,
    RunOptions,
    profile_component,
)
from atoll.runtime.local.component_sections import ComponentBuilder, ItemOptions, Piece
from tests.seeds import slow_except

pytestmark = pytest.mark.engine
GRID = EncoderSpec(
    kind="vision",
    layers=4,
    hidden=16,
    intermediate=24,
    heads=2,
    output_dim=12,
    rule="grid",
    gated_mlp=True,
    patch_size=4,
    temporal_patch=2,
    merge=2,
    window_px=8,
    full_attention_layers=(3,),
    projector=(64, 64, 12),
)
TILES = EncoderSpec(
    kind="vision",
    layers=2,
    hidden=16,
    intermediate=32,
    heads=2,
    output_dim=12,
    rule="tiles",
    qkv_bias=False,
    qk_norm=True,
    layer_scale=True,
    patch_size=4,
    merge=2,
    positions=17,
    class_token=True,
    image_size=16,
    max_tiles=4,
    projector=(64, 12),
)
AUDIO = EncoderSpec(
    kind="audio",
    layers=2,
    hidden=16,
    intermediate=32,
    heads=2,
    output_dim=12,
    rule="seconds",
    norm_bias=True,
    mel_bins=8,
    max_positions=60,
    tokens_per_second=1.0,
)
DIT = GeneratorSpec(
    kind="diffusion",
    layers=4,
    hidden=16,
    heads=2,
    head_dim=8,
    intermediate=32,
    patch_size=2,
    dual_stream=True,
)
VOCODER = GeneratorSpec(
    kind="diffusion",
    layers=4,
    hidden=16,
    heads=2,
    head_dim=8,
    intermediate=32,
    frames_per_second=10.0,
    steps=3,
    passes=2,
    conv_flops=2.0 * CONV_FLOPS,
)
CODES = GeneratorSpec(
    kind="vocoder", layers=4, hidden=16, heads=2, intermediate=32, frames_per_second=5.0
)
TINY: dict[str, EncoderSpec | GeneratorSpec] = {
    "grid": GRID,
    "tiles": TILES,
    "audio": AUDIO,
    "dit": DIT,
    "single": replace(DIT, dual_stream=False),
    "vocoder": VOCODER,
    "codes": CODES,
}
ITEM = ItemOptions(width_px=32, height_px=16, seconds=4.0, text_tokens=3, steps=None)
CPU = RunOptions(batches=(1, 2), items=2, device="cpu")


def model_of(spec: ComponentSpec) -> ModelSpec:
    kind = ComponentKind.ENCODER if isinstance(spec, EncoderSpec) else ComponentKind.GENERATOR
    graph = ComponentGraph((Component("part", kind),))
    return ModelSpec("tiny", (), None, "tiny", graph, {"part": spec})


def ticking() -> Callable[[], float]:
    """A clock on which everything that is timed takes a second."""
    now = iter(range(1_000_000))
    return lambda: float(next(now))


def pieces(
    spec: EncoderSpec | GeneratorSpec,
    item: ItemOptions = ITEM,
    shrink: int = 1,
    device: str = "cpu",
    model: ModelSpec | None = None,
) -> Piece:
    builder = ComponentBuilder(
        model or model_of(spec), spec, item, shrink, torch.device(device), torch.float32
    )
    return builder.build("part")


@pytest.mark.parametrize("name", TINY)
def test_every_kind_runs_and_gives_a_rate(name: str) -> None:
    found = profile_component(model_of(TINY[name]), "part", ITEM, CPU)
    assert [one.batch for one in found.batches] == [1, 2]
    assert all(one.seconds > 0.0 for one in found.batches)
    rate = found.rate("L4")
    assert (rate.part, rate.on, rate.unit) == ("part", "L4", found.unit)
    assert rate.per_s == pytest.approx(found.best.batch * found.amount / found.best.seconds)


@pytest.mark.parametrize(
    ("name", "unit", "amount"),
    [
        ("grid", "image", 1.0),
        ("audio", "audio_s", 4.0),
        ("dit", "image", 1.0),
        ("vocoder", "speech_s", 4.0),
    ],
)
def test_rates_count_what_requests_bring_or_want(name: str, unit: str, amount: float) -> None:
    found = profile_component(
        model_of(TINY[name]), "part", ITEM, replace(CPU, batches=(2,)), clock=ticking()
    )
    assert found.unit == unit
    assert found.rate("L4").per_s == pytest.approx(2.0 * amount / found.batches[0].seconds)
    assert found.amount == amount


@pytest.mark.parametrize(
    ("name", "shrink", "seconds"),  # on a clock where every section takes a second
    [
        ("grid", 1, 1.0),
        ("grid", 2, 1.0 + 1.0 + 3 / 2),  # its ends, its one full layer, two of three windowed ones
        ("grid", 9, 1.0 + 1.0 + 3.0),
        ("dit", 1, 20.0),  # steps, where neither request nor catalog say how many
        ("dit", 3, 20.0 * 4 / 2),
        ("vocoder", 1, 6.0 + 1.0),  # steps times passes, and convolutions once
        ("vocoder", 4, 6.0 * 4 + 4.0),
        ("codes", 2, 2.0),
    ],
)
def test_sections_count_as_often_as_a_component_has_them(
    name: str, shrink: int, seconds: float
) -> None:
    options = replace(CPU, shrink=shrink)
    found = profile_component(model_of(TINY[name]), "part", ITEM, options, clock=ticking())
    assert [one.seconds for one in found.batches] == [pytest.approx(seconds)] * 2
    assert any("one layer in" in note for note in found.notes) == (shrink > 1)


def test_an_item_says_how_many_steps_and_whether_both_ways() -> None:
    asked = replace(ITEM, steps=5, guided=True)
    found = profile_component(model_of(DIT), "part", asked, CPU, clock=ticking())
    assert found.batches[0].seconds == 5.0
    assert "5 steps, each with the prompt and without" in found.item
    given = pieces(DIT, asked).sections[0].inputs(3)
    # An image of 32 x 16 pixels is 4 x 2 latents of eight pixels, in patches of two.
    assert [x.shape for x in given.streams] == [(6, 3, 16), (6, 2, 16)]


def test_the_best_batch_gives_max_items_and_is_the_smallest_that_does() -> None:
    times = ((1, 2.0), (2, 2.0), (4, 4.0), (8, 16.0))
    found = ComponentProfile(
        model="m",
        part="p",
        item="image",
        unit="image",
        amount=1.0,
        device="cpu",
        dtype="float32",
        shrink=1,
        batches=tuple(BatchSeconds(batch=n, seconds=s) for n, s in times),
    )
    assert found.best.batch == 2
    assert found.rate("L4").per_s == 1.0


def test_an_encoder_makes_the_tokens_that_its_rule_says() -> None:
    for spec in (GRID, TILES):
        section = pieces(spec).sections[0]
        made = section.module(section.inputs(2))
        assert made.shape == (2, spec.image_tokens(16, 32), spec.output_dim)
    section = pieces(AUDIO).sections[0]
    assert section.module(section.inputs(2)).shape == (2, 4, 12)


@pytest.mark.parametrize(
    ("model", "part"),
    slow_except(
        [("qwen2.5-vl-7b", "vision"), ("internvl3-38b", "vision")],
        [
            *(("qwen2.5-vl-7b", "vision"), ("qwen2.5-vl-32b", "vision")),
            *(("internvl3-38b", "vision"), ("qwen-image", "dit")),
        ],
    ),
)
def test_weights_are_as_many_as_published(
    model: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog.default().model(model)
    spec = catalog.components[part]
    assert isinstance(spec, EncoderSpec | GeneratorSpec)
    monkeypatch.setattr("os.sysconf", lambda _name: 1 << 30)
    piece = pieces(spec, ItemOptions(448, 448), device="meta", model=catalog)
    module = piece.sections[0].module
    assert isinstance(module, torch.nn.Module)
    count = sum(p.numel() for p in module.parameters())
    total = spec.params if isinstance(spec, GeneratorSpec) else spec.total_params
    assert count == pytest.approx(total, rel=0.01)
    assert piece.sections[0].weights == pytest.approx(count, rel=0.01)


def test_operations_are_those_that_the_shapes_say() -> None:
    section = pieces(TILES).sections[0]
    written_out = sdpa_kernel(SDPBackend.MATH)  # what is fused on a CPU is not counted
    with FlopCounterMode(display=False) as counter, torch.inference_mode(), written_out:
        section.module(section.inputs(1))
    tiles, h, f = 3, TILES.hidden, TILES.intermediate  # two, and a thumbnail
    rows = tiles * 17
    layers = 2 * (2 * rows * h * (4 * h + 2 * f) + 4 * tiles * 17**2 * h)
    ends = 2 * tiles * 16 * 48 * h + 2 * tiles * 4 * 64 * 12
    assert counter.get_total_flops() == layers + ends


def test_stand_in_convolutions_take_as_many_operations() -> None:
    section = pieces(VOCODER).sections[1]
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        section.module(section.inputs(1))
    assert counter.get_total_flops() * section.times == pytest.approx(4.0 * 2.0 * CONV_FLOPS)
    assert conv_positions(2.5 * CONV_FLOPS) == 3


@given(positions=st.integers(1, 12), length=st.integers(1, 14), seed=st.integers(0, 9))
def test_attention_stays_within_segments(positions: int, length: int, seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, positions, 2, 4) for _ in range(3))
    place = torch.arange(positions) // length
    mask = place[:, None] == place[None, :]
    a, b, c = (x.transpose(1, 2) for x in (q, k, v))
    whole = functional.scaled_dot_product_attention(a, b, c, attn_mask=mask)
    cut = segments_of(positions, length)
    assert sum(groups * size for groups, size in cut) == positions
    torch.testing.assert_close(attend(q, k, v, cut), whole.transpose(1, 2).flatten(2))


def test_queries_and_keys_are_turned_where_no_positions_are_learned() -> None:
    for spec, turned in ((GRID, True), (TILES, False), (AUDIO, False), (CODES, True)):
        module = pieces(spec).sections[0].module
        assert isinstance(module, torch.nn.Module)
        layers = [m for m in module.modules() if isinstance(m, EncoderLayer)]
        assert len(layers) == spec.layers
        assert all((layer.turns is not None) == turned for layer in layers)


def test_a_turn_by_nothing_changes_nothing_and_a_half_turn_the_sign() -> None:
    x = torch.randn(1, 3, 2, 4, dtype=torch.bfloat16)
    still = torch.ones(3, 2, dtype=torch.complex64)
    assert torch.equal(rotate(x, still), x)
    assert torch.equal(rotate(x, -still), -x)


def test_what_is_not_public_is_named() -> None:
    unknown = replace(DIT, hidden=None, heads=None)
    with pytest.raises(InputError, match=r"--component: .*not public are hidden, heads .*'rates'"):
        profile_component(model_of(unknown), "part", ITEM, CPU)
    vae = GeneratorSpec(kind="vae", patch_size=8, conv_flops=1e7)
    with pytest.raises(InputError, match="the shapes of its convolutions"):
        profile_component(model_of(vae), "part", ITEM, CPU)
    silent = replace(CODES, frames_per_second=None)
    with pytest.raises(InputError, match="not public are frames_per_second"):
        profile_component(model_of(silent), "part", ITEM, CPU)
    deaf = replace(AUDIO, mel_bins=None)
    with pytest.raises(InputError, match="not public are mel_bins"):
        profile_component(model_of(deaf), "part", ITEM, CPU)
    with pytest.raises(UnknownNameError, match="part"):
        profile_component(model_of(DIT), "vision", ITEM, CPU)


def test_what_makes_tokens_is_measured_otherwise() -> None:
    model = Catalog.default().model("qwen2.5-omni-7b")
    for part in ("llm", "talker"):
        with pytest.raises(InputError, match=r"transformer over tokens.*--server"):
            profile_component(model, part, ITEM, CPU)


@pytest.mark.parametrize(
    ("item", "options", "field"),
    [
        (replace(ITEM, width_px=0), CPU, "--size"),
        (replace(ITEM, height_px=1 << 20), CPU, "--size"),
        (replace(ITEM, seconds=0.0), CPU, "--seconds"),
        (replace(ITEM, seconds=float("nan")), CPU, "--seconds"),
        (replace(ITEM, text_tokens=0), CPU, "--text-tokens"),
        (replace(ITEM, steps=1001), CPU, "--steps"),
        (ITEM, replace(CPU, batches=()), "--batch"),
        (ITEM, replace(CPU, batches=(0, 1)), "--batch"),
        (ITEM, replace(CPU, items=0), "--items"),
        (ITEM, replace(CPU, shrink=0), "--shrink"),
    ],
)
def test_what_cannot_be_run_is_refused(item: ItemOptions, options: RunOptions, field: str) -> None:
    with pytest.raises(InputError) as caught:
        profile_component(model_of(DIT), "part", item, options)
    assert caught.value.field == field
    assert caught.value.hint


def test_weights_that_do_not_fit_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sysconf", lambda _name: 100)
    with pytest.raises(InputError, match=r"--shrink: weights of part take .*--shrink \d+"):
        profile_component(model_of(DIT), "part", ITEM, CPU)


@pytest.mark.parametrize("name", TINY)
def test_batches_that_do_not_fit_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("os.sysconf", lambda _name: 4000)  # 16 MB
    huge = replace(CPU, batches=(1, 4096))
    with pytest.raises(InputError, match=r"--batch: a batch of 4096 takes .*smaller batches"):
        profile_component(model_of(TINY[name]), "part", ITEM, huge)
