"""Promises where several models may answer: levels at which cheap machines are equally busy."""

from __future__ import annotations

import time
from typing import Any

import pytest

import atoll.solve.deadline as deadline_module
from atoll.plan.files.fleet_file import build_problem
from atoll.plan.plan import KeptPromise, Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.prove import choice_promises
from atoll.prove.choice_promises import LevelEvener, even_levels, keep_chosen_promises
from atoll.prove.planning import plan as make_plan
from atoll.prove.rent_promises import keep_promises
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.rent.choosing.choose import ChosenLevels
from atoll.solve.rent.choosing.solver import choose_mixes


def fleet() -> Problem:
    """As seed 117 of promise_truth: where the larger model answers all that it can, it is too busy."""
    models = [("llama-3.1-8b", 0.03), ("llama-3.2-3b", 0.041)]
    machines = [("L40S:2", 4.18), ("L4:2", 2.008)]
    return build_problem(
        {
            "name": "even",
            "services": {
                "chat": {
                    "models": [{"model": name, "error": error} for name, error in models],
                    "max_error": 0.04,
                    "ttft": "585ms",
                    "tpot": "88.7ms",
                    "rate": "40/s",
                    "lengths": {"input": 67, "output": 195, "input_cv": 1.0, "output_cv": 1.0},
                    "phases": "together",
                }
            },
            "pool": {
                "offers": [
                    {"region": "r/a", "node_type": kind, "available": 7, "usd_per_hour": usd}
                    for kind, usd in machines
                ]
            },
            "settings": {"max_nodes_per_instance": 1, "init_penalty": 0, "engines": ["vllm"]},
        }
    )


def test_the_busiest_model_is_least_busy() -> None:
    problem = fleet()
    plan = solve(problem)
    levels = even_levels(problem, plan)
    assert levels is not None
    assert sum(levels.values()) == pytest.approx(1.0)
    busy = [
        40.0 * level / sum(i.throughput_per_s for i in plan.instances if i.service == name)
        for name, level in levels.items()
    ]
    assert busy == pytest.approx([busy[0], busy[0]], rel=1e-4)
    # The answers that err least leave nothing of the larger model.
    assert levels["chat.llama-3.1-8b"] < plan.mixes[0].shares["chat.llama-3.1-8b"] - 0.01
    assert even_levels(problem, plan.model_copy(update={"instances": ()})) is None


def test_levels_at_equal_loads_are_tried_until_somebody_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = fleet()
    capacity = solve(problem)
    dearer = capacity.model_copy(update={"objective": 2.0 * (capacity.objective or 0.0)})
    evener = LevelEvener(problem, PlanRequest(deadline_s=100.0), dearer)
    tried: list[dict[str, float]] = []

    def find_short(levels: dict[str, float]) -> set[str]:
        """The larger model is too busy on the first machines, and not on those with more room for it."""
        tried.append(levels)
        return {"chat.llama-3.1-8b"} if len(tried) == 1 else set()

    monkeypatch.setattr(evener, "_find_short", find_short)
    found = next(evener.find())
    assert tried[0] == pytest.approx(even_levels(problem, capacity))
    assert found == tried[1] != tried[0]
    # Nothing is tried that costs as much as the best plan.
    assert list(LevelEvener(problem, PlanRequest(), capacity).find()) == []


@pytest.mark.slow
def test_machines_for_capacity_keep_promises_at_equal_loads() -> None:
    problem = fleet()
    capacity = solve(problem)
    usd = capacity.objective or 0.0
    request = PlanRequest(deadline_s=100.0, error_bars=False)
    search = LevelEvener(problem, request, capacity.model_copy(update={"objective": 2.0 * usd}))
    # As the mix was chosen first, the larger model loses too many requests.
    assert search._find_short(dict(capacity.mixes[0].shares)) == {"chat.llama-3.1-8b"}
    levels = next(search.find())
    found = keep_promises(problem.settled(problem.mixes_at(levels)), request)
    assert found.objective == pytest.approx(usd)
    assert all(promise.is_surely_kept for promise in found.promises)
    # Nothing is tried that costs as much as the best plan.
    assert list(LevelEvener(problem, request, capacity).find()) == []


def test_every_sharer_of_an_instance_keeps_its_own_promise() -> None:
    def asked(rate: str, lengths: str) -> dict[str, str]:
        promise = {"ttft": "500ms", "tpot": "80ms", "phases": "together"}
        return {"model": "llama-3.1-8b", "rate": rate, "lengths": lengths, **promise}

    problem = build_problem(
        {
            "name": "share",
            "services": {"short": asked("10/s", "100x60"), "long": asked("0.4/s", "6000x60")},
            "pool": {
                "offers": [
                    {"region": "r/a", "node_type": kind, "available": 4, "usd_per_hour": usd}
                    for kind, usd in (("L40S:1", 1.86), ("H100:1", 6.9))
                ]
            },
            "settings": {"max_nodes_per_instance": 1, "engines": ["vllm"]},
            "share_instances": True,
        }
    )
    request = PlanRequest(deadline_s=100.0, error_bars=False)
    found = make_plan(problem, request)
    # Two L40S keep 97 % of all requests, and 40 % of the long ones.
    assert [instance.nodes[0].node_type for instance in found.instances] == ["H100:1"]
    (promise,) = found.promises
    assert [group.name for group in promise.groups] == ["text (long)", "text (short)"]
    assert all(group.is_kept for group in promise.groups)
    assert validate(found, problem) == []
    silent = promise.model_copy(update={"groups": promise.groups[1:]})
    said = validate(found.model_copy(update={"promises": (silent,)}), problem)
    assert "nothing is stated of what 'text (long)' keeps" in str(said)


def test_nothing_is_chosen_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that took all of the time is given as it is, without a bound."""
    late = [0.0]
    monkeypatch.setattr(deadline_module, "_now", lambda: time.perf_counter() + late[0])
    chosen: list[float] = []

    def watched(*given: Any) -> ChosenLevels:
        chosen.append(late[0])
        return choose_mixes(*given)

    def slowly(settled: Problem, request: PlanRequest) -> Plan:
        late[0] = 1e6
        kept = {"target": 0.95, "kept": 1.0, "low": 1.0, "high": 1.0}
        promises = tuple(
            KeptPromise(service=s.name, kept_ttft=1.0, kept_tpot=1.0, **kept)
            for s in settled.services
        )
        return solve(settled, request).model_copy(update={"promises": promises})

    monkeypatch.setattr(choice_promises, "choose_mixes", watched)
    monkeypatch.setattr(choice_promises, "keep_promises", slowly)
    plan = keep_chosen_promises(fleet(), PlanRequest(deadline_s=100.0))
    assert chosen == [0.0]
    assert plan.instances
    assert plan.cut_short
    assert (plan.bound, plan.status) == (None, "feasible")
