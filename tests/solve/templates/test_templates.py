"""The template search is exact: equal to brute force, to the integer program, and to itself from disk."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import MissingDependencyError, UsageError
from atoll.solve.templates import generate as generating
from atoll.solve.templates.generate import (
    RoleTables,
    best_layout,
    generate,
    multiset_count,
    patterns,
    search_limits,
)
from atoll.solve.templates.template_cache import TemplateCache, library_key
from tests.reference import template_ilp as ilp
from tests.reference.template_brute import brute_force
from tests.seeds import examples, seeds


def tables(
    seed: int, types: int, layers: int, *, stages: int = 4, limit: float = 100.0
) -> RoleTables:
    random = np.random.default_rng(seed)
    rates = np.sort(random.integers(0, 60, (stages, 1, types, layers + 1)), axis=-1)[..., ::-1]
    rates = np.repeat(rates, 3, axis=1).astype(np.float64)
    rates[:, 0] -= random.integers(0, 10, rates[:, 0].shape)
    rates[:, 2] -= random.integers(0, 25, rates[:, 2].shape)
    names = tuple(f"t{c}" for c in range(types))
    return RoleTables("role", names, np.maximum(rates, 0.0), (1.0,) * types, limit)


small = st.builds(
    tables,
    seed=st.integers(0, 10_000),
    types=st.integers(1, 3),
    layers=st.integers(1, 6),
    stages=st.integers(1, 4),
)


@examples(30)
@given(small, st.data())
def test_layouts_are_optimal_and_real(role: RoleTables, data: st.DataObject) -> None:
    types = len(role.node_types)
    nodes = sorted(data.draw(st.lists(st.integers(0, types - 1), min_size=1, max_size=4)))
    layout = best_layout(role, np.bincount(nodes, minlength=types))
    assert layout.throughput == brute_force(role, nodes)
    if not layout.stages:
        assert layout.throughput == 0.0
        return
    assert layout.stages[0].start == 0
    assert layout.stages[-1].end == role.layers
    assert all(a.end == b.start for a, b in itertools.pairwise(layout.stages))
    assert sorted(kind for s in layout.stages for kind in s.nodes) == [
        role.node_types[c] for c in nodes
    ]
    assert min(s.rate for s in layout.stages) >= layout.throughput * (1 - 1e-9)


@examples(13)
@given(small)
def test_library_holds_exactly_what_no_smaller_instances_match(role: RoleTables) -> None:
    types = len(role.node_types)
    library = generate(role, 4)
    kept = {
        tuple(np.repeat(np.arange(types), counts).tolist()): rate
        for counts, rate in zip(library.counts, library.throughput, strict=True)
    }
    best: dict[tuple[int, ...], float] = {}
    together: dict[tuple[int, ...], float] = {}
    for size in range(1, 5):
        for nodes in itertools.combinations_with_replacement(range(types), size):
            fewer = [best[nodes[:i] + nodes[i + 1 :]] for i in range(size) if size > 1]
            best[nodes] = max([brute_force(role, nodes), *fewer])
            split = 0.0
            for mask in range(1, (1 << size) - 1):
                one = tuple(c for i, c in enumerate(nodes) if mask >> i & 1)
                other = tuple(c for i, c in enumerate(nodes) if not mask >> i & 1)
                split = max(split, together[one] + together[other])
            together[nodes] = max(best[nodes], split)
            assert kept.get(nodes) == (best[nodes] if best[nodes] > split else None), nodes
    assert library.multisets == multiset_count(types, 4)


def test_chunks_on_all_cores_are_one_library(monkeypatch: pytest.MonkeyPatch) -> None:
    role = tables(3, 3, 6)
    whole = generate(role, 4)
    monkeypatch.setattr(generating, "_CHUNK", 4)
    parts = generate(role, 4)
    assert len(whole.throughput) > 8
    np.testing.assert_array_equal(parts.counts, whole.counts)
    np.testing.assert_array_equal(parts.throughput, whole.throughput)
    assert (parts.multisets, parts.max_kinds) == (whole.multisets, whole.max_kinds)


def real(seed: int, types: int, layers: int, size: float) -> RoleTables:
    """Tables of rates that are no whole numbers, of any size."""
    whole = tables(seed, types, layers)
    noise = np.random.default_rng(seed).uniform(0.9, 1.1, whole.rates.shape)
    return replace(whole, rates=whole.rates * noise * size)


@examples(20)
@given(
    st.builds(
        real,
        seed=st.integers(0, 10_000),
        types=st.integers(1, 3),
        layers=st.integers(1, 6),
        size=st.sampled_from((1e-6, 1.0, 1e5)),
    )
)
def test_throughput_is_the_layouts_own_whatever_its_size(role: RoleTables) -> None:
    """The search compares whole numbers; what it returns is not rounded to them."""
    library = generate(role, 4)
    for index, (counts, rate) in enumerate(zip(library.counts, library.throughput, strict=True)):
        layout = library.layout(index)
        assert layout.throughput == rate == min(stage.rate for stage in layout.stages)
        nodes = np.repeat(np.arange(len(counts)), counts).tolist()
        assert rate == pytest.approx(brute_force(role, nodes), rel=1e-6)
        for s, stage in enumerate(layout.stages):
            position = 0 if s == 0 else 2 if s == len(layout.stages) - 1 else 1
            at = [role.node_types.index(kind) for kind in stage.nodes]
            held = stage.end - stage.start
            own = role.steady[len(layout.stages) - 1, position, at, held]
            assert stage.rates == tuple(own)
            assert (own <= role.rates[len(layout.stages) - 1, position, at, held]).all()


def test_twenty_nodes_carry_twenty_times_one() -> None:
    """A rate of 0.0052/s was counted as 0.0052 * 0.9904."""
    rates = np.zeros((1, 3, 1, 5))
    rates[0, 0, 0, 1:] = 0.005249871
    library = generate(RoleTables("long", ("L40S:1",), rates, (1.0,), 100.0), 6)
    assert library.throughput.tolist() == [0.005249871]


def test_units_are_as_fine_as_fits() -> None:
    for size in (1e-9, 1.0, 1e9):
        role = real(3, 3, 40, size)
        top = int(role.units.astype(np.int64).max())
        assert 2**31 / 128 < top * 8 < 2**31
        scaled = role.steady * role.scale
        uncut = role.steady <= role.top
        assert (np.abs(role.units - scaled)[uncut] <= 1.0).all()


@examples(10)
@given(st.integers(0, 10_000), st.integers(1, 3))
def test_sets_of_few_kinds_are_the_same_where_others_are_left_out(seed: int, kinds: int) -> None:
    role = tables(seed, 4, 5)
    whole = generate(role, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atoll.solve.templates.generate.MIN_KINDS", kinds)
        patch.setattr("atoll.solve.templates.generate.MAX_MULTISETS", 1)
        few = generate(role, 4)
    assert few.max_kinds == kinds
    assert few.multisets == multiset_count(4, 4, kinds)
    kept = (whole.counts > 0).sum(axis=1) <= kinds
    assert np.array_equal(few.counts, whole.counts[kept])
    assert np.array_equal(few.throughput, whole.throughput[kept])


def test_limits_of_the_search() -> None:
    assert search_limits(20, 6) == (6, 6)
    assert search_limits(40, 6) == (6, 3)
    assert search_limits(26, 6) == (6, 4)
    nodes, kinds = search_limits(500, 8)
    assert (nodes < 6, kinds) == (True, 3)
    assert search_limits(1, 8) == (8, 8)


@pytest.mark.parametrize(("types", "nodes", "kinds"), [(3, 4, 2), (4, 3, 8), (5, 2, 1)])
def test_count_of_multisets(types: int, nodes: int, kinds: int) -> None:
    every = [
        combination
        for size in range(1, nodes + 1)
        for combination in itertools.combinations_with_replacement(range(types), size)
    ]
    assert multiset_count(types, nodes, kinds) == sum(len(set(c)) <= kinds for c in every)


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_when_time_is_up_the_sizes_that_were_finished_are_what_there_is(calls: int) -> None:
    role = tables(4, 3, 5)
    asked = itertools.count()
    cut = generate(role, 5, until=lambda: next(asked) >= calls)
    # One question for each size: there are few multisets.
    assert cut.max_nodes == calls + 1
    whole = generate(role, calls + 1)
    assert np.array_equal(cut.counts, whole.counts)
    assert np.array_equal(cut.throughput, whole.throughput)
    assert cut.multisets == whole.multisets


@pytest.mark.parametrize(("limit", "nodes"), [(2.0, 2), (0.5, 1)])
def test_memory_limit_leaves_large_multisets_out_but_no_single_node(
    limit: float, nodes: int
) -> None:
    role = tables(6, 2, 4, limit=limit)
    library = generate(role, 4)
    assert library.multisets == multiset_count(2, nodes)
    assert library.counts.sum(axis=1).max() <= nodes


def test_nothing_on_offer_gives_no_templates() -> None:
    nothing = RoleTables("role", (), np.zeros((2, 3, 0, 5)), (), 100.0)
    library = generate(nothing, 3)
    assert (len(library), library.counts.shape, library.max_nodes) == (0, (0, 0), 3)
    useless = generate(replace(tables(1, 2, 4), rates=np.zeros((2, 3, 2, 5))), 3)
    assert (len(useless), useless.multisets) == (0, multiset_count(2, 3))


def test_order_of_node_types_changes_nothing() -> None:
    role = tables(5, 3, 5)
    order = [2, 0, 1]
    turned = RoleTables(
        "role",
        tuple(role.node_types[c] for c in order),
        role.rates[:, :, order],
        tuple(role.memory_bytes[c] for c in order),
        role.memory_limit,
    )
    one, other = generate(role, 4), generate(turned, 4)
    left = {(tuple(c), t) for c, t in zip(one.counts.tolist(), one.throughput, strict=True)}
    back = np.argsort(order)
    right = {
        (tuple(c), t) for c, t in zip(other.counts[:, back].tolist(), other.throughput, strict=True)
    }
    assert left == right


def test_progress_reaches_the_end_and_changes_nothing() -> None:
    role = tables(8, 3, 5)
    seen: list[tuple[int, int]] = []
    with_progress = generate(role, 5, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (multiset_count(3, 5), multiset_count(3, 5))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert np.array_equal(with_progress.throughput, generate(role, 5).throughput)


@pytest.mark.parametrize("size", [0, 9])
def test_sizes_out_of_range_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match="max_nodes_per_instance"):
        generate(tables(1, 2, 3), size)


def test_partitions_of_equal_nodes_are_counted_once() -> None:
    all_equal = (1 << 5) - 1
    six = patterns(6, 6)
    distinct = sum(int(end - begin) for begin, end in six.partition_span[0])
    equal = sum(int(end - begin) for begin, end in six.partition_span[all_equal])
    # Bell(6) = 203 set partitions and p(6) = 11 integer partitions, each without the undivided one.
    assert (distinct, equal) == (202, 10)


@pytest.mark.parametrize("seed", seeds(6))
def test_equal_to_the_integer_program(seed: int) -> None:
    pytest.importorskip("scipy", reason="the reference solver HiGHS comes with scipy")
    role = tables(seed, 3, 8, stages=3)
    random = np.random.default_rng(seed)
    nodes = sorted(int(c) for c in random.integers(0, 3, size=3))
    layout = best_layout(role, np.bincount(nodes, minlength=3))
    assert ilp.best(role, nodes, ilp.highs) == layout.throughput


@pytest.mark.slow
@pytest.mark.parametrize("solver", [ilp.cpsat, ilp.gurobi], ids=["cpsat", "gurobi"])
def test_equal_to_other_solvers(solver: ilp.Solver) -> None:
    role = tables(11, 3, 10, stages=4)
    nodes = [0, 1, 1, 2]
    layout = best_layout(role, np.bincount(nodes, minlength=3))
    try:
        found = ilp.best(role, nodes, solver)
    except MissingDependencyError as error:
        pytest.skip(str(error))
    assert found == layout.throughput


def test_cache_gives_back_the_same_and_survives_damage(tmp_path: Path) -> None:
    role = tables(2, 3, 5)
    cache = TemplateCache(tmp_path)
    fresh = cache.library(role, 4)
    calls: list[int] = []
    again = cache.library(role, 4, progress=lambda done, _: calls.append(done))
    assert calls == []
    assert np.array_equal(fresh.counts, again.counts)
    assert np.array_equal(fresh.throughput, again.throughput)
    assert again.multisets == fresh.multisets
    (file,) = tmp_path.glob("*.npz")
    file.write_bytes(b"not an archive")
    repaired = cache.library(role, 4)
    assert np.array_equal(fresh.throughput, repaired.throughput)


def test_cache_keeps_nothing_that_was_cut_short(tmp_path: Path) -> None:
    role = tables(2, 3, 5)
    cache = TemplateCache(tmp_path)
    assert cache.library(role, 4, until=lambda: True).max_nodes == 1
    assert list(tmp_path.glob("*.npz")) == []
    assert cache.read(role, 4) is None
    assert cache.library(role, 4).max_nodes == 4
    assert cache.library(role, 4, until=lambda: True).max_nodes == 4


def test_cache_key_changes_with_any_capacity() -> None:
    role = tables(2, 3, 5)
    finer = role.rates.copy()
    finer[1, 1, 1, 2] *= 1 + 1e-15
    assert library_key(replace(role, rates=finer), 4) != library_key(role, 4)


def test_cache_key_covers_what_matters() -> None:
    role = tables(2, 3, 5)
    keys = {
        library_key(role, 4),
        library_key(role, 5),
        library_key(tables(3, 3, 5), 4),
        library_key(tables(2, 3, 5, limit=3.0), 4),
        library_key(RoleTables("role", ("a", "b", "c"), role.rates, role.memory_bytes, 100.0), 4),
    }
    assert len(keys) == 5
    renamed = RoleTables("other", role.node_types, role.rates, role.memory_bytes, role.memory_limit)
    assert library_key(renamed, 4) == library_key(role, 4)


def test_an_unwritable_cache_costs_only_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    library = TemplateCache(blocked / "templates").library(tables(2, 2, 4), 3)
    assert len(library) > 0
