"""Problems as arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.plan.cluster import ClusterLink, ClusterNode
from atoll.solve.place.from_problem import flow_instance, placement_of
from tests.plan.clusters import LAYERS, NODES, cluster, problem, service

CATALOG = Catalog.default()


def test_the_small_cluster() -> None:
    own = flow_instance(problem(), CATALOG, "chat")
    assert own.layers == LAYERS
    assert own.names == ("a", "b", "c", "d")
    assert own.max_layers.tolist() == [12, 8, 8, 8]
    assert own.rate[0, 8] == pytest.approx(1500.0)
    assert own.rate[1, 0] == own.rate[1, 9] == 0.0
    assert own.link[0, 1] == pytest.approx(1e9 / 4096)
    assert own.link[0, 2] == own.link[3, 1] == pytest.approx(4e6 / 4096)
    assert own.latency[0, 2] == 0.05
    assert own.enter.tolist() == [5e8] * 4
    assert own.kind[2] == own.kind[3]
    assert len(set(own.kind.tolist())) == 3
    timing = own.timing
    assert timing is not None
    assert timing.kv_tokens[0, 4] == 5000.0
    assert timing.input_mean == 150.0
    assert timing.prefill_s[1, 1] == pytest.approx(0.25)


def test_nodes_a_service_avoids_are_left_out() -> None:
    asked = problem(services=(service(avoid=("L40S",)),))
    assert flow_instance(asked, CATALOG, "chat").names == ("b", "c", "d")
    assert flow_instance(problem(), CATALOG, "chat", nodes=["d", "a"]).names == ("a", "d")


def test_placements_have_a_range_for_every_node() -> None:
    own = flow_instance(problem(), CATALOG, "chat")
    made = placement_of(own, [(0, 8), (8, 16), (0, 0), (8, 16)])
    assert made.end.tolist() == [8, 16, 0, 16]
    with pytest.raises(ValueError, match="1 ranges for 4 nodes"):
        placement_of(own, [(0, 8)])


ENDS = st.sampled_from(["a", "b", "c", "d", "north", "south", "source", "sink", "*"])
RULES = st.builds(
    ClusterLink,
    src=ENDS,
    dst=ENDS,
    bytes_per_s=st.integers(1, 9).map(lambda n: n * 1e6),
    latency_s=st.integers(0, 3).map(lambda n: n / 1000),
    one_way=st.booleans(),
)


@given(st.lists(RULES, min_size=1, max_size=8))
def test_painted_links_are_those_of_the_rules(links: list[ClusterLink]) -> None:
    asked = problem(cluster=cluster(links=tuple(links)))
    own = flow_instance(asked, CATALOG, "chat")
    assert asked.cluster is not None
    for i, a in enumerate(own.names):
        for k, b in enumerate(own.names):
            rule = asked.cluster.link(a, b) if i != k else None
            assert own.link[i, k] == (0.0 if rule is None else rule.bytes_per_s / 4096)
            assert own.latency[i, k] == (0.0 if rule is None else rule.latency_s)
        for values, ends in ((own.enter, ("source", a)), (own.leave, (a, "sink"))):
            rule = asked.cluster.link(*ends)
            assert values[i] == (0.0 if rule is None else rule.bytes_per_s / 2)


@given(st.lists(RULES, min_size=1, max_size=6), st.permutations(range(5)))
def test_nodes_of_a_kind_can_be_exchanged(links: list[ClusterLink], order: list[int]) -> None:
    nodes = (*NODES, ClusterNode(name="e", node_type="L4:1", region="south"))
    asked = problem(cluster=cluster(nodes=nodes, links=tuple(links)))
    own = flow_instance(asked, CATALOG, "chat")
    # A permutation that only moves nodes within their kind leaves every link as it is.
    moved = np.arange(own.size)
    for kind in set(own.kind.tolist()):
        members = np.flatnonzero(own.kind == kind)
        moved[members] = [i for i in order if i in members]
    assert np.array_equal(own.link[np.ix_(moved, moved)], own.link)
    assert np.array_equal(own.latency[np.ix_(moved, moved)], own.latency)
    assert np.array_equal(own.enter[moved], own.enter)
    assert np.array_equal(own.leave_s[moved], own.leave_s)
    assert np.array_equal(own.rate[moved], own.rate)
