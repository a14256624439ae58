"""Problems with classes of requests: what they are as JSON, and that those without are as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from atoll.core.errors import InputError, UnknownNameError
from atoll.core.ids import Phase, RoleId, parse_role
from atoll.plan.files.fleet_file import load_fleet
from atoll.plan.plan import Instance, Node, Plan, RequestPath, RequestStep
from atoll.plan.problem import Problem, Service
from tests.plan.builders import problem as plain_problem
from tests.plan.builders import service
from tests.solve.graph.fleets import SPEAKING, fleet, seeing

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HASHES = {
    "cluster-mixed": "6b5afa494b379acc8a5513e88429c596222a2740844b20819d40ada7c9b71786",
    "cluster-shared": "e1685aa4f2b788d0cce8ee63e502cfe954ff932ef6b15edf1ae969c9593e49e0",
    "coral-core": "e7bf68c63e710371bc7593bddec77c23053ecad6d678943b9cda336dae62b352",
    "coral-extended": "9a5f0f78c04bdbe65cf3d9be04697e8960d2b9a50c4f70840b061d44e9cc7788",
    "demo-local": "b5554fde9684d9c34959ac455cf49bbf35e70d0b0a9745475995e2da7e722da8",
    "owned-cluster": "90ae1633f887c446809cc34c5258e39bad33c24ef888fdfed2e21869e956355f",
    "quickstart": "d39a6f93a2f9639354ddcca3ad7ccda1feeaaf1d100598c8f0a54323f7e40dc9",
}
"""Problems of the examples before there were classes, and engines to choose from; only other prices or
examples may change them."""


@pytest.mark.parametrize("name", HASHES)
def test_problems_without_classes_are_what_they_were(name: str) -> None:
    problem = load_fleet(EXAMPLES / f"{name}.yaml", environ={})
    free = problem.replace(settings={**dict(problem.settings), "engines": ()})
    assert free.content_hash() == HASHES[name]
    assert not problem.graph_services
    written = json.dumps(json.loads(problem.to_json())["services"])
    assert not any(f'"{field}"' in written for field in ("classes", "paths", "rates"))


def graph() -> Problem:
    rates = {"vision": {"L4": {"image": "3/s"}}}
    return fleet(
        {
            "see": seeing(paths=[["vision", "llm"], ["vision+llm"]], rates=rates),
            "speak": SPEAKING,
            "chat": {
                "model": "llama-3.2-1b",
                "rate": "1/s",
                "ttft": "1s",
                "tpot": "50ms",
                "lengths": "512x128",
            },
        }
    )


def test_problems_with_classes_come_back_from_json() -> None:
    problem = graph()
    again = Problem.from_json(problem.to_json())
    assert again == problem
    assert again.content_hash() == problem.content_hash()
    assert [s.is_graph for s in again.services] == [False, True, True]
    assert {role.model for role in again.roles} == {"chat"}
    see = again.service("see")
    assert see.class_rate_per_s(see.klass("text")) == pytest.approx(8 * 0.4)
    with pytest.raises(UnknownNameError):
        see.klass("video")


def test_each_field_is_part_of_the_hash() -> None:
    problem = graph()
    see = problem.service("see")
    changes: list[dict[str, object]] = [
        {"paths": see.paths[:1]},
        {"rates": ()},
        {"classes": (see.klass("text").model_copy(update={"share": 1.0}),)},
        {"classes": tuple(k.model_copy(update={"ttft_s": 9.0}) for k in see.classes)},
    ]
    hashes = {problem.content_hash()}
    for change in changes:
        other = Service.model_validate({**dict(see), **change})
        services = [other if s.name == "see" else s for s in problem.services]
        hashes.add(problem.replace(services=services).content_hash())
    assert len(hashes) == 1 + len(changes)


def test_the_order_of_classes_paths_and_rates_changes_nothing() -> None:
    see = graph().service("see")
    turned = {name: tuple(reversed(getattr(see, name))) for name in ("classes", "paths", "rates")}
    assert Service.model_validate({**dict(see), **turned}) == see


def test_classes_are_different_and_add_up() -> None:
    see = graph().service("see")
    for classes in (see.classes * 2, see.classes[:1]):
        with pytest.raises(ValidationError, match=r"twice|add up"):
            Service.model_validate({**dict(see), "classes": classes})
    with pytest.raises(ValidationError, match="twice"):
        Service.model_validate({**dict(see), "rates": see.rates * 2})


def test_a_plain_service_has_no_classes() -> None:
    own = service()
    assert (own.classes, own.paths, own.rates, own.is_graph) == ((), (), (), False)
    assert not plain_problem().graph_services


# Roles of executors

parts = st.sampled_from(["vision", "audio", "llm", "llm.prefill", "llm.decode", "talker", "dit"])


@given(st.sampled_from(["see", "org/see", "a.b-c_d"]), st.lists(parts, min_size=1, max_size=4))
def test_roles_of_executors_come_back(name: str, chosen: list[str]) -> None:
    role = RoleId(name, "+".join(chosen), Phase.SERVE)
    assert parse_role(str(role)) == role
    assert role.parts == tuple(chosen)


@pytest.mark.parametrize(
    "role",
    ["see/vision+llm/both", "see/+llm/serve", "see/llm+/serve", "see/a++b/serve", "see//serve"],
)
def test_roles_that_are_none(role: str) -> None:
    with pytest.raises(InputError):
        parse_role(role)


# Plans


def test_paths_are_part_of_a_plan_and_left_out_where_there_are_none() -> None:
    node = Node(id="n0", node_type="L4:1", market="owned", start=0, end=1, tp=1)
    executor = Instance(
        id="see-llm-0",
        service="see",
        role="see/vision+llm/serve",
        region="lab",
        stages=1,
        nodes=(node,),
        flows=(),
        throughput_per_s=0.0,
        usd_per_hour=0.0,
    )
    path = RequestPath(
        service="see",
        klass="image+text",
        share=1.0,
        steps=(RequestStep(parts=("vision", "llm"), instances={"b": 0.5, "a": 0.5}),),
    )
    plan = Plan(
        problem_hash="0",
        problem_name="p",
        instances=(executor,),
        paths=(path,),
        usd_per_hour=0.0,
        status="feasible",
        solver="hand",
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert list(plan.paths[0].steps[0].instances) == ["a", "b"]
    assert executor.is_executor
    assert executor.parts == ("vision", "llm")
    assert executor.describe() == "vision+llm on L4:1"
    assert '"paths"' not in plan.model_copy(update={"paths": ()}).to_json()
