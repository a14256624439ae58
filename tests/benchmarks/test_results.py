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
}
WORDS = {"kind", "name", "model", "impl", "phase", "mode", "attention_impl"}


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
            else:
                assert float(value) > 0.0


@pytest.mark.parametrize("name", COLUMNS)
def test_no_point_is_measured_twice(name: str) -> None:
    keys = [
        tuple(value for column, value in row.items() if not column.startswith("latency"))
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
