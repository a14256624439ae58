"""Context length that engines of a service are started with: the longest request that must fit."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.errors import InputError
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


def max_model_len(mix: LengthMix, max_context: int, given: int | None = None) -> int:
    """Return the tokens of prompt and answer that a request may have at most: as many as are `given`.

    Else that is what 99.9 % of requests do not exceed; at least the longest prompt that keeps its promise
    (`input_tail`) with such an answer, and 2,048; at most what the model was made for. A multiple of 256.
    """
    if given is not None:
        return min(max_context, given)
    both, answers = _quantiles(replace(mix, input_tail=0.0), _SHARE)
    longest = max(_LEAST, both, mix.input_tail + answers)
    return min(max_context, math.ceil(longest / _BLOCK) * _BLOCK)


def check_max_model_len(given: int, mix: LengthMix, attainment: float, max_context: int) -> None:
    """Raise InputError where requests may be longer than the model takes, or too many would be refused.

    As many as must keep their promises have to fit, and the prompt that is promised to (`input_tail`).
    """
    if given > max_context:
        raise InputError(
            f"requests of {given:,} tokens exceed the model's {max_context:,}",
            hint=f"at most {max_context}",
        )
    both, _ = _quantiles(replace(mix, input_tail=0.0), attainment)
    needed = math.ceil(max(both, mix.input_tail + mix.output_mean))
    if needed > given:
        raise InputError(
            f"requests of up to {needed:,} tokens must fit, by their lengths and an attainment of "
            f"{100.0 * attainment:g}%, and engines would refuse those over {given:,}",
            hint=f"write {needed} or more, or leave it out",
        )


@lru_cache(maxsize=256)
def _quantiles(mix: LengthMix, share: float) -> tuple[float, float]:
    """Tokens that a share of requests, and of answers, do not exceed."""
    # The same draws each time: one answer, whenever it is asked for.
    prompts, answers = lengths_like(mix).draw(stream(0, "context"), _DRAWS)
    return float(np.quantile(prompts + answers, share)), float(np.quantile(answers, share))
