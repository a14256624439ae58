"""What must hold for every allocation problem, whatever the numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.solve.rent.allocation import allocate
from atoll.solve.rent.types import AllocatedInstances, Allocation, AllocationLimits, RunningColumn
from tests.solve.rent.cases import Case, faults, random_case

SEEDS = st.integers(0, 10_000)
FEW = settings(max_examples=10)


def solve(case: Case, gap: float = 1e-9) -> Allocation:
    answer = allocate(
        case.roles, case.supply, case.limits, init_penalty=case.init_penalty, running=case.running,
        gap=gap, deadline_s=20.0,
    )  # fmt: skip
    assert faults(case, answer) == []
    return answer


def cost(case: Case) -> float:
    """The least cost of meeting all demand, inf where it cannot be met."""
    answer = solve(case)
    return answer.objective if answer.status == "optimal" else np.inf


def medium(seed: int) -> Case:
    return random_case(seed, roles=3, templates=8, types=4, most=4)


@FEW
@given(SEEDS, st.integers(0, 7), st.integers(1, 3))
def test_more_nodes_never_cost_more(seed: int, offer: int, more: int) -> None:
    case = medium(seed)
    available = case.supply.available.copy()
    available[offer] += more
    richer = replace(case, supply=replace(case.supply, available=available))
    assert cost(richer) <= cost(case) + 1e-7


@FEW
@given(SEEDS, st.floats(1.0, 2.0))
def test_faster_templates_never_cost_more(seed: int, factor: float) -> None:
    case = medium(seed)
    faster = tuple(replace(r, throughput=r.throughput * factor) for r in case.roles)
    assert cost(replace(case, roles=faster)) <= cost(case) + 1e-7


@FEW
@given(SEEDS, st.integers(0, 2), st.floats(1.0, 2.0))
def test_more_demand_never_costs_less(seed: int, which: int, factor: float) -> None:
    case = medium(seed)
    roles = list(case.roles)
    roles[which] = replace(roles[which], demand=roles[which].demand * factor)
    assert cost(replace(case, roles=tuple(roles))) >= cost(case) - 1e-7


@FEW
@given(SEEDS, st.floats(0.5, 1.2), st.floats(0.0, 0.5))
def test_looser_limits_never_serve_less(seed: int, tight: float, more: float) -> None:
    case = medium(seed)
    plain = solve(case)
    budget = plain.usd_per_hour * tight
    small = solve(replace(case, limits=AllocationLimits(budget=budget)))
    large = solve(replace(case, limits=AllocationLimits(budget=budget * (1.0 + more))))
    # Fractions are exact to 1e-4; where the common fraction is nil others are served instead.
    if small.served.min() > 0.0:
        assert large.served.min() >= small.served.min() - 2e-4
    if small.status == "optimal":
        assert large.objective <= small.objective + 1e-7


@FEW
@given(SEEDS)
def test_order_does_not_matter(seed: int) -> None:
    case = medium(seed)
    rng = np.random.default_rng(seed)
    offers = rng.permutation(len(case.supply.usd))
    regions, types = rng.permutation(2), rng.permutation(4)
    supply = case.supply
    shuffled = replace(
        supply,
        regions=tuple(supply.regions[g] for g in regions),
        node_types=tuple(supply.node_types[c] for c in types),
        gpus=supply.gpus[types],
        region=np.argsort(regions)[supply.region][offers],
        type=np.argsort(types)[supply.type][offers],
        market=tuple(supply.market[k] for k in offers),
        usd=supply.usd[offers],
        available=supply.available[offers],
    )
    roles = []
    for r in rng.permutation(len(case.roles)):
        asked = case.roles[r]
        order = rng.permutation(len(asked.throughput))
        roles.append(
            replace(
                asked,
                counts=np.ascontiguousarray(asked.counts[order][:, types]),
                throughput=asked.throughput[order],
            )
        )
    first, second = solve(case), solve(replace(case, roles=tuple(roles), supply=shuffled))
    assert (first.status == "optimal") == (second.status == "optimal")
    if first.status == "optimal":
        assert second.objective == pytest.approx(first.objective, abs=1e-7)


@FEW
@given(SEEDS)
def test_the_bound_is_below_the_optimum_at_every_gap(seed: int) -> None:
    case = medium(seed)
    exact = solve(case)
    if exact.status == "optimal":
        for gap in (0.5, 0.1, 1e-2):
            rough = solve(case, gap)
            assert rough.bound <= exact.objective + 1e-7
            assert exact.objective <= rough.objective + 1e-7


@FEW
@given(SEEDS)
def test_what_was_planned_is_kept_when_it_runs(seed: int) -> None:
    case = medium(seed)
    first = solve(case)
    if first.status != "optimal":
        return
    running = tuple(_running(c) for c in first.instances)
    again = solve(replace(case, running=running))
    assert again.objective == pytest.approx(first.objective, abs=1e-7)
    assert all(c.kept == c.number for c in again.instances)
    dear = solve(replace(case, running=running, init_penalty=0.5))
    assert dear.init_usd == 0.0


@FEW
@given(SEEDS)
def test_equal_inputs_give_equal_answers(seed: int) -> None:
    case = medium(seed)
    first, second = solve(case, 1e-3), solve(case, 1e-3)
    assert [_key(c) for c in first.instances] == [_key(c) for c in second.instances]
    assert first.offers_used.tolist() == second.offers_used.tolist()
    assert (first.objective, first.bound) == (second.objective, second.bound)


def _running(chosen: AllocatedInstances) -> RunningColumn:
    return RunningColumn(chosen.role, chosen.region, chosen.counts, chosen.number)


def _key(chosen: AllocatedInstances) -> tuple[int, int, int | None, int]:
    return chosen.role, chosen.region, chosen.template, chosen.number
