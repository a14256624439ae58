"""The check of losses finds what is false of a plan, and reports what no family counts as not run."""

from __future__ import annotations

import pytest

from atoll.prove.planning import plan as make_plan
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from tests.reference.loss_enumeration import cheapest
from tests.reference.shortage_ilp import ShortChoice, ShortPiece, most_served
from tests.slow.plans import (
    survive,
    survive_links,
    survive_losses,
    survive_shares,
    survive_shortage,
    survive_spot,
)
from tests.slow.plans.survive_outcome import FAULTS, Outcome

SEED = 18
"""A fleet that is planned in a moment."""


@pytest.mark.slow
def test_a_plan_that_need_not_survive_is_found_out() -> None:
    asked = survive_losses.make_fleet(SEED)
    request = PlanRequest(effort=Effort(cached=False), deadline_s=60.0, capacity_only=True)
    made = make_plan(asked, request)
    assert survive_losses.stands(made, asked)
    offers, places = survive_losses.offers_of(asked, asked.catalog())
    best, whole = cheapest(offers, survive_losses.lost_of(asked), places)
    assert whole
    assert best is not None
    assert abs(best.usd - made.usd_per_hour) < 1e-6

    plain = asked.replace(limits=asked.limits.model_copy(update={"survive": 0}))
    assert not survive_losses.stands(make_plan(plain, request), asked)


def test_faults_are_counted_and_those_of_no_family_are_not_run() -> None:
    good, bad = Outcome(0, "loss", price=0.5, cpu_s=3.0, plain_cpu_s=2.0), Outcome(1, "loss")
    bad.fault("dearer", "half of it would do")
    found = {figure.name: figure.value for figure in survive.figures({0: good, 1: bad})}
    assert found["cases"] == 2
    assert found["dearer"] == 1
    assert found["does_not_survive"] == 0
    assert found["price_of_surviving_median"] == 0.5
    assert found["cpu_s_median"] == 1.5
    counted = survive.FAMILIES["loss"][1]
    assert all((found[name] is None) == (name not in counted) for name in FAULTS)


@pytest.mark.slow
def test_a_sharer_that_falls_short_is_found_out() -> None:
    asked, services = survive_shares.make_fleet(6)
    request = PlanRequest(effort=Effort(cached=False), deadline_s=60.0, capacity_only=True)
    made = make_plan(asked, request)
    kept = survive_shares.kept_by_service(made, asked, services, asked.catalog(), 1)
    # Few long prompts among many short ones, on one machine that capacity alone would take.
    assert kept["s0"] < 0.8
    assert min(kept["s1"], kept["s2"]) > 0.9


def test_a_plan_that_loses_too_much_on_spot_is_found_out() -> None:
    asked = survive_spot.make_fleet(11)
    calm = asked.replace(limits=asked.limits.model_copy(update={"spot_loss_per_h": 0.0}))
    request = PlanRequest(effort=Effort(cached=False), deadline_s=60.0, capacity_only=True)
    made = make_plan(calm, request)
    assert {node.market for one in made.instances for node in one.nodes} == {"spot"}
    hours = 100.0
    losses = survive_spot.draw_losses(made, asked, 3600.0 * hours, 1)
    each_h = 1.0 / asked.limits.spot_loss_per_h + (asked.settings.startup_s or 0.0) / 3600.0
    assert 0.7 < len(losses) * each_h / hours < 1.4
    often = asked.replace(limits=asked.limits.model_copy(update={"spot_loss_per_h": 30.0}))
    kept = survive_spot.kept_in_losses(made, often, asked.catalog(), 1, requests=12_000)
    service = asked.services[0]
    assert kept[service.name][0] < service.target - 0.05


def test_plans_on_slow_links_are_written_down_without_a_solver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = survive_links.make_fleet(33)
    request = PlanRequest(effort=Effort(cached=False), deadline_s=60.0, capacity_only=True)
    made = make_plan(asked, request)
    best = survive_links.find_cheapest(made, asked, asked.catalog(), float("inf"))
    assert best is not None
    assert best.usd_per_hour == pytest.approx(made.usd_per_hour)
    assert survive_links.run_case(33).faults == {}

    dear = made.model_copy(
        update={"usd_per_hour": 2.0 * made.usd_per_hour, "bound": 2.0 * made.usd_per_hour}
    )
    monkeypatch.setattr(survive_links, "make_plan", lambda *_: dear)
    texts = survive_links.run_case(33).faults["link_false"]
    assert "the plan is not valid" in texts[0]
    assert any("planned, $" in text for text in texts)
    assert any(text.startswith("bound $") for text in texts)
    none = made.model_copy(update={"status": "infeasible", "instances": (), "paths": ()})
    monkeypatch.setattr(survive_links, "make_plan", lambda *_: none)
    assert any("infeasible, yet" in t for t in survive_links.run_case(33).faults["link_false"])


def test_who_is_served_worst_gets_what_an_integer_program_finds() -> None:
    # One machine: a way of its own leaves the other with nothing, a shared one serves a third of both.
    alone, both = ShortPiece(0, 0, 1, "both", 1.0), ShortPiece(2, 0, 1, "both", 1 / 3)
    choices = [ShortChoice((0, 2), (0.0, 0.0)), ShortChoice((1, 2), (0.0, 0.0))]
    assert most_served([alone, both], [1], choices, 3) == pytest.approx(1 / 3)
    assert most_served([alone], [1], choices, 3) == pytest.approx(0.0)
    # Half of the answers may be of the way that errs, and of the other there is little.
    mixed = [ShortPiece(0, 0, 1, "both", 1.0), ShortPiece(1, 1, 1, "both", 0.2)]
    strict = [ShortChoice((0, 1), (0.1, 0.0), 0.05)]
    assert most_served(mixed, [1, 1], strict, 2) == pytest.approx(0.4)

    seed = 13
    asked = survive_shortage.make_fleet(seed)
    best = survive_shortage.most_of(asked, asked.catalog())
    assert 0.0 < best < 1.0
    outcome = survive_shortage.run_case(seed)
    assert outcome.status == "partial"
    assert outcome.faults == {}
