"""Plans of every kind as data that can be drawn."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from atoll.api.fleet_plan import FleetPlan
from atoll.plan.choice import ModelMix
from atoll.plan.plan import KeptPromise, Plan
from atoll.plan.problem import Problem
from atoll.planner.plan_drawing import draw_plan
from tests.plan import clusters, graphs
from tests.plan.boxes import boxes
from tests.plan.builders import small
from tests.plan.test_choice import asked as asked_with
from tests.plan.test_choice import choice, plan_with


def draw(problem: Problem, plan: Plan) -> dict[str, Any]:
    drawn: dict[str, Any] = {**draw_plan(FleetPlan.of(plan, problem))}
    # Plain data that JSON holds, and no end of a flow that is not there.
    assert json.loads(json.dumps(drawn, allow_nan=False)) == drawn
    known = {f"instance:{one['id']}" for one in drawn["instances"]}
    known |= {f"machine:{s['machine']}" for one in drawn["instances"] for s in one["stages"]}
    known |= {f"{kind}:{s['name']}" for s in drawn["services"] for kind in ("demand", "answer")}
    known |= {f"choice:{one['name']}" for one in drawn["choices"]}
    assert {flow[end] for flow in drawn["flows"] for end in ("from", "to")} <= known
    return drawn


def leaving(drawn: dict[str, Any]) -> dict[str, float]:
    """Return the share of requests that leaves each end."""
    shares: defaultdict[str, float] = defaultdict(float)
    for flow in drawn["flows"]:
        shares[flow["from"]] += flow["share"]
    return shares


def test_rented_plan_with_phases_apart_and_together() -> None:
    problem, plan = small()
    drawn = draw(problem, plan)
    assert drawn["usd_per_hour"] == plan.usd_per_hour
    assert plan.bound is not None
    assert drawn["bound_usd_per_hour"] == pytest.approx(plan.bound - plan.init_usd)
    assert drawn["objective"]["unit"] == "usd_per_hour"
    assert drawn["hash"] == FleetPlan.of(plan, problem).content_hash()[:16]
    assert drawn["binds"] is None
    for service in drawn["services"]:
        assert leaving(drawn)[f"demand:{service['name']}"] == pytest.approx(1.0)
        assert service["kept"] is None
        assert service["usd_per_mtoken"] > 0.0
    assert sum(service["usd_per_hour"] for service in drawn["services"]) == pytest.approx(
        plan.usd_per_hour
    )
    # Those who read prompts hand over to those who write answers.
    phase = {f"instance:{one['id']}": one["phase"] for one in drawn["instances"]}
    handed = [flow for flow in drawn["flows"] if flow["from"] in phase]
    assert handed
    assert {(phase[f["from"]], phase[f["to"]]) for f in handed} == {("prefill", "decode")}
    for one in drawn["instances"]:
        service = problem.service(one["service"])
        # In requests/s whatever the phase counts in, and enough for its share.
        assert one["capacity_per_s"] >= one["share"] * service.demand_per_s - 1e-9
        layers = [stage["layers"] for stage in one["stages"]]
        assert layers == sorted(layers)


def test_what_starting_costs_is_no_part_of_the_bound_on_rent() -> None:
    problem, plan = small()
    assert plan.bound is not None
    changed = plan.model_copy(update={"init_usd": 1.0})
    drawn = draw(problem, changed)
    assert drawn["bound_usd_per_hour"] == pytest.approx(plan.bound - 1.0)
    assert drawn["start_usd_per_hour"] == 1.0


def test_promises_of_a_plan_are_drawn() -> None:
    problem, plan = small()
    name = problem.services[0].name
    kept = KeptPromise(
        service=name, target=0.95, kept=0.9, low=0.8, high=0.95, kept_ttft=1, kept_tpot=1, cause="x"
    )
    drawn = draw(problem, plan.model_copy(update={"promises": (kept,)}))
    (service,) = [one for one in drawn["services"] if one["name"] == name]
    assert (service["kept"], service["cause"]) == (0.9, "x")


def test_slices_of_one_machine_share_its_name() -> None:
    drawn = draw(*boxes())
    stages = [stage for one in drawn["instances"] for stage in one["stages"]]
    machines: defaultdict[str, int] = defaultdict(int)
    for stage in stages:
        machines[stage["machine"]] += stage["gpus"]
    assert sorted(machines.values()) == [1, 7, 8]
    assert {stage["of_gpus"] for stage in stages} == {1, 8}
    assert drawn["idle_usd_per_hour"] > 0.0


def test_cluster_flows_go_from_machine_to_machine() -> None:
    problem, plan = clusters.problem(), clusters.plan()
    drawn = draw(problem, plan)
    assert drawn["kind"] == "cluster"
    assert drawn["bound_usd_per_hour"] is None
    assert drawn["objective"] == {
        "goal": "max-flow",
        "unit": "tokens_per_s",
        "value": 1400.0,
        "bound": 1500.0,
    }
    assert drawn["proof"] == {
        "gap": "6.67%",
        "bound": "Bound by the capacity model: no placement carries more than 1,500.0 tokens/s (gap 6.67%).",
        "late": None,
    }
    shares = leaving(drawn)
    assert shares["demand:chat"] == pytest.approx(shares["machine:a"])
    assert sum(shares[f"machine:{name}"] for name in "bcd") == pytest.approx(shares["machine:a"])
    rate = problem.services[0].demand_per_s
    for flow in drawn["flows"]:
        assert flow["per_s"] == pytest.approx(flow["share"] * rate)
        assert flow["instance"] == "chat-both-0"


def test_requests_of_any_to_any_models_go_over_executors() -> None:
    drawn = draw(graphs.problem(), graphs.plan())
    parts = {one["id"]: one["parts"] for one in drawn["instances"]}
    assert parts["speak-0"] == ["talker", "vocoder"]
    assert all(stage["layers"] is None for one in drawn["instances"] for stage in one["stages"])
    pairs = {(flow["from"], flow["to"]) for flow in drawn["flows"]}
    assert ("demand:omni", "instance:think-0") in pairs
    assert ("demand:omni", "instance:see-0") in pairs
    assert ("instance:see-0", "instance:think-0") in pairs
    assert ("instance:think-0", "instance:speak-0") in pairs
    assert ("demand:omni", "instance:speak-0") not in pairs
    shares = leaving(drawn)
    assert shares["demand:omni"] == pytest.approx(1.0)
    assert shares["demand:draw"] == pytest.approx(1.0)
    assert {one["name"] for one in drawn["services"][1]["classes"]}


def test_choices_are_dealt_to_services() -> None:
    given = choice()
    mix = ModelMix.of(given, {"a.small": 0.6, "a.large": 0.4})
    drawn = draw(asked_with(given), plan_with(mix))
    assert drawn["choices"][0]["shares"] == {"a.small": 0.6, "a.large": 0.4}
    assert {one["name"]: one["choice"] for one in drawn["services"]} == {
        "a.small": "a",
        "a.large": "a",
    }
    assert leaving(drawn)["choice:a"] == pytest.approx(1.0)
