"""The work of one step of a node: what is in the batch, not how it is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from atoll.core.errors import UsageError
from atoll.perf.operators import Num, larger, smaller


@dataclass(frozen=True, slots=True)
class Batch(Generic[Num]):
    """One step: new prompt tokens, and sequences that each produce one token.

    All fields are floats, or arrays of one shape for many steps at once. `prefill_context` is how
    many tokens of each prompt are in the cache already (earlier chunks, a shared prefix) and
    `decode_context` how many tokens each decoding sequence attends to; both are means.
    `length_spread` is E[l^2] / E[l]^2 of the prompts in the batch, since attention work grows with
    the square of a prompt; 1 when they are equal. `rows` are the tokens computed for each decoding
    sequence: more than one where guesses are checked.
    """

    prefill_tokens: Num
    prefill_sequences: Num
    prefill_context: Num
    decode_sequences: Num
    decode_context: Num
    length_spread: float = 1.0
    rows: float = 1.0

    @staticmethod
    def prefill(
        tokens: float, sequences: float = 1.0, context: float = 0.0, length_spread: float = 1.0
    ) -> Batch[float]:
        """Return a step that prefills `tokens` prompt tokens of `sequences` prompts in all."""
        _check(tokens=tokens, sequences=sequences, length_spread=length_spread)
        _check(zero=True, context=context)
        return Batch(float(tokens), float(sequences), float(context), 0.0, 0.0, length_spread)

    @staticmethod
    def decode(sequences: float, context: float) -> Batch[float]:
        """Return a step in which `sequences` sequences over `context` tokens yield one token each."""
        _check(sequences=sequences)
        _check(zero=True, context=context)
        return Batch(0.0, 0.0, 0.0, float(sequences), float(context))

    @property
    def tokens(self) -> Num:
        """Rows that pass through the layers."""
        return self.prefill_tokens + self.decode_sequences * self.rows

    @property
    def outputs(self) -> Num:
        """Rows that need logits: the last token of each prompt and every one of decoding sequences."""
        return self.prefill_sequences + self.decode_sequences * self.rows

    @property
    def prompt_length(self) -> Num:
        """Mean new tokens per prompt (0 where there are no prompts)."""
        return self.prefill_tokens / larger(self.prefill_sequences, 1e-9)

    def pairs(self, window: float | None) -> Num:
        """Return the query-key pairs of the prefill part, at most `window` keys per query.

        A prompt of l new tokens after c cached ones has l c + l^2 / 2 pairs; with a window w the
        queries past position w have w keys each. The spread of lengths counts for the part of a mean
        prompt below the window; past it the work is linear in the length and the mean says all. No
        query has more than w keys however uneven the prompts are.
        """
        length = self.prompt_length
        context = self.prefill_context
        if window is None:
            per_prompt = length * context + 0.5 * self.length_spread * length * length
        else:
            below = _least(length, larger(window - context, 0.0))
            ramp = below * context + 0.5 * self.length_spread * below * below
            per_prompt = _least(ramp + (length - below) * window, length * window)
        return self.prefill_sequences * per_prompt

    def prefill_keys(self, window: float | None) -> Num:
        """Return the keys that the prefill part reads: cached ones in reach and its own."""
        reach = self.prefill_context if window is None else smaller(self.prefill_context, window)
        return self.prefill_tokens + self.prefill_sequences * reach

    def longest(self, window: float | None) -> Num:
        """Return the keys that the last query of a mean prompt attends to."""
        reach = self.prompt_length + self.prefill_context
        return reach if window is None else smaller(reach, window)

    def decode_keys(self, window: float | None) -> Num:
        """Return how many cached tokens each decoding sequence reads in a layer with this window."""
        return self.decode_context if window is None else smaller(self.decode_context, window)


def _check(*, zero: bool = False, **values: float) -> None:
    for name, value in values.items():
        if not (0.0 < value < 1e12 or (zero and value == 0.0)):
            bound = "0 or more" if zero else "above 0"
            raise UsageError(f"{value!r} is not a number {bound}", field=name)


def _least(x: Num, y: Num) -> Num:
    if isinstance(x, float):
        return min(x, y)
    import numpy as np

    return np.minimum(x, y)
