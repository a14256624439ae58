"""The compiled search for capacities: bit for bit what NumPy finds, entry by entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.ids import Phase
from atoll.perf.capacity import CapacityModel, _Best
from atoll.perf.operators import Array
from atoll.perf.queueing import load_within
from atoll.perf.step import Position
from tests.perf.test_capacity_properties import Case, cases
from tests.seeds import examples

SOME = examples(40)
ENDS = (Position.FIRST, Position.MIDDLE, Position.LAST)


def clumped(own: CapacityModel, stages: Array, positions: Sequence[Position]) -> Array:
    """Requests/s of a pipeline whose prompts are all in one step where there is KV cache for no more."""
    if not own._role.waits or own._role.phase is not Phase.PREFILL:
        return np.full(1, np.inf)
    size = len(own._grid)
    room = np.stack([own._room[position] for position in positions])
    # Times are known on the grid only.
    batch = np.clip(room, own._grid[0], own._grid[-1])
    index = np.clip(np.searchsorted(own._grid, batch, side="right") - 1, 0, max(0, size - 2))
    after = np.minimum(index + 1, size - 1)
    gap = own._grid[after] - own._grid[index]
    share = np.where(gap > 0.0, (batch - own._grid[index]) / np.where(gap > 0.0, gap, 1.0), 0.0)
    steps = np.stack([own._stack_s + own._fixed[position] for position in positions])
    low, high = (
        np.take_along_axis(steps, at[..., None], axis=2)[..., 0] + own._transfer_s[at]
        for at in (index, after)
    )
    took = low * (1.0 - share) + high * share
    with np.errstate(divide="ignore", invalid="ignore"):
        spell = took[:, None, :] * (stages * own._own_steps(stages))[None, :, None]
        limit = room[:, None, :] / spell
    return np.where(stages[None, :, None] > 1.0, limit, np.inf)


def load(own: CapacityModel, rate: Array, best: _Best, stages: Array, budgets_s: Array) -> Array:
    """The share of `rate`, requests/s, at which half of all prompts wait no longer than they may."""
    if not own._role.waits or own._role.phase is not Phase.PREFILL:
        return np.ones(1)
    lengths = own._role.lengths
    once = 0.5 * lengths.input_mean_square / lengths.input_mean**2
    at_most = (budgets_s / (1.0 + 0.5 / stages))[:, None]
    alone = best.first_s / (1.0 + 0.5 / stages)[:, None]
    return load_within((at_most - alone) * rate / once, stages[:, None], own._role.share)


def by_arrays(own: CapacityModel, stages: list[int], budgets: list[float]) -> Array:
    """Tokens/s at all ends from `_best`, which searches all batches of all entries in arrays."""
    depth, budgets_s = np.array(stages, dtype=np.float64), np.array(budgets)
    best = own._best(depth, budgets_s, ENDS)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(best.feasible, best.batch / best.step_s * best.occupancy, 0.0)
        rate = np.minimum(rate, clumped(own, depth, ENDS))
        rate = rate * load(own, rate, best, depth, budgets_s)
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
