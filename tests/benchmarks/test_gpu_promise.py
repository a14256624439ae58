"""What was served on an H200 for `benchmarks.gpu_promise` is near what is simulated."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.hardware.gpu_promise import HELD_SHARES, read_runs


@pytest.mark.slow
def test_a_dense_model_answers_as_fast_as_simulated_and_keeps_as_many_promises() -> None:
    runs = {run.share: run for run in islice(read_runs(), len(HELD_SHARES))}
    assert {run.case.name for run in runs.values()} == {"8b-short"}
    for share in HELD_SHARES:
        run = runs[share]
        assert run.served.errors == 0
        assert abs(run.kept_diff) < 1.0
        assert abs(run.error("tpot_ms", None)) < 6.0
        assert abs(run.error("tpot_ms", 95.0)) < 10.0
        assert abs(run.error("ttft_ms", None)) < 15.0
        assert abs(run.error("ttft_ms", 95.0)) < 20.0
    # Not bound to fail for a simulator that says nothing: half the load is another latency.
    assert runs[0.5].simulated.tpot_ms.mean() < 0.9 * runs[0.8].simulated.tpot_ms.mean()
