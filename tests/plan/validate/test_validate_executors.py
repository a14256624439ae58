"""Plans for any-to-any models, broken in one place at a time: the rule that is broken says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.plan import Flow, Instance, Plan, RequestPath, RequestStep
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from tests.solve.graph.fleets import DRAWING, HERE, THERE, fleet, offer, seeing

OFFERS = (
    offer("A100-80:2", 6.0, 3),
    offer("L4:1", 0.8, 4),
    offer("T4:1", 0.5, 4),
    {**offer("L4:1", 0.8, 4), "region": THERE},
)


RATES = {
    "vision": {"L4": {"image": "6/s"}, "T4": {"image": "1/s"}},
    "llm": {"A100-80": {"request": "5.1/s"}},
}
"""Measured, so that what stands where does not hang on the performance model."""


@cache
def apart() -> tuple[Problem, Plan]:
    """Two executors for vision and one for the llm, each with slices of machines or whole ones."""
    problem = fleet({"see": seeing(rate="10/s", rates=RATES, paths=[["vision", "llm"]])}, OFFERS)
    return problem, solve(problem)


@cache
def free() -> tuple[Problem, Plan]:
    problem = fleet({"see": seeing(), "draw": DRAWING}, OFFERS)
    return problem, solve(problem)


def rules(plan: Plan, problem: Problem) -> set[str]:
    return {violation.rule for violation in validate(plan, problem)}


def test_plans_of_the_solver_are_valid() -> None:
    for problem, plan in (apart(), free()):
        assert rules(plan, problem) == set()
        assert plan.status == "optimal"
    # What is broken below is there to be broken.
    plan = apart()[1]
    assert {i.role_id.component for i in plan.instances} == {"vision", "llm"}
    assert any(node.gpu_ids for i in plan.instances for node in i.nodes)
    assert {path.klass for path in plan.paths} == {"text", "image+text"}


# Ways to break a plan


def with_executor(plan: Plan, old: Instance, **fields: object) -> Plan:
    new = Instance.model_validate({**dict(old), **fields})
    return plan.model_copy(
        update={"instances": tuple(new if i.id == old.id else i for i in plan.instances)}
    )


def on_node(plan: Plan, old: Instance, **fields: object) -> Plan:
    return with_executor(plan, old, nodes=(old.nodes[0].model_copy(update=fields),))


def with_path(plan: Plan, old: RequestPath, **fields: object) -> Plan:
    new = old.model_copy(update=fields)
    return plan.model_copy(
        update={"paths": tuple(new if path is old else path for path in plan.paths)}
    )


def executor(plan: Plan, component: str) -> Instance:
    return next(i for i in plan.instances if i.role_id.component == component)


def sliced(plan: Plan) -> Instance:
    return next(i for i in plan.instances if i.nodes[0].gpu_ids is not None)


def path(plan: Plan, klass: str) -> RequestPath:
    return next(p for p in plan.paths if p.klass == klass)


def seen(plan: Plan) -> RequestPath:
    return path(plan, "image+text")


def weighed(plan: Plan, factor: float) -> Plan:
    """The first step of a path with weights that do not add up."""
    old = seen(plan)
    first = old.steps[0]
    less = {name: weight * factor for name, weight in first.instances.items()}
    return with_path(
        plan, old, steps=(first.model_copy(update={"instances": less}), *old.steps[1:])
    )


def without(plan: Plan, gone: Instance) -> Plan:
    """A plan that has lost an executor and pays for it no more; others take what it did."""
    left = tuple(i for i in plan.instances if i.id != gone.id)
    paths = []
    for old in plan.paths:
        steps = []
        for step in old.steps:
            weights = {name: w for name, w in step.instances.items() if name != gone.id}
            if not weights:
                weights = {executor(plan, "llm").id: 1.0}
            total = sum(weights.values())
            spread = {name: w / total for name, w in weights.items()}
            steps.append(RequestStep(parts=step.parts, instances=spread))
        paths.append(old.model_copy(update={"steps": tuple(steps)}))
    usd = plan.usd_per_hour - gone.usd_per_hour
    return plan.model_copy(update={"instances": left, "paths": tuple(paths), "usd_per_hour": usd})


def two_classes_apart(plan: Plan) -> Plan:
    """The text class sent to an executor of another part."""
    old = path(plan, "text")
    lost = RequestStep(parts=old.steps[0].parts, instances={executor(plan, "vision").id: 1.0})
    return with_path(plan, old, steps=(lost,))


def overlapping(plan: Plan) -> Plan:
    """Two executors on one GPU of one machine."""
    first = sliced(plan)
    twin = first.model_copy(update={"id": "twin", "throughput_per_s": 0.0, "flows": ()})
    return plan.model_copy(update={"instances": (*plan.instances, twin)})


def idle(plan: Plan) -> Plan:
    """An executor that says it carries requests, and no path leads there."""
    return with_executor(plan, executor(plan, "llm"), id="nobody-0")


Break = Callable[[Plan], Plan]

BROKEN: dict[str, tuple[Break, set[str]]] = {
    "a step is dropped": (lambda p: with_path(p, seen(p), steps=seen(p).steps[1:]), {"layers"}),
    "steps swapped": (lambda p: with_path(p, seen(p), steps=seen(p).steps[::-1]), {"layers"}),
    "a step twice": (
        lambda p: with_path(p, seen(p), steps=(seen(p).steps[0], *seen(p).steps)),
        {"layers"},
    ),
    "a part twice": (
        lambda p: with_path(
            p,
            seen(p),
            steps=(
                seen(p).steps[0].model_copy(update={"parts": ("vision", "vision")}),
                seen(p).steps[1],
            ),
        ),
        {"layers"},
    ),
    "weights below 1": (lambda p: weighed(p, 0.9), {"route"}),
    "weights a little below 1": (lambda p: weighed(p, 0.9999), {"route"}),
    "shares below 1": (lambda p: with_path(p, seen(p), share=0.5), {"route", "throughput"}),
    "a class without paths": (
        lambda p: p.model_copy(update={"paths": (seen(p),)}),
        {"route", "throughput"},
    ),
    "a path twice": (
        lambda p: p.model_copy(
            update={
                "paths": tuple(
                    half
                    for old in p.paths
                    for half in [old.model_copy(update={"share": old.share / 2})] * 2
                )
            }
        ),
        {"route"},
    ),
    "an unknown class": (lambda p: with_path(p, seen(p), klass="video+text"), {"name"}),
    "an unknown service": (lambda p: with_path(p, seen(p), service="draw"), {"name"}),
    "no such executor": (
        lambda p: with_path(
            p, path(p, "text"), steps=(RequestStep(parts=("llm",), instances={"llm-9": 1.0}),)
        ),
        {"route"},
    ),
    "an executor without the part": (two_classes_apart, {"route"}),
    "no such part": (
        lambda p: with_executor(p, executor(p, "vision"), role="see/hearing/serve"),
        {"name"},
    ),
    "a part of an executor twice": (
        lambda p: with_executor(p, executor(p, "llm"), role="see/llm+llm.prefill/serve"),
        {"name"},
    ),
    "another service's role": (
        lambda p: with_executor(p, executor(p, "llm"), role="draw/llm/serve"),
        {"name"},
    ),
    "a plain role": (
        lambda p: with_executor(p, executor(p, "llm"), role="see/llm/both"),
        {"name"},
    ),
    "on a node too small": (
        lambda p: on_node(p, executor(p, "llm"), node_type="T4:1", tp=1, gpu_ids=None),
        {"memory", "cost"},
    ),
    "split over GPUs that are not there": (
        lambda p: on_node(p, executor(p, "llm"), tp=3),
        {"memory"},
    ),
    "with layers": (lambda p: on_node(p, executor(p, "llm"), end=28), {"layers"}),
    "not on offer": (
        lambda p: on_node(p, executor(p, "llm"), node_type="H100:2"),
        {"offer"},
    ),
    "an executor less": (lambda p: without(p, executor(p, "vision")), {"node-capacity"}),
    "in another region": (
        lambda p: with_executor(p, executor(p, "vision"), region=THERE),
        {"route"},
    ),
    "in no region": (
        lambda p: with_executor(p, executor(p, "vision"), region="mars"),
        {"name", "offer"},
    ),
    "its node in another region": (
        lambda p: on_node(p, executor(p, "vision"), region=THERE),
        {"region"},
    ),
    "kept that does not run": (
        lambda p: with_executor(p, executor(p, "llm"), kept=True),
        {"kept"},
    ),
    "wrong throughput": (
        lambda p: with_executor(
            p,
            executor(p, "llm"),
            throughput_per_s=99.0,
            flows=(
                Flow(src="source", dst="n0", per_s=99.0),
                Flow(src="n0", dst="sink", per_s=99.0),
            ),
        ),
        {"throughput"},
    ),
    "throughput without paths": (idle, {"route"}),
    "slices overlap": (overlapping, {"slice", "cost"}),
    "a GPU that is not there": (
        lambda p: on_node(p, sliced(p), gpu_ids=(7,)),
        {"slice"},
    ),
    "no such machine": (lambda p: on_node(p, sliced(p), slot=99), {"slice"}),
    "two ids the same": (
        lambda p: p.model_copy(update={"instances": (*p.instances, p.instances[0])}),
        {"name"},
    ),
    "another price": (
        lambda p: with_executor(p, executor(p, "llm"), usd_per_hour=1.0),
        {"cost"},
    ),
    "less than all is served": (
        lambda p: p.model_copy(update={"served_fraction": {"see": 0.5}}),
        {"status", "throughput"},
    ),
    "partial, and all is served": (
        lambda p: p.model_copy(update={"status": "partial"}),
        {"status"},
    ),
    "a share of a service nobody asked for": (
        lambda p: p.model_copy(update={"served_fraction": {"see": 1.0, "draw": 1.0}}),
        {"name"},
    ),
    "made for another problem": (
        lambda p: p.model_copy(update={"problem_hash": "0" * 64}),
        {"problem"},
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(name: str) -> None:
    problem, plan = apart()
    broken, expected = BROKEN[name]
    found = rules(broken(plan), problem)
    assert found >= expected, (found, expected)


def test_an_executor_that_no_path_leads_to_carries_nothing() -> None:
    problem, plan = apart()
    one = executor(plan, "llm")
    flows = tuple(flow.model_copy(update={"per_s": 5.0}) for flow in one.flows)
    spare = one.model_copy(update={"id": "spare", "throughput_per_s": 5.0, "flows": flows})
    more = plan.model_copy(update={"instances": (*plan.instances, spare)})
    assert "throughput" in rules(more, problem)


# Other problems, the same plan


def judged(plan: Plan, **fields: object) -> set[str]:
    """The rules that a plan breaks for a service that differs in some fields."""
    problem = fleet({"see": seeing(**{"rate": "10/s", "rates": RATES, **fields})}, OFFERS)
    return {v.rule for v in validate(plan, problem, same_problem=False)}


def test_a_service_may_ask_for_phases_apart() -> None:
    _, plan = apart()
    assert judged(plan) == set()
    assert judged(plan, phases="together") == set()
    assert judged(plan, phases="apart") == {"layers"}


def test_only_allowed_paths_are_gone_in_any_order_that_the_parts_allow() -> None:
    _, plan = apart()
    assert judged(plan, paths=[["vision", "llm"]]) == set()
    assert judged(plan, paths=[["llm", "vision"]]) == set()
    assert judged(plan, paths=[["vision+llm"], ["vision", "llm"]]) == set()
    assert judged(plan, paths=[["vision+llm"]]) == {"route"}


def test_an_executor_of_an_allowed_path_is_one() -> None:
    """Two executors of all parts, the one for images and the other for the rest, are not one for both."""
    problem = fleet({"see": seeing(rate="10/s", rates=RATES, only=["A100-80"])}, OFFERS)
    whole = solve(problem, PlanRequest(solver="monolith"))
    assert rules(whole, problem) == set()
    assert {i.role_id.component for i in whole.instances} == {"vision+llm"}
    assert judged(whole, paths=[["vision+llm"]]) == set()
    first, second = (i.id for i in whole.instances[:2])
    old = seen(whole)
    steps = (
        RequestStep(parts=("vision",), instances={first: 1.0}),
        RequestStep(parts=("llm",), instances={second: 1.0}),
    )
    split = with_path(whole, old, steps=steps)
    assert "route" in judged(split, paths=[["vision+llm"]])
    assert "route" not in judged(split)
    assert "route" not in judged(split, paths=[["vision+llm", "vision+llm"]])


def test_promises_that_the_executors_cannot_keep_together() -> None:
    _, plan = apart()
    assert judged(plan, ttft="600ms") == {"handover"}
    assert judged(plan, ttft="100ms") == {"node-capacity"}
    assert "node-capacity" in judged(plan, rates={}, tpot="1ms")


def test_a_first_text_comes_in_time_from_some_promise_on() -> None:
    """Half a second for three images, a fifth for the prompt, and the way from the one to the other."""
    _, plan = apart()
    least = 3 / 6 + 1 / 5.1
    assert judged(plan, ttft=f"{least:.4f}s") == {"handover"}
    within = {ms: judged(plan, ttft=f"{1000 * least + ms:.1f}ms") for ms in range(0, 200, 16)}
    kept = min(ms for ms, found in within.items() if not found)
    assert 0 < kept < 192
    assert all(not found for ms, found in within.items() if ms >= kept)
    assert all(found == {"handover"} for ms, found in within.items() if ms < kept)


def test_services_that_may_not_stand_there() -> None:
    _, plan = apart()
    kind = executor(plan, "llm").nodes[0].kind
    assert judged(plan, avoid=[kind]) == {"pinning"}


@given(st.floats(1.002, 50.0))
def test_more_requests_than_were_planned_for_are_too_many(factor: float) -> None:
    """The busiest executor of an optimal plan has room for few more; far more always break it."""
    _, plan = apart()
    found = judged(plan, rate=f"{10 * factor:.6f}/s")
    assert "throughput" in found
    if factor > 2.5:
        assert "node-capacity" in found


def test_interfaces_between_machines_carry_so_much() -> None:
    """A thousand times the requests on a thousand times the executors' speed: the network is what is left."""
    _, plan = apart()
    rates = {
        part: {gpu: {"request": "1000000/s"} for gpu in ("A100-80", "L4", "T4")}
        for part in ("vision", "llm")
    }
    assert "link-capacity" not in judged(plan, rates=rates)
    found = judged(plan, rates=rates, rate="100000/s")
    assert "link-capacity" in found
    assert "node-capacity" not in found


def test_plans_come_back_from_json() -> None:
    for problem, plan in (apart(), free()):
        again = Plan.from_json(plan.to_json())
        assert again == plan
        assert rules(again, Problem.from_json(problem.to_json())) == set()


def test_regions_are_not_mixed_on_a_path() -> None:
    problem, plan = apart()
    lamp = executor(plan, "vision")
    node = lamp.nodes[0].model_copy(
        update={"node_type": "L4:1", "tp": 1, "slot": None, "gpu_ids": None}
    )
    moved = with_executor(plan, lamp, region=THERE, nodes=(node,), usd_per_hour=0.8)
    assert lamp.region == HERE
    assert "route" in rules(moved, problem)
