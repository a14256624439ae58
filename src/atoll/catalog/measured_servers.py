"""Servers that were measured from outside: how they differ from what the performance model says of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.catalog.transformer import TransformerSpec


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """A model on GPUs of one type under one engine, as it was measured on a date.

    `compute`, `memory` and `launch` are times of arithmetic, of memory and of launching steps with prompts
    over those of the performance model. Times of the host are seconds: `step_s` of a step and `sequence_s` of
    each sequence in it, `request_s` of a request beside steps, `tokenize_s` of each token of its prompt and
    `stream_s` of each sequence that runs meanwhile. `tp` GPUs split each layer. `error` and
    `first_token_error` are how far times per token and to the first one may be off where it is predicted with
    this, as relative standard deviations. `version` is the engine's, None if nobody said it.
    """

    model: str
    spec: TransformerSpec
    gpu: str
    tp: int
    engine: str
    version: str | None
    date: str
    compute: float
    memory: float
    launch: float
    step_s: float
    sequence_s: float
    request_s: float
    tokenize_s: float
    stream_s: float
    error: float
    first_token_error: float

    @property
    def engine_name(self) -> str:
        """The engine with its version, as in "vllm@0.22"."""
        return self.engine if self.version is None else f"{self.engine}@{self.version}"

    def __str__(self) -> str:
        return (
            f"profile of {self.date} on {self.gpu}:{self.tp}, {self.engine_name} with {self.model}"
        )

    def entry(self) -> dict[str, object]:
        """Return it as an entry of `servers` in an overlay."""
        return {
            "model": self.model,
            "node": f"{self.gpu}:{self.tp}",
            "engine": self.engine_name,
            "date": self.date,
            **{name: float(f"{getattr(self, name):.4g}") for name in RATIOS},
            **{name: _write_seconds(getattr(self, f"{name}_s")) for name in HOST_TIMES},
            **{name: float(f"{getattr(self, name):.3g}") for name in ERRORS},
        }


RATIOS = ("compute", "memory", "launch")
HOST_TIMES = ("step", "sequence", "request", "tokenize", "stream")
ERRORS = ("error", "first_token_error")


def _write_seconds(seconds: float) -> str:
    """Write a time so that a person can read it and nothing is lost of four digits."""
    return f"{seconds * 1e6:.4g}us" if seconds < 1e-3 else f"{seconds * 1e3:.4g}ms"
