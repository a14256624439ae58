"""What losses leave of a plan: machines with all their slices, zones, regions, several at once."""

from __future__ import annotations

import pytest

from atoll.core.errors import AtollError
from atoll.plan.files.fleet_file import build_problem
from atoll.plan.losses import left_shares, list_left, losses, region_of
from atoll.plan.plan import Plan, Route
from atoll.plan.problem import Limits, Problem
from atoll.plan.survival import Survival
from atoll.plan.validate.check import validate
from atoll.prove.planning import plan as make_plan
from atoll.solve.effort import Effort
from atoll.solve.explain.explain_plan import explain_problem
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve

CHAT = {
    "model": "llama-3.1-8b",
    "ttft": "2s",
    "tpot": "80ms",
    "rate": "30/s",
    "lengths": "500x100",
    "phases": "together",
}


def fleet(survive: object = 0, **service: object) -> Problem:
    pool = [
        {"region": f"eu/{zone}", "node_type": "L40S:4", "available": 2, "usd_per_hour": 6.0}
        for zone in "ab"
    ]
    pool.append({"region": "us", "node_type": "L40S:1", "available": 6, "usd_per_hour": 2.5})
    return build_problem(
        {
            "name": "losses",
            "models": {"chat": {**CHAT, **service}},
            "pool": {"offers": pool},
            "settings": {"max_nodes_per_instance": 1},
            **({"limits": {"survive": survive}} if survive else {}),
        }
    )


def plan_for(asked: Problem) -> Plan:
    return solve(asked, PlanRequest(effort=Effort(cached=False), deadline_s=60.0))


def test_numbers_are_machines_and_older_problems_keep_their_hash() -> None:
    assert Limits(survive=1).survival == Survival(machines=1)
    assert "survive" not in Limits().model_dump()
    assert Limits(survive=1).model_dump()["survive"] == 1
    read = Limits.from_json(Limits(survive=Survival(zones=1, keep=0.8)).to_json())
    assert read.survival == Survival(zones=1, keep=0.8)
    assert region_of("eu/a") == "eu"
    assert region_of("us") == "us"


def test_routes_for_every_loss_are_in_the_plan_before_it_happens() -> None:
    asked = fleet({"machines": 1, "zones": 1})
    request = PlanRequest(effort=Effort(cached=False), deadline_s=60.0, capacity_only=True)
    made = make_plan(asked, request)
    assert "zone us" in {loss.lost for loss in made.after_loss}
    # Whatever machine goes, not only one of those that are alike.
    single = [loss.instances[0] for loss in made.after_loss if "L40S:1" in loss.lost]
    assert len(single) == len({*single}) > 1
    lost = {name for loss in made.after_loss for name in loss.instances}
    assert lost == {one.id for one in made.instances}
    for loss in made.after_loss:
        left = {one.id for one in made.instances} - {*loss.instances}
        assert {name for route in loss.routes for name in route.instances} <= left
        assert sum(route.share for route in loss.routes) == pytest.approx(1.0)
    assert validate(made, asked) == []
    assert Plan.model_validate_json(made.model_dump_json()) == made

    first = made.after_loss[0]
    dead = first.model_copy(
        update={"routes": (Route(service="chat", instances=first.instances[:1], share=1.0),)}
    )
    wrong = made.model_copy(update={"after_loss": (dead, *made.after_loss[1:])})
    found = [one for one in validate(wrong, asked) if one.field == "after_loss"]
    assert f"with {first.lost} lost leads to" in found[0].message
    assert not make_plan(fleet(), request).after_loss


@pytest.mark.parametrize(
    ("survive", "said"),
    [
        ({}, "no loss is named"),
        ({"machines": 0}, "no loss is named"),
        ({"machines": 9}, "3"),
        ({"racks": 1}, "racks"),
        ({"machines": 1, "keep": "0%"}, "0"),
        ({"machines": 1, "services": ["chatt"]}, "chat"),
        (True, "survive"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(survive: object, said: str) -> None:
    with pytest.raises(AtollError) as raised:
        fleet(survive or {"services": []})
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_slices_of_a_machine_die_together_and_are_spread() -> None:
    plain = plan_for(fleet())
    asked = fleet(1)
    safe = plan_for(asked)

    assert min(left_shares(safe, asked, asked.catalog(), set()).values()) == 1.0
    assert all(
        left.shares["chat"] >= 1.0 - 1e-6 for left in list_left(safe, asked, asked.catalog())
    )
    assert safe.usd_per_hour > plain.usd_per_hour
    assert validate(safe, asked) == []
    # The plan that need not survive is refused, with the machine that it dies with.
    (broken,) = [v for v in validate(plain, asked, same_problem=False) if v.rule == "survive"]
    assert "lost serves" in broken.message


@pytest.mark.parametrize("unit", ["zones", "regions"])
def test_zones_and_regions_are_lost_whole(unit: str) -> None:
    asked = fleet({unit: 1})
    made = plan_for(asked)
    units = {i.region if unit == "zones" else region_of(i.region) for i in made.instances}
    assert len(units) > 1
    found = list(losses(made.instances, asked.limits.survival))
    assert all(
        left.shares["chat"] >= 1.0 - 1e-6 for left in list_left(made, asked, asked.catalog())
    )
    assert {one.unit for one in found} == {unit.removesuffix("s")}


def test_less_is_kept_where_that_is_enough_and_nothing_of_others() -> None:
    dear = plan_for(fleet(1)).usd_per_hour
    half = fleet({"machines": 1, "keep": "50%"})
    some = plan_for(half)
    assert some.usd_per_hour < dear
    least = min(left.shares["chat"] for left in list_left(some, half, half.catalog()))
    assert 0.5 - 1e-6 <= least < 1.0


def test_where_nothing_survives_all_is_served_and_the_loss_is_named() -> None:
    asked = fleet(1)
    alone = asked.replace(
        offers=tuple(o.model_copy(update={"available": 1}) for o in asked.offers[:1])
    )
    made = plan_for(alone)
    assert made.status == "partial"
    assert made.served_fraction == {"chat": 1.0}
    assert any("lost only 0%" in reason for reason in made.reasons)
    assert validate(made, alone) == []
    assert validate(made.model_copy(update={"status": "feasible"}), alone) != []


@pytest.mark.slow
def test_explain_prices_each_loss_and_names_the_one_that_binds() -> None:
    asked = fleet({"machines": 1, "zones": 1})
    made = plan_for(asked)
    request = PlanRequest(effort=Effort(cached=False), deadline_s=60.0)
    found = explain_problem(asked, made, request, repairs=False)

    *each, at_all = found.losses
    assert at_all.lost is None
    assert at_all.saves_usd == pytest.approx(made.usd_per_hour - plan_for(fleet()).usd_per_hour)
    assert {one.lost for one in each} >= {f"zone {i.region}" for i in made.instances}
    (worst,) = [one for one in each if one.binds]
    assert worst.saves_usd == max(one.saves_usd or 0.0 for one in each)
    assert all((one.saves_usd or 0.0) <= (at_all.saves_usd or 0.0) + 1e-6 for one in each)
    assert "it binds" in worst.text
    # Planning again is for a plan that survives: one that dies is no saving.
    assert found.again is not None
    assert found.again.nothing
    assert not explain_problem(fleet(), plan_for(fleet()), request, repairs=False).losses


def test_a_loss_takes_every_slice_of_the_machine() -> None:
    (one, *_) = plan_for(fleet(1)).instances
    node = one.nodes[0].model_copy(
        update={"node_type": "L40S:4", "gpu_ids": (0,), "slot": 0, "market": "on-demand"}
    )
    beside = node.model_copy(update={"gpu_ids": (1,)})
    apart = node.model_copy(update={"slot": 1})
    stand = [
        one.model_copy(update={"id": name, "nodes": (own,)})
        for name, own in (("a", node), ("b", beside), ("c", apart))
    ]
    found = {loss.instances: loss.name for loss in losses(stand, Survival(machines=1))}
    assert set(found) == {frozenset("ab"), frozenset("c")}
    assert found[frozenset("c")] == f"machine 1, L40S:4 in {one.region}"
    (both,) = losses(stand, Survival(machines=2))
    assert both.instances == frozenset("abc")
    assert not list(losses(stand, Survival(machines=1, spared=(f"L40S:4 in {one.region}",))))
