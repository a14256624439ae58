from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.solve.graph.executor_program import solve_program
from atoll.solve.graph.graph_types import (
    Chain,
    ClassDemand,
    ExecutorType,
    GraphAnswer,
    GraphProgram,
    PartFlow,
)
from atoll.solve.graph.matching import RouteFlow, match_routes
from tests.reference.cells_cases import make_case


def type_of(parts: str, latency: float = 0.0) -> ExecutorType:
    keys = [("s", "t", part) for part in parts]
    return ExecutorType(
        "s", tuple(parts), (("A:1", 1),), dict.fromkeys(keys, 1.0), dict.fromkeys(keys, latency)
    )


def answer_of(flows: dict[tuple[str, int], float], rate: float, *, tied: bool) -> GraphAnswer:
    return GraphAnswer(
        "optimal",
        (),
        {},
        tuple(PartFlow("s", "t", part, e, "r", value) for (part, e), value in flows.items()),
        {("s", "t", 0, "r"): rate},
        {("s", "t"): 1.0},
        0.0,
        0.0,
        0.0,
        0.0,
        split={("s", "t", 0, part, e, "r"): v for (part, e), v in flows.items()} if tied else {},
    )


def test_requests_stay_where_they_are() -> None:
    klass = ClassDemand("s", "t", 3.0, (("a", "b"),))
    program = GraphProgram((), (type_of("a"), type_of("ab"), type_of("b")), (klass,))
    flows = {("a", 0): 1.0, ("a", 1): 2.0, ("b", 1): 1.5, ("b", 2): 1.5}
    paths = match_routes(program, answer_of(flows, 3.0, tied=False))
    assert paths == (
        RouteFlow("s", "t", "r", 1.0, ((0, ("a",)), (2, ("b",)))),
        RouteFlow("s", "t", "r", 0.5, ((1, ("a",)), (2, ("b",)))),
        RouteFlow("s", "t", "r", 1.5, ((1, ("a", "b")),)),
    )


def test_parallel_encoders_share_one_order() -> None:
    # Both encoders have a slow type, and both need the fast llm with it.
    chains = (Chain("a", "c", 1.0), Chain("b", "c", 1.0))
    klass = ClassDemand("s", "t", 2.0, (("a", "b", "c"),), chains)
    types = (
        type_of("a", 0.8),
        type_of("a", 0.1),
        type_of("b", 0.1),
        type_of("b", 0.8),
        type_of("c", 0.9),
        type_of("c", 0.2),
    )
    program = GraphProgram((), types, (klass,))
    flows = dict.fromkeys(zip("aabbcc", range(6), strict=True), 1.0)
    paths = match_routes(program, answer_of(flows, 2.0, tied=True))
    assert [[e for e, _ in path.steps] for path in paths] == [[0, 3, 5], [1, 2, 4]]


@given(st.integers(0, 10_000))
def test_paths_add_up_and_keep_chains(seed: int) -> None:
    program = replace(make_case(seed), shortage="fraction")
    answer = solve_program(program)
    paths = match_routes(program, answer)
    total: dict[tuple[str, str, str, int, str], float] = defaultdict(float)
    routes: dict[tuple[str, str, int, str], float] = defaultdict(float)
    classes = {klass.key: klass for klass in program.classes}
    for path in paths:
        klass = classes[path.service, path.klass]
        routes[path.service, path.klass, path.route, path.region] += path.rate_per_s
        at = {part: e for e, parts in path.steps for part in parts}
        assert tuple(part for _, parts in path.steps for part in parts) == klass.routes[path.route]
        for part, e in at.items():
            total[path.service, path.klass, part, e, path.region] += path.rate_per_s
        for chain in klass.chains:
            if chain.first in at and chain.second in at:
                late = [
                    program.executors[at[part]].latency_s[*klass.key, part]
                    for part in (chain.first, chain.second)
                ]
                assert sum(late) <= chain.budget_s + 1e-9
    flows = {(f.service, f.klass, f.part, f.executor, f.region): f.rate_per_s for f in answer.flows}
    assert dict(total) == pytest.approx(flows, rel=1e-9, abs=1e-9)
    assert dict(routes) == pytest.approx(dict(answer.routes), rel=1e-9, abs=1e-9)
    assert len(paths) <= len(answer.flows) * max(1, len(answer.routes))
