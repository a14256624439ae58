"""The integer programs against trying everything, and case by case."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from atoll.core.errors import UsageError
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.flow_instance import FlowInstance, Placement
from atoll.solve.place.milp.milp import solve_milp
from atoll.solve.place.milp.model import PlacementModel, equal_model, paper_model, prune_links
from tests.reference.flow_engines import ENGINES, whole_numbers
from tests.seeds import seeds
from tests.solve.place.exact_cases import Shape, best_flow, cluster, flow_of, random_cluster

NEEDS = {"scipy": "scipy", "cpsat": "ortools", "gurobi": "gurobipy"}


def case(seed: int) -> FlowInstance:
    """Return one of a row of small clusters, with and without partial inference and slow links."""
    shape = Shape(
        nodes=3 + seed % 2,
        layers=3 + seed % 3,
        tables=1 + seed % 3,
        links="random" if seed // 2 % 2 else "loose",
        partial=seed // 4 % 2 == 1,
    )
    return random_cluster(seed, shape)


def check(
    instance: FlowInstance,
    engine: str,
    *,
    heuristics: bool = False,
    aggregate: bool | None = None,
) -> None:
    best = best_flow(instance)
    found = solve_milp(
        instance, seconds=60.0, engine=ENGINES[engine], heuristics=heuristics, aggregate=aggregate
    )
    assert found.value == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert flow_of(instance, found.placement) == pytest.approx(best)
    assert best * (1 - 1e-9) <= found.bound <= best * (1 + 1e-5) + 1e-9


@pytest.mark.parametrize("seed", seeds(60))
def test_programs_equal_brute_force(seed: int) -> None:
    check(case(seed), "highs")


@pytest.mark.parametrize("half", seeds(30))
def test_the_papers_program_equals_brute_force(half: int) -> None:
    check(case(2 * half), "highs", aggregate=False)


@pytest.mark.parametrize("seed", [1, 3, 7])
@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_every_engine_equals_brute_force(engine: str, seed: int) -> None:
    if engine in NEEDS:
        pytest.importorskip(NEEDS[engine])
    check(case(seed), engine, heuristics=seed > 4)


@pytest.mark.parametrize("partial", [False, True])
def test_links_that_bind_refuse_counting_nodes_together(partial: bool) -> None:
    instance = cluster(3, [[20.0, 10.0]] * 3, link=4.0, partial=partial)
    with pytest.raises(UsageError, match="can bind"):
        solve_milp(instance, seconds=5.0, aggregate=True, heuristics=False)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("model", [paper_model, equal_model])
def test_a_hint_is_a_solution_of_the_program(
    model: Callable[[FlowInstance, float], PlacementModel], partial: bool
) -> None:
    instance = cluster(4, [[30.0, 20.0], [30.0, 20.0], [12.0, 9.0], [8.0]], partial=partial)
    placement = Placement(np.array([0, 2, 0, 0]), np.array([2, 4, 2, 0]))
    flows = max_flow(instance, placement)
    built = model(instance, 40.0)
    program = built.program
    values = built.hint(placement, flows)
    product = np.zeros(program.rows)
    np.add.at(product, program.row, np.array(program.value) * values[program.column])
    assert flows.value == 20.0
    assert (product >= np.array(program.row_low) - 1e-9).all()
    assert (product <= np.array(program.row_high) + 1e-9).all()
    assert values[program.goal].sum() * program.unit == pytest.approx(20.0)
    assert flow_of(instance, built.placement(values)) == 20.0


def test_a_start_at_the_bound_needs_no_engine() -> None:
    instance = cluster(4, [[30.0, 20.0], [30.0, 20.0]])
    placement = Placement(np.array([0, 2]), np.array([2, 4]))
    told: list[tuple[float, float, float]] = []
    found = solve_milp(
        instance, seconds=5.0, start=[placement], log=lambda *seen: told.append(seen)
    )
    assert found.value == 20.0
    assert found.bound == pytest.approx(20.0, rel=1e-8)
    assert found.evaluations == 0
    assert len(told) == 1


def test_a_cluster_without_room_has_flow_and_bound_zero() -> None:
    found = solve_milp(cluster(9, [[5.0, 4.0]] * 2), seconds=5.0)
    assert (found.value, found.bound) == (0.0, 0.0)
    assert not found.placement.end.any()


def test_pruning_keeps_the_fastest_links_of_either_end() -> None:
    instance = cluster(3, [[9.0]] * 4)
    instance.link[:] = [[0, 9, 5, 1], [9, 0, 4, 1], [5, 4, 0, 1], [1, 1, 1, 0]]
    small = prune_links(instance, 1)
    assert small.link.tolist() == [[0, 9, 5, 1], [9, 0, 0, 0], [5, 0, 0, 0], [1, 0, 0, 0]]
    assert (small.enter == instance.enter).all()
    ends = prune_links(instance, 2, ends=True)
    assert [int((side > 0).sum()) for side in (ends.enter, ends.leave)] == [2, 2]


def test_pruned_links_do_not_lower_the_bound() -> None:
    instance = random_cluster(6, Shape(nodes=4, layers=3, tables=2, links="random"))
    whole = solve_milp(instance, seconds=30.0, heuristics=False)
    small = solve_milp(instance, seconds=30.0, heuristics=False, degree=1)
    assert small.value <= whole.value <= small.bound * (1 + 1e-9)


def test_whole_numbers_loosen_what_limits_flows() -> None:
    instance = cluster(3, [[7.0, 10 / 3], [20 / 7, 1.0]], link=9.9)
    program = paper_model(instance, 7.0).program
    request = whole_numbers(program, None)
    for number, (index, value, low, high) in enumerate(request["rows"]):
        own = np.flatnonzero(np.array(program.row) == number)
        flows = any(not program.whole[column] for column in index)
        scale = 1e6 if flows else 1.0
        for entry, place in zip(value, own, strict=True):
            if program.whole[program.column[place]]:
                exact = program.value[place] * scale
                assert entry <= exact + 1e-6
                assert exact - entry < 1.0 + 1e-6
        assert low is None or low <= program.row_low[number] * scale + 1e-6
        assert high is None or high >= program.row_high[number] * scale - 1e-6
