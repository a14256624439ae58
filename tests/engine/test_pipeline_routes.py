"""The plain router covers every layer once, on nodes that hold it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.engine.pipeline_routes import LayerRouter, NodeSpec, RouteQuery
from tests.engine.split_router import SplitRouter


def node(name: str, start: int, end: int) -> NodeSpec:
    return NodeSpec(name=name, endpoint=f"mem://{name}", start=start, end=end)


def query(*nodes: NodeSpec, load: dict[str, int] | None = None) -> RouteQuery:
    return RouteQuery("r", 5, nodes, {}, load or {})


def test_the_min_loaded_sibling_is_taken() -> None:
    nodes = (node("a", 0, 2), node("b", 0, 2), node("c", 2, 4))
    route = LayerRouter(4)(query(*nodes, load={"a": 9}))
    assert route is not None
    assert [hop.node for hop in route.prefill] == ["b", "c"]


def test_an_overlapping_node_runs_only_the_rest() -> None:
    route = LayerRouter(4)(query(node("a", 0, 3), node("b", 1, 4)))
    assert route is not None
    assert [(hop.start, hop.end) for hop in route.prefill] == [(0, 3), (3, 4)]


def test_a_dead_end_is_not_entered() -> None:
    route = LayerRouter(4)(query(node("a", 0, 1), node("b", 0, 2), node("c", 2, 4)))
    assert route is not None
    assert [hop.node for hop in route.prefill] == ["b", "c"]


def test_a_gap_means_waiting() -> None:
    assert LayerRouter(4)(query(node("a", 0, 2), node("c", 3, 4))) is None


def test_a_split_keeps_to_its_sides() -> None:
    nodes = (node("p", 0, 4), node("d", 0, 3), node("e", 3, 4))
    route = SplitRouter(4, ["p"], ["d", "e"])(query(*nodes))
    assert route is not None
    assert route.decode is not None
    assert [hop.node for hop in route.hops] == ["p", "d", "e"]
    assert SplitRouter(4, ["p"], ["d"])(query(*nodes)) is None


@given(st.data())
def test_a_route_is_found_if_and_only_if_there_is_one(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 6))
    ranges = data.draw(
        st.lists(st.tuples(st.integers(0, layers - 1), st.integers(1, layers)), max_size=6)
    )
    nodes = [node(f"n{i}", a, b) for i, (a, b) in enumerate(ranges) if a < b]
    route = LayerRouter(layers)(query(*nodes))
    covered = all(any(n.start <= layer < n.end for n in nodes) for layer in range(layers))
    if route is None:
        assert not covered
        return
    at = 0
    for hop in route.prefill:
        held = next(n for n in nodes if n.name == hop.node)
        assert hop.start == at
        assert held.start <= hop.start < hop.end <= held.end
        at = hop.end
    assert at == layers
