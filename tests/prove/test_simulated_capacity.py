"""Instances that carry more than the capacity model says: found by simulation, stated, and checked."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from atoll.plan.files.fleet_file import build_problem
from atoll.plan.plan import MAX_SIMULATED, Instance, Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.prove import rent_promises
from atoll.prove.load_curves import STEPS, TOP, simulate_more
from atoll.prove.rent_promises import keep_promises
from atoll.prove.simulation_deadline import SimulationCutShortError
from atoll.solve.assembly import keep
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve

REQUEST = PlanRequest(effort=Effort(cached=False))


@cache
def asked(rate: str = "25/s") -> Problem:
    """Short prompts with room to wait: one machine carries 24.1/s by the model, and more in simulation."""
    service = {
        "model": "qwen3-8b",
        "ttft": "20s",
        "tpot": "300ms",
        "rate": rate,
        "lengths": "128x300",
        "phases": "together",
    }
    offer = {
        "region": "r",
        "node_type": "A100-80:1",
        "available": 4,
        "usd_per_hour": 2.0,
        "whole": True,
    }
    settings = {"max_nodes_per_instance": 1, "engines": ["vllm"]}
    return build_problem(
        {
            "name": "over",
            "models": {"a": service},
            "pool": {"offers": [offer]},
            "settings": settings,
        }
    )


@cache
def made() -> Plan:
    return keep_promises(asked(), REQUEST)


def test_one_machine_does_where_the_model_asks_for_two() -> None:
    plan = made()
    assert solve(asked(), REQUEST).usd_per_hour == 4.0
    (instance,) = plan.instances
    assert (plan.usd_per_hour, plan.bound) == (2.0, 2.0)
    assert plan.served_fraction == {"a": 1.0}
    assert plan.promises[0].is_surely_kept
    known = instance.simulated
    assert known is not None
    assert known.model_per_s < 25.0 <= known.per_s <= MAX_SIMULATED * known.model_per_s
    assert known.kept >= 0.95
    assert len(known.seeds) == 3
    assert validate(plan, asked()) == []
    # By the model nothing costs less than $4.00/h: that is no bound of this plan.
    assert plan.capacity_bound is None
    (note,) = plan.notes
    assert note.startswith(f"{instance.id} carries 104% of the capacity model, as simulated: ")
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_what_is_simulated_at_most_is_what_plans_may_state() -> None:
    assert TOP / STEPS == MAX_SIMULATED


def test_too_much_is_too_much() -> None:
    problem = asked()
    catalog = problem.catalog()
    (instance,) = made().instances
    analytic = keep(problem, catalog, instance)
    # A running instance counts with what the model says: promises may have changed.
    assert analytic.simulated is None
    assert analytic.throughput_per_s < 25.0
    assert simulate_more(problem, catalog, analytic, 1.2 * analytic.throughput_per_s) is None
    assert simulate_more(problem, catalog, analytic, 1.3 * analytic.throughput_per_s) is None


def test_no_smaller_plan_is_looked_for_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    prover = rent_promises._Prover(asked(), replace(REQUEST, deadline_s=0.0))
    prover.first = prover.best = solve(asked(), REQUEST)
    prover.bound = 0.0
    asked_for: list[object] = []

    def smaller(*args: object) -> list[Plan]:
        asked_for.append(args)
        return []

    monkeypatch.setattr(rent_promises, "smaller_plans", smaller)
    with pytest.raises(SimulationCutShortError):
        prover._shrink()
    assert not asked_for


def _stating(**changes: object) -> Plan:
    plan = made()
    (instance,) = plan.instances
    known = instance.simulated
    assert known is not None
    update = {"simulated": known.model_copy(update=changes)}
    return plan.model_copy(update={"instances": (instance.model_copy(update=update),)})


def _loaded(instance: Instance, factor: float) -> Instance:
    flows = tuple(f.model_copy(update={"per_s": f.per_s * factor}) for f in instance.flows)
    more = {"flows": flows, "throughput_per_s": instance.throughput_per_s * factor}
    return instance.model_copy(update=more)


@pytest.mark.parametrize(
    "changes",
    [
        {"kept": 0.94},
        {"per_s": 24.5},
        {"per_s": 33.0},
        {"model_per_s": 25.0},
        {"seeds": (1, 1)},
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object]) -> None:
    found = validate(_stating(**changes), asked())
    assert ("node-capacity", "instances.simulated") in {(one.rule, one.field) for one in found}


def test_no_more_is_carried_than_was_simulated() -> None:
    plan = made()
    (instance,) = plan.instances
    bare = instance.model_copy(update={"simulated": None})
    for broken in (bare, _loaded(instance, 1.1)):
        found = validate(plan.model_copy(update={"instances": (broken,)}), asked())
        assert "node-capacity" in {one.rule for one in found}


def test_a_plan_that_was_not_simulated_whole_is_refused() -> None:
    (found,) = validate(made().model_copy(update={"promises": ()}), asked())
    assert (found.rule, found.field) == ("promise", "promises")
