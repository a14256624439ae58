"""A component of one's own: the average colour of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from atoll.components.base import BadInputError, BatchComponent, Inputs, Output, Setup


class AverageColour(BatchComponent):
    """Takes `image`, uint8 [height, width, 3]; gives {"colour": [red, green, blue]}."""

    name = "average-colour"

    def __init__(self, digits: int) -> None:
        self._digits = digits

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Look at options; a network would be fetched and opened here, on setup.device."""
        return cls(setup.option("digits", 0))

    def example(self) -> Inputs:
        """Return a grey pixel: an executor that cannot do this is not ready."""
        return {"image": np.full((1, 1, 3), 128, np.uint8)}

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        """Answer for each of the batch, with an output or with what is wrong with its inputs."""
        return [self._average(inputs.get("image")) for inputs in batch]

    def _average(self, image: object) -> Output | BadInputError:
        if not isinstance(image, np.ndarray) or image.ndim != 3 or not image.size:
            return BadInputError("image has to be a picture [height, width, 3]", "image")
        return {"colour": [round(float(part), self._digits) for part in image.mean(axis=(0, 1))]}
