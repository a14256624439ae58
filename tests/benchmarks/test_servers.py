"""Rows of measured servers are read and simulated as they were run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from atoll.catalog import Catalog
from atoll.perf.constants import OpClass
from benchmarks.performance.server_fit import KEPT, ServedConstants, read_left_out
from benchmarks.performance.server_rows import ServerRow, Times, read_rows, simulate_row
from benchmarks.performance.servers import figures, ratio_errors

HEADER = (
    "silicon_data_source,backend,backend_version,model_path,system,precision,mode,isl,osl,batch_size,tp_size,"
    "attention_dp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms"
)
PUBLIC = "db-dump/2026-04-27; silicon_concurrency=8; x,vllm,0.18.0,meta-llama/Llama-3.1-70B,b200_sxm,fp4,agg"
ROWS = [
    f"{PUBLIC},1024,1024,4,2,1,1,100,9",
    # Phases apart, copies of attention, another model, guessed tokens.
    f"{PUBLIC.replace('agg', 'disagg')},1024,1024,4,2,1,1,100,9",
    f"{PUBLIC},1024,1024,4,2,2,1,100,9",
    f"{PUBLIC.replace('Llama-3.1-70B', 'Other')},1024,1024,4,2,1,1,100,9",
    f"{PUBLIC.replace('0.18.0', '1.2.0rc6.post3')},1024,1024,4,2,1,1,100,9",
    # Several workers behind a router.
    f"{PUBLIC.replace('; x', '; gtl_task_id=1')},1024,1024,4,2,1,1,100,9",
    # First tokens that wait for something else than prompts.
    f"{PUBLIC},1024,1024,4,2,1,1,4000,9",
    # Series with a server that cannot have computed its prompts.
    f"{PUBLIC.replace('0.18.0', '0.19.0')},8192,2,4,2,1,1,100,9",
    f"{PUBLIC.replace('0.18.0', '0.19.0')},1024,1024,4,2,1,1,100,9",
]
ROW = ServerRow(
    *("llama-3.1-8b", "H100", "vllm", "0.12.0", "bf16", 1, 256, 16, 4), False, 100.0, 10.0
)


def test_rows_of_one_server_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([HEADER, *ROWS]))
    (row,) = read_rows(path)
    assert row.server == ("llama-3.1-70b", "nvfp4", "B200", "2", "vllm", "0.18.0")
    assert (row.name, row.clients, row.public) == ("llama-3.1-70b@nvfp4,kv=fp8", 8, True)
    assert (row.ttft_ms, row.tpot_ms) == (100.0, 9.0)


def test_versions_that_wait_for_the_host_are_simulated_so() -> None:
    catalog = Catalog.default()
    old = simulate_row(ROW, catalog)
    new = simulate_row(replace(ROW, version="0.22.1"), catalog)
    assert old is not None
    assert new is not None
    # 1 ms a step and 0.05 for each of its sequences.
    assert old.tpot_ms - new.tpot_ms == pytest.approx(1.15, abs=0.1)
    # No node has room for it.
    assert simulate_row(replace(ROW, model="deepseek-v3", dtype="fp8"), catalog) is None


def test_ratios_of_gpus_are_off_by_as_much_as_their_errors_differ() -> None:
    slow = (ROW, Times(100.0, 12.0))
    fast = (replace(ROW, gpu="H200"), Times(100.0, 10.0))
    other = (replace(ROW, gpu="H200", clients=8), Times(100.0, 10.0))
    assert ratio_errors([slow, fast, other]) == pytest.approx([20.0])
    found = {figure.name: figure.value for figure in figures([slow, fast, other])}
    assert found["dense_tpot_median"] == 0.0
    assert found["moe_tpot_median"] is None


def test_what_ships_is_what_was_fitted_on_all_servers() -> None:
    fitted = json.loads(KEPT.read_text("utf-8"))["fitted"]
    for name, value in asdict(ServedConstants.shipped()).items():
        assert value == pytest.approx(fitted[name], rel=0.06), name


def test_a_series_is_predicted_with_constants_fitted_without_it() -> None:
    left_out = read_left_out()
    assert ("sglang", "0.5.9", "deepseek-v3", "fp8", "H200") in left_out
    shipped = ServedConstants.shipped()
    own = replace(shipped, h100_memory=0.5, experts=0.4)
    gemm = own.table().gpu("H100").under_load().op(OpClass.GEMM)
    usual = shipped.table().gpu("H100").under_load().op(OpClass.GEMM)
    assert gemm.e_b / usual.e_b == pytest.approx(0.5 / shipped.h100_memory)
    # Other GPUs and engines keep what they have.
    assert own.table().gpu("H200").op(OpClass.GEMM) == shipped.table().gpu("H200").op(OpClass.GEMM)
    assert own.host(ROW) is None
    catalog = Catalog.default()
    slow, fast = (simulate_row(ROW, catalog, served=some) for some in (own, shipped))
    assert slow is not None
    assert fast is not None
    assert fast == simulate_row(ROW, catalog)
    assert slow.tpot_ms > 1.2 * fast.tpot_ms
