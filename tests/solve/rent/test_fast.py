"""The fast solver: always valid, within all limits, and close to the best there is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import AtollError
from atoll.plan.plan import Plan
from atoll.plan.problem import Limits, Problem, Settings
from atoll.solve.derating import Derating
from atoll.solve.effort import Effort
from atoll.solve.family import solvers
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.rent.allocation_types import BOTH, Allocation, AllocationLimits
from atoll.solve.rent.fast import fast_templates
from atoll.solve.rent.fast.fast_search import FastSearch
from atoll.solve.rent.fast.fast_solver import allocate_fast
from tests.plan.builders import EAST, WEST, catalog, offer, problem, service
from tests.seeds import examples
from tests.solve.rent.cases import (
    NO_LIMITS,
    Case,
    faults,
    model_of,
    optimum,
    random_case,
    supply_of,
)
from tests.solve.rent.cases import service as asked_for

SOME = examples(8)
FEW = examples(3)


def allocated(case: Case, **options: object) -> Allocation:
    return allocate_fast(
        case.services, case.supply, case.limits, init_penalty=case.init_penalty, running=case.running,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip


def limited_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    case = random_case(
        seed, services=int(rng.integers(1, 4)), regions=int(rng.integers(1, 4)),
        running=bool(rng.integers(2)), scarce=float(rng.uniform(0.1, 1.0)),
        most=int(rng.integers(2, 8)),
    )  # fmt: skip
    limits = NO_LIMITS
    if rng.random() < 0.2:
        limits = replace(limits, max_nodes=int(rng.integers(3, 12)))
    if rng.random() < 0.2:
        limits = replace(limits, budget=float(rng.uniform(3.0, 20.0)))
    if rng.random() < 0.2:
        limits = replace(limits, spread=2)
    return replace(case, limits=limits)


@SOME
@given(st.integers(0, 100_000))
def test_answers_are_sound_and_close_to_the_optimum(seed: int) -> None:
    case = limited_case(seed)
    answer = allocated(case)
    assert faults(case, answer) == []
    least = optimum(case)
    if answer.status == "feasible":
        assert least - 1e-6 <= answer.objective <= least * 1.15 + 1e-6
    else:
        assert not np.isfinite(least)


@FEW
@given(st.integers(0, 100_000))
def test_moving_alone_is_sound_without_the_program(seed: int) -> None:
    model = model_of(limited_case(seed))
    search = FastSearch(model)
    found = search.fit(np.ones(len(model.items)))
    if found is None:
        return
    assert np.all(found.served >= 1.0 - 1e-8)
    assert np.all(found.solution.machines <= model.supply.available)
    again = FastSearch(model).fit(np.ones(len(model.items)))
    assert again is not None
    assert again.solution.items == found.solution.items
    assert again.cost == found.cost


def test_slices_share_a_machine_and_a_lone_one_does_not_rent_a_large_one() -> None:
    supply = supply_of([(0, "A", 8, False, 8.0, 9, False), (0, "A", 1, False, 1.2, 9, False)])

    def cost_of(services: int) -> float:
        templates = {BOTH: [({"A:1": 1}, 1.0)]}
        asked = tuple(asked_for(f"m{i}", supply, 1.0, templates) for i in range(services))
        return allocated(Case(asked, supply)).objective

    assert cost_of(1) == pytest.approx(1.2)
    assert cost_of(8) == pytest.approx(8.0)
    assert cost_of(9) == pytest.approx(9.2)


def test_the_last_machine_is_the_one_that_covers_the_rest_for_least() -> None:
    supply = supply_of([(0, "A", 1, False, 10.0, 9, True), (0, "B", 1, False, 4.0, 9, True)])
    templates = {BOTH: [({"A:1": 1}, 10.0), ({"B:1": 1}, 3.0)]}
    answer = allocated(Case((asked_for("m", supply, 12.5, templates),), supply))
    assert answer.objective == pytest.approx(14.0)


def test_under_shortage_all_get_the_same_share() -> None:
    supply = supply_of([(0, "A", 1, False, 1.0, 4, True)])
    templates = {BOTH: [({"A:1": 1}, 1.0)]}
    case = Case(tuple(asked_for(f"m{i}", supply, 4.0, templates) for i in range(2)), supply)
    answer = allocated(case)
    assert answer.status == "partial"
    assert answer.served.tolist() == pytest.approx([0.5, 0.5])
    first = replace(case.services[0], weight=3.0)
    by_weight = allocated(replace(case, services=(first, case.services[1])), on_shortage="priority")
    assert by_weight.served.tolist() == pytest.approx([1.0, 0.0])


def test_where_not_everybody_can_stand_some_do() -> None:
    supply = supply_of([(0, "A", 1, False, 1.0, 1, True)])
    templates = {BOTH: [({"A:1": 1}, 1.0)]}
    case = Case(tuple(asked_for(f"m{i}", supply, 1.0, templates) for i in range(2)), supply)
    answer = allocated(case)
    assert answer.status == "partial"
    assert sorted(answer.served.tolist()) == pytest.approx([0.0, 1.0])
    assert faults(case, answer) == []


def test_nothing_on_offer_is_infeasible_and_says_so() -> None:
    supply = supply_of([(0, "A", 1, False, 1.0, 0, True)])
    case = Case((asked_for("m", supply, 1.0, {BOTH: [({"A:1": 1}, 1.0)]}),), supply)
    answer = allocated(case)
    assert answer.status == "infeasible"
    assert answer.binding == ("nothing on offer can serve m",)


def test_a_budget_that_is_too_small_leaves_a_part_unserved() -> None:
    supply = supply_of([(0, "A", 1, False, 1.0, 9, True)])
    asked = asked_for("m", supply, 4.0, {BOTH: [({"A:1": 1}, 1.0)]})
    case = Case((asked,), supply, limits=AllocationLimits(budget=2.5))
    answer = allocated(case)
    assert answer.status == "partial"
    assert answer.usd_per_hour == 2.0
    assert answer.served[0] == pytest.approx(0.5)


# Whole plans, through the independent validator (`solve` checks every plan).


def fleet(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    offers = []
    for region in (EAST, WEST):
        for kind, usd in (("L4:1", 0.8), ("L40S:1", 1.9), ("L40S:4", 7.4)):
            price = usd * float(rng.uniform(0.9, 1.2))
            offers.append(offer(region, kind, price, available=int(rng.integers(0, 9))))
            if rng.random() < 0.4:
                number = int(rng.integers(1, 5))
                offers.append(offer(region, kind, price * 0.4, market="spot", available=number))
    services = tuple(
        service(
            f"s{m}",
            rate_per_s=float(rng.uniform(0.5, 12.0)),
            phases=str(rng.choice(["auto", "apart", "together"])),
        )
        for m in range(int(rng.integers(1, 4)))
    )
    limits = Limits(
        spot_share=float(rng.choice([0.2, 0.5])) if rng.random() < 0.4 else None,
        max_nodes=int(rng.integers(3, 20)) if rng.random() < 0.3 else None,
        budget_usd_per_hour=float(rng.uniform(3.0, 30.0)) if rng.random() < 0.3 else None,
        spread=2 if rng.random() < 0.2 else 1,
    )
    return problem(
        offers=tuple(offers), services=services, limits=limits,
        settings=Settings(max_nodes_per_instance=2, init_penalty=float(rng.choice([0.0, 0.3]))),
    )  # fmt: skip


def planned(own: Problem, solver: str = "fast", **options: object) -> Plan:
    return solve(own, PlanRequest(solver=solver, catalog=catalog(), **options))  # type: ignore[arg-type]


@FEW
@given(st.integers(0, 10_000))
def test_plans_are_valid_and_never_dearer_than_equal_nodes(seed: int) -> None:
    own = fleet(seed)
    plan = planned(own)
    assert plan.solver == "fast"
    assert plan.bound is None
    if plan.status != "feasible":
        return
    for name in ("homogeneous", "homogeneous-node"):
        try:
            other = planned(own, name)
        except AtollError:
            continue  # baselines know no limits
        if other.status == "feasible":
            assert plan.usd_per_hour <= other.usd_per_hour * (1.0 + 1e-9)


def test_a_plan_that_runs_is_kept() -> None:
    own = fleet(3)
    plan = planned(own)
    again = planned(own.replace(running=plan.instances))
    # What runs is one more place to search from: a cheaper plan may be found there, and never a dearer one.
    while again.usd_per_hour < plan.usd_per_hour - 1e-9:
        plan, again = again, planned(own.replace(running=again.instances))
    assert all(instance.kept for instance in again.instances)
    assert again.init_usd == 0.0
    assert again.usd_per_hour == pytest.approx(plan.usd_per_hour)


def test_derated_templates_carry_less() -> None:
    own = fleet(3)
    priors = {(str(role), nodes): 0.5 for role in own.roles for nodes in (1, 2)}
    half = planned(own, effort=Effort(derating=Derating(priors=priors, default=0.5)))
    whole = planned(own)
    assert half.served_fraction.keys() == whole.served_fraction.keys()
    assert half.usd_per_hour > whole.usd_per_hour or half.status == "partial"


def test_kinds_that_are_too_many_to_combine_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kind that is worth most there is one node, which does not carry half of the demand."""
    monkeypatch.setattr(fast_templates, "_MIN_KINDS", 1)
    monkeypatch.setattr(fast_templates, "_MAX_SETS", 1)
    offers = (offer(EAST, "L4:1", 0.01, available=1), offer(EAST, "L40S:1", 1.9, available=9))
    own = problem(
        services=(service(rate_per_s=12.0, phases="together"),),
        offers=offers,
        settings=Settings(max_nodes_per_instance=2),
    )
    plan = planned(own, effort=Effort(cached=False))
    assert plan.status == "feasible"
    kinds = [{node.node_type for node in one.nodes} for one in plan.instances]
    assert {"L40S:1"} in kinds
    assert {"L4:1", "L40S:1"} not in kinds


def test_equal_problems_get_equal_plans() -> None:
    assert planned(fleet(5)) == planned(fleet(5))


def test_it_is_a_solver_by_name_and_no_baseline() -> None:
    assert solvers(fleet(0))[:2] == ("optimal", "fast")
