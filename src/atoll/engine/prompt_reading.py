"""Readings of a prompt as the scheduler hands them on. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.engine.engine_messages import Scored


@dataclass(frozen=True, slots=True, eq=False)
class PromptReading:
    """Reading of a prompt: its vector (None if unasked), and how likely each of its tokens is.

    `logprobs` and `top` are as long as the prompt; that of its first token is None, as nothing is before it.
    """

    vector: NDArray[np.float32] | None = None
    logprobs: tuple[float | None, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


def join_scores(parts: Mapping[int, Scored], length: int) -> PromptReading | None:
    """Return the scores of a whole prompt from `Scored` messages by position; None if any are missing."""
    logprobs: list[float | None] = [None]
    top: list[tuple[tuple[int, float], ...]] = [()]
    while len(logprobs) < length:
        part = parts.get(len(logprobs))
        if part is None:
            return None
        logprobs += part.logprobs.tolist()
        pairs = zip(part.top_tokens.tolist(), part.top_logprobs.tolist(), strict=True)
        top += [tuple(zip(tokens, values, strict=True)) for tokens, values in pairs]
    return PromptReading(None, tuple(logprobs), tuple(top))
