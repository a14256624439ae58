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


def test_measured_rates_are_what_a_fleet_file_reads() -> None:
    from atoll.api.fleet import Fleet
    from atoll.cli.tasks import rates_yaml
    from atoll.runtime.task_fleet.core_fit import CoreSpeed
    from atoll.runtime.task_fleet.measure import PartRate

    rates = [
        PartRate("audio", ("ear", "scribe"), "audio_s", 9.0, 18.25, 1.0, 5),
        PartRate("llm", ("mind",), "token", 20.0, 33.0, 1.0, 5),
        PartRate("speech", ("mouth",), "speech_s", 20.0, 44.0, 1.0, 5),
    ]
    printed = rates_yaml(rates, "CORE", CoreSpeed(4.8, 0.2))
    own, catalog = printed.split("# a core")
    block = "\n".join(f"    {line}" for line in own.splitlines())
    fleet = Fleet.read(
        "services:\n  assistant:\n    model: smollm2-assistant\n    rate: 0.1/s\n    ttft: 9s\n    tpot: 1s\n"
        "    classes: {audio -> audio: {share: 100%, input: 30, output: 20, audio: 3s, speech: 6s}}\n"
        f"{block}\n# a core{catalog}\n"
        'pool:\n  owned:\n    here: {"CORE:1": {count: 2, usd_per_hour: $0.05/h}}\n'
    )
    found = {r.part: (r.on, r.unit, r.per_s) for r in fleet.problem.services[0].rates}
    assert found == {
        "audio": ("CORE", "audio_s", 18.2),
        "llm": ("CORE", "token", 33.0),
        "speech": ("CORE", "speech_s", 44.0),
    }
    core = fleet.catalog.gpu("CORE")
    assert (core.bandwidth_bytes_per_s, core.fp16_tflops) == (4.8e9, 0.2)


def test_measure_takes_parts_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "parts.yaml"
    toys = "tests.runtime.graph_server.toys"
    path.write_text(
        f"services: {{a: {{parts: {{speech: ['{toys}:ToyVoice'], llm: ['{toys}:ToyChat']}}, "
        f"tasks: {{speech: '{toys}:ToySpeech'}}}}}}\n"
    )
    found = json.loads(run(capsys, "measure", "--parts", str(path), "--runs", "2", "--json"))
    assert [(row["part"], row["unit"], row["runs"]) for row in found["parts"]] == [
        ("speech", "speech_s", 2),
        ("llm", "token", 2),
    ]
    assert found["core"] is None
    out = run(capsys, "measure", "--parts", str(path), "--part", "llm", "--on", "VCPU")
    assert "  llm: {VCPU: {token: " in out
    assert "speech" not in out
    assert cli.run(["tasks", "measure", "--part", "eyes"]) != 0
    assert "unknown part 'eyes'" in capsys.readouterr().err
