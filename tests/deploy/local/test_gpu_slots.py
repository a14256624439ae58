"""Who gets which GPU: never two the same one, all of an instance or nothing."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.deploy.local.gpu_slots import (
    HeldSlots,
    PoolMachine,
    SlotRequest,
    allocate_slots,
    find_machines,
    list_offers,
    pretend_machines,
    visible_devices,
)
from atoll.plan.problem import Offer
from atoll.runtime.join import hardware
from atoll.runtime.join.hardware import GpuDevice

BOX = PoolMachine(name="box", node_type="L40S:8", gpu_ids=(8, 9, 10, 11, 12, 13, 14, 15))
machines = st.lists(
    st.builds(
        lambda gpu, count, number: (gpu, count, number),
        st.sampled_from(["L4", "L40S"]),
        st.sampled_from([1, 2, 4, 8]),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda each: each[2],
).map(
    lambda rows: [
        PoolMachine(name=f"m{number}", node_type=f"{gpu}:{count}") for gpu, count, number in rows
    ]
)
requests = st.lists(
    st.builds(
        SlotRequest,
        st.sampled_from(["n0", "n1", "n2"]),
        st.sampled_from(["L4:1", "L4:4", "L40S:2", "L40S:8"]),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([None, "m0", "m1", "elsewhere"]),
    ),
    min_size=1,
    max_size=3,
)


@given(machines, st.lists(st.tuples(requests, st.booleans()), max_size=12))
def test_no_gpu_is_given_twice(
    pool: list[PoolMachine], orders: list[tuple[list[SlotRequest], bool]]
) -> None:
    by_name = {machine.name: machine for machine in pool}
    status: list[tuple[HeldSlots, ...]] = []
    for wanted, leaves in orders:
        if leaves and status:
            status.pop(0)
        held = [each for instance in status for each in instance]
        given_slots = allocate_slots(pool, held, wanted)
        if isinstance(given_slots, SlotRequest):
            free = sum(machine.slots for machine in pool) - sum(len(each.slots) for each in held)
            # Refused only where something is missing; an empty pool of the right kind takes a small order.
            assert given_slots in wanted
            alike = [
                m
                for m in pool
                if m.node_type.split(":")[0] == given_slots.node_type.split(":")[0]
                and given_slots.host in (None, "elsewhere", m.name, *({"m0", "m1"} - set(by_name)))
            ]
            assert (
                free < sum(m.slots for m in pool)
                or len(wanted) > 1
                or not any(m.slots >= given_slots.gpus for m in alike)
            )
            continue
        status.append(given_slots)
        taken = [
            (each.machine, slot) for instance in status for each in instance for slot in each.slots
        ]
        assert len(set(taken)) == len(taken)
        for want, got in zip(wanted, given_slots, strict=True):
            machine = by_name[got.machine]
            assert got.node == want.node
            assert len(got.slots) == want.gpus
            assert all(0 <= slot < machine.slots for slot in got.slots)
            assert machine.node_type.split(":")[0] == want.node_type.split(":")[0]
            assert want.host not in by_name or got.machine == want.host


@given(machines, requests)
def test_the_order_of_machines_changes_nothing(
    pool: list[PoolMachine], wanted: list[SlotRequest]
) -> None:
    mixed = list(reversed(pool))
    assert allocate_slots(pool, [], wanted) == allocate_slots(mixed, [], wanted)


def test_slices_lie_side_by_side_and_are_seen_as_the_driver_counts_them() -> None:
    held = [HeldSlots(node="n0", machine="box", slots=(0,))]
    given_slots = allocate_slots([BOX], held, [SlotRequest("n0", "L40S:8", 4)])
    assert not isinstance(given_slots, SlotRequest)
    assert given_slots[0].slots == (4, 5, 6, 7)
    shown = visible_devices(BOX, given_slots[0].slots)
    assert shown == {"CUDA_VISIBLE_DEVICES": "12,13,14,15", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert visible_devices(BOX.model_copy(update={"gpu_ids": None}), (0,)) == {}


def test_all_of_an_instance_or_nothing() -> None:
    wanted = [SlotRequest("n0", "L40S:8", 4), SlotRequest("n1", "L40S:8", 8)]
    assert allocate_slots([BOX], [], wanted) == wanted[0]
    assert allocate_slots([BOX], [], [SlotRequest("n0", "H100:1", 1)]) == SlotRequest(
        "n0", "H100:1", 1
    )


def test_offers_count_machines_and_machines_stand_for_offers() -> None:
    offer = Offer(region="here", node_type="CORE-S:1", available=2, usd_per_hour=0.5)
    pool = pretend_machines([offer])
    assert len({machine.name for machine in pool}) == 2
    (seen,) = list_offers(pool)
    assert (seen.node_type, seen.region, seen.available) == ("CORE-S:1", "here", 2)
    assert (seen.usd_per_hour, seen.market) == (0.5, "owned")


def test_the_gpus_that_the_driver_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [GpuDevice(5, "L4", 1), GpuDevice(7, "L4", 1)]
    monkeypatch.setattr(hardware, "list_gpus", lambda: tuple(gpus))
    (machine,) = find_machines()
    assert (machine.node_type, machine.gpu_ids) == ("L4:2", (5, 7))
    gpus.insert(1, GpuDevice(6, "L40S", 1))
    found = {machine.node_type: machine.gpu_ids for machine in find_machines()}
    assert found == {"L4:2": (5, 7), "L40S:1": (6,)}
    gpus.clear()
    assert find_machines() == ()


def test_shares_of_a_gpu_are_given_until_it_is_full_and_then_the_next_one() -> None:
    half = SlotRequest("n0", "L40S/2:2", 1)
    held: list[HeldSlots] = []
    for _ in range(4):
        given_slots = allocate_slots([BOX], held, [half])
        assert not isinstance(given_slots, SlotRequest)
        held += given_slots
    assert [(each.slots, each.shares) for each in held] == [
        ((0,), 2),
        ((0,), 2),
        ((1,), 2),
        ((1,), 2),
    ]
    assert visible_devices(BOX, held[-1].slots)["CUDA_VISIBLE_DEVICES"] == "9"
    # One that wants a GPU for itself gets none that has a share given, and the other way round.
    (whole,) = _given(allocate_slots([BOX], held[:1], [SlotRequest("n0", "L40S:8", 1)]))
    assert whole.slots == (1,)
    (part,) = _given(allocate_slots([BOX], [whole], [half]))
    assert part.slots == (0,)
    one = PoolMachine(name="one", node_type="L40S:1", gpu_ids=(0,))
    full = [each.model_copy(update={"machine": "one"}) for each in held[:2]]
    assert allocate_slots([one], full, [half]) == half


def _given(found: tuple[HeldSlots, ...] | SlotRequest) -> tuple[HeldSlots, ...]:
    assert not isinstance(found, SlotRequest)
    return found


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.booleans()), max_size=40))
def test_shares_of_a_gpu_never_add_up_to_more_than_it(orders: list[tuple[int, bool]]) -> None:
    machine = PoolMachine(name="box", node_type="L40S:2", gpu_ids=(0, 1))
    held: list[HeldSlots] = []
    for shares, leaves in orders:
        if leaves and held:
            held.pop(0)
        kind = "L40S:1" if shares == 1 else f"L40S/{shares}:1"
        found = allocate_slots([machine], held, [SlotRequest("n0", kind, 1)])
        if not isinstance(found, SlotRequest):
            held += found
        for slot in (0, 1):
            taken = [Fraction(1, each.shares) for each in held if slot in each.slots]
            assert sum(taken) <= 1
            if isinstance(found, SlotRequest):
                assert sum(taken) + Fraction(1, shares) > 1
