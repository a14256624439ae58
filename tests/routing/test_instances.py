"""Which instance a request goes to, phases together, apart, and some of each."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError, UnknownNameError
from atoll.core.ids import Phase
from atoll.plan.plan import Instance, Plan, Route
from atoll.routing.instances import InstanceRouter, service_tables
from tests.routing.graphs import instance

PHASES = {"p": Phase.PREFILL, "d": Phase.DECODE, "b": Phase.BOTH}


def at(name: str) -> Instance:
    """Return an instance whose name says its phase and its region: "p-east", "d1-west"."""
    made = instance([(0, 4)], [("source", "n0", 1.0), ("n0", "sink", 1.0)])
    phase, region = PHASES[name[0]], name.partition("-")[2]
    return made.model_copy(update={"id": name, "region": region, "role": f"chat/llm/{phase.value}"})


def plan(shares: dict[tuple[str, ...], float]) -> Plan:
    return Plan(
        problem_hash="",
        problem_name="p",
        instances=tuple(at(name) for name in sorted({name for way in shares for name in way})),
        routes=tuple(
            Route(service="chat", instances=way, share=share) for way, share in shares.items()
        ),
        usd_per_hour=0.0,
        status="feasible",
        solver="by hand",
    )


APART = plan(
    {
        ("p-east", "d-east"): 0.5,
        ("p-west", "d-west"): 0.25,
        ("p-west", "d2-west"): 0.25,
    }
)


def test_instances_share_requests_by_the_routes_of_the_plan() -> None:
    made = plan({("b1-east",): 0.6, ("b2-east",): 0.4, ("b3-east",): 0.0})
    router = InstanceRouter(service_tables(made, "chat"))
    assert Counter(router.route() for _ in range(10)) == {("b1-east",): 6, ("b2-east",): 4}
    assert router.route(busy=["b1-east"]) == ("b2-east",)
    assert router.route(busy=["b1-east", "b2-east"]) is None


def test_pairs_get_their_shares_and_others_nothing() -> None:
    router = InstanceRouter(service_tables(APART, "chat"))
    assert Counter(router.route() for _ in range(80)) == {
        ("p-east", "d-east"): 40,
        ("p-west", "d-west"): 20,
        ("p-west", "d2-west"): 20,
    }


def test_a_service_may_have_both_kinds_of_ways() -> None:
    made = plan({("p-east", "d-east"): 0.5, ("b-east",): 0.3, ("b-west",): 0.2})
    router = InstanceRouter(service_tables(made, "chat"))
    assert Counter(router.route() for _ in range(100)) == {
        ("p-east", "d-east"): 50,
        ("b-east",): 30,
        ("b-west",): 20,
    }
    router.lost(["d-east"])
    assert Counter(router.route() for _ in range(100)) == {("b-east",): 60, ("b-west",): 40}


def test_without_its_partner_an_instance_uses_others_of_its_region() -> None:
    made = plan({("p1-east", "d1-east"): 0.5, ("p2-east", "d2-east"): 0.5})
    router = InstanceRouter(service_tables(made, "chat"))
    assert {router.route() for _ in range(20)} == {
        ("p1-east", "d1-east"),
        ("p2-east", "d2-east"),
    }
    router.lost(["d1-east"])
    assert Counter(router.route() for _ in range(20)) == {
        ("p1-east", "d2-east"): 10,
        ("p2-east", "d2-east"): 10,
    }
    router.back(["d1-east"])
    assert np.array_equal(router.tables.weight, router.planned.weight)


def test_kv_caches_never_cross_regions_because_an_instance_is_lost() -> None:
    router = InstanceRouter(service_tables(APART, "chat"))
    router.lost(["d-east"])
    # Its partner in the east has nobody left there, so all requests go west.
    assert {router.route() for _ in range(20)} == {("p-west", "d-west"), ("p-west", "d2-west")}
    router.lost(["d-west", "d2-west"])
    assert router.route() is None
    router.back(["d-east", "d-west", "d2-west"])
    assert np.array_equal(router.tables.weight, router.planned.weight)


def test_a_pair_across_regions_is_used_where_the_plan_says_so() -> None:
    made = plan({("p-east", "d-west"): 0.5, ("p-west", "d-west"): 0.5})
    router = InstanceRouter(service_tables(made, "chat"))
    ways = Counter(router.route() for _ in range(10))
    assert ways == {("p-east", "d-west"): 5, ("p-west", "d-west"): 5}


NAMES = [f"{kind}{number}-{region}" for kind in "pdb" for number in "12" for region in ("e", "w")]
WAYS = [(name,) for name in NAMES if name[0] == "b"] + [
    (a, b) for a in NAMES for b in NAMES if (a[0], b[0]) == ("p", "d")
]


@given(
    st.dictionaries(st.sampled_from(WAYS), st.integers(1, 9), min_size=1, max_size=8),
    st.sets(st.sampled_from(NAMES), max_size=4),
)
def test_shares_are_kept_and_what_is_lost_is_made_up_for_inside_regions(
    parts: dict[tuple[str, ...], int], lost: set[str]
) -> None:
    total = sum(parts.values())
    made = plan({way: part / total for way, part in parts.items()})
    router = InstanceRouter(service_tables(made, "chat"))
    count = 6 * total
    found = Counter(router.route() for _ in range(count))
    for way, part in parts.items():
        # Within a request of the share at each of two decisions.
        assert abs(found[way] - 6 * part) < 2
    assert found.total() == sum(found[way] for way in parts)
    for phase in PHASES.values():
        for name, share in made.weights("chat", phase).items():
            got = sum(n for way, n in found.items() if way and name in way)
            assert got / count == pytest.approx(share, abs=len(parts) / count)
    router.lost(lost & set(router.planned.names))
    for _ in range(20):
        taken = router.route()
        if taken is None:
            assert all(lost & set(way) for way in parts)
            return
        assert not lost & set(taken)
        assert taken in parts or len({name.partition("-")[2] for name in taken}) == 1


def test_what_is_not_in_the_plan_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="service"):
        service_tables(APART, "chatt")
    with pytest.raises(InputError, match="no route has a share"):
        service_tables(plan({("b-east",): 0.0}), "chat")
    with pytest.raises(InputError, match="p-east has different parts"):
        service_tables(plan({("p-east",): 0.5, ("p-east", "d-east"): 0.5}), "chat")
    with pytest.raises(UnknownNameError, match="instance"):
        InstanceRouter(service_tables(APART, "chat")).lost(["nobody"])
