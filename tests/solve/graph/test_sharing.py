"""Services that share executors: as good as trying everything, cheaper than apart, and apart on request."""

from __future__ import annotations

import pytest

from atoll.control.decision.lane_capacity import CarriedLoad, find_mixed
from atoll.core.errors import InputError
from atoll.plan.component_sharing import group_services, list_sharers
from atoll.plan.cost import cost_report
from atoll.plan.executor_use import executor_use
from atoll.plan.plan import Guest, Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.prove.graph_kept import sample_graphs
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from tests.reference.cells_cases import check_exact
from tests.solve.graph.fleets import fleet, offer, seeing

ONE_L4 = (offer("L4:1", 0.8),)


def two(**changes: dict[str, object]) -> Problem:
    """Two services that would not fill an executor each."""
    models = {name: seeing(rate="0.1/s", **changes.get(name, {})) for name in ("one", "two")}
    return fleet(models, ONE_L4)


def planned(problem: Problem, **request: object) -> Plan:
    plan = solve(problem, PlanRequest(**request))  # type: ignore[arg-type]
    assert validate(plan, problem) == []
    return plan


@pytest.mark.parametrize("cases", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_equal_to_trying_everything(cases: int) -> None:
    checked, equal, worst = check_exact(cases, seed=70_000, shared=True)
    assert (checked, equal) == (cases, cases), worst


def test_sharing_costs_less_than_not_sharing() -> None:
    shared, apart = planned(two()), planned(two(one={"share": False}))
    assert shared.usd_per_hour < apart.usd_per_hour
    assert group_services(shared, ("one", "two")) == (("one", "two"),)
    assert group_services(apart, ("one", "two")) == (("one",), ("two",))
    assert all(one.services == ("one", "two") for one in shared.executor_instances)
    assert not any(one.guests for one in apart.executor_instances)


def test_what_a_guest_asks_is_stated_and_priced() -> None:
    problem = two()
    plan = planned(problem)
    for one in plan.executor_instances:
        assert one.carries("one") + one.carries("two") == pytest.approx(one.throughput_per_s)
        assert one.carries("two") > 0.0
    costs = {line.service: line.usd_per_hour for line in cost_report(plan, problem).services}
    assert sum(costs.values()) == pytest.approx(plan.usd_per_hour)
    assert costs["one"] == pytest.approx(costs["two"])
    use = executor_use(plan, problem, problem.catalog())
    assert use.of_service("one") == use.of_service("two") == use.executors
    # Each has the part of their time that its requests are planned to take, and what is left of it.
    mixed = find_mixed(problem, ())
    lanes = CarriedLoad(problem, mixed, plan.instances).lanes()
    assert lanes["one"] == pytest.approx(lanes["two"])
    assert lanes["one"] >= 0.1
    first = plan.executor_instances[0]
    assert sum(first.part_of(name) for name in ("one", "two")) == pytest.approx(1.0)
    left = CarriedLoad(problem, mixed, plan.instances).without(first)
    assert set(left) == {"one", "two"}
    assert max(left.values()) < 0.1


def test_a_guest_is_named_once() -> None:
    problem = two()
    plan = planned(problem)
    one = plan.executor_instances[0]
    wrong = one.model_copy(update={"guests": (Guest(service="one", per_s=0.0),)})
    broken = plan.model_copy(update={"instances": (wrong, *plan.instances[1:])})
    assert any("shares it 2 times" in v.message for v in validate(broken, problem))


def test_a_guest_that_may_not_share_is_refused() -> None:
    plan = planned(two())
    apart = two(one={"share": False})
    rules = {v.rule for v in validate(plan, apart, same_problem=False)}
    assert "sharing" in rules


def test_what_runs_is_kept_and_a_new_service_joins_it() -> None:
    problem = two()
    alone = planned(fleet({"one": seeing(rate="0.1/s")}, ONE_L4))
    settings = problem.settings.model_copy(update={"init_penalty": 1.0})
    again = planned(problem.replace(running=alone.instances, settings=settings))
    kept = [one for one in again.instances if one.kept]
    assert {one.id for one in kept} == {one.id for one in alone.instances}
    assert {one.services for one in kept} == {("one", "two")}
    once_more = planned(problem.replace(running=again.instances, settings=settings))
    assert all(one.kept and one.guests for one in once_more.instances)


def test_components_of_one_name_share_whatever_the_model() -> None:
    names = {"vision": "eyes"}
    problem = fleet(
        {
            "look": seeing(rate="0.1/s", share=names),
            "talk": seeing(rate="0.1/s", model="qwen2.5-vl-7b@fp8", share=names),
        },
        ONE_L4,
    )
    look = problem.service("look")
    assert list_sharers(problem, look, ("vision",)) == ("look", "talk")
    assert list_sharers(problem, look, ("vision", "llm")) == ("look",)
    plan = planned(problem)
    shared = [one for one in plan.executor_instances if one.guests]
    assert all(one.parts == ("vision",) for one in shared)


def test_components_of_other_shapes_do_not_share_a_name() -> None:
    names = {"vision": "eyes"}
    with pytest.raises(InputError, match="other shapes"):
        fleet(
            {
                "look": seeing(rate="0.1/s", share=names),
                "talk": seeing(rate="0.1/s", model="internvl3-38b", share=names),
            }
        )
    with pytest.raises(InputError, match="no other service"):
        fleet({"look": seeing(share=names)})
    with pytest.raises(InputError, match=r"unknown component|no component|eyes"):
        fleet({"look": seeing(share={"eyes": "eyes"})})


def test_engines_that_are_started_otherwise_do_not_share() -> None:
    problem = two(one={"engine": {"max_num_seqs": 8}})
    assert list_sharers(problem, problem.service("one"), ("vision",)) == ("one",)


def test_a_text_service_that_says_that_it_shares_is_one_of_executors() -> None:
    text = {"text": {"share": 1.0, "input": 400, "output": 150}}
    plain, told = (
        fleet({"one": seeing(rate="0.1/s"), "two": seeing(rate="0.1/s", classes=text, **more)})
        for more in ({}, {"share": True})
    )
    assert [s.name for s in plain.graph_services] == ["one"]
    assert list_sharers(told, told.service("two"), ("llm",)) == ("one", "two")


def test_simulated_together_they_keep_what_they_are_promised() -> None:
    """Two services on one executor are as one with the requests of both."""
    both = planned(two())
    whole = fleet({"all": seeing(rate="0.2/s")}, ONE_L4)
    single = planned(whole)
    assert single.usd_per_hour == both.usd_per_hour
    problem = two()
    options = {"first_seed": 1, "min_runs": 1, "max_runs": 1, "requests": 1500}
    kept = sample_graphs(both, problem, problem.catalog(), **options)  # type: ignore[arg-type]
    alone = sample_graphs(single, whole, whole.catalog(), **options)  # type: ignore[arg-type]
    assert set(kept) == {"one", "two"}
    for runs in kept.values():
        assert runs[0].all == pytest.approx(alone["all"][0].all, abs=0.05)
    busy = [sum(runs[0].busy.values()) for runs in (kept["one"], alone["all"])]
    assert busy[0] == pytest.approx(busy[1], rel=0.1)
