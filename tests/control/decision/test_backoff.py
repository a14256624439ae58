"""Waiting after failures, and hosts that keep dying."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from atoll.control.decision.backoff import count_failures, hold_back
from atoll.control.decision.control_view import Memory, adopt_running
from atoll.deploy.target import FailureKind, InstanceState
from tests.control.world import POLICY, World, instance, problem

KEY = ("us-east", "L40S:1", "on-demand")


def fail(world: World, name: str, kind: FailureKind = "capacity", host: str | None = None) -> None:
    world.put(instance(name), "failed")
    seen = world.observed[name]
    hosts = () if host is None else (host,)
    status = replace(seen.status, kind=kind, reason="there is none", hosts=hosts)
    world.observed[name] = replace(seen, status=status)


def test_each_failure_waits_twice_as_long_and_counts_once() -> None:
    world, memory = World(problem()), Memory()
    waits = []
    for k in range(6):
        fail(world, f"a{k}")
        memory, lost = count_failures(world.view(), memory, POLICY)
        assert [one.id for one in lost] == [f"a{k}"]
        (held,) = memory.backoffs
        waits.append(held.until_s - world.time_s)
        assert hold_back(memory, world.time_s, POLICY).blocks(instance("b"))
        assert not hold_back(memory, world.time_s, POLICY).blocks(instance("b", node_type="H100:1"))
        again, lost = count_failures(world.view(), memory, POLICY)
        assert (again, lost) == (memory, ())
        world.time_s = held.until_s
        assert not hold_back(memory, world.time_s, POLICY).blocks(instance("b"))
    assert waits == [60.0, 120.0, 240.0, 480.0, 480.0, 480.0]


def test_what_served_is_replaced_at_once_and_waits_when_it_dies_again() -> None:
    world, memory, waits = World(problem()), Memory(), []
    for k in range(4):
        name = f"a{k}"
        world.put(instance(name))
        memory, _ = count_failures(world.view(), memory, POLICY)
        world.time_s += 5.0
        fail(world, name)
        memory, lost = count_failures(world.view(), memory, POLICY)
        assert [one.id for one in lost] == [name]
        (held,) = memory.backoffs
        waits.append(held.until_s - world.time_s)
        world.time_s = held.until_s
    assert waits == [0.0, 60.0, 0.0, 60.0]


def test_several_that_fail_together_are_one_failure() -> None:
    world = World(problem())
    for k in range(5):
        fail(world, f"a{k}")
    memory, lost = count_failures(world.view(), Memory(), POLICY)
    assert len(lost) == 5
    assert [held.failures for held in memory.backoffs] == [1]


def test_something_ready_ends_it_and_so_does_time() -> None:
    world = World(problem())
    fail(world, "a")
    memory, _ = count_failures(world.view(), Memory(), POLICY)
    world.time_s += 61.0
    world.put(instance("b"))
    mended, _ = count_failures(world.view(), memory, POLICY)
    assert mended.backoffs == ()
    del world.observed["b"]
    world.time_s += 481.0
    assert count_failures(world.view(), memory, POLICY)[0].backoffs == ()


def test_a_bad_image_holds_the_service_back_everywhere() -> None:
    world = World(problem())
    fail(world, "a", "image")
    memory, _ = count_failures(world.view(), Memory(), POLICY)
    held = hold_back(memory, world.time_s, POLICY)
    assert held.blocks(instance("b", node_type="H100:1"))
    assert not held.blocks(instance("b", role="code/llm/both"))


def test_what_was_told_to_end_is_no_failure_and_what_vanishes_is() -> None:
    world = World(problem())
    world.put(instance("a"))
    world.put(instance("b"), "draining")
    memory, _ = count_failures(world.view(), Memory(), POLICY)
    world.lose("a")
    world.lose("b")
    after, lost = count_failures(world.view(), memory, POLICY)
    assert lost == ()
    assert after.backoffs == ()


def test_a_host_that_dies_thrice_in_a_row_is_set_aside_until_it_lives() -> None:
    world, memory = World(problem()), Memory()
    for k in range(3):
        assert not hold_back(memory, world.time_s, POLICY).hosts
        fail(world, f"a{k}", "memory", host="h1")
        memory, _ = count_failures(world.view(), memory, POLICY)
    held = hold_back(memory, world.time_s, POLICY)
    assert held.hosts == {"h1"}
    assert held.blocks(instance("b", host="h1", node_type="H100:1"))
    world.put(instance("c"))
    seen = world.observed["c"]
    world.observed["c"] = replace(seen, status=replace(seen.status, hosts=("h1",)))
    world.time_s += POLICY.settled_s
    memory, _ = count_failures(world.view(), memory, POLICY)
    assert not hold_back(memory, world.time_s, POLICY).hosts


def test_what_somebody_else_ends_is_lost_when_that_begins_and_told_why_when_it_has_ended() -> None:
    world, memory = World(problem()), Memory()
    world.put(instance("a"))
    memory, _ = count_failures(
        world.view(), replace(memory, plan=adopt_running(problem(), world.view().instances)), POLICY
    )

    def see(state: InstanceState, reason: str, kind: FailureKind | None = None) -> list[str]:
        nonlocal memory
        seen = world.observed["a"]
        status = replace(seen.status, state=state, reason=reason, kind=kind)
        world.observed["a"] = replace(seen, status=status)
        memory, lost = count_failures(world.view(), memory, POLICY)
        return [one.reason for one in lost]

    assert see("draining", "is ending") == ["is ending"]
    assert see("draining", "is ending") == []
    assert see("gone", "was cancelled", "ended") == ["was cancelled"]
    assert see("gone", "was cancelled", "ended") == []
    assert memory.backoffs == ()


def test_what_somebody_ended_is_not_held_back() -> None:
    world = World(problem())
    world.put(instance("a"))
    memory = Memory(plan=adopt_running(problem(), world.view().instances))
    memory, _ = count_failures(world.view(), memory, POLICY)
    seen = world.observed["a"]
    gone = replace(seen.status, state="gone", reason="was cancelled", kind=None, hosts=("h1",))
    world.observed["a"] = replace(seen, status=gone)
    memory, lost = count_failures(world.view(), memory, POLICY)
    assert [one.reason for one in lost] == ["was cancelled"]
    assert (memory.backoffs, memory.deaths) == ((), ())


def test_a_host_that_was_set_aside_is_tried_again_later() -> None:
    world, memory = World(problem()), Memory()
    for k in range(3):
        fail(world, f"a{k}", "ended", host="h1")
        memory, _ = count_failures(world.view(), memory, POLICY)
    died_s = world.time_s
    assert hold_back(memory, died_s + POLICY.set_aside_s - 1.0, POLICY).hosts == {"h1"}
    assert not hold_back(memory, died_s + POLICY.set_aside_s, POLICY).hosts
    fail(world, "again", "ended", host="h1")
    memory, _ = count_failures(world.view(), memory, POLICY)
    assert hold_back(memory, world.time_s, POLICY).hosts == {"h1"}


def test_no_more_than_half_of_the_machines_are_set_aside() -> None:
    world, memory = World(problem()), Memory()
    for k in range(4):
        for host in ("h1", "h2", "h3")[: 3 if k < 3 else 2]:
            fail(world, f"{host}-{k}", "ended", host=host)
        memory, _ = count_failures(world.view(), memory, POLICY)
    assert hold_back(memory, world.time_s, POLICY, 1).hosts == set()
    assert hold_back(memory, world.time_s, POLICY, 4).hosts == {"h1", "h2"}
    assert hold_back(memory, world.time_s, POLICY, 6).hosts == {"h1", "h2", "h3"}


def test_a_host_is_not_blamed_for_a_missing_image() -> None:
    world, memory = World(problem()), Memory()
    for k in range(5):
        fail(world, f"a{k}", "image", host="h1")
        memory, _ = count_failures(world.view(), memory, POLICY)
    assert memory.deaths == ()


@given(st.lists(st.sampled_from(("capacity", "image", "memory")), min_size=1, max_size=20))
def test_waits_never_exceed_the_longest(kinds: list[FailureKind]) -> None:
    world, memory = World(problem()), Memory()
    for k, kind in enumerate(kinds):
        fail(world, f"a{k}", kind)
        memory, _ = count_failures(world.view(), memory, POLICY)
        longest = world.time_s + POLICY.backoff_max_s
        assert all(held.until_s <= longest for held in memory.backoffs)
        world.time_s += 100.0
