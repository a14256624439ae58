"""Atoll's own stage engine (`atoll.engine`): any layout, a process a node and one in front of them.

How its processes are started is told in `runtime.endpoints.stage_endpoint`: they are more than a command.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from atoll.core.ids import Phase
from atoll.engines.engine import (
    Connector,
    Engine,
    Irregularity,
    WeightFormat,
    is_whole,
    one_of,
    platform_of,
)
from atoll.engines.limits import MIXED_TOKENS, EngineLaunch, HostTime
from atoll.engines.profile import (
    SERVER_HOST_TIME,
    SERVER_REQUEST_S,
    SERVER_STREAM_S,
    USUAL_KERNELS,
    EngineDefaults,
    KernelRatios,
    LaunchTime,
    StartTime,
)

if TYPE_CHECKING:
    from atoll.catalog.gpus import GpuType
    from atoll.catalog.transformer import TransformerSpec

_HOST_TIME = HostTime(step_s=0.32e-3, sequence_s=0.01e-3)
"""Beside an H200, with a model of two small layers; another such host took 0.024 ms for every sequence."""
_EAGER_LAYER_S = 0.4e-3
"""Least time of a layer launched from PyTorch: 0.32 to 0.53 ms on the host of an H200."""
_HOPPER = KernelRatios(
    *(0.35, 1.3),
    "steps of an 8B model on an H200, November 2026 (gpu_steps_8b-atoll.csv, gpu_engine_atoll.csv)",
)
"""From Hopper on its kernels overlap. Reads were fitted to steps of 1 to 96 decodes over 840 tokens (1.5).
Since then the kernel takes 93 us where it took 107, with the contexts of 64 chats."""
_FORMATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


_SEQUENCES = 512
_CORE_TOKENS, _CORE_CHUNK = 512, 256
"""On cores, where a step of 2,048 tokens takes seconds that everybody who decodes waits for."""


class StepLimits(NamedTuple):
    """Most sequences of a step (None: as many as rows), most rows, and most rows of one prompt."""

    sequences: int | None
    tokens: int
    chunk: int


def limit_steps(device: str, tokens: int | None = None, sequences: int | None = None) -> StepLimits:
    """Return the limits of a step on a device as torch names it; `tokens` and `sequences` are those set.

    On GPUs they are what plans reckon with (`EngineDefaults.profile`).
    """
    on_cores = device == "cpu"
    own_sequences, own_tokens = _batch(None)
    # A step has room for a token of every sequence.
    rows = tokens or max(_CORE_TOKENS if on_cores else own_tokens, sequences or 0)
    if on_cores:
        return StepLimits(sequences, rows, rows if tokens else _CORE_CHUNK)
    return StepLimits(min(sequences or own_sequences, rows), rows, rows)


def _batch(gpu: GpuType | None) -> tuple[int, int]:
    del gpu
    return _SEQUENCES, MIXED_TOKENS  # on any GPU


def _ratios(gpu: GpuType | None, version: str | None) -> KernelRatios:
    del version
    return _HOPPER if gpu is not None and platform_of(gpu) >= ("cuda", 9.0) else USUAL_KERNELS


def format_name(dtype: str) -> str:
    """Return what fleet files call a number format."""
    return _FORMATS.get(dtype, dtype)


class StageEngine(Engine):
    """Atoll's own engine."""

    name = "atoll"
    title = "the stage engine"
    preference = 30
    launches = True
    staged = True
    weights = "folder"
    on_cores = True
    on_shares = True
    max_node_copies = 1
    allows = frozenset(Irregularity)
    connector = Connector("atoll", frozenset({Phase.PREFILL, Phase.DECODE}))
    platforms: ClassVar = {"cuda": 7.0}
    formats: ClassVar = {
        "bf16": WeightFormat(native=8.0, platforms=("cuda",)),
        "fp16": WeightFormat(platforms=("cuda",)),
        "fp32": WeightFormat(platforms=("cuda",)),
        # Below Ada, and everywhere for formats of 4 bits, weights are expanded in the kernel, tile by tile.
        "fp8": WeightFormat(native=8.9, platforms=("cuda",)),
        "int8": WeightFormat(native=math.inf, platforms=("cuda",)),
        "int4": WeightFormat(native=math.inf, platforms=("cuda",)),
        "mxfp4": WeightFormat(native=math.inf, platforms=("cuda",)),
    }
    served_on = frozenset({"Hopper"})
    tested = frozenset(
        {
            "one node",
            "several nodes",
            "tensor parallel",
            "phases apart",
            "phases apart over nodes",
        }
    )
    ready_s = 300.0
    failed_probes = 1
    stop_s = 12.0
    fatal_codes = None
    settings: ClassVar = {"dtype": one_of("float32", "bfloat16", "float16"), "kv-mib": is_whole}
    compile_caches: ClassVar = {"TRITON_CACHE_DIR": "triton"}
    default_dtype = "float32"
    program = re.compile(
        r"atoll|atoll\.(runtime\.(instance\.process|gateway)|deploy\.commands\.stage_node)"
    )
    default_port = 8080
    has_status = True
    resume = "tokens"
    vllm_tokens = True
    defaults = EngineDefaults(
        {"async": SERVER_HOST_TIME["async"], "sync": _HOST_TIME},
        "async",
        _batch,
        memory_share=0.92,
        prefix_caching=True,
        ratios=_ratios,
        schedules_ahead=True,
        stages_wait=True,
        launch=LaunchTime(unusual_s=_EAGER_LAYER_S),
        request_s=SERVER_REQUEST_S,
        stream_s=SERVER_STREAM_S,
    )
    start = StartTime(26.0, "an 8B model of random weights on an H200, November 2026")
    orders_by_promise = True

    def refuses(self, spec: TransformerSpec, gpu: GpuType) -> str | None:
        """Return why it cannot compute a model on a kind of GPU; its attention keeps keys and values."""
        if spec.mla is not None:
            return f"{self.title} has no latent attention"
        if spec.delta is not None:
            return f"{self.title} has no linear attention"
        return super().refuses(spec, gpu)

    def takes(self, source: str, *, stand_in: bool) -> bool:
        """Return True: it loads everything, and stands in for other models."""
        del source, stand_in
        return True

    def list_unkept(self, launch: EngineLaunch, dtype: str) -> tuple[str, ...]:
        """Return what it does otherwise than planned; its KV cache is in `dtype` or FP8."""
        unkept = []
        kv, own = launch.kv_cache_dtype, format_name(dtype)
        if kv not in (None, own, "fp8"):
            unkept.append(f"kv_cache_dtype {kv}: its KV cache is in {own}")
        if launch.gpu_memory_utilization is not None:
            share = f"{100.0 * launch.gpu_memory_utilization:g}%"
            unkept.append(f"gpu_memory_utilization {share}: --kv says how much it takes")
        if launch.load_format is not None:
            unkept.append(f"load_format {launch.load_format}: it maps safetensors")
        return tuple(unkept)


ENGINE = StageEngine()
