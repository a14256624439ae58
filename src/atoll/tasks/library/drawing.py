"""Pictures, drawn."""

from __future__ import annotations

import re

from atoll.tasks.library.shapes import DrawingOrder, Drawings
from atoll.tasks.library.unit_tasks import Draw
from atoll.tasks.task import Task

__all__ = ["Drawing", "DrawingOrder", "Drawings", "difficulty_of"]

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


def difficulty_of(prompt: str) -> float:
    """Return how steep the land is that a prompt asks for: 0 is flat, 1 as steep as it gets."""
    words = re.findall(r"[a-z]+", prompt.lower())
    easy, hard = sum(w in _EASY for w in words), sum(w in _HARD for w in words)
    if easy == hard:
        return 0.5
    return 0.1 if easy > hard else 0.9
