"""The published clusters: what is proven about their flow, and placements that reach it."""

from __future__ import annotations

import pytest

from atoll.plan.files.helix import helix_problem
from atoll.solve.place.bound.bounds import upper_bound
from atoll.solve.place.bound.lanes import lanes
from atoll.solve.place.bound.lanes_regions import region_lanes
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.from_problem import flow_instance
from tests.plan.clusters import HELIX

pytestmark = pytest.mark.skipif(
    not HELIX.is_dir(), reason="needs ../shared/data/helix beside the repository"
)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("cluster", "model", "best", "gap"),
    [
        ("cluster10", "LLaMA-1-30B", 286.58741, 1e-8),
        ("single24", "LLaMA-2-70B", 2045.641047, 1e-8),
        pytest.param("3cluster24", "LLaMA-2-70B", 1754.38189, 1e-8, marks=pytest.mark.slow),
        pytest.param("cluster42", "LLaMA-2-70B", 6050.770294, 3e-4, marks=pytest.mark.slow),
    ],
)
def test_published_clusters_are_solved(
    cluster: str, model: str, best: float, gap: float, partial: bool
) -> None:
    problem = helix_problem(HELIX / f"clusters/{cluster}.ini", model=model)
    instance = flow_instance(problem, problem.catalog(), problem.services[0], partial=partial)
    rule = region_lanes if cluster == "3cluster24" else lanes
    bound = upper_bound(instance)
    placement = rule(instance, seconds=60.0, high=bound.value)
    assert placement is not None
    assert max_flow(instance, placement).value == pytest.approx(best, rel=1e-6)
    assert best * (1 - 1e-8) <= bound.value <= best * (1 + gap)
