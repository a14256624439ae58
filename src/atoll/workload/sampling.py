"""Drawing prompt and answer lengths: fixed, log-normal, normal, or as measured.

A sampler draws pairs; those that come from measurements keep how answers depend on prompts.
Log-normal and normal lengths are given by mean and CV (standard deviation over mean).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from atoll.core.errors import InputError
from atoll.workload.lengths import LengthMix
from atoll.workload.requests import MAX_TOKENS, Floats, Ints, Small

_RANKS = 65_536
"""Entries of a quantile table: drawing a length is picking one of them."""
_MAX_CV = 100.0


class LengthSampler(Protocol):
    """A mix of prompt and answer lengths that can be drawn from."""

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        """Return prompt and answer tokens of `count` requests."""

    def mix(self) -> LengthMix:
        """Return the moments of the mix."""


@dataclass(frozen=True)
class ClassMix:
    """Requests of several classes, each with lengths of its own: names, shares (to 1) and samplers."""

    names: tuple[str, ...]
    shares: tuple[float, ...]
    parts: tuple[LengthSampler, ...]

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        """Return prompt and answer tokens of `count` requests."""
        return self.draw_classes(rng, count)[:2]

    def draw_classes(self, rng: np.random.Generator, count: int) -> tuple[Ints, Ints, Small]:
        """Return the same and the number of each request's class."""
        klass = rng.choice(len(self.parts), count, p=np.array(self.shares) / sum(self.shares))
        drawn = [part.draw(rng, count) for part in self.parts]
        rows = np.arange(count)
        prompts, answers = (np.stack(side)[klass, rows] for side in zip(*drawn, strict=True))
        return prompts, answers, klass.astype(np.int16)

    def mix(self) -> LengthMix:
        """Return the moments of the mix: those of a mixture mix linearly."""
        mixes = [part.mix() for part in self.parts]
        names = ("input_mean", "output_mean", "input_mean_square", "output_mean_square")
        total = sum(self.shares)
        means = (
            sum(s * getattr(m, name) for s, m in zip(self.shares, mixes, strict=True)) / total
            for name in names
        )
        return LengthMix(*means)


class Marginal(Protocol):
    """The law of one length."""

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Return `count` lengths in tokens, each at least 1."""

    def moments(self) -> tuple[float, float]:
        """Return the mean and the mean square of what `draw` gives, in tokens."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length, in tokens."""

    tokens: int

    def __post_init__(self) -> None:
        _check_mean(self.tokens)

    def draw(self, rng: np.random.Generator, count: int) -> Ints:  # noqa: ARG002
        """Return the length `count` times."""
        return np.full(count, self.tokens, np.int32)

    def moments(self) -> tuple[float, float]:
        """Return the mean and mean square."""
        return float(self.tokens), float(self.tokens) ** 2


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal length with this mean and CV, rounded, at least 1 and at most `longest`."""

    mean: float
    cv: float
    longest: int = MAX_TOKENS

    def __post_init__(self) -> None:
        _check_mean(self.mean)
        _check_cv(self.cv)

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Return `count` lengths."""
        variance = math.log1p(self.cv * self.cv)
        drawn = rng.standard_normal(count)
        drawn *= math.sqrt(variance)
        # Shifted so that `mean` is the mean of the lengths, not their median.
        drawn += math.log(self.mean) - variance / 2
        return _round(np.exp(drawn, out=drawn), self.longest)

    def moments(self) -> tuple[float, float]:
        """Return the mean and mean square of the law itself; rounding and limits hardly move them."""
        return self.mean, self.mean * self.mean * (1 + self.cv * self.cv)


@dataclass(frozen=True, slots=True)
class Normal:
    """A normal length cut off below half a token (what falls there is drawn again), rounded.

    `mean` and `cv` are those of the normal law before it is cut: with a wide one (cv above 0.4) the
    lengths drawn are a little longer.
    """

    mean: float
    cv: float
    longest: int = MAX_TOKENS

    def __post_init__(self) -> None:
        _check_mean(self.mean)
        _check_cv(self.cv)

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Return `count` lengths."""
        deviation = self.mean * self.cv
        drawn = rng.normal(self.mean, deviation, count)
        # The mean is at least 1, so more than half of all draws are kept each time round.
        while len(short := np.flatnonzero(drawn < 0.5)):
            drawn[short] = rng.normal(self.mean, deviation, len(short))
        return _round(drawn, self.longest)

    def moments(self) -> tuple[float, float]:
        """Return the mean and mean square of the law after cutting."""
        deviation = self.mean * self.cv
        if deviation == 0.0:
            return self.mean, self.mean * self.mean
        # Moments of a normal law that is cut off below, by its hazard there.
        low = (0.5 - self.mean) / deviation
        hazard = math.exp(-low * low / 2) / math.sqrt(2 * math.pi)
        hazard /= 0.5 * math.erfc(low / math.sqrt(2))
        mean = self.mean + deviation * hazard
        variance = deviation * deviation * (1 + low * hazard - hazard * hazard)
        return mean, variance + mean * mean


@dataclass(frozen=True)
class Independent:
    """Prompt and answer lengths drawn independently."""

    input: Marginal
    output: Marginal

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        """Return prompt and answer tokens of `count` requests."""
        return self.input.draw(rng, count), self.output.draw(rng, count)

    def mix(self) -> LengthMix:
        """Return the moments of the mix."""
        (mean, square), (out_mean, out_square) = self.input.moments(), self.output.moments()
        return LengthMix(mean, out_mean, square, out_square)


@dataclass(frozen=True)
class Quantiles:
    """Lengths by measured quantiles; answers by those of the group that the prompt falls in.

    `shares` rise from 0 to 1 and `input` holds the prompt length at each. Prompts are cut into as
    many groups of equal probability as `output` has rows; row g holds the answer length at each of
    `output_shares` for the prompts of group g. Between quantiles the logarithm of a length is linear
    in the share.
    """

    shares: tuple[float, ...]
    input: tuple[float, ...]
    output_shares: tuple[float, ...]
    output: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        _check_quantiles(self.shares, self.input, "input")
        for row in self.output:
            _check_quantiles(self.output_shares, row, "output")
        if not self.output or _RANKS % len(self.output):
            raise InputError("the groups must be a power of two", field="output")

    @cached_property
    def _tables(self) -> tuple[Ints, Ints]:
        prompts = _table(self.shares, self.input, _RANKS)
        size = max(4096, _RANKS // len(self.output))
        answers = np.concatenate([_table(self.output_shares, row, size) for row in self.output])
        return prompts, answers

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        """Return prompt and answer tokens of `count` requests."""
        prompts, answers = self._tables
        size = len(answers) // len(self.output)
        rank = rng.integers(0, _RANKS, count, np.uint16)
        offset = rng.integers(0, size, count, np.uint16)
        # The prompt's rank names its group, and the group its stretch of the table of answers.
        place = rank // np.uint16(_RANKS // len(self.output)) * np.int32(size) + offset
        return prompts[rank], answers[place]

    def mix(self) -> LengthMix:
        """Return the moments of what is drawn."""
        prompts, answers = (table.astype(np.float64) for table in self._tables)
        return LengthMix(
            float(prompts.mean()),
            float(answers.mean()),
            float(np.square(prompts).mean()),
            float(np.square(answers).mean()),
        )


@dataclass(frozen=True, eq=False)
class Empirical:
    """Pairs of lengths as they were measured, drawn with replacement."""

    input: Ints
    output: Ints

    def __post_init__(self) -> None:
        if not len(self.input) or len(self.input) != len(self.output):
            raise InputError("no pairs of lengths to draw from", field="lengths")

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        """Return prompt and answer tokens of `count` requests."""
        drawn = rng.integers(0, len(self.input), count, np.uint32)
        return self.input[drawn], self.output[drawn]

    def mix(self) -> LengthMix:
        """Return the moments of the pairs."""
        prompts, answers = self.input.astype(np.float64), self.output.astype(np.float64)
        return LengthMix(
            float(prompts.mean()),
            float(answers.mean()),
            float(np.square(prompts).mean()),
            float(np.square(answers).mean()),
        )


def _table(shares: Sequence[float], lengths: Sequence[float], size: int) -> Ints:
    """Lengths at `size` equally likely ranks."""
    ranks: Floats = (np.arange(size) + 0.5) / size
    return _round(np.exp(np.interp(ranks, shares, np.log(lengths))), MAX_TOKENS)


def _round(tokens: Floats, longest: int) -> Ints:
    np.rint(tokens, out=tokens)
    np.clip(tokens, 1.0, float(longest), out=tokens)
    return tokens.astype(np.int32)


def _check_mean(mean: float) -> None:
    if not 1.0 <= mean <= MAX_TOKENS:
        raise InputError(f"{mean!r} is not a length of 1 to {MAX_TOKENS:,} tokens", field="lengths")


def _check_cv(cv: float) -> None:
    if not 0.0 <= cv <= _MAX_CV:
        raise InputError(
            f"{cv!r} is not a CV of 0 to {_MAX_CV:g}",
            field="lengths",
            hint="the CV is standard deviation over mean, as in 0.8",
        )


def _check_quantiles(shares: Sequence[float], lengths: Sequence[float], field: str) -> None:
    rising = all(a <= b for a, b in itertools.pairwise(lengths))
    ordered = all(a < b for a, b in itertools.pairwise(shares))
    if len(shares) != len(lengths) or len(shares) < 2 or not rising or not ordered:
        raise InputError("quantiles must rise with their shares", field=field)
    if shares[0] != 0.0 or shares[-1] != 1.0 or lengths[0] < 1:
        raise InputError("quantiles go from share 0, at 1 token or more, to share 1", field=field)
