"""Simple rules: what they promise, and the published placements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.plan.files.helix import helix_problem, read_solution
from atoll.solve.place import place_baselines as baselines
from atoll.solve.place.bound.bounds import coverage_bound
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.flow_instance import FlowInstance, Placement
from atoll.solve.place.from_problem import flow_instance, placement_of
from tests.plan.clusters import HELIX, LINKS, cluster, problem

CATALOG = Catalog.default()
needs_data = pytest.mark.skipif(
    not HELIX.is_dir(), reason="needs ../shared/data/helix beside the repository"
)


def helix(name: str, model: str = "LLaMA-2-70B", *, partial: bool = False) -> FlowInstance:
    asked = helix_problem(HELIX / f"clusters/{name}.ini", model=model)
    return flow_instance(asked, CATALOG, asked.services[0], partial=partial)


def small() -> FlowInstance:
    return flow_instance(problem(), CATALOG, "chat")


def value(instance: FlowInstance, placement: Placement | None) -> float:
    return 0.0 if placement is None else max_flow(instance, placement).value


@needs_data
@pytest.mark.parametrize(
    ("cluster", "method", "published"),
    [
        ("single24", "ilp", 1289.6),
        ("single24", "petals", 952.1),
        ("single24", "swarm", 757.9),
        ("3cluster24", "ilp", 1212.2),
        ("3cluster24", "petals", 952.1),
        ("3cluster24", "swarm", 616.5),
        ("cluster42", "ilp", 4137.5),
        ("cluster42", "petals", 3292.2),
        ("cluster42", "swarm", 4892.2),
    ],
)
def test_published_placements(cluster: str, method: str, published: float) -> None:
    own = helix(cluster, partial=method == "petals")
    path = HELIX / f"solutions/{cluster}/llama70b/{method}/{method}_sol.ini"
    placement = placement_of(own, read_solution(path, own.size))
    assert value(own, placement) == pytest.approx(published, abs=0.05)


@needs_data
@pytest.mark.parametrize(
    ("cluster", "folder", "model"),
    [
        ("single24", "single24/llama70b", "LLaMA-2-70B"),
        ("3cluster24", "3cluster24/llama70b", "LLaMA-2-70B"),
        ("cluster42", "cluster42/llama70b", "LLaMA-2-70B"),
        ("single24", "single24/llama30b", "LLaMA-1-30B"),
    ],
)
def test_swarm_is_the_published_one(cluster: str, folder: str, model: str) -> None:
    own = helix(cluster, model)
    path = HELIX / f"solutions/{folder}/swarm/swarm_sol.ini"
    published = placement_of(own, read_solution(path, own.size))
    assert value(own, baselines.swarm(own)) == pytest.approx(value(own, published), rel=1e-9)


@needs_data
@pytest.mark.parametrize(("cluster", "published"), [("single24", 952.1), ("cluster42", 3292.2)])
def test_petals_is_like_the_published_one(cluster: str, published: float) -> None:
    own = helix(cluster, partial=True)
    found = [value(own, baselines.petals(own, seed)) for seed in range(5)]
    assert np.median(found) == pytest.approx(published, rel=0.1)


@needs_data
def test_no_type_of_single24_holds_the_model_alone() -> None:
    own = helix("single24")
    assert baselines.separate(own) is None
    mixed = baselines.separate_plus(own)
    assert mixed is not None
    assert value(own, mixed) > 0


@needs_data
def test_separate_types_add_up() -> None:
    own = helix("single24", "LLaMA-1-30B")
    placement = baselines.separate(own)
    assert placement is not None
    parts = []
    for kind in sorted(set(own.node_types)):
        mine = np.array([other == kind for other in own.node_types])
        only = Placement(np.where(mine, placement.start, 0), np.where(mine, placement.end, 0))
        parts.append(value(own, only))
    assert value(own, placement) == pytest.approx(sum(parts))
    assert value(own, baselines.separate_plus(own)) >= sum(parts) * (1 - 1e-9)


@needs_data
def test_one_chain_is_the_best_of_single24() -> None:
    own = helix("single24")
    assert value(own, baselines.chain(own)) == pytest.approx(coverage_bound(own), rel=1e-9)


def test_rules_on_a_small_cluster() -> None:
    own = small()
    swarm = baselines.swarm(own)
    assert swarm is not None
    # Two stages of eight layers: 1,500 of a on one, three L4 of 500 on the other.
    assert value(own, swarm) == pytest.approx(1500.0)
    own = flow_instance(problem(cluster=cluster(links=LINKS[:1])), CATALOG, "chat")
    chain = baselines.chain(own)
    assert chain is not None
    held = chain.end - chain.start
    assert held.sum() == own.layers
    assert min(own.rate[i, j] for i, j in enumerate(held) if j) == pytest.approx(
        value(own, chain), rel=1e-9
    )


def test_too_few_layers_have_no_placement() -> None:
    own = replace(small(), layers=40)
    for rule in (baselines.swarm, baselines.separate, baselines.separate_plus, baselines.chain):
        assert rule(own) is None
    assert baselines.petals(replace(own, partial=True)) is None
    assert baselines.at_random(own) is None


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(10.0, 1000.0)), min_size=1, max_size=7),
    st.integers(1, 24),
    st.integers(0, 5),
)
def test_ranges_are_possible(nodes: list[tuple[int, float]], layers: int, seed: int) -> None:
    size = len(nodes)
    most = np.array([most for most, _ in nodes], np.int64)
    rate = np.zeros((size, 10))
    for i, (held, speed) in enumerate(nodes):
        rate[i, 1 : held + 1] = speed / np.arange(1, held + 1)
    own = FlowInstance(
        layers=layers,
        names=tuple(map(str, range(size))),
        node_types=tuple(f"T{held}:1" for held, _ in nodes),
        regions=("here",) * size,
        kind=np.arange(size),
        max_layers=np.minimum(most, layers),
        rate=rate,
        link=np.full((size, size), 1e6),
        enter=np.full(size, 1e6),
        leave=np.full(size, 1e6),
        latency=np.zeros((size, size)),
        enter_s=np.zeros(size),
        leave_s=np.zeros(size),
    )
    partial = replace(own, partial=True)
    found = {
        "swarm": baselines.swarm(own),
        "chain": baselines.chain(own),
        "separate-plus": baselines.separate_plus(own),
        "random": baselines.at_random(own, seed),
        "petals": baselines.petals(partial, seed),
    }
    for name, placement in found.items():
        if placement is None:
            continue
        length = placement.end - placement.start
        assert (placement.start >= 0).all()
        assert (placement.end <= layers).all()
        assert (length <= own.max_layers).all()
        assert (length >= 0).all()
        assert value(partial if name == "petals" else own, placement) > 0, name
    if most.sum() >= layers:
        assert found["chain"] is not None
