"""How `benchmarks.gpu_engine` judges a record, and how what it serves is planned and noted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from atoll.core.ids import Phase
from benchmarks.hardware import gpu_engine, gpu_fleet
from benchmarks.hardware.gpu_engine import judge, read_parts
from benchmarks.hardware.gpu_engine_serve import LOADS, PARTS, Setup, plan
from benchmarks.hardware.gpu_fleet import (
    UNFINISHED,
    Arrival,
    GpuFleet,
    Served,
    read_arrivals,
    summarise,
    write_served,
)
from benchmarks.simulation.streaming import StreamedAnswer

BARS = {
    "tpot_ratio_8": 1.10,
    "tpot_ratio_16": 1.15,
    "ttft_ratio_8": 1.25,
    "ttft_ratio_16": 1.25,
    "saturated_tokens_ratio": 0.85,
    "ready_s": 60.0,
    "ready_again_s": 25.0,
    "compiled_after_ready": 0.0,
    "cut_tpot_ratio": 1.25,
    "errors": 0.0,
}


def write_part(
    folder: Path, name: str, ttft_ms: float, tpot_ms: float, **noted: object
) -> list[tuple[str, *tuple[object, ...]]]:
    """Two answered requests for each load, and one that a saturated run cut off."""
    rows: list[tuple[str, *tuple[object, ...]]] = []
    for load in PARTS[name]:
        slower = LOADS.index(load) + 1
        for share in (0.5, 1.5):
            ms = (f"{share * slower * ttft_ms}", f"{share * slower * tpot_ms}")
            rows.append((load, *Served(0.1, 100, 10, *ms, "")))
    if "saturated" in PARTS[name]:
        rows.append(("saturated", *Served(0.2, 100, 10, "", "", UNFINISHED)))
    if rows:
        write_served(folder / f"gpu_engine_{name}.csv", "load", rows)
    note = {"date_utc": "2026-11-18T05:00:00+00:00", **noted}
    (folder / f"gpu_engine_{name}.json").write_text(json.dumps(note))
    return rows


def write_record(folder: Path) -> None:
    write_part(folder, "vllm", 50.0, 6.0, ready_s=130.0, saturated={"tokens_per_s": 8000.0})
    ours = {"ready_s": 40.0, "weights_s": 5.0, "compiled_after_ready": 0.0}
    write_part(folder, "atoll", 60.0, 6.3, saturated={"tokens_per_s": 7200.0}, **ours)
    write_part(folder, "again", 0.0, 0.0, ready_s=20.0, weights_s=4.0, compiled_after_ready=0.0)
    write_part(folder, "cut", 70.0, 7.56, ready_s=45.0, compiled_after_ready=0.0)


def test_ratios_are_of_means_and_bars_are_those_of_the_design(tmp_path: Path) -> None:
    write_record(tmp_path)
    figures = {figure.name: figure for figure in judge(read_parts(tmp_path))}
    assert {name: figures[name].bar for name in BARS} == BARS
    expected = {
        "tpot_ratio_8": 1.05,
        "tpot_ratio_16": 1.05,
        "ttft_ratio_8": 1.2,
        "ttft_ratio_16": 1.2,
        "saturated_tokens_ratio": 0.9,
        "ready_s": 40.0,
        "ready_again_s": 20.0,
        "compiled_after_ready": 0.0,
        "cut_tpot_ratio": 1.2,
        "errors": 0.0,
    }
    assert {name: figures[name].value for name in expected} == pytest.approx(expected)
    assert {figures[name].verdict for name in BARS} == {"met"}
    assert figures["ready_weights_s"].value == 5.0


def test_errors_and_late_compilations_of_any_part_count(tmp_path: Path) -> None:
    write_record(tmp_path)
    rows = write_part(tmp_path, "cut", 70.0, 8.0, compiled_after_ready=3.0)
    refused = ("8", *Served(1.0, 100, 10, "", "", "http://127.0.0.1:1 answered with 503"))
    write_served(tmp_path / "gpu_engine_cut.csv", "load", [*rows, refused])
    figures = {figure.name: figure for figure in judge(read_parts(tmp_path))}
    assert (figures["errors"].value, figures["errors"].verdict) == (1, "MISSED")
    assert (figures["compiled_after_ready"].value, figures["cut_tpot_ratio"].verdict) == (
        3.0,
        "MISSED",
    )


def test_what_was_not_run_is_said_not_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_part(tmp_path, "atoll", 60.0, 6.3, ready_s=70.0)
    figures = {figure.name: figure for figure in judge(read_parts(tmp_path))}
    ran = {name for name in BARS if figures[name].verdict != "not run"}
    # An engine that counts no compilations has not shown that there are none.
    assert ran == {"ready_s", "errors"}
    assert figures["ready_s"].verdict == "MISSED"
    monkeypatch.setattr(gpu_engine, "read_parts", lambda: read_parts(tmp_path))
    monkeypatch.setattr("sys.argv", ["gpu_engine"])
    gpu_engine.main()
    said = capsys.readouterr().out.splitlines()
    assert said[1].split() == ["atoll", "8", "2", "0", "60.00", "6.30"]
    assert json.loads(said[-1]).keys() >= BARS.keys() | {"measured", "parts"}
    assert all(figure.value is None for figure in judge({}))


@pytest.mark.slow
def test_the_fleets_of_all_parts_are_planned_for_one_gpu(tmp_path: Path) -> None:
    from atoll.plan.plan import Plan

    plan(tmp_path, Setup(seconds=2.0))
    plans = {
        name: Plan.from_json((tmp_path / f"{name}.json").read_text())
        for name in ("vllm", "atoll", "cut")
    }
    assert {name: each.instances[0].engine for name, each in plans.items()} == {
        "vllm": "vllm",
        "atoll": "atoll",
        "cut": "atoll",
    }
    (cut,) = plans["cut"].instances
    assert [(node.start, node.end, node.gpu_ids) for node in cut.nodes] == [
        (0, 16, (0,)),
        (16, 32, (1,)),
    ]
    # Weights of both halves, in bf16, and both KV caches fit the GPU.
    kv_bytes = sum(node.kv_bytes or 0 for node in cut.nodes)
    assert 100e9 < kv_bytes < 150e9 - 16e9
    assert cut.phase is Phase.BOTH
    rates = [len(read_arrivals(tmp_path / f"arrivals-{load}.csv")) for load in LOADS]
    assert rates == sorted(rates)
    fits_per_s = plans["vllm"].instances[0].throughput_per_s
    assert rates[-1] == pytest.approx(2.0 * 2.0 * fits_per_s, rel=0.4)


def test_requests_are_sent_when_due_and_cut_off_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, Sequence[int]]] = []

    async def answer(
        _url: str, _model: str, seed: int, prompt: int, output: int, *, begin: Sequence[int]
    ) -> StreamedAnswer:
        asked.append((seed, begin))
        if prompt == 1:
            raise SystemExit("answered with 503")
        if prompt == 2:
            await asyncio.Event().wait()
        return StreamedAnswer(1.0, (1.5, 2.5), output)

    monkeypatch.setattr(gpu_fleet, "stream_answer", answer)
    arrivals = [Arrival(0.0, prompt, 11) for prompt in range(3)]
    fleet = GpuFleet(tmp_path, "a", "a", "chat")
    found = asyncio.run(fleet.send(arrivals, 5, begin=lambda at: (at,), end_s=0.05))
    assert [row.error for row in found] == ["", "answered with 503", UNFINISHED]
    assert found[0] == Served(0.0, 0, 11, "500.00", "100.000", "")
    assert sorted(asked) == [(500_000 + at, (at,)) for at in range(3)]
    assert "3 requests, 1 errors, 1 unfinished, TTFT mean 500.0" in summarise(found)


def test_the_time_to_load_weights_is_read_from_logs_of_this_start(tmp_path: Path) -> None:
    now = datetime.now(UTC)

    def line(after_s: float, done: int) -> str:
        at = (now + timedelta(seconds=after_s)).astimezone()
        stamp = f"{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03d}"
        return f"{stamp} INFO chat/n0: loading weights: {done} of 100 (model.norm)\n"

    assert gpu_fleet._read_loading(tmp_path, now) is None
    for name, text in {
        "run-a/old.log": line(-9.0, 10) + line(-1.0, 100),
        "run-b/n0.log": line(1.0, 10) + "another\n" + line(2.0, 50) + line(2.8, 100),
        "run-b/n1.log": line(1.0, 10) + line(1.9, 100),
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert gpu_fleet._read_loading(tmp_path, now) == pytest.approx(2.0, abs=0.01)
