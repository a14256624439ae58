"""Explanations of plans with any-to-any models: figures are differences of checked plans."""

from __future__ import annotations

from functools import cache

import pytest

from atoll.core.ids import parse_node_type
from atoll.plan.executor_use import executor_use
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import KeptPromise, Plan
from atoll.plan.problem import Problem
from atoll.solve.effort import Effort
from atoll.solve.explain.changes import free_paths, loosen_classes, more_gpu_types
from atoll.solve.explain.explain_graph import part_fits
from atoll.solve.explain.explain_plan import explain_problem
from atoll.solve.explain.merit import relaxes
from atoll.solve.explain.plan_explanation import FITS, Explanation, RepairKind
from atoll.solve.family import baselines
from atoll.solve.graph.room import slow_others, slowdown_of
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from tests.cli.graphs import SHORT, SMALL


@cache
def problem(text: str = SMALL) -> Problem:
    return parse_fleet(text, path="small.yaml")


@cache
def made() -> Plan:
    return solve(problem())


@cache
def explained() -> Explanation:
    return explain_problem(problem(), made(), PlanRequest(deadline_s=600.0))


@pytest.mark.slow
def test_every_way_with_a_name_is_beside_the_plan() -> None:
    ways = {way.name: way for way in explained().ways}
    assert set(ways) == set(baselines(problem()))
    for way in ways.values():
        if way.ratio is not None:
            assert way.ratio >= 1.0 - 1e-6, "no way with a name beats the proven optimum"
            assert way.usd_per_hour == pytest.approx(way.ratio * made().usd_per_hour)


def test_the_bottleneck_is_the_part_whose_executors_are_busiest() -> None:
    parts = explained().parts
    use = executor_use(made(), problem(), problem().catalog())
    assert parts == use.parts()
    assert parts[0].busy == max(part.busy for part in parts)


def test_repairs_are_cheaper_and_say_what_changes() -> None:
    repairs = explained().repairs
    assert repairs is not None
    for repair in repairs:
        assert repair.usd_per_hour < made().usd_per_hour
        assert repair.meets_demand
    for change in explained().left_out:
        assert "everything" not in change


def test_a_used_up_offer_has_a_worth() -> None:
    tight = problem(SMALL.replace("available: 2", "available: 1"))
    explanation = explain_problem(tight, request=PlanRequest(deadline_s=600.0), repairs=False)
    for constraint in explanation.constraints:
        if constraint.kind == "availability":
            assert constraint.worth is not None


def test_what_cannot_be_served_is_explained() -> None:
    explanation = explain_problem(
        problem(SHORT), request=PlanRequest(deadline_s=600.0), max_plans=3
    )
    assert explanation.status == "partial"
    assert 0 < explanation.served < 1
    assert explanation.left_out
    strict = explain_problem(
        problem(SHORT + "settings: {on_shortage: fail}\n"),
        request=PlanRequest(deadline_s=600.0),
        max_plans=1,
    )
    assert strict.status == "infeasible"


def test_a_node_type_is_explained_alone() -> None:
    unused = [
        kind for kind in problem().node_types if kind not in {k for _, k, _ in made().count_nodes()}
    ]
    assert unused
    explanation = explain_problem(
        problem(), made(), PlanRequest(deadline_s=600.0), node_types=unused[:1]
    )
    assert not explanation.ways
    assert not explanation.parts
    assert explanation.repairs is None
    (use,) = explanation.node_types
    assert use.verdict in ("too-dear", "idle")
    assert {fit.kind for fit in explanation.fits} == set(unused[:1])
    if use.break_even_usd_per_hour is not None:
        assert use.usd_per_hour is not None
        assert use.break_even_usd_per_hour <= use.usd_per_hour


def test_what_does_not_fit_says_why() -> None:
    fits = {(fit.part, fit.kind): fit for fit in part_fits(problem(), problem().catalog())}
    assert fits["llm", "T4:1"].reason.startswith("memory: ")
    assert not fits["llm", "T4:1"].carries
    assert fits["vision", "L40S:1"].reason == FITS
    rushed = problem(SMALL.replace("ttft: 3s", "ttft: 400ms"))
    late = {(fit.part, fit.kind): fit for fit in part_fits(rushed, rushed.catalog())}
    assert late["vision", "T4:1"].reason == "promise of 'image+text'"
    assert "alone" in late["vision", "T4:1"].detail
    pinned = problem(SMALL.replace("    rate:", "    avoid: [T4]\n    rate:"))
    own = {(fit.part, fit.kind): fit for fit in part_fits(pinned, pinned.catalog())}
    assert "avoid" in own["vision", "T4:1"].reason


def test_looser_promises_of_classes_only_allow_more() -> None:
    service = problem().service("look")
    kinds: tuple[RepairKind, ...] = ("ttft", "tpot")
    for kind in kinds:
        change = loosen_classes(problem(), service, kind, 2.0)
        assert change is not None
        assert relaxes(change.problem, problem())
        assert not relaxes(problem(), change.problem)
        assert "->" in f"{change.where} {change.before} -> {change.after}"
    assert loosen_classes(problem(), service, "ahead", 2.0) is None
    assert loosen_classes(problem(), service, "image", 2.0) is None


def test_free_paths_only_allow_more() -> None:
    given = problem(SMALL.replace("    rate:", "    paths: [[vision, llm]]\n    rate:"))
    (change,) = free_paths(given)
    assert relaxes(change.problem, given)
    assert not relaxes(given, change.problem)


def test_another_gpu_type_is_one_that_is_sold_there() -> None:
    cloud = SMALL.replace("region: east", "region: aws/us-east-1")
    asked = problem(cloud)
    changes = list(more_gpu_types(asked, asked.catalog()))
    assert changes
    own = {parse_node_type(offer.node_type).gpu for offer in asked.offers}
    for change in changes:
        new = {parse_node_type(o.node_type).gpu for o in change.problem.offers} - own
        assert len(new) == 1
        assert relaxes(change.problem, asked)
    assert not list(more_gpu_types(problem(), problem().catalog())), "nobody sells in 'east'"


def test_a_plan_that_keeps_promises_is_planned_again_as_it_was_sized() -> None:
    asked, catalog = problem(), problem().catalog()
    options = ("vision", "llm", "vision+llm", "llm.prefill", "llm.decode", "vision+llm.prefill")
    roomy = solve(
        asked, PlanRequest(effort=Effort(slowdown={("look", some, "*"): 3.0 for some in options}))
    )
    slow = slowdown_of(roomy, asked, catalog)
    assert {parts for _, parts, kind in slow if kind == "*"} == set(options)
    again = solve(asked, PlanRequest(effort=Effort(slowdown=slow)))
    assert made().usd_per_hour < again.usd_per_hour <= roomy.usd_per_hour + 1e-6
    kept = KeptPromise(
        service="look", target=0.95, kept=0.97, low=0.96, high=0.98, kept_ttft=0.98, kept_tpot=0.99
    )
    promised = roomy.model_copy(update={"promises": (kept,)})
    explanation = explain_problem(asked, promised, PlanRequest(deadline_s=600.0), max_plans=2)
    assert explanation.usd_per_hour == roomy.usd_per_hour
    assert explanation.again is not None
    assert all(way.estimated for way in explanation.ways)
    assert not any(way.estimated for way in explained().ways)
    assert explanation.again.nothing, "what was not simulated must not look cheaper"


def test_others_are_slowed_down_only_until_they_beat_the_plan_no_more() -> None:
    slow = {("look", "llm", "T4:1"): 2.0, ("look", "vision", "*"): 1.5}
    assert slow_others(slow, lambda _: False) == slow
    enough = slow_others(slow, lambda tried: tried["look", "vision", "*"] < 2.0)
    assert enough == {**slow, ("look", "vision", "*"): 2.25}
    most = slow_others(slow, lambda _: True)
    assert most == {**slow, ("look", "vision", "*"): 30.0}


def test_no_time_at_all_says_so() -> None:
    explanation = explain_problem(problem(), made(), PlanRequest(deadline_s=0.0))
    assert explanation.left_out == ("everything that needs planning again",)
    assert explanation.parts
