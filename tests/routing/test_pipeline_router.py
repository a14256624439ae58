"""Pipelines: layers, KV counts, waiting, and nodes that die and come back."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError, UnknownNameError, UsageError
from atoll.routing.decisions import Flags, Floats
from atoll.routing.pipeline_router import Hop, Pipeline, PipelineRouter
from atoll.routing.policies import POLICIES
from atoll.routing.reweight import reweight
from atoll.routing.route_tables import RouteTables
from tests.routing.graphs import graphs, instance
from tests.seeds import examples

some = examples(25)

TWO_BY_TWO = instance(
    [(0, 4), (0, 4), (4, 8), (4, 8)],
    [
        ("source", "n0", 3.0),
        ("source", "n1", 1.0),
        ("n0", "n2", 2.0),
        ("n0", "n3", 1.0),
        ("n1", "n3", 1.0),
        ("n2", "sink", 2.0),
        ("n3", "sink", 2.0),
    ],
)


def routed(router: PipelineRouter, **asked: float) -> Pipeline:
    made = router.route(**asked)
    assert made is not None
    return made


def test_requests_follow_the_flow() -> None:
    router = PipelineRouter(RouteTables.from_instance(TWO_BY_TWO))
    ways = Counter(tuple(hop.node for hop in routed(router).hops) for _ in range(400))
    assert ways == {("n0", "n2"): 200, ("n0", "n3"): 100, ("n1", "n3"): 100}


def test_a_node_runs_what_the_ones_before_it_have_not_done() -> None:
    overlapping = instance(
        [(0, 6), (2, 8), (0, 4)],
        [
            ("source", "n0", 1.0),
            ("source", "n2", 1.0),
            ("n0", "n1", 1.0),
            ("n2", "n1", 1.0),
            ("n1", "sink", 2.0),
        ],
        partial=True,
    )
    router = PipelineRouter(RouteTables.from_instance(overlapping), kv_tokens={"n1": 600.0})
    made = {routed(router, prompt=60.0, estimate=30.0).hops for _ in range(2)}
    assert made == {
        (Hop("n0", 0, 6), Hop("n1", 6, 8)),
        (Hop("n2", 0, 4), Hop("n1", 4, 8)),
    }
    # 2 and 4 of its 6 layers hold 90 tokens each.
    assert router.booked[router.planned.vertex("n1")] == pytest.approx(90 * 2 / 6 + 90 * 4 / 6)


def test_a_full_node_is_passed_by_and_when_all_are_full_requests_wait() -> None:
    router = PipelineRouter(
        RouteTables.from_instance(TWO_BY_TWO), kv_tokens={"n2": 1000.0, "n3": 500.0}, high_water=0.8
    )
    made = []
    while (way := router.route(prompt=100.0, estimate=100.0)) is not None:
        made.append(way)
        assert len(made) < 20
    ends = Counter(way.hops[-1].node for way in made)
    assert ends == {"n2": 4, "n3": 2}
    credit = router._credit.copy()
    assert router.route(prompt=100.0, estimate=100.0) is None
    assert np.array_equal(router._credit, credit)
    router.finish(next(way for way in made if way.hops[-1].node == "n3"))
    assert routed(router, prompt=100.0, estimate=100.0).hops[-1].node == "n3"


def test_an_answer_longer_than_expected_counts_with_its_length() -> None:
    router = PipelineRouter(RouteTables.from_instance(TWO_BY_TWO), kv_tokens={"n2": 1000.0})
    way = routed(router, prompt=100.0, estimate=50.0)
    router.grow(way, generated=20)
    assert set(router.booked[list(way.vertices)]) == {150.0}
    router.grow(way, generated=80)
    assert set(router.booked[list(way.vertices)]) == {181.0}
    router.finish(way)
    assert not router.booked.any()
    with pytest.raises(UsageError, match="finished"):
        router.finish(way)
    with pytest.raises(UsageError, match="finished"):
        router.grow(way, generated=1)


def test_a_request_that_never_fits_is_told_from_one_that_waits() -> None:
    tables = RouteTables.from_instance(TWO_BY_TWO)
    router = PipelineRouter(tables, kv_tokens={"n2": 500.0, "n3": 400.0}, high_water=0.9)
    assert router.possible(300.0, 195.0)
    assert not router.possible(300.0, 205.0)
    # Alone on a node a request may use all of it, high water or not.
    assert routed(router, prompt=300.0, estimate=195.0).hops[-1].node == "n2"


@some
@given(graphs(), st.integers(0, 2**20), st.sampled_from(sorted(POLICIES)))
def test_counts_return_to_nothing_and_never_pass_the_mark(
    tables: RouteTables, seed: int, policy: str
) -> None:
    rng = np.random.default_rng(seed)
    room = {name: float(rng.integers(300, 900)) for name in tables.names[1:-1]}
    router = PipelineRouter(tables, policy=policy, kv_tokens=room, high_water=0.7, seed=seed)
    flying: list[Pipeline] = []
    for _ in range(60):
        if flying and rng.random() < 0.4:
            router.finish(flying.pop(int(rng.integers(len(flying)))))
        made = router.route(prompt=float(rng.integers(1, 90)), estimate=float(rng.integers(1, 90)))
        if made is not None:
            flying.append(made)
            ends = [hop.end for hop in made.hops]
            assert [hop.start for hop in made.hops] == [0, *ends[:-1]]
            assert ends[-1] == tables.end[-1]
        assert (router.booked[1:-1] <= 0.7 * router.capacity[1:-1] + 1e-9).all()
    for made in flying:
        router.finish(made)
    assert not router.booked.any()


def test_a_dead_node_closes_what_only_leads_to_it() -> None:
    router = PipelineRouter(RouteTables.from_instance(TWO_BY_TWO))
    router.lost(["n3"])
    # n1 leads to n3 alone: it is dead itself.
    assert {routed(router).hops for _ in range(9)} == {(Hop("n0", 0, 4), Hop("n2", 4, 8))}
    router.lost(["n2"])
    assert router.route() is None
    router.back(["n3"])
    ways = Counter(routed(router).hops[0].node for _ in range(100))
    # n0 keeps a third of its continuations: 1 request/s, as many as n1.
    assert ways == {"n0": 50, "n1": 50}
    router.back(["n2"])
    assert np.array_equal(router.tables.weight, router.planned.weight)


def test_spare_edges_carry_on_when_the_planned_ones_are_gone() -> None:
    tables = RouteTables.from_instance(TWO_BY_TWO, spare=True)
    router = PipelineRouter(tables)
    assert {h.node for _ in range(8) for h in routed(router).hops} == {"n0", "n1", "n2", "n3"}
    router.lost(["n3"])
    ways = {tuple(hop.node for hop in routed(router).hops) for _ in range(20)}
    assert ways == {("n0", "n2"), ("n1", "n2")}


@some
@given(graphs(), st.integers(0, 2**20))
def test_new_weights_lead_only_where_a_request_can_finish(tables: RouteTables, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dead: Flags = np.zeros(tables.vertices, dtype=np.bool_)
    dead[1:-1] = rng.random(tables.vertices - 2) < 0.3
    new = reweight(tables, dead)
    assert (new.weight <= tables.weight + 1e-12).all()
    tails = tables.source_of
    used = new.weight > 0
    assert not dead[tails[used]].any()
    assert not dead[tables.target[used]].any()
    leads_on = {int(v) for v in tails[used]} | {tables.vertices - 1}
    assert {int(v) for v in tables.target[used]} <= leads_on
    if not dead.any():
        assert np.allclose(new.weight, tables.weight)


def test_a_planner_may_say_how_to_go_on() -> None:
    tables = RouteTables.from_instance(TWO_BY_TWO)
    asked: list[list[str]] = []

    def only_n1(given: RouteTables, dead: Flags) -> Floats:
        asked.append([name for name, gone in zip(given.names, dead, strict=True) if gone])
        return np.where(
            (given.source_of == given.vertex("n0")) | (given.target == given.vertex("n0")),
            0.0,
            given.weight,
        )

    router = PipelineRouter(tables, solve=only_n1)
    router.lost(["n2"])
    assert asked == [["n2"]]
    assert {routed(router).hops[0].node for _ in range(5)} == {"n1"}


def test_swarm_learns_from_what_it_is_told() -> None:
    router = PipelineRouter(RouteTables.from_instance(TWO_BY_TWO), policy="swarm")
    for _ in range(300):
        way = routed(router)
        router.observe(way, 0, 0.1 if way.hops[0].node == "n1" else 0.9)
    ways = Counter(routed(router).hops[0].node for _ in range(100))
    assert ways["n1"] == pytest.approx(90, abs=3)


def test_wrong_names_and_values_are_refused() -> None:
    tables = RouteTables.from_instance(TWO_BY_TWO)
    with pytest.raises(UnknownNameError, match="policy"):
        PipelineRouter(tables, policy="best")
    with pytest.raises(UnknownNameError, match="n9"):
        PipelineRouter(tables, kv_tokens={"n9": 1.0})
    with pytest.raises(UsageError, match="high_water"):
        PipelineRouter(tables, high_water=0.0)
    with pytest.raises(InputError, match="no node"):
        RouteTables.from_instance(instance([(0, 4)], [("source", "n7", 1.0)]))
    with pytest.raises(InputError, match="already done"):
        RouteTables.from_instance(instance([(0, 4), (0, 4)], [("n0", "n1", 1.0)]))
