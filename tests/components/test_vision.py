"""EfficientNet-lite0 and the projectors: shapes, batches, bad inputs; random weights and real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'engine'")

import torch

from atoll.components.base import BadInputError, Setup
from atoll.components.efficientnet import (
    WIDTH,
    EfficientNetLite0,
    LiteNetwork,
    SameConv,
    to_pixels,
)
from atoll.components.projector import (
    KINDS,
    Projector,
    ProjectorShape,
    load_projector,
    save_projector,
)
from atoll.components.smollm2_vision import PROJECTOR, SmolLm2Vision
from atoll.engine.engine_errors import WeightsError
from tests.components.asking import ask
from tests.components.loading import ask as ask_real

Image = np.ndarray[Any, Any]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """Waiting for a second one costs more than it gives, and much more where another process has it."""
    torch.set_num_threads(1)


def random_network() -> LiteNetwork:
    torch.manual_seed(3)
    network = LiteNetwork().eval().requires_grad_(False)
    for part in network.modules():
        # Fresh weights would shrink everything to nothing, layer by layer.
        if isinstance(part, torch.nn.Conv2d):
            torch.nn.init.normal_(part.weight, std=(2.0 / part.weight[0].numel()) ** 0.5)
        elif isinstance(part, torch.nn.BatchNorm2d) and part.running_mean is not None:
            part.running_mean.normal_(std=0.1)
            torch.nn.init.uniform_(part.weight, 0.7, 1.2)
            torch.nn.init.normal_(part.bias, std=0.1)
    return network


@pytest.fixture(scope="module")
def encoder() -> EfficientNetLite0:
    return EfficientNetLite0(random_network().fold())


@pytest.fixture(scope="module")
def images() -> list[Image]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((40, 90), (224, 224), (1, 1))]


def test_padding_puts_the_odd_pixel_at_the_end() -> None:
    conv = SameConv(1, 1, 3, 2)
    with torch.no_grad():
        conv.weight.fill_(1.0)
    out = conv(torch.ones(1, 1, 4, 4))
    assert out[0, 0].tolist() == [[9.0, 6.0], [6.0, 4.0]]


@pytest.mark.parametrize(("kernel", "side"), [(1, 7), (3, 7), (5, 14)])
def test_without_strides_padding_is_as_much_on_every_side(kernel: int, side: int) -> None:
    torch.manual_seed(1)
    conv = SameConv(4, 4, kernel, 1, groups=4)
    x = torch.randn(2, 4, side, side)
    edge = kernel // 2
    padded = torch.nn.functional.pad(x, (edge, edge, edge, edge))
    wanted = torch.nn.functional.conv2d(padded, conv.weight, groups=4)
    assert torch.allclose(conv(x), wanted, atol=1e-5)


def test_a_folded_network_sees_the_same() -> None:
    network = random_network()
    pixels = torch.randint(0, 256, (2, 3, 224, 224)).float()
    seen = network.features(pixels)
    assert float(seen.std()) > 0.1
    folded = network.fold()
    assert not any("bn" in name for name, _ in folded.named_parameters())
    assert torch.allclose(folded.features(pixels), seen, atol=2e-4, rtol=1e-4)
    assert folded.fold() is folded


def test_outputs_do_not_depend_on_the_batch(
    encoder: EfficientNetLite0, images: list[Image]
) -> None:
    together = ask(encoder, *({"image": image} for image in images))
    for image, output in zip(images, together, strict=True):
        (alone,) = ask(encoder, {"image": image})
        assert output["features"].shape == (49, 1280)
        assert output["features"].dtype == np.float32
        np.testing.assert_allclose(output["features"], alone["features"], atol=1e-4)
        assert len(output["labels"]) == 5
        scores = [label["score"] for label in output["labels"]]
        assert scores == sorted(scores, reverse=True)
    assert not np.allclose(together[0]["features"], together[1]["features"], atol=1e-2)


def test_pictures_are_made_smaller_without_aliasing() -> None:
    board = np.indices((448, 448)).sum(0)[:, :, None] % 2 * 255
    pixels = to_pixels(np.broadcast_to(board, (448, 448, 3)).astype(np.uint8))
    assert pixels.shape == (3, 224, 224)
    assert float(pixels.std()) < 1.5


@pytest.mark.parametrize(
    "image",
    [
        None,
        [[0, 0, 0]],
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.broadcast_to(np.uint8(0), (10_000, 10_000, 3)),
    ],
)
def test_a_bad_picture_fails_alone(encoder: EfficientNetLite0, image: object) -> None:
    bad, good = ask(encoder, {"image": image}, encoder.example())
    assert isinstance(bad, BadInputError)
    assert bad.param == "image"
    assert good["features"].shape == (49, 1280)


@pytest.mark.parametrize("kind", KINDS)
def test_a_projector_comes_back_from_its_file(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    projector = Projector(ProjectorShape(kind=kind, hidden=64))
    save_projector(projector, tmp_path / "p.safetensors", {"seed": "7"})
    again = load_projector(tmp_path / "p.safetensors")
    assert again.shape == projector.shape
    features = torch.rand(2, 49, 1280)
    with torch.no_grad():
        assert torch.allclose(again(features), projector(features), atol=2e-2, rtol=0)
    assert again(features).shape == (2, 16 if kind == "mixer" else 49, 576)


def test_vision_gives_embeddings(encoder: EfficientNetLite0, images: list[Image]) -> None:
    torch.manual_seed(7)
    vision = SmolLm2Vision(encoder, Projector(ProjectorShape()).eval(), "cpu")
    outputs = ask(vision, {"image": images[0]}, {}, {"image": images[1]})
    assert isinstance(outputs[1], BadInputError)
    (alone,) = ask(vision, {"image": images[1]})
    assert outputs[2]["embeds"].shape == (16, 576)
    assert outputs[2]["embeds"].dtype == np.float32
    np.testing.assert_allclose(outputs[2]["embeds"], alone["embeds"], atol=1e-4)


def test_a_projector_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no trained projector"):
        SmolLm2Vision.load(Setup(options={"projector": str(tmp_path / "none.safetensors")}))
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense")
    with pytest.raises(WeightsError, match="not a projector"):
        load_projector(tmp_path / "bad.safetensors")


def test_a_projector_for_another_encoder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_projector(Projector(ProjectorShape(kind="linear", inputs=640)), path)
    with pytest.raises(WeightsError, match=f"49 x 640 features.*49 x {WIDTH}"):
        SmolLm2Vision.load(Setup(options={"projector": str(path)}))


def traffic_light() -> Image:
    """Return a drawing of a traffic light against the sky."""
    image = np.full((224, 224, 3), (130, 180, 230), np.uint8)
    image[20:204, 77:147] = 25
    y, x = np.mgrid[:224, :224]
    for height, colour in ((52, (230, 30, 30)), (112, (245, 200, 30)), (172, (40, 200, 70))):
        image[(x - 112) ** 2 + (y - height) ** 2 <= 24**2] = colour
    return image


def clock() -> Image:
    """Return a drawing of a clock that shows three."""
    image = np.full((224, 224, 3), (150, 110, 80), np.uint8)
    y, x = np.mgrid[-112:112, -112:112]
    far, turn = np.hypot(x, y), np.arctan2(y, x) / (np.pi / 6)
    image[far < 100] = 20
    image[far < 92] = (250, 250, 245)
    image[(far > 76) & (far < 88) & (np.abs((turn + 0.5) % 1 - 0.5) < 0.12)] = 10
    image[(np.abs(y) < 3) & (x > -4) & (x < 48)] = 10
    image[(np.abs(x) < 2) & (y > -72) & (y < 4)] = 10
    return image


# Made with the weights as published and a network that was compared with the published one; its classes are
# ImageNet's: 920 is the traffic light, 722 the ping-pong ball, 409 the analog clock, 892 the wall clock.
GOLDEN: list[tuple[Image, dict[str, float], tuple[float, float], list[float]]] = [
    (
        traffic_light(),
        {"920": 0.341362, "722": 0.247624, "852": 0.066951, "844": 0.044347, "470": 0.035051},
        (0.192033, 0.526350),
        [-0.094327, -0.065898, 0.041212, -0.109467, -0.064370, -0.143165],
    ),
    (
        clock(),
        {"409": 0.722524, "892": 0.260762, "530": 0.001931, "531": 0.001103, "826": 0.000442},
        (0.126879, 0.244975),
        [-0.095573, -0.088788, 0.022017, -0.115023, -0.051899, -0.153122],
    ),
]


def test_the_real_encoder_knows_a_clock_and_a_traffic_light() -> None:
    outputs = ask_real(EfficientNetLite0, *({"image": image} for image, *_ in GOLDEN))
    for output, (_, labels, (mean, centre), _) in zip(outputs, GOLDEN, strict=True):
        assert [label["label"] for label in output["labels"]] == list(labels)
        scores = [label["score"] for label in output["labels"]]
        assert scores == pytest.approx(list(labels.values()), abs=1e-4)
        assert float(output["features"].mean()) == pytest.approx(mean, abs=1e-4)
        assert float(output["features"][24].mean()) == pytest.approx(centre, abs=1e-4)


def test_the_trained_projector_is_small_and_the_same_for_everybody() -> None:
    assert PROJECTOR.stat().st_size < 4_000_000
    assert load_projector(PROJECTOR).shape == ProjectorShape()
    together = ask_real(SmolLm2Vision, *({"image": image} for image, *_ in GOLDEN))
    for output, (image, _, _, corners) in zip(together, GOLDEN, strict=True):
        embeds = output["embeds"]
        assert embeds.shape == (16, 576)
        assert embeds.dtype == np.float32
        assert np.isfinite(embeds).all()
        assert [*embeds[0, :3], *embeds[15, -3:]] == pytest.approx(corners, abs=1e-4)
        (alone,) = ask_real(SmolLm2Vision, {"image": image})
        (again,) = ask_real(SmolLm2Vision, {"image": image})
        assert np.array_equal(alone["embeds"], again["embeds"])
        np.testing.assert_allclose(alone["embeds"], embeds, atol=1e-4)
