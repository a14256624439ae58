"""Pictures of landscapes, by diffusion: a real generator of several steps, small enough for a CPU.

The network (adaptive-terrain-diffusion, MIT) takes a noisy height map and how strong the noise is, and
gives the map without it. It was distilled to do so in one step. More steps add weaker noise and take it away
again: each changes the landscape, costs as much as the first and roughens it a little; none is needed. The
noise never falls below half of the strongest: below a quarter the network leaves some of it in the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from atoll.components.base import BadInputError, BatchComponent, Inputs, Output, Setup
from atoll.components.component_weights import TERRAIN
from atoll.components.onnx import NeuralNetwork, OnnxModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIDE = 128
"""Pixels of a side."""
_MAX_STEPS = 50
_SIGMA_MAX = 80.0
_SIGMA_MIN = 40.0
"""The strength of the noise before the first and the last step, where a map goes from -1 to 1."""
_ASINH_SCALE_M = 0.1
_HEIGHT_M = 22.16864013671875
"""The network sees asinh(height / scale), stretched to -1..1; heights are 0 to 22 m."""
_RAMP = np.array(
    [
        (0.00, 24, 60, 120),
        (0.08, 60, 130, 180),
        (0.12, 216, 200, 150),
        (0.30, 90, 150, 70),
        (0.60, 70, 105, 55),
        (0.80, 125, 115, 105),
        (1.00, 245, 245, 250),
    ]
)
"""Colours by height, lowest first: water, sand, meadow, wood, rock, snow."""


class TerrainDiffusion(BatchComponent):
    """Draws a landscape: steps 1 to 50, seed, difficulty 0 (plain) to 1 (rugged)."""

    name = "terrain-diffusion"
    max_batch: ClassVar[int] = 4

    def __init__(self, network: NeuralNetwork) -> None:
        self._network = network

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Fetch and open the network."""
        (path,) = TERRAIN.fetch().values()
        return cls(OnnxModel(path, threads=setup.threads, device=setup.device, needed_for=cls.name))

    def example(self) -> Inputs:
        """Return one step."""
        return {"steps": 1, "seed": 0, "difficulty": 0.5}

    def batch_key(self, inputs: Inputs) -> object:
        """Return the number of steps: all of a batch take as many."""
        steps = inputs.get("steps", 1)
        return steps if isinstance(steps, int) else None

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        """Draw pictures together; each has its own noise."""
        outputs: list[Output | BadInputError] = [_wrong(inputs) for inputs in batch]
        alike: dict[int, list[int]] = {}
        for index, inputs in enumerate(batch):
            if outputs[index] is None:
                alike.setdefault(inputs.get("steps", 1), []).append(index)
        for steps, indices in alike.items():
            maps = self._sample(steps, [batch[index] for index in indices])
            for index, height in zip(indices, maps, strict=True):
                outputs[index] = {"image": colour(to_metres(height))}
        return outputs

    def _sample(self, steps: int, batch: Sequence[Inputs]) -> NDArray[np.float32]:
        """Return maps as the network sees them, [n, 128, 128]."""
        noises = [np.random.default_rng(inputs.get("seed", 0) % 2**64) for inputs in batch]
        difficulty = np.array([inputs.get("difficulty", 0.5) for inputs in batch], np.float32)
        clean = np.zeros((len(batch), 1, SIDE, SIDE), np.float32)
        for sigma in sigmas(steps):
            noise = [noise.standard_normal((1, SIDE, SIDE), np.float32) for noise in noises]
            fed = {
                "noisy": clean + np.float32(sigma) * np.stack(noise),
                "sigma": np.full(len(batch), sigma, np.float32),
                "difficulty": difficulty,
            }
            (clean,) = self._network.run(fed, ["denoised"])
        return clean[:, 0]


def sigmas(steps: int) -> list[float]:
    """Return the strengths of noise of so many steps, strongest first."""
    apart = max(1, steps - 1)
    return [_SIGMA_MAX * (_SIGMA_MIN / _SIGMA_MAX) ** (step / apart) for step in range(steps)]


def to_metres(height: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the heights of a map as the network sees it, in metres."""
    share = ((height + 1.0) / 2.0).clip(0.0, 1.0)
    metres = _ASINH_SCALE_M * np.sinh(share * np.arcsinh(_HEIGHT_M / _ASINH_SCALE_M))
    return np.asarray(metres, np.float32)


def colour(height: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return a picture of a height map: colours by height, lit from the upper left."""
    low, high = float(height.min()), float(height.max())
    share = (height - low) / max(high - low, 1e-6)
    painted = np.stack([np.interp(share, _RAMP[:, 0], _RAMP[:, part]) for part in (1, 2, 3)], -1)
    down, right = np.gradient(share * SIDE / 4)
    light = np.clip(1.0 - (down + right) / 3.0, 0.55, 1.25)
    lit: NDArray[np.float64] = painted * light[..., None]
    return lit.round().clip(0, 255).astype(np.uint8)


def _wrong(inputs: Inputs) -> BadInputError | None:
    steps, seed = inputs.get("steps", 1), inputs.get("seed", 0)
    difficulty = inputs.get("difficulty", 0.5)
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= _MAX_STEPS:
        return BadInputError(f"steps has to be a whole number, 1 to {_MAX_STEPS}", "steps")
    if not isinstance(seed, int) or isinstance(seed, bool):
        return BadInputError("seed has to be a whole number", "seed")
    if not isinstance(difficulty, int | float) or not 0 <= difficulty <= 1:
        return BadInputError("difficulty has to be a number, 0 to 1", "difficulty")
    return None
