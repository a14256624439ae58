"""What was measured of whole executors and batches, and CPU cores of machines: planned and simulated."""

from __future__ import annotations

import pytest

from atoll.core.errors import InputError
from atoll.plan.executors import work_of
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.sim.tasks.from_plan import task_fleet
from atoll.sim.tasks.task_fleet import BatchPart
from atoll.solve.registry import solve
from tests.solve.graph.fleets import fleet, offer, seeing

TOGETHER = [["vision+llm"]]
A100 = (offer("A100-80:1", 3.0, 40),)


def see(offers: tuple[dict[str, object], ...] = A100, **changes: object) -> Problem:
    return fleet({"see": seeing(**changes)}, offers)


def planned(problem: Problem) -> Plan:
    plan = solve(problem)
    assert validate(plan, problem) == []
    return plan


def mean_seconds(problem: Problem, parts: tuple[str, ...]) -> float:
    service = problem.service("see")
    work = work_of(problem, problem.catalog(), service, parts, "A100-80:1", tp=1)
    assert work is not None
    shares = {klass.name: klass.share for klass in service.classes}
    return sum(shares[name] * seconds for (name, _), seconds in work.seconds.items())


def test_a_whole_executor_takes_as_long_as_was_measured() -> None:
    guessed = mean_seconds(see(), ("vision", "llm"))
    rates = {"vision+llm": {"A100-80": {"request": 1.0 / (1.25 * guessed)}}}
    problem = see(rates=rates)
    assert mean_seconds(problem, ("vision", "llm")) == pytest.approx(1.25 * guessed)
    # Parts alone, and other sets of parts, are as they were.
    for parts in (("vision",), ("llm",)):
        assert mean_seconds(problem, parts) == mean_seconds(see(), parts)


def test_plans_and_simulations_use_it() -> None:
    guessed = mean_seconds(see(), ("vision", "llm"))
    rates = {"vision+llm": {"A100-80:1": {"request": 1.0 / (2.0 * guessed)}}}
    plain, slow = see(paths=TOGETHER), see(paths=TOGETHER, rates=rates)
    one, two = planned(plain), planned(slow)
    assert two.usd_per_hour >= 1.5 * one.usd_per_hour
    # The plan of the faster ones has too few of them.
    assert "node-capacity" in {v.rule for v in validate(one, slow, same_problem=False)}
    fleets = [task_fleet(p, q, q.catalog()) for p, q in ((one, plain), (two, slow))]
    assert {executor.slowed for executor in fleets[0].executors} == {1.0}
    assert [one.slowed for one in fleets[1].executors] == pytest.approx([2.0] * len(two.instances))


def test_seconds_of_batches_count_by_the_batch_that_a_promise_allows() -> None:
    table = {"A100-80": {"image": {1: "100ms", 3: "160ms", 12: "430ms"}}}
    problem = see(rates={"vision": table})
    work = work_of(
        problem, problem.catalog(), problem.service("see"), ("vision",), "A100-80:1", tp=1
    )
    assert work is not None
    # Three images a request: 160 ms alone, and 30 ms an image in batches of four requests.
    assert work.latency_s["image+text", "vision"] == pytest.approx(0.16)
    assert work.seconds["image+text", "vision"] == pytest.approx(0.43 / 4)
    plan = planned(see(paths=[["vision", "llm"]], rates={"vision": table}))
    parts = [
        executor.parts["vision"]
        for executor in task_fleet(plan, problem, problem.catalog()).executors
        if "vision" in executor.parts
    ]
    assert parts
    for part in parts:
        assert isinstance(part, BatchPart)
        assert part.max_batch == 4
        assert part.fixed_s + part.item_s["image+text"] == pytest.approx(0.16)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"vision+llm": {"A100-80": {"image": "2/s"}}}, "a rate of requests"),
        ({"llm": {"A100-80": {"request": {1: "1s"}}}}, "works on tokens"),
        ({"vision+vision": {"A100-80": {"request": "2/s"}}}, "has a part twice"),
        ({"vision": {"A100-80": {"image": {1: "2s", 4: "1s"}}}}, "a batch of 4 takes 1 s"),
    ],
)
def test_rates_that_mean_nothing_are_refused(rates: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        see(rates=rates)


def test_executors_stand_where_they_have_their_cores() -> None:
    asked = {"vision": 6, "llm": 2}

    def on(cores: int, **changes: object) -> Problem:
        machines = (offer("A100-80:2", 6.0, 40, cores=cores),)
        return see(machines, cores=asked, rate="2/s", **changes)

    enough = on(16)
    plan = planned(enough)
    assert {"+".join(one.parts) for one in plan.instances} == {"vision+llm"}
    assert {one.gpus for one in plan.instances} == {1}
    # Half a machine has half of its cores: both parts want eight.
    few = on(14)
    assert {v.rule for v in validate(plan, few, same_problem=False)} == {"cores"}
    for one in planned(few).instances:
        assert one.gpus == 2 or len(one.parts) == 1
    assert solve(on(7, paths=TOGETHER)).status == "infeasible"


def test_cores_are_the_sellers_or_stated() -> None:
    with pytest.raises(InputError, match="how many CPU cores a machine A100-80:1"):
        see(cores={"vision": 4})
    with pytest.raises(InputError, match="unknown component"):
        see(cores={"eyes": 4})
    fleet_of_a_cloud = """
services:
  see: {model: qwen2.5-vl-7b, rate: 1/s, cores: {vision: 4}, classes: {image+text: {share: 100%, images: {}}}}
pool: {cloud: {regions: [aws/us-east-1], node_types: ["L4:1", "T4:1"]}}
"""
    offers = {offer.node_type: offer.cores for offer in parse_fleet(fleet_of_a_cloud).offers}
    assert offers == {"L4:1": 4.0, "T4:1": 4.0}
