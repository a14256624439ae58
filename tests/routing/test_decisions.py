"""Decisions: exact shares, no bursts, masks, and the same answers compiled and plain."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.compiling import entry
from atoll.routing import compiled, decisions
from atoll.routing.decisions import Flags, Floats, Ints
from atoll.routing.graph_router import random_state
from atoll.routing.policies import POLICIES
from atoll.routing.route_tables import RouteTables
from tests.routing.graphs import graphs, layered
from tests.seeds import examples

_EDGES = "int64[::1], int64[::1], float64[::1], int64[::1], float64[::1]"
_STATE = "float64[::1], float64[::1], float64[::1], int64[::1]"
COMPILED = {
    name: entry(arguments)(getattr(compiled, name))
    for name, arguments in {
        "round_robin": f"({_EDGES}, int64, boolean[::1])",
        "min_charged": "(int64[::1], int64[::1], float64[::1], float64[::1], int64, boolean[::1], float64)",
        "walk": f"(int64, {_EDGES}, {_STATE}, boolean[::1], int64[::1])",
        "close": "(int64[::1], int64[::1], float64[::1], int64[::1], boolean[::1], boolean[::1])",
        "mask_full": "(float64[::1], float64[::1], float64, float64, boolean[::1])",
        "reservation": "(float64, float64, float64)",
        "share_run": "(int64, int64, int64)",
        "urgency": "(int64, float64, float64, float64, float64)",
    }.items()
}
"""The decisions as the simulator has them, for Python to call."""

some = examples(25)


class State:
    """Everything a policy reads and moves, fresh."""

    def __init__(self, tables: RouteTables, seed: int = 0) -> None:
        size = tables.vertices
        self.credit = np.zeros(tables.edges)
        self.delay = np.ones(tables.edges)
        self.queue = np.zeros(size)
        self.load = np.zeros(size)
        self.random = random_state(seed)
        self.closed: Flags = np.zeros(size, dtype=np.bool_)
        self.path = np.zeros(size, dtype=np.int64)

    def walk(self, tables: RouteTables, policy: int = 0, fast: bool = False) -> list[int]:
        hops = (COMPILED["walk"] if fast else decisions.walk)(
            policy,
            tables.first,
            tables.target,
            tables.weight,
            tables.order,
            self.credit,
            self.delay,
            self.queue,
            self.load,
            self.random,
            self.closed,
            self.path,
        )
        return [int(v) for v in self.path[:hops]]


def edges_of(tables: RouteTables, path: list[int]) -> list[int]:
    found: list[int] = []
    for a, b in zip([0, *path], [*path, tables.vertices - 1], strict=True):
        hops = list(tables.target[tables.first[a] : tables.first[a + 1]])
        found.append(int(tables.first[a]) + hops.index(b))
    return found


def star(weights: list[float]) -> tuple[Ints, Ints, Floats, Ints]:
    """One vertex with an edge for each weight."""
    count = len(weights)
    first = np.array([0, count], dtype=np.int64)
    return first, np.arange(count) + 1, np.array(weights), np.arange(count)


@given(st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=12), st.integers(1, 400))
def test_every_edge_is_always_within_one_request_of_its_share(
    weights: list[float], requests: int
) -> None:
    first, target, weight, order = star(weights)
    credit = np.zeros(len(weights))
    closed = np.zeros(len(weights) + 1, dtype=np.bool_)
    counts = np.zeros(len(weights))
    share = weight / weight.sum()
    for n in range(1, requests + 1):
        counts[COMPILED["round_robin"](first, target, weight, order, credit, 0, closed)] += 1
        assert np.abs(counts - n * share).max() < 1.0


@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.integers(0, 50))
def test_every_period_is_exact_wherever_it_begins(weights: list[int], skipped: int) -> None:
    first, target, weight, order = star([float(w) for w in weights])
    credit = np.zeros(len(weights))
    closed = np.zeros(len(weights) + 1, dtype=np.bool_)

    def pick() -> int:
        return int(COMPILED["round_robin"](first, target, weight, order, credit, 0, closed))

    for _ in range(skipped):
        pick()
    period = np.bincount([pick() for _ in range(sum(weights))], minlength=len(weights))
    assert period.tolist() == weights


def test_requests_are_interleaved_not_sent_in_runs() -> None:
    first, target, weight, order = star([5.0, 1.0, 1.0])
    credit = np.zeros(3)
    closed = np.zeros(4, dtype=np.bool_)
    picks = [
        decisions.round_robin(first, target, weight, order, credit, 0, closed) for _ in range(7)
    ]
    assert sorted(picks) == [0, 0, 0, 0, 0, 1, 2]
    # The two small ones stand apart, not next to each other.
    assert abs(picks.index(1) - picks.index(2)) >= 3


@some
@given(graphs(), st.integers(1, 300))
def test_shares_hold_at_every_vertex_of_a_graph(tables: RouteTables, requests: int) -> None:
    state = State(tables)
    counts = np.zeros(tables.edges)
    for _ in range(requests):
        for e in edges_of(tables, state.walk(tables, fast=True)):
            counts[e] += 1
    for v in range(tables.vertices - 1):
        edges = slice(int(tables.first[v]), int(tables.first[v + 1]))
        total = tables.weight[edges].sum()
        if total > 0:
            share = tables.weight[edges] / total
            assert np.abs(counts[edges] - counts[edges].sum() * share).max() < 1.0


@pytest.mark.parametrize(("siblings", "hops"), [(2, 2), (3, 3), (6, 6), (4, 2), (2, 4), (6, 3)])
def test_siblings_do_not_send_bursts_to_the_same_next_hop(siblings: int, hops: int) -> None:
    tables = layered([[[1.0] * siblings], [[1.0] * hops] * siblings, [[1.0]] * hops])
    state = State(tables)
    got = np.zeros(hops)
    worst = 0.0
    for n in range(1, 5 * siblings * hops + 1):
        got[state.walk(tables)[1] - 1 - siblings] += 1
        worst = max(worst, float(np.abs(got - n / hops).max()))
    assert worst < 1.0
    # In step, the siblings would be up to this far off:
    unturned = State(tables)
    aligned = tables.order.copy()
    tables.order[:] = np.arange(tables.edges)
    got[:] = 0
    in_step = 0.0
    for n in range(1, 5 * siblings * hops + 1):
        got[unturned.walk(tables)[1] - 1 - siblings] += 1
        in_step = max(in_step, float(np.abs(got - n / hops).max()))
    tables.order[:] = aligned
    assert in_step > worst


@given(
    st.lists(st.floats(0.1, 10.0), min_size=2, max_size=6),
    st.lists(st.integers(0, 63), min_size=1, max_size=200),
)
def test_masked_edges_get_nothing_and_the_rest_keeps_its_shares(
    weights: list[float], masks: list[int]
) -> None:
    first, target, weight, order = star(weights)
    credit = np.zeros(len(weights))
    due = np.zeros(len(weights))
    counts = np.zeros(len(weights))
    for mask in masks:
        closed = np.array([False, *(bool(mask >> i & 1) for i in range(len(weights)))])
        picked = decisions.round_robin(first, target, weight, order, credit, 0, closed)
        open_ = ~closed[1:]
        if not open_.any():
            assert picked == -1
            continue
        assert open_[picked]
        counts[picked] += 1
        due += np.where(open_, weight, 0.0) / weight[open_].sum()
    # Shares under changing masks: credit is what an edge should have had less what it got.
    assert counts.sum() == pytest.approx(due.sum())
    assert np.abs(counts - due).max() < len(weights)


def test_an_opened_edge_is_not_flooded_with_what_it_missed() -> None:
    first, target, weight, order = star([1.0, 1.0])
    credit = np.zeros(2)
    shut = np.array([False, False, True])
    for _ in range(50):
        assert decisions.round_robin(first, target, weight, order, credit, 0, shut) == 0
    none = np.zeros(3, dtype=np.bool_)
    picks = [decisions.round_robin(first, target, weight, order, credit, 0, none) for _ in range(8)]
    assert sum(picks) == 4
    assert picks[:2] != [1, 1]


@some
@given(graphs(), st.integers(0, 2**20), st.sampled_from(sorted(POLICIES.values())), st.booleans())
def test_compiled_and_plain_agree(
    tables: RouteTables, seed: int, policy: int, masked: bool
) -> None:
    plain, fast = State(tables, seed), State(tables, seed)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        mask: Flags = np.zeros(tables.vertices, dtype=np.bool_)
        if masked:
            mask[1:-1] = rng.random(tables.vertices - 2) < 0.3
        opened = [
            f(tables.first, tables.target, tables.weight, tables.sweep, mask, state.closed)
            for f, state in ((decisions.close, plain), (COMPILED["close"], fast))
        ]
        assert opened[0] == opened[1]
        assert np.array_equal(plain.closed, fast.closed)
        for state in (plain, fast):
            state.queue[:] = state.load[:] = np.random.default_rng(seed).integers(
                0, 4, tables.vertices
            )
        path = plain.walk(tables, policy)
        assert path == fast.walk(tables, policy, fast=True)
        assert bool(path) == opened[0]
        assert not any(mask[v] for v in path)
        for state in (plain, fast):
            if path:
                decisions.observe(state.delay, edges_of(tables, path)[0], 0.5 + len(path), 0.3)
        booked = rng.random(tables.vertices) * 5
        room = np.full(tables.vertices, 4.0)
        fulls: list[list[bool]] = []
        for f in (decisions.mask_full, COMPILED["mask_full"]):
            full: Flags = np.zeros(tables.vertices, dtype=np.bool_)
            assert f(booked, room, 0.8, 1.0, full) == full.sum()
            fulls.append(full.tolist())
        assert fulls[0] == fulls[1]
    for name in ("credit", "delay", "random"):
        assert np.array_equal(getattr(plain, name), getattr(fast, name))
    assert COMPILED["reservation"](5.0, 9.0, 4.0) == decisions.reservation(5.0, 9.0, 4.0) == 15.0
    assert COMPILED["share_run"](2, 10, 6) == decisions.share_run(2, 10, 6) == 0.5


@some
@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0]), min_size=1, max_size=5).filter(any),
    st.lists(st.integers(1, 2000), min_size=20, max_size=60),
)
def test_plain_round_robin_shares_tokens_by_flow(weights: list[float], sizes: list[int]) -> None:
    count = len(weights)
    first = np.array([0, count] + [count] * count, dtype=np.int64)
    target = np.arange(1, count + 1, dtype=np.int64)
    weight = np.array(weights)
    charge, closed = np.zeros(count), np.zeros(count + 1, dtype=np.bool_)
    for size in sizes:
        asked = (first, target, weight, charge, 0, closed, float(size))
        edge = decisions.min_charged(*asked)
        assert edge == COMPILED["min_charged"](*asked)
        assert weights[edge] > 0.0
        charge[edge] += size / weight[edge]
    # No edge is further ahead of another than the largest request takes it.
    used = charge[weight > 0.0]
    assert used.max() - used.min() <= max(sizes) / weight[weight > 0.0].min()
    closed[1:] = True
    assert decisions.min_charged(first, target, weight, charge, 0, closed, 1.0) == -1


@some
@given(graphs(), st.integers(0, 2**20))
def test_nothing_is_sent_into_a_dead_end(tables: RouteTables, seed: int) -> None:
    rng = np.random.default_rng(seed)
    mask: Flags = np.zeros(tables.vertices, dtype=np.bool_)
    mask[1:-1] = rng.random(tables.vertices - 2) < 0.4
    state = State(tables)
    opened = decisions.close(
        tables.first, tables.target, tables.weight, tables.sweep, mask, state.closed
    )
    # Against a search forwards.
    reached, frontier = {0}, [0]
    while frontier:
        v = frontier.pop()
        for e in range(int(tables.first[v]), int(tables.first[v + 1])):
            w = int(tables.target[e])
            if tables.weight[e] > 0 and not mask[w] and w not in reached:
                reached.add(w)
                frontier.append(w)
    assert opened == (tables.vertices - 1 in reached)
    before = state.credit.copy()
    path = state.walk(tables)
    if not opened:
        assert path == []
        assert np.array_equal(state.credit, before)


def test_draws_are_even_and_fixed_by_the_seed() -> None:
    state = random_state(7)
    draws = np.array([decisions.draw(state) for _ in range(4000)])
    assert 0.0 <= draws.min() < 0.01 < 0.99 < draws.max() < 1.0
    assert np.bincount((draws * 10).astype(int), minlength=10).min() > 330
    again = random_state(7)
    assert [decisions.draw(again) for _ in range(5)] == draws[:5].tolist()


def test_random_goes_by_weight_and_two_choices_by_load() -> None:
    tables = layered([[[3.0, 1.0]], [[1.0], [1.0]]])
    state = State(tables)
    picks = [state.walk(tables, decisions.RANDOM)[0] for _ in range(2000)]
    assert 0.70 < picks.count(1) / 2000 < 0.80
    state.load[1] = 5.0
    picks = [state.walk(tables, decisions.TWO_CHOICES)[0] for _ in range(2000)]
    # The loaded one is taken only where both draws hit it: 9 / 16.
    assert 0.51 < picks.count(1) / 2000 < 0.61


def test_swarm_shares_requests_by_speed() -> None:
    tables = layered([[[1.0, 1.0]], [[1.0], [1.0]]])
    state = State(tables)
    for _ in range(200):
        decisions.observe(state.delay, 0, 0.1, 0.2)
        decisions.observe(state.delay, 1, 0.4, 0.2)
    picks = [state.walk(tables, decisions.THROUGHPUT)[0] for _ in range(500)]
    assert picks.count(1) == pytest.approx(400, abs=2)


def test_shortest_queue_and_min_load_look_at_different_things() -> None:
    tables = layered([[[1.0, 1.0]], [[1.0], [1.0]]])
    state = State(tables)
    state.queue[1:3] = 4, 2
    state.load[1:3] = 0.1, 0.9
    assert state.walk(tables, decisions.SHORTEST_QUEUE) == [2]
    assert state.walk(tables, decisions.LEAST_LOAD) == [1]


def test_a_node_is_full_by_what_its_requests_are_expected_to_need() -> None:
    full: Flags = np.zeros(3, dtype=np.bool_)
    room = np.array([1000.0, 1000.0, 100.0])
    count = decisions.mask_full(np.array([700.0, 850.0, 0.0]), room, 0.9, 95.0, full)
    assert (count, full.tolist()) == (1, [False, True, False])
    assert decisions.reservation(700, 10, 200) == 900
    assert decisions.reservation(700, 250, 200) == 951


def test_the_gateway_needs_no_numba() -> None:
    modules = "decisions, route_tables, pipeline_router, instances, reweight, policies"
    code = f"import sys; from atoll.routing import {modules}; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


seconds = st.floats(0.0, 1e5)
waiting_prompts = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=20)
ordered = st.sampled_from([decisions.BY_SLACK, decisions.BY_LENGTH])


@given(order=ordered, prompts=waiting_prompts, promise_s=st.floats(0.01, 1e3))
def test_prompts_stand_in_three_ranks(
    order: int, prompts: list[tuple[float, float]], promise_s: float
) -> None:
    now_s = max(arrival_s for arrival_s, _ in prompts)
    ranks: dict[int, list[tuple[float, float, float]]] = {0: [], 1: [], 2: []}
    for arrival_s, service_s in prompts:
        key = decisions.urgency(order, now_s, arrival_s, promise_s, service_s)
        assert key == COMPILED["urgency"](order, now_s, arrival_s, promise_s, service_s)
        if now_s - arrival_s > decisions.PATIENCE * promise_s:
            rank = 0
        elif arrival_s + promise_s - service_s >= now_s:
            rank = 1
        else:
            rank = 2
        wanted = {decisions.BY_SLACK: arrival_s + promise_s - service_s}.get(order, service_s)
        ranks[rank].append((key, wanted if rank == 1 else arrival_s, service_s))
    for earlier, later in ((0, 1), (1, 2), (0, 2)):
        for one, *_ in ranks[earlier]:
            assert all(one < other for other, *_ in ranks[later])
    # Within a rank keys rise with what the rank goes by; sums with `AGES` keep microseconds.
    for some_rank in ranks.values():
        for key, wanted, _ in some_rank:
            assert all(key <= other + 1e-6 for other, larger, _ in some_rank if larger >= wanted)


def test_by_arrival_the_oldest_goes_first_whatever_it_takes() -> None:
    assert decisions.urgency(decisions.BY_ARRIVAL, 100.0, 3.0, 1.0, 50.0) == 3.0
