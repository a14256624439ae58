"""Which instance a request goes to, phases together and apart."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError, UnknownNameError
from atoll.core.ids import Phase
from atoll.plan.plan import Instance, Plan, Route
from atoll.routing.instances import InstanceRouter, pair_weights, service_tables
from tests.routing.graphs import instance


def at(name: str, region: str, phase: Phase) -> Instance:
    made = instance([(0, 4)], [("source", "n0", 1.0), ("n0", "sink", 1.0)])
    return made.model_copy(update={"id": name, "region": region, "role": f"chat/llm/{phase.value}"})


def plan(*routes: Route, instances: tuple[Instance, ...] = ()) -> Plan:
    return Plan(
        problem_hash="",
        problem_name="p",
        instances=instances,
        routes=routes,
        usd_per_hour=0.0,
        status="feasible",
        solver="by hand",
    )


APART = plan(
    Route(service="chat", phase=Phase.PREFILL, weights={"p-east": 0.5, "p-west": 0.5}),
    Route(service="chat", phase=Phase.DECODE, weights={"d-east": 0.75, "d-west": 0.25}),
    instances=tuple(
        at(f"{phase.value[0]}-{region}", region, phase)
        for phase in (Phase.PREFILL, Phase.DECODE)
        for region in ("east", "west")
    ),
)


def test_instances_share_requests_by_the_routes_of_the_plan() -> None:
    made = plan(Route(service="chat", phase=Phase.BOTH, weights={"a": 0.6, "b": 0.4, "c": 0.0}))
    router = InstanceRouter(service_tables(made, "chat"))
    assert Counter(router.route() for _ in range(10)) == {("a",): 6, ("b",): 4}
    assert router.route(busy=["a"]) == ("b",)
    assert router.route(busy=["a", "b"]) is None


def test_pairs_stay_in_their_region_as_far_as_they_can() -> None:
    router = InstanceRouter(service_tables(APART, "chat"))
    pairs = Counter(router.route() for _ in range(80))
    assert pairs == {("p-east", "d-east"): 40, ("p-west", "d-west"): 20, ("p-west", "d-east"): 20}


def test_a_lost_instance_leaves_its_partner_in_use() -> None:
    router = InstanceRouter(service_tables(APART, "chat"))
    router.lost(["d-east"])
    pairs = Counter(router.route() for _ in range(90))
    assert {way[1] for way in pairs if way} == {"d-west"}
    assert {way[0] for way in pairs if way} == {"p-east", "p-west"}
    router.lost(["d-west"])
    assert router.route() is None
    router.back(["d-east", "d-west"])
    assert np.array_equal(router.tables.weight, router.planned.weight)


shares = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5)


@given(shares, shares, st.integers(0, 2**16))
def test_pairs_add_up_to_the_shares_of_both_sides(
    left: list[float], right: list[float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(0, 3, len(left)), rng.integers(0, 3, len(right))
    near = rows[:, None] == columns[None, :]
    own, other = np.array(left) / sum(left), np.array(right) / sum(right)
    pairs = pair_weights(np.array(left), np.array(right), near)
    assert (pairs >= 0).all()
    assert np.allclose(pairs.sum(axis=1), own)
    assert np.allclose(pairs.sum(axis=0), other)
    most = sum(min(own[rows == r].sum(), other[columns == r].sum()) for r in range(3))
    assert pairs[near].sum() == pytest.approx(most)


def test_what_is_not_in_the_plan_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="service"):
        service_tables(APART, "chatt")
    half = plan(Route(service="chat", phase=Phase.PREFILL, weights={"a": 1.0}))
    with pytest.raises(InputError, match="no route for decode"):
        service_tables(half, "chat")
    with pytest.raises(UnknownNameError, match="instance"):
        InstanceRouter(service_tables(APART, "chat")).lost(["nobody"])
