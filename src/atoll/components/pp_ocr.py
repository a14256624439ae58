"""Reading pictures: where there is text (PP-OCRv6, small), and what it says.

Lines are boxes that stand upright: text that is turned or runs from top to bottom is found, but read badly.
The networks (Apache-2.0) come from the package rapidocr; what is done before and after them is written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from atoll.components.base import BadInputError, BatchComponent, Inputs, Output, Setup
from atoll.components.component_weights import PP_OCR
from atoll.components.onnx import NeuralNetwork, OnnxModel
from atoll.components.text_boxes import TextBox, find_boxes, reading_order
from atoll.core.errors import MissingDependencyError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_SIDE = 640
"""Text is looked for in the picture shrunk to this, in pixels; it is read at its full size."""
# Sides that the finder takes are multiples of this.
_STRIDE = 32
_MAX_LINES = 200
_LINE_HEIGHT = 48
"""Pixels of a line of text as the reader takes it."""
_LINE_WIDTH = 320
"""Pixels of the shortest line, padded; longer ones grow by steps, so that few shapes occur."""
_WIDTH_STEP = 64
_MAX_WIDTH = 3200
_LINES_AT_ONCE = 8
_MIN_SCORE = 0.5


class PpOcr(BatchComponent):
    """Reads the text of a picture, and says where its lines are: left, top, right, bottom in pixels."""

    name = "pp-ocr"
    max_batch: ClassVar[int] = 4

    def __init__(
        self, finder: NeuralNetwork, reader: NeuralNetwork, characters: Sequence[str]
    ) -> None:
        self._finder = finder
        self._reader = reader
        self._characters = characters

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Fetch and open both networks; the second carries its alphabet."""
        try:
            import PIL  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError("pillow", "components", needed_for=cls.name) from error
        finder, reader = (
            OnnxModel(path, threads=setup.threads, device=setup.device, needed_for=cls.name)
            for path in PP_OCR.fetch().values()
        )
        named = reader.metadata["character"].splitlines()
        # The first class is "nothing new here", the last one a space.
        return cls(finder, reader, ["", *named, " "])

    def example(self) -> Inputs:
        """Return a white picture."""
        return {"image": np.full((64, 64, 3), 255, np.uint8)}

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        """Read pictures one after the other: their sizes differ."""
        return [_wrong(inputs.get("image")) or self._read(inputs["image"]) for inputs in batch]

    def _read(self, picture: NDArray[np.uint8]) -> dict[str, Any]:
        height, width = picture.shape[:2]
        boxes = [box.scaled_to(width, height) for box in self._find(picture)]
        rows = reading_order(boxes)
        said = iter(self._recognise(picture, [box for row in rows for box in row]))
        lines: list[dict[str, Any]] = []
        texts: list[str] = []
        for row in rows:
            read = [(box, *next(said)) for box in row]
            sure = [(box, text.strip(), score) for box, text, score in read if score >= _MIN_SCORE]
            lines += [
                {"text": text, "score": score, "box": box.corners()}
                for box, text, score in sure
                if text
            ]
            texts.append(" ".join(text for _, text, _ in sure if text))
        return {"text": "\n".join(filter(None, texts)), "lines": lines}

    def _find(self, picture: NDArray[np.uint8]) -> list[TextBox]:
        """Return boxes of lines in shares of the picture, the surest ones if there are many."""
        height, width = picture.shape[:2]
        scale = min(1.0, MAX_SIDE / max(height, width))
        shrunk = _resize(picture, _multiple(width * scale), _multiple(height * scale))
        (found,) = self._finder.run({"x": _normalised(shrunk)[None]})
        return find_boxes(found[0, 0], _MAX_LINES)

    def _recognise(
        self, picture: NDArray[np.uint8], boxes: Sequence[TextBox]
    ) -> list[tuple[str, float]]:
        """Return text and score of each box; those of one width are read together."""
        crops: dict[int, list[tuple[int, NDArray[np.float32]]]] = {}
        for index, box in enumerate(boxes):
            line = _line(box.crop(picture))
            # By width: only arrays of one shape can be stacked.
            crops.setdefault(line.shape[2], []).append((index, line))
        results: list[tuple[str, float]] = [("", 0.0)] * len(boxes)
        for alike in crops.values():
            for start in range(0, len(alike), _LINES_AT_ONCE):
                some = alike[start : start + _LINES_AT_ONCE]
                (chances,) = self._reader.run({"x": np.stack([line for _, line in some])})
                for (index, _), chance in zip(some, chances, strict=True):
                    results[index] = decode_ctc(chance, self._characters)
        return results


def decode_ctc(
    chances: NDArray[np.float32], characters: Sequence[str], blank: int = 0
) -> tuple[str, float]:
    """Return the text of chances [t, characters], and how sure it is, 0..1: the best of each step.

    The same character in neighbouring steps is one character, unless a blank stands between.
    """
    best = chances.argmax(axis=1)
    new = best != blank
    new[1:] &= best[1:] != best[:-1]
    text = "".join(characters[index] for index in best[new])
    return text, float(chances.max(axis=1)[new].mean()) if new.any() else 0.0


def _line(crop: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return a line as its reader wants it: 48 pixels high, filled up with grey to a width of its own.

    The width depends on this line alone, so that neighbours in a batch change nothing.
    """
    height, width = crop.shape[:2]
    scaled = min(_MAX_WIDTH, max(1, ceil(_LINE_HEIGHT * width / height)))
    filled = max(_LINE_WIDTH, ceil(scaled / _WIDTH_STEP) * _WIDTH_STEP)
    line = np.zeros((3, _LINE_HEIGHT, filled), np.float32)
    line[:, :, :scaled] = _normalised(_resize(crop, scaled, _LINE_HEIGHT))
    return line


def _normalised(picture: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return [3, height, width] in -1..1, blue first as both networks learned it."""
    return np.ascontiguousarray(picture[:, :, ::-1].transpose(2, 0, 1), np.float32) / 127.5 - 1.0


def _multiple(side: float) -> int:
    return max(_STRIDE, round(side / _STRIDE) * _STRIDE)


def _resize(picture: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(picture))
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))


def _wrong(picture: object) -> BadInputError | None:
    if (
        isinstance(picture, np.ndarray)
        and picture.dtype == np.uint8
        and picture.ndim == 3
        and picture.shape[2] == 3
        and picture.size
    ):
        return None
    return BadInputError("image has to be a picture: uint8 [height, width, 3]", "image")
