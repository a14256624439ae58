"""Calibrating on a server: results of load generators as they are, against what steps are predicted to take.

`vllm bench serve --save-result`, GuideLLM (`benchmarks.json`) and aiperf (`profile_export_aiperf.json`) say
what clients saw on average: times to the first token and per further one, lengths, and how many requests ran
at a time (Little's law: those that ended per second times how long each took). Of C requests that run, each
makes a token in a step of time D; while one makes its o tokens, each of the others computes a prompt once,
which takes E longer than a step without it:

    TPOT = D + (C - 1) / o * E
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from atoll.catalog.nodes import NodeType
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import InputError
from atoll.core.files import unreadable
from atoll.perf.batch import Batch
from atoll.perf.calibration import Fit, accuracy, spread
from atoll.perf.constants import ConstantTable, Tag
from atoll.perf.layers import op_classes_of
from atoll.perf.step import StepModel, analytic, step_seconds

_MAX_FACTOR = 8.0
"""The most by which a server may be slower or faster than predicted: beyond, it is another one."""
_HALVINGS = 40
_MIN_ERROR = 0.05
"""Least error that is stated of a server: hosts differ, and so do versions."""


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What clients of a server saw on average with so many requests running at a time; times in seconds."""

    clients: float
    input_tokens: float
    output_tokens: float
    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        for name in ("clients", "input_tokens", "output_tokens", "ttft_s", "tpot_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise InputError(f"{value!r} is no positive number", field=name)


def read_server_log(path: Path) -> tuple[ServerLoad, ...]:
    """Return the loads of a result of vLLM's bench, GuideLLM or aiperf, which its fields tell apart."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise unreadable(error, path) from error
    except ValueError as error:
        raise InputError("not JSON", path=path) from error
    try:
        if isinstance(data, dict) and "mean_tpot_ms" in data:
            return (_vllm_bench(data),)
        if isinstance(data, dict) and "inter_token_latency" in data:
            return (_aiperf(data),)
        if isinstance(data, dict) and isinstance(data.get("benchmarks"), list):
            return tuple(_guidellm(one["metrics"]) for one in data["benchmarks"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"a field is missing or no number: {error}", path=path) from error
    except InputError as error:
        raise error.locate(path=path) from None
    raise InputError(
        "no result of a load generator",
        path=path,
        hint="give what `vllm bench serve --save-result`, GuideLLM or aiperf wrote",
    )


def _vllm_bench(data: Mapping[str, float]) -> ServerLoad:
    done = float(data["completed"])
    answer = float(data["total_output_tokens"]) / done
    ttft_s, tpot_s = float(data["mean_ttft_ms"]) * 1e-3, float(data["mean_tpot_ms"]) * 1e-3
    running = done / float(data["duration"]) * (ttft_s + (answer - 1.0) * tpot_s)
    return ServerLoad(
        max(1.0, running), float(data["total_input_tokens"]) / done, answer, ttft_s, tpot_s
    )


def _aiperf(data: Mapping[str, Mapping[str, float]]) -> ServerLoad:
    def mean(name: str) -> float:
        return float(data[name]["avg"])

    return ServerLoad(
        max(1.0, mean("request_throughput") * mean("request_latency") * 1e-3),
        mean("input_sequence_length"),
        mean("output_sequence_length"),
        mean("time_to_first_token") * 1e-3,
        mean("inter_token_latency") * 1e-3,
    )


def _guidellm(metrics: Mapping[str, Mapping[str, Mapping[str, float]]]) -> ServerLoad:
    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    return ServerLoad(
        # Latencies of requests are in seconds there, others in milliseconds.
        max(1.0, mean("requests_per_second") * mean("request_latency")),
        mean("prompt_token_count"),
        mean("output_token_count"),
        mean("time_to_first_token_ms") * 1e-3,
        # Its time per output token counts the first one in; this is the time between tokens.
        mean("inter_token_latency_ms") * 1e-3,
    )


def predict_tpot(model: StepModel, load: ServerLoad, layers: int) -> float:
    """Return the predicted seconds per token of a server with all layers under a load."""
    others = load.clients - 1.0
    context = load.input_tokens + load.output_tokens / 2.0
    plain = step_seconds(model, Batch.decode(load.clients, context), 0, layers)
    if others <= 0.0:
        return plain
    beside = step_seconds(model, Batch.decode(others, context), 0, layers)
    room = max(1.0, model.engine.max_tokens - others)
    longer, done = 0.0, 0.0
    while done < load.input_tokens:
        piece = min(room, load.input_tokens - done)
        mixed = Batch(piece, 1.0, done, others, context)
        longer += step_seconds(model, mixed, 0, layers) - beside
        done += piece
    return plain + others / load.output_tokens * longer


def fit_server(
    loads: Sequence[ServerLoad],
    spec: TransformerSpec,
    node: NodeType,
    *,
    tp: int | None,
    engine: str,
    table: ConstantTable,
    source: str,
) -> list[Fit]:
    """Return constants with which the server is as fast as it was: all classes that it uses, by one factor.

    The host's time stays as it is. The factor is that of the median load.
    """
    gpu = node.gpu.whole
    own = table.for_gpu(gpu)
    used = op_classes_of(spec, gpu)
    measured = np.array([load.tpot_s for load in loads])

    def predict(factor: float) -> np.ndarray:
        slower = replace(own, ops={op: c.scale_time(factor) for op, c in own.ops.items()})
        model = analytic(spec, node, tp=tp, engine=engine, constants=ConstantTable([slower]))
        return np.array([predict_tpot(model, load, spec.layers) for load in loads])

    low, high = 1.0 / _MAX_FACTOR, _MAX_FACTOR
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if float(np.median(predict(middle) / measured)) < 1.0:
            low = middle
        else:
            high = middle
    factor = math.sqrt(low * high)
    if not 1.01 / _MAX_FACTOR < factor < 0.99 * _MAX_FACTOR:
        raise InputError(
            f"the server is more than {_MAX_FACTOR:g} times as fast or slow as predicted",
            hint="check --model, --node and --engine",
        )
    found = predict(factor)
    error = max(_MIN_ERROR, spread(found, measured) if len(loads) > 1 else _MIN_ERROR)
    return [
        Fit(
            gpu.name,
            op,
            replace(own.op(op).scale_time(factor), error=error, tag=Tag.MEASURED, source=source),
            accuracy(found, measured),
            None,
        )
        for op in used
    ]


def read_server_logs(paths: Iterable[Path]) -> list[ServerLoad]:
    """Return the loads of several results."""
    return [load for path in paths for load in read_server_log(path)]
