"""Results of load generators are read as they are, and make a server as fast as it was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.core.errors import InputError
from atoll.perf.batch import Batch
from atoll.perf.constants import ConstantTable, OpClass, Tag, default_constants
from atoll.perf.server_logs import ServerLoad, fit_server, predict_tpot, read_server_log
from atoll.perf.step import analytic, step_seconds
from tests.perf.builders import model, node_type

# 2 requests/s of 1.5 s each run 3 at a time.
BENCH = {
    "completed": 100, "duration": 50.0, "total_input_tokens": 25_600, "total_output_tokens": 10_100,
    "mean_ttft_ms": 500.0, "mean_tpot_ms": 10.0, "median_tpot_ms": 9.0,
}  # fmt: skip
AIPERF = {
    "request_throughput": {"unit": "requests/sec", "avg": 2.0},
    "request_latency": {"unit": "ms", "avg": 1500.0},
    "time_to_first_token": {"unit": "ms", "avg": 500.0},
    "inter_token_latency": {"unit": "ms", "avg": 10.0},
    "input_sequence_length": {"unit": "tokens", "avg": 256.0},
    "output_sequence_length": {"unit": "tokens", "avg": 101.0},
}
GUIDELLM = {
    "benchmarks": [
        {
            "metrics": {
                name: {"successful": {"mean": value}}
                for name, value in {
                    "requests_per_second": 2.0,
                    "request_latency": 1.5,
                    "prompt_token_count": 256.0,
                    "output_token_count": 101.0,
                    "time_to_first_token_ms": 500.0,
                    "time_per_output_token_ms": 15.0,
                    "inter_token_latency_ms": 10.0,
                }.items()
            }
        }
    ]
}


@pytest.mark.parametrize("result", [BENCH, AIPERF, GUIDELLM])
def test_results_of_three_load_generators_say_the_same(tmp_path: Path, result: object) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    (load,) = read_server_log(path)
    found = (load.clients, load.input_tokens, load.output_tokens, load.ttft_s, load.tpot_s)
    assert found == pytest.approx((3.0, 256.0, 101.0, 0.5, 0.01))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "load generator"),
        ('{"mean_tpot_ms": 5}', "completed"),
        (json.dumps(BENCH | {"mean_tpot_ms": 0}), "tpot_s"),
        (json.dumps(BENCH | {"duration": "long"}), "long"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        read_server_log(path)


def test_a_token_takes_a_step_and_its_share_of_prompts() -> None:
    llm, machine = model("llama-3.1-8b"), node_type("H200:1")
    steps = analytic(llm, machine)
    alone = predict_tpot(steps, ServerLoad(1.0, 1000.0, 100.0, 0.1, 0.01), llm.layers)
    assert alone == step_seconds(steps, Batch.decode(1.0, 1050.0), 0, llm.layers)
    some = predict_tpot(steps, ServerLoad(9.0, 1000.0, 100.0, 0.1, 0.01), llm.layers)
    plain = step_seconds(steps, Batch.decode(9.0, 1050.0), 0, llm.layers)
    mixed = step_seconds(steps, Batch(1000.0, 1.0, 0.0, 8.0, 1050.0), 0, llm.layers)
    beside = step_seconds(steps, Batch.decode(8.0, 1050.0), 0, llm.layers)
    assert some == pytest.approx(plain + 0.08 * (mixed - beside))


def test_a_slower_server_is_found_again() -> None:
    llm, machine, table = model("llama-3.1-8b"), node_type("H200:1"), default_constants()
    own = table.gpu("H200")
    slow = {op: c.scale_time(1.3) for op, c in own.ops.items()}
    truth = analytic(llm, machine, constants=table.merge(ConstantTable([replace(own, ops=slow)])))
    sizes = [(1.0, 500.0), (8.0, 500.0), (32.0, 2000.0)]
    loads = [
        ServerLoad(n, tokens, 200.0, 0.1, predict_tpot(truth, one, llm.layers))
        for n, tokens in sizes
        for one in [ServerLoad(n, tokens, 200.0, 0.1, 1.0)]
    ]
    fits = fit_server(loads, llm, machine, tp=None, engine="vllm", table=table, source="our server")
    assert {fit.op for fit in fits} == {
        *(OpClass.GEMM, OpClass.ATTENTION_PREFILL, OpClass.ATTENTION_DECODE)
    }
    for fit in fits:
        assert fit.constants.e_b == pytest.approx(own.op(fit.op).e_b / 1.3, rel=1e-6)
        assert (fit.constants.tag, fit.constants.source) == (Tag.MEASURED, "our server")
        assert fit.fitted.median < 0.1
    with pytest.raises(InputError, match="more than 8 times"):
        fit_server(
            [ServerLoad(1.0, 500.0, 100.0, 0.1, 5.0)],
            *(llm, machine), tp=None, engine="vllm", table=table, source="",
        )  # fmt: skip
