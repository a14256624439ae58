"""A valid plan on machines cut into slices, with one thing broken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.validate.check import validate, validate_structure
from atoll.solve.assembly import NewInstance
from tests.plan.boxes import BOX, CHOSEN, USD, boxes, problem
from tests.plan.builders import (
    EAST,
    WEST,
    catalog,
    edit,
    edit_node,
    few,
    find,
    plan_of,
    rules,
    service,
)

PREFILL, DECODE = "chat-prefill-0", "chat-decode-0"


def test_slices_by_hand() -> None:
    asked, made = boxes()
    assert rules(made, asked) == set()
    assert made.count_nodes() == {(EAST, BOX, "on-demand"): 2, (EAST, "L40S:1", "on-demand"): 1}
    assert made.nodes == 3
    assert made.gpus == 16
    assert made.usd_per_hour == pytest.approx(2 * USD + 2.5)
    assert made.idle_usd == pytest.approx(USD / 8)
    own = find(made, PREFILL)
    assert own.usd_per_hour == pytest.approx(USD / 4)
    assert (own.nodes[0].slot, own.nodes[0].gpu_ids) == (0, (4, 5))
    assert own.nodes[0].kind == "L40S:2"
    assert find(made, DECODE).nodes[0].gpu_ids == (0, 1, 2, 3)
    whole = find(made, "chat-both-2").nodes[0]
    assert (whole.slot, whole.gpu_ids, whole.node_type) == (None, None, BOX)


@few
@given(
    st.lists(st.sampled_from(CHOSEN), max_size=12),
    st.sampled_from(("auto", "apart", "together")),
    st.floats(0, 500),
)
def test_the_validator_accepts_what_assembly_builds(
    chosen: list[NewInstance], phases: str, rate: float
) -> None:
    asked = problem(
        services=(service(phases=phases, rate_per_s=rate),),
        offers=[o.model_copy(update={"available": 12}) for o in problem().offers],
    )
    roles = set(map(str, asked.roles))
    made = plan_of(asked, *(choice for choice in chosen if choice.role in roles))
    assert validate(made, asked, catalog()) == []
    again = plan_of(asked.replace(running=made.instances), *chosen[:0], kept=made.instances)
    assert [i.nodes for i in again.instances] == [i.nodes for i in made.instances]
    assert all(i.kept for i in again.instances)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (PREFILL, {"gpu_ids": (3, 4)}),  # one of decode's
        (PREFILL, {"gpu_ids": (4, 4)}),
        (PREFILL, {"gpu_ids": (7, 8)}),  # a machine of eight has no GPU 8
        (PREFILL, {"slot": 3}),  # of three machines
        (PREFILL, {"slot": None}),
        (PREFILL, {"gpu_ids": (4, 5, 7)}),  # three is no size
        ("chat-both-2", {"slot": 1}),
    ],
)
def test_a_slice_that_cannot_be(name: str, changes: dict[str, object]) -> None:
    asked, made = boxes()
    assert "slice" in rules(edit_node(made, name, "n0", **changes), asked)


def test_overlaps_are_seen_without_the_problem() -> None:
    _, made = boxes()
    broken = edit_node(made, PREFILL, "n0", gpu_ids=(0, 1))
    assert {v.rule for v in validate_structure(broken)} == {"slice"}
    elsewhere = edit_node(made, PREFILL, "n0", slot=1, gpu_ids=(0, 1))
    assert validate_structure(elsewhere) == []


def test_another_machine_has_to_be_paid() -> None:
    asked, made = boxes()
    elsewhere = edit_node(made, PREFILL, "n0", slot=1, gpu_ids=(0, 1))
    assert rules(elsewhere, asked) == {"cost"}


def test_machines_that_are_not_cut() -> None:
    asked, made = boxes()
    broken = edit(made, PREFILL, region=WEST)
    found = [v for v in validate(broken, asked, catalog()) if v.rule == "slice"]
    assert [v.message for v in found] == ["2 GPUs, and L40S:8 is not cut"]


def test_a_slice_costs_its_share() -> None:
    asked, made = boxes()
    dear = edit(made, PREFILL, usd_per_hour=USD)
    assert rules(dear, asked) == {"cost"}
    assert {v.rule for v in validate_structure(dear)} == {"cost"}  # more than the plan


def test_more_machines_than_there_are() -> None:
    asked, made = boxes()
    few_boxes = [o.model_copy(update={"available": 1}) for o in asked.offers]
    found = {
        v.rule
        for v in validate(made, asked.replace(offers=few_boxes), catalog(), same_problem=False)
    }
    assert found == {"availability"}


def test_a_slice_may_be_pinned_and_split_on_its_own() -> None:
    asked, made = boxes()
    there = asked.replace(services=(service(phases="auto", avoid=("L40S:2",)),))
    found = [v for v in validate(made, there, same_problem=False) if v.rule == "pinning"]
    assert [v.where for v in found] == [f"{PREFILL} n0"]
    assert "memory" in rules(edit_node(made, PREFILL, "n0", tp=4), asked)  # it has two GPUs


def test_nodes_of_a_rented_instance_stand_in_one_region() -> None:
    asked, made = boxes()
    assert "region" in rules(edit_node(made, "chat-both-2", "n0", region=WEST), asked)


@pytest.mark.parametrize("goal", ["max-flow", "sustained", "fair"])
def test_rented_nodes_are_for_cost(goal: str) -> None:
    asked, made = boxes()
    assert "goal" in rules(made.model_copy(update={"goal": goal}), asked)


def test_optimal_means_within_a_thousandth() -> None:
    asked, made = boxes()
    assert made.objective is not None
    for share, allowed in ((0.9995, True), (0.998, False)):
        bound = made.objective * share
        proven = made.model_copy(update={"bound": bound, "gap": 1 - share, "status": "optimal"})
        assert rules(proven, asked) == (set() if allowed else {"status"})
        built = plan_of(asked, *CHOSEN, bound=bound, status="optimal")
        assert built.status == ("optimal" if allowed else "feasible")


def test_a_status_that_the_demand_contradicts() -> None:
    asked, made = boxes()
    assert rules(made.model_copy(update={"status": "partial"}), asked) == {"status"}
    busy = asked.replace(services=(service(phases="auto", rate_per_s=1e6),))
    short = plan_of(busy, *CHOSEN)
    assert short.status == "partial"
    assert rules(short, busy) == set()
    assert rules(short.model_copy(update={"status": "feasible"}), busy) == {"status", "demand"}
