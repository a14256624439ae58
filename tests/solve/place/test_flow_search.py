"""The search: equal to brute force on small clusters, the same for the same seed, at the bars on Helix's."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from atoll.core.errors import UsageError
from atoll.core.rng import stream
from atoll.plan.files.helix import helix_problem
from atoll.solve.place.bound.bounds import upper_bound
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.flow_instance import FlowInstance
from atoll.solve.place.from_problem import flow_instance
from atoll.solve.place.search.flow_search import search, search_many
from benchmarks.placement.flow_cases import large_cluster, small_cluster
from benchmarks.report import DATA
from tests.reference.flow_brute import brute
from tests.seeds import seeds

HELIX = DATA / "helix"


def helix(name: str, model: str = "LLaMA-2-70B") -> FlowInstance:
    if not HELIX.exists():
        pytest.skip(f"{HELIX} is not there")
    problem = helix_problem(HELIX / "clusters" / f"{name}.ini", model=model)
    return flow_instance(problem, problem.catalog(), problem.services[0])


@pytest.mark.parametrize("case", seeds(25))
def test_equals_brute_force(case: int) -> None:
    instance = small_cluster(stream(case, "search"))
    found = search(instance, evaluations=40_000, seed=case)
    value = max_flow(instance, found.placement).value
    assert value == pytest.approx(found.value, rel=1e-6, abs=1e-9)
    assert brute(instance, above=value * (1 - 1e-6)).value == pytest.approx(
        value, rel=2e-6, abs=1e-9
    )


def test_brute_force_needs_no_hint() -> None:
    """From nothing it finds the same as from just below the best."""
    random = stream(6, "brute")
    seen = 0
    while seen < 6:
        instance = small_cluster(random)
        if instance.size > 3 or instance.layers > 6:
            continue
        best = brute(instance)
        assert max_flow(instance, best.placement).value == pytest.approx(best.value, abs=1e-9)
        again = brute(instance, above=best.value * 0.999)
        assert again.value == pytest.approx(best.value, rel=1e-6, abs=1e-9)
        assert brute(instance, above=best.value * 1.001 + 1.0).value == best.value * 1.001 + 1.0
        seen += best.value > 0


@pytest.mark.parametrize("workers", [1, 2])
def test_same_seed_same_bits(workers: int) -> None:
    instance = large_cluster(20, stream(7, "search"))
    runs = [search(instance, evaluations=6_000, seed=3, workers=workers) for _ in range(2)]
    assert runs[0].value == runs[1].value
    np.testing.assert_array_equal(runs[0].placement.start, runs[1].placement.start)
    np.testing.assert_array_equal(runs[0].placement.end, runs[1].placement.end)


def test_work_is_counted_and_the_clock_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same placement and evaluations on a machine whose clock runs a thousand times as fast."""
    instance = large_cluster(20, stream(7, "search"))
    bound = upper_bound(instance).value
    usual = search(instance, work=3_000_000, seed=3, bound=bound)
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: 1000.0 * clock())
    loaded = search(instance, work=3_000_000, seed=3, bound=bound)
    assert usual.evaluations == loaded.evaluations > 500
    np.testing.assert_array_equal(usual.placement.start, loaded.placement.start)
    np.testing.assert_array_equal(usual.placement.end, loaded.placement.end)
    more = search(instance, work=12_000_000, seed=3, bound=bound)
    assert more.evaluations > 2 * usual.evaluations


def test_candidates_are_distinct_and_ranked() -> None:
    instance = large_cluster(20, stream(8, "search"))
    found = search_many(instance, candidates=4, evaluations=20_000, seed=1)
    assert len(found) == 4
    values = [own.value for own in found]
    assert values == sorted(values, reverse=True)
    for own in found:
        assert max_flow(instance, own.placement).value == pytest.approx(own.value, rel=1e-6)
    assert len({(*own.placement.start, *own.placement.end) for own in found}) == 4


def test_never_below_its_start_and_stops_at_the_target() -> None:
    instance = large_cluster(20, stream(9, "search"))
    good = search(instance, evaluations=5_000, seed=1)
    bound = good.bound
    again = search(instance, evaluations=100, seed=2, start=[good.placement], bound=bound)
    assert again.value >= good.value
    reached = search(
        instance,
        evaluations=10**9,
        seed=2,
        start=[good.placement],
        target=good.value,
        bound=bound,
    )
    assert reached.evaluations == 0


def test_not_enough_memory_uses_no_node() -> None:
    instance = large_cluster(20, stream(9, "search"))
    short = replace(instance, layers=int(instance.max_layers.sum()) + 1)
    found = search(short, evaluations=1000)
    assert found.value == found.bound == 0.0
    assert not found.placement.end.any()


def test_wrong_numbers_are_refused() -> None:
    instance = small_cluster(stream(1, "search"))
    with pytest.raises(UsageError, match="workers"):
        search(instance, evaluations=10, workers=0)
    with pytest.raises(UsageError, match="candidates"):
        search_many(instance, evaluations=10, candidates=0)


@pytest.mark.parametrize(
    ("name", "model", "bar"),
    [("single24", "LLaMA-2-70B", 2045.6), ("cluster10", "LLaMA-1-30B", 286.5)],
)
def test_proven_optima(name: str, model: str, bar: float) -> None:
    instance = helix(name, model)
    found = search(instance, evaluations=20_000)
    assert max_flow(instance, found.placement).value >= bar
    assert found.bound <= found.value * (1 + 1e-6)


@pytest.mark.slow
def test_geo_and_cluster42_reach_their_bars() -> None:
    assert search(helix("cluster42"), evaluations=1).value >= 5441
    geo = helix("3cluster24")
    found = search(geo, evaluations=400_000, seed=1, target=1392.0)
    assert max_flow(geo, found.placement).value >= 1392.0
