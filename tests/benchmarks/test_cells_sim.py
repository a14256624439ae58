"""The deployments that `benchmarks.cells_sim` simulates are what they are said to be, and it runs."""

from __future__ import annotations

import pytest

from atoll.catalog import Catalog
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.sim.tasks.simulate_tasks import simulate_tasks
from atoll.sim.tasks.task_fleet import BatchPart, TokenPart
from benchmarks.any_to_any.cells_sim import TABLE2
from benchmarks.any_to_any.cells_sim_fleets import (
    fleet_at,
    images_problem,
    internvl_routed,
    omni_monoliths,
    omni_problem,
    omni_published,
    run_to_the_end,
    talker_alone_s,
)

CATALOG = Catalog.default()


@pytest.fixture(scope="module")
def omni() -> Problem:
    return omni_problem()


def _gpus(plan: Plan) -> int:
    return sum(node.gpus for instance in plan.instances for node in instance.nodes)


@pytest.mark.slow
def test_deployments_fill_sixteen_gpus_and_serve_every_class(omni: Problem) -> None:
    images = images_problem()
    for problem, plan in (
        (omni, omni_monoliths(omni, CATALOG)),
        (omni, omni_published(omni, CATALOG)),
        (images, internvl_routed(images, CATALOG, 0.675)),
    ):
        assert _gpus(plan) == 16
        result = simulate_tasks(fleet_at(plan, problem, CATALOG, 0.5), requests=200, seed=1)
        assert result.finished == 200
        assert result.cut == 0


def test_encoders_get_the_share_that_is_planned() -> None:
    problem = images_problem()
    plan = internvl_routed(problem, CATALOG, 0.675)
    fleet = fleet_at(plan, problem, CATALOG, 0.5)
    result = simulate_tasks(fleet, requests=400, seed=1, routing="dealt")
    items = {
        group: sum(
            part.steps * part.batch_mean
            for executor in result.executors
            if executor.name.startswith(group)
            for part in executor.parts
            if part.part == "vision"
        )
        for group in ("encoder", "whole")
    }
    assert sum(items.values()) == pytest.approx(400)
    assert items["encoder"] == pytest.approx(270, abs=2)


@pytest.mark.slow
def test_a_blocking_talker_takes_as_long_and_holds_everybody_up(omni: Problem) -> None:
    plan = omni_monoliths(omni, CATALOG)
    alone_s = talker_alone_s(omni, CATALOG)
    assert set(alone_s) == {name for name in TABLE2 if name.endswith("-> audio")}
    batching = fleet_at(plan, omni, CATALOG, 6.0)
    blocking = run_to_the_end(batching, alone_s)
    assert isinstance(batching.executors[0].parts["talker"], TokenPart)
    assert isinstance(blocking.executors[0].parts["talker"], BatchPart)
    runs = [simulate_tasks(fleet, requests=1000, seed=1) for fleet in (batching, blocking)]
    assert all(run.finished == 1000 for run in runs)
    # Whoever only wants text waits for speech.
    quick, slow = (run.klass("image -> text").e2e_s.p50 or 0.0 for run in runs)
    assert slow > 1.5 * quick
