"""`atoll pareto` and `atoll plan --objective`: what they print, and what they refuse in a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.cli import main as cli
from tests.cli.commands import Captured, run

FLEET = """\
services:
  mini: {model: llama-3.2-1b, ttft: 900ms, tpot: 60ms, rate: 12/s, lengths: 512x128, phases: together}
pool:
  offers:
    - {region: east, node_type: L4:1, available: 8, usd_per_hour: 1.90}
    - {region: east, node_type: A10G:1, available: 8, usd_per_hour: 0.80}
    - {region: west, node_type: A10G:1, available: 8, usd_per_hour: 1.01}
settings: {max_nodes_per_instance: 1}
"""
GRID = "grid: {east: 500 g/kWh, west: 20 g/kWh, pue: 1.1}\n"


@pytest.fixture(autouse=True)
def folder(planning: Path) -> Path:
    (planning / "fleet.yaml").write_text(FLEET + GRID, encoding="utf-8")
    (planning / "dark.yaml").write_text(FLEET, encoding="utf-8")
    return planning


def refused(capsys: Captured, *args: str) -> str:
    capsys.readouterr()
    assert cli.run(list(args)) != 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_curves_as_json_and_as_a_page(capsys: Captured, folder: Path) -> None:
    data = json.loads(
        run(
            capsys, "pareto", "fleet.yaml", "--against", "carbon", "--against", "energy",
            "--points", "3", "--report", "curves.html", "--json",
        )
    )  # fmt: skip
    carbon, energy = data["fronts"]
    assert (carbon["against"], energy["against"]) == ("carbon", "energy")
    on_curve = [p for p in carbon["points"] if not p["dominated"]]
    assert [p["kg_per_hour"] for p in on_curve] == sorted(p["kg_per_hour"] for p in on_curve)
    assert len(on_curve) >= 2
    assert [p["today"] for p in on_curve].count(True) == 1
    assert (folder / "curves.html").read_text(encoding="utf-8").count("<svg") == 2


def test_plans_count_what_is_asked(capsys: Captured) -> None:
    plain = json.loads(run(capsys, "plan", "dark.yaml", "--capacity-only", "--json"))["plan"]
    assert "power" not in plain
    cost = json.loads(run(capsys, "plan", "fleet.yaml", "--capacity-only", "--json"))["plan"]
    assert cost["instances"] == plain["instances"]
    assert cost["power"]["weighted_usd_per_hour"] is None
    carbon = json.loads(
        run(
            capsys, "plan", "fleet.yaml", "--capacity-only", "--objective", "carbon", "--json",
            "-o", "carbon.json",
        )
    )["plan"]  # fmt: skip
    assert {instance["region"] for instance in carbon["instances"]} == {"west"}
    assert carbon["power"]["kg_per_hour"] < 0.2 * cost["power"]["kg_per_hour"]
    assert carbon["power"]["cheapest_usd_per_hour"] == pytest.approx(cost["usd_per_hour"])
    # It is a plan for the fleet as its file has it.
    assert "valid: " in run(capsys, "validate", "carbon.json", "--fleet", "fleet.yaml")
    text = run(
        capsys, "plan", "fleet.yaml", "--capacity-only", "--energy-price", "$0.2/kWh",
        "--carbon-price", "$50/t",
    )  # fmt: skip
    text = " ".join(text.split())
    assert "As weighed" in text
    assert "The cheapest plan costs" in text


def test_what_does_not_go_together_is_refused(capsys: Captured) -> None:
    assert "grid" in refused(capsys, "plan", "dark.yaml", "--objective", "carbon")
    assert "grid" in refused(capsys, "pareto", "dark.yaml", "--against", "carbon")
    assert "--carbon-price" in refused(
        capsys, "plan", "fleet.yaml", "--objective", "energy", "--carbon-price", "$1/t"
    )
    assert "--energy-price" in refused(
        capsys, "plan", "fleet.yaml", "--objective", "max-flow", "--energy-price", "$1/kWh"
    )
    assert "price of energy" in refused(capsys, "plan", "fleet.yaml", "--energy-price", "dear")
    assert "unknown objective" in refused(capsys, "plan", "fleet.yaml", "--objective", "joy")
    assert "different errors" in refused(capsys, "pareto", "fleet.yaml", "--against", "error")
    assert "nothing to sweep" in refused(capsys, "pareto", "fleet.yaml", "--against", "joy")
    assert "1 points" in refused(capsys, "pareto", "fleet.yaml", "--points", "1")
    assert "promise to scale" in refused(capsys, "pareto", "fleet.yaml", "--scale", "itl")
    assert "--deadline" in refused(capsys, "pareto", "fleet.yaml", "--deadline", "0s")
    assert "fleet.yaml" in refused(capsys, "pareto", "fleet.yaml", "--report", "fleet.yaml")
