"""What-if and simulations as jobs: what they answer, twice the same, and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import InputError, UsageError
from atoll.plan.files.examples import find_example
from atoll.plan.files.read import read_problem
from atoll.plan.problem import Problem
from atoll.planner import whatif
from atoll.planner.change import DialChange, change_problem
from atoll.planner.dials import describe_dials
from atoll.planner.plan_simulation import find_simulation
from atoll.planner.questions import WhatIfAsk
from atoll.planner.source import read_sent, read_source
from atoll.planner.whatif import PlannedFleet, find_whatif, judge
from atoll.prove.quick_plan import QuickPlan, plan_quickly
from tests.prove.test_quick_plan import SMALL

HERE = {"place": {"text": SMALL}}


def _ask(**change: object) -> dict[str, object]:
    said: list[object] = []
    found = find_whatif({**HERE, "ask": {"file": SMALL, "simulate_s": 30.0, **change}}, said.append)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found


def test_more_demand_costs_more(tmp_path: Path) -> None:
    found = _ask(demand={"chat": 5.0})
    now, then = found["now"], found["then"]
    assert now["usd_per_hour"] < then["usd_per_hour"]  # type: ignore[index]
    assert "more and keeps every promise" in str(found["verdict"])
    assert then["plan"]["bound_usd_per_hour"] is None  # type: ignore[index]
    path = tmp_path / str(found["fleet_file_name"])
    path.write_text(str(found["fleet_file"]))
    assert read_problem(path).service("chat").rate_per_s == 20.0
    again = _ask(demand={"chat": 5.0})
    assert {**again, "seconds": 0} == {**found, "seconds": 0}


def test_nothing_changed_is_the_same_plan() -> None:
    found = _ask()
    assert found["now"] == found["then"]
    diff = found["diff"]
    assert isinstance(diff, dict)
    assert diff["starts"] == diff["goes"] == []
    assert str(found["verdict"]).startswith("costs the same")


def test_the_plan_in_force_is_what_there_is_now() -> None:
    problem = read_sent(SMALL).problem
    made = PlannedFleet.of(plan_quickly(_raised(problem), simulate_s=30.0, seed=0)).plan
    place = {"text": SMALL, "plan": made.to_json()}
    ask = {"file": SMALL, "simulate_s": 30.0, "prices": {"L4": 2.0}}
    found = find_whatif({"place": place, "ask": ask}, lambda _said: None)
    assert found["now"]["usd_per_hour"] == made.usd_per_hour
    assert found["made"] is None


@pytest.mark.parametrize(("available", "stays"), [(1.0, True), (0.25, False)])
def test_no_change_shown_does_worse_than_changing_nothing(
    monkeypatch: pytest.MonkeyPatch, available: float, stays: bool
) -> None:
    def plan_dearly(problem: Problem, **fields: Any) -> QuickPlan:
        return plan_quickly(_raised(problem), **fields)

    made = PlannedFleet.of(plan_quickly(read_sent(SMALL).problem, simulate_s=30.0, seed=0)).plan
    monkeypatch.setattr(whatif, "plan_quickly", plan_dearly)
    place = {"text": SMALL, "plan": made.to_json()}
    ask = {"file": SMALL, "simulate_s": 30.0, "prices": {"L4": 1.5}}
    if not stays:
        # As many nodes as it has are not there any more.
        assert made.nodes > available
        ask["available"] = {"L4": available}
    found = find_whatif({"place": place, "ask": ask}, lambda _said: None)
    then, changes = found["then"], found["diff"]
    assert (changes["starts"] == changes["goes"] == []) is stays
    if stays:
        assert then["usd_per_hour"] == pytest.approx(1.5 * made.usd_per_hour)
        assert then["kept"]["chat"] >= 0.95


def _raised(problem: Problem) -> Problem:

    return change_problem(problem, DialChange(demand={"chat": 5.0}))


def test_verdicts_have_units() -> None:
    problem = read_sent(SMALL).problem
    now = PlannedFleet.of(plan_quickly(problem, simulate_s=30.0, seed=0))
    short = PlannedFleet(now.plan, {"chat": 0.5, "titles": 0.9}, 0.4)
    assert judge(now, short) == (
        f"costs the same, ${now.plan.usd_per_hour:.2f}/h and serves 40% of the demand, but only 50% of the "
        "requests for chat keep their promises (95% asked), and 1 more falls short"
    )


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"simulate_s": 1.0}, "simulate_s"),
        ({"simulate_s": 1e9}, "simulate_s"),
        ({"seed": -1}, "seed"),
        ({"fleet": ""}, "fleet"),
        ({"demand": {"a": -1.0}}, "demand.a"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_asks_are_checked(data: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as caught:
        WhatIfAsk.parse({"file": SMALL, **data})
    assert caught.value.field == field


def test_one_fleet_is_asked_about() -> None:
    for ask in ({}, {"fleet": "a", "file": "b"}):
        with pytest.raises(InputError, match="which fleet"):
            WhatIfAsk.parse(ask).check()


def _simulate(path: Path | None = None, **ask: object) -> dict[str, object]:
    arguments = {
        **HERE,
        "ask": {"file": SMALL, "duration_s": 30.0, **ask},
        "trace_path": None if path is None else str(path),
    }
    found = find_simulation(arguments, lambda _said: None)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found


def test_a_trace_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "u-1.csv"
    rows = "\n".join(f"{at / 2:.1f},100,20" for at in range(40))
    path.write_text(f"arrival_s,input_tokens,output_tokens\n{rows}\n")
    found = _simulate(path, trace="u-1", service="chat")
    assert found["requests"] == 40
    assert found["kept"] == {"chat": 1.0, "titles": None}
    assert str(found["html"]).startswith("<!")
    timeline = found["timeline"]
    assert isinstance(timeline, dict)
    assert len(timeline["t_s"]) == len(timeline["running"]) == len(timeline["ttft_s"]) <= 200
    fast = _simulate(path, trace="u-1", service="chat", speed=2.0, duration_s=5.0)
    assert fast["requests"] == 20
    again = _simulate(path, trace="u-1", service="chat")
    assert {**again, "seconds": 0} == {**found, "seconds": 0}


def test_built_in_workloads_and_own_demand() -> None:
    assert _simulate(trace="azure-conv", service="chat")["requests"]
    assert _simulate()["whole"] is True


def test_a_trace_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="which trace"):
        _simulate(trace="u-2")


def test_dials_of_a_file_and_of_a_choice() -> None:
    found = describe_dials(read_source(find_example("choice")), "choice", None)
    chat = found["services"][0]
    assert chat["name"] == "chat"
    assert chat["model"].startswith("llama-3.1-8b or")
    assert (chat["ttft_s"], chat["tpot_s"], chat["requests_per_s"]) == (2.0, 0.08, 12.0)
    assert [gpu["gpu"] for gpu in found["gpus"]] == ["L4", "L40S"]
    assert found["gpus"][0]["usd_per_gpu_hour"] > 0
    assert found["kind"] == "rented"
    cluster = describe_dials(read_source(find_example("cluster-shared")), "c", 0.0)
    assert cluster["kind"] == "cluster"
    assert sum(gpu["nodes"] for gpu in cluster["gpus"]) == 13
