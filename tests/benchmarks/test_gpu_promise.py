"""What was served on an H200 for `benchmarks.gpu_promise`: readable, complete, and near what is simulated."""

from __future__ import annotations

import csv
import json
from itertools import islice

import pytest

from atoll.core.ids import format_node_type
from benchmarks.hardware.gpu_promise import HELD_SHARES, RESULTS, read_runs
from benchmarks.hardware.gpu_promise_cases import CASES, SHARES
from benchmarks.hardware.gpu_promise_serve import COLUMNS

SERVED = [
    (name, file)
    for name, case in CASES.items()
    for file in case.files
    if (RESULTS / f"{file}.csv").is_file()
]


def test_most_cases_were_served() -> None:
    assert len(SERVED) >= 4


@pytest.mark.parametrize(("name", "file"), SERVED)
def test_runs_are_complete_and_their_servers_are_known(name: str, file: str) -> None:
    case = CASES[name]
    with (RESULTS / f"{file}.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0])[1:] == COLUMNS[1:]
    # The MoE was not served at the planned rate: the machine's time was up. The stage engine's runs are
    # those of `gpu_engine`.
    shares = {case.share(row) for row in rows}
    assert shares >= (set(SHARES[:2]) if case.engine == "vllm" else {0.5, 1.0})
    counted = [row for row in rows if case.share(row) in SHARES]
    assert all(float(row["ttft_ms"]) > 0.0 <= float(row["tpot_ms"]) for row in counted)
    meta = json.loads((RESULTS / "gpu_promise.json").read_text())
    server = meta["servers"][case.server]
    assert "vllm" not in server["versions"] or server["versions"]["vllm"] == "0.22.1"
    assert "H200" in server["gpu"]
    assert CASES[name].node == format_node_type("H200", 1)


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
