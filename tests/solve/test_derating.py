"""Shares of analytic throughput: who gets which, and what a plan makes of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.problem import Settings
from atoll.solve.derating import Derating, node_set
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.resizing import lower_priors, sized_like
from atoll.solve.templates.library import template_libraries
from tests.plan.builders import EAST, catalog, offer, problem, service

CHAT = service("chat", rate_per_s=20.0)
PROBLEM = problem(
    services=(CHAT,),
    offers=(
        offer(EAST, "L40S:1", 1.86, available=40),
        offer(EAST, "L4:1", 0.8, available=40),
    ),
    settings=Settings(max_nodes_per_instance=2),
)
FRESH = Effort(cached=False)


def derated(share: float) -> Derating:
    """Return shares of every template that a plan of the problem uses."""
    plan = solve(PROBLEM, PlanRequest(effort=FRESH))
    return Derating({(i.role, node_set(i)): share for i in plan.instances})


def test_templates_carry_their_share_and_others_all() -> None:
    libraries = template_libraries(PROBLEM, catalog(), cached=False)
    role, library = next(iter(libraries.roles.items()))
    kinds = library.tables.node_types
    index = int(np.argmax(library.counts.sum(axis=1)))
    nodes = tuple(sorted((kinds[c], int(n)) for c, n in enumerate(library.counts[index]) if n > 0))

    rates = Derating({(role, nodes): 0.25}).throughput(role, library)

    assert rates[index] == pytest.approx(0.25 * library.throughput[index])
    others = np.arange(len(rates)) != index
    assert np.array_equal(rates[others], library.throughput[others])
    assert np.array_equal(
        Derating({(role, nodes): 0.25}).throughput("another/llm/both", library),
        library.throughput,
    )


def test_what_nobody_knows_counts_by_its_number_of_nodes_or_as_asked() -> None:
    libraries = template_libraries(PROBLEM, catalog(), cached=False)
    role, library = next(iter(libraries.roles.items()))
    sizes = library.counts.sum(axis=1)

    rates = Derating(priors={(role, 1): 0.5}, default=0.0).throughput(role, library)

    assert np.allclose(rates[sizes == 1], 0.5 * library.throughput[sizes == 1])
    assert not rates[sizes > 1].any()


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_instances_of_a_plan_have_their_share(share: float) -> None:
    plan = solve(PROBLEM, PlanRequest(effort=FRESH))
    shares = derated(share)
    for instance in plan.instances:
        less = shares.apply(instance)
        assert less.throughput_per_s == pytest.approx(share * instance.throughput_per_s)
        assert sum(f.per_s for f in less.flows if f.src == "source") == pytest.approx(
            less.throughput_per_s
        )


def test_a_plan_with_less_capacity_costs_more_and_is_valid() -> None:
    whole = solve(PROBLEM, PlanRequest(effort=FRESH))
    less = solve(PROBLEM, PlanRequest(effort=Effort(cached=False, derating=derated(0.5))))
    # `solve` has checked both.
    assert less.usd_per_hour >= whole.usd_per_hour
    assert min(less.served_fraction.values()) == 1.0


def test_a_plan_for_capacity_alone_is_sized_as_it_is() -> None:
    plan = solve(PROBLEM, PlanRequest(effort=FRESH))
    assert sized_like(plan, PROBLEM, catalog()) == (PROBLEM, None)


@given(st.floats(0.0, 1.2), st.floats(0.1, 1.0))
def test_others_carry_as_much_as_leaves_the_plan_the_best(
    beaten_above: float, prior: float
) -> None:
    known = Derating({("r", (("L4:1", 1),)): 0.7}, {("r", 1): prior})
    lowered = lower_priors(known, lambda shares: shares.default > beaten_above)

    assert lowered.shares == known.shares
    assert lowered.default <= beaten_above
    assert lowered.default >= min(1.0, beaten_above) - 1.0 / 16.0
    assert lowered.priors["r", 1] == pytest.approx(prior * lowered.default)


def test_a_plan_that_is_beaten_by_its_own_templates_has_no_others_to_blame() -> None:
    lowered = lower_priors(Derating(priors={("r", 1): 0.5}), lambda _shares: True)
    assert lowered == Derating(priors={("r", 1): 0.0}, default=0.0)
