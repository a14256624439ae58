"""`atoll catalog` as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from atoll.cli.main import run

Capture = pytest.CaptureFixture[str]


def output(capsys: Capture, *args: str) -> str:
    assert run(["catalog", *args]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def records(capsys: Capture, *args: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(output(capsys, *args, "--json"))
    return found


def test_gpus(capsys: Capture) -> None:
    text = output(capsys, "gpus")
    assert "L40S" in text
    assert "864GB/s" in text
    found = {row["name"]: row for row in records(capsys, "gpus")}
    assert len(found) == 57
    assert found["L40S"]["memory_bytes"] == 46068 * 2**20
    assert found["A10G"]["fp8_tflops"] is None
    facts = found["L40S"]["facts"]
    assert isinstance(facts, dict)
    assert facts["fp16_tflops"]["confidence"] == "high"


def test_nodes(capsys: Capture) -> None:
    text = output(capsys, "nodes")
    assert "H100:8" in text
    assert "(alpha^p + (2(n-1)/n bytes / bus)^p)^(1/p)" in " ".join(text.split())
    assert re.search(r"allreduce_p +0\.548 +high", output(capsys, "show", "H100:8"))
    found = {row["node"]: row for row in records(capsys, "nodes")}
    assert found["H100:8"]["allreduce_p"] == 0.548
    assert found["L4:1"]["allreduce_p"] is None
    assert found["L4:1"]["allreduce_alpha_us"] is None
    assert isinstance(found["L4:2"]["allreduce_bus_bytes_per_s"], float)


def test_nodes_joined_by_nothing_known(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "o.yaml"
    path.write_text("nodes: {GH200:2: {interconnect: none}}")
    found = {row["node"]: row for row in records(capsys, "nodes", "--overlay", str(path))}
    assert found["GH200:2"]["allreduce_alpha_us"] is None
    assert "GH200:2" in output(capsys, "nodes", "--overlay", str(path))
    assert "GH200" in output(capsys, "show", "GH200:2", "--overlay", str(path))


def test_models(capsys: Capture) -> None:
    text = output(capsys, "models")
    assert "qwen3-235b-a22b" in text
    assert "235.1B" in text
    found = {row["name"]: row for row in records(capsys, "models")}
    assert len(found) == 44
    assert found["gpt-oss-20b"]["weight_bytes"] == 13761264768
    components = found["qwen2.5-omni-7b"]["components"]
    assert isinstance(components, dict)
    assert components["talker"]["part"] == "generator"
    assert "params" not in components["talker"]
    assert found["qwen2.5-omni-7b"]["total_params"] is None


def test_prices(capsys: Capture) -> None:
    text = output(capsys, "prices", "--region", "us-east-2", "--gpu", "l40s")
    assert "g6e.xlarge" in text
    assert "2026-08-22" in text
    sold = records(capsys, "prices", "--region", "us-east-2", "--gpu", "L40S", "--count", "2")
    assert sold == []
    assert "No machine matches" in output(capsys, "prices", "--gpu", "L40S", "--count", "3")
    (imputed,) = records(
        capsys, "prices", "--region", "us-east-2", "--gpu", "L40S", "--count", "2", "--imputed"
    )
    assert imputed["imputed"] is True
    spot = records(capsys, "prices", "--spot", "--gpu", "L4")
    assert spot
    assert all(row["spot_usd_per_hour"] for row in spot)


def test_cheapest_prices(capsys: Capture) -> None:
    found = records(capsys, "prices", "--region", "us-east-2", "--cheapest")
    nodes = [row["node_type"] for row in found]
    assert len(nodes) == len(set(nodes)) > 10


def test_links(capsys: Capture) -> None:
    text = output(capsys, "links")
    assert "between regions" in text
    assert "us-east-2 - us-west-2" in text
    record = json.loads(output(capsys, "links", "--json"))
    assert record["in_region"]["bandwidth_bytes_per_s"] == 1.25e9
    assert record["facts"]["in_region.latency_s"]["confidence"] == "low"


def test_own_links(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "o.yaml"
    path.write_text(
        "links:\n  regions:\n    - {between: [b, a], latency: 1ms}\n"
        "    - {between: [c, a], latency: 2ms, one_way: true}\n"
    )
    text = output(capsys, "links", "--overlay", str(path))
    assert "a - b" in text
    assert "b - a" not in text
    assert "c -> a" in text


@pytest.mark.parametrize(
    "name", ["L40S", "a100", "L40S:2", "gpt-oss-20b@fp8,kv=fp8", "qwen-image", "nvlink4", "links"]
)
def test_show(capsys: Capture, name: str) -> None:
    text = output(capsys, "show", name)
    assert "confidence" in text
    assert "[1]" in text
    record = json.loads(output(capsys, "show", name, "--json"))
    assert {"kind", "name", "rows"} == set(record)
    assert {"field", "value", "source", "confidence"} == set(record["rows"][0])


def test_interfaces_are_shown_with_their_unit(capsys: Capture) -> None:
    lines = [line.split() for line in output(capsys, "show", "links").splitlines()]
    shown = {words[0]: words[1] for words in lines if words and words[0].startswith("nics.")}
    assert shown["nics.H100:8"] == "400GB/s"
    assert all(value.endswith("B/s") for value in shown.values())


def test_overlay(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("gpus: {L40: {like: L40S, memory: 46GB}}")
    second.write_text("gpus: {L40: {memory: 45GB}}")
    text = output(capsys, "gpus", "--overlay", str(first), "--overlay", str(second))
    assert "45GB" in text
    monkeypatch.setenv("ATOLL_CATALOG", str(first))
    assert "46GB" in output(capsys, "show", "L40")
    assert "46000000000" in output(capsys, "show", "L40")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["show", "H10"], 4, "did you mean H100"),
        (["show", "n" * 5000], 4, "'nnn"),
        (["prices", "--region", ""], 4, "unknown region ''"),
        (["prices", "--region", "r" * 5000], 4, "unknown region 'rrr"),
        (["gpus", "--overlay", "o" * 5000], 3, "file name too long"),
        (["prices", "--count", "0"], 2, "count"),
        (["nothing"], 2, "nothing"),
    ],
)
def test_errors_are_one_line(capsys: Capture, args: list[str], code: int, message: str) -> None:
    assert run(["catalog", *args]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert len(captured.err) < 600
