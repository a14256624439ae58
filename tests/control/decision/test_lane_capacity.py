"""What executors of an any-to-any model carry, counted in the lane of their service."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.control.decision.instance_names import rename
from atoll.control.decision.lane_capacity import CarriedLoad, demand_by_lane, find_mixed
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Instance, Plan, RequestPath, RequestStep
from tests.cli.graphs import SMALL

# 3 requests/s, of which 60 % bring a picture.
PROBLEM = parse_fleet(SMALL)
(SERVICE,) = PROBLEM.services


def executor(name: str, parts: str, per_s: float) -> Instance:
    node = {"id": "n0", "node_type": "L4:1", "market": "on-demand", "start": 0, "end": 1, "tp": 1}
    return Instance.parse(
        {
            "id": name,
            "service": "look",
            "role": f"look/{parts}/serve",
            "region": "east",
            "stages": 1,
            "nodes": [node],
            "flows": [],
            "throughput_per_s": per_s,
            "usd_per_hour": 0.8,
        }
    )


def carried(*instances: Instance) -> float:
    mixed = find_mixed(PROBLEM, instances)
    assert mixed == {"look"}
    return CarriedLoad(PROBLEM, mixed, instances).lanes()["look"]


def test_the_weakest_component_says_what_is_carried() -> None:
    eye, mind = executor("a", "vision", 1.8), executor("b", "llm", 2.0)
    assert demand_by_lane(PROBLEM, frozenset({"look"})) == {"look": SERVICE.demand_per_s}
    assert carried(eye, mind) == pytest.approx(2.0)
    assert carried(eye, mind, executor("c", "llm", 2.0)) == pytest.approx(3.0)
    assert carried(eye) == 0.0
    assert carried(executor("d", "vision+llm", 2.5)) == pytest.approx(2.5)
    # Phases apart carry what the weaker of them does.
    apart = executor("p", "llm.prefill", 5.0), executor("q", "llm.decode", 1.5)
    assert carried(eye, *apart) == pytest.approx(1.5)
    assert carried(eye, mind, *apart) == pytest.approx(3.0)


PARTS = st.sampled_from(["vision", "llm", "vision+llm", "llm.prefill", "llm.decode"])


@given(st.lists(st.tuples(PARTS, st.floats(0.0, 9.0)), max_size=6), PARTS, st.floats(0.0, 9.0))
def test_one_more_never_carries_less_and_leaves_as_it_came(
    stand: list[tuple[str, float]], parts: str, per_s: float
) -> None:
    here = [executor(str(number), *each) for number, each in enumerate(stand)]
    one = executor("more", parts, per_s)
    load = CarriedLoad(PROBLEM, frozenset({"look"}), here)
    before = load.lanes()["look"]
    load.add(one)
    assert load.lanes()["look"] >= before - 1e-6
    assert load.without(one)["look"] == pytest.approx(before, abs=1e-6)


def test_paths_name_instances_as_the_fleet_does() -> None:
    step = RequestStep(parts=("vision", "llm"), instances={"d": 1.0})
    path = RequestPath(service="look", klass="text", share=1.0, steps=(step,))
    plan = Plan.parse(
        {
            "problem_name": "small",
            "problem_hash": "0" * 64,
            "usd_per_hour": 0.8,
            "solver": "test",
            "status": "feasible",
            "instances": [executor("d", "vision+llm", 2.5)],
            "paths": [path],
        }
    )
    renamed = rename(plan, lambda one: f"{one.id}-t1")
    assert renamed.paths[0].steps[0].instances == {"d-t1": 1.0}
