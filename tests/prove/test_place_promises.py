"""Placements on clusters are taken when the whole interval of what they keep is above the target."""

from __future__ import annotations

import pytest

from atoll.plan.plan import KeptPromise, Plan
from atoll.plan.problem import Problem
from atoll.plan.validate import check as checking
from atoll.prove import place_promises
from atoll.prove.kept import FRESH_SEED
from atoll.prove.place_promises import keep_on_cluster, use_deadline
from atoll.solve.effort import DEADLINE_S, MAX_WORK, Effort
from atoll.solve.plan_request import PlanRequest
from tests.sim.builders import cluster_plan, cluster_problem

PROBLEM = cluster_problem([1000.0])
PLAN = cluster_plan(PROBLEM, [(0, 80)], [("source", "n0", 1.0), ("n0", "sink", 1.0)])
SURE, UNSURE, SHORT = (0.97, 0.96), (0.96, 0.94), (0.9, 0.88)


def place(
    monkeypatch: pytest.MonkeyPatch, *found: tuple[float, float]
) -> tuple[Plan, list[float], list[int]]:
    """Return the plan that is taken where placements keep so much: mean, and the lower end of the interval.

    With it the times per token that were promised, and the seeds that each was judged with.
    """
    promised: list[float] = []
    seeds: list[int] = []

    def solve(asked: Problem, _request: PlanRequest) -> Plan:
        promised.append(asked.services[0].tpot_s)
        return PLAN.model_copy(update={"solver": str(len(promised))})

    def look_at(plan: Plan, *_: object, first_seed: int = FRESH_SEED) -> tuple[KeptPromise, ...]:
        kept, low = found[min(int(plan.solver), len(found)) - 1]
        seeds.append(first_seed)
        return (
            KeptPromise(
                service="m",
                target=0.95,
                kept=kept,
                low=low,
                high=2 * kept - low,
                kept_ttft=1.0,
                kept_tpot=kept,
            ),
        )

    monkeypatch.setattr(place_promises, "solve", solve)
    monkeypatch.setattr(place_promises, "look_at", look_at)
    monkeypatch.setattr(place_promises, "fit_steps", lambda plan, *_: plan)
    monkeypatch.setattr(place_promises, "_keep_simply", lambda *_: None)
    monkeypatch.setattr(place_promises, "_largest_share", lambda *_: 0.5)
    monkeypatch.setattr(checking, "check", lambda *_: None)
    plan = keep_on_cluster(PROBLEM, PlanRequest(deadline_s=600.0))
    return plan, promised, seeds


def test_a_placement_is_not_taken_while_its_interval_reaches_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, promised, seeds = place(monkeypatch, UNSURE, SURE)
    assert plan.solver == "2"
    assert plan.promises[0].is_surely_kept
    # What more requests miss is tightened, and each placement has arrivals of its own.
    assert promised[1] == pytest.approx(0.85 * promised[0])
    assert len(set(seeds)) == 2


def test_a_longer_deadline_is_more_work_for_best_effort() -> None:
    effort = Effort(promise=False, work=0.5)
    for deadline_s, work in (
        (60.0, 0.5),
        (DEADLINE_S, 0.5),
        (3 * DEADLINE_S, 1.5),
        (1e9, MAX_WORK),
    ):
        assert use_deadline(PlanRequest(effort=effort, deadline_s=deadline_s)).effort.work == work
    promised = PlanRequest(effort=Effort(work=0.5), deadline_s=3 * DEADLINE_S)
    assert use_deadline(promised) is promised


def test_one_that_is_sure_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, promised, _ = place(monkeypatch, SURE, SURE)
    assert (plan.solver, len(promised)) == ("1", 1)


def test_where_none_is_sure_the_closest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, promised, _ = place(monkeypatch, SHORT, UNSURE, SHORT, SHORT)
    assert (plan.solver, len(promised)) == ("2", 4)
    assert plan.promises[0].cause is None
