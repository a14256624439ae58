from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.cli import main as cli
from atoll.plan.choice import ModelMix
from atoll.plan.files.fleet_file import load_fleet
from atoll.plan.plan import Plan
from atoll.solve.assembly import NewInstance, plan_from_layouts
from tests.plan.builders import edit, layout

FLEET = """\
name: tiny
services:
  chat:
    model: llama-3.1-8b
    ttft: 1500ms
    tpot: 80ms
    rate: 1/s
    lengths: 512x128
pool:
  owned:
    lab: {L40S:1: 2}
settings: {engines: [free]}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fleet file and a valid plan for it, in the current folder."""
    monkeypatch.delenv("ATOLL_CATALOG", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("fleet.yaml").write_text(FLEET, encoding="utf-8")
    asked = load_fleet("fleet.yaml", environ={})
    whole = layout((0, 32, ("L40S:1",)))
    made = plan_from_layouts(
        asked,
        asked.catalog(),
        [NewInstance(f"chat/llm/{phase}", "lab", whole) for phase in ("prefill", "decode")],
        status="feasible",
        solver="by hand",
    )
    Path("plan.json").write_text(made.to_json(), encoding="utf-8")
    return tmp_path


def plan() -> Plan:
    return Plan.from_json(Path("plan.json").read_text("utf-8"))


def write(name: str, made: Plan) -> None:
    Path(name).write_text(made.to_json(), encoding="utf-8")


Captured = pytest.CaptureFixture[str]


def test_init_writes_a_file_that_loads(folder: Path, capsys: Captured) -> None:
    assert cli.run(["init", "new.yaml"]) == 0
    assert "wrote new.yaml; next: atoll plan new.yaml" in capsys.readouterr().err
    assert load_fleet("new.yaml", environ={}).name == "new"
    assert "atoll plan new.yaml" in Path("new.yaml").read_text("utf-8")


def test_init_overwrites_nothing_unasked(folder: Path, capsys: Captured) -> None:
    assert cli.run(["init"]) == 2
    assert "fleet.yaml exists already" in capsys.readouterr().err
    assert Path("fleet.yaml").read_text("utf-8") == FLEET
    assert cli.run(["init", "--force"]) == 0
    assert Path("fleet.yaml").read_text("utf-8") != FLEET


@pytest.mark.parametrize("path", ["nowhere/fleet.yaml", "."])
def test_init_where_nothing_can_be_written(folder: Path, capsys: Captured, path: str) -> None:
    assert cli.run(["init", path]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_init_prints_the_schema(folder: Path, capsys: Captured) -> None:
    assert cli.run(["init", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["required"] == ["services"]


def test_validate_says_valid(folder: Path, capsys: Captured) -> None:
    assert cli.run(["validate", "plan.json", "--fleet", "fleet.yaml"]) == 0
    assert capsys.readouterr().out == "valid: tiny, 2 instances on 2 nodes\n"
    assert cli.run(["validate", "plan.json"]) == 0
    assert "structure only" in capsys.readouterr().out


def test_validate_says_what_is_wrong(folder: Path, capsys: Captured) -> None:
    write("bad.json", edit(plan(), "chat-decode-0", throughput_per_s=1e9))
    assert cli.run(["validate", "bad.json", "--fleet", "fleet.yaml"]) == 7
    captured = capsys.readouterr()
    assert "throughput" in captured.out
    named = "instances.throughput_per_s: the plan 'tiny' is not valid: throughput: "
    assert captured.err.startswith(f"error: {named}")
    assert "(fix: state what its flows and paths carry, or plan again; " in captured.err
    assert cli.run(["validate", "bad.json", "--json"]) == 7
    data = json.loads(capsys.readouterr().out)
    assert data["valid"] is False
    assert {v["rule"] for v in data["violations"]} == {"throughput"}


def test_validate_after_the_fleet_changed(folder: Path, capsys: Captured) -> None:
    Path("fleet.yaml").write_text(FLEET.replace("rate: 1/s", "rate: 1.01/s"), encoding="utf-8")
    assert cli.run(["validate", "plan.json", "--fleet", "fleet.yaml"]) == 0
    assert "has changed since" in capsys.readouterr().out
    Path("fleet.yaml").write_text(FLEET.replace("L40S:1: 2", "L40S:1: 1"), encoding="utf-8")
    assert cli.run(["validate", "plan.json", "--fleet", "fleet.yaml", "--json"]) == 7
    data = json.loads(capsys.readouterr().out)
    assert [v["rule"] for v in data["violations"]] == ["availability"]
    assert data["same_problem"] is False


def test_validate_a_plan_that_mixes_models(folder: Path, capsys: Captured) -> None:
    models = "models: [{model: llama-3.1-8b, error: 6%}, {model: llama-3.2-1b, error: 9%}]"
    text = FLEET.replace("model: llama-3.1-8b", f"{models}\n    max_error: 7%")
    Path("choice.yaml").write_text(text, encoding="utf-8")
    asked = load_fleet("choice.yaml", environ={})
    mix = ModelMix.of(asked.choices[0], {"chat.llama-3.1-8b": 1.0})
    settled = asked.settled([mix])
    role = "chat.llama-3.1-8b/llm"
    made = plan_from_layouts(
        settled,
        settled.catalog(),
        [
            NewInstance(f"{role}/{phase}", "lab", layout((0, 32, ("L40S:1",))))
            for phase in ("prefill", "decode")
        ],
        status="feasible",
        solver="by hand",
    )
    write("mixed.json", made.model_copy(update={"mixes": (mix,)}))
    assert cli.run(["validate", "mixed.json", "--fleet", "choice.yaml"]) == 0
    said = capsys.readouterr().out
    assert "valid: tiny" in said
    assert "has changed" not in said
    # Of another choice, and of none.
    names = {"shares": {"chat.other": 1.0}, "models": {"chat.other": "x"}, "errors": {}}
    other = mix.model_copy(update=names)
    for mixes in ((other,), ()):
        write("mixed.json", made.model_copy(update={"mixes": mixes}))
        assert cli.run(["validate", "mixed.json", "--fleet", "choice.yaml"]) == 7
        assert "mix" in capsys.readouterr().out


def test_diff(folder: Path, capsys: Captured) -> None:
    assert cli.run(["diff", "plan.json", "plan.json"]) == 0
    assert capsys.readouterr().out == "nothing changes\n"
    made = plan()
    write("less.json", made.model_copy(update={"instances": made.instances[:1]}))
    assert cli.run(["diff", "plan.json", "less.json"]) == 0
    text = capsys.readouterr().out
    assert "- chat-prefill-0 in lab: [0, 32) L40S:1" in text
    assert cli.run(["diff", "plan.json", "less.json", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["empty"] is False
    assert [s["id"] for s in data["stopped"]] == ["chat-prefill-0"]
