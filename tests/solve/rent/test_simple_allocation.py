"""The simplest allocation against an enumeration of all of them, and within its limits on larger problems."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.solve.array_types import Ints
from atoll.solve.rent import simple_allocation
from atoll.solve.rent.allocation import simplify
from atoll.solve.rent.allocation_types import (
    BOTH,
    DECODE,
    PREFILL,
    Allocation,
    AllocationLimits,
    RunningColumn,
)
from atoll.solve.rent.items import RentModel
from atoll.solve.rent.simple_allocation import SimpleGoal
from tests.seeds import examples, seeds
from tests.solve.rent.allocating import solve
from tests.solve.rent.cases import Case, faults, random_case, service, supply_of

MOST = 20.0


def solve_simply(
    case: Case, cheapest: Allocation, simplicity: float, *, blind: bool = False
) -> Allocation:
    """The simplest allocation, from the cheapest one or (`blind`) from nothing."""
    answer = simplify(
        case.services,
        case.supply,
        case.limits,
        () if blind else cheapest.instances,
        cheapest.bound,
        SimpleGoal(simplicity, cheapest.objective * (1.0 + simplicity)),
        init_penalty=case.init_penalty,
        running=case.running,
        deadline_s=60.0,
    )
    assert answer is not None
    assert faults(case, answer) == []
    return answer


# Counted from answers


def pieces_of(case: Case, answer: Allocation) -> int:
    """Machines, hops, slices, shapes, services with phases apart, and starts where something runs."""
    pieces = int(answer.machines.sum())
    pieces += sum(n for (k, s), n in answer.slices.items() if s < case.supply.gpus[k])
    shapes = set()
    for chosen in answer.instances:
        if chosen.running is not None:
            nodes = case.running[chosen.running].nodes
        else:
            role = next(r for r in case.services[chosen.service].roles if r.phase == chosen.phase)
            row = role.counts[chosen.template or 0]
            nodes = tuple((int(c), int(row[c])) for c in np.flatnonzero(row))
            pieces += chosen.number * bool(case.running)
        pieces += chosen.number * max(0, sum(n for _, n in nodes) - 1)
        shapes.add((chosen.service, chosen.phase, nodes))
    apart = {chosen.service for chosen in answer.instances if chosen.phase == PREFILL}
    return pieces + len(shapes) + len(apart)


def slowdown(capacity: float) -> float:
    """How much longer requests take in a queue for four servers, by lines below it."""
    power, lines = 2.0 - math.sqrt(10.0), [1.0]
    for load in (0.98, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02):
        z, step = 1.0 / load, 1e-6
        at, next_to = (x**power / (4.0 * (x - 1.0)) for x in (z, z * (1.0 + step)))
        lines.append(1.0 + at + (next_to - at) / (z * step) * (capacity - z))
    return max(lines)


def times_of(case: Case, answer: Allocation) -> float:
    """How long requests of all services take together, each in multiples of its time alone (one region)."""
    total = 0.0
    for m, asked in enumerate(case.services):
        carried = Counter[int]()
        for chosen in answer.instances:
            if chosen.service == m:
                role = next(r for r in asked.roles if r.phase == chosen.phase)
                rate = float(role.throughput[chosen.template or 0])
                carried[chosen.phase] += chosen.number * min(MOST, rate / role.demand)  # type: ignore[assignment]
        total += slowdown(min(MOST, carried[BOTH] + min(carried[PREFILL], carried[DECODE])))
    return total


# All allocations of a small market


@dataclass(frozen=True)
class Found:
    """One allocation: what it costs, its pieces, the time that requests take, machines of each offer.

    `used` are service, phase and template of its instances.
    """

    used: set[tuple[int, int, int]]
    usd: float
    pieces: int
    time: float
    machines: tuple[int, ...]


def enumerate_all(case: Case) -> Iterator[Found]:
    """Every allocation that serves everything: as many instances of each as fit, on every set of machines."""
    supply = case.supply
    items = [
        (m, role.phase, t, role)
        for m, asked in enumerate(case.services)
        for role in asked.roles
        for t in range(len(role.throughput))
    ]
    rooms = list(itertools.product(*(range(int(n) + 1) for n in supply.available)))
    size = np.array([int(kind.split(":")[1]) for kind in supply.kinds])
    gpu = np.array([kind.split(":")[0] for kind in supply.kinds])
    room_of = dict.fromkeys(set(gpu.tolist()), 0)
    for k, sizes in enumerate(supply.sizes):
        room_of[str(gpu[sizes[0][1]])] += int(supply.gpus[k] * supply.available[k])

    def fits(nodes: Ints) -> bool:
        return all((nodes * size)[gpu == name].sum() <= room for name, room in room_of.items())

    most = [
        next(n for n in range(99) if not fits((n + 1) * role.counts[t].astype(np.int64)))
        for _, _, t, role in items
    ]
    for numbers in itertools.product(*(range(n + 1) for n in most)):
        nodes = np.zeros(len(supply.kinds), np.int64)
        carried: Counter[tuple[int, int]] = Counter()
        hops, used = 0, set()
        for (m, phase, t, role), number in zip(items, numbers, strict=True):
            nodes += number * role.counts[t].astype(np.int64)
            rate = min(MOST, float(role.throughput[t]) / role.demand)
            carried[m, phase] += number * rate  # type: ignore[assignment]
            hops += number * (int(role.counts[t].sum()) - 1)
            used |= {(m, phase, t)} if number else set()
        if not fits(nodes):
            continue
        levels = [
            (carried[m, BOTH], min(carried[m, PREFILL], carried[m, DECODE]))
            for m in range(len(case.services))
        ]
        if any(both + apart < 1.0 for both, apart in levels):
            continue
        time = sum(slowdown(min(MOST, both + apart)) for both, apart in levels)
        apart = sum(both < 1.0 for both, _ in levels)
        for room in rooms:
            slices = _cut(case, nodes, room)
            if slices is not None:
                usd = float(supply.usd @ np.array(room))
                yield Found(used, usd, sum(room) + hops + len(used) + apart + slices, time, room)


def _cut(case: Case, nodes: Ints, room: tuple[int, ...]) -> int | None:
    """The fewest slices of cut machines that give these nodes; None where machines do not do."""
    supply = case.supply
    kinds = [(int(c), int(nodes[c])) for c in np.flatnonzero(nodes)]

    def give(at: int, left: tuple[int, ...]) -> int | None:
        if at == len(kinds):
            return 0
        kind, number = kinds[at]
        sources = [(k, s) for k, sizes in enumerate(supply.sizes) for s, c in sizes if c == kind]
        best: int | None = None
        for split in itertools.product(range(number + 1), repeat=len(sources)):
            if sum(split) != number:
                continue
            then = list(left)
            for (k, s), n in zip(sources, split, strict=True):
                then[k] -= n * s
            rest = give(at + 1, tuple(then)) if min(then) >= 0 else None
            if rest is not None:
                cut = sum(n for (k, s), n in zip(sources, split, strict=True) if s < supply.gpus[k])
                best = cut + rest if best is None else min(best, cut + rest)
        return best

    return give(0, tuple(int(b * g) for b, g in zip(room, supply.gpus, strict=True)))


def small_case(seed: int, *, owned: bool) -> Case:
    """One region, machines of one and two GPUs, one or two services with two or three layouts each."""
    rng = np.random.default_rng(seed)
    usd = [0.0 if owned and rng.random() < 0.7 else float(rng.uniform(0.5, 1.5)) for _ in range(3)]
    supply = supply_of(
        [
            (0, "A", 2, False, 2.0 * usd[0], int(rng.integers(1, 3)), False),
            (0, "A", 1, False, usd[1], int(rng.integers(0, 3)), False),
            (0, "B", 1, False, usd[2], int(rng.integers(1, 3)), False),
        ]
    )
    services = []
    for m in range(int(rng.integers(1, 3))):
        ways = (BOTH,) if m else [(BOTH,), (PREFILL, DECODE, BOTH)][int(rng.integers(2))]
        templates = {}
        for phase in ways:
            sets: list[dict[str, int]] = [{"A:1": 1}, {"A:2": 1}, {"B:1": 1}, {"A:1": 1, "B:1": 1}]
            some = rng.choice(len(sets), 1 if len(ways) > 1 else 2, replace=False)
            templates[phase] = [
                (sets[i], float(rng.uniform(0.4, 1.6)) * sum(sets[i].values())) for i in some
            ]
        services.append(service(f"m{m}", supply, float(rng.uniform(0.4, 1.2)), templates))
    return Case(tuple(services), supply)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing decides between equals, and nothing is near enough."""
    monkeypatch.setattr(simple_allocation, "_GAP", 1e-5)
    monkeypatch.setattr(simple_allocation, "_FASTER", 0.0)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("seed", seeds(18))
def test_no_allocation_within_the_cost_has_fewer_pieces(seed: int) -> None:
    case, simplicity = small_case(seed, owned=False), (0.02, 0.2, 0.6)[seed % 3]
    cheapest = solve(case)
    if cheapest.status != "optimal":
        assert not any(True for _ in enumerate_all(case))
        return
    found = solve_simply(case, cheapest, simplicity, blind=bool(seed % 2))
    every = list(enumerate_all(case))
    assert cheapest.objective == pytest.approx(min(one.usd for one in every))
    allowed = [one for one in every if one.usd <= cheapest.objective * (1.0 + simplicity) + 1e-6]
    fewest = min(one.pieces for one in allowed)
    assert pieces_of(case, found) == fewest
    # Of equally few the cheapest.
    least = min(one.usd for one in allowed if one.pieces == fewest)
    assert found.objective == pytest.approx(least, abs=1e-4 * least + 1e-9)
    assert found.bound <= cheapest.objective + 1e-9


@pytest.fixture
def let_in(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int, int]]:
    """Service, phase and template of what the second program may choose among, once it was asked."""
    seen: set[tuple[int, int, int]] = set()

    class Watched(simple_allocation._SpreadPieces):
        def __init__(self, wide: RentModel, let_in: list[Ints], *others: Any) -> None:
            for m, (items, some) in enumerate(zip(wide.items, let_in, strict=True)):
                own = zip(items.phase[some].tolist(), items.source[some].tolist(), strict=True)
                seen.update((m, phase, template) for phase, template in own)
            super().__init__(wide, let_in, *others)

    monkeypatch.setattr(simple_allocation, "_SpreadPieces", Watched)
    return seen


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("seed", range(100, 118))
def test_machines_that_cost_nothing_take_the_least_penalised_time(
    seed: int, let_in: set[tuple[int, int, int]]
) -> None:
    case, simplicity = small_case(seed, owned=True), (0.005, 0.02, 0.1)[seed % 3]
    cheapest = solve(case)
    if cheapest.status != "optimal" or case.supply.usd[case.supply.available > 0].min() > 0.0:
        return
    found = solve_simply(case, cheapest, simplicity, blind=bool(seed % 2))
    paid = case.supply.usd > 0.0
    rented = found.machines[paid]
    every = list(enumerate_all(case))
    max_usd = cheapest.objective * (1.0 + simplicity) + 1e-6
    fewest = min(one.pieces for one in every if one.usd <= max_usd)
    fair = [
        one
        for one in every
        if one.used <= let_in and np.all(np.array(one.machines)[paid] <= rented)
    ]
    # What may be chosen has the fewest pieces among it, and no instance is larger than there.
    few = [one for one in fair if one.pieces == fewest and one.usd <= max_usd]
    assert few
    best = min(one.time + simplicity * one.pieces for one in fair)
    value = times_of(case, found) + simplicity * pieces_of(case, found)
    assert value == pytest.approx(best, abs=1e-5)


def test_load_is_spread_over_more_instances_but_over_no_larger_ones() -> None:
    supply = supply_of([(0, "A", 1, False, 0.0, 2, False), (0, "B", 1, False, 0.0, 4, False)])
    sets = [({"A:1": 1}, 1.1), ({"A:1": 1, "B:1": 2}, 9.0)]
    case = Case((service("m", supply, 1.0, {BOTH: sets}),), supply)
    found = solve_simply(case, solve(case), 0.02)
    assert [(one.template, one.number) for one in found.instances] == [(0, 2)]
    # Unless nothing smaller serves it.
    case = replace(case, services=(service("m", supply, 5.0, {BOTH: sets}),))
    found = solve_simply(case, solve(case), 0.02)
    assert [(one.template, one.number) for one in found.instances] == [(1, 2)]


# Larger ones


@examples(8)
@given(
    seed=st.integers(0, 10_000),
    running=st.booleans(),
    pairs=st.booleans(),
    simplicity=st.sampled_from([0.02, 0.1]),
    limits=st.sampled_from([{}, {"spread": 2}, {"max_nodes": 6}]),
    free=st.booleans(),
)
def test_answers_are_simpler_within_their_cost_and_limits(
    seed: int, running: bool, pairs: bool, simplicity: float, limits: dict[str, float], free: bool
) -> None:
    case = random_case(seed, scarce=0.5, running=running, pairs=pairs)
    case = replace(case, limits=AllocationLimits(**limits))  # type: ignore[arg-type]
    if free:
        usd = np.where(np.arange(len(case.supply.usd)) % 2, case.supply.usd, 0.0)
        case = replace(case, supply=replace(case.supply, usd=usd))
    cheapest = solve(case)
    if cheapest.status != "optimal":
        return
    found = solve_simply(case, cheapest, simplicity)
    assert found.bound == pytest.approx(cheapest.bound, rel=1e-6, abs=1e-9)
    assert found.objective <= cheapest.objective * (1.0 + simplicity) * (1.0 + 1e-6) + 1e-6
    if case.supply.usd[case.supply.available > 0].min() > 0.0:
        assert pieces_of(case, found) <= pieces_of(case, cheapest)
    # What is more than 0.1 % dearer than the bound is not called optimal.
    assert (found.status == "optimal") <= (found.gap <= 1e-3)


def test_an_answer_is_the_same_each_time() -> None:
    case = random_case(3, scarce=0.5, running=True, regions=2)
    cheapest = solve(case)
    one, other = (solve_simply(case, cheapest, 0.1) for _ in range(2))
    assert one.instances == other.instances
    assert one.slices == other.slices
    assert one.statistics == other.statistics


def test_what_runs_is_rebuilt_only_where_that_spares_more_than_it_starts() -> None:
    supply = supply_of([(0, "A", 1, False, 1.0, 4, False), (0, "B", 1, False, 2.0, 1, False)])
    asked = service("m", supply, 2.0, {BOTH: [({"A:1": 1}, 1.0), ({"B:1": 1}, 2.0)]})
    two = RunningColumn(0, BOTH, 0, ((0, 1),), 2, 1.0, ((0, 1),))
    case = Case((asked,), supply, running=(two,))
    fresh = replace(case, running=())
    # One machine instead of two spares one piece, and starting it is one.
    assert solve_simply(fresh, solve(fresh), 0.02).machines.tolist() == [0, 1]
    assert solve_simply(case, solve(case), 0.02).machines.tolist() == [2, 0]


def test_many_items_are_narrowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    supply = supply_of([(0, "A", 1, False, 1.0, 9, False), (0, "B", 1, False, 3.03, 2, False)])
    sets = [({"A:1": 1}, 1.0), ({"A:1": 2}, 2.05), ({"B:1": 1}, 3.0)]
    case = Case((service("m", supply, 3.0, {BOTH: sets}),), supply)
    cheapest = solve(case)
    assert cheapest.machines.tolist() == [3, 0]
    monkeypatch.setattr(simple_allocation, "MAX_ITEMS", 1)
    assert solve_simply(case, cheapest, 0.02).machines.tolist() == [0, 1]
    assert solve_simply(case, cheapest, 0.005).machines.tolist() == [3, 0]


@pytest.mark.parametrize("dearer", [(2.03, 2.01), (2.01, 2.03)])
def test_of_equally_simple_ones_the_cheapest_is_taken(dearer: tuple[float, float]) -> None:
    offers = [(0, gpu, 1, False, usd, 2, False) for gpu, usd in zip("BC", dearer, strict=True)]
    supply = supply_of([(0, "A", 1, False, 1.0, 4, False), *offers])
    sets = [({"A:1": 1}, 1.0), ({"B:1": 1}, 2.0), ({"C:1": 1}, 2.0)]
    case = Case((service("m", supply, 2.0, {BOTH: sets}),), supply)
    found = solve_simply(case, solve(case), 0.02)
    assert found.machines[0] == 0
    assert found.objective == pytest.approx(2.01)
