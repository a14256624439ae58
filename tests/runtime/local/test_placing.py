"""Plans as they stand on one machine: layer ranges, endpoints, cores."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.core.ids import Phase
from atoll.plan.plan import Flow, Instance, Node, Plan, Route
from atoll.runtime.local.cores import assign_cores
from atoll.runtime.local.placing import plan_endpoints, scale_layers


def instance(
    held: list[tuple[int, int]], name: str = "i", phase: str = "both", service: str = "chat"
) -> Instance:
    nodes = tuple(
        Node(id=f"n{i}", node_type="L4:1", market="owned", start=a, end=b, tp=1)
        for i, (a, b) in enumerate(held)
    )
    last = max(b for _, b in held)
    flows = [
        *(("source", n.id) for n in nodes if n.start == 0),
        *((m.id, n.id) for m in nodes for n in nodes if m.end == n.start),
        *((n.id, "sink") for n in nodes if n.end == last),
    ]
    return Instance(
        id=name,
        service=service,
        role=f"qwen3-32b/llm/{phase}",
        region="here",
        stages=1,
        nodes=nodes,
        flows=tuple(Flow(src=a, dst=b, per_s=1) for a, b in flows),
        throughput_per_s=2,
        usd_per_hour=0,
    )


def even_routes(instances: Sequence[Instance]) -> tuple[Route, ...]:
    """Return equal shares for all ways of each service, apart each prefill with each decode instance."""
    routes: list[Route] = []
    for service in sorted({i.service for i in instances}):
        own = [i for i in instances if i.service == service]
        ways: list[tuple[str, ...]] = [(i.id,) for i in own if i.phase is Phase.BOTH]
        ways += [
            (a.id, b.id)
            for a, b in itertools.product(own, own)
            if (a.phase, b.phase) == (Phase.PREFILL, Phase.DECODE)
        ]
        routes += [Route(service=service, instances=way, share=1 / len(ways)) for way in ways]
    return tuple(routes)


def plan(*instances: Instance, routes: tuple[Route, ...] | None = None) -> Plan:
    routes = even_routes(instances) if routes is None else routes
    return Plan(
        problem_hash="x",
        problem_name="x",
        instances=instances,
        routes=routes,
        usd_per_hour=0,
        status="feasible",
        solver="hand",
    )


def way(share: float, *names: str, service: str = "chat") -> Route:
    return Route(service=service, instances=names, share=share)


def test_scaled_keeps_shares() -> None:
    found = scale_layers(instance([(0, 32), (32, 48), (32, 48), (48, 64)]), 30)
    assert [(n.start, n.end) for n in found.nodes] == [(0, 15), (15, 22), (15, 22), (22, 30)]


def test_scaled_leaves_no_range_empty() -> None:
    found = scale_layers(instance([(0, 1), (1, 2), (2, 3), (3, 80)]), 4)
    assert [(n.start, n.end) for n in found.nodes] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_too_few_layers_is_an_error() -> None:
    with pytest.raises(InputError, match="3 layers"):
        scale_layers(instance([(0, 1), (1, 2), (2, 3), (3, 80)]), 3)


@given(st.lists(st.integers(1, 79), min_size=1, max_size=8, unique=True), st.integers(1, 100))
def test_scaled_keeps_the_order_of_marks(marks: list[int], layers: int) -> None:
    cut = [0, *sorted(marks), 80]
    assume(len(cut) - 1 <= layers)
    made = scale_layers(instance(list(itertools.pairwise(cut))), layers)
    new = [made.nodes[0].start, *(node.end for node in made.nodes)]
    assert (new[0], new[-1]) == (0, layers)
    assert all(a < b for a, b in itertools.pairwise(new))


def test_together_is_an_endpoint_each_with_the_weight_of_its_route() -> None:
    routes = (way(0.75, "a"), way(0.25, "b"))
    made = plan(instance([(0, 4)], "a"), instance([(0, 2), (2, 4)], "b"), routes=routes)
    found = plan_endpoints(made, {"chat": 4})
    assert [(s.name, s.weight, s.nodes) for s in found] == [("a", 0.75, 1), ("b", 0.25, 2)]
    assert all(s.routes == () for s in found)


def test_apart_is_one_endpoint_for_all() -> None:
    parts = [instance([(0, 4)], name, name[:-2]) for name in ("prefill-0", "decode-0", "decode-1")]
    found = plan_endpoints(plan(*parts), {"chat": 4})
    assert [s.name for s in found] == ["chat"]
    assert {i.id for i in found[0].instances} == {"prefill-0", "decode-0", "decode-1"}
    pairs = {route.instances: route.share for route in found[0].routes}
    assert pairs == {("prefill-0", "decode-0"): 0.5, ("prefill-0", "decode-1"): 0.5}


def test_ways_of_both_kinds_share_requests_by_the_weights_of_their_endpoints() -> None:
    parts = [
        instance([(0, 4)], "whole", "both"),
        instance([(0, 4)], "p", "prefill"),
        instance([(0, 2), (2, 4)], "d", "decode"),
        instance([(0, 4)], "idle", "both"),
    ]
    routes = (way(0.7, "p", "d"), way(0.3, "whole"), way(0.0, "idle"))
    found = plan_endpoints(plan(*parts, routes=routes), {"chat": 4})
    assert [(s.name, s.weight, s.nodes) for s in found] == [("whole", 0.3, 1), ("chat", 0.7, 3)]
    assert found[1].routes == routes[:1]


def test_routes_must_lead_over_instances_of_the_service() -> None:
    with pytest.raises(InputError, match="no route for 'chat'"):
        plan_endpoints(plan(instance([(0, 4)], "p", "prefill")), {"chat": 4})
    with pytest.raises(InputError, match="leads over gone, which is no instance"):
        plan_endpoints(plan(instance([(0, 4)], "p"), routes=(way(1.0, "gone"),)), {"chat": 4})


def test_a_missing_service_is_an_error() -> None:
    with pytest.raises(InputError, match="no instance of 'code'"):
        plan_endpoints(plan(instance([(0, 4)])), {"code": 4})


def test_few_cores_are_shared_evenly() -> None:
    found = assign_cores({"a": 14, "b": 10, "c": 10, "d": 6}, (0, 1))
    load = {
        core: sum(w for n, w in (("a", 14), ("b", 10), ("c", 10), ("d", 6)) if found[n] == (core,))
        for core in (0, 1)
    }
    assert load == {0: 20, 1: 20}


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.1, 50), min_size=1),
    st.integers(1, 12),
)
def test_cores_are_all_used_and_never_shared_where_there_are_enough(
    work: dict[str, float], count: int
) -> None:
    found = assign_cores(work, tuple(range(count)))
    assert found.keys() == work.keys()
    assert all(found.values())
    taken = [core for cores in found.values() for core in cores]
    assert set(taken) == set(range(min(count, len(taken))))
    if len(work) <= count:
        assert len(taken) == len(set(taken)) == count
