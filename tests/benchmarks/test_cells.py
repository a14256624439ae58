"""The benchmark of any-to-any plans asks what it says it asks, and reads its answers right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.catalog import Catalog
from atoll.solve.graph.graph_types import ClassDemand, ExecutorType, GraphProgram, Machines
from benchmarks.any_to_any import cells, cells_paper


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.default()


def program(*executors: ExecutorType, gpus: int = 4) -> GraphProgram:
    """One request/s that needs parts a and b, on one box."""
    box = Machines(("lab", f"P:{gpus}", "owned"), "P", gpus, 1, float(gpus), (1, 2, 4))
    return GraphProgram((box,), executors, (ClassDemand("s", "x", 1.0, (("a", "b"),)),))


def executor(parts: str, gpus: int, **seconds: float) -> ExecutorType:
    """An executor that takes so long for each part, and twice as long alone."""
    known = {("s", "x", part): value for part, value in seconds.items()}
    alone = {key: 2.0 * value for key, value in known.items()}
    kinds = ((f"P:{gpus}", 1),)
    return ExecutorType("s", tuple(parts.split("+")), kinds, known, alone, label=parts)


def test_the_scarcest_executor_bounds_a_deployment() -> None:
    asked = program(executor("a", 1, a=0.5), executor("b", 1, b=0.25), executor("a+b", 2, a=0.2))
    assert cells_paper.deployed(asked, {("a", 1): 1, ("b", 1): 3}) == pytest.approx(2.0)
    assert cells_paper.deployed(asked, {("a", 1): 3, ("b", 1): 1}) == pytest.approx(4.0)
    assert cells_paper.deployed(asked, {("a", 1): 1, ("b", 4): 1}) == 0.0
    # It runs both parts, and there is no telling how long b takes it.
    assert cells_paper.deployed(asked, {("a+b", 2): 1}) == 0.0


def test_the_max_is_found_and_bounded() -> None:
    both = executor("a+b", 1, a=0.5, b=0.5)
    asked = program(executor("a", 1, a=0.5), executor("b", 1, b=0.25), both)
    apart = cells_paper.carry_most(asked, lambda e: len(e.parts) == 1)
    assert apart is not None
    # Two of a carry 4, one of b carries 4; a fourth GPU has nothing to add.
    assert apart.per_s == pytest.approx(4.0)
    most = cells_paper.carry_most(asked)
    assert most is not None
    assert most.per_s > 4.0
    assert most.bound_per_s >= most.per_s * (1.0 - 1e-9)
    assert sum(gpus * count for (_, gpus), count in most.executors.items()) <= 4
    assert cells_paper.carry_most(asked, lambda e: e.parts == ("a",)) is None
    smaller = cells_paper.carry_most(cells_paper.cut_down(asked, 1))
    assert smaller is not None
    assert smaller.per_s == pytest.approx(1.0)


def test_one_request_at_a_time_takes_as_long_as_alone() -> None:
    asked = program(executor("a+b", 1, a=0.5, b=0.5), gpus=1)
    slowed = cells_paper.one_at_a_time(asked, asked, ("b",))
    (only,) = slowed.executors
    assert only.seconds == {("s", "x", "a"): 0.5, ("s", "x", "b"): 1.0}
    most = cells_paper.carry_most(slowed)
    assert most is not None
    assert most.per_s == pytest.approx(1.0 / 1.5)
    whole = replace(
        asked.executors[0], parts=("a,b@a+b",), seconds={("s", "x", "a,b@a+b"): 1.0}, latency_s={}
    )
    joined = cells_paper.one_at_a_time(replace(asked, executors=(whole,)), asked, ("a", "b"))
    assert joined.executors[0].seconds == {("s", "x", "a,b@a+b"): 2.0}


@pytest.mark.slow
def test_no_fixed_deployment_beats_the_exact_plan(catalog: Catalog) -> None:
    workload = cells_paper.FIGURE2[2]
    problem = cells_paper.equal_gpus(cells_paper.INTERNVL, workload.classes(), 1)
    built = cells_paper.build(problem, catalog).program
    mix = cells_paper.carry_most(built, cells.papers_executors)
    free = cells_paper.carry_most(built)
    assert mix is not None
    assert free is not None
    rates = cells_paper.figure2_rates(workload, catalog)
    assert min(rates.values()) > 0.0
    assert max(rates.values()) <= mix.per_s * 1.001
    assert mix.per_s <= free.per_s * 1.001
    # 38 billion parameters do not fit one GPU with room for anything else.
    assert cells_paper.carry_most(cells_paper.cut_down(built, 1)) is None


@pytest.mark.slow
def test_monoliths_that_batch_less_carry_less(catalog: Catalog) -> None:
    found = cells.monoliths_of(1, catalog)
    rates = [most.per_s for most in found.values()]
    assert list(found) == ["ideal", "speech one at a time", "all one at a time"]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 3
