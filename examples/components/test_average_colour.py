"""What a component's test has to show: what it says, batches, and bad input."""

from __future__ import annotations

import numpy as np

from atoll.components.base import BadInputError, Setup
from examples.components.average_colour import AverageColour


def test_the_average_colour() -> None:
    """The right answer, the same alone as in a batch, and an error that spoils nothing else."""
    component = AverageColour.load(Setup())
    image = np.zeros((2, 2, 3), np.uint8)
    image[0] = (200, 100, 50)
    bad, good, grey = component.run([{}, {"image": image}, component.example()])
    assert isinstance(bad, BadInputError)
    assert bad.param == "image"
    assert good == {"colour": [100, 50, 25]}
    assert grey == {"colour": [128, 128, 128]}
    assert component.run([{"image": image}]) == [good]
