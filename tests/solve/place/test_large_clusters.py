"""Large clusters site by site: nothing is lost or held twice, and the same work gives the same bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.rng import stream
from atoll.plan.files.fleet_file import parse_fleet
from atoll.solve.place.bound.bounds import upper_bound
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.flow_instance import FlowInstance, part_of
from atoll.solve.place.from_problem import flow_instance
from atoll.solve.place.search import flow_search
from atoll.solve.place.search.flow_search import search
from atoll.solve.place.search.large_clusters import deal, find_sites, place_sites
from benchmarks.placement.flow_cases import large_cluster, site_fleet
from tests.seeds import examples

few = examples(15)


def sites(n: int) -> FlowInstance:
    problem = parse_fleet(site_fleet(n))
    return flow_instance(problem, problem.catalog(), problem.services[0])


@few
@given(st.integers(2, 90), st.integers(1, 8), st.integers(0, 2**20))
def test_groups_have_equal_numbers_of_every_kind(n: int, count: int, seed: int) -> None:
    instance = large_cluster(n, stream(seed, "deal"))
    nodes = np.arange(n)[np.random.default_rng(seed).random(n) < 0.7].astype(np.int64)
    groups = deal(instance, nodes, count)
    assert sorted(np.concatenate(groups).tolist()) == nodes.tolist()
    numbers = [np.bincount(instance.kind[group], minlength=n) for group in groups]
    assert (np.ptp(np.array(numbers), axis=0) <= 1).all()


@few
@given(st.integers(2, 60), st.integers(1, 120), st.integers(0, 2**20))
def test_every_site_holds_the_model_or_there_is_one(n: int, layers: int, seed: int) -> None:
    instance = replace(large_cluster(n, stream(seed, "sites")), layers=layers)
    found = find_sites(instance)
    assert sorted(np.concatenate(found).tolist()) == list(range(n))
    if len(found) > 1:
        assert min(int(instance.max_layers[site].sum()) for site in found) >= layers
    regions = np.array(instance.regions)
    for site in found:
        assert sum(int((regions == name).sum()) for name in set(regions[site])) == len(site)


def test_a_site_that_is_too_small_joins_the_one_it_has_the_widest_link_to() -> None:
    instance = large_cluster(60, stream(3, "sites"))
    regions = np.array(["a"] * 28 + ["b"] * 28 + ["c"] * 4)
    link = np.where(regions[:, None] == regions[None, :], 9.0, 1.0)
    link[np.ix_(regions == "c", regions == "b")] = 2.0
    small = replace(instance, regions=tuple(regions.tolist()), link=link, layers=60)
    found = find_sites(small)
    assert [site.tolist() for site in found] == [list(range(28)), list(range(28, 60))]


def test_a_part_keeps_what_its_nodes_have() -> None:
    instance = sites(60)
    nodes = np.array([7, 3, 50])
    part = part_of(instance, nodes)
    assert part.names == tuple(instance.names[i] for i in nodes)
    assert part.timing is not None
    assert instance.timing is not None
    np.testing.assert_array_equal(part.rate, instance.rate[nodes])
    np.testing.assert_array_equal(part.timing.kv_tokens, instance.timing.kv_tokens[nodes])
    assert part.link[0, 2] == instance.link[7, 50]
    assert part.latency[2, 1] == instance.latency[50, 3]


def test_no_site_no_placement() -> None:
    instance = large_cluster(20, stream(9, "search"))
    short = replace(instance, layers=int(instance.max_layers.sum()) + 1)
    assert place_sites(short, seed=0) is None


@pytest.fixture
def eighty(monkeypatch: pytest.MonkeyPatch) -> FlowInstance:
    """Two sites, searched as those of a large cluster."""
    monkeypatch.setattr(flow_search, "LARGE", 79)
    return sites(80)


def test_sites_come_close_to_the_bound_and_are_the_same_every_time(eighty: FlowInstance) -> None:
    runs = [search(eighty, evaluations=2_000, seed=2) for _ in range(2)]
    np.testing.assert_array_equal(runs[0].placement.start, runs[1].placement.start)
    np.testing.assert_array_equal(runs[0].placement.end, runs[1].placement.end)
    assert not runs[0].cut_short
    value = max_flow(eighty, runs[0].placement).value
    assert value == pytest.approx(runs[0].value, rel=1e-6)
    # More evaluations find no more: what is left is the bound's, which covers layers by whole nodes.
    assert 0.91 * upper_bound(eighty).value <= value <= runs[0].bound * (1 + 1e-9)


def test_a_clock_that_is_over_says_so_and_still_places(eighty: FlowInstance) -> None:
    found = search(eighty, seconds=0.0)
    assert found.cut_short
    assert found.value > 0.0
