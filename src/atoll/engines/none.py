"""No engine: the time of kernels run alone, to plan and to compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.engines.engine import Engine
from atoll.engines.profile import NO_HOST_TIME, EngineDefaults

if TYPE_CHECKING:
    from atoll.catalog.gpus import GpuType


def _batch(gpu: GpuType | None) -> tuple[int, int]:
    del gpu
    return 512, 8192


class NoEngine(Engine):
    """Kernels without a host."""

    name = "none"
    title = "no engine"
    backend_kind = "openai"
    defaults = EngineDefaults(
        {"async": NO_HOST_TIME, "sync": NO_HOST_TIME},
        "sync",
        _batch,
        memory_share=0.92,
        prefix_caching=False,
        keeps_busy=False,
    )


ENGINE = NoEngine()
