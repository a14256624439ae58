"""Answers never contradict each other, however bad the solver is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.problem import Limits, Offer, Problem
from atoll.solve.explain.changes import (
    cuts,
    faster_links,
    free_phases,
    loosen_promise,
    soft,
    unpinned,
    with_limits,
    with_more,
    with_spot,
)
from atoll.solve.explain.merit import Merit, merit, relaxes
from atoll.solve.explain.plan_explanation import ExtraNodes
from atoll.solve.explain.planning_again import OutOfTimeError, gains, worth
from tests.plan import clusters
from tests.seeds import examples
from tests.solve.explain import toy

seeds = st.integers(0, 10_000)


@st.composite
def problems(draw: st.DrawFn, *, scarce: bool | None = None) -> Problem:
    """Two services on a few nodes, with and without limits."""
    few = draw(st.booleans()) if scarce is None else scarce
    most = 1 if few else 3
    services = tuple(
        toy.service(
            name,
            draw(st.sampled_from((0.5, 1.0, 2.0, 3.0))),
            phases=draw(st.sampled_from(("auto", "apart", "together"))),
            avoid=draw(st.sampled_from(((), ("L4",)))),
        )
        for name in ("big", "small")[: draw(st.integers(1, 2))]
    )
    offers = (
        toy.offer("L4:1", draw(st.integers(0, most)), 0.8),
        toy.offer("L40S:1", draw(st.integers(0, most)), draw(st.sampled_from((1.5, 1.9)))),
        toy.offer("A100-40:4", draw(st.integers(0, 1)), 4.0, whole=draw(st.booleans())),
    )
    limits = Limits(
        budget_usd_per_hour=draw(st.sampled_from((None, 1.0, 3.0, 6.0))),
        max_nodes=draw(st.sampled_from((None, 1, 2, 4))),
    )
    return toy.problem(services, offers, limits)


def _more(problem: Problem, kind: str, count: int) -> Problem:
    (own,) = (o for o in problem.offers if o.node_type == kind)
    extra = ExtraNodes(region=own.region, node_type=kind, market=own.market, count=count)
    return with_more(problem, (extra,))


Step = Callable[[Problem], Problem]
STEPS: dict[str, Step] = {
    "one more L4": lambda p: _more(p, "L4:1", 1),
    "two more L40S": lambda p: _more(p, "L40S:1", 2),
    "cut": lambda p: next((c.problem for c in cuts(p)), p),
    "phases": lambda p: next((c.problem for c in free_phases(p)), p),
    "anywhere": lambda p: next((c.problem for c in unpinned(p)), p),
    "ttft": lambda p: loosen_promise(p, p.services[0], "ttft", 1.5).problem,
    "tpot": lambda p: loosen_promise(p, p.services[-1], "tpot", 2.0).problem,
    "budget": lambda p: with_limits(p, budget_usd_per_hour=None),
    "nodes": lambda p: with_limits(p, max_nodes=None),
}
steps = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5)


def chain(problem: Problem, names: list[str]) -> list[Problem]:
    """The problem, and it with one change after the other."""
    found = [problem]
    for name in names:
        found.append(STEPS[name](found[-1]))
    return found


@examples(30)
@given(problems(), steps, seeds, st.randoms(use_true_random=False))
def test_allowing_more_never_serves_less_or_costs_more(
    problem: Problem, names: list[str], seed: int, random: object
) -> None:
    looser = chain(problem, names)
    planner = toy.planner(problem, toy.erratic(seed))
    given_plan = toy.any_plan(problem, seed + 1)
    planner.learn(problem, given_plan)
    order = list(range(len(looser)))
    random.shuffle(order)  # type: ignore[attr-defined]
    for index in order:
        planner.ask(looser[index], "")
    plans = [planner.best(each) for each in looser]
    merits = [merit(plan, problem) for plan in plans if plan is not None]
    assert len(merits) == len(looser)
    assert merits == sorted(merits)
    assert merits[0] >= merit(given_plan, problem)


@examples(30)
@given(problems(), steps)
def test_a_chain_of_changes_is_one_of_relaxations(problem: Problem, names: list[str]) -> None:
    looser = chain(problem, names)
    for index, each in enumerate(looser):
        assert all(relaxes(each, tighter) for tighter in looser[: index + 1])
        assert each == problem or not relaxes(problem, each)


@examples(15)
@given(problems(), steps)
def test_a_plan_holds_wherever_more_is_allowed(problem: Problem, names: list[str]) -> None:
    plan = toy.best_plan(problem)
    best = [merit(toy.best_plan(each), problem) for each in chain(problem, names)]
    assert all(toy.holds(plan, each) for each in chain(problem, names))
    assert best == sorted(best)


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.model_copy(update={"usd_per_hour": o.usd_per_hour - 0.1}),
        lambda o: o.model_copy(update={"usd_per_hour": o.usd_per_hour + 0.1}),
        lambda o: o.model_copy(update={"available": o.available - 1}),
        lambda o: o.model_copy(update={"whole": True}),
        lambda o: o.model_copy(update={"region": "west"}),
    ],
)
def test_other_prices_and_fewer_nodes_are_no_relaxation(change: Callable[[Offer], Offer]) -> None:
    problem = toy.problem((toy.service("big", 1.0),), (toy.offer("A100-40:4", 2, 4.0),))
    assert relaxes(problem, problem)
    assert not relaxes(problem.replace(offers=tuple(map(change, problem.offers))), problem)


@pytest.mark.parametrize(
    "fields",
    [
        {"rate_per_s": 0.5},
        {"ttft_s": 0.5},
        {"tpot_s": 0.05},
        {"phases": "apart"},
        {"only": ("L4",)},
        {"avoid": ("L4", "T4")},
    ],
)
def test_other_demand_and_tighter_promises_are_no_relaxation(fields: dict[str, object]) -> None:
    own = toy.service("big", 1.0, avoid=("T4",))
    problem = toy.problem((own,), (toy.offer("L4:1", 2, 1.0),))
    other = problem.replace(services=(own.model_copy(update=fields),))
    assert not relaxes(other, problem)


def test_a_cluster_relaxes_with_more_machines_and_faster_links() -> None:
    problem = clusters.problem()
    assert problem.cluster is not None
    slow = problem.cluster.link("a", "c")
    assert slow is not None
    extra = ExtraNodes(region="north", node_type="L4:1", market="owned", count=2)
    larger = with_more(problem, (extra,))
    assert larger.cluster is not None
    assert len(larger.cluster.nodes) == len(problem.cluster.nodes) + 2
    faster = faster_links(problem, [1])
    assert faster.cluster is not None
    assert faster.cluster.links[1].bytes_per_s == 10 * problem.cluster.links[1].bytes_per_s
    assert faster.cluster.links[0] == problem.cluster.links[0]
    fast = faster.cluster.link("a", "c")
    assert fast is not None
    assert fast.latency_s == slow.latency_s / 10
    assert larger.cluster.node("extra-north-L4x1-1").region == "north"
    for looser in (larger, faster, with_more(faster, (extra,))):
        assert relaxes(looser, problem)
        assert not relaxes(problem, looser)
    assert not relaxes(faster, larger)


def test_serving_counts_before_cost() -> None:
    assert Merit(1.0, 1.0, -9.0) > Merit(0.9, 1.0, -1.0)
    assert Merit(1.0, 1.0, -1.0) > Merit(1.0, 1.0, -2.0)
    problem = toy.problem((toy.service("big", 2.0),), (toy.offer("L4:1", 2, 1.0),))
    full, part, none = (toy.build(problem, ((n,),)) for n in (2, 1, 0))
    assert merit(full, problem).meets_demand
    assert merit(full, problem) > merit(part, problem) > merit(none, problem)
    nearly = part.model_copy(update={"served_fraction": {"big": 1.0 - 1e-12}})
    assert not merit(nearly, problem).meets_demand
    assert merit(part.model_copy(update={"status": "infeasible"}), problem) < merit(none, problem)
    assert gains(part, full, problem)
    assert not gains(full, part, problem)
    assert not gains(full, full, problem)


def test_gains_are_told_from_what_planning_again_gains() -> None:
    problem = toy.problem((toy.service("big", 1.0),), (toy.offer("L4:1", 3, 1.0),))
    dear, cheap = (toy.build(problem, ((n,),)) for n in (3, 1))
    found = worth(dear, cheap, problem, dear, 0.5)
    assert (found.usd_per_hour, found.at_most, found.again) == (2.0, 2.5, False)
    assert found.text == "save $2.00/h, $2.50/h at most"
    found = worth(dear, cheap, problem, cheap, None)
    assert found.again
    assert found.nothing


def test_a_question_is_asked_once_and_within_its_limits() -> None:
    problem = toy.problem((toy.service("big", 1.0),), (toy.offer("L4:1", 3, 1.0),))
    asked: list[str] = []
    planner = toy.planner(problem, max_plans=1)
    planner.progress = lambda _, question: asked.append(question)
    assert planner.ask(problem, "first") == planner.ask(problem, "again")
    assert (planner.plans, asked) == (1, ["first"])
    with pytest.raises(OutOfTimeError):
        planner.ask(with_limits(problem, max_nodes=9), "another")


def test_spot_is_offered_at_catalog_prices() -> None:
    own = toy.offer("L4:1", 3, 0.8, region="aws/us-east-2")
    problem = toy.problem((toy.service("big", 1.0),), (own,))
    (change,) = with_spot(problem, toy.catalog())
    (spot,) = (o for o in change.problem.offers if o.market == "spot")
    price = toy.catalog().prices.cheapest("aws/us-east-2", "L4:1", spot=True)
    assert price is not None
    assert spot.usd_per_hour == price.cost(spot=True)
    assert spot.available == 3
    assert relaxes(change.problem, problem)
    assert with_spot(change.problem, toy.catalog()) == []


def test_a_problem_that_must_not_fall_short_is_asked_what_it_can() -> None:
    problem = toy.problem((toy.service("big", 1.0),), (toy.offer("L4:1", 3, 1.0),))
    strict = problem.replace(settings=problem.settings.model_copy(update={"on_shortage": "fail"}))
    assert soft(strict) == problem
    assert soft(problem) is problem
