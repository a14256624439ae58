"""The compiled search for capacities: bit for bit what NumPy finds, entry by entry."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.perf.capacity import CapacityModel
from atoll.perf.operators import Array
from atoll.perf.step import Position
from tests.perf.test_capacity_properties import Case, cases

SOME = settings(max_examples=40, deadline=None, derandomize=True)
ENDS = (Position.FIRST, Position.MIDDLE, Position.LAST)


def by_arrays(own: CapacityModel, stages: list[int], budgets: list[float]) -> Array:
    """Tokens/s at all ends from `_best`, which searches all batches of all entries in arrays."""
    depth, budgets_s = np.array(stages, dtype=np.float64), np.array(budgets)
    best = own._best(depth, budgets_s, ENDS)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(best.feasible, best.batch / best.step_s * best.occupancy, 0.0)
        rate = np.minimum(rate, own._clumped(depth, ENDS))
        rate = rate * own._load(rate, best, depth, budgets_s)
    rate[:, :, 0] = 0.0
    rate[:, :, 1:] = np.minimum.accumulate(rate[:, :, 1:], axis=2)
    wire = np.where(depth > 1.0, own._wire_tokens_per_s, np.inf)
    return np.asarray(np.minimum(rate * own._tokens_per_request, wire[:, None]) * own._replicas)


@SOME
@given(cases(), st.booleans(), st.sampled_from([0.4, 0.5, 0.9]))
def test_compiled_rates_are_those_of_arrays(case: Case, waits: bool, share: float) -> None:
    role = replace(case.role, waits=waits, share=share)
    own = CapacityModel(role, case.model, link=case.link)
    stages = [1, 2, 3, 7]
    budgets = [case.budget_s / count for count in stages]
    found = own.throughputs(stages, budgets, ENDS)
    assert np.array_equal(found, by_arrays(own, stages, budgets))


@SOME
@given(cases())
def test_a_model_with_another_link_is_as_one_made_with_it(case: Case) -> None:
    made = CapacityModel(case.role, case.model, link=case.link)
    linked = CapacityModel(case.role, case.model).linked(case.link)
    asked = ([1, 4], [case.budget_s, case.budget_s / 4], ENDS)
    assert np.array_equal(made.throughputs(*asked), linked.throughputs(*asked))
