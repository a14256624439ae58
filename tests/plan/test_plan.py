from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.core.ids import Phase
from atoll.plan.plan import Flow, Instance, Node, Plan, Route, count_machines
from tests.plan.builders import edit_node, find, small


def node(name: str, start: int, end: int, kind: str = "L4:1", market: str = "on-demand") -> Node:
    return Node.model_validate(
        {"id": name, "node_type": kind, "market": market, "start": start, "end": end, "tp": 1}
    )


def instance(*nodes: Node, **changes: Any) -> Instance:
    values: dict[str, Any] = {
        "id": "a-decode-0",
        "service": "a",
        "role": "a/llm/decode",
        "region": "r",
        "stages": 2,
        "nodes": nodes,
        "flows": (),
        "throughput_per_s": 1.0,
        "usd_per_hour": 1.0,
    }
    return Instance.model_validate(values | changes)


def test_json_round_trip_of_a_real_plan() -> None:
    _, made = small()
    assert Plan.from_json(made.to_json(indent=2)) == made


positive = st.floats(0, 1e9)
gpu_ids = st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True).map(tuple)


def part(name: str, slot: int, gpu_ids: tuple[int, ...]) -> Node:
    """A slice of a machine with eight GPUs."""
    return node(name, 0, 1, "L4:8").model_copy(update={"slot": slot, "gpu_ids": gpu_ids})


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ids = draw(st.lists(st.integers(0, 99), max_size=4, unique=True))
    instances = []
    for number in ids:
        ends = sorted(draw(st.lists(st.integers(1, 80), min_size=1, max_size=3, unique=True)))
        starts = [0, *ends[:-1]]
        nodes = [node(f"n{i}", a, b) for i, (a, b) in enumerate(zip(starts, ends, strict=True))]
        nodes.append(part(f"n{len(nodes)}", draw(st.integers(0, 3)), draw(gpu_ids)))
        flows = [Flow(src="source", dst="n0", per_s=draw(positive))]
        instances.append(
            instance(
                *nodes,
                id=f"a-decode-{number}",
                flows=flows,
                kept=draw(st.booleans()),
                throughput_per_s=draw(positive),
            )
        )
    return Plan.model_validate(
        {
            "problem_hash": "0" * 64,
            "problem_name": "p",
            "instances": draw(st.permutations(instances)),
            "routes": [
                {"service": "a", "instances": (one.id, other.id), "share": draw(st.floats(0, 1))}
                for one, other in pairwise(instances)
            ],
            "served_fraction": {"a": draw(st.floats(0, 1))},
            "usd_per_hour": draw(positive),
            "bound": draw(st.none() | st.floats(-1e9, 1e9)),
            "status": "feasible",
            "solver": "s",
            "reasons": draw(st.lists(st.text(max_size=20), max_size=2)),
        }
    )


@given(plans())
def test_json_round_trip(made: Plan) -> None:
    again = Plan.from_json(made.to_json())
    assert again == made
    assert again.to_json() == made.to_json()
    assert again.content_hash() == made.content_hash()


def test_keys_tell_templates_rentals_and_placements_apart() -> None:
    one = instance(node("n0", 0, 10), node("n1", 10, 20, "L40S:1"))
    other_order = instance(node("n0", 0, 10, "L40S:1"), node("n1", 10, 20))
    spot = instance(node("n0", 0, 10, market="spot"), node("n1", 10, 20, "L40S:1"))
    assert one.template_key == ("a/llm/decode", (("L40S:1", 1), ("L4:1", 1)))
    assert one.template_key == other_order.template_key == spot.template_key
    assert one.rental_key == other_order.rental_key != spot.rental_key
    assert one.placement_key != other_order.placement_key
    renamed = instance(node("n7", 10, 20, "L40S:1"), node("n3", 0, 10))
    assert one.placement_key == renamed.placement_key


def test_layout_and_its_line() -> None:
    own = instance(
        node("n0", 10, 20, "L40S:2"),
        node("n1", 0, 10),
        node("n2", 0, 10),
        node("n3", 10, 20, market="spot"),
    )
    assert [(s.start, s.end, len(s.nodes)) for s in own.layout()] == [(0, 10, 2), (10, 20, 2)]
    assert own.describe() == "[0, 10) 2x L4:1 | [10, 20) L40S:2 + L4:1 spot"
    assert own.gpus == 5


def test_counts_of_a_plan() -> None:
    _, made = small()
    assert made.nodes == made.gpus == 7
    assert made.count_nodes()["aws/us-east-2", "L4:1", "on-demand"] == 2
    assert [i.id for i in made.of_role("chat/llm/decode")] == ["chat-decode-0", "chat-decode-1"]


def test_a_slice_is_a_node_of_its_own_kind() -> None:
    own = part("n0", 2, (4, 5))
    assert (own.gpus, own.machine_gpus, own.kind, own.share) == (2, 8, "L4:2", 0.25)
    whole = node("n1", 0, 1, "L4:8")
    assert (whole.gpus, whole.kind, whole.share) == (8, "L4:8", 1.0)
    both = instance(own, whole, part("n2", 2, (6, 7)), part("n3", 1, (0,)))
    assert both.node_counts == (("L4:1", 1), ("L4:2", 2), ("L4:8", 1))
    assert both.describe() == "[0, 1) 1/8 of L4:8 + 2x 2/8 of L4:8 + L4:8"
    assert both.gpus == 13
    # Three machines: two that are cut, one of them by two slices, and a whole one.
    assert count_machines([both]) == {("r", "L4:8", "on-demand"): 3}
    moved = instance(own.model_copy(update={"slot": 0, "gpu_ids": (0, 1)}))
    assert instance(own).placement_key == moved.placement_key != instance(whole).placement_key


def test_weights_by_phase() -> None:
    _, made = small()
    shares = [0.5, 0.25, 0.25]
    ways = [("p", "d"), ("p", "e"), ("b",)]
    routes = tuple(
        Route(service="chat", instances=way, share=share)
        for way, share in zip(ways, shares, strict=True)
    )
    plan = made.model_copy(update={"routes": routes})
    assert plan.weights("chat", Phase.PREFILL) == {"p": 0.75}
    assert plan.weights("chat", Phase.DECODE) == {"d": 0.5, "e": 0.25}
    assert plan.weights("chat", Phase.BOTH) == {"b": 0.25}
    assert plan.weights("mini", Phase.BOTH) == {}


def test_plans_of_earlier_versions_are_read() -> None:
    _, made = small()
    data = made.model_dump(mode="json")
    data |= {
        "seconds": 1.5,
        "cpu_seconds": 2.5,
        "served_fraction": {
            "chat/llm/prefill": 1.0,
            "chat/llm/decode": 0.5,
            "org/m/llm/both": 0.25,
        },
        "routes": [
            {"service": "chat", "phase": "prefill", "weights": {"chat-prefill-0": 1.0}},
            {
                "service": "chat",
                "phase": "decode",
                "weights": {"chat-decode-0": 0.25, "chat-decode-1": 0.75},
            },
            {"service": "mini", "phase": "both", "weights": {"mini-both-0": 1.0}},
        ],
    }
    read = Plan.parse(data)
    assert read.served_fraction == {"chat": 0.5, "org/m": 0.25}
    assert {route.instances: route.share for route in read.routes} == {
        ("chat-prefill-0", "chat-decode-0"): 0.25,
        ("chat-prefill-0", "chat-decode-1"): 0.75,
        ("mini-both-0",): 1.0,
    }
    assert "seconds" not in read.to_json()
    assert Plan.from_json(read.to_json()) == read


def older_plan(prefill: dict[str, float], decode: dict[str, float]) -> Plan:
    """A plan of an earlier version; the region of an instance is the last letter of its name."""
    _, made = small()
    instances = [
        instance(node("n0", 0, 1), id=name, region=name[-1], role=f"a/llm/{phase}", stages=1)
        for phase, names in (("prefill", prefill), ("decode", decode))
        for name in names
    ]
    routes = [
        {"service": "a", "phase": "prefill", "weights": prefill},
        {"service": "a", "phase": "decode", "weights": decode},
    ]
    dumped = [known.model_dump(mode="json") for known in instances]
    return Plan.parse(made.model_dump(mode="json") | {"instances": dumped, "routes": routes})


def test_older_routes_are_paired_inside_regions() -> None:
    made = older_plan({"p-e": 0.5, "p-w": 0.5}, {"d-e": 0.5, "c-w": 0.25, "d-w": 0.25})
    assert {route.instances: route.share for route in made.routes} == {
        ("p-e", "d-e"): 0.5,
        ("p-w", "c-w"): 0.25,
        ("p-w", "d-w"): 0.25,
    }


@pytest.mark.parametrize("weight", [None, "half", [1.0], -0.5])
def test_older_routes_with_other_weights_are_refused(weight: Any) -> None:
    with pytest.raises(InputError, match="weights of routes are numbers"):
        older_plan({"p-e": 1.0}, {"d-e": weight})


@given(
    st.lists(st.sampled_from("ewn"), min_size=1, max_size=5),
    st.lists(st.sampled_from("ewn"), min_size=1, max_size=5),
    st.data(),
)
def test_older_routes_keep_weights_and_cross_only_with_what_is_left(
    before: list[str], after: list[str], data: st.DataObject
) -> None:
    def weights(letter: str, regions: list[str]) -> dict[str, float]:
        drawn = [data.draw(st.integers(1, 9)) for _ in regions]
        named = zip(drawn, regions, strict=True)
        return {f"{letter}{i}-{g}": x / sum(drawn) for i, (x, g) in enumerate(named)}

    prefill, decode = weights("p", before), weights("d", after)
    made = older_plan(prefill, decode)
    assert made.weights("a", Phase.PREFILL) == pytest.approx(prefill)
    assert made.weights("a", Phase.DECODE) == pytest.approx(decode)
    inside = sum(r.share for r in made.routes if r.instances[0][-1] == r.instances[1][-1])
    most = sum(
        min(
            sum(x for name, x in prefill.items() if name[-1] == g),
            sum(y for name, y in decode.items() if name[-1] == g),
        )
        for g in "ewn"
    )
    assert inside == pytest.approx(most)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "source"),
        ("node_type", "L4"),
        ("market", "rented"),
        ("start", -1),
        ("tp", 0),
        ("slot", -1),
        ("gpu_ids", ()),
    ],
)
def test_bad_nodes_are_refused(field: str, value: object) -> None:
    data = node("n0", 0, 1).model_dump() | {field: value}
    with pytest.raises(InputError):
        Node.parse(data)


def test_another_schema_version_is_refused() -> None:
    _, made = small()
    text = made.to_json().replace('"schema_version":1', '"schema_version":2')
    with pytest.raises(InputError, match=r"plan\.json: schema_version"):
        Plan.from_json(text, path="plan.json")


def test_edits_in_tests_leave_the_plan_alone() -> None:
    _, made = small()
    changed = edit_node(made, "chat-decode-0", "n0", end=3)
    assert find(changed, "chat-decode-0").nodes[0].end == 3
    assert find(made, "chat-decode-0").nodes[0].end == 32
