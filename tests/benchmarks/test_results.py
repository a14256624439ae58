"""The committed measurements of an H200: readable, complete, and as their columns promise."""

from __future__ import annotations

import csv
import json
from collections import defaultdict

import pytest

from atoll.perf.measurements import read_points
from benchmarks.report import ROOT

RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = {
    "h200_gemm.csv": "kind,name,model,tp,m,n,k,latency_us,latency_us_warm",
    "h200_attention.csv": (
        "kind,impl,batch_size,seq_len,num_heads,num_key_value_heads,head_dim,latency_us,is_fastest"
    ),
    "h200_layers.csv": (
        "model,phase,sequences,tokens,context,layers_timed,latency_us_per_layer,mode,attention_impl"
    ),
    "h200_components.csv": (
        "chain,mode,batch,tokens_per_item,text_tokens,layers,median_us,p90_us,per_layer_us"
    ),
}
WORDS = {"kind", "name", "model", "impl", "phase", "mode", "attention_impl", "chain"}
TIMES = ("latency", "median_us", "p90_us", "per_layer_us")


def rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_the_documented_ones_and_every_cell_is_filled(name: str) -> None:
    header = (RESULTS / name).read_text(encoding="utf-8").partition("\n")[0]
    assert header == COLUMNS[name]
    found = rows(name)
    assert len(found) > 50
    for row in found:
        assert None not in row
        for column, value in row.items():
            if column in WORDS:
                assert value
            elif column == "is_fastest":
                assert value in ("0", "1")
            elif column == "text_tokens":
                assert float(value) >= 0.0
            else:
                assert float(value) > 0.0


@pytest.mark.parametrize("name", COLUMNS)
def test_no_point_is_measured_twice(name: str) -> None:
    keys = [
        tuple(value for column, value in row.items() if not column.startswith(TIMES))
        for row in rows(name)
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("name", "kind"), [("h200_gemm.csv", "gemm"), ("h200_attention.csv", "attention")]
)
def test_calibration_reads_them_whole(name: str, kind: str) -> None:
    points = read_points(RESULTS / name)
    assert points.schema.kind == kind
    assert points.skipped == ()
    assert len(points) == len(rows(name))
    assert 1e-6 < points.seconds.min() < points.seconds.max() < 1.0


def test_the_fastest_attention_of_every_shape_is_marked() -> None:
    shapes: dict[tuple[str, ...], list[tuple[float, str]]] = defaultdict(list)
    for row in rows("h200_attention.csv"):
        fixed = ("kind", "batch_size", "seq_len", "num_heads", "num_key_value_heads", "head_dim")
        shapes[tuple(row[column] for column in fixed)].append(
            (float(row["latency_us"]), row["is_fastest"])
        )
    for found in shapes.values():
        assert [mark for _, mark in found].count("1") == 1
        assert min(found)[1] == "1"


def test_layers_hold_what_their_columns_say() -> None:
    for row in rows("h200_layers.csv"):
        sequences, tokens = float(row["sequences"]), float(row["tokens"])
        assert row["mode"] in ("graph", "eager")
        if row["phase"] == "decode":
            assert tokens == sequences
        else:
            assert row["phase"] == "prefill"
            assert tokens == sequences * float(row["context"])


def test_the_conditions_are_on_record() -> None:
    meta = json.loads((RESULTS / "h200_meta.json").read_text(encoding="utf-8"))
    assert meta["gpu"] == "NVIDIA H200"
    assert meta["dry_run"] is False
    assert meta["errors"] == {}
    assert meta["cut_short"] == {}
    for key in ("date_utc", "driver", "cuda", "torch", "triton", "nvidia_smi"):
        assert meta[key]


def test_components_are_measured_in_every_mode_and_no_host_outlasts_its_run() -> None:
    modes: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for row in rows("h200_components.csv"):
        shape = tuple(row[name] for name in ("chain", "batch", "tokens_per_item", "text_tokens"))
        modes[shape][row["mode"]] = float(row["median_us"])
        assert float(row["per_layer_us"]) == pytest.approx(
            float(row["median_us"]) / float(row["layers"]), abs=0.001
        )
        assert float(row["p90_us"]) >= float(row["median_us"])
    assert len(modes) == 52
    for found in modes.values():
        assert set(found) >= {"graph", "eager", "host"}
        assert set(found) <= {"graph", "eager", "host", "end_to_end"}
        assert found["host"] < found["eager"]
        # Clocks wander by some per cent from one to the next.
        assert found["graph"] < 1.05 * found["eager"]


def test_the_conditions_of_components_are_on_record() -> None:
    meta = json.loads((RESULTS / "h200_components_meta.json").read_text(encoding="utf-8"))
    assert meta["gpu"] == "NVIDIA H200"
    assert meta["tiny"] is False
    for key in ("errors", "case_errors", "cut_short"):
        assert meta[key] == {}
    for key in ("date_utc", "driver", "cuda", "torch", "host_cpu", "attention"):
        assert meta[key]


def test_coral_costs_are_those_that_were_recorded() -> None:
    kept = json.loads((RESULTS / "figures.json").read_text("utf-8"))["coral_costs"]["figures"]
    usd = {
        (row["setup"], row["layouts"], row["method"].replace("homogeneous", "homo")): float(
            row["usd_per_hour"]
        )
        for row in rows("coral.csv")
        if row["figure"] in ("7", "11") and row["usd_per_hour"]
    }
    assert len(usd) > 50
    prefixes = {"free": "", "engines": "run_"}
    assert kept["core_vs_homo"] > 1.0
    for (setup, layouts, method), paid in usd.items():
        ratio = kept.get(f"{prefixes[layouts]}{setup}_vs_{method}")
        if ratio is not None:
            assert ratio == pytest.approx(paid / usd[setup, layouts, "optimal"], rel=1e-4)
