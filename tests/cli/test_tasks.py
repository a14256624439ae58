"""`atoll tasks`: what it lists and draws, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.cli import main as cli
from atoll.cli.tasks import LIBRARY

AGENT = Path(__file__).resolve().parents[2] / "examples" / "tasks"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert cli.run(["tasks", *args]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_list_names_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(run(capsys, "list", "--json"))
    assert {row["name"]: row["task"] for row in rows} == LIBRARY
    assert rows[0]["components"] == [
        "hibari",
        "moonshine-decoder",
        "moonshine-encoder",
        "smollm2",
        "smollm2-vision",
    ]
    assert "SpeakingAssistant" in run(capsys, "list")


def test_show_draws_a_tree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = run(capsys, "show", "SpeakingAssistant", "--svg", str(tmp_path / "a.svg"))
    assert out.startswith("SpeakingAssistant: Turn -> Reply\nTurn\n|- 1 moonshine-encoder")
    assert (tmp_path / "a.svg").read_text(encoding="utf-8").startswith("<svg")
    shown = json.loads(
        run(
            capsys,
            "show",
            LIBRARY["SpeakingAssistant"],
            "--option",
            "voice_activity=true",
            "--json",
        )
    )
    assert shown["steps"][0]["component"] == "silero-vad"


def test_show_finds_tasks_of_the_current_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(AGENT)
    out = run(capsys, "show", "research_agent:ResearchAgent")
    assert out.startswith("ResearchAgent: Question -> Finding")
    assert "pp-ocr" in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("show", "Speach"), "unknown task 'Speach'; did you mean Speech?"),
        (("show", "no_such_module:Task"), "task: cannot import 'no_such_module'"),
        (("show", "os:path"), "task: 'os' has no task 'path'"),
        (("show", "Speech", "--option", "speak"), "--option: 'speak' says no value"),
    ],
)
def test_bad_names_are_one_line(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], said: str
) -> None:
    assert cli.run(["tasks", *args]) != 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {said}")
    assert captured.err.count("\n") == 1
