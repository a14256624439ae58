"""Results of load generators as they are, read as loads of a server.

`vllm bench serve --save-result`, GuideLLM (`benchmarks.json`) and aiperf (`profile_export_aiperf.json`) say
what clients saw on average: times to the first token and per further one, lengths, and how many requests ran
at a time (Little's law: those that ended per second times how long each took).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from atoll.core.errors import InputError
from atoll.core.files import unreadable
from atoll.perf.server_fit import ServerLoad


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


def read_server_logs(paths: Iterable[Path]) -> list[ServerLoad]:
    """Return the loads of several results."""
    return [load for path in paths for load in read_server_log(path)]
