"""Bounds never fall below the best flow of any placement, and meet it where they should."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.solve.place.bound.bounds import (
    Covers,
    compute_bound,
    coverage_bound,
    find_missing,
    upper_bound,
)
from atoll.solve.place.bound.cuts import crossing_rate, links_are_loose, network, rates
from atoll.solve.place.bound.lanes import lanes, max_layers, splits
from atoll.solve.place.bound.lanes_regions import region_lanes
from atoll.solve.place.flow_instance import FlowInstance
from tests.solve.place.exact_cases import (
    Shape,
    best_flow,
    cluster,
    flow_of,
    random_cluster,
)

shapes = st.builds(
    Shape,
    nodes=st.integers(2, 4),
    layers=st.integers(2, 5),
    tables=st.integers(1, 3),
    links=st.sampled_from(["loose", "random"]),
    partial=st.booleans(),
)


def mixed(partial: bool = False) -> FlowInstance:
    """Two fast nodes and three slow ones; no link binds."""
    fast, slow = [90.0, 50.0, 30.0, 20.0], [40.0, 25.0]
    return cluster(6, [fast, fast, slow, slow, slow], partial=partial)


@given(st.integers(0, 10**6), shapes)
def test_no_bound_is_below_the_best_flow(seed: int, shape: Shape) -> None:
    instance = random_cluster(seed, shape)
    best = best_flow(instance)
    quick, tight = upper_bound(instance, tight=False), upper_bound(instance)
    assert compute_bound(instance) >= best * (1 - 1e-12)
    assert coverage_bound(instance) >= best * (1 - 1e-12)
    assert quick.value >= tight.value >= best * (1 - 1e-9)
    assert upper_bound(instance, value=best).value >= best * (1 - 1e-9)


def test_coverage_is_the_largest_flow_all_nodes_can_cover() -> None:
    instance = cluster(6, [[200.0, 60.0, 30.0]] * 2 + [[40.0, 25.0]] * 3)
    bound = coverage_bound(instance)
    held = np.arange(instance.rate.shape[1])

    def covered(flow: float) -> float:
        return float((held * np.minimum(instance.rate, flow)).max(axis=1).sum()) / flow

    assert covered(bound * (1 - 1e-9)) >= 6.0 > covered(bound * (1 + 1e-9))
    assert bound < compute_bound(instance)


def test_coverage_on_a_plateau_is_its_upper_end() -> None:
    # Any flow up to 30 keeps one chain of 3 + 3 layers busy exactly: float sums must not end it early.
    instance = cluster(6, [[90.1, 50.3, 30.7]] * 2)
    assert coverage_bound(instance) == pytest.approx(30.7, rel=1e-9)


def test_covers_prove_what_coverage_does_not() -> None:
    # Above 10 each of the two layers needs two of the nodes, and there are three.
    for rates_ in ([10.0, 10.0, 10.0], [10.0, 10.0, 6.0]):
        instance = cluster(2, [[rate] for rate in rates_])
        bound = upper_bound(instance)
        assert coverage_bound(instance) == pytest.approx(sum(rates_) / 2)
        assert bound.value == pytest.approx(10.0, rel=1e-6)
        assert best_flow(instance) == 10.0
        assert bound.kind == "covers"


@pytest.mark.parametrize(
    ("large", "small"),
    [(95.0, 5.0), (99.9, 0.1), pytest.param(99.999, 0.001, marks=pytest.mark.slow)],
)
def test_nodes_just_short_of_a_flow_count_with_what_is_missing(large: float, small: float) -> None:
    instance = cluster(2, [[large, large], [small, small]])
    assert best_flow(instance) == pytest.approx(100.0)
    assert 100.0 * (1 - 1e-9) <= upper_bound(instance).value <= 100.0 * (1 + 1e-6)


def two_sites(link: float, partial: bool = False) -> FlowInstance:
    """Two nodes at each of two sites; a chain of all four carries 20."""
    table = [30.0, 20.0]
    instance = cluster(8, [table] * 4, regions=["a", "a", "b", "b"], link=link, partial=partial)
    instance.link[:2, :2] = instance.link[2:, 2:] = 1e6
    return instance


@pytest.mark.parametrize("partial", [False, True])
def test_slow_links_between_parts_refute_a_chain(partial: bool) -> None:
    assert upper_bound(two_sites(20.0, partial)).value == pytest.approx(20.0, rel=1e-6)
    # No chain of 8 layers fits one site, and nodes beside each other hold fewer than 8.
    for link in (19.0, 2.0):
        bound = upper_bound(two_sites(link, partial))
        assert bound.kind == "covers"
        assert bound.value == pytest.approx(link, rel=1e-6)


def test_lanes_are_wide_where_regions_meet() -> None:
    # One link between sites carries 12 of the 20: two nodes on either side share four links.
    table = [30.0, 20.0, 10.0]
    regions = ["a"] * 4 + ["b"] * 4
    instance = cluster(12, [table] * 8, regions=regions, link=12.0)
    instance.link[:4, :4] = instance.link[4:, 4:] = 1e6
    found = region_lanes(instance, seconds=10.0)
    assert found is not None
    assert flow_of(instance, found) >= 20.0
    straight = lanes(instance, seconds=10.0)
    assert straight is not None
    assert flow_of(instance, straight) < 20.0
    assert region_lanes(cluster(4, [table] * 2), seconds=5.0) is None


def test_prices_of_a_refuted_flow_hold_for_every_cover() -> None:
    covers = Covers(mixed())
    price = covers.prices(upper_bound(mixed()).value * 1.01)
    assert price is not None
    assert covers.max_covered(price) < 6
    rng = np.random.default_rng(0)
    flow = upper_bound(mixed()).value * 1.01
    for _ in range(300):
        chosen = rng.integers(0, 3, covers.items)
        if chosen @ covers.rate >= flow:
            assert chosen @ price >= 1 - 1e-9


def test_a_known_optimum_ends_the_bound_just_above_it() -> None:
    instance = cluster(2, [[10.0], [10.0], [6.0]])
    assert upper_bound(instance, value=10.0).value == pytest.approx(10.0, rel=2e-9)


def test_a_region_behind_a_slow_link_bounds_the_flow() -> None:
    table = [100.0, 80.0]
    instance = cluster(4, [table] * 4, regions=["a", "a", "b", "b"], link=3.0)
    instance.link[:2, :2] = instance.link[2:, 2:] = 1e6
    instance.enter[2:] = 0.0
    # Both regions can hold the model, but nothing enters b except over four links of 3.
    assert upper_bound(replace(instance, max_layers=np.array([2, 2, 2, 2]))).kind != "network"
    short = replace(instance, max_layers=np.array([1, 1, 2, 2]))
    bound = upper_bound(short)
    assert (bound.kind, bound.value) == ("network", 12.0)
    assert "region b" in bound.why
    assert best_flow(short) <= 12.0


def test_regions_limit_the_layers_computed_in_them() -> None:
    table = [40.0, 20.0]
    near = cluster(4, [table] * 4, regions=["a", "a", "b", "b"], link=2.0)
    near.link[:2, :2] = near.link[2:, 2:] = 1e6
    far = replace(near, enter=np.array([1e6, 1e6, 0.0, 0.0]), leave=np.array([1e6, 1e6, 0.0, 0.0]))
    assert coverage_bound(far) < coverage_bound(near)
    assert coverage_bound(far) >= best_flow(far)


def test_source_and_sink_bound_the_flow() -> None:
    bound = upper_bound(cluster(2, [[50.0, 40.0]] * 2, ends=7.0))
    assert (bound.kind, bound.value) == ("network", 14.0)
    assert "source" in bound.why


def test_rates_are_cut_to_the_links_of_a_node() -> None:
    instance = cluster(3, [[50.0, 40.0], [60.0], [60.0]], link=5.0, ends=12.0)
    own = rates(instance)
    assert own[0].tolist() == [0.0, 12.0, 12.0]
    assert rates(replace(instance, partial=True))[0, 1] == 12.0
    inside = np.array([True, False, False])
    assert crossing_rate(network(instance), inside) == 12.0 + 5.0 * 2


def test_loose_links_are_those_that_no_flow_fills() -> None:
    instance = cluster(2, [[50.0, 40.0], [30.0]], link=30.0, ends=50.0)
    assert links_are_loose(instance, 1e9)
    assert not links_are_loose(replace(instance, link=instance.link * 0.9), 1e9)
    assert links_are_loose(replace(instance, link=instance.link * 0.9), 27.0)


@pytest.mark.parametrize("partial", [False, True])
def test_missing_layers_are_counted(partial: bool) -> None:
    instance = cluster(6, [[9.0, 8.0], [9.0]], partial=partial)
    lack = find_missing(instance, 1.5e9)
    assert (lack.layers, lack.held, lack.needed, lack.gb) == (3, 3, 6, 4.5)
    assert str(lack) == "3 of 6 layers have no place, 4.5 GB at 1.5 GB a layer: the nodes hold 3"
    bound = upper_bound(instance)
    assert (bound.value, bound.kind) == (0.0, "memory")
    assert find_missing(mixed()).layers == 0


@given(st.integers(0, 10**6), shapes)
def test_lanes_place_layers_that_carry_their_flow(seed: int, shape: Shape) -> None:
    instance = random_cluster(seed, replace(shape, links="loose"))
    found = lanes(instance, seconds=5.0)
    best = best_flow(instance)
    if found is None:
        assert best == 0.0 or not (np.diff(instance.rate[:, 1:]) <= 0).all()
    else:
        assert 0.0 < flow_of(instance, found) <= best
        assert lanes(instance, seconds=5.0, low=best) is None


@given(st.integers(0, 10**6), shapes)
def test_splits_left_out_are_matched_by_others(seed: int, shape: Shape) -> None:
    instance = random_cluster(seed, shape)
    tables = np.unique(rates(instance), axis=0)
    flow = float(np.random.default_rng(seed).uniform(0.2, 1.5) * tables.max())
    kept = splits(tables, flow)
    alone = max_layers(tables, flow)
    holds = [tuple(max_layers(tables, part) for part in split) for split in kept[1:]]
    assert kept[0] == (flow,)
    assert all((high > alone).any() for high, _ in holds)
    for level in np.unique(tables[(tables > 0.0) & (tables < flow * (1.0 - 1e-12))]):
        high, low = max(level, flow - level), min(level, flow - level)
        most = (max_layers(tables, high), max_layers(tables, low))
        by_others = any((a >= most[0]).all() and (b >= most[1]).all() for a, b in holds)
        assert by_others or (most[0] <= alone).all()
    for i, one in enumerate(holds):
        rest = holds[:i] + holds[i + 1 :]
        assert not any((a >= one[0]).all() and (b >= one[1]).all() for a, b in rest)


def test_lanes_put_nodes_beside_each_other() -> None:
    # One chain carries 50; with the slow nodes in a second lane 25 more.
    instance = cluster(4, [[90.0, 50.0]] * 2 + [[25.0, 25.0]] * 2)
    found = lanes(instance, seconds=5.0)
    assert found is not None
    assert flow_of(instance, found) == best_flow(instance) == 75.0
