from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.cli import main as cli
from atoll.core.units import format_price, format_share
from atoll.plan.plan import Plan
from atoll.solve.explain.plan_explanation import Explanation
from tests.cli.commands import Captured, run
from tests.cli.fleets import FAILS, SHORT
from tests.cli.fleets import FREE as FLEET

LAB = """\
services:
  big: {model: qwen3-32b, ttft: 2s, tpot: 80ms, rate: 3/s, lengths: azure-conv, phases: apart}
  small: {model: llama-3.1-8b, ttft: 1s, tpot: 50ms, rate: 8/s, lengths: azure-conv, phases: apart}
pool:
  owned:
    onprem:
      A100-40:8: {count: 1, whole: true}
settings: {engines: [free], max_nodes_per_instance: 3}
"""
DEAR = """
services:
  chat: {model: llama-3.1-8b, ttft: 1s, tpot: 50ms, rate: 20/s, lengths: azure-conv, phases: together}
pool:
  offers:
    - {region: r/a, node_type: L40S:1, available: 9, usd_per_hour: 1.00}
    - {region: r/a, node_type: H100:1, available: 9, usd_per_hour: 5.075}
"""
CLUSTER = """\
services:
  chat: {model: llama-3.1-8b, ttft: 5s, tpot: 300ms, rate: 1/s, lengths: 512x128}
cluster:
  nodes:
    room: {L4:1: 2, T4:1: 1}
  links:
    - {between: ["*", "*"], bandwidth: 10Gbit/s, latency: 100us}
"""


@pytest.fixture(autouse=True)
def folder(planning: Path) -> Path:
    """Fleet files in the current folder."""
    for name, text in (("fleet", FLEET), ("short", SHORT), ("fails", FAILS)):
        (planning / f"{name}.yaml").write_text(text, encoding="utf-8")
    return planning


@pytest.fixture
def plan(folder: Path, plan_of: Callable[[str, str], str]) -> Path:
    """The plan of `fleet.yaml`."""
    path = folder / "plan.json"
    path.write_text(plan_of("fleet", FLEET), encoding="utf-8")
    return path


@pytest.mark.usefixtures("plan")
def test_a_plan_explains_itself(capsys: Captured) -> None:
    out = run(capsys, "explain", "plan.json", "--fleet", "fleet.yaml")
    assert out.startswith("fleet: optimal, $6.07/h. Planned again ")
    assert "L40S:1 in east: 1 of 1; one more would save $1.34/h" in out
    assert "not used: $0.53/h would have to fall to" in out
    assert "chat/llm/decode" in out
    assert "meets all demand" not in out


def test_without_a_plan_one_is_made(capsys: Captured) -> None:
    data = json.loads(run(capsys, "explain", "--fleet", "fleet.yaml", "--json"))
    assert data.pop("notes") == []
    found = Explanation.model_validate(data)
    assert found.status == "optimal"
    assert found.repairs == ()
    assert found.again is not None
    assert found.again.nothing


@pytest.mark.usefixtures("plan")
def test_one_node_type_can_be_asked_about(capsys: Captured) -> None:
    asked = ("explain", "plan.json", "--fleet", "fleet.yaml", "--json")
    data = json.loads(run(capsys, *asked, "--node", "t4"))
    (use,) = data["node_types"]
    assert (use["node_type"], use["verdict"]) == ("T4:1", "too-dear")
    assert all(constraint["worth"] is None for constraint in data["constraints"])
    names = json.loads(run(capsys, *asked, "--node", "L4:1", "--node", "A10G"))["node_types"]
    assert [use["node_type"] for use in names] == ["L4:1", "A10G:1"]


def test_a_shortage_comes_with_repairs(capsys: Captured) -> None:
    run(capsys, "plan", "short.yaml", "--capacity-only", "-o", "plan.json")
    plan = Plan.from_json(Path("plan.json").read_text("utf-8"))
    share = format_share(min(plan.served_fraction.values()))
    price = format_price(plan.usd_per_hour)
    assert plan.status == "partial"
    # So many plans lead to the first repair that serves all.
    out = run(capsys, "explain", "--fleet", "fails.yaml", "--plans", "10")
    said = f"fails: infeasible; {share} of the demand could be served, for {price}"
    assert out.startswith(said)
    assert "Any one of these meets all demand" in out
    assert "+2 L40S:1 in east" in out
    assert "in all" in out
    without = run(capsys, "explain", "--fleet", "short.yaml", "--no-repairs", "--node", "T4")
    assert without.startswith(f"short: partial, {price}, serves {share} of the demand.")
    assert "+2 L40S:1" not in without


@pytest.mark.slow
def test_a_box_that_is_kept_whole_is_to_be_cut(capsys: Captured, folder: Path) -> None:
    (folder / "lab.yaml").write_text(LAB, encoding="utf-8")
    out = run(capsys, "explain", "--fleet", "lab.yaml")
    full = out.partition("Any one of these meets all demand")[2]
    assert "cut A100-40:8 in onprem into slices (without `whole`): $0.00/h in all" in full
    assert full.index("cut A100-40:8") < full.index("A100-40:8 in onprem of your own")


def test_where_all_demand_is_met_cheaper_changes_are_looked_for(capsys: Captured) -> None:
    out = run(capsys, "explain", "--fleet", "fleet.yaml", "--node", "L4:1", "--repairs")
    assert "no single change was found that is cheaper" in out
    apart = Path("fleet.yaml").read_text("utf-8").replace("phases: together", "phases: apart")
    Path("apart.yaml").write_text(apart, encoding="utf-8")
    out = run(capsys, "explain", "--fleet", "apart.yaml", "--node", "L4:1", "--repairs")
    assert "phases of mini also together (`phases: auto`)" in out
    assert " less" in out


@pytest.mark.usefixtures("plan")
def test_a_dearer_plan_is_told_so(capsys: Captured) -> None:
    cheap = Path("fleet.yaml").read_text("utf-8").replace("available: 1,", "available: 3,")
    Path("more.yaml").write_text(cheap, encoding="utf-8")
    out = run(capsys, "explain", "plan.json", "--fleet", "more.yaml", "--node", "L40S:1")
    assert out.startswith("fleet: optimal, $6.07/h; planning again would save $1.34/h.")
    assert "the fleet file has changed since this plan was made; it still holds" in out


@pytest.mark.usefixtures("plan")
def test_little_time_and_few_plans_leave_questions_out(capsys: Captured) -> None:
    out = run(capsys, "explain", "--fleet", "fleet.yaml", "--deadline", "1us")
    assert "Not asked" in out
    assert "at which price" in out
    asked = ("explain", "plan.json", "--fleet", "fleet.yaml", "--json")
    data = json.loads(run(capsys, *asked, "--deadline", "1us"))
    assert data["left_out"] == ["everything that needs planning again"]
    data = json.loads(run(capsys, *asked, "--plans", "2"))
    assert data["plans"] == 2
    assert data["left_out"]


def test_a_simple_plan_of_a_cluster_is_compared_with_what_carries_most(
    capsys: Captured, folder: Path
) -> None:
    (folder / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    asked = ("plan", "cluster.yaml", "--no-error-bars", "--effort", "0.01", "-o", "plan.json")
    assert "settings.simplicity" in run(capsys, *asked)
    out = run(capsys, "explain", "plan.json", "--fleet", "cluster.yaml", "--plans", "1")
    assert out.startswith("cluster: ")
    assert "; planning for the most tokens/s would carry " in out
    assert "What binds" in out


def test_a_simple_plan_of_a_pool_is_compared_with_the_cheapest(
    capsys: Captured, folder: Path
) -> None:
    (folder / "dear.yaml").write_text(DEAR, encoding="utf-8")
    run(capsys, "plan", "dear.yaml", "--capacity-only", "-o", "plan.json")
    asked = ("explain", "plan.json", "--fleet", "dear.yaml", "--plans", "1")
    assert "; planning for the least cost would save $0.075/h" in run(capsys, *asked)
    assert json.loads(run(capsys, *asked, "--json"))["simple"]


@pytest.mark.slow
def test_a_cluster_is_explained(capsys: Captured, folder: Path) -> None:
    (folder / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    run(capsys, "plan", "cluster.yaml", "--capacity-only", "-o", "plan.json")
    data = json.loads(run(capsys, "explain", "plan.json", "--fleet", "cluster.yaml", "--json"))
    found = Explanation.model_validate({k: v for k, v in data.items() if k != "notes"})
    assert found.goal != "cost"
    assert any(c.kind in ("machine", "link", "memory") for c in found.constraints)
    for worth in (c.worth for c in found.constraints if c.worth is not None):
        assert worth.tokens_per_s is not None
        assert worth.tokens_per_s_now is not None
        assert worth.tokens_per_s >= worth.tokens_per_s_now - 1e-6
    assert {use.node_type for use in found.node_types} == {"L4:1", "T4:1"}


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--fleet", "fleet.yaml", "--node", "H100:8"], 4, "node type on offer 'H100:8'"),
        (["--fleet", "fleet.yaml", "--node", "H100"], 4, "GPU type on offer 'H100'"),
        (["plan.json", "--fleet", "short.yaml"], 2, "does not hold for this fleet"),
    ],
)
@pytest.mark.usefixtures("plan")
def test_errors_are_one_line(capsys: Captured, args: list[str], code: int, said: str) -> None:
    assert cli.run(["explain", *args]) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err
