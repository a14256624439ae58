"""EfficientNet-lite0 and the projectors, with small random weights: shapes, batches, bad inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'engine'")

import torch

from atoll.components.base import BadInputError, Setup
from atoll.components.efficientnet import EfficientNetLite0, LiteNetwork, SameConv, to_pixels
from atoll.components.projector import (
    KINDS,
    Projector,
    ProjectorShape,
    load_projector,
    save_projector,
)
from atoll.components.smollm2_vision import SmolLm2Vision
from atoll.engine.errors import WeightsError

Image = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def encoder() -> EfficientNetLite0:
    torch.manual_seed(3)
    network = LiteNetwork().eval().requires_grad_(False)
    for part in network.modules():
        # Fresh weights would shrink everything to nothing, layer by layer.
        if isinstance(part, torch.nn.Conv2d):
            torch.nn.init.normal_(part.weight, std=(2.0 / part.weight[0].numel()) ** 0.5)
    return EfficientNetLite0(network)


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


def test_outputs_do_not_depend_on_the_batch(
    encoder: EfficientNetLite0, images: list[Image]
) -> None:
    together = encoder.run([{"image": image} for image in images])
    for image, output in zip(images, together, strict=True):
        (alone,) = encoder.run([{"image": image}])
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
    bad, good = encoder.run([{"image": image}, encoder.example()])
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
        torch.testing.assert_close(again(features), projector(features), atol=2e-2, rtol=0)
    assert again(features).shape == (2, 16 if kind == "mixer" else 49, 576)


def test_vision_gives_embeddings(encoder: EfficientNetLite0, images: list[Image]) -> None:
    torch.manual_seed(7)
    vision = SmolLm2Vision(encoder, Projector(ProjectorShape()).eval(), "cpu")
    outputs = vision.run([{"image": images[0]}, {}, {"image": images[1]}])
    assert isinstance(outputs[1], BadInputError)
    (alone,) = vision.run([{"image": images[1]}])
    assert outputs[2]["embeds"].shape == (16, 576)
    assert outputs[2]["embeds"].dtype == np.float32
    np.testing.assert_allclose(outputs[2]["embeds"], alone["embeds"], atol=1e-4)


def test_a_projector_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no trained projector"):
        SmolLm2Vision.load(Setup(options={"projector": str(tmp_path / "none.safetensors")}))
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense")
    with pytest.raises(WeightsError, match="not a projector"):
        load_projector(tmp_path / "bad.safetensors")
