"""`atoll plan --solver memp` and its neighbours from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.cli import main as cli
from atoll.solve.place.cp import cp_masters as masters
from tests.solve.place.test_cp import SMALL


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("ATOLL_CATALOG", raising=False)
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.yaml").write_text(SMALL, encoding="utf-8")
    return tmp_path


def test_memp_plans_and_reports(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    asked = ["plan", "lab.yaml", "--solver", "memp", "--no-rank-by-simulation", "--json"]
    assert cli.run([*asked, "--report", "placement.html"]) == 0
    made = json.loads(capsys.readouterr().out)["plan"]
    assert made["solver"] == "memp"
    assert {instance["service"] for instance in made["instances"]} == {"chat", "code"}
    assert "A100-80:2" in (folder / "placement.html").read_text(encoding="utf-8")


def test_cp_without_ortools_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masters, "find_spec", lambda _name: None)
    assert cli.run(["plan", "lab.yaml", "--solver", "cp"]) == 6
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pip install 'atoll[cp]'" in error


def test_an_objective_that_a_rule_does_not_know_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["plan", "lab.yaml", "--solver", "swarm", "--objective", "latency"]) != 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "use flow.search or cp" in error
