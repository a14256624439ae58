"""Figures of an instance under the names vLLM uses, so that its dashboards and autoscalers work.

https://docs.vllm.ai/en/latest/usage/metrics.html
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from atoll.engine.messages import NodeStats

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_WHOLE_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """Counts by upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yield the histogram as Prometheus reads it."""
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += count
            shown = "+Inf" if bound == float("inf") else repr(bound)
            yield f'{name}_bucket{{{labels},le="{shown}"}} {below}'
        yield f"{name}_sum{{{labels}}} {self.total}"
        yield f"{name}_count{{{labels}}} {below}"


class InstanceMetrics:
    """What an instance counts."""

    def __init__(self, model: str) -> None:
        self._labels = f'model_name="{_escaped(model)}"'
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.restarts = 0
        self.finished: Counter[str] = Counter()
        self.first_token = Histogram(_FIRST_TOKEN_S)
        self.per_token = Histogram(_PER_TOKEN_S)
        self.whole = Histogram(_WHOLE_S)

    def text(
        self, running: int, waiting: int, nodes: Mapping[str, NodeStats], alive: frozenset[str]
    ) -> str:
        """Return everything in Prometheus' text format."""
        own = self._labels
        fullest = max((n.blocks_used / max(1, n.blocks) for n in nodes.values()), default=0.0)
        lines: list[str] = []

        def put(name: str, kind: str, value: float, labels: str = own) -> None:
            if not any(line.startswith(f"# TYPE {name} ") for line in lines):
                lines.append(f"# TYPE {name} {kind}")
            lines.append(f"{name}{{{labels}}} {value}")

        put("vllm:num_requests_running", "gauge", running)
        put("vllm:num_requests_waiting", "gauge", waiting)
        put("vllm:kv_cache_usage_perc", "gauge", round(fullest, 6))
        put("vllm:prompt_tokens_total", "counter", self.prompt_tokens)
        put("vllm:generation_tokens_total", "counter", self.generation_tokens)
        for name, total in (
            ("vllm:num_preemptions_total", sum(n.preemptions for n in nodes.values())),
            ("vllm:prefix_cache_queries_total", sum(n.prefix_lookups for n in nodes.values())),
            ("vllm:prefix_cache_hits_total", sum(n.prefix_hits for n in nodes.values())),
            ("atoll:request_restarts_total", self.restarts),
        ):
            put(name, "counter", total)
        for reason in ("stop", "length", "abort", "error"):
            labels = f'{own},finished_reason="{reason}"'
            put("vllm:request_success_total", "counter", self.finished[reason], labels)
        for name, histogram in (
            ("vllm:time_to_first_token_seconds", self.first_token),
            ("vllm:inter_token_latency_seconds", self.per_token),
            ("vllm:e2e_request_latency_seconds", self.whole),
        ):
            lines.append(f"# TYPE {name} histogram")
            lines.extend(histogram.lines(name, own))
        for name in sorted(nodes):
            labels = f'{own},node="{_escaped(name)}"'
            put("atoll:node_up", "gauge", int(name in alive), labels)
        for name, stats in sorted(nodes.items()):
            labels = f'{own},node="{_escaped(name)}"'
            put("atoll:node_busy_seconds_total", "counter", round(stats.busy_s, 6), labels)
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
