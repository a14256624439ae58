"""A server is found again from the times that its clients saw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.catalog.measured_servers import MeasuredServer
from atoll.catalog.nodes import NodeType
from atoll.core.errors import InputError, UsageError
from atoll.perf.batch import Batch
from atoll.perf.server_fit import PER_TOKEN, ServerLoad, fit_server
from atoll.perf.step import analytic, step_seconds
from tests.perf.builders import model, node_type

LLM, NODE = model("llama-3.1-8b"), node_type("H200:1")
TRUTH = MeasuredServer(
    *("llama-3.1-8b", LLM, "H200", 1, "vllm", "0.22", "2026-11-18"),
    compute=1.15, memory=1.08, launch=1.0, step_s=0.06e-3, sequence_s=1.5e-6,
    request_s=21e-3, tokenize_s=5e-6, stream_s=0.3e-3, error=0.05, first_token_error=0.1,
)  # fmt: skip
ASKED = (
    *((1.0, 128.0, 16.0), (1.0, 512.0, 16.0), (1.0, 2048.0, 16.0)),
    *((4.0, 512.0, 256.0), (16.0, 512.0, 256.0), (64.0, 512.0, 256.0)),
)


def served(node: NodeType, *servers: MeasuredServer) -> NodeType:
    """A node of GPUs on which servers were measured."""
    return replace(node, gpu=replace(node.gpu, servers=servers))


def loads_of(truth: MeasuredServer, varied: bool = True) -> list[ServerLoad]:
    """What clients of a server see, exactly."""
    steps = analytic(LLM, served(NODE, truth), engine="vllm@0.22")
    asked = [ServerLoad(*load, 1.0, 1.0, varied=varied) for load in ASKED]
    times = [load.predict(steps) for load in asked]
    return [
        replace(load, ttft_s=ttft, tpot_s=tpot)
        for load, (ttft, tpot) in zip(asked, times, strict=True)
    ]


def fit(loads: list[ServerLoad], node: NodeType = NODE, engine: str = "vllm@0.22"):  # type: ignore[no-untyped-def]
    """What is found of a server."""
    return fit_server(
        loads, LLM, node, tp=1, engine=engine, model="llama-3.1-8b", date="2026-11-18"
    )


def test_constants_of_a_server_are_found_from_exact_times() -> None:
    found = fit(loads_of(TRUTH))
    # Each is held to what was expected, so none is met to the last digit; a host that takes little is told
    # apart from memory by that alone.
    assert found.server.memory == pytest.approx(TRUTH.memory, rel=0.03)
    assert found.server.compute == pytest.approx(TRUTH.compute, rel=0.04)
    assert found.server.request_s == pytest.approx(TRUTH.request_s, rel=0.1)
    assert found.server.step_s < 1e-3
    for one in found.judged:
        assert one.after_s == pytest.approx(one.seen_s, rel=0.03), one
        assert abs(one.after_s / one.seen_s - 1.0) < abs(one.before_s / one.seen_s - 1.0)
    assert (found.server.error, found.server.first_token_error) == (0.05, 0.1)
    assert found.server.engine_name == "vllm@0.22"


def test_a_slow_host_is_in_the_steps_whatever_it_is_taken_for() -> None:
    truth = replace(TRUTH, step_s=1e-3, sequence_s=30e-6)
    found = fit(loads_of(truth)).server
    steps = [analytic(LLM, served(NODE, one), engine="vllm") for one in (found, truth)]
    for n in (1.0, 16.0, 64.0):
        ours, true = (step_seconds(s, Batch.decode(n, 700.0), 0, LLM.layers) for s in steps)
        assert ours == pytest.approx(true, rel=0.03)


def test_loads_that_were_not_measured_are_predicted_with_it() -> None:
    node = served(NODE, fit(loads_of(TRUTH)).server)
    other = ServerLoad(32.0, 1500.0, 200.0, 1.0, 1.0)
    ways = [analytic(LLM, one, engine="vllm") for one in (node, NODE, served(NODE, TRUTH))]
    (ttft, tpot), (ttft_before, tpot_before), (ttft_true, tpot_true) = map(other.predict, ways)
    assert tpot == pytest.approx(tpot_true, rel=0.02)
    assert ttft == pytest.approx(ttft_true, rel=0.04)
    assert tpot_before < 0.95 * tpot_true
    assert ttft_before < 0.9 * ttft_true


def test_a_server_as_it_is_predicted_changes_nothing() -> None:
    usual = fit(loads_of(fit(loads_of(TRUTH)).server))
    same = fit(loads_of(replace(TRUTH, compute=1.0, memory=1.0)))
    assert usual.server.memory > 1.05
    assert same.server.memory == pytest.approx(1.0, abs=0.02)


def test_clients_in_step_say_little_of_first_tokens() -> None:
    slow = [
        replace(load, ttft_s=5.0 * load.ttft_s) if load.clients > 1.0 else load
        for load in loads_of(TRUTH, varied=False)
    ]
    found = fit(slow)
    assert found.server.request_s == pytest.approx(TRUTH.request_s, rel=0.2)
    tokens = [one for one in found.judged if one.of == PER_TOKEN]
    assert all(one.after_s == pytest.approx(one.seen_s, rel=0.05) for one in tokens)


def test_a_load_without_further_tokens_is_of_its_first_one() -> None:
    (only,) = fit([ServerLoad(1.0, 128.0, 1.0, 0.03, None)]).judged
    assert only.what == "1 client, 128x1"
    assert only.after_s == pytest.approx(0.03, rel=0.05)


def test_a_token_takes_a_step_and_its_share_of_prompts() -> None:
    steps = analytic(LLM, NODE)
    _, alone = ServerLoad(1.0, 1000.0, 100.0, 0.1, 0.01).predict(steps)
    assert alone == step_seconds(steps, Batch.decode(1.0, 1050.0), 0, LLM.layers)
    _, some = ServerLoad(9.0, 1000.0, 100.0, 0.1, 0.01).predict(steps)
    plain = step_seconds(steps, Batch.decode(9.0, 1050.0), 0, LLM.layers)
    mixed = step_seconds(steps, Batch(1000.0, 1.0, 0.0, 8.0, 1050.0), 0, LLM.layers)
    beside = step_seconds(steps, Batch.decode(8.0, 1050.0), 0, LLM.layers)
    assert some == pytest.approx(plain + 0.08 * (mixed - beside))


def test_what_is_another_server_is_refused() -> None:
    with pytest.raises(InputError, match="and no factors and times"):
        fit([replace(load, ttft_s=300.0, tpot_s=5.0) for load in loads_of(TRUTH)[::2]])
    with pytest.raises(UsageError, match="share of a GPU"):
        fit(loads_of(TRUTH), node_type("H200/2:1"))
