"""A fact: a value with where it comes from and how far it can be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Confidence = Literal["high", "medium", "low"]
CONFIDENCES: tuple[Confidence, ...] = get_args(Confidence)
Scalar = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Fact:
    """One value of the catalog, its public source, and the confidence in it."""

    value: Scalar
    source: str
    confidence: Confidence

    def __post_init__(self) -> None:
        if self.confidence not in CONFIDENCES:
            raise ValueError(f"confidence is {self.confidence!r}, not one of {CONFIDENCES}")
