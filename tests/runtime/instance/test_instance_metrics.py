"""Figures of an instance: vLLM's names, types and labels, whatever the numbers are."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from atoll.engine.engine_messages import NodeStats
from atoll.runtime.instance.instance_metrics import InstanceMetrics


def node(name: str, **more: float) -> NodeStats:
    fixed = {"name": name, "endpoint": "ipc:///x", "start": 0, "end": 1, "incarnation": 1}
    return NodeStats.model_validate(fixed | {"block_size": 16, "blocks": 100} | more)


def read(metrics: InstanceMetrics, nodes: dict[str, NodeStats]) -> dict[tuple[str, ...], float]:
    page = metrics.page(2, 3, nodes, frozenset({"a"})).decode()
    return {
        (family.type, sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()))): (
            sample.value
        )
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_names_types_and_labels() -> None:
    metrics = InstanceMetrics('m"1')
    metrics.generation_tokens = 123_456_789
    metrics.finished["stop"] = 4
    metrics.first_token.observe(0.03)
    nodes = {
        "a": node("a", blocks_used=50, prefix_hits=1, prefix_lookups=2, preemptions=3, busy_s=1.5),
        "b": node("b", blocks_used=25, prefix_hits=10, prefix_lookups=20, compiled_after_ready=7),
    }
    found = read(metrics, nodes)
    model, late = 'model_name=m"1', "atoll:node_compiled_after_ready_total"
    assert {name for name in found if name[0] != "histogram"} == {
        ("gauge", "vllm:num_requests_running", model),
        ("gauge", "vllm:num_requests_waiting", model),
        ("gauge", "vllm:kv_cache_usage_perc", model),
        ("counter", "vllm:prompt_tokens_total", model),
        ("counter", "vllm:generation_tokens_total", model),
        ("counter", "vllm:num_preemptions_total", model),
        ("counter", "vllm:prefix_cache_queries_total", model),
        ("counter", "vllm:prefix_cache_hits_total", model),
        ("counter", "atoll:request_restarts_total", model),
        *(
            ("counter", "vllm:request_success_total", f"finished_reason={reason}", model)
            for reason in ("stop", "length", "abort", "error")
        ),
        *(("gauge", "atoll:node_up", model, f"node={name}") for name in "ab"),
        *(("counter", "atoll:node_busy_seconds_total", model, f"node={name}") for name in "ab"),
        *(("counter", late, model, f"node={name}") for name in "ab"),
    }
    assert found["gauge", "vllm:num_requests_running", model] == 2
    assert found["gauge", "vllm:kv_cache_usage_perc", model] == 0.5
    assert found["counter", "vllm:generation_tokens_total", model] == 123_456_789
    assert found["counter", "vllm:prefix_cache_hits_total", model] == 11
    assert found["gauge", "atoll:node_up", model, "node=b"] == 0
    assert [found["counter", late, model, f"node={name}"] for name in "ab"] == [0, 7]
    first = "vllm:time_to_first_token_seconds"
    assert found["histogram", f"{first}_bucket", "le=0.02", model] == 0
    assert found["histogram", f"{first}_bucket", "le=0.04", model] == 1
    assert found["histogram", f"{first}_count", model] == 1
    for name in ("vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds"):
        assert found["histogram", f"{name}_sum", model] == 0


def test_a_time_that_is_none_does_not_end_the_page() -> None:
    metrics = InstanceMetrics("m")
    metrics.whole.observe(math.nan)
    found = read(metrics, {"a": node("a")})
    assert math.isnan(found["histogram", "vllm:e2e_request_latency_seconds_sum", "model_name=m"])
    assert found["gauge", "atoll:node_up", "model_name=m", "node=a"] == 1
