"""Replicas by latency: masters against trying everything, tables filled lazily, memP as in table 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import MissingDependencyError, UsageError
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Goal, Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.solve.array_types import Floats, Ints
from atoll.solve.effort import Answered, Effort
from atoll.solve.family import solvers
from atoll.solve.place.cp import cp_masters as masters
from atoll.solve.place.cp.cp_masters import CpMaster, efficient, merge_fronts
from atoll.solve.place.cp.cp_solver import hand_out, memory_share
from atoll.solve.place.cp.latency_table import SimulatedTable
from atoll.solve.place.cp.lazy import solve_lazily
from atoll.solve.place.cp.replica_shapes import Replicas, plan_of_replicas, shapes_of
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.solve_progress import SolveStats

needs_ortools = pytest.mark.skipif(
    find_spec("ortools") is None, reason="CP-SAT needs ortools: pip install 'atoll[cp]'"
)
TABLE_1 = """
services:
  13b: {model: llama-2-13b, rate: 110/s, ttft: 60s, tpot: 1s, phases: together, lengths: 1170x530}
  34b: {model: codellama-34b, rate: 185.5/s, ttft: 60s, tpot: 1s, phases: together, lengths: 885x297}
  70b: {model: llama-3.3-70b, rate: 221/s, ttft: 60s, tpot: 1s, phases: together, lengths: 600x64}
cluster:
  nodes: {site: {"GH200:4": 8, "A100-80:4": 6}}
  links: [{between: ["*", "*"], bandwidth: 200Gbit/s, latency: 10us}]
catalog: {nodes: {"GH200:2": {interconnect: nvlink4}, "GH200:4": {interconnect: nvlink4}}}
"""
SMALL = """
services:
  chat: {model: llama-3.1-8b, rate: 9/s, ttft: 10s, tpot: 200ms, phases: together, lengths: 600x150}
  code: {model: qwen3-32b, rate: 2/s, ttft: 20s, tpot: 400ms, phases: together, lengths: 900x200}
cluster:
  nodes: {here: {"A100-80:2": 2, "L40S:4": 1}}
  links: [{between: ["*", "*"], bandwidth: 100Gbit/s, latency: 10us}]
"""


def gpus_by_type(replicas: Replicas) -> dict[str, int]:
    """Return how many GPUs replicas have of each type, as table 1 counts them."""
    gpus: Counter[str] = Counter()
    for shape, count in replicas:
        gpus[shape.kind.rsplit(":", 1)[0]] += shape.gpus * count
    return dict(sorted(gpus.items()))


def toy(plan: Plan, problem: Problem, _seconds: float) -> Answered:
    """A latency that needs no simulation: the slower the GPUs and the fuller they are, the longer."""
    (service,) = problem.services
    capacity = sum(i.throughput_per_s for i in plan.instances)
    load = service.rate_per_s / capacity
    total = 0.0
    for instance in plan.instances:
        (*_, node) = instance.nodes
        speed = node.tp**0.7 * (2.5 if node.node_type.startswith("A100") else 1.0)
        total += instance.throughput_per_s / capacity * (1.0 + load * load) / speed
    return Answered(total, total, total)


@dataclass
class CountedToy:
    """The toy latency, with how often it was asked."""

    asked: int = field(default=0)

    def __call__(self, plan: Plan, problem: Problem, seconds: float) -> Answered:
        self.asked += 1
        return toy(plan, problem, seconds)


# Masters


def try_all(
    costs: list[list[float]], uses: list[list[list[int]]], stock: list[int]
) -> float | None:
    """The least cost of any choice, by trying all of them."""
    best = None
    for pick in product(*(range(len(own)) for own in costs)):
        used = [sum(uses[s][k][n] for s, k in enumerate(pick)) for n in range(len(stock))]
        if all(u <= d for u, d in zip(used, stock, strict=True)):
            cost = sum(costs[s][k] for s, k in enumerate(pick))
            best = cost if best is None else min(best, cost)
    return best


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[list[float]], list[list[list[int]]], list[int]]:
    types = draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    costs = [draw(st.lists(st.integers(0, 60), min_size=n, max_size=n)) for n in counts]
    use = st.lists(st.integers(0, 5), min_size=types, max_size=types)
    uses = [draw(st.lists(use, min_size=n, max_size=n)) for n in counts]
    stock = draw(st.lists(st.integers(0, 9), min_size=types, max_size=types))
    return [[float(c) for c in own] for own in costs], uses, stock


Arrays = tuple[list[Floats], list[Ints], Ints]


def as_arrays(case: tuple[list[list[float]], list[list[list[int]]], list[int]]) -> Arrays:
    costs, uses, stock = case
    return (
        [np.array(own) for own in costs],
        [np.array(own, np.int64).reshape(len(own), len(stock)) for own in uses],
        np.array(stock, np.int64),
    )


def check_master(
    master: masters.Master, case: tuple[list[list[float]], list[list[list[int]]], list[int]]
) -> None:
    costs, uses, stock = as_arrays(case)
    chosen, best = master(costs, uses, stock), try_all(*case)
    assert (chosen is None) == (best is None)
    if chosen is not None:
        used = sum(uses[s][k] for s, k in enumerate(chosen))
        assert (used <= stock).all()
        assert sum(costs[s][k] for s, k in enumerate(chosen)) == pytest.approx(best)


@given(programs())
def test_merged_fronts_are_exact(
    case: tuple[list[list[float]], list[list[list[int]]], list[int]],
) -> None:
    check_master(merge_fronts, case)


@needs_ortools
def test_cp_sat_is_exact_and_says_the_same_again() -> None:
    random = np.random.default_rng(5)
    with CpMaster() as master:
        for _ in range(20):
            types, counts = int(random.integers(1, 4)), random.integers(1, 9, 3)
            costs = [[float(c) for c in random.integers(0, 50, n)] for n in counts]
            uses = [random.integers(0, 5, (n, types)).tolist() for n in counts]
            case = (costs, uses, random.integers(2, 10, types).tolist())
            check_master(master, case)
            assert master(*as_arrays(case)) == master(*as_arrays(case))
        assert master.solves == 60


def test_only_entries_that_nothing_beats_are_kept() -> None:
    cost = np.array([3.0, 1.0, 2.0, np.inf, 2.0])
    use = np.array([[1, 1], [2, 2], [2, 3], [0, 0], [1, 2]], np.int64)
    assert efficient(cost, use).tolist() == [1, 4, 0]


def test_cp_without_ortools_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masters, "find_spec", lambda _name: None)
    with pytest.raises(
        MissingDependencyError, match="solver cp needs the package 'ortools'"
    ) as error:
        CpMaster()
    assert error.value.hint == "pip install 'atoll[cp]'"


# Filling


@dataclass
class ToyTable:
    """Costs that are found out in two looks, and are no less than said before."""

    true: list[Floats]
    uses: list[Ints]
    optimism: list[Floats]
    seen: Counter[tuple[int, int]] = field(default_factory=Counter)

    def costs(self, service: int) -> Floats:
        looks = np.array([self.seen[service, k] for k in range(len(self.true[service]))])
        share = np.where(looks == 0, self.optimism[service] ** 2, self.optimism[service])
        return np.where(looks >= 2, self.true[service], self.true[service] * share)

    def exact(self, service: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return np.array([self.seen[service, k] >= 2 for k in range(len(self.true[service]))])

    def look(self, service: int, entry: int) -> None:
        self.seen[service, entry] += 1


def random_tables() -> Iterator[tuple[ToyTable, Ints, float]]:
    for seed in range(6):
        random = np.random.default_rng(seed)
        counts = random.integers(0, 4, (60, 2))
        uses = [counts[:30].astype(np.int64), counts[30:].astype(np.int64)]
        true = [10.0 / (0.5 + use.sum(axis=1)) + random.random(len(use)) for use in uses]
        optimism = [random.uniform(0.6, 1.0, len(own)) for own in true]
        stock = np.array([3, 4], np.int64)
        best = try_all(
            [own.tolist() for own in true], [own.tolist() for own in uses], stock.tolist()
        )
        assert best is not None
        yield ToyTable(true, uses, optimism), stock, best


def test_lazy_filling_finds_the_same_with_fewer_looks() -> None:
    for table, stock, best in random_tables():
        found = solve_lazily(table, stock, merge_fronts, max_looks=10_000)
        assert found is not None
        assert found.cost == pytest.approx(best)
        assert found.gap == 0.0
        assert sum(table.seen.values()) == found.looks < 2 * 60
        assert found.solves < 60


def test_a_scout_says_where_to_look_and_the_master_has_the_word() -> None:
    asked = 0

    def master(costs: Sequence[Floats], uses: Sequence[Ints], stock: Ints) -> list[int] | None:
        nonlocal asked
        asked += 1
        return merge_fronts(costs, uses, stock)

    def first(costs: Sequence[Floats], uses: Sequence[Ints], stock: Ints) -> list[int] | None:
        """A poor scout: it sees only the second half of every table."""
        less = [np.where(np.arange(len(c)) < len(c) // 2, np.inf, c) for c in costs]
        return merge_fronts(less, uses, stock) or merge_fronts(costs, uses, stock)

    for table, stock, best in random_tables():
        found = solve_lazily(table, stock, master, scout=first, max_looks=10_000)
        assert found is not None
        assert found.cost == pytest.approx(best)
    assert asked >= 6


def test_what_is_filled_in_part_says_how_far_it_may_be_off() -> None:
    for table, stock, best in random_tables():
        found = solve_lazily(table, stock, merge_fronts, max_looks=6)
        assert found is not None
        assert found.bound <= best * (1 + 1e-9) <= found.cost * (1 + 1e-9)
        assert found.looks <= 6 + 4
        assert all(table.exact(s)[k] for s, k in enumerate(found.chosen))


# Placements


@cache
def brute() -> float:
    """The least mean latency of all numbers of replicas, listed GPU type by GPU type."""
    problem = parse_fleet(SMALL)
    catalog = problem.catalog()
    stock = {"A100-80:2": 4, "L40S:4": 4}
    rates = {s.name: s.rate_per_s for s in problem.services}
    options: list[list[tuple[float, int, int]]] = []
    for service in problem.services:
        alone = problem.replace(services=(service,))
        shapes = shapes_of(problem, catalog, service)
        by_type = [
            [(None, 0)]
            + [(s, n) for s in shapes if s.site[1] == kind for n in range(1, held // s.tp + 1)]
            for kind, held in stock.items()
        ]
        own = []
        for first, second in product(*by_type):
            replicas = tuple((s, n) for s, n in (first, second) if s is not None)
            if replicas:
                plan = plan_of_replicas(alone, catalog, {service.name: replicas}, solver="cp")
                used = [n * s.tp if s is not None else 0 for s, n in (first, second)]
                cost = toy(plan, alone, 30.0).mean_s * rates[service.name] / sum(rates.values())
                own.append((cost, used[0], used[1]))
        options.append(own)
    return min(
        a[0] + b[0] for a in options[0] for b in options[1] if a[1] + b[1] <= 4 and a[2] + b[2] <= 4
    )


def test_the_best_of_all_allocations_is_found_with_part_of_the_table() -> None:
    problem = parse_fleet(SMALL)
    catalog = problem.catalog()
    latency = CountedToy()
    table = SimulatedTable(problem, catalog, latency)
    found = solve_lazily(table, table.stock, merge_fronts, max_looks=10_000)
    assert found is not None
    assert found.cost == pytest.approx(brute())
    assert len(table.answered) < table.size / 2
    assert latency.asked == len(table.answered) + table.alone
    assert table.tightest >= 1.0  # nothing was cheaper than it was said to be at least


@needs_ortools
def test_cp_plans_are_valid_and_the_best() -> None:
    problem = parse_fleet(SMALL)
    catalog = problem.catalog()
    best = brute()
    made = solve(
        problem, PlanRequest(solver="cp", effort=Effort(latency=toy, gap=0.0), catalog=catalog)
    )
    assert validate(made, problem, catalog) == []
    assert (made.solver, made.goal) == ("cp", "latency")
    rates = {s.name: s.rate_per_s for s in problem.services}
    reached = 0.0
    for service in problem.services:
        own = tuple(i for i in made.instances if i.service == service.name)
        part = made.model_copy(update={"instances": own})
        mean_s = toy(part, problem.replace(services=(service,)), 30.0).mean_s
        reached += mean_s * rates[service.name] / sum(rates.values())
    assert (
        best <= reached * (1 + 1e-9) <= best * 1.01 * (1 + 1e-9)
    )  # what is nearer counts as equal


def test_search_by_latency_is_no_worse_and_may_use_stages() -> None:
    problem = parse_fleet(SMALL)
    catalog = problem.catalog()
    stats = SolveStats()
    request = PlanRequest(effort=Effort(latency=toy, objective="latency"), catalog=catalog)
    made = solve(problem, replace(request, stats=stats))
    assert validate(made, problem, catalog) == []
    assert made.goal == "latency"
    assert solve(problem, request) == made
    assert min(stats.work["simulated entries"], stats.work["simulated shapes"]) > 0


def test_tables_need_something_that_fills_them() -> None:
    with pytest.raises(UsageError, match="goes by simulated latency"):
        solve(parse_fleet(SMALL), PlanRequest(effort=Effort(objective="latency")))


@pytest.mark.parametrize(
    ("solver", "objective", "use"),
    [("swarm", "latency", "use flow.search or cp"), ("cp", "max-flow", "use flow.search")],
)
def test_an_objective_that_a_solver_does_not_know_is_refused(
    solver: str, objective: Goal, use: str
) -> None:
    request = PlanRequest(solver=solver, effort=Effort(latency=toy, objective=objective))
    with pytest.raises(UsageError, match=f"{solver} does not know the objective") as refused:
        solve(parse_fleet(SMALL), request)
    assert use in (refused.value.hint or "")


def test_promises_that_nobody_keeps_have_no_plan() -> None:
    problem = parse_fleet(SMALL.replace("tpot: 400ms", "tpot: 1ms"))
    made = solve(problem, PlanRequest(effort=Effort(latency=toy, objective="latency")))
    assert made.status == "infeasible"
    assert "code: no replica" in made.reasons[0]


# memP


def test_memory_shares_are_those_of_table_1() -> None:
    problem = parse_fleet(TABLE_1)
    catalog = problem.catalog()
    assert "memp" in solvers(problem)
    handed = {name: dict(own) for name, own in hand_out(problem, catalog).items()}
    assert handed == {
        "13b": {("site", "A100-80:4"): 1},
        "34b": {("site", "A100-80:4"): 4},
        "70b": {("site", "GH200:4"): 8, ("site", "A100-80:4"): 1},
    }
    chosen = memory_share(problem, catalog, promise=True)
    assert {name: gpus_by_type(own) for name, own in chosen.items()} == {
        "13b": {"A100-80": 4},
        "34b": {"A100-80": 16},
        "70b": {"A100-80": 4, "GH200": 32},
    }
    made = solve(problem, PlanRequest(solver="memp", catalog=catalog))
    assert validate(made, problem, catalog) == []
    assert (made.status, made.goal) == ("partial", "fair")


def test_every_model_gets_a_machine() -> None:
    text = TABLE_1.replace("rate: 221/s", "rate: 50000/s")
    handed = hand_out(parse_fleet(text), parse_fleet(text).catalog())
    assert {name: own.total() for name, own in handed.items()} == {"13b": 1, "34b": 1, "70b": 12}


def test_a_share_that_holds_no_replica_has_no_plan() -> None:
    # The larger product takes the A100s; what is left for the other are T4s, which hold no 32B model.
    text = SMALL.replace('"A100-80:2": 2, "L40S:4": 1', '"A100-80:2": 1, "T4:1": 1')
    made = solve(parse_fleet(text.replace("rate: 9/s", "rate: 100/s")), PlanRequest(solver="memp"))
    assert made.status == "infeasible"
    assert made.reasons[0].startswith("code: the machines that are its share")
