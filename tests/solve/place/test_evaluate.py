"""The library's max flow: by hand on small clusters, and as a flow that can be sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.core.rng import stream
from atoll.solve.place.evaluate import edges, max_flow
from atoll.solve.place.flow_instance import FlowInstance, Placement
from benchmarks.placement.flow_cases import small_cluster


def three_nodes(*, partial: bool = False) -> FlowInstance:
    """Four layers; each node holds up to three at 60 / 30 / 20 tokens/s."""
    n = 3
    link = np.full((n, n), 1000.0)
    np.fill_diagonal(link, 0.0)
    return FlowInstance(
        layers=4,
        names=("a", "b", "c"),
        node_types=("t",) * n,
        regions=("r",) * n,
        kind=np.zeros(n, np.int64),
        max_layers=np.full(n, 3, np.int64),
        rate=np.tile(np.array([0.0, 60.0, 30.0, 20.0]), (n, 1)),
        link=link,
        enter=np.full(n, 1000.0),
        leave=np.full(n, 1000.0),
        latency=np.zeros((n, n)),
        enter_s=np.zeros(n),
        leave_s=np.zeros(n),
        partial=partial,
    )


def placed(*ranges: tuple[int, int]) -> Placement:
    return Placement(
        np.array([s for s, _ in ranges], np.int64), np.array([e for _, e in ranges], np.int64)
    )


def test_the_weakest_node_of_a_chain_decides() -> None:
    assert max_flow(three_nodes(), placed((0, 1), (1, 3), (3, 4))).value == pytest.approx(30.0)


def test_a_gap_in_the_layers_carries_nothing() -> None:
    assert max_flow(three_nodes(), placed((0, 1), (2, 3), (3, 4))).value == 0.0


def test_overlapping_ranges_meet_only_with_partial_inference() -> None:
    where = placed((0, 2), (1, 4), (0, 0))
    assert max_flow(three_nodes(), where).value == 0.0
    assert max_flow(three_nodes(partial=True), where).value == pytest.approx(20.0)


@pytest.mark.parametrize(("field", "value"), [("link", 7.0), ("enter", 5.0), ("leave", 3.0)])
def test_links_bind(field: str, value: float) -> None:
    wide = three_nodes()
    narrow = replace(wide, **{field: np.full_like(getattr(wide, field), value)})
    assert max_flow(narrow, placed((0, 2), (2, 4), (0, 0))).value == pytest.approx(value)


def test_flows_can_be_sent() -> None:
    """Kept at every node, within every capacity, and adding up to the value."""
    random = stream(1, "sendable")
    flowing = 0
    for _ in range(60):
        instance = small_cluster(random)
        held = np.array([random.integers(1, most + 1) for most in instance.max_layers])
        start = np.array([random.integers(0, instance.layers - j + 1) for j in held])
        where = Placement(start, start + held)
        flows = max_flow(instance, where)
        into, out = flows.edge.sum(0) + flows.enter, flows.edge.sum(1) + flows.leave
        np.testing.assert_allclose(into, out, atol=1e-9)
        assert (into <= instance.rate[np.arange(instance.size), held] + 1e-9).all()
        assert (flows.edge <= instance.link + 1e-9).all()
        assert flows.value == pytest.approx(flows.enter.sum())
        allowed = np.zeros_like(flows.edge, bool)
        allowed[edges(instance, where)] = True
        assert not flows.edge[~allowed].any()
        flowing += flows.value > 0
    assert flowing >= 3
