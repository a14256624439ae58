"""Slices of machines: everything that adds up fits, and what runs stays where it is."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InternalError
from atoll.plan.plan import Flow, Instance, Node, Plan, count_machines
from atoll.plan.problem import Limits, Offer, Problem, Settings, slices_of
from atoll.plan.validate.validate_machines import check_gpus, check_offers
from atoll.solve.packing import pack, rent
from tests.plan.builders import EAST, offer, service

USD = 8.0


def problem(
    available: int, gpus: int = 8, limits: dict[str, object] | None = None, penalty: float = 10.0
) -> Problem:
    """Machines of eight; to start an instance anew is dear unless said otherwise."""
    offers: list[Offer] = [
        offer(EAST, f"L40S:{gpus}", USD, available=available),
        offer(EAST, f"L40S:{gpus}", USD / 2, available=available, market="spot"),
    ]
    return Problem(
        name="boxes",
        services=(service(),),
        offers=tuple(offers),
        limits=Limits.model_validate(limits or {}),
        settings=Settings(init_penalty=penalty),
    )


def slice_of(
    name: str, size: int, *, gpus: int = 8, slot: int | None = None, first: int = 0
) -> Instance:
    """An instance on one slice; one with a slot runs there already."""
    whole = size == gpus and slot is None
    node = Node(
        id="n0",
        node_type=f"L40S:{gpus}",
        market="on-demand",
        start=0,
        end=32,
        tp=1,
        slot=slot,
        gpu_ids=None if whole else tuple(range(first, first + size)),
    )
    return Instance(
        id=name,
        service="chat",
        role="chat/llm/prefill",
        region=EAST,
        stages=1,
        nodes=(node,),
        flows=(Flow(src="source", dst="n0", per_s=1), Flow(src="n0", dst="sink", per_s=1)),
        throughput_per_s=1.0,
        usd_per_hour=USD * size / gpus,
        kept=slot is not None,
    )


def faults(asked: Problem, packed: tuple[Instance, ...]) -> list[str]:
    """What the validator says about machines and slices."""
    made = Plan(
        problem_hash="",
        problem_name="boxes",
        instances=packed,
        usd_per_hour=0.0,
        status="feasible",
        solver="by hand",
    )
    return [str(v) for v in (*check_gpus(made), *check_offers(made, asked))]


def placed(packed: tuple[Instance, ...]) -> dict[str, tuple[int | None, tuple[int, ...] | None]]:
    return {i.id: (i.nodes[0].slot, i.nodes[0].gpu_ids) for i in packed}


@given(st.sampled_from((2, 4, 6, 8, 12)), st.data())
def test_whatever_adds_up_fits(gpus: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from(slices_of(gpus)), min_size=1, max_size=20))
    needed = -(-sum(sizes) // gpus)
    asked = problem(needed, gpus)
    packed = pack(asked, [slice_of(f"x{n}", size, gpus=gpus) for n, size in enumerate(sizes)])
    assert faults(asked, packed) == []
    assert count_machines(packed).total() == needed
    assert [len(i.nodes[0].gpu_ids or range(gpus)) for i in packed] == sizes
    assert rent(asked, packed) == pytest.approx(USD * needed)


@st.composite
def running(draw: st.DrawFn, machines: int) -> list[Instance]:
    """Slices that lie aligned on machines of eight, with holes."""
    found: list[Instance] = []
    for slot in range(machines):
        at = 0
        while at < 8:
            size = draw(st.sampled_from([s for s in (1, 2, 4, 8) if at % s == 0]))
            if draw(st.booleans()):
                found.append(slice_of(f"old{len(found)}", size, slot=slot, first=at))
            at += size
    return found


@given(st.data())
def test_what_runs_stays_where_it_is_while_there_are_machines(data: st.DataObject) -> None:
    old = data.draw(running(3))
    sizes = data.draw(st.lists(st.sampled_from((1, 2, 4, 8)), max_size=12))
    new = [slice_of(f"new{n}", size) for n, size in enumerate(sizes)]
    asked = problem(3 + len(new))  # one for each, if need be
    packed = pack(asked, [*old, *new])
    assert faults(asked, packed) == []
    assert all(i.kept for i in packed if i.id.startswith("old"))
    before = placed(tuple(old))
    assert {name: place for name, place in placed(packed).items() if name in before} == before


@given(st.data())
def test_what_runs_moves_together_where_machines_are_short(data: st.DataObject) -> None:
    old = data.draw(running(3))
    sizes = data.draw(st.lists(st.sampled_from((1, 2, 4, 8)), max_size=12))
    new = [slice_of(f"new{n}", size) for n, size in enumerate(sizes)]
    needed = -(-sum(i.gpus for i in (*old, *new)) // 8)
    asked = problem(needed)
    packed = pack(asked, [*old, *new])
    assert faults(asked, packed) == []
    assert count_machines(packed).total() <= needed
    assert [i.gpus for i in packed] == [i.gpus for i in (*old, *new)]
    # Slices that stay together on a machine are kept, whatever its number is now.
    if needed >= 3 and not new:
        assert all(i.kept for i in packed)


@given(st.permutations([1, 1, 2, 4, 2, 1, 4, 8, 1]))
def test_the_order_given_changes_nothing(sizes: list[int]) -> None:
    names = Counter[int]()
    instances = []
    for size in sizes:
        names[size] += 1
        instances.append(slice_of(f"x{size}-{names[size]}", size))
    packed = placed(pack(problem(3), instances))
    assert packed == placed(pack(problem(3), sorted(instances, key=lambda i: i.id)))


def test_falling_sizes_into_the_first_gap_by_hand() -> None:
    old = slice_of("old", 1, slot=1, first=2)
    packed = pack(problem(4), [old, slice_of("a", 1), slice_of("b", 2), slice_of("c", 4)])
    assert placed(packed) == {
        "old": (1, (2,)),
        "c": (1, (4, 5, 6, 7)),
        "b": (1, (0, 1)),
        "a": (1, (3,)),
    }


def test_a_hole_costs_a_machine_more() -> None:
    old = [slice_of("p", 1, slot=0, first=0), slice_of("q", 1, slot=1, first=4)]
    packed = pack(problem(3), [*old, slice_of("new", 8)])
    assert count_machines(packed).total() == 3
    assert rent(problem(3), packed) == pytest.approx(3 * USD)
    assert all(i.kept for i in packed if i.id != "new")


@pytest.mark.parametrize(("penalty", "machines"), [(0.0, 2), (7.9, 2), (8.1, 3), (20.0, 3)])
def test_what_runs_moves_where_that_is_cheaper_than_a_machine(
    penalty: float, machines: int
) -> None:
    """To move a slice of one GPU costs the penalty times $1, a machine $8."""
    old = [slice_of("p", 1, slot=0, first=0), slice_of("q", 1, slot=1, first=4)]
    packed = pack(problem(3, penalty=penalty), [*old, slice_of("new", 8)])
    assert count_machines(packed).total() == machines
    assert [i.kept for i in packed] == [True, machines == 3, False]


def test_nothing_moves_for_nothing() -> None:
    old = [slice_of("p", 4, slot=0), slice_of("q", 4, slot=1), slice_of("r", 2, slot=1, first=6)]
    packed = pack(problem(3, penalty=0.0), old)
    assert placed(packed) == placed(tuple(old))
    assert all(i.kept for i in packed)


@pytest.mark.parametrize("limits", [{"budget_usd_per_hour": 2 * USD}, {"max_nodes": 2}])
def test_what_runs_moves_before_a_limit_is_broken(limits: dict[str, object]) -> None:
    old = [slice_of("p", 1, slot=0, first=0), slice_of("q", 1, slot=1, first=4)]
    asked = problem(3, limits=limits)
    packed = pack(asked, [*old, slice_of("new", 8)])
    assert count_machines(packed).total() == 2
    assert {i.id: i.kept for i in packed} == {"p": True, "q": False, "new": False}
    assert faults(asked, packed) == []


def test_machines_beyond_those_available_get_another_number() -> None:
    old = [slice_of("p", 2, slot=0), slice_of("q", 2, slot=5), slice_of("r", 2, slot=5, first=4)]
    packed = pack(problem(2), old)
    assert all(i.kept for i in packed)
    assert placed(packed) == {"p": (0, (0, 1)), "q": (1, (0, 1)), "r": (1, (4, 5))}


def test_running_slices_that_lie_on_each_other_are_taken_apart() -> None:
    old = [slice_of("p", 2, slot=0), slice_of("q", 2, slot=0)]
    packed = pack(problem(1), old)
    assert faults(problem(1), packed) == []
    assert {i.id: i.kept for i in packed} == {"p": True, "q": False}


def test_whole_machines_leave_less_to_cut() -> None:
    asked = problem(2)
    packed = pack(asked, [slice_of("w", 8), slice_of("a", 4), slice_of("b", 4)])
    assert count_machines(packed).total() == 2
    with pytest.raises(InternalError, match="more machines than are on offer"):
        pack(asked, [slice_of("w", 8), slice_of("a", 4), slice_of("b", 4), slice_of("c", 1)])
