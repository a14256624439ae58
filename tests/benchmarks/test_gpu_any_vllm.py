"""What vLLM served on an H200 for `benchmarks.gpu_any_vllm`, and what its notes are made into."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.hardware.gpu_any import FULL
from benchmarks.hardware.gpu_any_vllm import (
    WAYS,
    commands,
    digest,
    figures,
    read,
    read_times,
)
from benchmarks.hardware.vllm_times import write_plugin


def test_what_was_served_is_complete_and_near_what_is_simulated() -> None:
    note, rows = read()
    assert "H200" in note["gpu"]
    assert tuple(note["ways"]) == WAYS
    loads = [
        sorted((row.arrival_s, row.klass) for row in rows if (row.way, row.run) == (way, "load"))
        for way in ("monolith", "apart")
    ]
    assert loads[0] == loads[1] != []
    found = {figure.name: figure for figure in figures()}
    assert found["batching"].value == pytest.approx(6.275, abs=0.001)
    for name in ("carried_err", "ttft_ms_err", "e2e_ms_err", "errors"):
        assert found[name].verdict == "met"


def test_steps_last_until_the_next_and_are_told_apart(tmp_path: Path) -> None:
    def step(at_s: float, tokens: int, requests: int, items: int = 0) -> dict[str, float | str]:
        seen = {"tokens": tokens, "requests": requests, "items": items, "encoder_s": 0.02 * items}
        return {"what": "step", "at_s": at_s, **seen}

    engine = [step(1.0, 1200, 1, 1), step(1.5, 8, 8), step(1.6, 1208, 9, 1), step(2.0, 0, 0)]
    (tmp_path / "7.jsonl").write_text("".join(json.dumps(each) + "\n" for each in engine))
    picture = {"what": "prepare", "at_s": 0.9, "took_s": 0.03, "cpu_s": 0.025}
    (tmp_path / "8.jsonl").write_text(json.dumps(picture) + "\n")
    found = digest(read_times(tmp_path), {"first": (0.0, 1.55), "then": (1.55, 9.0)})
    assert {key: each["sum_s"] for key, each in found["first"].items()} == {
        "encoder of 1": 0.02,
        "prepare": 0.03,
        "prepare cpu": 0.025,
        "step of 1 pictures": 0.5,
        "step of tokens, up to 8": 0.1,
    }
    # The encoder held up eight that were being answered; the last step has no end.
    assert {key: each["mean"] for key, each in found["then"].items()} == {
        "encoder of 1": 20.0,
        "step of 1 pictures": 400.0,
        "step that holds others up": 400.0,
    }


def test_commands_say_who_sees_and_who_answers(tmp_path: Path) -> None:
    lines = {way: commands(FULL, way, tmp_path / "model", tmp_path, ()) for way in WAYS}
    assert [list(each) for each in lines.values()] == [["server"], ["server"], ["encoder", "llm"]]
    serial = lines["serial"]["server"]
    assert serial[serial.index("--max-num-seqs") + 1] == "1"
    roles = [
        json.loads(line[line.index("--ec-transfer-config") + 1])["ec_role"]
        for line in lines["apart"].values()
    ]
    assert roles == ["ec_producer", "ec_consumer"]
    ports = [line[line.index("--port") + 1] for each in lines.values() for line in each.values()]
    assert len(set(ports)) == len(ports)


def test_the_plugin_is_found_as_vllm_looks_for_it(tmp_path: Path) -> None:
    from importlib.metadata import distributions

    write_plugin(tmp_path)
    (found,) = distributions(path=[str(tmp_path)])
    (entry,) = found.entry_points.select(group="vllm.general_plugins")
    assert entry.load().__name__ == "register"
