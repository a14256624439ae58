"""Flow solvers from problem to plan: valid, and infeasible with a reason."""

from __future__ import annotations

from functools import cache

import pytest

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError, UnknownNameError, UsageError
from atoll.plan.cluster import ClusterLink
from atoll.plan.problem import Limits, Problem
from atoll.plan.validate.check import goal_value, validate
from atoll.solve.family import solvers
from atoll.solve.place.place_service import MILP, NAMES, RULES, SEARCH, FlowEffort, shortage
from atoll.solve.place.place_solver import solve
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve as solve_any
from tests.plan import builders
from tests.plan.clusters import LINKS, cluster, problem, profile, service

CATALOG = Catalog.default()
# Clusters are small: a fraction of the usual work finds what there is to be found.
QUICK = FlowEffort(objective="max-flow", work=0.01)


@cache
def largest() -> float:
    """The largest flow of the usual cluster, in tokens/s."""
    return solve(SEARCH, problem(), CATALOG, QUICK).objective or 0.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("partial", [False, True])
def test_plans_are_valid(name: str, partial: bool) -> None:
    asked = problem()
    made = solve(name, asked, CATALOG, FlowEffort(60.0, "max-flow", partial, work=0.02))
    assert made.status in ("optimal", "feasible", "partial")
    assert validate(made, asked, CATALOG) == []
    assert made.goal == "max-flow"
    assert made.solver == name
    assert (made.bound is None) == (name in RULES)


def test_search_and_milp_agree() -> None:
    assert solve(MILP, problem(), CATALOG, QUICK).objective == pytest.approx(largest())
    assert largest() == pytest.approx(1500.0)


def test_the_integer_program_is_for_the_largest_flow() -> None:
    assert solve(MILP, problem(), CATALOG, FlowEffort(0.5)).goal == "max-flow"
    for effort in (FlowEffort(objective="sustained"), FlowEffort(promise=True)):
        with pytest.raises(UsageError, match=r"flow\.milp does not know"):
            solve(MILP, problem(), CATALOG, effort)


@pytest.mark.parametrize("name", [SEARCH, "swarm"])
def test_sustained_is_no_more_than_the_largest_flow(name: str) -> None:
    asked = problem()
    lasting = solve(name, asked, CATALOG, FlowEffort(60.0, "sustained", work=0.02))
    assert validate(lasting, asked, CATALOG) == []
    assert lasting.goal == "sustained"
    assert lasting.objective is not None
    assert 0 < lasting.objective <= 1500.0 * (1 + 1e-9)


def test_within_the_promise() -> None:
    asked = problem(services=(service(ttft_s=2.0, tpot_s=0.045),))
    made = solve(SEARCH, asked, CATALOG, FlowEffort(60.0, "max-flow", promise=True, work=0.02))
    assert validate(made, asked, CATALOG) == []
    assert made.instances
    for own in made.instances:
        # The line between the sites takes 50 ms.
        site = {node.id: own.region_of(node) for node in own.nodes}
        between = [f for f in own.flows if f.src in site and f.dst in site]
        assert between
        assert all(site[flow.src] == site[flow.dst] for flow in between)


@pytest.mark.parametrize("name", [SEARCH, *RULES])
def test_what_keeps_a_promise_is_no_more_than_the_largest_flow(name: str) -> None:
    """Profiles give tokens/s, and a promise allows no more than these."""
    asked = problem()
    within = solve(name, asked, CATALOG, FlowEffort(promise=True, work=0.01))
    assert validate(within, asked, CATALOG) == []
    if name == SEARCH:
        assert within.instances
    assert (within.objective or 0.0) <= largest() * (1 + 1e-6)


def test_a_promise_nobody_can_keep_says_so() -> None:
    asked = problem(services=(service(tpot_s=1e-4),))
    made = solve(SEARCH, asked, CATALOG, FlowEffort(promise=True, work=0.01))
    assert made.status == "infeasible"
    (why,) = made.reasons
    assert why.startswith("no pipeline keeps ttft 10s and tpot 100us: the quickest found needs ")
    assert "--best-effort" in why
    times = float(why.split("needs ")[1].split(" times")[0])
    looser = problem(services=(service(ttft_s=10.0 * times, tpot_s=1e-4 * times),))
    assert solve(SEARCH, looser, CATALOG, FlowEffort(promise=True, work=0.01)).instances


def test_too_little_memory_says_how_much() -> None:
    tiny = {"chat": {"L40S:1": profile(6, 100.0), "L4:1": profile(3, 100.0)}}
    asked = problem(cluster=cluster(profiles=tiny))
    made = solve(SEARCH, asked, CATALOG, QUICK)
    assert made.status == "infeasible"
    (why,) = made.reasons
    assert "1 of 16 layer has no place, 0.122 GB at 0.122 GB a layer: the nodes hold 15" in why
    assert validate(made, asked, CATALOG) == []
    assert shortage(problem(), CATALOG, service()) is None


def test_no_links_no_plan() -> None:
    inside = ClusterLink(src="north", dst="north", bytes_per_s=1e9)
    made = solve(SEARCH, problem(cluster=cluster(links=(inside,))), CATALOG, QUICK)
    assert made.status == "infeasible"
    assert made.reasons == ("no link leads from source to any node that can hold the model",)


@pytest.mark.parametrize(
    ("links", "why"),
    [
        ((("source", "*"), ("*", "*")), None),
        (
            (("source", "a"), ("a", "b")),
            "no link leads to sink from any node that can hold the model",
        ),
        (
            (("source", "a"), ("b", "sink")),
            "no node holds all layers, and no link joins any two nodes",
        ),
        (
            (("source", "a"), ("b", "sink"), ("b", "a")),
            "no links lead from source over all layers to sink",
        ),
    ],
)
def test_the_link_that_is_missing_is_named(
    links: tuple[tuple[str, str], ...], why: str | None
) -> None:
    rules = tuple(ClusterLink(src=a, dst=b, bytes_per_s=1e9, one_way=True) for a, b in links)
    made = solve(SEARCH, problem(cluster=cluster(links=rules)), CATALOG, QUICK)
    assert made.reasons == (why,) if why else made.instances


@pytest.mark.parametrize(
    "limits", [{"budget_usd_per_hour": 1.0}, {"max_nodes": 2}, {"spread": 2}, {"spot_share": 0.1}]
)
def test_limits_on_renting_are_refused(limits: dict[str, float]) -> None:
    asked = problem(limits=Limits.model_validate(limits))
    with pytest.raises(UsageError, match="does not apply to a fixed cluster"):
        solve(SEARCH, asked, CATALOG, QUICK)


@pytest.mark.parametrize("lost", [{"machines": 2}, {"zones": 1, "keep": 0.5}, {"regions": 1}])
def test_losses_do_not_keep_a_cluster_from_being_placed(lost: dict[str, float]) -> None:
    made = solve(SEARCH, problem(limits=Limits.model_validate({"survive": lost})), CATALOG, QUICK)
    assert made.instances


def test_names() -> None:
    with pytest.raises(UnknownNameError, match=r"flow\.search"):
        solve("flow.searching", problem(), CATALOG)
    with pytest.raises(UsageError, match="no fixed cluster"):
        solve(SEARCH, builders.problem(), CATALOG)
    assert solvers(problem())[0] == SEARCH
    assert solvers(builders.problem())[0] == "optimal"
    with pytest.raises(UsageError, match="a fixed cluster"):
        solve_any(problem(), PlanRequest(solver="optimal"))
    with pytest.raises(UsageError, match="no fixed cluster"):
        solve_any(builders.problem(), PlanRequest(solver="swarm"))


# Several services


def shared(first: float = 1.0, second: float = 1.0, **changes: object) -> Problem:
    services = (service("chat", rate_per_s=first), service("code", rate_per_s=second))
    return problem(services=services, **changes)


def test_equal_services_share_fairly() -> None:
    asked = shared(cluster=cluster(links=LINKS[:1]))
    made = solve(SEARCH, asked, CATALOG, QUICK)
    assert validate(made, asked, CATALOG) == []
    assert made.goal == "fair"
    hosts = [node.host for own in made.instances for node in own.nodes]
    assert len(hosts) == len(set(hosts))
    carried = {own.service: own.throughput_per_s for own in made.instances}
    # Two L4 carry 500 tokens/s of 200 a request; the L40S and an L4 carry 800 or more.
    assert min(carried.values()) == pytest.approx(2.5)
    assert made.objective == pytest.approx(2 * 500.0)
    assert made.bound is not None
    assert made.bound >= 1000.0
    assert goal_value(made, asked) == pytest.approx(made.objective)


def test_the_larger_demand_gets_the_larger_part() -> None:
    asked = shared(1.0, 2.0, cluster=cluster(links=LINKS[:1]))
    made = solve(SEARCH, asked, CATALOG, QUICK)
    carried = {own.service: own.throughput_per_s for own in made.instances}
    assert carried["code"] > carried["chat"]


def test_a_shared_cluster_needs_demand() -> None:
    with pytest.raises(InputError, match="asks for nothing"):
        solve(SEARCH, shared(0.0, 1.0), CATALOG, QUICK)


def test_no_split_holds_both() -> None:
    half = {"llama-3.2-1b": {"L40S:1": profile(9, 100.0), "L4:1": profile(7, 100.0)}}
    made = solve(SEARCH, shared(cluster=cluster(profiles=half)), CATALOG, QUICK)
    assert made.status == "infeasible"
    assert "no split of 4 nodes holds all 2 models" in made.reasons[0]
