from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.plan.plan import Flow, Instance, Node, Plan
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


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ids = draw(st.lists(st.integers(0, 99), max_size=4, unique=True))
    instances = []
    for number in ids:
        ends = sorted(draw(st.lists(st.integers(1, 80), min_size=1, max_size=3, unique=True)))
        starts = [0, *ends[:-1]]
        nodes = [node(f"n{i}", a, b) for i, (a, b) in enumerate(zip(starts, ends, strict=True))]
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
    weights = {i.id: draw(st.floats(0, 1)) for i in instances}
    return Plan.model_validate(
        {
            "problem_hash": "0" * 64,
            "problem_name": "p",
            "instances": draw(st.permutations(instances)),
            "routes": ({"service": "a", "phase": "decode", "weights": weights},),
            "served_fraction": {"a/llm/decode": draw(st.floats(0, 1))},
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
    assert made.nodes == made.gpus == 6
    assert made.count_nodes()["aws/us-east-2", "L4:1", "on-demand"] == 2
    assert [i.id for i in made.of_role("chat/llm/decode")] == ["chat-decode-0", "chat-decode-1"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("id", "source"), ("node_type", "L4"), ("market", "rented"), ("start", -1), ("tp", 0)],
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
