"""Figures of an instance under the names vLLM uses, so that its dashboards and autoscalers work.

https://docs.vllm.ai/en/latest/usage/metrics.html
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from atoll.engine.engine_messages import NodeStats
from atoll.telemetry.metrics import HistogramFamily, make_counter, make_gauge, render_page

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
_REASONS = ("stop", "length", "abort", "error")
_MODEL = ("model_name",)
_NODE = ("model_name", "node")


class InstanceMetrics:
    """Metrics of an instance."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.restarts = 0
        self.finished: Counter[str] = Counter()
        self._histograms = (
            HistogramFamily(
                "vllm:time_to_first_token_seconds",
                "From request to its first token.",
                _MODEL,
                bounds=_FIRST_TOKEN_S,
            ),
            HistogramFamily(
                "vllm:inter_token_latency_seconds",
                "From one token to the next.",
                _MODEL,
                bounds=_PER_TOKEN_S,
            ),
            HistogramFamily(
                "vllm:e2e_request_latency_seconds",
                "From request to the end of its answer.",
                _MODEL,
                bounds=_WHOLE_S,
            ),
        )
        self.first_token, self.per_token, self.whole = (
            family.child(model) for family in self._histograms
        )

    def page(
        self, running: int, waiting: int, nodes: Mapping[str, NodeStats], alive: frozenset[str]
    ) -> bytes:
        """Return the page that Prometheus reads."""
        return render_page(self._read(running, waiting, nodes, alive))

    def _read(
        self, running: int, waiting: int, nodes: Mapping[str, NodeStats], alive: frozenset[str]
    ) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Requests running.", running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting.", waiting)
        fullest = max((n.blocks_used / max(1, n.blocks) for n in nodes.values()), default=0.0)
        help_text = "Share of the KV cache in use, of the fullest node."
        yield self._gauge("vllm:kv_cache_usage_perc", help_text, round(fullest, 6))
        stats = nodes.values()
        for name, help_text, total in (
            ("vllm:prompt_tokens_total", "Tokens of prompts.", self.prompt_tokens),
            ("vllm:generation_tokens_total", "Tokens made.", self.generation_tokens),
            (
                "vllm:num_preemptions_total",
                "Requests put off for room in the KV cache.",
                sum(n.preemptions for n in stats),
            ),
            (
                "vllm:prefix_cache_queries_total",
                "Tokens looked up in the prefix cache.",
                sum(n.prefix_lookups for n in stats),
            ),
            (
                "vllm:prefix_cache_hits_total",
                "Tokens found in the prefix cache.",
                sum(n.prefix_hits for n in stats),
            ),
            (
                "atoll:request_restarts_total",
                "Requests begun anew because a node was lost.",
                self.restarts,
            ),
        ):
            yield make_counter(name, help_text, _MODEL, [((self._model,), total)])
        yield make_counter(
            "vllm:request_success_total",
            "Answers ended, by reason.",
            ("model_name", "finished_reason"),
            [((self._model, reason), self.finished[reason]) for reason in _REASONS],
        )
        for family in self._histograms:
            yield family.read()
        yield make_gauge(
            "atoll:node_up",
            "1 for a node that is heard from.",
            _NODE,
            [((self._model, name), float(name in alive)) for name in sorted(nodes)],
        )
        yield make_counter(
            "atoll:node_busy_seconds_total",
            "Time that a node spent on steps.",
            _NODE,
            [((self._model, name), round(n.busy_s, 6)) for name, n in sorted(nodes.items())],
        )
        yield make_counter(
            "atoll:node_compiled_after_ready_total",
            "Kernels compiled and graphs captured while requests waited.",
            _NODE,
            [((self._model, name), n.compiled_after_ready) for name, n in sorted(nodes.items())],
        )

    def _gauge(self, name: str, help_text: str, number: float) -> Metric:
        return make_gauge(name, help_text, _MODEL, [((self._model,), number)])
