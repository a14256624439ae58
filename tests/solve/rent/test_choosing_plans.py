"""Plans with a choice of models, from the problem to the checked plan."""

from __future__ import annotations

import pytest

from atoll.api.fleet_plan import FleetPlan
from atoll.core.errors import UsageError
from atoll.plan.choice import Choice, ModelMix, Variant
from atoll.plan.cluster import Cluster
from atoll.plan.problem import Problem, Settings
from atoll.plan.validate.check import validate
from atoll.prove.planning import plan as prove
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.rent.choosing.solver import refuse_others
from tests.plan.builders import EAST, catalog, offer, problem, service

MODELS = {"llama-3.1-8b": 0.06, "qwen3-32b": 0.02}


def fleet(rate: float = 4.0, max_error: float | None = 0.04, available: int = 12) -> Problem:
    """A choice between two models beside a plain service, single nodes."""
    names = {f"chat.{model}": model for model in MODELS}
    return problem(
        services=(
            *(
                service(name, model=model, rate_per_s=rate, ttft_s=3.0, tpot_s=0.15)
                for name, model in names.items()
            ),
            service("mail", model="llama-3.1-8b", rate_per_s=1.0, ttft_s=3.0, tpot_s=0.15),
        ),
        choices=(
            Choice(
                name="chat",
                variants=tuple(
                    Variant(service=name, model=model, error=MODELS[model])
                    for name, model in names.items()
                ),
                max_error=max_error,
            ),
        ),
        offers=(
            offer(EAST, "L4:1", 0.6, available=available),
            offer(EAST, "L40S:1", 2.1, available=available),
            offer(EAST, "L40S:2", 4.0, available=available),
        ),
        settings=Settings(max_nodes_per_instance=2),
    )


def cost_at(given: Problem, share: float) -> float:
    """What the best plan costs where the small model answers this share."""
    small, large = (v.service for v in given.choices[0].variants)
    mix = ModelMix.of(given.choices[0], {small: share, large: 1.0 - share})
    found = solve(given.settled([mix]), PlanRequest(catalog=catalog()))
    assert found.status in ("optimal", "feasible")
    assert found.objective is not None
    return found.objective


def test_no_share_on_a_grid_is_cheaper_than_the_plan() -> None:
    given = fleet()
    found = solve(given, PlanRequest(catalog=catalog()))
    assert validate(found, given, catalog()) == []
    assert found.objective is not None
    assert found.bound is not None
    (mix,) = found.mixes
    assert mix.error <= 0.04 + 1e-9
    assert found.problem_hash == given.settled(found.mixes).content_hash()
    for share in (0.0, 0.125, 0.25, 0.375, 0.5):
        cost = cost_at(given, share)
        assert found.objective <= cost * (1 + 1e-3)
        assert found.bound <= cost * (1 + 1e-6)
    again = solve(given, PlanRequest(catalog=catalog()))
    assert again == found


def test_models_are_chosen_with_losses_in_mind() -> None:
    plain = fleet(rate=2.0, max_error=None)
    given = plain.replace(limits=plain.limits.model_copy(update={"survive": 1}))
    found = solve(given, PlanRequest(catalog=catalog()))
    assert found.status in ("optimal", "feasible")
    assert validate(found, given, catalog()) == []
    assert found.objective is not None
    assert found.bound is not None
    # One model alone: the other way to answer would have to be doubled as well.
    assert sum(share > 0.0 for share in found.mixes[0].shares.values()) == 1
    assert found.bound >= found.objective * 0.99
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        assert found.objective <= cost_at(given, share) * (1 + 1e-3)


def test_a_plan_knows_the_problem_that_its_mixes_settle() -> None:
    given = fleet(max_error=None)
    made = FleetPlan.of(solve(given, PlanRequest(catalog=catalog())), given)
    assert made.problem == given.settled(made.mixes)
    assert set(made.models) == {s.name for s in made.problem.services}
    assert made.violations() == []
    wrong = made.mixes[0].model_copy(update={"error": 0.5})
    other = FleetPlan.of(made.model_copy(update={"mixes": (wrong,)}), given)
    assert {found.rule for found in other.violations()} == {"error"}


@pytest.mark.parametrize("solver", ["homogeneous", "memory-proportional"])
def test_rules_take_a_mix_that_is_allowed_and_cost_no_less(solver: str) -> None:
    given = fleet()
    best, rule = (
        solve(given, PlanRequest(catalog=catalog())),
        solve(given, PlanRequest(solver=solver, catalog=catalog())),
    )
    assert validate(rule, given, catalog()) == []
    assert rule.bound is None
    assert rule.objective is not None
    assert best.objective is not None
    assert rule.objective >= best.objective * (1 - 1e-6)


def test_where_demand_cannot_be_met_the_error_still_holds() -> None:
    given = fleet(rate=400.0, available=2)
    found = solve(given, PlanRequest(catalog=catalog()))
    assert found.status == "partial"
    assert found.bound is None
    assert 0.0 < min(found.served_fraction.values()) < 1.0
    assert sum(found.mixes[0].shares.values()) == pytest.approx(1.0)
    assert found.mixes[0].error <= 0.04 + 1e-6
    assert validate(found, given, catalog()) == []


def test_what_runs_and_limits_are_kept() -> None:
    given = fleet()
    first = solve(given, PlanRequest(catalog=catalog()))
    limits = given.limits.model_copy(update={"max_nodes": first.nodes})
    again = given.replace(
        running=first.instances,
        limits=limits,
        settings=given.settings.model_copy(update={"init_penalty": 0.5}),
    )
    found = solve(again, PlanRequest(catalog=catalog()))
    assert validate(found, again, catalog()) == []
    assert found.init_usd == 0.0
    assert {i.id for i in found.instances} == {i.id for i in first.instances}


def test_clusters_have_no_choice() -> None:
    given = fleet()
    node = {"name": "n0", "region": EAST, "node_type": "L40S:1"}
    links = [{"src": "*", "dst": "*", "bytes_per_s": 1e9}]
    cluster = Cluster.model_validate({"nodes": [node], "links": links})
    owned = given.replace(cluster=cluster, offers=())
    for ask in (refuse_others, solve, prove):
        with pytest.raises(UsageError, match="chat: a choice of models needs nodes") as refused:
            ask(owned)
        assert refused.value.field == "services"
        assert refused.value.hint


@pytest.mark.slow
def test_promises_are_kept_by_a_mix() -> None:
    given = fleet(rate=1.0)
    found = prove(given, PlanRequest(catalog=catalog(), error_bars=False))
    assert validate(found, given, catalog()) == []
    assert found.promises
    assert all(promise.is_kept for promise in found.promises)
    assert found.mixes[0].error <= 0.04 + 1e-6
    assert found.bound is not None
    assert found.objective is not None
    assert found.bound == found.capacity_bound
    assert found.bound <= found.objective
