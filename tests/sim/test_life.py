"""Failures, new plans, start-up and drain."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.core.errors import InputError, UnknownNameError
from atoll.plan.plan import LossRoutes, Route
from atoll.sim.api import simulate
from atoll.sim.sim_options import Epoch, Failure, SimOptions
from atoll.sim.sim_result import SimReport
from tests.sim.builders import CATALOG, laid_out, poisson, problem, requests, service, whole


def test_requests_of_a_dead_node_start_over_elsewhere_and_all_finish() -> None:
    own = problem()
    plan = whole(own, copies=2)
    work = poisson(400, 10.0)
    calm = simulate(plan, own, CATALOG, work)
    hit = simulate(
        plan,
        own,
        CATALOG,
        work,
        SimOptions(failures=(Failure(10.0, instance=plan.instances[0].id),)),
    )
    assert calm.retries == 0
    assert hit.retries > 0
    assert hit.finished == 400
    # The dead one does nothing more.
    assert hit.nodes[0].utilisation < 0.5 * calm.nodes[0].utilisation
    late = hit.requests.arrival_s > 12.0
    assert hit.requests.e2e_s[late].mean() > calm.requests.e2e_s[late].mean()


def test_routes_that_are_ready_for_a_loss_hold_after_it() -> None:
    """Of three copies one dies: by the routes for that, one of the others takes everything."""
    own = problem()
    plan = whole(own, copies=3)
    dead, heir, idle = (one.id for one in plan.instances)
    all_to = (Route(service=plan.routes[0].service, instances=(heir,), share=1.0),)
    ready = LossRoutes(
        lost="a machine", instances=(dead,), services=(all_to[0].service,), routes=all_to
    )
    other = ready.model_copy(update={"instances": (idle,)})
    work = poisson(400, 10.0)
    options = SimOptions(failures=(Failure(0.5, instance=dead),))

    def steps(after_loss: tuple[LossRoutes, ...]) -> list[int]:
        given = plan.model_copy(update={"after_loss": after_loss})
        found = simulate(given, own, CATALOG, work, options)
        assert found.finished == 400
        return [node.steps for node in found.nodes]

    _, taken, little = steps((other, ready))
    assert taken > 5 * little
    # What is ready for another loss does not count, and then both share.
    _, one, two = steps((other,))
    assert max(one, two) < 2 * min(one, two)


def test_what_is_kept_is_told_before_a_loss_right_after_it_and_later() -> None:
    """One of two copies is lost: requests that were there, and those that wait behind them, are late."""
    own = problem()
    plan = whole(own, copies=2)
    dead = plan.instances[0].id
    work = poisson(6_000, 40.0)
    found = simulate(plan, own, CATALOG, work, SimOptions(failures=(Failure(60.0, instance=dead),)))
    (one,) = found.losses
    assert (one.service, one.time_s, one.instances, one.ready) == ("m", 60.0, (dead,), False)
    assert one.before is not None
    assert one.soon is not None
    assert one.later is not None
    assert one.before > 0.95
    assert one.soon < one.before - 0.2
    ready = LossRoutes(
        lost="a machine",
        instances=(dead,),
        services=("m",),
        routes=(Route(service="m", instances=(plan.instances[1].id,), share=1.0),),
    )
    options = SimOptions(failures=(Failure(60.0, instance=dead),))
    prepared = plan.model_copy(update={"after_loss": (ready,)})
    assert simulate(prepared, own, CATALOG, work, options).losses[0].ready
    assert not simulate(plan, own, CATALOG, work).losses
    many = tuple(Failure(float(t), instance=dead, back_s=t + 0.5) for t in range(1, 30))
    assert not simulate(plan, own, CATALOG, work, SimOptions(failures=many)).losses


def test_a_node_whose_end_is_announced_finishes_what_it_has() -> None:
    own = problem()
    plan = whole(own, copies=2)
    first = plan.instances[0].id
    work = poisson(400, 10.0)

    def run(drained_s: float | None) -> SimReport:
        lost = Failure(10.0, instance=first, back_s=15.0, drained_s=drained_s)
        return simulate(plan, own, CATALOG, work, SimOptions(failures=(lost,)))

    sudden, told = run(None), run(2.0)
    assert sudden.retries > 0
    assert told.retries == 0
    assert told.finished == 400
    # It is back, and has its share again.
    assert told.nodes[0].steps > 0.3 * told.nodes[1].steps
    # Where nobody else serves it gets what comes, to the end.
    alone = whole(own)
    lost = Failure(10.0, instance=alone.instances[0].id, back_s=15.0, drained_s=2.0)
    found = simulate(alone, own, CATALOG, work, SimOptions(failures=(lost,)))
    between = (found.requests.arrival_s > 2.0) & (found.requests.arrival_s < 8.0)
    assert found.requests.ttft_s[between].max() < 1.0


def test_without_any_node_left_requests_wait_until_one_is_back() -> None:
    own = problem()
    plan = whole(own)
    failure = Failure(1.0, instance=plan.instances[0].id, back_s=100.0)
    found = simulate(
        plan, own, CATALOG, requests([0.9, 5.0], 100, 200), SimOptions(failures=(failure,))
    )
    assert found.finished == 2
    assert found.retries == 1
    assert np.all(found.requests.e2e_s > 90.0)
    # The first had its first token before the node died.
    assert found.requests.ttft_s[0] < 1.0
    assert found.requests.largest_gap_s[0] > 90.0


def test_a_stage_that_dies_is_routed_around() -> None:
    own = problem(service(model="qwen3-32b"), nodes=("L40S:2",))
    plan = laid_out(own, (0, 32, ("L40S:2",)), (32, 64, ("L40S:2", "L40S:2")))
    victim = plan.instances[0].nodes[2].id
    found = simulate(
        plan,
        own,
        CATALOG,
        poisson(200, 4.0),
        SimOptions(failures=(Failure(8.0, instance=plan.instances[0].id, node=victim),)),
    )
    assert found.finished == 200
    assert found.retries > 0
    alive, dead = found.nodes[1], found.nodes[2]
    assert alive.steps > 2 * dead.steps


def test_an_unknown_machine_cannot_fail() -> None:
    own = problem()
    with pytest.raises(UnknownNameError, match="machine of the plan"):
        simulate(
            whole(own),
            own,
            CATALOG,
            requests([0.0], 10, 10),
            SimOptions(failures=(Failure(1.0, host="nowhere"),)),
        )
    with pytest.raises(InputError, match="after it failed"):
        Failure(5.0, host="x", back_s=1.0)


def test_a_larger_plan_takes_over_once_its_instances_are_ready() -> None:
    own = problem()
    small, large = whole(own), whole(own, copies=3)
    work = poisson(600, 10.0)
    found = simulate(
        small,
        own,
        CATALOG,
        work,
        SimOptions(epochs=(Epoch(10.0, large),), startup_s=15.0),
    )
    assert found.finished == 600
    kept, *new = found.instances
    assert kept.ready_s == 0.0
    assert [one.ready_s for one in new] == [25.0, 25.0]
    # Paid from the day they were rented.
    hours = found.clock_s / 3600.0
    assert kept.usd == pytest.approx(2.0 * hours)
    assert new[0].usd == pytest.approx(2.0 * (found.clock_s - 10.0) / 3600.0)
    assert all(one.tokens > 0 for one in new)


def test_a_smaller_plan_drains_what_goes_and_loses_nothing() -> None:
    own = problem()
    small, large = whole(own), whole(own, copies=3)
    found = simulate(
        large, own, CATALOG, poisson(300, 10.0), SimOptions(epochs=(Epoch(10.0, small),))
    )
    assert found.finished == 300
    assert found.retries == 0
    gone = [one for one in found.instances if one.gone_s is not None]
    assert len(gone) == 2
    for one in gone:
        assert one.gone_s is not None
        # It works off what it has, then it is given back and costs nothing more.
        assert 10.0 < one.gone_s < 30.0
        assert one.usd == pytest.approx(2.0 * one.gone_s / 3600.0)


def test_nodes_that_get_other_layers_drain_and_load_before_they_serve_again() -> None:
    own = problem(service(model="qwen3-32b"), nodes=("L40S:2",))
    before = laid_out(own, (0, 32, ("L40S:2",)), (32, 64, ("L40S:2",)))
    after = laid_out(own, (0, 30, ("L40S:2",)), (30, 64, ("L40S:2",)))
    found = simulate(
        before,
        own,
        CATALOG,
        poisson(60, 2.0),
        SimOptions(epochs=(Epoch(10.0, after),), startup_s=5.0),
    )
    assert found.finished == 60
    old, new = found.instances
    assert old.gone_s is not None
    assert new.ready_s == pytest.approx(old.gone_s + 5.0)
    assert new.tokens > 0
