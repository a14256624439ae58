from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from atoll.catalog.catalog import Catalog
from atoll.cli import main as cli
from atoll.core.units import format_price, format_share
from atoll.plan.files.fleet_file import load_fleet
from atoll.plan.kept_groups import RequestGroup, judge_group
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.proof import format_gap
from atoll.plan.validate.check import validate
from atoll.prove.kept import KeptShares
from atoll.report.plan.layout_svg import choose_colours, divide_width
from atoll.report.plan.rented_tables import group_instances, wrap_layout
from atoll.report.plan.show import draw_plan, render_plan_page
from atoll.solve import registry
from atoll.solve.comparison import Compared
from tests.cli.commands import Captured, Run
from tests.cli.fleets import FAILS, FLEET, SHORT

PlanOf = Callable[[str, str], str]


@pytest.fixture(autouse=True)
def folder(planning: Path) -> Path:
    """Fleet files in the current folder."""
    for name, text in (("fleet", FLEET), ("short", SHORT), ("fails", FAILS)):
        (planning / f"{name}.yaml").write_text(text, encoding="utf-8")
    return planning


def made(name: str) -> tuple[Problem, Plan]:
    return load_fleet(f"{name}.yaml"), Plan.from_json(Path("plan.json").read_text("utf-8"))


def made_before(plan_of: PlanOf, name: str) -> tuple[Problem, Plan]:
    text = Path(f"{name}.yaml").read_text("utf-8")
    return load_fleet(f"{name}.yaml"), Plan.from_json(plan_of(name, text))


def test_a_plan_is_shown_and_written(run: Run) -> None:
    Path("fleet.yaml").write_text(FLEET.replace("rate: 10/s", "rate: 9/s"), encoding="utf-8")
    out = run("plan", "fleet.yaml", "--capacity-only", "-o", "plan.json")
    problem, plan = made("fleet")
    layouts = {instance.describe() for instance in plan.instances}
    assert any(" | " in layout for layout in layouts)
    for layout in layouts:
        assert layout in out
    price = format_price(plan.usd_per_hour)
    size = f"{price} on {plan.nodes} nodes, {plan.gpus} GPUs."
    assert (
        f"{size} Bound by the capacity model: nothing within its settings costs less than {price}"
        in out
    )
    assert validate(plan, problem) == []
    assert plan.status == "optimal"


def test_json_has_the_plan_its_cost_and_the_comparison(run: Run) -> None:
    data = json.loads(
        run("plan", "fleet.yaml", "--capacity-only", "--json", "--compare", "-o", "plan.json")
    )
    _, plan = made("fleet")
    assert Plan.model_validate(data["plan"]) == plan
    assert data["cost"]["usd_per_hour"] == plan.usd_per_hour
    assert data["templates"]["chat/llm/prefill"]["templates"] > 1
    assert data["proof"]["bound"].startswith("Bound by the capacity model: nothing within its")
    others = {row["solver"]: row for row in data["compare"]}
    assert {"homogeneous", "cauchy", "memory-proportional"} <= set(others)
    for row in others.values():
        assert row["ratio"] is None or row["ratio"] >= 1 - 1e-9


def test_the_fleet_file_is_not_written_over(folder: Path, capsys: Captured) -> None:
    assert cli.run(["plan", "fleet.yaml", "--capacity-only", "--out", "./fleet.yaml"]) == 2
    assert "name another file to write" in capsys.readouterr().err
    assert (folder / "fleet.yaml").read_text(encoding="utf-8") == FLEET


@pytest.mark.slow
def test_equal_input_gives_equal_plans(run: Run) -> None:
    printed, written = [], []
    for name in ("one.json", "two.json"):
        printed.append(
            run("plan", "fleet.yaml", "--capacity-only", "--json", "--compare", "-o", name)
        )
        written.append(Path(name).read_bytes())
    assert printed[0] == printed[1]
    assert written[0] == written[1]


def test_what_it_took_is_told_apart_from_the_plan(capsys: Captured) -> None:
    args = [
        "plan",
        "fleet.yaml",
        "--capacity-only",
        "-o",
        "plan.json",
        "--stats",
        "--stats-out",
        "stats.json",
    ]
    assert cli.run(args) == 0
    took = json.loads(Path("stats.json").read_text("utf-8"))
    assert took["seconds"] > 0
    assert took["work"]["iterations"] >= 0
    assert re.search(r"^took [\d.]+ s, [\d.]+ CPU-s, ", capsys.readouterr().err, re.MULTILINE)
    assert "seconds" not in Path("plan.json").read_text("utf-8")


def test_the_cache_is_used_unless_told_otherwise(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_CACHE", str(folder / "cache"))
    run("plan", "fleet.yaml", "--capacity-only", "--no-cache")
    assert not (folder / "cache").exists()
    run("plan", "fleet.yaml", "--capacity-only")
    kept = {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*.npz")}
    assert kept
    again = run("plan", "fleet.yaml", "--capacity-only")
    # Read again, none written anew.
    assert {path.name for path in (folder / "cache").rglob("*.npz")} == {p.name for p in kept}
    assert "Bound by the capacity model" in again


def test_a_problem_file_is_as_good_as_a_fleet_file(folder: Path, run: Run) -> None:
    problem = load_fleet("fleet.yaml")
    (folder / "problem.json").write_text(problem.to_json(), encoding="utf-8")
    run("plan", "problem.json", "--capacity-only", "-o", "plan.json")
    assert made("fleet")[1].problem_hash == problem.content_hash()


@pytest.mark.parametrize("solver", ["homogeneous", "cauchy", "memory-proportional"])
def test_baselines_can_be_asked_for(run: Run, solver: str) -> None:
    out = run("plan", "fleet.yaml", "--capacity-only", "--solver", solver)
    assert f"No bound is known (solver: {solver})." in out


def test_the_first_line_of_a_baseline_says_that_promises_were_not_simulated(
    run: Run, capsys: Captured
) -> None:
    said = "promises were not simulated: homogeneous plans for capacity; requests may keep fewer"
    assert run("plan", "fleet.yaml", "--solver", "homogeneous").startswith(said)
    assert cli.run(["plan", "fleet.yaml", "--solver", "homogeneous", "--json"]) == 0
    told = capsys.readouterr()
    assert said in told.err
    assert "promises" not in json.loads(told.out)["plan"]
    # Who asks for capacity alone knows.
    assert "simulated" not in run(
        "plan", "fleet.yaml", "--solver", "homogeneous", "--capacity-only"
    )


def test_what_runs_is_kept(run: Run, plan_of: PlanOf) -> None:
    Path("plan.json").write_text(plan_of("fleet", FLEET), encoding="utf-8")
    out = run("plan", "fleet.yaml", "--capacity-only", "--running", "plan.json", "-o", "plan.json")
    assert "kept" in out
    assert "new" not in out.replace("new instances", "")
    assert all(instance.kept for instance in made("fleet")[1].instances)


def test_a_partial_plan_is_marked(run: Run, capsys: Captured) -> None:
    out = run("plan", "short.yaml", "--capacity-only", "--compare", "-o", "plan.json")
    share = format_share(made("short")[1].served_fraction["chat"])
    assert out.startswith(f"PARTIAL: serves {share} of the demand (chat {share}). ")
    assert "What binds: availability of" in out
    assert "on average" in out
    assert made("short")[1].status == "partial"
    Path("plan.json").unlink()
    assert cli.run(["plan", "short.yaml", "--capacity-only", "--strict", "-o", "plan.json"]) == 5
    assert one_line(capsys).startswith(f"error: only {share} of the demand can be met: avail")
    assert not Path("plan.json").exists()


def test_no_plan_is_code_5_and_a_line(capsys: Captured) -> None:
    for more in ([], ["--json"], ["--solver", "homogeneous"]):
        assert cli.run(["plan", "fails.yaml", "--capacity-only", "-o", "plan.json", *more]) == 5
        line = one_line(capsys)
        assert "demand" in line
        assert "atoll explain" in line
        assert not Path("plan.json").exists()


def test_a_deadline_that_came_first_is_told(capsys: Captured) -> None:
    code = cli.run(
        [
            "plan",
            "short.yaml",
            "--capacity-only",
            "--deadline",
            "1us",
            "-o",
            "plan.json",
            "--compare",
        ]
    )
    err = capsys.readouterr().err
    assert code == 0, err
    assert (
        "note: Cut short by the deadline: with more time there may be a plan that serves more"
        in err
    )
    assert "Give it a longer --deadline." in err
    assert "note: no time was left to compare with " in err
    problem, plan = made("short")
    assert plan.cut_short
    assert validate(plan, problem) == []
    assert min(plan.served_fraction.values()) > 0


ONE = """
services:
  chat: {model: qwen3-8b, rate: 2/s, ttft: 1s, tpot: 60ms, lengths: 300x200}
pool: {offers: [{region: here, node_type: "L40S:1", available: 2, usd_per_hour: 1.9}]}
"""


def test_a_plan_that_breaks_promises_is_written_all_the_same(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("one.yaml").write_text(ONE, encoding="utf-8")

    def kept(*_: object, **__: object) -> dict[str, KeptShares]:
        return {"chat": KeptShares(both=0.5, ttft=0.5, tpot=1.0)}

    # Imported before: it would take the function that stands in for the simulator, and keep it.
    import_module("atoll.prove.uncertainty")
    monkeypatch.setattr("atoll.prove.kept.simulate_kept", kept)
    monkeypatch.setattr("atoll.prove.rent_promises._MAX_TIGHTER", 1)
    assert cli.run(["plan", "one.yaml", "--no-error-bars", "-o", "plan.json"]) == 5
    err = capsys.readouterr().err
    assert "keeps its promises for 50.0% of requests, 95% asked for: prompts wait too long" in err
    assert "loosen ttft" in err
    problem, plan = made("one")
    assert validate(plan, problem) == []
    assert {promise.kept for promise in plan.promises} == {0.5}


CLASSES = """
services:
  chat:
    model: qwen3-8b
    rate: 2/s
    ttft: 1s
    tpot: 60ms
    classes:
      text (short): {share: 96%, input: 300, output: 200}
      text (long): {share: 4%, input: 4000, output: 300}
pool: {offers: [{region: here, node_type: "L40S:1", available: 2, usd_per_hour: 1.9}]}
"""


@pytest.mark.slow
def test_a_class_that_breaks_promises_ends_with_code_5(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("classes.yaml").write_text(CLASSES, encoding="utf-8")
    groups = tuple(
        judge_group(RequestGroup(name, 0.95), [count], {"ttft": count[0] / count[1], "tpot": 1.0})
        for name, count in (("text (long)", (80, 400)), ("text (short)", (9_600, 9_600)))
    )
    shares = KeptShares(0.968, 0.968, 1.0, groups)
    monkeypatch.setattr("atoll.prove.kept.simulate_kept", lambda *_, **__: {"chat": shares})
    monkeypatch.setattr("atoll.prove.rent_promises._MAX_TIGHTER", 1)
    assert cli.run(["plan", "classes.yaml", "--no-error-bars", "-o", "plan.json"]) == 5
    printed = capsys.readouterr()
    assert "chat keeps its promises for 20.0% of requests of text (long), 95% asked" in printed.err
    assert "prompts wait too long" in printed.err
    assert "loosen ttft" in printed.err
    assert "chat, text (long): kept for only 20% of" in printed.out
    assert "text (short)" in printed.out
    problem, plan = made("classes")
    assert validate(plan, problem) == []
    assert [group.is_kept for group in plan.promises[0].groups] == [False, True]


def one_line(capsys: Captured) -> str:
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("name", "more", "code", "said"),
    [
        ("problem.json", ["--overlay", "fleet.yaml"], 2, "--overlay"),
        ("broken.json", [], 3, "broken.json: "),
    ],
)
def test_a_problem_file_that_is_refused(
    capsys: Captured, name: str, more: list[str], code: int, said: str
) -> None:
    Path("problem.json").write_text(load_fleet("fleet.yaml").to_json(), encoding="utf-8")
    Path("broken.json").write_text('{"services": 3}', encoding="utf-8")
    assert cli.run(["plan", name, *more]) == code
    assert said in one_line(capsys)


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    assert cli.run(["plan", "fleet.yaml", "--capacity-only"]) == 6
    assert "pip install 'atoll[plan]'" in one_line(capsys)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from atoll.cli.main import run; [run([v, '--help']) for v in sys.argv[1:]];"
        "print([m for m in ('numba', 'highspy', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    verbs = ("plan", "explain", "templates")
    done = subprocess.run(
        [sys.executable, "-c", code, *verbs], capture_output=True, text=True, check=True
    )
    assert all(f"atoll {verb} [OPTIONS]" in done.stdout for verb in verbs)
    assert done.stdout.endswith("[]\n")


# Tables


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("short", 80),
        ("fleet", 120),
        pytest.param("short", 120, marks=pytest.mark.slow),
        pytest.param("fleet", 80, marks=pytest.mark.slow),
    ],
)
def test_tables_fit_the_terminal(plan_of: PlanOf, name: str, width: int) -> None:
    problem, plan = made_before(plan_of, name)
    compared = (
        Compared(solver="homogeneous", usd_per_hour=9.5, nodes=9, served=1.0, ratio=1.07),
        Compared(solver="cauchy", broken=("budget", "spot-share")),
    )
    stream = io.StringIO()
    Console(file=stream, width=width).print(draw_plan(plan, problem, compared, width=width))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "x1.07" in text
    assert "breaks budget, spot-share" in text


@pytest.mark.parametrize(
    ("gap", "text"), [(0.0, "0%"), (6.5e-6, "below 0.01%"), (0.0008, "0.08%"), (0.5, "50%")]
)
def test_gaps_are_written_short(gap: float, text: str) -> None:
    assert format_gap(gap) == text


def test_equal_instances_are_one_row(plan_of: PlanOf) -> None:
    _, plan = made_before(plan_of, "fleet")
    single = next(
        row.example for row in group_instances(plan, Catalog.default()) if row.number == 1
    )
    twin = single.model_copy(update={"id": "twin"})
    doubled = plan.model_copy(update={"instances": (*plan.instances, twin)})
    (row,) = (
        row
        for row in group_instances(doubled, Catalog.default())
        if row.layout == single.describe()
    )
    assert row.number == 2
    assert row.per_s == pytest.approx(2 * twin.throughput_per_s)
    assert row.usd_per_hour == pytest.approx(2 * twin.usd_per_hour)
    assert sum(
        row.usd_per_hour for row in group_instances(plan, Catalog.default())
    ) == pytest.approx(plan.usd_per_hour)


def test_layouts_break_between_stages() -> None:
    layout = "[0, 32) 2x L40S:1 | [32, 48) H100:1 | [48, 64) L4:1"
    assert wrap_layout(layout, 200) == layout
    assert wrap_layout(layout, 35).split("\n") == [
        "[0, 32) 2x L40S:1 | [32, 48) H100:1",
        "[48, 64) L4:1",
    ]
    assert wrap_layout(layout, 5).count("\n") == 2


# Report


def test_the_report_is_one_file_with_everything(run: Run) -> None:
    run(
        "plan",
        "fleet.yaml",
        "--capacity-only",
        "--compare",
        "--report",
        "report.html",
        "-o",
        "plan.json",
    )
    text = Path("report.html").read_text("utf-8")
    assert not re.search(r"https?:|<script|<link|src=|@import|url\(", text)
    problem, plan = made("fleet")
    assert text.count("<svg") == len(group_instances(plan, Catalog.default()))
    price = format_price(plan.usd_per_hour)
    for part in (price, "Next to the baselines", "prefers-color-scheme: dark", "phi-4-14b"):
        assert part in text
    assert plan.problem_hash in text
    assert render_plan_page(plan, problem) == render_plan_page(plan, problem)


def test_the_report_of_a_partial_plan_warns(run: Run) -> None:
    run("plan", "short.yaml", "--capacity-only", "--report", "report.html")
    text = Path("report.html").read_text("utf-8")
    assert re.search(r'<p class="warn">PARTIAL: serves \d+(\.\d+)?% of the demand', text)


def test_the_report_says_what_baselines_break(plan_of: PlanOf) -> None:
    problem, plan = made_before(plan_of, "fleet")
    compared = [Compared(solver=name, broken=("budget",)) for name in ("one", "two")]
    assert "Breaks budget: one, two." in render_plan_page(plan, problem, compared)


@given(
    layers=st.lists(st.integers(1, 100), min_size=1, max_size=12),
    room=st.floats(100.0, 2000.0),
)
def test_stages_share_the_width(layers: list[int], room: float) -> None:
    widths = divide_width(layers, room)
    assert sum(widths) == pytest.approx(room)
    assert min(widths) >= min(62.0, room / len(layers)) - 1e-6
    for a, b in zip(layers, widths, strict=True):
        for c, d in zip(layers, widths, strict=True):
            assert not (a < c and b > d + 1e-6)


def test_colours_do_not_depend_on_order() -> None:
    assert choose_colours(["L4", "H100", "L4"]) == choose_colours(["H100", "L4"])
    assert len(set(choose_colours(["A", "B", "C"]).values())) == 3


# Documentation


def options(verb: str) -> set[str]:
    """Every option of a verb, as its help names them."""
    (found,) = (own for own in cli.VERBS if own.name == verb)
    return {
        name for param in cli.load(found).params for name in (*param.opts, *param.secondary_opts)
    }


def test_the_documentation_names_options_that_exist() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    guide = (docs / "guides/planning.md").read_text("utf-8")
    for verb in ("plan", "explain", "templates"):
        section = guide.split(f"## `atoll {verb}`")[1].split("\n## ")[0]
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", section))
        assert named <= options(verb), verb
    reference = (docs / "reference/planner.md").read_text("utf-8")
    table = reference.split("| Option |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(--[a-z-]+)`", table)) == {
        name for name in options("plan") if name.startswith("--") and name != "--help"
    }
