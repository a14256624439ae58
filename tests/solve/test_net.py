"""What a deadline may cost: never the best plan so far, and never more than the simplest rule serves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.catalog import Catalog
from atoll.core.errors import AtollError, InfeasibleError, InternalError, UsageError
from atoll.plan.plan import Plan
from atoll.plan.problem import Lengths, Limits, Offer, Problem, Service
from atoll.plan.validate.violation import InvalidPlanError, violation
from atoll.solve import comparison, registry
from atoll.solve import family as families
from atoll.solve.comparison import Compared, compare_solvers
from atoll.solve.effort import Effort, parse_work
from atoll.solve.family import SolverFamily
from atoll.solve.plan_request import PlanRequest
from atoll.solve.solve_progress import Progress, SolveStats
from atoll.workload.lengths import LengthMix
from tests.seeds import examples

PROBLEM = Problem(
    name="small",
    services=tuple(
        Service(
            name=name,
            model="llama-3.1-8b",
            ttft_s=1.0,
            tpot_s=0.06,
            rate_per_s=1.0,
            lengths=Lengths.of(LengthMix.fixed(600.0, 120.0)),
        )
        for name in ("chat", "mail")
    ),
    offers=(Offer(region="here", node_type="L4:1", available=4, usd_per_hour=1.0),),
)
Answer = Plan | AtollError


def made(solver: str, served: float, *, cut_short: bool = False, valid: bool = True) -> Plan:
    """Return a plan in figures only; the validator of these tests reads its notes."""
    return Plan(
        problem_hash=PROBLEM.content_hash(),
        problem_name="small",
        served_fraction={"chat": served, "mail": served},
        usd_per_hour=1.0,
        status="infeasible" if served <= 0 else "partial" if served < 1 else "feasible",
        solver=solver,
        cut_short=cut_short,
        notes=() if valid else ("broken",),
    )


class World:
    """A family of solvers with answers by name, and a clock that stands still unless told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, float]] = []
        self.markets: dict[str, set[str]] = {}
        self.now_s = 0.0
        self.takes_s: dict[str, float] = {}
        family = SolverFamily(
            names=("best", "one", "two", "three"),
            baselines=("one", "two", "three"),
            solve=self._solve,
            count_templates=lambda *_: {},
            failure="{name} has none",
            hint="try",
        )
        for module in (families, registry, comparison):
            monkeypatch.setattr(module, "family_of", lambda _problem: family)
        monkeypatch.setattr(registry, "check_solver", lambda *_: None)
        monkeypatch.setattr("atoll.plan.validate.check.check", _check)
        clock = SimpleNamespace(perf_counter=lambda: self.now_s)
        monkeypatch.setattr("atoll.solve.deadline.time", clock)

    def _solve(self, problem: Problem, request: PlanRequest) -> Plan:
        name = request.solver
        assert name is not None
        self.asked.append((name, request.deadline_s))
        self.markets[name] = {offer.market for offer in problem.offers}
        self.now_s += self.takes_s.get(name, 0.0)
        request.say("searching", name, None, {"rounds": 2})
        answer = self.answers[name]
        if isinstance(answer, AtollError):
            raise answer
        return answer

    def solve(self, deadline_s: float = 10.0, solver: str | None = None) -> Plan:
        return registry.solve(PROBLEM, PlanRequest(solver=solver, deadline_s=deadline_s))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.asked]


def _check(plan: Plan, _problem: Problem, _catalog: Catalog) -> None:
    if plan.notes:
        raise InvalidPlanError("small", [violation("budget", "all", "broken")])


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_search_that_ends_by_itself_is_left_alone(world: World) -> None:
    world.answers["best"] = made("best", 0.4)
    plan = world.solve()

    assert plan is world.answers["best"]
    assert world.names == ["best"]


def test_a_cut_search_that_serves_all_is_kept_and_says_so(world: World) -> None:
    world.answers["best"] = made("best", 1.0, cut_short=True)
    plan = world.solve()

    assert plan.solver == "best"
    assert plan.cut_short
    assert plan.reasons == (registry.CUT_SHORT,)
    assert world.names == ["best"]


def test_a_baseline_that_serves_more_takes_its_place(world: World) -> None:
    world.answers |= {"best": made("best", 0.035, cut_short=True), "one": made("one", 1.0)}
    plan = world.solve()

    assert plan.solver == "one"
    assert plan.cut_short
    assert registry.CUT_SHORT in plan.reasons


def test_nothing_else_is_tried_where_services_are_very_many(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_MANY", 1)
    world.answers |= {"best": made("best", 0.1, cut_short=True), "one": made("one", 1.0)}
    assert world.solve().solver == "best"
    assert world.names == ["best"]

    world.answers["best"] = made("best", 0.0, cut_short=True)
    assert world.solve().solver == "one"


def test_all_baselines_are_tried_while_there_is_time(world: World) -> None:
    world.answers |= {
        "best": made("best", 0.5, cut_short=True),
        "one": made("one", 0.3),
        "two": InternalError("fell over"),
        "three": made("three", 0.6),
    }
    assert world.solve().solver == "three"


def test_no_time_left_is_enough_for_one_baseline_only(world: World) -> None:
    world.takes_s = {"best": 10.0, "one": 30.0}
    world.answers |= {
        "best": made("best", 0.5, cut_short=True),
        "one": made("one", 0.6),
        "two": made("two", 1.0),
    }
    assert world.solve().solver == "one"
    assert world.names == ["best", "one"]


def test_nobody_leaves_empty_handed_while_a_plan_exists(world: World) -> None:
    world.takes_s = {"best": 100.0, "one": 100.0, "two": 100.0}
    world.answers |= {
        "best": made("best", 0.0, cut_short=True),
        "one": made("one", 0.0),
        "two": InvalidPlanError("small", [violation("budget", "all", "broken")]),
        "three": made("three", 0.2),
    }
    assert world.solve().solver == "three"


def test_baselines_keep_a_limit_on_spot_that_they_do_not_know(world: World) -> None:
    spot = Offer(region="here", node_type="L4:1", market="spot", available=4, usd_per_hour=0.4)
    limited = PROBLEM.replace(offers=(*PROBLEM.offers, spot), limits=Limits(spot_share=0.5))
    world.answers |= {"best": made("best", 0.1, cut_short=True), "one": made("one", 1.0)}
    plan = registry.solve(limited)

    assert plan.solver == "one"
    assert plan.problem_hash == limited.content_hash()
    assert world.markets == {"best": {"on-demand", "spot"}, "one": {"on-demand"}}


@pytest.mark.parametrize(
    "fault",
    [InternalError("torn"), InfeasibleError("none"), made("best", 1.0, valid=False)],
)
def test_a_search_that_falls_over_late_leaves_the_best_baseline(
    world: World, fault: Answer
) -> None:
    world.takes_s = {"best": 11.0}
    world.answers |= {"best": fault, "one": made("one", 0.7), "two": made("two", 0.9)}
    world.answers["three"] = made("three", 0.8)
    plan = world.solve(deadline_s=10.0)

    assert plan.solver == "two"
    assert plan.cut_short


@pytest.mark.parametrize("fault", [InternalError("torn"), made("best", 1.0, valid=False)])
def test_faults_in_time_are_told(world: World, fault: Answer) -> None:
    world.answers |= {"best": fault, "one": made("one", 1.0)}
    with pytest.raises(AtollError):
        world.solve()
    assert world.names == ["best"]


def test_a_misuse_is_told_however_late(world: World) -> None:
    world.takes_s = {"best": 11.0}
    world.answers["best"] = UsageError("not so")
    with pytest.raises(UsageError):
        world.solve()


@settings(examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    best=st.floats(0.0, 1.0),
    rules=st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3),
    cut=st.booleans(),
)
def test_never_less_than_the_search_and_with_time_left_than_any_rule(
    world: World, best: float, rules: list[float], cut: bool
) -> None:
    world.asked.clear()
    world.answers = {"best": made("best", best, cut_short=cut)}
    for name, served in zip(("one", "two", "three"), rules, strict=True):
        world.answers[name] = made(name, served)
    plan = world.solve()

    served = plan.served_fraction["chat"]
    assert plan.cut_short == cut
    assert served == (max([best, *rules]) if cut else best)


def test_stats_add_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.answers["best"], world.takes_s = made("best", 1.0), {"best": 3.0}
    # Clocks of the machine may stand still for so little work.
    clock = SimpleNamespace(perf_counter=lambda: world.now_s, process_time=lambda: world.now_s / 2)
    monkeypatch.setattr(registry, "time", clock)
    stats, told = SolveStats(), list[Progress]()
    for _ in range(2):
        registry.solve(PROBLEM, PlanRequest(stats=stats, on_progress=told.append))

    assert stats.work == {"rounds": 4}
    assert (stats.seconds, stats.cpu_seconds) == (6.0, 3.0)
    assert stats.text.endswith(", rounds 4")
    assert [progress.text for progress in told] == ["best", "best"]


def test_stats_are_told_of_what_fails(world: World) -> None:
    world.answers["best"] = InternalError("torn")
    stats = SolveStats()
    with pytest.raises(InternalError):
        registry.solve(PROBLEM, PlanRequest(stats=stats))
    assert stats.work == {"rounds": 2}


def test_comparing_ends_with_its_deadline(world: World) -> None:
    world.takes_s = {"one": 4.0, "two": 7.0}
    world.answers |= {name: made(name, 1.0) for name in ("one", "two", "three")}
    rows: list[Compared] = list(
        compare_solvers(made("best", 1.0), PROBLEM, PlanRequest(deadline_s=9.0))
    )

    assert [row.solver for row in rows] == ["one", "two"]
    assert world.names == ["one", "two"]
    assert [seconds for _, seconds in world.asked] == pytest.approx([3.0, 2.5])


@pytest.mark.parametrize(
    ("text", "work"), [("low", 0.1), ("normal", 1.0), ("high", 10.0), ("2.5", 2.5)]
)
def test_effort_in_words_and_numbers(text: str, work: float) -> None:
    assert parse_work(text) == work
    assert Effort(work=work).work == work


@pytest.mark.parametrize("text", ["much", "", "0", "-1", "nan", "1e9"])
def test_effort_is_some_work(text: str) -> None:
    with pytest.raises(UsageError, match="effort"):
        parse_work(text)


@pytest.mark.parametrize("work", [0.0, -1.0, float("nan"), 1e9])
def test_an_effort_of_nothing_is_refused(work: float) -> None:
    with pytest.raises(UsageError, match="effort"):
        Effort(work=work)
