"""Host time that a serving engine adds to every step: scheduling, launching, sampling, detokenising.

Public server measurements show 1.4 to 9.5 ms per step beyond the kernels. The defaults sit at the low
end, since current engines prepare the next step while the GPU works; they are assumptions, tagged low
confidence in reports, and a measured value should replace them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.core.errors import UnknownNameError

BOOKED_SHARE = 0.95
"""Share of its KV cache that a node books at most: planned with, simulated with and routed by."""
MIXED_TOKENS = 2048
"""Tokens that an engine puts into a step at most where prompts and decoding share it."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """What an engine costs beside the kernels.

    `host_s` maps tensor-parallel size to host seconds per step (a missing size takes the next smaller
    one). `memory_share` is the share of GPU memory that the engine uses at most, `reserve_bytes` what
    each GPU needs beside weights, KV cache and activations (CUDA context, graphs, collectives).
    `max_sequences` and `max_tokens` bound one step's batch.
    """

    name: str
    host_s: Mapping[int, float] = field(default_factory=dict)
    memory_share: float = 0.92
    reserve_bytes: float = 1.0e9
    max_sequences: int = 512
    max_tokens: int = 8192

    def host_seconds(self, tp: int) -> float:
        """Return host seconds per step at tensor-parallel size `tp`."""
        known = [size for size in self.host_s if size <= tp]
        return self.host_s[max(known)] if known else 0.0


ENGINES: Mapping[str, EngineProfile] = {
    "none": EngineProfile("none"),
    "vllm": EngineProfile("vllm", {1: 1.4e-3, 2: 1.8e-3, 4: 2.0e-3, 8: 2.4e-3}),
    "sglang": EngineProfile("sglang", {1: 1.4e-3, 2: 1.8e-3, 4: 2.0e-3, 8: 2.4e-3}),
    "atoll": EngineProfile("atoll", {1: 2.0e-3, 2: 2.4e-3, 4: 2.8e-3, 8: 3.2e-3}),
}


def engine(name: str) -> EngineProfile:
    """Return an engine's profile by name; "none" has no host time and gives kernel time alone."""
    try:
        return ENGINES[name]
    except KeyError:
        raise UnknownNameError("engine", name, ENGINES) from None
