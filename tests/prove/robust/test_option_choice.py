"""Which options are taken: against all combinations, looked at in another way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.prove.robust import option_choice as choice
from atoll.prove.robust.option_choice import OptionTable, RentableMachines, choose_options

Drawn = tuple[list[list[tuple[list[int], list[int], list[bool]]]], list[float], list[int], float]
GPUS = (1, 4)


@st.composite
def cases(draw: st.DrawFn) -> Drawn:
    """Services with options: whole machines, GPUs of cut machines, and scenarios in which they hold."""
    scenarios = draw(st.integers(2, 6))
    option = st.tuples(
        st.lists(st.integers(0, 2), min_size=2, max_size=2),
        st.tuples(st.just(0), st.integers(0, 3)).map(list),
        st.lists(st.booleans(), min_size=scenarios, max_size=scenarios),
    )
    services = draw(st.lists(st.lists(option, min_size=1, max_size=4), min_size=1, max_size=3))
    usd = draw(st.lists(st.sampled_from([1.0, 2.5, 4.0]), min_size=2, max_size=2))
    available = draw(st.lists(st.integers(3, 8), min_size=2, max_size=2))
    return services, usd, available, draw(st.sampled_from([0.3, 0.5, 0.8, 1.0]))


def tables_of(case: Drawn) -> tuple[list[OptionTable], RentableMachines]:
    services, usd, available, _ = case
    tables = [
        OptionTable(
            np.array([held for _, _, held in options]),
            np.array([whole for whole, _, _ in options], dtype=float),
            np.array([cut for _, cut, _ in options], dtype=float),
        )
        for options in services
    ]
    return tables, RentableMachines(
        np.array(usd), np.array(GPUS, float), np.array(available, float)
    )


def value(case: Drawn, taken: Sequence[int]) -> tuple[float, float]:
    """What is missing of the target, and dollars: counted machine by machine, in plain Python."""
    services, usd, available, target = case
    chosen = [options[at] for options, at in zip(services, taken, strict=True)]
    total = 0.0
    for offer in range(2):
        gpus = sum(cut[offer] for _, cut, _ in chosen)
        machines = sum(whole[offer] for whole, _, _ in chosen) + math.ceil(gpus / GPUS[offer])
        if machines > available[offer]:
            return (2.0, math.inf)
        total += machines * usd[offer]
    held = [all(one[2][at] for one in chosen) for at in range(len(chosen[0][2]))]
    return (max(0.0, target - sum(held) / len(held)), total)


def best_of(case: Drawn) -> tuple[float, float]:
    return min(value(case, taken) for taken in itertools.product(*(range(len(s)) for s in case[0])))


@given(cases())
def test_the_cheapest_that_hold_together_are_taken(case: Drawn) -> None:
    tables, machines = tables_of(case)
    missing, usd = value(case, choose_options(tables, machines, case[3]))
    assert (missing, usd) == pytest.approx(best_of(case))


@given(cases())
def test_with_many_combinations_what_is_taken_cannot_be_changed_for_a_cheaper_one(
    case: Drawn,
) -> None:
    tables, machines = tables_of(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "_MAX_COMBINATIONS", 0)
        taken = choose_options(tables, machines, case[3])
    missing, usd = value(case, taken)
    assert (missing, usd) >= best_of(case) or best_of(case)[0] == pytest.approx(missing)
    if missing > 0.0 or usd == math.inf:
        return
    for service, options in enumerate(case[0]):
        for option in range(len(options)):
            other = (*taken[:service], option, *taken[service + 1 :])
            short, cost = value(case, other)
            assert short > 0.0 or cost >= usd - 1e-6


def test_many_services_reach_a_target_that_can_be_reached() -> None:
    rng = np.random.default_rng(3)
    tables = []
    for _ in range(9):
        loads = rng.lognormal(0.0, 0.3, 100)
        holds = np.array([loads < size for size in (1.0, 1.5, 2.0, 4.0)])
        tables.append(OptionTable(holds, np.array([[1.0], [2.0], [3.0], [6.0]]), np.zeros((4, 1))))
    machines = RentableMachines(np.ones(1), np.ones(1), np.array([100.0]))
    taken = choose_options(tables, machines, 0.9)
    usd = sum(float(t.whole[at, 0]) for t, at in zip(tables, taken, strict=True))
    assert choice.share_held(tables, taken) >= 0.9
    assert usd <= 9 * 3.0  # what the third of each would cost
