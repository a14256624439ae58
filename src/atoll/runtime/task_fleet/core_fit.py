"""A CPU core as the catalog describes GPUs: so fast that a language model runs as it was measured.

Rates are enough to plan with. A simulator runs language models step by step, and wants to know how fast a
machine reads weights (what a token of an answer takes) and how fast it computes (what a prompt takes).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from atoll.catalog.nodes import NodeType
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import InputError
from atoll.engines.table import EngineChoice
from atoll.perf.components.sites import decode_seconds, prompt_seconds
from atoll.perf.step import AnalyticStepModel, analytic
from atoll.runtime.task_fleet.measure import TokenPace

_GB = 1e9
_ROUNDS = 4
_HALVINGS = 60
_BANDWIDTH_GB = (1.0, 5_000.0)
_TFLOPS = (1e-4, 5_000.0)


@dataclass(frozen=True, slots=True)
class CoreSpeed:
    """Speed as the catalog gives it of a GPU: bandwidth in GB/s, 16-bit TFLOPS."""

    bandwidth_gbs: float
    fp16_tflops: float


def fit_core(
    spec: TransformerSpec, node: NodeType, pace: TokenPace, engine: str | EngineChoice = "vllm"
) -> CoreSpeed:
    """Return how fast the GPU of `node` would have to be for a model to have this pace on it."""
    if not (pace.first_s > 0.0 and pace.token_s > 0.0):
        raise InputError("a pace has seconds above 0", field="pace")

    def model(speed: CoreSpeed) -> AnalyticStepModel:
        gpu = replace(
            node.gpu,
            bandwidth_bytes_per_s=speed.bandwidth_gbs * _GB,
            fp16_tflops=speed.fp16_tflops,
        )
        return analytic(spec, replace(node, gpu=gpu), tp=1, engine=engine)

    def decode(bandwidth_gbs: float) -> float:
        return decode_seconds(
            model(replace(speed, bandwidth_gbs=bandwidth_gbs)), float(pace.prompt_tokens)
        )

    def prompt(fp16_tflops: float) -> float:
        built = model(replace(speed, fp16_tflops=fp16_tflops))
        return prompt_seconds(built, float(pace.prompt_tokens), float(built.engine.mixed_tokens))

    speed = CoreSpeed(10.0, 0.1)
    # Either time hangs on both speeds a little.
    for _ in range(_ROUNDS):
        speed = replace(speed, bandwidth_gbs=_speed_for(decode, pace.token_s, *_BANDWIDTH_GB))
        speed = replace(speed, fp16_tflops=_speed_for(prompt, pace.first_s, *_TFLOPS))
    return speed


def _speed_for(
    seconds: Callable[[float], float], wanted_s: float, low: float, high: float
) -> float:
    """The speed at which something takes so long, by halving; the nearest end where none does."""
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        if seconds(middle) > wanted_s:
            low = middle
        else:
            high = middle
    return high
