from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import atoll.solve.graph.executor_master as master_module
import atoll.solve.graph.executor_program as program_module
from atoll.core.errors import InputError
from atoll.solve.graph.executor_program import solve_program
from atoll.solve.graph.graph_types import (
    Chain,
    ClassDemand,
    ExecutorType,
    GraphProgram,
    Machines,
    StandingExecutors,
)
from atoll.solve.lp import MipResult
from tests.reference.cells_cases import check_case, check_exact, make_case
from tests.seeds import examples, seeds
from tests.solve.graph.checker import broken_rows

SEEDS = st.integers(0, 10_000)
MANY = examples(20)


def machine(
    gpu: str = "A",
    gpus: int = 8,
    available: int = 4,
    usd: float = 8.0,
    market: str = "on-demand",
    region: str = "r",
) -> Machines:
    sizes = tuple(size for size in (1, 2, 4, 8) if size <= gpus)
    key = (region, f"{gpus}x{gpu}", market)
    return Machines(key, gpu, gpus, available, usd, sizes)  # type: ignore[arg-type]


def executor(
    kind: str, seconds: dict[str, float], latency: dict[str, float] | None = None
) -> ExecutorType:
    late = {("s", "t", part): value for part, value in (latency or {}).items()}
    each = {("s", "t", part): value for part, value in seconds.items()}
    return ExecutorType("s", tuple(seconds), ((kind, 1),), each, late)


def demand(rate: float, *routes: tuple[str, ...], chains: tuple[Chain, ...] = ()) -> ClassDemand:
    return ClassDemand("s", "t", rate, routes, chains)


def test_parts_that_share_an_executor_balance_it() -> None:
    # Alone, a and b need 1.5 executors each, so 2 and 2; one type that does both needs 3.
    apart = [executor("A:1", {"a": 1.0}), executor("A:1", {"b": 1.0})]
    both = executor("A:1", {"a": 1.0, "b": 1.0})
    single = machine(gpus=1, usd=1.0, available=9)
    program = GraphProgram((single,), tuple(apart), (demand(1.5, ("a", "b")),))
    assert solve_program(program).objective == pytest.approx(4.0)
    shared = solve_program(replace(program, executors=(*apart, both)))
    assert shared.objective == pytest.approx(3.0)
    assert shared.status == "optimal"
    assert shared.bound == pytest.approx(3.0)


def test_a_way_around_a_dear_part_is_taken() -> None:
    types = (executor("A:1", {"a": 5.0}), executor("A:1", {"b": 1.0}), executor("A:1", {"c": 1.0}))
    program = GraphProgram(
        (machine(gpus=1, usd=1.0, available=20),), types, (demand(2.0, ("a", "b"), ("b", "c")),)
    )
    answer = solve_program(program)
    assert answer.objective == pytest.approx(4.0)
    assert set(answer.routes) == {("s", "t", 1, "r")}


def test_slow_first_parts_need_fast_second_ones() -> None:
    # A cheap slow encoder only goes with the fast llm, of which there is one.
    types = (
        executor("C:1", {"a": 1.0}, {"a": 0.8}),
        executor("A:1", {"a": 1.0}, {"a": 0.2}),
        executor("C:1", {"b": 1.0}, {"b": 0.8}),
        executor("A:1", {"b": 1.0}, {"b": 0.2}),
    )
    machines = (
        machine("A", gpus=1, usd=5.0, available=9),
        machine("C", gpus=1, usd=1.0, available=9),
    )
    loose = GraphProgram(machines, types, (demand(2.0, ("a", "b")),))
    assert solve_program(loose).objective == pytest.approx(4.0)
    tight = replace(loose, classes=(demand(2.0, ("a", "b"), chains=(Chain("a", "b", 1.0),)),))
    answer = solve_program(tight)
    assert answer.objective == pytest.approx(12.0)
    assert not broken_rows(tight, answer)


def test_executors_that_run_are_kept_while_starting_costs_more() -> None:
    types = (executor("A:1", {"a": 1.0}), executor("C:1", {"a": 1.0}))
    machines = (machine("A", 1, 5, 2.0), machine("C", 1, 5, 1.5))
    program = GraphProgram(
        machines,
        types,
        (demand(2.0, ("a",)),),
        standing=(StandingExecutors(0, (machines[0].key,), 2),),
        init_penalty=1.0,
    )
    kept = solve_program(program)
    assert kept.objective == pytest.approx(4.0)
    assert [(p.executor, p.count, p.kept) for p in kept.placed] == [(0, 2, 2)]
    moved = solve_program(replace(program, init_penalty=0.1))
    assert moved.objective == pytest.approx(2 * 1.5 * 1.1)
    assert moved.init_usd == pytest.approx(0.3)


def test_a_shortage_is_shared_or_refused() -> None:
    types = (executor("A:1", {"a": 1.0}),)
    program = GraphProgram((machine(gpus=1, available=3, usd=2.0),), types, (demand(4.0, ("a",)),))
    answer = solve_program(program)
    assert (answer.status, answer.share, answer.share_bound) == ("partial", 0.75, 0.75)
    assert answer.usd_per_hour == pytest.approx(6.0)
    assert answer.reasons
    refused = solve_program(replace(program, shortage="fail"))
    assert refused.status == "infeasible"
    assert refused.reasons


def test_priority_decides_who_is_short() -> None:
    types = tuple(
        ExecutorType("s", ("a",), (("A:1", 1),), {("s", name, "a"): 1.0}, {}) for name in ("t", "u")
    )
    classes = (
        ClassDemand("s", "t", 2.0, (("a",),), priority=1.0),
        ClassDemand("s", "u", 2.0, (("a",),), priority=3.0),
    )
    program = GraphProgram((machine(gpus=1, available=3),), types, classes, shortage="priority")
    answer = solve_program(program)
    assert answer.served == {("s", "t"): pytest.approx(0.5), ("s", "u"): pytest.approx(1.0)}


def test_a_part_that_nothing_runs_is_named() -> None:
    program = GraphProgram((machine(),), (executor("A:1", {"a": 1.0}),), (demand(1.0, ("a", "b")),))
    answer = solve_program(program)
    assert answer.status == "infeasible"
    assert "nothing on offer runs b" in answer.reasons[0]


def test_chains_in_an_odd_circle_are_refused() -> None:
    chains = tuple(Chain(a, b, 1.0) for a, b in itertools.combinations("abc", 2))
    program = GraphProgram(
        (machine(),),
        (executor("A:1", {"a": 1.0, "b": 1.0, "c": 1.0}),),
        (demand(1.0, ("a", "b", "c"), chains=chains),),
    )
    with pytest.raises(InputError, match="odd circle"):
        solve_program(program)


def test_nobody_asks_for_anything() -> None:
    program = GraphProgram((machine(),), (executor("A:1", {"a": 1.0}),), (demand(0.0, ("a",)),))
    answer = solve_program(program)
    assert (answer.status, answer.objective, answer.machines) == ("optimal", 0.0, {})


def test_effort_that_runs_out_is_honest() -> None:
    program = make_case(3)
    full = solve_program(replace(program, goal="most"), gap=1e-7)
    little = solve_program(replace(program, goal="most"), gap=1e-7, work=1e-6)
    assert little.objective <= full.objective * (1 + 1e-7)
    assert little.bound >= full.objective * (1 - 1e-7)


@pytest.mark.parametrize("cases", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_equal_to_trying_everything(cases: int) -> None:
    checked, equal, worst = check_exact(cases, seed=20_000)
    assert (checked, equal) == (cases, cases), worst


@pytest.mark.parametrize("seed", seeds(15, 30_000))
def test_taking_in_units_one_by_one_finds_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_module, "_MIN_UNITS", 1)
    monkeypatch.setattr(program_module, "_CHEAP_UNITS", 1)
    monkeypatch.setattr(master_module, "_BATCH", 1)
    assert check_case(make_case(seed)).error <= 1e-6


@pytest.mark.parametrize("seed", seeds(15, 30_000))
def test_what_is_likely_is_a_start_and_proves_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_module, "_CHEAP_UNITS", 1)
    program = make_case(seed)
    best = solve_program(program, gap=1e-7)
    likely = tuple(sorted({one.executor for one in best.placed}))
    again = solve_program(replace(program, likely=likely), gap=1e-7)
    assert again.status == best.status
    assert again.objective == pytest.approx(best.objective, rel=1e-6, abs=1e-6)
    # Types that are not in the best answer may make a worse one; the bound is that of all.
    others = tuple(e for e in range(len(program.executors)) if e not in likely)
    quick = solve_program(replace(program, likely=others, unproven=True), gap=1e-7)
    assert broken_rows(program, quick) == []
    if quick.status == best.status and best.status in ("optimal", "feasible"):
        assert quick.objective >= best.objective - 1e-6
        assert quick.bound <= best.objective + 1e-6


@MANY
@given(SEEDS)
def test_answers_keep_every_row(seed: int) -> None:
    program = make_case(seed)
    answer = solve_program(program)
    assert broken_rows(program, answer) == []


@MANY
@given(SEEDS)
def test_dominated_types_lose_nothing(seed: int) -> None:
    program = make_case(seed)
    rng = random.Random(seed)
    worse = tuple(
        replace(e, seconds={k: v * rng.choice((1.0, 1.3)) for k, v in e.seconds.items()})
        for e in program.executors
    )
    program = replace(program, executors=program.executors + worse)
    one = solve_program(program, gap=1e-7)
    two = solve_program(program, gap=1e-7, presolve=False)
    assert one.status == two.status
    if one.status != "infeasible":
        assert one.objective == pytest.approx(two.objective, rel=1e-6, abs=1e-6)
        assert one.share == pytest.approx(two.share, rel=1e-6)


@MANY
@given(SEEDS, st.floats(0.2, 1.0), st.floats(1.0, 2.0))
def test_more_budget_never_serves_less(seed: int, part: float, factor: float) -> None:
    program = replace(make_case(seed), goal="most", standing=())
    rent = sum(m.usd_per_hour * m.available for m in program.machines)
    less = replace(program, budget_usd_per_hour=part * rent)
    more = replace(program, budget_usd_per_hour=part * factor * rent)
    first, second = (solve_program(p, gap=1e-7) for p in (less, more))
    assert second.objective >= first.objective * (1 - 1e-6)


@MANY
@given(SEEDS)
def test_what_nobody_asks_for_costs_nothing(seed: int) -> None:
    program = make_case(seed)
    idle = ClassDemand("s", "idle", 0.0, (("a", "never"),))
    extra = ExecutorType("s", ("never",), program.executors[0].uses, {("s", "x", "never"): 1.0}, {})
    more = replace(
        program,
        classes=(*program.classes, idle),
        executors=(*program.executors, extra),
    )
    one, two = (solve_program(p, gap=1e-7) for p in (program, more))
    assert one.status == two.status
    assert one.objective == pytest.approx(two.objective, rel=1e-6, abs=1e-6)
    assert one.machines == two.machines


@MANY
@given(SEEDS)
def test_order_changes_nothing_and_equal_input_gives_equal_bits(seed: int) -> None:
    program = make_case(seed)
    rng = random.Random(seed)
    order = rng.sample(range(len(program.executors)), len(program.executors))
    place = {e: i for i, e in enumerate(order)}
    shuffled = replace(
        program,
        machines=tuple(rng.sample(program.machines, len(program.machines))),
        executors=tuple(program.executors[e] for e in order),
        classes=tuple(rng.sample(program.classes, len(program.classes))),
        standing=tuple(replace(s, executor=place[s.executor]) for s in program.standing),
    )
    one, two = (solve_program(p, gap=1e-7) for p in (program, shuffled))
    assert one.status == two.status
    assert one.objective == pytest.approx(two.objective, rel=1e-6, abs=1e-6)
    assert solve_program(program, gap=1e-7) == one


@MANY
@given(SEEDS)
def test_max_and_cost_agree(seed: int) -> None:
    """What is served at most costs, as a demand, no more than the budget; more than that cannot be served."""
    program = replace(make_case(seed), standing=(), spot_share=None)
    rent = sum(m.usd_per_hour * m.available for m in program.machines)
    program = replace(program, goal="most", budget_usd_per_hour=0.7 * rent)
    most = solve_program(program, gap=1e-7)
    if most.status == "infeasible":
        return

    def at(factor: float) -> GraphProgram:
        classes = tuple(
            replace(k, rate_per_s=k.rate_per_s * most.objective * factor) for k in program.classes
        )
        return replace(
            program, goal="cost", classes=classes, budget_usd_per_hour=None, shortage="fail"
        )

    cost = solve_program(at(1.0 - 1e-6), gap=1e-7)
    assert cost.status == "optimal"
    assert cost.usd_per_hour <= 0.7 * rent + 1e-6
    beyond = solve_program(at(1.0 + 1e-4), gap=1e-7)
    assert beyond.status == "infeasible" or beyond.usd_per_hour > 0.7 * rent - 1e-6
    assert not math.isinf(cost.objective)


@given(SEEDS, st.floats(1.0, 1.3))
@MANY
def test_an_answer_to_an_easier_question_changes_no_answer(seed: int, slower: float) -> None:
    """With slower executors: what was known of faster ones saves work, and the answer is worth the same."""
    case = replace(make_case(seed), goal="cost")
    first = solve_program(case)
    if first.status not in ("optimal", "feasible"):
        return
    types = tuple(
        replace(one, seconds={key: slower * value for key, value in one.seconds.items()})
        for one in case.executors
    )
    slow = replace(case, executors=types)
    used = tuple(sorted({one.executor for one in first.placed}))
    known = replace(slow, known=used, known_usd=first.objective, at_least=first.bound)
    expected, found = solve_program(slow), solve_program(known)
    assert (found.status == "partial") == (expected.status == "partial")
    assert (found.status == "infeasible") == (expected.status == "infeasible")
    if expected.status in ("optimal", "feasible"):
        # Both are within the gap of what is best.
        assert found.objective == pytest.approx(expected.objective, rel=2e-4)
        assert found.bound <= expected.objective * (1 + 1e-9)
        assert broken_rows(known, found) == []


def test_an_answer_that_still_does_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[int] = []
    whole = master_module.Master.solve_integer

    def count(self: master_module.Master, **options: Any) -> MipResult:
        solved.append(len(self.inside))
        return whole(self, **options)

    monkeypatch.setattr(master_module.Master, "solve_integer", count)
    types = [executor("A:1", {"a": 1.0 + 0.01 * at, "b": 1.0}) for at in range(40)]
    single = machine(gpus=1, usd=1.0, available=9)
    program = GraphProgram((single,), tuple(types), (demand(1.4, ("a", "b")),))
    first = solve_program(program, presolve=False)
    used = tuple(sorted({one.executor for one in first.placed}))
    assert max(solved) > len(used)
    solved.clear()
    known = replace(program, known=used, known_usd=first.objective, at_least=first.bound)
    again = solve_program(known, presolve=False)
    assert solved == [len(used)]
    assert again.status == "optimal"
    assert (again.objective, again.bound) == (first.objective, first.bound)
