"""Plans that keep promises with spot nodes lost: what is spare for it, and what is said if nothing does."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from atoll.core.ids import Phase
from atoll.plan.plan import Instance, KeptPromise, Plan
from atoll.plan.problem import Lengths, Limits, Offer, Problem, Service, Settings
from atoll.plan.validate.check import validate
from atoll.prove.headroom import keep_quickly
from atoll.prove.kept import look_at
from atoll.prove.losses import SpotAbsence, spot_losses
from atoll.prove.planning import plan as make_plan
from atoll.prove.redundancy import Availability, Redundancy, TrialOutcome, ladders
from atoll.prove.simulation_deadline import SimulationCutShortError
from atoll.solve.plan_request import PlanRequest
from atoll.workload.lengths import LengthMix
from tests.prove.test_rent_promises import CATALOG, FRESH, kept
from tests.prove.test_rent_promises import solve as plan_for

CHAT = Service(
    name="chat",
    model="phi-4-14b",
    ttft_s=2.0,
    tpot_s=0.1,
    rate_per_s=0.5,
    lengths=Lengths.of(LengthMix.fixed(400.0, 20.0)),
)


def offer(market: str, usd: float, available: int = 8) -> Offer:
    return Offer.model_validate(
        {
            "region": "z0",
            "node_type": "L40S:1",
            "market": market,
            "available": available,
            "usd_per_hour": usd,
        }
    )


def fleet(*offers: Offer) -> Problem:
    return Problem(
        name="lost",
        services=(CHAT,),
        offers=offers,
        limits=Limits(spot_loss_per_h=2.0),
        settings=Settings(max_nodes_per_instance=1, engine="none", startup_s=300.0),
    )


TWO_SPOT = fleet(offer("spot", 0.7), offer("on-demand", 1.86))


def markets(plan: Plan) -> list[str]:
    return sorted(node.market for one in plan.instances for node in one.nodes)


@pytest.mark.slow
def test_a_second_spot_node_is_rented_for_the_one_that_is_lost() -> None:
    found = kept(TWO_SPOT)

    assert markets(found) == ["spot", "spot"]
    (promise,) = found.promises
    assert promise.is_surely_kept
    assert found.notes == ("the price of spot nodes that are lost: $0.70/h",)
    # What is proven is proven of plans that lose nothing.
    assert found.status == "feasible"
    assert found.bound == pytest.approx(0.7)
    assert validate(found, TWO_SPOT) == []
    (again,) = look_at(found, TWO_SPOT, CATALOG, first_seed=7001)
    assert again.is_kept


def test_nodes_that_stay_are_rented_where_that_is_cheaper_than_two_that_go() -> None:
    found = kept(fleet(offer("spot", 0.7), offer("on-demand", 1.2)))
    assert markets(found) == ["on-demand"]
    assert found.promises[0].is_surely_kept


@pytest.mark.slow
def test_one_spot_node_will_do_that_is_back_soon() -> None:
    settings = TWO_SPOT.settings.model_copy(update={"startup_s": 15.0})
    found = kept(TWO_SPOT.replace(settings=settings))
    assert markets(found) == ["spot"]
    assert found.promises[0].is_surely_kept
    assert found.notes == ()


ANNOUNCED = TWO_SPOT.replace(limits=TWO_SPOT.limits.model_copy(update={"spot_notice_s": 300.0}))
"""Five minutes before a node goes the next one is ordered, which takes as long to start."""


@pytest.mark.slow
def test_one_spot_node_will_do_that_is_announced_in_time() -> None:
    found = kept(ANNOUNCED)
    assert markets(found) == ["spot"]
    assert found.promises[0].is_surely_kept


def test_what_is_announced_is_replaced_before_it_goes() -> None:
    found = plan_for(TWO_SPOT, FRESH, 60.0)
    late, soon = (spot_losses(found, one, 36_000.0, 1) for one in (TWO_SPOT, ANNOUNCED))
    assert all(loss.drained_s is None for loss in late)
    assert min((loss.back_s or 0.0) - loss.time_s for loss in late if loss.time_s) > 250.0
    assert all(
        loss.drained_s == max(0.0, loss.time_s - 20.0) and loss.back_s == loss.time_s + 1.0
        for loss in soon
        if loss.time_s
    )


@pytest.mark.slow
def test_machines_are_lost_for_good_and_on_spot_at_random() -> None:
    """Two spot nodes keep promises with losses at random, and a third is there for one that goes for good."""
    both = TWO_SPOT.limits.model_copy(update={"survive": 1})
    asked = TWO_SPOT.replace(limits=both)
    found = kept(asked)
    assert markets(found) == ["spot", "spot", "spot"]
    (promise,) = found.promises
    assert promise.is_surely_kept
    assert promise.kept_after_loss is not None
    assert promise.kept_after_loss >= promise.target
    assert validate(found, asked) == []
    assert any("the price of surviving" in note for note in found.notes)
    assert any("spot nodes that are lost" in note for note in found.notes)


@pytest.mark.slow
def test_the_fast_solver_says_what_it_tried() -> None:
    request = PlanRequest(solver="fast", catalog=CATALOG, deadline_s=60.0, error_bars=False)
    asked = fleet(offer("spot", 0.7, 1), offer("on-demand", 1.2))
    found = make_plan(asked, request)
    assert validate(found, asked) == []
    # With headroom there would be one on spot beside it.
    assert markets(found) == ["on-demand"]
    assert found.promises[0].is_kept
    assert "without spot were tried, and nothing between" in found.notes[-1]


@pytest.mark.parametrize(("kept_on_spot", "taken"), [(0.96, "spot"), (0.94, "on-demand")])
def test_the_fast_solver_takes_the_cheaper_plan_that_keeps_promises(
    kept_on_spot: float, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def size(problem: Problem, request: PlanRequest) -> Plan:
        found = plan_for(problem, FRESH, request.deadline_s)
        share = kept_on_spot if markets(found) == ["spot"] else 1.0
        shares = dict.fromkeys(("kept", "low", "high", "kept_ttft", "kept_tpot"), share)
        promise = KeptPromise(service="chat", target=0.95, **shares)
        return found.model_copy(update={"promises": (promise,), "capacity_bound": found.bound})

    monkeypatch.setattr("atoll.prove.headroom._keep_with_headroom", size)
    asked = fleet(offer("spot", 0.7), offer("on-demand", 1.2))
    found = keep_quickly(asked, PlanRequest(deadline_s=60.0))
    assert markets(found) == [taken]
    assert "$0.70/h with headroom and $1.20/h without spot were tried" in found.notes[-1]
    # What is proven without spot is not proven of all plans.
    assert found.capacity_bound == pytest.approx(0.7)
    assert validate(found, asked) == []


def test_what_is_proven_with_headroom_is_not_said_of_all_plans() -> None:
    """Losses take a program, whose bound is for the demand that it was asked for: with headroom."""
    asked = TWO_SPOT.replace(limits=Limits(survive=1))
    request = PlanRequest(solver="fast", catalog=CATALOG, deadline_s=60.0, error_bars=False)
    found = make_plan(asked, request)
    assert found.bound is None
    assert found.status == "feasible"
    assert found.capacity_bound == pytest.approx(1.4, rel=1e-4)
    assert validate(found, asked) == []


def test_where_no_plan_keeps_promises_the_closest_says_so() -> None:
    alone = fleet(offer("spot", 0.7, available=1))

    found = kept(alone)

    (promise,) = found.promises
    assert promise.kept < promise.target
    assert "spot nodes are lost too often" in (promise.cause or "")
    assert found.status == "feasible"


def test_nothing_is_said_of_promises_where_no_time_was_left_for_losses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(*_: object) -> None:
        raise SimulationCutShortError("late")

    monkeypatch.setattr("atoll.prove.rent_promises._SpotProver._see", end)
    found = kept(TWO_SPOT)
    assert found.cut_short
    assert found.promises == ()
    assert found.status == "feasible"
    assert validate(found, TWO_SPOT) == []


BUSY = TWO_SPOT.replace(
    services=(CHAT.model_copy(update={"rate_per_s": 20.0, "ttft_s": 1e-6}),),
    limits=Limits(spot_loss_per_h=2.0),
)


def carrying(instance: Instance, *shares: tuple[Phase, float]) -> list[Instance]:
    """Copies of an instance that carry shares of the demand, each on a machine of its own."""
    units = {Phase.BOTH: 1.0, Phase.PREFILL: 400.0, Phase.DECODE: 20.0}
    return [
        instance.model_copy(
            update={
                "id": f"chat-{number}",
                "role": f"chat/llm/{phase}",
                # A tenth more is let pass.
                "throughput_per_s": share * 20.0 * units[phase] / 1.1,
            }
        )
        for number, (phase, share) in enumerate(shares)
    ]


def test_what_can_be_kept_is_as_likely_as_that_enough_nodes_are_there() -> None:
    spot = plan_for(TWO_SPOT, FRESH, 60.0).instances[0]
    away = SpotAbsence(BUSY).share(spot)
    assert away == pytest.approx(1.0 / 7.0)

    # Phases apart beside both together, each with what it carries of the demand.
    shares = [(Phase.BOTH, 0.5), (Phase.PREFILL, 0.6), (Phase.DECODE, 0.4), (Phase.DECODE, 0.2)]
    expected = 0.0
    for here in itertools.product((False, True), repeat=len(shares)):
        there = dict.fromkeys(Phase, 0.0)
        chance = 1.0
        for (phase, share), is_there in zip(shares, here, strict=True):
            there[phase] += share * is_there
            chance *= 1.0 - away if is_there else away
        left = there[Phase.BOTH] + min(there[Phase.PREFILL], there[Phase.DECODE])
        expected += chance * (left >= 1.0 - 1e-9)
    found = Availability(BUSY).kept_at_most("chat", carrying(spot, *shares))
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("unit", ["machines", "zones"])
def test_what_can_be_kept_is_what_the_worst_loss_leaves(unit: str) -> None:
    """Of two machines in two zones, of which either would do, one goes for good."""
    limits = Limits.model_validate({"spot_loss_per_h": 2.0, "survive": {unit: 1}})
    spot = plan_for(TWO_SPOT, FRESH, 60.0).instances[0]
    one, other = carrying(spot, (Phase.BOTH, 1.0), (Phase.BOTH, 1.0))
    both = (one, other.model_copy(update={"region": "z1"}))
    left = Availability(BUSY).kept_at_most("chat", [one])
    assert Availability(BUSY).kept_at_most("chat", both) > left
    found = Availability(BUSY.replace(limits=limits)).kept_at_most("chat", both)
    assert found == pytest.approx(left)


def test_ladders_ask_for_each_type_of_gpu_on_spot_alone() -> None:
    """Two cheap nodes were planned, and never the one that carries all: both were lost as often."""
    others = [
        Offer(region="z0", node_type=f"{gpu}:1", market=market, available=4, usd_per_hour=usd)
        for gpu, market, usd in (("A10G", "spot", 0.28), ("L4", "on-demand", 0.8))
    ]
    chat = frozenset({"chat"})
    *_, first, second = ladders(fleet(*TWO_SPOT.offers, *others), chat)
    problems = [spare.ask(TWO_SPOT, chat) for ladder in (first, second) for spare in ladder]
    kinds = ("A10G:1", "L4:1", "L40S:1")
    allowed = [[kind for kind in kinds if p.services[0].allows(kind)] for p in problems]
    assert allowed == [["A10G:1"], ["L40S:1"]]


def test_ladders_ask_for_spot_machines_alone_to_be_lost() -> None:
    (none,), lost, more, (half,) = ladders(TWO_SPOT, frozenset({"chat"}))
    assert none.limits.spot_share == 0.0
    assert half.limits.spot_share == 0.5
    assert [one.limits.survival.machines for one in lost] == [1, 2, 3]
    assert {one.limits.survival.spared for one in lost} == {("L40S:1 in z0",)}
    rooms = [one.ask(TWO_SPOT, frozenset({"chat"})).service("chat").headroom for one in more]
    assert rooms == sorted(rooms)
    assert rooms[0] > CHAT.headroom


def test_nodes_may_be_away_when_a_simulation_begins() -> None:
    plan = plan_for(TWO_SPOT, FRESH, 60.0)
    seconds, away_s = 300.0, 0.0
    for seed in range(400):
        for loss in spot_losses(plan, TWO_SPOT, seconds, seed):
            assert loss.back_s is not None
            assert loss.back_s <= loss.time_s + 300.0
            away_s += min(loss.back_s, seconds) - loss.time_s
    assert away_s / (400 * seconds) == pytest.approx(1.0 / 7.0, rel=0.2)


def test_a_service_that_falls_short_beside_others_chooses_anew_too() -> None:
    """One kept its promise by a hair at first, and the search ended when it did not once more."""
    two = TWO_SPOT.replace(services=(CHAT, CHAT.model_copy(update={"name": "more"})))
    request = PlanRequest(capacity_only=True)

    def judge(plan: Plan) -> TrialOutcome:
        number = Counter(one.service for one in plan.instances)
        short = frozenset(name for name in ("chat", "more") if number[name] < 2)
        return TrialOutcome(short, {name: 0.9 if name in short else 1.0 for name in number})

    first = make_plan(two, request)
    assert len(first.instances) == 2
    search = Redundancy(
        two,
        CATALOG,
        first,
        TrialOutcome(frozenset({"chat"}), {"chat": 0.9, "more": 1.0}),
        lambda spare, services: make_plan(spare.ask(two, services), request),
        judge,
    )
    found = search.find()
    assert found is not None
    assert Counter(one.service for one in found.instances) == {"chat": 2, "more": 2}
    assert found.usd_per_hour == pytest.approx(4 * 0.7)
