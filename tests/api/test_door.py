"""The front door: from a fleet file to a plan, a proof and a simulation, in Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import atoll
from atoll import Effort, Fleet, FleetPlan, Plan, Progress, SimReport
from atoll.core.errors import InputError, UsageError
from atoll.plan.validate.violation import InvalidPlanError
from tests.plan import clusters

TEXT = """
name: small
services:
  chat:
    model: llama-3.1-8b
    ttft: 1s
    tpot: 60ms
    rate: 4/s
    lengths: 600x120
pool:
  owned: {here: {L40S: 8, L4: 8}}
settings: {max_nodes_per_instance: 2}
"""
FRESH = Effort(cached=False)


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return Fleet.read(TEXT)


@pytest.fixture(scope="module")
def plan(fleet: Fleet) -> FleetPlan:
    return fleet.plan(effort=FRESH, capacity_only=True)


def test_importing_atoll_loads_nothing_heavy() -> None:
    code = (
        "import sys, atoll; dir(atoll);"
        "print([m for m in ('numpy', 'pydantic', 'numba', 'torch', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_everything_offered_is_there() -> None:
    for name in atoll.__all__:
        assert getattr(atoll, name) is not None
    with pytest.raises(AttributeError, match="Fleets"):
        atoll.Fleets  # noqa: B018


def test_every_way_to_read_a_fleet_gives_the_same(fleet: Fleet, tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "small.yaml"
    path.write_text(TEXT)
    problem = tmp_path / "problem.json"
    problem.write_text(fleet.problem.to_json())
    assert Fleet.load(path).problem == fleet.problem
    assert Fleet.load(problem).problem == fleet.problem
    assert Fleet.from_dict(yaml.safe_load(TEXT)).problem == fleet.problem
    assert repr(fleet) == "<Fleet small: chat>"


def test_bad_fleets_name_the_field() -> None:
    with pytest.raises(InputError, match=r"services\.chat"):
        Fleet.read(TEXT.replace("rate: 4/s", "rates: 4/s"))
    with pytest.raises(InputError, match="services"):
        Fleet.from_dict({"name": "nothing", "pool": {}})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, object()])
def test_what_is_no_plain_data_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="no plain data"):
        Fleet.from_dict({"services": value})


@pytest.mark.parametrize("share", [float("nan"), -0.5, 0.0, 1.0, 95.0])
def test_attainment_is_a_share(fleet: Fleet, share: float) -> None:
    with pytest.raises(UsageError, match="is no share"):
        fleet.plan(attainment=share)


def test_a_plan_read_from_json_alone_says_that_its_fleet_is_missing(plan: FleetPlan) -> None:
    alone = FleetPlan.model_validate_json(plan.model_dump_json())
    with pytest.raises(UsageError, match="does not know its fleet"):
        alone.validate()


def test_a_plan_is_a_plan_that_knows_its_fleet(
    fleet: Fleet, plan: FleetPlan, tmp_path: Path
) -> None:
    assert isinstance(plan, Plan)
    assert plan.status == "optimal"
    plan.validate()
    assert list(plan.violations()) == []
    plan.save(tmp_path / "plan.json")
    again = fleet.load_plan(tmp_path / "plan.json")
    assert again.to_json() == plan.to_json()
    assert again.problem is fleet.problem
    assert json.loads(plan.to_json()) == Plan.from_json(plan.to_json()).model_dump(mode="json")
    change = plan.diff(again)
    assert change.empty
    assert str(change) == "nothing changes"
    assert "nothing changes" in repr(change)
    assert "<div" in change._repr_html_()


def test_a_plan_that_does_not_hold_is_found_out(plan: FleetPlan) -> None:
    wrong = FleetPlan.of(plan.model_copy(update={"usd_per_hour": 1e6}), plan.problem)
    with pytest.raises(InvalidPlanError):
        wrong.validate()
    assert list(wrong.violations())


def test_what_runs_is_kept(fleet: Fleet, plan: FleetPlan, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(TEXT)
    again = Fleet.load(path, running=plan).plan(effort=FRESH, capacity_only=True)
    assert all(instance.kept for instance in again.instances)


def test_plans_show_themselves(plan: FleetPlan) -> None:
    html = plan._repr_html_()
    assert "<" in html
    assert "<html" not in html
    assert "L40S" in str(plan) or "L4" in str(plan)
    assert repr(plan).startswith("<FleetPlan small: optimal, $")


def test_what_a_plan_took_is_no_part_of_it(fleet: Fleet, plan: FleetPlan) -> None:
    again = fleet.plan(effort=FRESH, capacity_only=True)
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert plan.stats.seconds > 0
    assert plan.stats.work == again.stats.work
    assert ("fast", *fleet.baselines) == fleet.solvers[1:]


def test_progress_is_told(fleet: Fleet) -> None:
    told: list[Progress] = []
    fleet.plan(effort=FRESH, capacity_only=True, on_progress=told.append)
    assert {progress.stage for progress in told} <= {"templates", "allocating", "ranking"}
    assert any(progress.stage == "allocating" for progress in told)


def test_baselines_are_compared(fleet: Fleet, plan: FleetPlan) -> None:
    rows = fleet.compare(plan, effort=FRESH)
    assert [row.solver for row in rows] == list(fleet.baselines)


def test_a_simulation_is_the_same_each_time(plan: FleetPlan) -> None:
    first = plan.simulate(seed=1, duration_s=60.0)
    assert isinstance(first, SimReport)
    assert first.finished > 100
    assert set(first.kept) == {"chat"}
    again, other = plan.simulate(seed=1, duration_s=60.0), plan.simulate(seed=2, duration_s=60.0)
    assert isinstance(again, SimReport)
    assert isinstance(other, SimReport)
    assert (first.requests.ttft_s == again.requests.ttft_s).all()
    assert len(first.requests.ttft_s) != len(other.requests.ttft_s)
    assert "chat" in str(first)
    assert "promises kept: chat" in repr(first)
    assert "chat" in first._repr_html_()


def test_traces_in_words(plan: FleetPlan) -> None:
    report = plan.simulate("poisson:2/s lengths=100x10 n=50 model=chat")
    assert len(report.columns()["arrival_s"]) == 50


def test_requests_as_a_frame(plan: FleetPlan) -> None:
    pytest.importorskip("pandas", reason="needs the extra 'notebook'")
    frame = plan.simulate("poisson:2/s lengths=100x10 n=50 model=chat").to_frame()
    assert len(frame) == 50
    assert frame["slo_met"].all()


@pytest.mark.parametrize("error_bars", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_promises_are_kept(fleet: Fleet, error_bars: bool) -> None:
    plan = fleet.plan(attainment=0.9, effort=FRESH, error_bars=error_bars)
    (promise,) = plan.promises
    assert (promise.chance is not None) is error_bars
    assert promise.service == "chat"
    assert promise.target == 0.9 <= promise.kept
    assert promise.low <= promise.kept <= promise.high
    assert plan.problem_hash == fleet.problem.content_hash()
    assert plan.capacity_bound is not None
    plan.validate()


def test_a_plan_explains_itself(plan: FleetPlan) -> None:
    why = plan.explain(node_types=["L4:1"])
    assert [use.node_type for use in why.node_types] == ["L4:1"]
    assert "L4:1" in str(why)
    assert "L4:1" in why._repr_html_()


def test_a_cluster_goes_through_the_same_door() -> None:
    fleet = Fleet(clusters.problem())
    plan = fleet.plan(solver="chain", rank=False)
    plan.validate()
    assert plan.goal != "cost"
    assert "tokens/s" in str(plan)
    assert [row.solver for row in fleet.compare(plan, deadline_s=1.0)]


def test_a_trace_that_names_no_service_is_spread_by_demand() -> None:
    two = TEXT.replace(
        "pool:",
        "  mail: {model: llama-3.1-8b, ttft: 2s, tpot: 60ms, rate: 12/s, lengths: 600x120}\npool:",
    )
    plan = Fleet.read(two).plan(effort=FRESH, capacity_only=True)
    report = plan.simulate("poisson:10/s lengths=100x10 n=2000", seed=3)
    asked = {service.name: service.requests for service in report.services}
    assert sum(asked.values()) == 2000
    assert asked["mail"] == pytest.approx(1500, abs=90)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan")])
def test_a_deadline_is_some_time(fleet: Fleet, deadline_s: float) -> None:
    with pytest.raises(UsageError, match="deadline"):
        fleet.plan(deadline_s=deadline_s)


def test_a_trace_of_another_kind_is_refused(plan: FleetPlan) -> None:
    with pytest.raises(UsageError, match="type int"):
        plan.simulate(123)  # type: ignore[arg-type]
