"""Machines cut into slices: what fits, and what several services get of one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.api.fleet import Fleet
from atoll.catalog.catalog import Catalog
from atoll.plan.cluster import Cluster, ClusterLink, ClusterNode
from atoll.plan.plan import Plan
from atoll.plan.problem import Offer, Problem
from atoll.plan.validate.check import validate
from atoll.solve.deadline import Deadline
from atoll.solve.place.machine_cuts import cut_for, even_cuts
from atoll.solve.place.place_service import SEARCH, FlowEffort
from atoll.solve.place.place_solver import solve
from atoll.solve.place.replicas import place_replicas
from tests.plan.clusters import problem
from tests.seeds import examples

CATALOG = Catalog.default()
WITHIN = FlowEffort(600.0, promise=True, work=0.05)
ANYTHING = ClusterLink(src="*", dst="*", bytes_per_s=1.25e9, latency_s=1e-4)

TWO_MODELS = """
services:
  big: {model: qwen3-32b, ttft: 2s, tpot: 80ms, rate: %s, lengths: azure-conv}
  small: {model: llama-3.1-8b, ttft: 1s, tpot: 50ms, rate: %s, lengths: azure-conv}
cluster:
  nodes:
    onprem: %s
  links:
    - {between: ["*", "*"], bandwidth: 10Gbit/s, latency: 100us}
"""


def of_machines(*kinds: str, **changes: object) -> Problem:
    nodes = tuple(
        ClusterNode(name=f"m{i}", node_type=kind, region="x") for i, kind in enumerate(kinds)
    )
    return problem(cluster=Cluster(nodes=nodes, links=(ANYTHING,)), **changes)


def gpus_in_use(plan: Plan) -> Counter[tuple[str, int]]:
    return Counter(
        (node.host or "", gpu)
        for own in plan.instances
        for node in own.nodes
        for gpu in node.gpu_ids or range(node.machine_gpus)
    )


def test_even_cuts_go_on_while_something_can_be_cut() -> None:
    asked = of_machines("A100-40:8", "L4:1", "T4:4")
    sizes = [Counter(unit.kind for unit in cut) for cut in even_cuts(asked)]
    assert sizes == [
        {"A100-40:8": 1, "L4:1": 1, "T4:4": 1},
        {"A100-40:4": 2, "L4:1": 1, "T4:2": 2},
        {"A100-40:2": 4, "L4:1": 1, "T4:1": 4},
        {"A100-40:1": 8, "L4:1": 1, "T4:1": 4},
    ]
    names = [unit.name for unit in even_cuts(asked)[1]]
    assert names == ["m0[0-3]", "m0[4-7]", "m1", "m2[0-1]", "m2[2-3]"]


def test_machines_that_are_whole_are_not_cut() -> None:
    offers = tuple(
        Offer(region="x", node_type=kind, market="owned", available=1, usd_per_hour=0.0, whole=True)
        for kind in ("A100-40:8", "T4:4")
    )
    assert len(even_cuts(of_machines("A100-40:8", "T4:4", offers=offers))) == 1


@given(st.lists(st.sampled_from((1, 2, 4, 8)), max_size=20), st.integers(1, 3))
def test_slices_that_add_up_fit(sizes: list[int], machines: int) -> None:
    wanted: Counter[int] = Counter()
    for size in sizes:
        if sum(s * n for s, n in wanted.items()) + size <= 8 * machines:
            wanted[size] += 1
    asked = of_machines(*["A100-40:8"] * machines)
    cut = cut_for(asked, {("x", "A100-40:8"): wanted})
    have = Counter(unit.gpus for unit in cut)
    assert all(have[size] >= count for size, count in wanted.items())
    used = Counter((unit.host, gpu) for unit in cut for gpu in unit.gpu_ids or range(8))
    assert used == {(f"m{i}", gpu): 1 for i in range(machines) for gpu in range(8)}


@pytest.mark.parametrize("promise", [True, False])
def test_two_models_share_a_machine(promise: bool) -> None:
    asked = Fleet.read(TWO_MODELS % ("0.3/s", "0.8/s", "{A100-40:8: 1}")).problem
    made = solve(SEARCH, asked, asked.catalog(), replace(WITHIN, promise=promise))
    assert made.served_fraction == {"big": 1.0, "small": 1.0}
    assert validate(made, asked) == []
    assert made.nodes == 1
    assert max(gpus_in_use(made).values()) == 1
    assert {own.service for own in made.instances} == {"big", "small"}


def test_a_whole_machine_serves_one_model_only() -> None:
    alone = "{A100-40:8: {count: 1, whole: true}}"
    asked = Fleet.read(TWO_MODELS % ("0.3/s", "0.8/s", alone)).problem
    assert solve(SEARCH, asked, asked.catalog(), WITHIN).status == "infeasible"


@pytest.mark.slow
def test_a_box_of_eight_beside_small_machines_serves_all() -> None:
    asked = Fleet.read(TWO_MODELS % ("3/s", "8/s", "{A100-40:8: 1, L4:1: 4, T4:4: 4}")).problem
    made = solve(SEARCH, asked, asked.catalog(), WITHIN)
    assert made.served_fraction == {"big": 1.0, "small": 1.0}
    assert validate(made, asked) == []


@pytest.mark.slow
def test_slices_share_the_links_of_their_machine() -> None:
    """Two machines of two GPUs, and a line between them that carries little."""
    slow = ClusterLink(src="m0", dst="m1", bytes_per_s=4e6)
    nodes = tuple(ClusterNode(name=f"m{i}", node_type="L4:2", region="x") for i in range(2))
    asked = problem(cluster=Cluster(nodes=nodes, links=(ANYTHING, slow)))
    made = solve(SEARCH, asked, CATALOG, WITHIN)
    assert made.instances
    assert validate(made, asked, CATALOG) == []


@examples(5)
@given(
    st.lists(st.sampled_from(("L4:1", "L4:2", "T4:4", "A100-40:2")), min_size=1, max_size=4),
    st.integers(1, 2),
    st.floats(0.5, 200.0),
)
def test_replicas_are_valid_whatever_the_machines(
    kinds: list[str], services: int, rate: float
) -> None:
    from tests.plan.clusters import service

    asked = of_machines(
        *kinds,
        services=tuple(service(f"s{i}", rate_per_s=rate * (i + 1)) for i in range(services)),
    )
    made = solve(SEARCH, asked, CATALOG, FlowEffort(600.0, promise=True, work=0.01))
    assert validate(made, asked, CATALOG) == []
    if made.bound is not None and made.objective is not None:
        assert made.bound >= made.objective * (1 - 1e-9)


def test_the_same_plan_every_time() -> None:
    asked = Fleet.read(TWO_MODELS % ("1/s", "2/s", "{A100-40:4: 1, L4:1: 2}")).problem
    efforts = [replace(WITHIN, done=Counter()) for _ in range(2)]
    one, two = (solve(SEARCH, asked, asked.catalog(), effort) for effort in efforts)
    assert one.to_json() == two.to_json()
    assert one.served_fraction == {"big": 1.0, "small": 1.0}
    assert validate(one, asked) == []
    # And what it took is counted, with several models, too.
    assert efforts[0].done == efforts[1].done
    assert efforts[0].done["integer programs"] == 2


def test_replicas_need_room_for_every_model() -> None:
    asked = Fleet.read(TWO_MODELS % ("3/s", "8/s", "{T4:1: 2}")).problem
    assert place_replicas(asked, asked.catalog(), Deadline(60.0), partial=False) is None
