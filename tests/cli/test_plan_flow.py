"""`atoll plan` on a fixed cluster, and `atoll import helix`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from atoll.cli import main as cli
from atoll.plan.plan import Plan
from atoll.report.plan.cluster_tables import (
    describe_plan,
    describe_unused,
    list_machines,
    sum_site_flows,
)
from atoll.report.plan.placement_svg import render_placement_svg
from atoll.report.plan.show import render_plan_page
from atoll.solve.comparison import Compared
from atoll.solve.place.bottleneck import bottleneck, node_use
from tests.cli.commands import Captured, Run
from tests.plan.clusters import HELIX, instance, plan, problem

FLEET = """\
services:
  chat: {model: llama-3.1-8b, ttft: 5s, tpot: 200ms, rate: 1/s, lengths: 512x128}
cluster:
  nodes:
    zurich: {"A100-40:1": [big], "L4:1": 1}
    lugano: {"T4:1": 1}
  links:
    - {between: ["*", "*"], bandwidth: 1Gbit/s, latency: 1ms}
"""
SVG = "{http://www.w3.org/2000/svg}"
QUICK = ("--effort", "0.01")


@pytest.fixture(autouse=True)
def folder(planning: Path) -> Path:
    (planning / "lab.yaml").write_text(FLEET, encoding="utf-8")
    return planning


def failure(capsys: Captured, *args: str) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.run(list(args))
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return code, error


def test_a_cluster_is_planned(run: Run, folder: Path) -> None:
    out = run(
        "plan",
        "lab.yaml",
        "--capacity-only",
        *QUICK,
        "-o",
        "plan.json",
        "--report",
        "r.html",
        "--compare",
    )
    assert "big" in out
    assert "What binds" in out or "Bottleneck" in out
    for name in ("flow.search", "swarm", "petals", "chain"):
        assert name in out
    run("plan", "lab.yaml", "--capacity-only", "--solver", "chain", "--report", "r.svg")
    assert ElementTree.parse(folder / "r.svg").getroot().tag == f"{SVG}svg"
    made = Plan.from_json((folder / "plan.json").read_text())
    assert made.goal == "sustained"
    assert "valid" in run("validate", "plan.json", "--fleet", "lab.yaml")
    assert "<svg" in (folder / "r.html").read_text()


def test_max_flow_as_json(run: Run) -> None:
    out = run("plan", "lab.yaml", "--capacity-only", *QUICK, "--objective", "max-flow", "--json")
    made = json.loads(out)["plan"]
    assert made["goal"] == "max-flow"
    assert made["bound"] >= made["objective"] > 0
    hosts = [node["host"] for own in made["instances"] for node in own["nodes"]]
    assert len(hosts) == len(set(hosts))


HELIX_PLACEMENT = """\
[Settings]
offset=2
[Solution]
compute_node_2=[{layers}]
"""


def test_known_placements_are_candidates(run: Run, folder: Path, capsys: Captured) -> None:
    plain = (
        "plan",
        "lab.yaml",
        "--best-effort",
        "--objective",
        "max-flow",
        "--capacity-only",
        *QUICK,
    )
    run(*plain, "--solver", "swarm", "-o", "plan.json")
    everything = ", ".join(map(str, range(32)))
    (folder / "big.ini").write_text(HELIX_PLACEMENT.format(layers=everything))
    given = ("--known", "plan.json", "--known", "big.ini")
    made = json.loads(run(*plain, *given, "--json"))["plan"]
    assert made["objective"] >= Plan.from_json((folder / "plan.json").read_text()).objective
    (folder / "long.ini").write_text(HELIX_PLACEMENT.format(layers=f"{everything}, 32"))
    (folder / "many.ini").write_text(HELIX_PLACEMENT.format(layers="0").replace("_2=", "_7="))
    (folder / "other.yaml").write_text(FLEET.replace("[big]", "[huge]"))
    for file, fleet, more, said in (
        ("long.ini", "lab.yaml", (), "layers 0 to 33 of a known placement do not fit machine big"),
        ("many.ini", "lab.yaml", (), "other machines than 3 from"),
        ("plan.json", "other.yaml", (), "big is no machine here"),
        ("plan.json", "lab.yaml", ("--solver", "swarm"), "--known with solver swarm"),
    ):
        asked = ("plan", fleet, "--best-effort", "--capacity-only", "--known", file, *more)
        code, error = failure(capsys, *asked)
        assert code != 0
        assert said in error


def test_what_is_refused(capsys: Captured, folder: Path) -> None:
    assert failure(capsys, "plan", "lab.yaml", "--objective", "speed")[0] == 4
    code, error = failure(capsys, "plan", "lab.yaml", "--solver", "optimal")
    assert code == 2
    assert "flow.search" in error
    (folder / "pool.yaml").write_text(
        FLEET[: FLEET.index("cluster:")] + "pool: {owned: {here: {L4: 2}}}\n"
    )
    for option in ("--partial", "--best-effort", "--known"):
        value = ("lab.yaml",) if option == "--known" else ()
        code, error = failure(capsys, "plan", "pool.yaml", option, *value)
        assert code == 2
        assert f"{option} is for fixed clusters" in error


def test_too_little_memory(capsys: Captured, folder: Path) -> None:
    (folder / "big.yaml").write_text(FLEET.replace("llama-3.1-8b", "qwen3-235b-a22b"))
    code, error = failure(capsys, "plan", "big.yaml", *QUICK)
    assert code == 5
    assert re.search(r"layers have no place, \d+ GB at [\d.]+ GB a layer", error)


def test_demand_that_cannot_be_met(capsys: Captured, run: Run, folder: Path) -> None:
    small = FLEET.replace('    lugano: {"T4:1": 1}\n', "")
    assert small != FLEET
    (folder / "busy.yaml").write_text(small.replace("rate: 1/s", "rate: 1000/s"))
    assert "PARTIAL: serves" in run("plan", "busy.yaml", "--capacity-only", *QUICK)
    code, error = failure(
        capsys,
        "plan",
        "busy.yaml",
        "--capacity-only",
        *QUICK,
        "--strict",
        "--json",
        "-o",
        "no.json",
    )
    assert code == 5
    assert "of the demand can be met" in error
    assert not (folder / "no.json").exists()


# Tables and drawings of the plan made by hand


def test_the_describe_plan() -> None:
    said = describe_plan(plan(), problem())
    assert said == (
        "1,400.0 tokens/s (7 requests/s) on 4 of 4 nodes, at most 2 hops. "
        "Bound by the capacity model: no placement carries more than 1,500.0 tokens/s (gap 6.67%)."
    )
    assert "No bound is known" in describe_plan(plan(bound=None), problem())


def test_rows_are_machines_in_order() -> None:
    asked = problem()
    rows = list_machines(plan(), asked, asked.catalog())
    assert [row.machine for row in rows] == ["a", "b", "c", "d"]
    assert [round(row.use, 3) for row in rows] == [0.933, 1.0, 0.9, 0.9]
    assert sum_site_flows(instance(), asked) == {("north", "south"): pytest.approx(900.0)}
    assert describe_unused(plan(), asked) is None
    some = instance().model_copy(update={"nodes": instance().nodes[:3]})
    assert (
        describe_unused(plan().model_copy(update={"instances": (some,)}), asked)
        == "Unused: 1x L4:1."
    )


def test_the_drawing_is_sound() -> None:
    asked = problem()
    own, catalog = instance(), asked.catalog()
    use, cut = node_use(own, asked, catalog), bottleneck(own, asked, catalog)
    root = ElementTree.fromstring(render_placement_svg(own, use, cut))
    titles = [element.text for element in root.iter(f"{SVG}title")]
    assert "a: L40S:1, layers [0, 8), 1,400 of 1,500 tokens/s (93%)" in titles
    assert len(list(root.iter(f"{SVG}path"))) == len(own.flows)
    width = float(root.attrib["width"])
    for box in root.iter(f"{SVG}rect"):
        assert 0 <= float(box.attrib["x"]) <= width
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width + 1e-6


def test_the_report_is_the_same_each_time() -> None:
    asked = problem()
    compared = [
        Compared(solver="swarm", tokens_per_s=700.0, nodes=4, hops=2),
        Compared(solver="separate", nodes=0),
    ]
    pages = {render_plan_page(plan(), asked, compared) for _ in range(2)}
    (page,) = pages
    assert "no placement" in page
    assert "http" not in page.replace("http-equiv", "")


# Import


@pytest.mark.skipif(not HELIX.is_dir(), reason="needs ../shared/data/helix beside the repository")
@pytest.mark.parametrize("out", ["geo.yaml", "geo.json"])
def test_a_helix_cluster_is_imported(run: Run, folder: Path, out: str) -> None:
    run("import", "helix", str(HELIX / "clusters/3cluster24.ini"), "-o", out)
    assert (folder / "geo.profiles.json").exists() == out.endswith("yaml")
    asked = ("--solver", "swarm", "--objective", "max-flow", "--best-effort", "--json")
    solved = run("plan", out, "--capacity-only", *asked)
    assert json.loads(solved)["plan"]["objective"] == pytest.approx(616.5, abs=0.05)


def test_what_cannot_be_imported(capsys: Captured, folder: Path) -> None:
    assert "no node_profiles.json" in _refused(capsys, folder, "x.ini")
    code, error = failure(capsys, "import", "helix", str(folder), "-o", "out.txt")
    assert code == 2
    assert ".yaml" in error
    (folder / "a.ini").write_text("")
    code, error = failure(capsys, "import", "helix", str(folder), "-o", "out.yaml")
    assert code == 2
    assert "has 2 .ini files: a.ini, x.ini" in error


def _refused(capsys: Captured, folder: Path, name: str) -> str:
    (folder / name).write_text(
        "[NodeNames]\ntotal_compute_nodes=1\n[ComputeNode-0]\ntype=L4\n"
        "[Link-source-0]\nbandwidth=1 * gbps\nlatency=1 * MilliSec\n"
    )
    code, error = failure(capsys, "import", "helix", name, "-o", "out.yaml")
    assert code == 3
    return error
