from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InternalError
from atoll.perf.memory_model import position_of
from atoll.plan.capacities import node_capacity
from atoll.plan.plan import Flow, Node
from atoll.solve.assembly import (
    NewInstance,
    Source,
    assemble,
    build_instance,
    infeasible,
    is_stage_layout,
    keep,
    node_capacities,
    plan_from_layouts,
    relative_gap,
)
from tests.plan.builders import (
    BOUND,
    CHOSEN,
    EAST,
    LAYERS,
    OFFERS,
    SERVICES,
    WEST,
    catalog,
    few,
    find,
    layout,
    plan_of,
    problem,
    rent,
    rules,
    service,
    small,
)


def test_flows_split_by_capacity_and_meet_the_weakest_stage() -> None:
    asked, made = small()
    own = find(made, "chat-prefill-0")
    spec = catalog().model("llama-3.1-8b").llm
    limits = {
        node.id: node_capacity(
            asked,
            catalog(),
            SERVICES[0],
            "chat/llm/prefill",
            node.node_type,
            node.layers,
            2,
            position_of(spec, node.start, node.end),
            region=EAST,
        )
        for node in own.nodes
    }
    assert limits == node_capacities(asked, catalog(), own)
    first = limits["n0"] + limits["n1"]
    assert own.throughput_per_s == pytest.approx(min(first, limits["n2"]))
    flow = {(f.src, f.dst): f.per_s for f in own.flows}
    assert flow["source", "n0"] == pytest.approx(own.throughput_per_s * limits["n0"] / first)
    assert flow["n1", "n2"] == pytest.approx(flow["source", "n1"])
    assert flow["n2", "sink"] == pytest.approx(own.throughput_per_s)
    assert len(flow) == 5


kinds = st.lists(st.sampled_from(("L4:1", "L40S:1", "A10G:1")), min_size=1, max_size=2)


@few
@given(st.lists(kinds, min_size=1, max_size=4), st.data())
def test_any_layout_gives_a_valid_plan(stages: list[list[str]], data: st.DataObject) -> None:
    cuts = data.draw(
        st.lists(
            st.integers(1, LAYERS - 1),
            min_size=len(stages) - 1,
            max_size=len(stages) - 1,
            unique=True,
        )
    )
    bounds = list(itertools.pairwise([0, *sorted(cuts), LAYERS]))
    own = layout(*((a, b, tuple(nodes)) for (a, b), nodes in zip(bounds, stages, strict=True)))
    offers = [
        o.model_copy(update={"available": 9})
        for o in OFFERS
        if (o.region, o.market) != (EAST, "spot")
    ]
    asked = problem(services=[service("chat", rate_per_s=0.001)], offers=offers)
    role = data.draw(st.sampled_from(("chat/llm/prefill", "chat/llm/decode")))
    made = plan_of(asked, NewInstance(role, EAST, own))
    # Too little memory or time for a stage leaves the instance without flow.
    assert rules(made, asked) <= {"memory"}
    (instance,) = made.instances
    assert (instance.throughput_per_s > 0) == bool(instance.flows)
    assert made.status == "partial"  # the other role has no instance


@few
@given(st.permutations(CHOSEN))
def test_the_order_of_the_choice_changes_nothing(chosen: list[NewInstance]) -> None:
    asked, made = small()
    again = plan_of(asked, *chosen, status="optimal", bound=BOUND)
    assert again == made


def test_markets_are_given_out_owned_first_and_spot_last() -> None:
    offers = (*OFFERS, OFFERS[2].model_copy(update={"region": WEST}))
    asked = problem(offers=offers)
    rented = rent("spot", L40S=1) | rent("owned", L40S=2)
    choice = NewInstance(
        "chat/llm/decode",
        WEST,
        layout((0, 16, ("L40S:1", "L40S:1")), (16, 32, ("L40S:1",))),
        rented,
    )
    own = build_instance(asked, catalog(), choice, id="x")
    assert [node.market for node in own.nodes] == ["owned", "owned", "spot"]
    assert own.usd_per_hour == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("rented", "text"),
    [
        (None, "from 2 offers"),
        (rent("spot", L40S=2), "more nodes rented"),
        (rent(L4=1), "no L40S:1 left"),
        (rent("owned", L40S=1), "not on offer"),
        ({("L40S:1", "L4:8", "on-demand"): 1}, "no part of L4:8"),
    ],
)
def test_a_choice_that_cannot_be(rented: dict[Source, int] | None, text: str) -> None:
    choice = NewInstance("chat/llm/decode", EAST, layout((0, 32, ("L40S:1",))), rented)
    with pytest.raises(InternalError, match=text):
        plan_of(problem(), choice)


def test_kept_instances_keep_their_ids_and_cost_no_start() -> None:
    asked, made = small()
    renamed = [
        i.model_copy(update={"id": f"old-{n}"}) for n, i in enumerate(made.instances) if n != 1
    ]
    running = asked.replace(running=renamed)
    again = plan_of(running, *CHOSEN)
    assert {i.id for i in again.instances if i.kept} == {"old-0", "old-2", "old-3", "old-4"}
    (fresh,) = (i for i in again.instances if not i.kept)
    assert again.init_usd == pytest.approx(0.1 * fresh.usd_per_hour)
    assert rules(again, running) == set()


def test_new_ids_are_not_those_of_anything_that_runs() -> None:
    asked, made = small()
    stopped = find(made, "chat-decode-0").model_copy(update={"region": "elsewhere"})
    again = plan_of(asked.replace(running=[stopped]), *CHOSEN)
    assert [i.id for i in again.of_role("chat/llm/decode")] == ["chat-decode-1", "chat-decode-2"]


def test_instances_can_be_kept_by_hand() -> None:
    asked, made = small()
    running = asked.replace(running=made.instances)
    again = plan_from_layouts(
        running, catalog(), (), kept=made.instances, status="feasible", solver="s"
    )
    assert [(i.id, i.kept) for i in again.instances] == [(i.id, True) for i in made.instances]
    assert again.init_usd == 0.0
    assert rules(again, running) == set()


def test_a_kept_instance_is_seen_as_the_new_problem_sees_it() -> None:
    asked, made = small()
    own = find(made, "chat-prefill-0")
    tighter = asked.replace(services=(service("chat", ttft_s=0.5), SERVICES[1]))
    kept = keep(tighter, catalog(), own)
    assert kept.kept
    assert kept.nodes == own.nodes
    assert 0 <= kept.throughput_per_s < own.throughput_per_s


def test_a_kept_placement_is_scaled_to_what_its_nodes_carry() -> None:
    asked, made = small()
    nodes = tuple(
        Node(id=n, node_type="L40S:1", market="on-demand", start=a, end=b, tp=1)
        for n, a, b in (("n0", 0, 20), ("n1", 12, LAYERS))
    )
    ways = (("source", "n0"), ("n0", "n1"), ("n1", "sink"))
    flows = tuple(Flow(src=a, dst=b, per_s=1e9) for a, b in ways)
    own = find(made, "chat-prefill-0").model_copy(
        update={"nodes": nodes, "flows": flows, "partial": True, "throughput_per_s": 1e9}
    )
    assert not is_stage_layout(own)
    kept = keep(asked, catalog(), own)
    weakest = min(node_capacities(asked, catalog(), own).values())
    assert kept.throughput_per_s == pytest.approx(weakest)
    assert {f.per_s for f in kept.flows} == {kept.throughput_per_s}


def test_status_follows_the_demand() -> None:
    asked, made = small()
    assert made.status == "optimal"
    short = assemble(asked, made.instances[:1], status="optimal", solver="s", bound=0.0)
    assert short.status == "partial"
    assert short.served_fraction["mini"] == 0.0
    assert rules(short, asked) == set()


def test_the_empty_answer() -> None:
    asked, _ = small()
    none = infeasible(asked, solver="s", reasons=["no L4 anywhere"])
    assert none.status == "infeasible"
    assert none.objective is None
    assert rules(none, asked) == set()


@pytest.mark.parametrize(
    ("objective", "bound", "gap"),
    [(10.0, 9.0, 0.1), (10.0, 10.0, 0.0), (0.0, 0.0, 0.0), (None, 1.0, None), (5.0, None, None)],
)
def test_gap(objective: float | None, bound: float | None, gap: float | None) -> None:
    assert relative_gap(objective, bound) == (None if gap is None else pytest.approx(gap))


def test_a_bound_a_hair_too_high_is_lowered() -> None:
    asked, made = small()
    assert made.objective is not None
    high = assemble(
        asked, made.instances, status="optimal", solver="s", bound=made.objective * (1 + 1e-12)
    )
    assert high.bound == high.objective
    assert high.gap == 0.0
