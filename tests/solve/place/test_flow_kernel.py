"""The incremental flow of the search against the library's, through long random walks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from atoll.core.compiling import entry
from atoll.core.rng import stream
from atoll.solve.array_types import Ints
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.flow_instance import FlowInstance, Placement
from atoll.solve.place.search.anneal import load
from atoll.solve.place.search.flow_kernel import VALUE, attempt
from atoll.solve.place.search.flow_tables import (
    STATE_TYPE,
    TABLES_TYPE,
    FlowState,
    Tables,
    groups_of,
    state_of,
    tables_of,
)
from atoll.solve.place.search.moves import propose
from benchmarks.placement.flow_cases import large_cluster, small_cluster

propose_one = entry(
    "(uint64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64, int64, int64[:, ::1])"
)(propose)


@entry(f"({TABLES_TYPE}, {STATE_TYPE}, int64[:, ::1], int64, int64)")
def attempt_one(
    tables: tuple[Any, ...], state: tuple[Any, ...], change: Ints, count: int, least: int
) -> bool:
    """`attempt`, which otherwise only compiled code calls."""
    return attempt(Tables(*tables), FlowState(*state), change, count, least)


def walk(instance: FlowInstance, seed: int, steps: int) -> float:
    """Walk, taking any step that keeps a tenth of the flow; compare with the library; return the top flow."""
    tables, units = tables_of(instance)
    state = state_of(tables)
    random = stream(seed, "walk")
    words = random.integers(1, 1 << 63, 1, np.uint64)
    held = np.minimum(instance.max_layers, instance.layers)
    start = np.array([random.integers(0, instance.layers - j + 1) for j in held], np.int64)
    load(tables, state, start, start + held)
    change = np.zeros((instance.size + 2, 3), np.int64)
    kind = instance.kind
    top = 0.0
    for _ in range(steps):
        count = propose_one(
            words, state.start, state.end, tables.max_layers, kind, instance.layers, 20, change
        )
        if not count:
            continue
        before = state.start.copy(), state.end.copy(), state.flow.copy(), state.cover.copy()
        old = int(state.number[VALUE])
        least = old // 10 + int(random.integers(0, 2))
        taken = attempt_one(tuple(tables), tuple(state), change, count, least)
        if not taken:
            after = state.start, state.end, state.flow, state.cover
            for was, now in zip(before, after, strict=True):
                np.testing.assert_array_equal(was, now)
            assert state.number[VALUE] == old
        assert (state.end - state.start <= tables.max_layers).all()
        value = float(state.number[VALUE]) / units
        library = max_flow(instance, Placement(state.start, state.end)).value
        assert value == pytest.approx(library, rel=1e-6, abs=1e-9)
        top = max(top, value)
    return top


@pytest.mark.parametrize("partial", [False, True])
def test_walks_on_small_clusters(partial: bool) -> None:
    random = stream(2, "kernel")
    tops = [walk(replace(small_cluster(random), partial=partial), case, 60) for case in range(15)]
    assert sum(top > 0 for top in tops) >= 8


@pytest.mark.parametrize("partial", [False, True])
def test_walk_over_slow_links(partial: bool) -> None:
    instance = replace(large_cluster(30, stream(3, "kernel")), partial=partial, layers=20)
    assert groups_of(instance).max() > 0
    assert walk(instance, 1, 150) > 0


def test_inside_a_group_no_link_binds() -> None:
    random = stream(4, "groups")
    for _ in range(30):
        instance = small_cluster(random)
        group, top = groups_of(instance), instance.rate.max(axis=1)
        for i in range(instance.size):
            for k in range(instance.size):
                if i != k and group[i] == group[k]:
                    assert instance.link[i, k] >= min(top[i], top[k])
