"""Context length that engines of a service are started with: the longest request that must fit."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.rng import stream
from atoll.workload.builtin import lengths_like

if TYPE_CHECKING:
    from atoll.workload.lengths import LengthMix

_SHARE = 0.999
"""Share of requests that fit; engines refuse the others."""
_BLOCK = 256
"""Tokens that a context length is a multiple of: KV cache is handed out in blocks of 16 to 256."""
_LEAST = 2048
"""Tokens that a request may always have: lengths that somebody guessed are no reason to refuse a chat."""
_DRAWS = 20_000


def max_model_len(mix: LengthMix, max_context: int) -> int:
    """Return the tokens of prompt and answer that a request may have at most.

    That is what 99.9 % of requests do not exceed; at least the longest prompt that keeps its promise
    (`input_tail`) with such an answer, and 2,048; at most what the model was made for. A multiple of 256.
    """
    both, answers = _quantiles(replace(mix, input_tail=0.0))
    longest = max(_LEAST, both, mix.input_tail + answers)
    return min(max_context, math.ceil(longest / _BLOCK) * _BLOCK)


@lru_cache(maxsize=256)
def _quantiles(mix: LengthMix) -> tuple[float, float]:
    """Tokens that a share of requests, and of answers, do not exceed."""
    # The same draws each time: one answer, whenever it is asked for.
    prompts, answers = lengths_like(mix).draw(stream(0, "context"), _DRAWS)
    return float(np.quantile(prompts + answers, _SHARE)), float(np.quantile(answers, _SHARE))
