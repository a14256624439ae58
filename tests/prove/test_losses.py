"""Nodes that are lost: which, how often, and what is held ready for it."""

from __future__ import annotations

import pytest

from atoll.plan.plan import Plan
from atoll.plan.problem import Limits, Offer
from atoll.prove.kept import kept_after_loss
from atoll.prove.losses import BACK_S, loss_failures, spot_losses
from tests.prove.test_rent_promises import CATALOG, FRESH, PROBLEM, kept
from tests.prove.test_rent_promises import solve as plan_for


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for(PROBLEM, FRESH, 60.0)


def test_of_instances_that_are_alike_one_is_lost(plan: Plan) -> None:
    ((loss, (failure,)),) = loss_failures(plan, PROBLEM.replace(limits=Limits(survive=1)), 5.0)
    assert failure.time_s == 5.0
    assert failure.back_s is None
    assert failure.instance == plan.instances[0].id
    assert loss.instances == {plan.instances[0].id}
    assert not list(loss_failures(plan, PROBLEM, 5.0))


def test_spot_nodes_are_lost_as_often_as_said() -> None:
    spot = Offer(region="here", node_type="L40S:1", market="spot", available=40, usd_per_hour=0.5)
    often = PROBLEM.replace(offers=(spot,), limits=Limits(spot_loss_per_h=2.0))
    plan = plan_for(often, FRESH, 60.0)
    hours = 200.0

    losses = spot_losses(plan, often, hours * 3600.0, 0)

    nodes = sum(len(instance.nodes) for instance in plan.instances)
    # A node is there but for the time until it is replaced.
    expected = nodes * hours / (1.0 / 2.0 + BACK_S / 3600.0)
    assert len(losses) == pytest.approx(expected, rel=0.1)
    assert list(losses) == sorted(losses, key=lambda loss: loss.time_s)
    assert losses == spot_losses(plan, often, hours * 3600.0, 0)
    assert not spot_losses(plan, PROBLEM, 3600.0, 0)


def test_promises_hold_with_a_node_lost_and_that_has_its_price() -> None:
    plain = kept(PROBLEM)
    safe = kept(PROBLEM.replace(limits=Limits(survive=1)))

    (found,) = safe.promises
    assert found.kept_after_loss is not None
    assert min(found.kept, found.kept_after_loss) >= found.target
    assert len(safe.instances) > len(plain.instances)
    more = safe.usd_per_hour - plain.usd_per_hour
    assert safe.notes == (f"the price of surviving the loss of any machine: ${more:.2f}/h",)
    assert plain.promises[0].kept_after_loss is None


def test_a_plan_without_a_spare_breaks_its_promises_with_a_node_lost() -> None:
    plain = kept(PROBLEM)
    asked = PROBLEM.replace(limits=Limits(survive=1))
    assert kept_after_loss(plain, asked, CATALOG)["chat"].both < 0.5
    assert not kept_after_loss(plain, PROBLEM, CATALOG)
