"""Pictures for vision-language models: the vision tower and projector of a checkpoint, by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np

from atoll.components.base import BadInputError, BatchComponent, Inputs, Output, Setup
from atoll.components.efficientnet import sort_images
from atoll.components.transformers_parts import ModelPart, load_part


class TransformersVision(BatchComponent):
    """image: uint8 [height, width, 3] -> {"embeds": float32 [k, width of the llm]}, to be put into a prompt.

    Where the llm has to know more, there is "grid" (frames, height and width, in patches) and "deepstack"
    (float32 [layers, k, width], added to what its first layers give). Pictures of unlike sizes go through in
    one pass. Options: see `transformers_parts.load_part`.
    """

    name: ClassVar[str] = "transformers-vision"
    max_batch: ClassVar[int] = 8

    def __init__(self, part: ModelPart, processor: Any) -> None:
        self._part = part
        self._processor = processor

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Read the tower of a checkpoint, and how it wants its pictures."""
        part = load_part(setup, cls.name, "vision", tower=True)
        from transformers import AutoImageProcessor

        # Not torchvision where it happens to be: a picture is the same on every machine.
        processor = AutoImageProcessor.from_pretrained(
            part.folder, backend="pil", local_files_only=True
        )
        return cls(part, processor)

    def example(self) -> Inputs:
        """Return a small grey picture."""
        return {"image": np.full((64, 64, 3), 128, np.uint8)}

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        """Look at pictures together."""
        outputs, images = sort_images(batch)
        places = [place for place, output in enumerate(outputs) if output is None]
        prepared, seen = [], []
        for place, image in zip(places, images, strict=True):
            try:
                prepared.append(self._prepare(image))
                seen.append(place)
            except (
                ValueError
            ) as error:  # what the model's own processor refuses, as odd proportions
                outputs[place] = BadInputError(str(error)[:200], "image")
        if prepared:
            for place, output in zip(seen, self._look(prepared), strict=True):
                outputs[place] = output
        return outputs

    def _prepare(self, image: np.ndarray[Any, Any]) -> Any:
        return self._processor(
            images=[image],
            input_data_format="channels_last",
            return_tensors="pt",
            **self._part.family.image_options,
        )

    def _look(self, prepared: Sequence[Any]) -> list[dict[str, Any]]:
        import torch

        part = self._part
        pixels = torch.cat([each["pixel_values"] for each in prepared])
        inputs = {"pixel_values": pixels.to(part.device, part.model.dtype)}
        grids: list[list[int]] = []
        if part.family.has_grid:
            grid = torch.cat([each["image_grid_thw"] for each in prepared])
            grids = grid.tolist()
            inputs["image_grid_thw"] = grid.to(part.device)
        with torch.inference_mode():
            found = part.model.get_image_features(**inputs)
        if part.family.has_grid:
            embeds = list(found.pooler_output)
        else:
            tiles = [len(each["pixel_values"]) for each in prepared]
            embeds = [rows.flatten(0, 1) for rows in found.pooler_output.split(tiles)]
        outputs: list[dict[str, Any]] = [{"embeds": _array(rows)} for rows in embeds]
        layers = getattr(found, "deepstack_features", None) or ()
        for number, output in enumerate(outputs):
            if grids:
                output["grid"] = grids[number]
            if layers:
                output["deepstack"] = _array(torch.stack([layer[number] for layer in layers]))
        return outputs


def _array(tensor: Any) -> np.ndarray[Any, Any]:
    rows: np.ndarray[Any, Any] = tensor.float().cpu().numpy()
    return rows
