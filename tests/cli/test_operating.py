"""The verbs that operate fleets, as far as they go without bringing anything up."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from atoll.api.fleet import Fleet
from atoll.api.fleet_plan import FleetPlan
from atoll.cli import main as cli
from atoll.control.operation.approval import NextChange
from atoll.control.operation.fleet_history import HistoryEvent
from atoll.control.operation.fleet_home import Daemon, Entrance, FleetHome, FleetRecord, home_of
from atoll.control.operation.instance_logs import find_new
from atoll.control.operation.operated_plans import put_phases_together
from atoll.deploy.local.daemon import ProcessId
from atoll.deploy.target_table import TargetSettings
from atoll.plan.files.read import read_problem
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from tests.cli.commands import Captured, run

FLEET = """\
name: lab
services:
  chat: {model: llama-3.1-8b, ttft: 1500ms, tpot: 80ms, rate: 1/s, lengths: 512x128}
pool:
  offers:
    - {region: here, node_type: L4:1, available: 4, usd_per_hour: 0.80}
settings: {max_nodes_per_instance: 1}
"""


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty state folder, and a fleet file in the current one."""
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("ATOLL_FABRIC", raising=False)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.yaml").write_text(FLEET)
    return tmp_path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan of the fleet, as JSON."""
    path = tmp_path_factory.mktemp("plan") / "lab.yaml"
    path.write_text(FLEET)
    problem = put_phases_together(read_problem(path))
    plan = solve(problem, PlanRequest(effort=Effort(cached=False)))
    return FleetPlan.of(plan, problem).to_json()


@pytest.fixture
def plan(site: Path, made: str) -> Path:
    path = site / "plan.json"
    path.write_text(made)
    return path


def refused(capsys: Captured, *args: str) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.run(list(args))
    said = capsys.readouterr()
    assert code != 0
    lines = [line for line in said.err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, said.err
    return code, lines[0]


def bring(name: str = "lab", *, up: bool = True, entrance: Entrance | None = None) -> FleetHome:
    home = home_of(name)
    home.make()
    home.write(
        FleetRecord(
            name=name,
            source=str(Path("lab.yaml").resolve()),
            targets=TargetSettings.parse({"names": ["local"], "local": {"pretend": True}}),
            entrance=entrance,
            up=up,
        )
    )
    return home


@pytest.mark.parametrize("verb", ["up", "operate"])
def test_without_a_terminal_a_change_needs_yes(capsys: Captured, verb: str) -> None:
    code, line = refused(capsys, verb, "lab.yaml", "--stand-in")
    assert code == 2
    assert "--yes" in line


@pytest.mark.parametrize(("other", "said"), [("--yes", "asks nobody"), ("--once", "one turn")])
def test_a_page_is_asked_by_who_waits(capsys: Captured, other: str, said: str) -> None:
    code, line = refused(capsys, "operate", "lab.yaml", "--stand-in", "--ask", "page", other)
    assert code == 2
    assert said in line
    assert not home_of("lab").folder.exists()


def test_a_page_sees_a_change_of_a_fleet_that_is_new(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_planner(deadline_s: float) -> Callable[[Problem], Plan]:
        return lambda problem: solve(problem, PlanRequest(effort=Effort(cached=False)))

    monkeypatch.setattr("atoll.control.operation.live_operation.make_planner", make_planner)
    home = home_of("lab")
    seen: list[tuple[NextChange | None, FleetRecord | None]] = []

    def look() -> None:
        while home.board.read() is None:
            time.sleep(0.02)
        seen.append((home.board.read(), home.read()))
        os.kill(os.getpid(), signal.SIGTERM)

    page = threading.Thread(target=look, daemon=True)
    page.start()
    run(capsys, "operate", "lab.yaml", "--stand-in", "--pretend", "--ask", "page", "--look", "50ms")
    page.join()
    ((change, record),) = seen
    assert change is not None
    assert record is not None
    assert (change.state, change.on_page, record.up) == ("waiting", True, False)
    assert change.starts
    # Nobody is left who could do it, and nothing was done.
    assert home.board.read() is None
    assert home.read_plan() is None
    assert not (home.folder / "instances").exists()


def test_down_needs_yes_too(capsys: Captured) -> None:
    bring()
    assert "--yes" in refused(capsys, "down", "lab")[1]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--on", "slrum"), "did you mean slurm?"),
        (("-o", "out"), "-o is for --dry-run"),
        (("--partition", "gpu"), "--on slurm"),
        (("--pretend", "--on", "skypilot"), "only the local target can pretend"),
        (("--device", "tpu"), "unknown device"),
        (("--gateway", "http://x"), "a gateway of which fabric?"),
        (("--stand-in", "--fabric", "open://127.0.0.1:1"), "leave --fabric out"),
        (("--fleet", "lab.yaml"), "leave --fleet out"),
    ],
)
def test_what_does_not_go_together_is_said_in_a_line(
    capsys: Captured, args: tuple[str, ...], said: str
) -> None:
    assert said in refused(capsys, "up", "lab.yaml", "--yes", *args)[1]
    assert not home_of("lab").folder.exists()


def test_this_machine_has_none_of_the_pool(capsys: Captured, plan: Path) -> None:
    # Also with a plan, which would be waited for in vain.
    code, line = refused(capsys, "up", str(plan), "--fleet", "lab.yaml", "--yes")
    assert code == 2
    assert "none of the pool's machines (L4:1 in here)" in line
    (Path("t4.yaml")).write_text(
        FLEET.replace("L4:1", "MI300X:8").replace("name: lab", "name: far")
    )
    code, line = refused(capsys, "up", "t4.yaml", "--yes")
    assert code == 2
    assert "none of the pool's machines (MI300X:8 in here)" in line
    assert "--pretend" in line


def test_a_plan_needs_its_fleet(capsys: Captured, plan: Path) -> None:
    assert "--fleet" in refused(capsys, "up", str(plan), "--dry-run")[1]
    Path("other.yaml").write_text(FLEET.replace("  chat:", "  talk:"))
    said = refused(capsys, "up", str(plan), "--fleet", "other.yaml", "--dry-run")[1]
    assert "other.yaml has no chat" in said
    shown = run(capsys, "up", str(plan), "--fleet", "lab.yaml", "--pretend", "--dry-run")
    assert "lab: 0 instances stay" in shown
    assert "to start" in shown
    assert "cost: $0.00/h -> $" in shown
    assert not home_of("lab").folder.exists()


def test_a_dry_run_as_json(capsys: Captured, plan: Path) -> None:
    args = ("--fleet", "lab.yaml", "--pretend", "--dry-run", "--json")
    change = json.loads(run(capsys, "up", str(plan), *args))
    assert change["fleet"] == "lab"
    assert change["usd_before"] == 0.0
    assert change["usd_after"] == pytest.approx(0.8 * len(change["starts"]))
    assert {row["target"] for row in change["starts"]} == {"local"}


def test_phases_apart_are_refused_where_the_engine_cannot(capsys: Captured) -> None:
    Path("apart.yaml").write_text(FLEET.replace("512x128}", "512x128, phases: apart}"))
    run(capsys, "plan", "apart.yaml", "--capacity-only", "-o", "apart.json")
    asked = ("up", "apart.json", "--fleet", "apart.yaml", "--pretend", "--dry-run")
    assert (
        "only the engine 'vllm' or 'atoll' or 'sglang'"
        in refused(capsys, *asked, "--engine", "llamacpp")[1]
    )


def dry_run(capsys: Captured, plan: Path, *args: str) -> list[Path]:
    folder = Path("out")
    run(capsys, "up", str(plan), "--fleet", "lab.yaml", "--dry-run", "-o", str(folder), *args)
    files = sorted(folder.iterdir())
    assert files
    return files


def test_a_dry_run_ends_with_a_code_of_its_own_where_nothing_can_start_an_instance(
    capsys: Captured, plan: Path
) -> None:
    written = json.loads(plan.read_text())
    first = written["instances"][0]
    first.pop("engine", None)
    first["nodes"][0]["node_type"] = "L4:1"
    plan.write_text(json.dumps(written))
    args = (
        "up",
        str(plan),
        "--fleet",
        "lab.yaml",
        "--pretend",
        "--dry-run",
        "--engine",
        "llamacpp",
    )
    code, said = refused(capsys, *args)
    assert code == 8
    assert f"no command for {first['id']}" in said


def test_a_dry_run_writes_manifests_without_a_cluster(capsys: Captured, plan: Path) -> None:
    files = dry_run(capsys, plan, "--on", "kubernetes", "--image", "atoll:9", "--namespace", "ml")
    kinds = set()
    for path in files:
        for each in yaml.safe_load_all(path.read_text()):
            kinds.add(each["kind"])
            assert each["metadata"]["namespace"] == "ml"
            if each["kind"] == "StatefulSet":
                pod = each["spec"]["template"]["spec"]
                assert pod["containers"][0]["image"] == "atoll:9"
    assert kinds == {"ConfigMap", "StatefulSet"}


def test_a_dry_run_writes_lines_for_this_machine(capsys: Captured, plan: Path) -> None:
    (path,) = dry_run(capsys, plan, "--pretend", "--stand-in")
    text = path.read_text()
    assert path.name == "local.sh"
    assert text.count(" -m atoll join ") == text.count("--label atoll.fleet=lab")
    assert "instances.token" in text


def test_a_dry_run_writes_tasks(capsys: Captured, site: Path) -> None:
    cloud = FLEET.replace("region: here", "region: aws/us-east-2").replace("name: lab", "name: sky")
    Path("sky.yaml").write_text(cloud)
    problem = put_phases_together(read_problem(site / "sky.yaml"))
    made_plan = FleetPlan.of(solve(problem, PlanRequest(effort=Effort(cached=False))), problem)
    Path("sky.json").write_text(made_plan.to_json())
    args = ("--fleet", "sky.yaml", "--on", "skypilot", "--dry-run", "-o", "tasks")
    run(capsys, "up", "sky.json", *args, "--image", "docker:atoll")
    # The fleet was never up: nobody has made the token that its instances join with.
    assert "instances.token" in Path("tasks/ATOLL_FABRIC.token").read_text()
    for path in Path("tasks").glob("*.yaml"):
        task = yaml.safe_load(path.read_text())
        assert task["resources"]["any_of"][0]["infra"] == "aws/us-east-2"
        assert task["resources"]["any_of"][0]["accelerators"] == {"L4": 1}
        assert task["resources"]["image_id"] == "docker:atoll"


def test_a_missing_kubeconfig_is_in_the_error_and_the_history(capsys: Captured, plan: Path) -> None:
    args = ("--fleet", "lab.yaml", "--on", "kubernetes", "--yes", "--kubeconfig", "/nowhere")
    _, line = refused(capsys, "up", str(plan), *args)
    assert "kube" in line
    (event,) = home_of("lab").history.read()
    assert event.kind == "failure"
    assert event.text == line.removeprefix("error: ")
    # Nothing was begun, so nothing is up.
    assert home_of("lab").read() is None


def test_unknown_fleets_are_named(capsys: Captured) -> None:
    bring()
    for verb in (
        ["down", "lib", "--yes"],
        ["history", "lib"],
        ["status", "lib"],
        ["operate", "lib", "--yes"],
    ):
        code, line = refused(capsys, *verb)
        assert code == 4
        assert "did you mean lab?" in line


def test_history_says_what_and_why(capsys: Captured) -> None:
    home = bring()
    assert "nothing has happened yet" in run(capsys, "history", "lab")
    home.history.add(
        HistoryEvent(at_s=0.0, kind="plan", text="no plan is known yet", usd_per_hour=1.6),
        HistoryEvent(at_s=1.0, kind="start", text="demand needs it", instance="chat-0"),
        HistoryEvent(at_s=2.0, kind="failure", text="no room\nfor it", instance="chat-1"),
    )
    lines = run(capsys, "history").splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("no plan is known yet ($1.60/h)")
    assert "start" in lines[1]
    assert lines[1].endswith("chat-0  demand needs it")
    assert lines[2].endswith("chat-1  no room for it")
    (last,) = json.loads(run(capsys, "history", "lab", "--last", "1", "--json"))
    assert (last["kind"], last["instance"], last["at_s"]) == ("failure", "chat-1", 2.0)
    assert len(run(capsys, "history", "--instance", "chat-0").splitlines()) == 1


def test_status_shows_what_is_wrong(capsys: Captured) -> None:
    gone = Daemon(process=ProcessId(pid=1, start="no"), log="/log")
    entrance = Entrance(url="http://127.0.0.1:9", token="/t", observer="/o", hub=gone, gateway=gone)
    home = bring(entrance=entrance)
    home.history.add(HistoryEvent(at_s=2.0, kind="failure", text="the image does not pull"))
    shown = run(capsys, "status")
    assert "lab at http://127.0.0.1:9/v1: 0 of 0 ready on local" in shown
    assert "nobody operates it" in shown
    assert "! the hub has died" in shown
    assert "the image does not pull" in shown
    (found,) = json.loads(run(capsys, "status", "lab", "--json"))
    assert found["operated"]["controller"] is None
    assert len(found["operated"]["errors"]) == 3
    # Once something was started again, what failed before is past.
    home.history.add(HistoryEvent(at_s=3.0, kind="start", text="again", instance="chat-1"))
    assert "does not pull" not in run(capsys, "status")


def test_status_says_why_a_target_does_not_answer(capsys: Captured) -> None:
    home = bring()
    record = home.read()
    assert record is not None
    settings = {"names": ["kubernetes"], "kubernetes": {"kubeconfig": "/nowhere"}}
    targets = TargetSettings.parse(settings)
    home.write(record.model_copy(update={"targets": targets}))
    assert "! kubernetes: " in run(capsys, "status")


def test_a_fleet_that_is_down_is_shown_when_named(capsys: Captured) -> None:
    bring(up=False)
    assert "no fleet is up here" in run(capsys, "status")
    assert "lab: down" in run(capsys, "status", "lab")


def test_down_of_nothing_ends_what_it_can(capsys: Captured) -> None:
    home = bring()
    assert "0 instances" in run(capsys, "down", "lab", "--yes")
    record = home.read()
    assert record is not None
    assert not record.up
    assert [event.text for event in home.history.read()] == ["taken down"]


def test_logs_name_what_there_is(capsys: Captured) -> None:
    home = bring()
    (home.folder / "gateway.log").write_text("one\ntwo\nthree\n")
    assert run(capsys, "logs", "lab", "gateway", "--lines", "2") == "two\nthree\n"
    assert refused(capsys, "logs", "lab", "chat-0")[0] == 4
    assert "one instance at a time" in refused(capsys, "logs", "a", "b", "c")[1]


def test_new_lines_are_those_after_the_old_ones() -> None:
    assert find_new(["a", "b"], ["a", "b", "c"]) == ["c"]
    assert find_new(["a", "b"], ["b", "c"]) == ["c"]
    assert find_new(["a", "b"], ["x", "y"]) == ["x", "y"]
    assert find_new([], ["x"]) == ["x"]
    assert find_new(["a", "a"], ["a", "a"]) == []


def test_a_simulation_is_handed_over_whole(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    class Simulated:
        summaries = ("a row",)

        def simulate_operation(self, trace: str, **options: object) -> Simulated:
            options.pop("listener")
            seen.extend((trace, options))
            return self

    def load(path: str) -> Simulated:
        seen.append(path)
        return Simulated()

    monkeypatch.setattr(Fleet, "load", load)
    args = ("--simulate", "trace.csv", "--days", "7", "--prices", "p.csv", "--seed", "3")
    shown = run(capsys, "operate", "lab.yaml", *args, "--failures", "f", "--json")
    options = {"days": 7.0, "prices": "p.csv", "failures": "f", "mix": None, "seed": 3}
    assert seen == ["lab.yaml", "trace.csv", options]
    assert json.loads(shown) == ["a row"]


def test_commands_of_a_plan_are_lines_to_paste(capsys: Captured, plan: Path) -> None:
    lines = run(capsys, "plan", str(plan), "--commands").splitlines()
    count = len(json.loads(plan.read_text())["instances"])
    assert len(lines) == count > 0
    for number, line in enumerate(lines):
        assert line.startswith("vllm serve meta-llama/")
        assert f"--port {8000 + number} " in line
    shown = json.loads(run(capsys, "plan", str(plan), "--commands", "--json"))
    assert [line for each in shown for line in each["lines"]] == lines
