"""Mixes of prompt and answer lengths, as the moments that capacity depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from atoll.core.errors import InputError, UnknownNameError

_MAX_TOKENS = 1e9


PREFIX_BLOCK = 16
"""Tokens that engines keep and find together, as vLLM has it unless told."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A beginning that prompts have in common: so many `tokens` of a `share`, such as a system prompt."""

    share: float
    tokens: int

    @property
    def blocks(self) -> int:
        """Whole blocks of it, which are all that is found again."""
        return self.tokens // PREFIX_BLOCK


@dataclass(frozen=True, slots=True)
class LengthMix:
    """How long prompts and answers are, in tokens.

    Means and mean squares are per request. `input_tail` is the prompt length that must still keep
    the prefill promise on its own (0: the mean prompt). With a `prefix` that much of prompts is in the cache.
    """

    input_mean: float
    output_mean: float
    input_mean_square: float
    output_mean_square: float
    input_tail: float = 0.0
    prefix: SharedPrefix | None = None

    def __post_init__(self) -> None:
        for name in ("input_mean", "output_mean"):
            _check_length(name, getattr(self, name))
        for name, mean in (
            ("input_mean_square", self.input_mean),
            ("output_mean_square", self.output_mean),
        ):
            value = getattr(self, name)
            if not value < math.inf:
                raise InputError(f"{value!r} is not a finite number", field=name)
            if value < mean * mean * (1.0 - 1e-9):
                raise InputError(
                    f"{value!r} is below the square of the mean, {mean * mean:g}",
                    field=name,
                    hint="the mean of the squares is at least the square of the mean",
                )
        if not (math.isfinite(self.input_tail) and self.input_tail >= 0.0):
            raise InputError(f"{self.input_tail!r} is not a length in tokens", field="input_tail")

    @classmethod
    def fixed(cls, input_tokens: float, output_tokens: float) -> LengthMix:
        """Return the mix where every request has the same two lengths, in tokens."""
        return cls(
            input_tokens,
            output_tokens,
            input_tokens * input_tokens,
            output_tokens * output_tokens,
        )

    @classmethod
    def lognormal(
        cls, input_mean: float, input_median: float, output_mean: float, output_median: float
    ) -> LengthMix:
        """Return the mix of two log-normal lengths given by mean and median, in tokens.

        For a log-normal, E[x^2] = mean^4 / median^2.
        """
        for name, mean, median in (
            ("input_median", input_mean, input_median),
            ("output_median", output_mean, output_median),
        ):
            _check_length(name.replace("median", "mean"), mean)
            if not 0.0 < median <= mean:
                raise InputError(
                    f"{median!r} is not between 0 and the mean {mean:g}",
                    field=name,
                    hint="a log-normal length has its median at or below its mean",
                )
        return cls(
            input_mean,
            output_mean,
            _lognormal_square(input_mean, input_median),
            _lognormal_square(output_mean, output_median),
        )

    @property
    def decode_context(self) -> float:
        """Mean tokens that a generated token attends to, as a server in steady state sees it.

        Long answers stay longer, so they weigh more: E[in] + E[out^2] / (2 E[out]), prompt and
        answer lengths taken as independent.
        """
        return self.input_mean + self.output_mean_square / (2.0 * self.output_mean)

    @property
    def computed(self) -> LengthMix:
        """The mix with prompts as long as what is left to compute of them, and to keep for them alone.

        Prompts are taken as log-normal, and as independent of whether they have the common beginning.
        """
        if self.prefix is None:
            return self
        tokens = float(self.prefix.blocks * PREFIX_BLOCK)
        mean, square = _beyond(self.input_mean, self.input_mean_square, tokens)
        share = self.prefix.share
        # The last token is computed in any case.
        own = max(1.0, (1.0 - share) * self.input_mean + share * mean)
        own_square = (1.0 - share) * self.input_mean_square + share * square
        return replace(
            self, input_mean=own, input_mean_square=max(own * own, own_square), prefix=None
        )

    @property
    def found(self) -> float:
        """Mean tokens of a prompt that are in the cache when it comes."""
        return self.input_mean - self.computed.input_mean

    @property
    def resident(self) -> float:
        """Tokens of KV cache that prompts have in common."""
        return 0.0 if self.prefix is None else float(self.prefix.blocks * PREFIX_BLOCK)

    @property
    def spreads(self) -> tuple[float, float]:
        """Standard deviations of prompts and of answers, each over its mean."""
        sides = (
            (self.input_mean, self.input_mean_square),
            (self.output_mean, self.output_mean_square),
        )
        first, second = (math.sqrt(max(0.0, square / mean**2 - 1.0)) for mean, square in sides)
        return first, second

    def has_moments_of(self, other: LengthMix) -> bool:
        """Return whether means and mean squares are those of another, but for rounding."""
        names = ("input_mean", "output_mean", "input_mean_square", "output_mean_square")
        return all(math.isclose(getattr(self, n), getattr(other, n)) for n in names)


def _beyond(mean: float, mean_square: float, least: float) -> tuple[float, float]:
    """Return mean and mean square of what log-normal lengths have beyond `least`, none if shorter."""
    variance = math.log(mean_square / mean**2)
    if variance < 1e-9:
        rest = max(0.0, mean - least)
        return rest, rest * rest
    if least <= 0.0:
        return mean, mean_square
    sd = math.sqrt(variance)
    at = (math.log(mean / least) - 0.5 * variance) / sd

    def above(shift: float) -> float:
        return 0.5 * math.erfc(-(at + shift) / math.sqrt(2.0))

    # Moments of the part above `least`, of orders 0, 1 and 2.
    longer, total, squares = above(0.0), mean * above(sd), mean_square * above(2.0 * sd)
    return total - least * longer, squares - 2.0 * least * total + least * least * longer


def _check_length(name: str, value: float) -> None:
    if not 1.0 <= value <= _MAX_TOKENS:
        raise InputError(f"{value!r} is not a length of 1 to 1e9 tokens", field=name)


def _lognormal_square(mean: float, median: float) -> float:
    # Products, not powers: where they overflow the result is infinite, and refused as such.
    return (mean * mean) * (mean / median) * (mean / median)


# Moments computed from public traces: Azure LLM inference 2023 (code, conversation), Mooncake
# conversation, and one hour generated from ServeGen's image and DeepSeek-R1 clients. Of BurstGPT only
# the mean of prompt and answer together is measured; the rest is assumed (docs/internals/workloads.md).
BUILT_IN: dict[str, LengthMix] = {
    "azure-code": LengthMix(2047.8, 27.88, 8.0894e6, 4360.5),
    "azure-conv": LengthMix(1154.7, 211.13, 2.5628e6, 7.11e4),
    "burstgpt": LengthMix(607.9, 126.0, 9.9407e5, 3.8737e4),
    "long-context": LengthMix(12035.1, 342.6, 3.9449e8, 1.7984e5),
    "multimodal": LengthMix(1360.1, 131.42, 3.47484e6, 3.9798e4),
    "reasoning": LengthMix(1092.0, 2963.2, 1.41346e7, 1.846e7),
}


def length_mix(name: str) -> LengthMix:
    """Return a built-in mix by name, or "INxOUT" for fixed lengths, such as "1024x256"."""
    mix = BUILT_IN.get(name)
    if mix is not None:
        return mix
    first, x, second = name.partition("x")
    # ASCII first: isdigit() alone also holds for "²", which float() refuses.
    if x and name.isascii() and first.isdigit() and second.isdigit() and len(name) < 24:
        for field, what, length in (
            ("input_mean", "prompts", int(first)),
            ("output_mean", "answers", int(second)),
        ):
            if length == 0:
                raise InputError(
                    f"{name!r} asks for {what} of 0 tokens",
                    field=field,
                    hint="give both lengths at least 1 token, as in 1024x256",
                )
        return LengthMix.fixed(float(first), float(second))
    raise UnknownNameError("length mix", name, [*BUILT_IN, "1024x256 (prompt x answer tokens)"])
