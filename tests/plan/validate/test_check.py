"""A valid plan with one thing broken: the right rule must say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from atoll.core.ids import Phase
from atoll.plan.plan import Flow, Instance, Node, Plan, Route
from atoll.plan.problem import Problem, Settings
from atoll.plan.validate.check import InvalidPlanError, check, validate, validate_structure
from atoll.plan.validate.violation import Violation
from atoll.solve.assembly import node_capacities, plan_from_layouts
from tests.plan.builders import (
    BOUND,
    CHOSEN,
    EAST,
    LAYERS,
    OFFERS,
    SERVICES,
    WEST,
    catalog,
    edit,
    edit_flow,
    edit_node,
    few,
    find,
    offer,
    plan_of,
    problem,
    rent,
    rules,
    service,
    small,
    within,
)

PIPELINE = "chat-prefill-0"
IDS = [instance.id for instance in small()[1].instances]
any_instance = st.sampled_from(IDS)
factor = st.floats(1.001, 1e6)


def test_the_plan_made_by_hand_is_valid() -> None:
    asked, made = small()
    assert validate(made, asked, catalog()) == []
    assert validate(made, asked) == []
    check(made, asked)


def test_check_raises_with_every_violation() -> None:
    asked, made = small()
    broken = edit(made, "mini-both-0", region="nowhere", usd_per_hour=99.0)
    with pytest.raises(InvalidPlanError) as caught:
        check(broken, asked, catalog())
    assert caught.value.exit_code == 7
    assert {v.rule for v in caught.value.violations} >= {"name", "cost"}
    assert "\n" not in str(caught.value)


# Layers and hops


@few
@given(st.integers(1, 10))
def test_a_gap_in_the_layers(missing: int) -> None:
    asked, made = small()
    assert "layers" in rules(edit_node(made, PIPELINE, "n2", start=14 + missing), asked)


@few
@given(st.integers(1, 13))
def test_overlapping_stages(twice: int) -> None:
    asked, made = small()
    assert "layers" in rules(edit_node(made, PIPELINE, "n2", start=14 - twice), asked)


@few
@given(any_instance, st.integers(1, 12))
def test_the_last_layers_are_missing(name: str, missing: int) -> None:
    asked, made = small()
    last = find(made, name).nodes[-1]
    assert "layers" in rules(edit_node(made, name, last.id, end=last.end - missing), asked)


@few
@given(any_instance, st.integers(1, 50))
def test_more_layers_than_the_model_has(name: str, extra: int) -> None:
    asked, made = small()
    last = find(made, name).nodes[-1]
    assert "layers" in rules(edit_node(made, name, last.id, end=last.end + extra), asked)


@few
@given(any_instance, st.integers(1, 5))
def test_the_first_layers_are_missing(name: str, missing: int) -> None:
    asked, made = small()
    assert "layers" in rules(edit_node(made, name, "n0", start=missing), asked)


def test_a_way_that_leaves_early() -> None:
    asked, made = small()
    flows = (*find(made, PIPELINE).flows, Flow(src="n0", dst="sink", per_s=0))
    assert rules(edit(made, PIPELINE, flows=flows), asked) == {"layers"}


def test_a_range_that_ends_before_it_starts() -> None:
    asked, made = small()
    assert "layers" in rules(edit_node(made, PIPELINE, "n2", start=32, end=14), asked)


def test_a_pipeline_longer_than_its_time() -> None:
    asked, made = small()
    found = [v for v in validate(edit(made, PIPELINE, stages=1), asked) if v.rule == "hops"]
    assert [v.amount for v in found] == [1]


# Memory


def test_layers_that_do_not_fit() -> None:
    asked, made = small()
    broken = edit_node(made, "chat-decode-0", "n0", node_type="T4:1")
    assert "memory" in rules(broken, asked)


@few
@given(st.integers(2, 16))
def test_gpus_that_do_not_split(tp: int) -> None:
    asked, made = small()
    assert "memory" in rules(edit_node(made, "chat-decode-0", "n0", tp=tp), asked)


# Flows


@few
@given(any_instance, st.integers(0, 20), st.floats(0, 0.99) | factor)
def test_a_flow_that_does_not_balance(name: str, index: int, scale: float) -> None:
    asked, made = small()
    flows = find(made, name).flows
    flow = flows[index % len(flows)]
    broken = edit_flow(made, name, index % len(flows), per_s=flow.per_s * scale)
    assert rules(broken, asked) & {"flow", "throughput"}
    assert {v.rule for v in validate_structure(broken)} & {"flow", "throughput"}


@few
@given(any_instance, factor)
def test_more_than_the_nodes_carry(name: str, scale: float) -> None:
    asked, made = small()
    own = find(made, name)
    flows = tuple(f.model_copy(update={"per_s": f.per_s * scale}) for f in own.flows)
    more = own.throughput_per_s * scale
    broken = edit(made, name, flows=flows, throughput_per_s=more)
    found = rules(broken, asked)
    assert "node-capacity" in found
    assert found <= {"node-capacity", "link-capacity", "handover"}


@few
@given(any_instance, st.floats(0, 0.999) | factor)
def test_a_throughput_that_is_not_there(name: str, scale: float) -> None:
    asked, made = small()
    stated = find(made, name).throughput_per_s * scale
    assert "throughput" in rules(edit(made, name, throughput_per_s=stated), asked)


def test_a_link_too_thin() -> None:
    asked, made = small()
    thin = {"links": {"in_region": {"bandwidth": "1Mbit/s"}}}
    there = asked.replace(overlays=(thin,))
    found = {v.rule for v in validate(made, there, same_problem=False)}
    assert {"link-capacity", "node-capacity"} <= found


@pytest.mark.parametrize(
    "flow",
    [
        Flow(src="source", dst="n9", per_s=1),
        Flow(src="n9", dst="sink", per_s=1),
        Flow(src="sink", dst="n0", per_s=1),
        Flow(src="n0", dst="source", per_s=1),
        Flow(src="source", dst="sink", per_s=1),
        Flow(src="source", dst="n0", per_s=0),
    ],
)
def test_flows_that_lead_nowhere(flow: Flow) -> None:
    asked, made = small()
    flows = (*find(made, PIPELINE).flows, flow)
    assert "graph" in rules(edit(made, PIPELINE, flows=flows), asked)


def test_flows_in_a_circle() -> None:
    asked, made = small()
    flows = (*find(made, PIPELINE).flows, Flow(src="n2", dst="n0", per_s=0))
    assert {"graph", "layers"} <= rules(edit(made, PIPELINE, flows=flows), asked)


def test_two_nodes_of_one_name() -> None:
    asked, made = small()
    broken = edit_node(made, PIPELINE, "n1", id="n0")
    assert any(v.message == "2 nodes are called n0" for v in validate(broken, asked))


# Overlapping ranges


def overlapping(partial: bool) -> tuple[Problem, Plan]:
    """Two nodes whose ranges overlap, and one that carries the whole model beside them."""
    asked, made = small()
    kinds = (("n0", 0, 20), ("n1", 12, LAYERS), ("n2", 0, LAYERS))
    nodes = tuple(
        Node(id=n, node_type="L40S:1", market="on-demand", start=a, end=b, tp=1)
        for n, a, b in kinds
    )
    ways = [("source", "n0"), ("n0", "n1"), ("n1", "sink"), ("source", "n2"), ("n2", "sink")]
    bare = find(made, PIPELINE).model_copy(update={"nodes": nodes, "partial": partial})
    capacities = node_capacities(asked, catalog(), bare)
    short, whole = min(capacities["n0"], capacities["n1"]), capacities["n2"]
    flows = tuple(Flow(src=a, dst=b, per_s=whole if "n2" in (a, b) else short) for a, b in ways)
    usd = 3 * 1.9
    change = usd - find(made, PIPELINE).usd_per_hour
    there = made.usd_per_hour + change
    fresh = edit(
        made,
        PIPELINE,
        nodes=nodes,
        partial=partial,
        flows=flows,
        throughput_per_s=short + whole,
        usd_per_hour=usd,
    ).model_copy(update={"usd_per_hour": there, "init_usd": there * 0.1, "objective": there * 1.1})
    more = asked.replace(offers=[o.model_copy(update={"available": 9}) for o in asked.offers])
    hashed = {"problem_hash": more.content_hash(), "gap": 1 - BOUND / (there * 1.1)}
    hashed |= {"status": "feasible"}
    return more, fresh.model_copy(update=hashed)


def test_overlapping_ranges_with_partial_inference_are_valid() -> None:
    asked, made = overlapping(partial=True)
    assert validate(made, asked, catalog()) == []


def test_overlapping_ranges_without_it_are_not() -> None:
    asked, made = overlapping(partial=False)
    assert rules(made, asked) == {"layers"}


def test_a_hop_with_nothing_left_to_do() -> None:
    asked, made = overlapping(partial=True)
    assert "layers" in rules(edit_node(made, PIPELINE, "n1", end=20), asked)


# Names, offers, availability, pinning


@pytest.mark.parametrize(
    "changes",
    [
        {"service": "nobody", "role": "nobody/llm/decode"},
        {"service": "mini"},
        {"role": "chat/llm/both"},
        {"role": "chat/vision/decode"},
        {"region": "nowhere"},
    ],
)
def test_unknown_names(changes: dict[str, object]) -> None:
    asked, made = small()
    assert "name" in rules(edit(made, "chat-decode-0", **changes), asked)


def test_an_unknown_node_type() -> None:
    asked, made = small()
    assert "name" in rules(edit_node(made, PIPELINE, "n0", node_type="L41:1"), asked)


def test_an_id_used_twice() -> None:
    asked, made = small()
    assert "name" in rules(edit(made, "chat-decode-1", id="chat-decode-0"), asked)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("mini-both-0", {"market": "spot"}), ("chat-decode-0", {"market": "owned"})],
)
def test_a_market_that_is_not_offered(name: str, changes: dict[str, object]) -> None:
    asked, made = small()
    assert "offer" in rules(edit_node(made, name, "n0", **changes), asked)


def test_the_wrong_region() -> None:
    asked, made = small()
    assert "offer" in rules(edit(made, "chat-decode-1", region=EAST), asked)


@few
@given(any_instance, st.integers(4, 9))
def test_too_many_nodes(name: str, copies: int) -> None:
    asked, made = small()
    own = find(made, name)
    more = tuple(own.model_copy(update={"id": f"copy-{n}"}) for n in range(copies))
    broken = made.model_copy(update={"instances": (*made.instances, *more)})
    assert "availability" in rules(broken, asked)


def test_availability_is_counted_per_market() -> None:
    none_left = [o.model_copy(update={"available": 0 if o.market == "spot" else 9}) for o in OFFERS]
    asked, _ = small()
    there = asked.replace(offers=none_left)
    made = plan_of(there, *CHOSEN)
    assert rules(made, there) == set()
    broken = edit_node(made, "chat-decode-0", "n0", market="spot")
    assert {"availability", "cost"} <= rules(broken, there)


@pytest.mark.parametrize("pinned", [{"avoid": ("L40S",)}, {"only": ("L4:1", "T4")}])
def test_a_node_type_the_service_may_not_use(pinned: dict[str, object]) -> None:
    asked, made = small()
    there = asked.replace(services=(service("chat", **pinned), SERVICES[1]))
    assert "pinning" in {v.rule for v in validate(made, there, same_problem=False)}


# Demand, served fractions, routes


@few
@given(any_instance)
def test_demand_that_is_not_met(name: str) -> None:
    asked, made = small()
    left = tuple(i for i in made.instances if i.id != name)
    broken = made.model_copy(update={"instances": left})
    found = rules(broken, asked)
    assert "route" in found
    if name.startswith("mini"):
        assert {"demand", "served"} <= found
    without = plan_of(asked, CHOSEN[0], CHOSEN[2])
    assert without.served_fraction == {"chat": 0.0, "mini": 0.0}  # its phases in two regions
    assert rules(without, asked) == set()
    claimed = without.model_copy(update={"served_fraction": {"chat": 0.5, "mini": 0.0}})
    assert {"served", "route"} <= rules(claimed, asked)


@few
@given(st.floats(1.5, 100))
def test_demand_that_grew(scale: float) -> None:
    asked, made = small()
    supply = find(made, "mini-both-0").throughput_per_s
    grown = asked.replace(
        services=(SERVICES[0], SERVICES[1].model_copy(update={"rate_per_s": supply * scale}))
    )
    found = {v.rule for v in validate(made, grown, same_problem=False)}
    assert {"demand", "served", "route"} <= found
    honest = made.model_copy(
        update={
            "status": "partial",
            "served_fraction": made.served_fraction | {"mini": 1 / scale},
        }
    )
    assert validate(honest, grown, same_problem=False) == []


@few
@given(st.sampled_from(sorted(small()[1].served_fraction)), st.floats(0, 0.999))
def test_a_share_that_is_not_the_true_one(role: str, stated: float) -> None:
    asked, made = small()
    shares = made.served_fraction | {role: stated}
    found = rules(made.model_copy(update={"served_fraction": shares}), asked)
    assert found == {"served", "status"}


def test_a_share_of_a_service_nobody_asked_for() -> None:
    asked, made = small()
    shares = made.served_fraction | {"chat/llm/both": 1.0}
    assert rules(made.model_copy(update={"served_fraction": shares}), asked) == {"name"}


def test_demand_of_zero_needs_nothing() -> None:
    idle = problem(services=[s.model_copy(update={"rate_per_s": 0.0}) for s in SERVICES])
    assert rules(plan_of(idle), idle) == set()


def reroute(made: Plan, *ways: tuple[tuple[str, ...], float]) -> Plan:
    """The plan with other routes for chat."""
    others = [route for route in made.routes if route.service != "chat"]
    own = [Route(service="chat", instances=way, share=share) for way, share in ways]
    return made.model_copy(update={"routes": (*others, *own)})


PAIR_EAST = ("chat-prefill-0", "chat-decode-0")
PAIR_WEST = ("chat-prefill-1", "chat-decode-1")


def test_routes_by_hand() -> None:
    asked, made = small()
    assert rules(reroute(made, (PAIR_EAST, 0.5), (PAIR_WEST, 0.5)), asked) == set()


@pytest.mark.parametrize(
    "ways",
    [
        ((PAIR_EAST, 0.5), (PAIR_WEST, 0.4)),
        ((PAIR_EAST, 0.5), (PAIR_WEST, 0.6)),
        ((PAIR_EAST, 0.5), (("chat-prefill-0", "nobody"), 0.5)),
        ((PAIR_EAST, 0.5), (("chat-decode-0", "chat-prefill-0"), 0.5)),
        ((PAIR_EAST, 0.5), (("chat-prefill-0", "chat-prefill-0"), 0.5)),
        ((PAIR_EAST, 0.5), (("chat-prefill-0",), 0.5)),
        ((PAIR_EAST, 0.5), (("mini-both-0",), 0.5)),
        ((PAIR_EAST, 0.5), (PAIR_EAST, 0.5)),
        (),
    ],
)
def test_bad_routes(ways: tuple[tuple[tuple[str, ...], float], ...]) -> None:
    asked, made = small()
    assert rules(reroute(made, *ways), asked) == {"route"}


def test_a_route_of_a_service_nobody_asked_for() -> None:
    asked, made = small()
    stranger = Route(service="nobody", instances=("mini-both-0",), share=1.0)
    found = rules(made.model_copy(update={"routes": (*made.routes, stranger)}), asked)
    assert found == {"route", "name"}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_route_that_overloads_an_instance(phase: str) -> None:
    asked, made = small()
    tokens = {"prefill": 512, "decode": 128}[phase]
    own = find(made, f"chat-{phase}-0")
    rate = own.throughput_per_s / tokens * 1.01
    busy = asked.replace(
        services=(
            SERVICES[0].model_copy(update={"rate_per_s": rate}),
            SERVICES[1],
        )
    )
    full = plan_of(busy, *CHOSEN)
    assert "route" not in rules(full, busy)
    assert "route" in rules(reroute(full, (PAIR_EAST, 1.0)), busy)


def test_phases_in_two_regions_serve_nothing_together() -> None:
    asked, _ = small()
    made = plan_of(asked, CHOSEN[0], CHOSEN[2], CHOSEN[3])
    assert made.served_fraction == {"chat": 0.0, "mini": 1.0}
    assert (made.status, made.weights("chat", Phase.DECODE)) == ("partial", {})
    claimed = reroute(made, (("chat-prefill-0", "chat-decode-0"), 1.0)).model_copy(
        update={"status": "feasible", "served_fraction": {"chat": 1.0, "mini": 1.0}}
    )
    assert "handover" in rules(claimed, asked)


# Limits


def test_limits_that_are_kept() -> None:
    asked, made = small()
    own = {"budget_usd_per_hour": made.usd_per_hour, "max_nodes": 7, "spot_share": 0.0}
    tighter, made = within(asked, made, **own)
    assert rules(made, tighter) == set()


@few
@given(st.floats(0, 0.999))
def test_a_budget_that_is_exceeded(share: float) -> None:
    asked, made = within(*small(), budget_usd_per_hour=small()[1].usd_per_hour * share)
    assert rules(made, asked) == {"budget"}


@few
@given(st.integers(0, 5))
def test_more_nodes_than_allowed(most: int) -> None:
    asked, made = within(*small(), max_nodes=most)
    assert rules(made, asked) == {"max-nodes"}


@few
@given(st.floats(0, 1))
def test_the_spot_share(most: float) -> None:
    asked, _ = small()
    spot = replace(CHOSEN[1], rented=rent("spot", L40S=1))
    made = plan_of(asked, CHOSEN[0], spot, *CHOSEN[2:])
    # What it serves counts, and not what stands elsewhere.
    share = sum(route.share for route in made.routes if "chat-decode-0" in route.instances)
    assert 0.1 < share < 0.9
    assume(abs(most - share) > 1e-3)
    tighter, made = within(asked, made, spot_share=most)
    assert rules(made, tighter) == ({"spot-share"} if most < share else set())


def test_a_prefill_instance_that_feeds_spot_serves_others_off_it() -> None:
    asked, _ = small()
    near = replace(CHOSEN[4], region=EAST, rented=rent(L40S=1))
    spot = replace(CHOSEN[1], rented=rent("spot", L40S=1))
    made = plan_of(asked, near, spot, CHOSEN[1], CHOSEN[3])
    on = sum(route.share for route in made.routes if "chat-decode-0" in route.instances)
    off = sum(route.share for route in made.routes if "chat-decode-1" in route.instances)
    assert min(on, off) > 0.3
    for limit, broken in ((on + 0.01, set()), (on - 0.01, {"spot-share"})):
        tighter, there = within(asked, made, spot_share=limit)
        assert rules(there, tighter) == broken


def test_an_instance_that_costs_and_serves_nobody() -> None:
    asked, made = small()
    idle = find(made, "mini-both-0").model_copy(update={"id": "mini-both-1"})
    usd = made.usd_per_hour + idle.usd_per_hour
    dearer = {"usd_per_hour": usd, "init_usd": 0.1 * usd, "objective": 1.1 * usd}
    unproven = {"status": "feasible", "bound": None, "gap": None}
    more = made.model_copy(update={"instances": (*made.instances, idle), **dearer, **unproven})
    assert rules(more, asked) == {"route"}


def test_spread_over_regions() -> None:
    asked, made = within(*small(), spread=2)
    found = [v for v in validate(made, asked, catalog()) if v.rule == "spread"]
    assert [v.where for v in found] == ["mini/llm/both"]


# Cost, bound, kept, problem


@few
@given(any_instance, st.floats(0.01, 100))
def test_a_wrong_price(name: str, more: float) -> None:
    asked, made = small()
    dearer = find(made, name).usd_per_hour + more
    assert "cost" in rules(edit(made, name, usd_per_hour=dearer), asked)


@few
@given(st.sampled_from(("usd_per_hour", "init_usd", "objective")), st.floats(0.01, 100))
def test_sums_that_do_not_add_up(field: str, more: float) -> None:
    asked, made = small()
    broken = made.model_copy(update={field: getattr(made, field) + more})
    assert "cost" in rules(broken, asked)


def test_a_total_that_is_not_the_sum() -> None:
    asked, made = small()
    assert made.objective is not None
    more = {"usd_per_hour": made.usd_per_hour + 1, "objective": made.objective + 1}
    gap = {"gap": 1 - BOUND / (made.objective + 1), "status": "feasible"}
    assert rules(made.model_copy(update=more | gap), asked) == {"cost"}


def test_an_objective_must_be_stated() -> None:
    asked, made = small()
    assert "cost" in rules(made.model_copy(update={"objective": None}), asked)


@few
@given(st.floats(0.001, 100))
def test_a_bound_above_the_objective(more: float) -> None:
    asked, made = small()
    assert made.objective is not None
    broken = made.model_copy(update={"bound": made.objective + more, "gap": 0.0})
    assert rules(broken, asked) == {"bound"}


@pytest.mark.parametrize("changes", [{"gap": 0.5}, {"gap": None}, {"bound": None}])
def test_a_gap_that_does_not_fit(changes: dict[str, object]) -> None:
    asked, made = small()
    assert rules(made.model_copy(update=changes), asked) == {"bound"}


def test_optimal_needs_a_bound() -> None:
    asked, made = small()
    unproven = made.model_copy(update={"bound": None, "gap": None})
    assert rules(unproven, asked) == {"bound"}
    feasible = unproven.model_copy(update={"status": "feasible"})
    assert rules(feasible, asked) == set()
    assert rules(feasible.model_copy(update={"gap": 0.1}), asked) == {"bound"}


def test_infeasible_plans_are_empty() -> None:
    asked, made = small()
    assert "demand" in rules(made.model_copy(update={"status": "infeasible"}), asked)


def test_kept_instances_must_run() -> None:
    asked, made = small()
    claimed = edit(made, "chat-decode-0", kept=True)
    assert {"kept", "cost"} <= rules(claimed, asked)
    running = asked.replace(running=made.instances)
    again = plan_from_layouts(running, catalog(), CHOSEN, status="feasible", solver="s")
    assert all(i.kept for i in again.instances)
    assert rules(again, running) == set()
    moved = edit_node(again, PIPELINE, "n2", node_type="L4:1")
    assert "kept" in rules(moved, running)


def test_a_plan_for_another_problem() -> None:
    asked, made = small()
    other = asked.replace(settings=Settings(seed=7, init_penalty=0.1))
    assert rules(made, other) == {"problem"}
    assert validate(made, other, same_problem=False) == []


def test_structure_needs_no_problem() -> None:
    _, made = small()
    assert validate_structure(made) == []
    swapped = made.model_copy(update={"usd_per_hour": made.usd_per_hour + 1})
    assert {v.rule for v in validate_structure(swapped)} == {"cost"}
    stranger = edit(made, "chat-decode-0", service="mini")
    assert "name" in {v.rule for v in validate_structure(stranger)}


# Whatever is wrong, the validator answers


def scrambled(data: st.DataObject, own: Instance) -> Instance:
    draw = data.draw
    count = draw(st.integers(1, 4))
    nodes = tuple(
        Node(
            id=f"n{draw(st.integers(0, 4))}",
            node_type=draw(st.sampled_from(("L4:1", "L40S:1", "H100:8", "X:1"))),
            market=draw(st.sampled_from(("on-demand", "spot", "owned"))),
            start=draw(st.integers(0, 40)),
            end=draw(st.integers(1, 40)),
            tp=draw(st.integers(1, 9)),
        )
        for _ in range(count)
    )
    places = st.sampled_from(("source", "sink", "n0", "n1", "n2", "n3", "n9"))
    flows = tuple(
        Flow(src=draw(places), dst=draw(places), per_s=draw(st.floats(0, 1e6)))
        for _ in range(draw(st.integers(0, 6)))
    )
    return own.model_copy(
        update={
            "nodes": nodes,
            "flows": flows,
            "stages": draw(st.integers(1, 5)),
            "region": draw(st.sampled_from((EAST, WEST, "nowhere"))),
            "partial": draw(st.booleans()),
        }
    )


@given(st.data())
def test_nonsense_is_answered_with_violations(data: st.DataObject) -> None:
    asked, made = small()
    name = data.draw(any_instance)
    instances = tuple(scrambled(data, i) if i.id == name else i for i in made.instances)
    found = validate(made.model_copy(update={"instances": instances}), asked, catalog())
    assert all(isinstance(violation, Violation) for violation in found)


Mutation = Callable[[Plan], Plan]


def test_messages_are_one_line_and_name_the_place() -> None:
    asked, made = small()
    mutations: list[Mutation] = [
        lambda p: edit_node(p, PIPELINE, "n2", start=20),
        lambda p: edit(p, PIPELINE, throughput_per_s=1.0),
        lambda p: edit_node(p, "chat-decode-0", "n0", node_type="T4:1"),
    ]
    for mutate in mutations:
        found = validate(mutate(made), asked, catalog())
        assert found
        for violation in found:
            assert "\n" not in str(violation)
            assert violation.where


def test_an_offer_more_makes_no_difference() -> None:
    asked, made = small()
    more = asked.replace(offers=(*OFFERS, offer("gcp/us-central1", "L4:1", 0.7)))
    assert validate(made, more, same_problem=False) == []
