"""The simplest placements: no machine, hop or slice more than is worth it, against an enumeration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from atoll.plan.plan import KeptPromise, Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.planner.source import read_sent
from atoll.prove.place_promises import _keep_simply
from atoll.prove.planning import plan
from atoll.prove.simulation_deadline import SimulationCutShortError
from atoll.solve.deadline import Deadline
from atoll.solve.effort import Effort
from atoll.solve.place.replicas import (
    Chosen,
    ReplicaTemplate,
    TemplateShelf,
    list_columns,
    list_shelves,
)
from atoll.solve.place.simple_placement import (
    choose_simple,
    penalised_time,
    place_simply,
)
from atoll.solve.plan_request import PlanRequest
from atoll.solve.simplicity import slowdown
from atoll.solve.solve_progress import SolveStats
from tests.seeds import seeds

HOME = """
services:
  assistant: {model: qwen3-32b@int4, ttft: 10s, tpot: 200ms, rate: 3/min, lengths: 1200x300}
cluster:
  nodes:
    home: {"RTX4090:1": [desktop], "T4:1": [oldbox], "M3-Max:1": [macbook]}
  links:
    - {between: ["*", "*"], bandwidth: 1Gbit/s, latency: 300us}
    - {between: [macbook, "*"], bandwidth: 400Mbit/s, latency: 4ms}
"""
ROOM = """
services:
  small: {model: qwen3-8b, ttft: 1s, tpot: 40ms, rate: RATE/s, lengths: azure-conv}
cluster:
  nodes:
    room: {"V100-16:4": 6}
  links:
    - {between: ["*", "*"], bandwidth: 10Gbit/s, latency: 100us}
"""
TWO = """
services:
  big: {model: qwen3-8b, ttft: 3s, tpot: 100ms, rate: 1/s, lengths: 512x128}
  small: {model: llama-3.2-1b, ttft: 1s, tpot: 100ms, rate: 4/s, lengths: 512x128}
cluster:
  nodes:
    room: {"L4:1": 2, "A10G:2": 1}
  links:
    - {between: ["*", "*"], bandwidth: 10Gbit/s, latency: 100us}
"""


def problem_of(text: str, simplicity: float = 0.02) -> Problem:
    asked = read_sent("name: simple\n" + text).problem
    return asked.replace(settings=asked.settings.model_copy(update={"simplicity": simplicity}))


def simply(asked: Problem) -> Plan:
    found = place_simply(asked, asked.catalog(), Deadline(600.0), partial=False)
    assert found is not None
    assert not validate(found, asked)
    return found


def test_a_model_that_one_machine_holds_is_not_cut_over_three() -> None:
    found = simply(problem_of(HOME))
    assert [[node.host for node in own.nodes] for own in found.instances] == [["desktop"]]
    assert found.notes[0].startswith("1 of 3 machines keep all promises")


def test_an_instance_is_not_cut_over_machines_at_five_times_its_demand() -> None:
    found = simply(problem_of(ROOM.replace("RATE", "10")))
    assert {len(own.nodes) for own in found.instances} == {1}
    assert all(node.gpu_ids is None for own in found.instances for node in own.nodes)
    assert len(found.instances) < 6


def test_machines_that_would_idle_share_the_load() -> None:
    alone = simply(problem_of(ROOM.replace("RATE", "1"))).instances[0].throughput_per_s
    rate = 0.93 * alone
    found = simply(problem_of(ROOM.replace("RATE", f"{rate:.3f}")))
    carried = [own.throughput_per_s for own in found.instances]
    assert len(carried) > 1
    assert rate / sum(carried) < 0.6
    assert max(carried) == pytest.approx(min(carried))


def test_more_simplicity_takes_fewer_machines_and_none_takes_no_part() -> None:
    text = ROOM.replace("RATE", "10")
    few = [len(simply(problem_of(text, share)).instances) for share in (0.002, 0.02, 0.3)]
    assert few == sorted(few, reverse=True)
    assert few[0] > few[-1]
    free = problem_of(text, 0.0)
    assert place_simply(free, free.catalog(), Deadline(600.0), partial=False) is None


def test_what_cannot_be_served_has_no_simple_placement() -> None:
    asked = problem_of(ROOM.replace("RATE", "900"))
    assert place_simply(asked, asked.catalog(), Deadline(600.0), partial=False) is None


def test_slowdown_lies_closely_below_the_formula() -> None:
    for capacity in np.linspace(1.05, 20.0, 80):
        exact = 1.0 + capacity ** (2.0 - math.sqrt(10.0)) / (4.0 * (capacity - 1.0))
        assert exact * 0.9 <= slowdown(float(capacity)) <= exact + 1e-9


# Against an enumeration


def combinations(
    columns: Sequence[ReplicaTemplate], gpus: dict[str, int], room: dict[str, int]
) -> Iterator[Chosen]:
    """Every choice of replicas whose GPUs fit, by kind of GPU."""
    if not columns:
        yield []
        return
    first, rest = columns[0], columns[1:]
    need = Counter[str]()
    for kind, count in zip(KINDS, first.counts, strict=True):
        need[kind.split(":")[0]] += count * gpus[kind]
    number = 0
    while all(room[gpu] >= number * used for gpu, used in need.items()):
        left = {gpu: has - number * need[gpu] for gpu, has in room.items()}
        for others in combinations(rest, gpus, left):
            yield [(first, number), *others] if number else others
        number += 1


KINDS = ("A10G:1", "A10G:2", "L4:1")
GPUS = {"A10G:1": 1, "A10G:2": 2, "L4:1": 1}


def cost_of(chosen: Chosen, demand: Sequence[float], simplicity: float) -> float:
    """The penalised time of replicas, counted from the machines up; infinite where demand is not met."""
    kinds = Counter[str]()
    carried = [0.0] * len(demand)
    hops = 0
    for column, number in chosen:
        carried[column.service] += number * column.tokens_per_s
        hops += number * (sum(column.counts) - 1)
        for kind, count in zip(KINDS, column.counts, strict=True):
            kinds[kind] += number * count
    if any(has < asked for has, asked in zip(carried, demand, strict=True)):
        return math.inf
    slices = kinds["A10G:1"]
    machines = kinds["L4:1"] + kinds["A10G:2"] + -(-slices // 2)
    times = [slowdown(has / asked) for has, asked in zip(carried, demand, strict=True)]
    return sum(times) + simplicity * (machines + hops + slices)


@pytest.fixture(scope="module")
def shelves() -> tuple[Problem, list[TemplateShelf]]:
    asked = problem_of(TWO)
    return asked, list_shelves(asked, asked.catalog())


@pytest.mark.parametrize("seed", seeds(24))
def test_the_program_finds_the_least_of_all_choices(
    seed: int, shelves: tuple[Problem, list[TemplateShelf]]
) -> None:
    asked, shelf = shelves
    rng = np.random.default_rng(seed)
    simplicity = float(rng.choice([0.005, 0.02, 0.1]))
    asked = asked.replace(settings=asked.settings.model_copy(update={"simplicity": simplicity}))
    assert all(one.kinds == KINDS for one in shelf)
    demand = [s.demand_per_s * (512 + 128) for s in asked.services]
    known = list_columns(shelf)
    more = [column for column in known if 2 <= sum(column.counts) <= 3]
    some = [more[i] for i in sorted(rng.choice(len(more), 6, replace=False).tolist())]
    columns = [
        replace(one, tokens_per_s=demand[one.service] * float(rng.uniform(0.4, 2.5)))
        for one in [*(column for column in known if sum(column.counts) == 1), *some]
    ]
    costs = [
        cost_of(chosen, demand, simplicity)
        for chosen in combinations(columns, GPUS, {"A10G": 2, "L4": 2})
    ]
    found = choose_simple(asked, shelf, columns, Deadline(600.0))
    assert min(costs) < math.inf
    assert found is not None
    chosen, taken = found
    assert cost_of(chosen, demand, simplicity) == pytest.approx(min(costs), rel=2e-4)
    assert penalised_time(asked, shelf, chosen, taken) == pytest.approx(min(costs), rel=2e-4)


# With simulation


def test_a_plan_is_the_simplest_where_that_keeps_all_promises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = problem_of(ROOM.replace("RATE", "4").replace(": 6}", ": 3}"))
    request = PlanRequest(error_bars=False, effort=Effort(work=0.01))
    stats = SolveStats()
    found = plan(asked, replace(request, stats=stats))
    assert stats.work["integer programs"] == 1
    assert set(stats.work) == {"integer programs", "nodes"}
    assert all(promise.is_kept for promise in found.promises)
    assert found.instances == simply(asked).instances
    assert plan(asked, request).to_json() == found.to_json()
    # Whoever asks for what carries the most gets it: the simplest is not looked for.
    most = replace(request, effort=replace(request.effort, objective="sustained"))
    assert _keep_simply(asked, request, Deadline(600.0)) == found
    assert _keep_simply(asked, most, Deadline(600.0)) is None

    def late(*_: object, **__: object) -> None:
        raise SimulationCutShortError("late")

    monkeypatch.setattr("atoll.prove.place_promises.look_at", late)
    assert plan(asked, request).cut_short


def test_engines_are_told_what_is_asked_for_where_tighter_promises_are_placed_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = problem_of(TWO)
    looked: list[Plan] = []

    def see(found: Plan, *_: object, **__: object) -> tuple[KeptPromise, ...]:
        """Too few keep TTFT in the simplest placement and in the first of the search."""
        looked.append(found)
        kept = 0.5 if len(looked) < 3 else 1.0
        bounds = {"kept": kept, "low": kept, "high": kept, "kept_ttft": kept, "kept_tpot": 1.0}
        return tuple(
            KeptPromise(service=one.name, target=one.target, **bounds) for one in asked.services
        )

    monkeypatch.setattr("atoll.prove.place_promises.look_at", see)
    monkeypatch.setattr("atoll.prove.place_promises.fit_steps", lambda found, *_: found)
    found = plan(asked, PlanRequest(error_bars=False, effort=Effort(work=0.01)))
    assert len(looked) == 3
    assert validate(found, asked) == []
    assert {name: launch.promised_ttft_s for name, launch in found.engines.items()} == {
        one.name: one.ttft_s for one in asked.services
    }
