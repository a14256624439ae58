"""When requests come: renewal processes on a clock of their own, and clocks that run at any rate.

Arrivals are made in two steps. A renewal process (Poisson, Gamma, Weibull) makes gaps with mean 1 and a
given CV: that is *operational* time, in which one request is due per unit. A `Clock` maps it to
seconds through the rate: where the rate is twice as high, the same gaps pass in half the time. So
the local burstiness is the one asked for whatever the rate does, which thinning would lose (thinned
arrivals tend to Poisson).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from atoll.core.errors import InputError, UnknownNameError
from atoll.workload.requests import Floats

Family = Literal["poisson", "gamma", "weibull"]
FAMILIES: tuple[Family, ...] = ("poisson", "gamma", "weibull")
MAX_CV = 50.0
_MIN_CV = 0.01


@dataclass(frozen=True)
class Renewal:
    """A renewal process of mean gap 1: independent gaps of one family with one CV."""

    family: Family = "poisson"
    cv: float = 1.0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise UnknownNameError("arrival process", self.family, FAMILIES)
        if self.family == "poisson" and self.cv != 1.0:
            raise InputError(
                f"Poisson arrivals have a CV of 1, not {self.cv:g}",
                field="cv",
                hint="use gamma or weibull",
            )
        if not _MIN_CV <= self.cv <= MAX_CV:
            raise InputError(f"{self.cv!r} is not a CV from {_MIN_CV:g} to {MAX_CV:g}", field="cv")

    @cached_property
    def shape(self) -> float:
        """The shape parameter of the gaps: 1 where they are exponential."""
        if self.family == "weibull":
            return _weibull_shape(self.cv)
        return 1.0 / (self.cv * self.cv)

    def gaps(self, rng: np.random.Generator, count: int) -> Floats:
        """Return `count` gaps of mean 1."""
        if self.shape == 1.0:
            return rng.standard_exponential(count)
        if self.family == "gamma":
            drawn = rng.standard_gamma(self.shape, count)
            drawn /= self.shape
            return drawn
        drawn = rng.standard_exponential(count)
        np.power(drawn, 1.0 / self.shape, out=drawn)
        drawn /= math.gamma(1.0 + 1.0 / self.shape)
        return drawn

    def first(self, rng: np.random.Generator) -> float:
        """Return the time to the first arrival for an observer who comes at no particular moment.

        That moment falls into a long gap more often than into a short one: the gap around it has
        the length-biased law, and it lies anywhere in it. With it the expected number of arrivals
        in any window is exactly the length of the window.
        """
        if self.shape == 1.0:
            return float(rng.standard_exponential())
        if self.family == "gamma":
            around = rng.standard_gamma(self.shape + 1.0) / self.shape
        else:
            inverse = 1.0 / self.shape
            around = rng.standard_gamma(1.0 + inverse) ** inverse / math.gamma(1.0 + inverse)
        return float(rng.random() * around)


def _weibull_shape(cv: float) -> float:
    """The Weibull shape k with Gamma(1 + 2/k) / Gamma(1 + 1/k)^2 = 1 + cv^2, by bisection on log k."""
    target = math.log1p(cv * cv)
    low, high = math.log(0.05), math.log(200.0)
    for _ in range(80):
        middle = (low + high) / 2
        inverse = math.exp(-middle)
        spread = math.lgamma(1 + 2 * inverse) - 2 * math.lgamma(1 + inverse)
        low, high = (middle, high) if spread > target else (low, middle)
    return math.exp((low + high) / 2)
