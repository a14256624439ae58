from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

import atoll.solve.graph.patterns as patterns_module
from atoll.solve.graph.boxes import pack_boxes
from atoll.solve.graph.executor_program import solve_program
from atoll.solve.graph.graph_types import (
    Chain,
    ClassDemand,
    ExecutorType,
    GraphAnswer,
    GraphProgram,
    Machines,
)
from atoll.solve.graph.patterns import BINDS, HOLDS, solve_with_topology
from tests.reference import cells_brute
from tests.seeds import seeds
from tests.solve.graph.checker import broken_rows


def small(seed: int) -> GraphProgram:
    """Return a program whose machines can all be tried."""
    rng = random.Random(seed)
    parts = ("a", "b", "c")[: rng.choice((2, 2, 3))]
    machines = []
    for gpu in ("P", "Q")[: rng.choice((1, 1, 2))]:
        gpus = rng.choice((2, 2, 4))
        nic = rng.choice((0.2, 0.5, 1.0)) * 1e6
        key = ("r", f"{gpus}x{gpu}", "on-demand")
        sizes = tuple(s for s in (1, 2, 4) if s <= gpus)
        usd = round(rng.uniform(1.0, 4.0), 2)
        machines.append(Machines(key, gpu, gpus, rng.choice((1, 2)), usd, sizes, nic))  # type: ignore[arg-type]
    kinds = [f"{m.gpu}:{size}" for m in machines for size in m.sizes if size < 4]
    executors = []
    for group in [(part,) for part in parts] + [rng.sample(parts, 2)]:
        keys = [("s", "t", part) for part in sorted(group)]
        seconds = {key: round(rng.uniform(0.2, 0.9), 3) for key in keys}
        latency = {key: rng.choice((0.2, 0.5, 0.8)) for key in keys}
        uses = ((rng.choice(kinds), 1),)
        executors.append(ExecutorType("s", tuple(sorted(group)), uses, seconds, latency))
    edges = {(parts[i], parts[i + 1]): rng.choice((0.3, 1.0)) * 1e6 for i in range(len(parts) - 1)}
    chains = (Chain("a", "b", rng.choice((0.8, 1.1))),) if rng.random() < 0.4 else ()
    klass = ClassDemand("s", "t", round(rng.uniform(0.5, 3.0), 2), (parts,), chains, edges)
    goal = rng.choice(("cost", "most"))
    return GraphProgram(tuple(machines), tuple(executors), (klass,), goal=goal)  # type: ignore[arg-type]


def check_boxes(program: GraphProgram, answer: GraphAnswer, boxes: tuple) -> None:  # type: ignore[type-arg]
    offers = {machine.key: machine for machine in program.machines}
    have: Counter[int] = Counter()
    for box in boxes:
        machine = offers[box.offer]
        used = sum(int(kind.rsplit(":", 1)[1]) * n for _, kind, n in box.executors)
        assert used <= machine.gpus
        assert max(box.bytes_in_per_s, box.bytes_out_per_s) <= machine.nic_bytes_per_s * (1 + 1e-6)
        for e, _, n in box.executors:
            have[e] += n
    placed: Counter[int] = Counter()
    for item in answer.placed:
        placed[item.executor] += item.count
    assert have == placed
    assert Counter(box.offer for box in boxes) == Counter(dict(answer.machines))


@pytest.mark.parametrize("seed", seeds(40))
def test_equal_to_trying_all_machines(seed: int) -> None:
    program = small(seed)
    best = cells_brute.solve_boxes(program)
    answer, boxes = solve_with_topology(program, gap=1e-7)
    if best.share <= 1e-6:
        assert answer.status == "infeasible"
        return
    assert broken_rows(program, answer) == []
    check_boxes(program, answer, boxes)
    assert answer.share == pytest.approx(best.share, rel=1e-5)
    if program.goal == "cost":
        assert answer.objective == pytest.approx(best.cost, rel=1e-6)


@pytest.mark.parametrize("seed", seeds(12, 40))
def test_generated_patterns_reach_what_all_of_them_do(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = small(seed)
    exact, _ = solve_with_topology(program, gap=1e-7)
    monkeypatch.setattr(patterns_module, "_ALL_PATTERNS", 0)
    answer, boxes = solve_with_topology(program, gap=1e-7)
    if exact.status == "infeasible":
        return
    assert answer.share <= exact.share * (1 + 1e-6)
    assert answer.share_bound >= exact.share * (1 - 1e-6)
    if program.goal == "cost" and answer.share == pytest.approx(exact.share, rel=1e-6):
        assert answer.bound <= exact.objective * (1 + 1e-6) <= answer.objective * (1 + 2e-6)
    if answer.status != "infeasible":
        assert broken_rows(program, answer) == []
        check_boxes(program, answer, boxes)


def test_nics_that_hold_change_nothing() -> None:
    program = small(3)
    wide = replace(
        program, machines=tuple(replace(m, nic_bytes_per_s=1e12) for m in program.machines)
    )
    answer, boxes = solve_with_topology(wide)
    free = solve_program(wide)
    assert HOLDS in answer.reasons
    assert (answer.objective, answer.machines) == (free.objective, free.machines)
    check_boxes(wide, answer, boxes)


def test_some_nics_bind() -> None:
    bound = sum(BINDS in solve_with_topology(small(seed))[0].reasons for seed in range(20))
    assert 3 <= bound <= 18


def test_executors_that_talk_share_a_machine() -> None:
    machine = Machines(("r", "2xP", "owned"), "P", 2, 2, 1.0, (1, 2), 1e5)
    types = tuple(
        ExecutorType("s", (part,), (("P:1", 1),), {("s", "t", part): 0.5}, {})
        for part in ("a", "b")
    )
    klass = ClassDemand("s", "t", 4.0, (("a", "b"),), (), {("a", "b"): 1e6})
    program = GraphProgram((machine,), types, (klass,))
    answer, boxes = solve_with_topology(program)
    assert [box.executors for box in boxes] == [((0, "P:1", 1), (1, "P:1", 1))] * 2
    assert all(math.isclose(box.bytes_out_per_s, 0.0, abs_tol=1e-3) for box in boxes)
    assert HOLDS in answer.reasons
    assert len(pack_boxes(program, answer)) == 2
