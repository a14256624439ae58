"""Benchmarks and checks are found by their names, stand in the README, and run one after another."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as runner
from benchmarks.names import BENCHMARKS, BY_NAME
from benchmarks.report import ROOT

FOLDER = ROOT / "benchmarks"
README = (FOLDER / "README.md").read_text("utf-8")
PARTS = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
CHECKS = [
    path
    for path in (ROOT / "tests" / "slow").glob("*/*.py")
    if not path.name.startswith(("__init__", "test_"))
]
MODULES = [*(path for path in FOLDER.glob("*/*.py") if path.name != "__init__.py"), *CHECKS]
TEXTS = {path: path.read_text("utf-8") for path in MODULES}
RUN = {path.stem: path for path, text in TEXTS.items() if 'if __name__ == "__main__":' in text}


def test_names_can_be_run_and_are_told_apart() -> None:
    assert len(BY_NAME) == len(BENCHMARKS)
    for one in BENCHMARKS:
        assert RUN.get(one.name) == one.path
        assert one.folder in PARTS
        assert len(set(one.keys.split())) == len(one.keys.split())
    names = [path.stem for path in (*MODULES, *FOLDER.glob("*.py")) if path.stem != "__init__"]
    assert sorted(names) == sorted({*names} - PARTS)


def test_the_readme_has_all_that_can_be_run_and_nothing_else() -> None:
    told = set(re.findall(r"`(\w+)`", README.partition(runner.END)[2]))
    started = {"attacks_watcher", "churn_node", "rollout_controller"}  # by checks, nobody else
    assert set(RUN) - {*BY_NAME} <= told | started
    for name in told & {path.stem for path in CHECKS}:
        spec = importlib.util.find_spec(f"benchmarks.{name}")
        assert spec is not None
        assert spec.origin == str(RUN[name])


def test_the_table_of_the_readme_is_made_of_names_and_of_what_was_recorded() -> None:
    assert runner.write_table() == README


def test_code_imports_by_whole_names() -> None:
    """By its short name a module would be loaded a second time, with its own globals."""
    imported = re.compile(r"^ *from benchmarks(?:\.(\w+)\S*)? import (.*)", re.MULTILINE)
    short = {path.stem for path in MODULES}
    for folder in ("benchmarks", "research", "tests", "tools", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for module, names in imported.findall(path.read_text("utf-8")):
                asked = {module} if module else set(re.findall(r"\w+", names))
                assert not asked & short, path


def entry(seconds: int, options: str = "", figure: float = 1.0) -> dict[str, Any]:
    """What is kept of a run."""
    return {
        "measured": "2026-11-20",
        "source": f"benchmarks.fabric{options}",
        "seconds": seconds,
        "figures": {"register_ms_p99": figure},
    }


def test_a_quick_run_is_kept_beside_a_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "figures.json"
    monkeypatch.setattr(runner, "FIGURES", path)
    path.write_text(json.dumps({"tunnel": entry(300)}))
    seen = runner.Outcome("tunnel", 40.0, 9.0, figures={"added": 2.0})
    runner.keep(seen, ["--quick"])
    kept = runner.read_figures()["tunnel"]
    assert kept["figures"] == {"register_ms_p99": 1.0}
    assert (kept["quick"]["figures"], kept["quick"]["seconds"]) == ({"added": 2.0}, 40)
    runner.keep(seen, [])
    assert runner.read_figures()["tunnel"]["quick"] == kept["quick"]
    assert runner.read_figures()["tunnel"]["source"] == "benchmarks.tunnel"
    # Where there is no full run, the figures are the quick one's.
    for _ in range(2):
        runner.keep(runner.Outcome("fabric", 50.0, 9.0, figures={"added": 3.0}), ["--quick"])
    assert runner.read_figures()["fabric"]["figures"] == {"added": 3.0}
    assert runner.seconds_of("fabric", runner.read_figures(), quick=True) == 50.0
    assert runner.seconds_of("fabric", runner.read_figures(), quick=False) is None


def test_what_fits_is_taken_the_shortest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    monkeypatch.setattr(runner, "FIGURES", path)
    path.write_text(json.dumps({one.name: entry(100, " --quick") for one in BENCHMARKS}))
    monkeypatch.setattr(runner, "BENCHMARKS", BENCHMARKS[:5])
    chosen = runner.choose(5.5)
    assert chosen == [one.name for one in BENCHMARKS[:3]]
    assert f"not run: {BENCHMARKS[3].name} (100 s)" in capsys.readouterr().out


@pytest.mark.slow
def test_the_next_one_follows_where_one_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "gpu_engine", "process_cpu", "gpu_engine"])
    assert runner.main() == 1
    said = capfd.readouterr().out
    assert "failed: its last line is not JSON" in said
    assert said.splitlines()[-3] == "failed: process_cpu"
    assert said.count("-- gpu_engine: ") == 2
