"""TensorRT-LLM: recognised and reckoned with where somebody else runs it, never started."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from atoll.engines.engine import Engine
from atoll.engines.profile import (
    EAGER_LAUNCH,
    SERVER_HOST_TIME,
    SERVER_REQUEST_S,
    SERVER_STREAM_S,
    SERVER_TOKENIZE_S,
    EngineDefaults,
)

if TYPE_CHECKING:
    from atoll.catalog.gpus import GpuType


def _batch(gpu: GpuType | None) -> tuple[int, int]:
    del gpu
    return 2048, 8192


class TrtLlm(Engine):
    """`trtllm-serve`; to a gateway it is any OpenAI server.

    Its kernels take about what vLLM's do: 0.9 to 1.05 times as long for large products and attention in the
    tables of both. It launches experts without Python, so large steps with them do not wait for the host.
    """

    name = "trtllm"
    title = "TensorRT-LLM"
    aliases = ("tensorrt-llm", "tensorrt_llm")
    backend_kind = "openai"
    program = re.compile(r"trtllm-serve|tensorrt_llm(\..*)?")
    default_port = 8000
    platforms: ClassVar = {"cuda": 8.0}
    defaults = EngineDefaults(
        SERVER_HOST_TIME,
        "async",
        _batch,
        memory_share=0.9,
        prefix_caching=True,
        launch=EAGER_LAUNCH,
        fuses_all_reduce=True,
        # Servers of 1.0 take the time of two kernels, those of 1.1 and later of one.
        fuses_widely_since=(1, 1),
        schedules_ahead=True,
        async_since=(1, 0),
        request_s=SERVER_REQUEST_S,
        stream_s=SERVER_STREAM_S,
        tokenize_s=SERVER_TOKENIZE_S,
        admits_by_prompts=True,
        prompt_interval=1,
        collects_prompts=True,
        mxfp8=True,
        expert_parallel=True,
    )


ENGINE = TrtLlm()
