"""Pictures for SmolLM2: EfficientNet-lite0 and the projector that was trained for it.

What it can see is what the projector was trained on: a few flat shapes, their colours, number and place
(`data/smollm2_vision.md`). Photographs become embeddings too, but SmolLM2 will talk of shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch

from atoll.components.base import BadInputError, BatchComponent, Inputs, Output, Setup
from atoll.components.efficientnet import TOKENS, WIDTH, EfficientNetLite0, sort_images
from atoll.components.projector import Projector, load_projector
from atoll.engine.engine_errors import WeightsError

PROJECTOR = Path(__file__).parent / "data" / "smollm2_vision.safetensors"


class SmolLm2Vision(BatchComponent):
    """image: uint8 [height, width, 3] -> {"embeds": float32 [k, 576]}, to be put into a prompt.

    The option `projector` names another file of weights.
    """

    name: ClassVar[str] = "smollm2-vision"
    max_batch: ClassVar[int] = 8

    def __init__(self, encoder: EfficientNetLite0, projector: Projector, device: str) -> None:
        self._encoder = encoder
        self._projector = projector.to(device)

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Read the projector, then the encoder, which is fetched where needed."""
        path = Path(setup.option("projector", PROJECTOR))
        projector = load_projector(path)
        shape = projector.shape
        if (shape.places, shape.inputs) != (TOKENS, WIDTH):
            raise WeightsError(
                f"it reads {shape.places} x {shape.inputs} features, EfficientNet-lite0 gives "
                f"{TOKENS} x {WIDTH}",
                path=path,
                hint="train one for this encoder",
            )
        return cls(EfficientNetLite0.load(setup), projector, setup.device)

    def example(self) -> Inputs:
        """Return a small grey picture."""
        return self._encoder.example()

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        """Look at pictures together."""
        outputs, images = sort_images(batch)
        if images:
            with torch.inference_mode():
                embeds = self._projector(self._encoder.look(images)).float().cpu().numpy()
            places = (place for place, output in enumerate(outputs) if output is None)
            for place, rows in zip(places, embeds, strict=True):
                outputs[place] = {"embeds": np.array(rows)}
        return outputs
