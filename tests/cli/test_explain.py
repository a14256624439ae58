from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.cli import main as cli
from atoll.solve.explain.explanation import Explanation
from tests.cli.fleets import FAILS, FLEET, SHORT

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fleet files in the current folder, and a cache of templates of its own."""
    monkeypatch.delenv("ATOLL_CATALOG", raising=False)
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name, text in (("fleet", FLEET), ("short", SHORT), ("fails", FAILS)):
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    return tmp_path


def run(capsys: Captured, *args: str) -> str:
    capsys.readouterr()
    code = cli.run(list(args))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_a_plan_explains_itself(capsys: Captured) -> None:
    run(capsys, "plan", "fleet.yaml", "-o", "plan.json")
    out = run(capsys, "explain", "plan.json", "--fleet", "fleet.yaml")
    assert out.startswith("fleet: optimal, $8.89/h. Planned again 4 times.\n")
    assert "L40S:1 in east: 1 of 1; one more would save $1.61/h" in out
    assert "not used: $0.53/h would have to fall to" in out
    assert "chat/llm/decode" in out
    assert "Any one of these" not in out


def test_without_a_plan_one_is_made(capsys: Captured) -> None:
    data = json.loads(run(capsys, "explain", "--fleet", "fleet.yaml", "--json"))
    assert data.pop("notes") == []
    found = Explanation.model_validate(data)
    assert found.status == "optimal"
    assert found.repairs is None
    assert found.best_usd_per_hour == pytest.approx(found.usd_per_hour)


def test_one_node_type_can_be_asked_about(capsys: Captured) -> None:
    run(capsys, "plan", "fleet.yaml", "-o", "plan.json")
    asked = ("explain", "plan.json", "--fleet", "fleet.yaml", "--json")
    data = json.loads(run(capsys, *asked, "--node", "t4"))
    (use,) = data["node_types"]
    assert (use["node_type"], use["verdict"]) == ("T4:1", "too-dear")
    assert all(constraint["worth"] is None for constraint in data["constraints"])
    names = json.loads(run(capsys, *asked, "--node", "L4:1", "--node", "A10G"))["node_types"]
    assert [use["node_type"] for use in names] == ["L4:1", "A10G:1"]


def test_a_shortage_comes_with_repairs(capsys: Captured) -> None:
    out = run(capsys, "explain", "--fleet", "fails.yaml")
    assert out.startswith("fails: infeasible; 54.2% of the demand could be served, for $5.00/h")
    assert "Any one of these meets all demand" in out
    assert "+2 L40S:1 in east: $7.12/h in all" in out
    without = run(capsys, "explain", "--fleet", "short.yaml", "--no-repairs")
    assert without.startswith("short: partial, $5.00/h, serves 54.2% of the demand.")
    assert "+2 L40S:1" not in without


def test_where_all_demand_is_met_there_is_nothing_to_repair(capsys: Captured) -> None:
    out = run(capsys, "explain", "--fleet", "fleet.yaml", "--node", "L4:1", "--repairs")
    assert "all demand can be met: there is nothing to repair" in out


def test_a_dearer_plan_is_told_so(capsys: Captured) -> None:
    cheap = Path("fleet.yaml").read_text("utf-8").replace("available: 1,", "available: 3,")
    Path("more.yaml").write_text(cheap, encoding="utf-8")
    run(capsys, "plan", "fleet.yaml", "-o", "plan.json")
    out = run(capsys, "explain", "plan.json", "--fleet", "more.yaml", "--node", "L40S:1")
    assert "another plan costs $" in out
    assert "the fleet file has changed since this plan was made; it still holds" in out


def test_little_time_leaves_questions_out(capsys: Captured) -> None:
    out = run(capsys, "explain", "--fleet", "fleet.yaml", "--deadline", "1us")
    assert "Left out for lack of time" in out
    assert "everything that needs planning again" in out


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["plan.json"], 2, "--fleet"),
        (["nowhere.json", "--fleet", "fleet.yaml"], 3, "nowhere.json"),
        (["fleet.yaml", "--fleet", "fleet.yaml"], 3, "fleet.yaml"),
        (["--fleet", "nowhere.yaml"], 3, "nowhere.yaml"),
        (["--fleet", "fleet.yaml", "--node", "H100:8"], 4, "node type on offer 'H100:8'"),
        (["--fleet", "fleet.yaml", "--node", "H100"], 4, "GPU type on offer 'H100'"),
        (["--fleet", "fleet.yaml", "--node", "X9"], 4, "unknown gpu"),
        (["--fleet", "fleet.yaml", "--deadline", "soon"], 3, "deadline"),
        (["plan.json", "--fleet", "short.yaml"], 2, "does not hold for this fleet"),
    ],
)
def test_errors_are_one_line(capsys: Captured, args: list[str], code: int, said: str) -> None:
    run(capsys, "plan", "fleet.yaml", "-o", "plan.json")
    assert cli.run(["explain", *args]) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said.lower() in err.lower()
