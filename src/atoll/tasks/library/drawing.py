"""Pictures, drawn."""

from __future__ import annotations

import re

from atoll.tasks.library.shapes import DrawingOrder, Drawings
from atoll.tasks.library.unit_tasks import Draw
from atoll.tasks.task import Task, UnitTask

__all__ = ["Drawing", "DrawingOrder", "Drawings", "Painting", "difficulty_of"]

_EASY = frozenset({"calm", "easy", "flat", "gentle", "plain", "plains", "smooth", "soft"})
_HARD = frozenset(
    {"cliff", "cliffs", "hard", "mountain", "mountains", "rough", "rugged", "steep", "wild"}
)


class Drawing(Task[DrawingOrder, Drawings]):
    """Draws landscapes, all pictures of an order at once, each from a seed of its own.

    Of the prompt only words about how steep the land is count ("flat", "rugged"): what draws knows no others.
    Options: draw: its component.
    """

    def setup(self) -> None:
        """Name the component."""
        self.draw = Draw(self.options.get("draw", "terrain-diffusion"))

    def invoke(self, request: DrawingOrder) -> Drawings:
        """Draw the pictures of an order."""
        difficulty = difficulty_of(request.prompt)
        return Drawings(
            [
                self.draw(steps=request.steps, seed=request.seed + i, difficulty=difficulty)[
                    "image"
                ]
                for i in range(request.n)
            ]
        )


class Painting(Task[DrawingOrder, Drawings]):
    """Paints what a prompt says, all pictures of an order at once: the prompt is read once.

    Options: read, paint, decode: components. image_sizes: the first is the size of its pictures.
    """

    def setup(self) -> None:
        """Name the components."""
        options = self.options
        self.read = UnitTask(options.get("read", "qwen-image-text"))
        self.paint = UnitTask(options.get("paint", "qwen-image-dit"))
        self.decode = UnitTask(options.get("decode", "qwen-image-vae"))
        width, _, height = str(options.get("image_sizes", ["1024x1024"])[0]).partition("x")
        self.size = {"height": int(height), "width": int(width)}

    def invoke(self, request: DrawingOrder) -> Drawings:
        """Paint the pictures of an order."""
        embeds = self.read(prompt=request.prompt)["embeds"]
        latents = [
            self.paint(embeds=embeds, steps=request.steps, seed=request.seed + i, **self.size)
            for i in range(request.n)
        ]
        return Drawings(
            [self.decode(latents=each["latents"], **self.size)["image"] for each in latents]
        )


def difficulty_of(prompt: str) -> float:
    """Return how steep the land is that a prompt asks for: 0 is flat, 1 as steep as it gets."""
    words = re.findall(r"[a-z]+", prompt.lower())
    easy, hard = sum(w in _EASY for w in words), sum(w in _HARD for w in words)
    if easy == hard:
        return 0.5
    return 0.1 if easy > hard else 0.9
