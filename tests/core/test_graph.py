from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import atoll
from atoll.core.errors import AtollError, InputError, UnknownNameError
from atoll.core.graph import Component, ComponentGraph, ComponentKind, Edge
from atoll.core.ids import Phase

ENCODER, LLM, GENERATOR = ComponentKind.ENCODER, ComponentKind.LLM, ComponentKind.GENERATOR


def any_to_any() -> ComponentGraph:
    return ComponentGraph(
        (
            Component("llm", LLM),
            Component("image_generator", GENERATOR),
            Component("image_encoder", ENCODER),
            Component("audio_encoder", ENCODER),
        ),
        (
            Edge("image_encoder", "llm"),
            Edge("audio_encoder", "llm"),
            Edge("llm", "image_generator"),
        ),
    )


def names(components: tuple[Component, ...]) -> list[str]:
    return [component.name for component in components]


def test_order_sources_sinks_and_paths() -> None:
    graph = any_to_any()
    assert names(graph.topological_order()) == [
        "image_encoder",
        "audio_encoder",
        "llm",
        "image_generator",
    ]
    assert names(graph.sources()) == ["image_encoder", "audio_encoder"]
    assert names(graph.sinks()) == ["image_generator"]
    assert [names(path) for path in graph.paths()] == [
        ["image_encoder", "llm", "image_generator"],
        ["audio_encoder", "llm", "image_generator"],
    ]
    assert names(graph.predecessors("llm")) == ["image_encoder", "audio_encoder"]
    assert names(graph.successors("llm")) == ["image_generator"]


def test_phases_follow_from_the_kind() -> None:
    graph = any_to_any()
    assert graph.phases("llm") == (Phase.PREFILL, Phase.DECODE)
    assert graph.phases("image_encoder") == (Phase.ENCODE,)
    assert graph.phases(graph.component("image_generator")) == (Phase.GENERATE,)


def test_a_plain_llm_is_one_component() -> None:
    graph = ComponentGraph.single_llm()
    assert names(graph.topological_order()) == ["llm"]
    assert [names(path) for path in graph.paths()] == [["llm"]]
    assert graph.sources() == graph.sinks() == graph.components


def test_graphs_are_values() -> None:
    assert any_to_any() == any_to_any()
    assert len({any_to_any(), any_to_any()}) == 1


def component(name: str) -> Component:
    return Component(name, LLM)


@pytest.mark.parametrize(
    ("nodes", "edges", "problem"),
    [
        ([], [], "at least one"),
        (["a", "a"], [], "appears twice"),
        (["a", "b"], [("a", "b"), ("a", "b")], "appears twice"),
        (["a", "b"], [("a", "c")], "unknown component 'c'"),
        (["a"], [("a", "a")], "cycle"),
        (["a", "b", "c"], [("a", "b"), ("b", "c"), ("c", "b")], "cycle through or before b, c"),
        (["a", "b"], [], "'b' is not connected to 'a'"),
    ],
)
def test_invalid_graphs_cannot_be_built(
    nodes: list[str], edges: list[tuple[str, str]], problem: str
) -> None:
    with pytest.raises(AtollError, match=problem):
        ComponentGraph(tuple(map(component, nodes)), tuple(Edge(*edge) for edge in edges))


@pytest.mark.parametrize("name", ["", "a b", "a/b"])
def test_component_names_must_fit_into_a_role(name: str) -> None:
    with pytest.raises(InputError):
        component(name)


def test_asking_for_an_unknown_component() -> None:
    with pytest.raises(UnknownNameError, match="did you mean llm"):
        any_to_any().component("lm")


@st.composite
def connected_dags(draw: st.DrawFn) -> ComponentGraph:
    """A random DAG: a spanning tree along a hidden order, more forward edges, shuffled listing."""
    size = draw(st.integers(min_value=1, max_value=7))
    tree = [(draw(st.integers(0, i - 1)), i) for i in range(1, size)]
    forward = [(i, j) for i in range(size) for j in range(i + 1, size)]
    more = draw(st.lists(st.sampled_from(forward), max_size=6)) if forward else []
    edges = sorted(set(tree) | set(more))
    listing = draw(st.permutations(range(size)))
    return ComponentGraph(
        tuple(component(f"c{i}") for i in listing),
        tuple(Edge(f"c{i}", f"c{j}") for i, j in draw(st.permutations(edges))),
    )


@given(connected_dags())
def test_order_respects_every_edge(graph: ComponentGraph) -> None:
    order = names(graph.topological_order())
    assert sorted(order) == sorted(names(graph.components))
    for edge in graph.edges:
        assert order.index(edge.src) < order.index(edge.dst)


@given(connected_dags())
def test_paths_are_all_paths_and_only_paths(graph: ComponentGraph) -> None:
    edges = {(edge.src, edge.dst) for edge in graph.edges}
    paths = [tuple(names(path)) for path in graph.paths()]
    assert len(set(paths)) == len(paths)
    for path in paths:
        assert set(pairwise(path)) <= edges
    # Counted independently: paths to a sink from v = sum over successors, backwards in order.
    onward: dict[str, int] = {}
    for part in reversed(graph.topological_order()):
        after = [onward[dst] for src, dst in edges if src == part.name]
        onward[part.name] = sum(after) if after else 1
    assert len(paths) == sum(onward[source.name] for source in graph.sources())


@given(connected_dags(), st.data())
def test_turning_a_path_into_a_loop_is_refused(graph: ComponentGraph, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(graph.paths()))
    back = Edge(path[-1].name, path[0].name)
    with pytest.raises(InputError, match="cycle"):
        ComponentGraph(graph.components, (*graph.edges, back))


def test_elsewhere_phases_decide_and_not_kinds() -> None:
    """What holds for encoders and generators holds for any kind with their phases."""
    root = Path(atoll.__file__).parent
    declaring = {"core/graph.py", "catalog/models.py", "catalog/hf_config.py"}
    named = re.compile(r"ComponentKind\.(ENCODER|GENERATOR)")
    found = {str(p.relative_to(root)) for p in root.rglob("*.py") if named.search(p.read_text())}
    assert found == declaring
