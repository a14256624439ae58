from __future__ import annotations

import random
from collections.abc import Hashable

import pytest

from atoll.solve.graph.link_ways import list_ways
from tests.seeds import seeds


@pytest.mark.parametrize("seed", seeds(40))
def test_a_way_lets_through_just_the_pairs_that_keep_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    places = [f"p{i}" for i in range(rng.randint(1, 5))]
    budget = rng.choice((0.9, 1.3, 2.0))
    by_place: tuple[dict[Hashable, list[float]], dict[Hashable, list[float]]] = ({}, {})
    for some in by_place:
        for place in places:
            some[place] = [round(rng.uniform(0.1, 1.0), 2) for _ in range(rng.randint(1, 3))]
    took = {(a, b): rng.choice((0.0, 0.2, 0.5, 0.9)) for a in places for b in places}
    ways = list_ways(*by_place, lambda a, b: took[str(a), str(b)], budget)
    first, second = by_place
    pairs = {
        (a, v, b, w)
        for a in first
        for v in first[a]
        for b in second
        for w in second[b]
        if v + w + took[str(a), str(b)] <= budget
    }
    allowed = {
        (a, v, b, w)
        for way in ways
        for a in way.first
        for v in first[a]
        for b in way.second
        for w in second[b]
        if v + w + way.seconds <= budget
    }
    assert allowed == pairs


def test_fast_links_leave_one_way() -> None:
    first: dict[Hashable, list[float]] = {"a": [0.2, 0.4], "b": [0.3]}
    ways = list_ways(first, first, lambda a, b: 1e-3 if a == b else 2e-3, 1.0)
    assert [(way.first, way.second) for way in ways] == [(frozenset("ab"), frozenset("ab"))]


def test_no_places_are_one_way() -> None:
    assert len(list_ways({}, {"a": [0.1]}, lambda _a, _b: 0.0, 1.0)) == 1
