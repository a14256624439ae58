"""Landscapes: seeds, steps and difficulty do what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from atoll.components.base import BadInputError, Setup
from atoll.components.terrain_diffusion import (
    SIDE,
    TerrainDiffusion,
    colour,
    sigmas,
    to_metres,
)
from atoll.core.errors import AtollError
from tests.components.asking import ask


class Echo:
    """A network that finds no noise, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str] | None = None) -> list[Any]:
        assert outputs == ["denoised"]
        self.asked.append(inputs)
        return [inputs["noisy"] / inputs["sigma"][:, None, None, None]]


def test_noise_falls_from_step_to_step() -> None:
    assert sigmas(1) == [80.0]
    for steps in (2, 5, 50):
        strengths = sigmas(steps)
        assert len(strengths) == steps
        assert strengths == sorted(strengths, reverse=True)
        assert strengths[0] == 80.0
        assert strengths[-1] == pytest.approx(40.0)


def test_heights_are_metres() -> None:
    seen = to_metres(np.array([-2, -1, 0, 1, 2], np.float32))
    assert seen[:2].tolist() == [0, 0]
    assert 1.0 < seen[2] < 1.2  # the middle of asinh is far below the middle of 22 m
    assert seen[3:] == pytest.approx([22.16864] * 2)


def test_water_is_blue_and_peaks_are_white() -> None:
    height = np.linspace(0, 3, SIDE, dtype=np.float32)[:, None].repeat(SIDE, 1)
    picture = colour(height)
    assert picture.shape == (SIDE, SIDE, 3)
    assert picture.dtype == np.uint8
    red, _, blue = picture[0, 0].astype(int)
    assert blue > red + 50
    assert picture[-1, 0].min() > 200
    flat = colour(np.ones((SIDE, SIDE), np.float32))
    assert (flat == flat[0, 0]).all()


def test_every_picture_has_its_own_noise_whatever_it_is_drawn_with() -> None:
    orders: list[dict[str, Any]] = [
        {"steps": 2, "seed": 1, "difficulty": 0.0},
        {"steps": 1, "seed": 1, "difficulty": 0.25},
        {"steps": 2, "seed": -1, "difficulty": 1},
    ]
    network = Echo()
    together = ask(TerrainDiffusion(network), *orders)
    assert [len(fed["sigma"]) for fed in network.asked] == [2, 2, 1]
    assert network.asked[0]["difficulty"].tolist() == [0.0, 1.0]
    for order, output in zip(orders, together, strict=True):
        (alone,) = ask(TerrainDiffusion(Echo()), order)
        assert np.array_equal(alone["image"], output["image"])
    assert not np.array_equal(together[0]["image"], together[2]["image"])


@pytest.mark.parametrize(
    ("inputs", "param"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": 51}, "steps"),
        ({"steps": 2.0}, "steps"),
        ({"steps": True}, "steps"),
        ({"seed": "1"}, "seed"),
        ({"seed": None}, "seed"),
        ({"difficulty": 1.1}, "difficulty"),
        ({"difficulty": float("nan")}, "difficulty"),
        ({"difficulty": "hard"}, "difficulty"),
    ],
)
def test_bad_orders_do_not_spoil_good_ones(inputs: dict[str, Any], param: str) -> None:
    bad, good = ask(TerrainDiffusion(Echo()), inputs, {})
    assert isinstance(bad, BadInputError)
    assert bad.param == param
    assert good["image"].shape == (SIDE, SIDE, 3)


@pytest.mark.slow
def test_the_network_draws_landscapes() -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra 'components'")
    try:
        terrain = TerrainDiffusion.load(Setup())
    except AtollError as error:
        pytest.skip(f"the model cannot be fetched: {error}")
    (first,) = ask(terrain, {"steps": 1, "seed": 7, "difficulty": 0.2})
    again, other, hard = ask(
        terrain,
        *[
            {"steps": 1, "seed": seed, "difficulty": at}
            for seed, at in ((7, 0.2), (8, 0.2), (7, 1))
        ],
    )
    picture = first["image"].astype(int)
    assert picture.shape == (SIDE, SIDE, 3)
    assert abs(picture - again["image"]).max() <= 2, "a batch changes no more than rounding does"
    assert abs(picture - other["image"]).mean() > 5
    assert abs(picture - hard["image"]).mean() > 5
    # Landscapes, not noise: neighbours are alike.
    assert abs(np.diff(picture, axis=0)).mean() < 0.3 * picture.std()
