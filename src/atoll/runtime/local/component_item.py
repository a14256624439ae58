"""What a component is measured with: sizes of one item."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ItemOptions:
    """What an item is: an image of so many pixels, or so many seconds of sound or speech.

    For pictures that are made: `steps` of denoising, tokens of the prompt, and whether each step is run
    twice, with the prompt and without. None takes the component's own.
    """

    width_px: int | None = None
    height_px: int | None = None
    seconds: float = 10.0
    text_tokens: int = 300
    steps: int | None = None
    guided: bool = False
