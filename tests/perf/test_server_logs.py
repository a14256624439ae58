"""Results of load generators are read as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.core.errors import InputError
from atoll.perf.server_logs import read_server_log

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
