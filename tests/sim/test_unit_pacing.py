"""Pipelines at their capacity: what the analytic model promises is what paced batches show."""

from __future__ import annotations

import pytest

from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.sim.sim_build import build
from atoll.sim.sim_options import SimOptions
from tests.sim.builders import cluster_plan, cluster_problem
from tests.sim.pipelines import (
    ANSWER,
    PROMISE_S,
    Stages,
    best_tpot,
    build_plan,
    build_problem,
    capacities,
    draw,
    mean_tpot,
)

SECONDS = 500.0

# Cut so that all stages of a pipeline carry about the same.
LAYOUTS: dict[int, Stages] = {
    1: ((0, 64, ("A10G:4",)),),
    2: ((0, 40, ("A10G:4",)), (40, 64, ("L4:4",))),
    3: ((0, 22, ("L4:4",)), (22, 44, ("L4:4",)), (44, 64, ("L4:4",))),
    4: (
        (0, 17, ("A10G:4",)),
        (17, 34, ("A10G:4",)),
        (34, 51, ("A10G:4",)),
        (51, 64, ("A10G:4",)),
    ),
}


def layouts(fast: int) -> pytest.MarkDecorator:
    """All of them; those with more than so many stages in the full run alone."""
    return pytest.mark.parametrize(
        "stages",
        [
            pytest.param(
                stages, id=f"{number} stages", marks=[] if number <= fast else pytest.mark.slow
            )
            for number, stages in LAYOUTS.items()
        ],
    )


@layouts(fast=3)
def test_a_pipeline_at_its_capacity_shows_its_promise(stages: Stages) -> None:
    own = build_problem()
    work = draw(min(capacities(own, stages)) / ANSWER, SECONDS, None)
    tpot_s, _ = mean_tpot(own, build_plan(own, stages), work, SECONDS, "paced")
    assert tpot_s == pytest.approx(PROMISE_S, rel=0.02)


@pytest.mark.parametrize("number", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_random_arrivals_make_one_batch_too_many_where_nobody_counts_them(number: int) -> None:
    own, stages = build_problem(), LAYOUTS[number]
    plan = build_plan(own, stages)
    work = draw(0.9 * min(capacities(own, stages)) / ANSWER, SECONDS, 0)
    free_s, _ = mean_tpot(own, plan, work, SECONDS, "free")
    paced_s, _ = mean_tpot(own, plan, work, SECONDS, "paced")
    assert paced_s < 1.03 * PROMISE_S
    assert paced_s <= 0.85 * free_s


@layouts(fast=2)
def test_a_paced_pipeline_is_as_fast_as_processor_sharing(stages: Stages) -> None:
    own = build_problem()
    plan, seconds = build_plan(own, stages), 1800.0
    work = draw(0.9 * min(capacities(own, stages)) / ANSWER, seconds, 1)
    tpot_s, tokens_per_s = mean_tpot(own, plan, work, seconds, "paced")
    assert tpot_s == pytest.approx(best_tpot(own, plan, tokens_per_s), rel=0.04)


def paced_units(own: Problem, plan: Plan) -> int:
    work = draw(1.0, 10.0, 0)
    built = build(plan, own, own.catalog(), work, SimOptions())
    return int((built.sim.unit["paced"] > 0).sum())


def test_ways_of_different_lengths_are_not_paced() -> None:
    own = cluster_problem([1000.0, 1000.0, 1000.0, 1000.0])
    even = cluster_plan(
        own,
        [(0, 40), (0, 40), (40, 80), (40, 80)],
        [
            ("source", "n0", 1.0),
            ("source", "n1", 1.0),
            ("n0", "n2", 0.5),
            ("n0", "n3", 0.5),
            ("n1", "n2", 0.5),
            ("n1", "n3", 0.5),
            ("n2", "sink", 1.0),
            ("n3", "sink", 1.0),
        ],
    )
    assert paced_units(own, even) == 2
    uneven = cluster_plan(
        own,
        [(0, 40), (40, 80), (40, 60), (60, 80)],
        [
            ("source", "n0", 1.0),
            ("n0", "n1", 0.5),
            ("n0", "n2", 0.5),
            ("n1", "sink", 0.5),
            ("n2", "n3", 0.5),
            ("n3", "sink", 0.5),
        ],
    )
    assert paced_units(own, uneven) == 0
