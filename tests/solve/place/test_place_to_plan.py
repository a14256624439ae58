"""From placements to plans on random clusters: what is made is valid, what is changed is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UsageError
from atoll.plan.cluster import Cluster, ClusterLink, ClusterNode
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.solve.place.bottleneck import bottleneck
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.from_problem import flow_instance, placement_of
from atoll.solve.place.place_service import RULES, FlowEffort
from atoll.solve.place.place_solver import solve
from atoll.solve.place.place_to_plan import Placed, plan_of
from atoll.solve.place.placement_candidates import with_longer_ranges
from atoll.solve.place.placement_polish import polish
from tests.plan.clusters import LAYERS, MODEL, TOKENS, problem, profile, service

CATALOG = Catalog.default()
TYPES = ("L4:1", "L40S:1", "T4:1", "L4:2")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to seven machines of four types at three sites, some links missing."""
    count = draw(st.integers(2, 7))
    nodes = tuple(
        ClusterNode(
            name=f"m{i}",
            node_type=draw(st.sampled_from(TYPES)),
            region=draw(st.sampled_from(("x", "y", "z"))),
        )
        for i in range(count)
    )
    speeds = st.sampled_from((1e6, 4e6, 1e7, 1e9))
    sites = sorted({node.region for node in nodes})
    ends = st.sampled_from([*sites, *(node.name for node in nodes)])
    links = [ClusterLink(src="*", dst="*", bytes_per_s=draw(speeds))]
    for _ in range(draw(st.integers(0, 4))):
        one_way = draw(st.booleans())
        links.append(
            ClusterLink(src=draw(ends), dst=draw(ends), bytes_per_s=draw(speeds), one_way=one_way)
        )
    profiles = {
        kind: profile(draw(st.integers(2, LAYERS)), draw(st.floats(100.0, 20_000.0)))
        for kind in TYPES
    }
    cluster = Cluster(nodes=nodes, links=tuple(links), profiles={MODEL: profiles})
    return problem(cluster=cluster)


@given(problems(), st.sampled_from(RULES))
def test_whatever_a_rule_places_is_valid(asked: Problem, rule: str) -> None:
    made = solve(rule, asked, CATALOG, FlowEffort(objective="max-flow"))
    assert validate(made, asked, CATALOG) == []
    assert Plan.from_json(made.to_json()) == made
    for own in made.instances:
        cut = bottleneck(own, asked, CATALOG)
        assert cut is not None  # the flow is the largest, so something is full
        assert cut.tokens_per_s == pytest.approx(own.throughput_per_s * TOKENS)


@given(problems(), st.data())
def test_a_plan_with_more_flow_is_not(asked: Problem, data: st.DataObject) -> None:
    made = solve("chain", asked, CATALOG, FlowEffort(objective="max-flow"))
    if made.status == "infeasible":
        return
    (own,) = made.instances
    more = data.draw(st.floats(1.001, 5.0))
    flows = tuple(f.model_copy(update={"per_s": f.per_s * more}) for f in own.flows)
    scaled = own.model_copy(
        update={"flows": flows, "throughput_per_s": own.throughput_per_s * more}
    )
    objective = (made.objective or 0.0) * more
    served = {own.role: min(1.0, scaled.throughput_per_s)}
    broken = made.model_copy(
        update={"instances": (scaled,), "objective": objective, "served_fraction": served}
    )
    assert {v.rule for v in validate(broken, asked, CATALOG)} & {"node-capacity", "link-capacity"}


@given(problems(), st.data())
def test_a_plan_with_another_range_or_host_is_not(asked: Problem, data: st.DataObject) -> None:
    made = solve("swarm", asked, CATALOG, FlowEffort(objective="max-flow"))
    if made.status == "infeasible":
        return
    own = data.draw(st.sampled_from(made.instances))
    index = data.draw(st.integers(0, len(own.nodes) - 1))
    node = own.nodes[index]
    changes: list[dict[str, object]] = [
        {"start": node.start + 1} if node.layers > 1 else {"start": max(0, node.start - 1)},
        {"end": node.end - 1} if node.layers > 1 else {"end": node.end + 1},
        {"host": "m9"},
        {"region": "nowhere"},
        {"node_type": "H100:1"},
        {"market": "spot"},
    ]
    change = data.draw(st.sampled_from(changes))
    changed = node.model_copy(update=change)
    if changed == node:
        return
    nodes = (*own.nodes[:index], changed, *own.nodes[index + 1 :])
    others = tuple(other for other in made.instances if other != own)
    changed_own = own.model_copy(update={"nodes": nodes})
    broken = made.model_copy(update={"instances": (changed_own, *others)})
    assert validate(broken, asked, CATALOG) != []


def test_nodes_without_flow_are_left_out() -> None:
    asked = problem()
    own = flow_instance(asked, CATALOG, "chat")
    placement = placement_of(own, [(0, 8), (8, 16), (4, 9), (0, 0)])
    flows = max_flow(own, placement)
    placed = Placed(asked.services[0], own, placement, flows)
    made = plan_of(asked, CATALOG, [placed], goal="max-flow", bound=flows.value, solver="s")
    assert [node.host for node in made.instances[0].nodes] == ["a", "b"]
    assert made.status == "optimal"
    assert made.gap == 0.0
    assert validate(made, asked, CATALOG) == []


def test_phases_must_run_together() -> None:
    asked = problem(services=(service(phases="apart"),))
    own = flow_instance(asked, CATALOG, "chat")
    placement = placement_of(own, [(0, 8), (8, 16), (8, 16), (8, 16)])
    placed = Placed(asked.services[0], own, placement, max_flow(own, placement))
    with pytest.raises(UsageError, match="phases apart"):
        plan_of(asked, CATALOG, [placed], goal="max-flow", bound=None, solver="s")


# Searching by another goal


@pytest.mark.slow
def test_polishing_finds_more_and_repeats() -> None:
    own = flow_instance(problem(), CATALOG, "chat")
    start = placement_of(own, [(0, 12), (8, 16), (8, 16), (0, 8)])

    def value(first: np.ndarray, past: np.ndarray) -> float:
        return max_flow(own, placement_of(own, list(zip(first, past, strict=True)))).value

    found = [
        polish(own, start, value, steps=800, random=np.random.default_rng(3)) for _ in range(2)
    ]
    (placement, best), (again, same) = found
    assert best == same
    assert np.array_equal(placement.start, again.start)
    assert best == pytest.approx(value(placement.start, placement.end))
    assert value(start.start, start.end) < best <= 1500.0 * (1 + 1e-9)
    assert best > 1400.0
    assert (placement.end - placement.start <= own.max_layers).all()


def test_longer_ranges() -> None:
    own = flow_instance(problem(), CATALOG, "chat")
    longer = with_longer_ranges(own, 10)
    assert longer.rate[0, 9] == 0.0
    assert longer.rate[0, 10] == own.rate[0, 10]
    assert longer.rate[1, 7] == 0.0
    assert longer.rate[1, 8] == own.rate[1, 8]
