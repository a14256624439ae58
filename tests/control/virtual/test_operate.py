"""Operating in virtual time: the books balance, the same seed gives the same, contenders do as they say."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from atoll.control.decision.control_view import ControlPolicy, TrafficSeen, TrafficWindow
from atoll.control.operation.control_loop import TrafficReport
from atoll.control.virtual.contenders import (
    AtollOperator,
    ReactiveOperator,
    StaticOperator,
    find_oracle,
    plan_static,
)
from atoll.control.virtual.market import hold_market
from atoll.control.virtual.operator_comparison import (
    CONTENDERS,
    compare_operators,
    summarize_operations,
)
from atoll.control.virtual.virtual_demand import MINUTE_S, DemandSeries
from atoll.control.virtual.virtual_run import OperationResult, operate
from atoll.control.virtual.world import VirtualWorld, WorldSettings
from atoll.prove.sized_templates import SizedTemplate
from atoll.solve.derating import node_set
from research.operating.demand_walk import compare_walk
from tests.control.virtual.toys import CALM, fleet, planner, problem, setting, templates
from tests.control.world import instance


def still(minutes: int = 240, chat: int = 2400, code: int = 1500) -> DemandSeries:
    """Traffic that never changes, for long enough before, too."""
    counts = np.array([[chat] * (1500 + minutes), [code] * (1500 + minutes)])
    return DemandSeries(("chat", "code"), counts, history=1500)


def test_every_request_and_every_dollar_is_accounted_for() -> None:
    given = setting(0.1)
    came = given.demand.counts[:, given.demand.history :]
    found = list(compare_operators(given, fleet()))
    assert tuple(one.name for one in found) == CONTENDERS
    for one in found:
        series = one.series
        assert series.arrived == pytest.approx(came)
        assert series.kept + series.late + series.lost == pytest.approx(series.arrived)
        assert min(series.kept.min(), series.late.min(), series.lost.min()) >= -1e-9
        assert one.usd == pytest.approx(series.usd_per_hour.sum() * MINUTE_S / 3600.0)
        assert 0.0 <= one.below_demand_s <= one.short_s


@pytest.mark.slow
def test_a_day_goes_as_it_should() -> None:
    day = list(compare_operators(setting(1.0), fleet()))
    by_name = {one.name: one for one in day}
    atoll = by_name["atoll"]
    assert atoll.points_above_target >= -1.0
    assert atoll.below_demand_s == 0.0
    assert atoll.usd <= 1.2 * by_name["oracle"].usd
    assert atoll.usd < by_name["reactive"].usd
    assert atoll.usd < by_name["static-peak"].usd
    assert by_name["static-mean"].kept_share < atoll.kept_share
    rows = {row.name: row for row in summarize_operations(day)}
    assert rows["reactive"].atoll_saves_usd == pytest.approx(by_name["reactive"].usd - atoll.usd)
    assert rows["oracle"].kept_share is None


def test_the_same_seed_gives_the_same_bits() -> None:
    def run(seed: int) -> OperationResult:
        given = setting(0.05, seed=seed, machines=WorldSettings(failures_per_h=0.05))
        return operate(given, AtollOperator(given.problem, planner()))

    one, again, other = run(3), run(3), run(4)
    assert one.usd == again.usd
    for name in ("usd_per_hour", "kept", "late", "lost", "capacity_per_s"):
        assert (getattr(one.series, name) == getattr(again.series, name)).all()
    assert one.events == again.events
    assert other.usd != one.usd


def test_a_world_that_holds_still_costs_what_the_plan_does() -> None:
    given = setting(machines=CALM, demand=still(), moving=False)
    # So sure of what comes that no more than that is planned for.
    sure = ControlPolicy(quantile=0.02, down_quantile=0.02)
    operator = AtollOperator(given.problem, planner(), sure)
    result = operate(given, operator)
    assert operator.memory.plan is not None
    oracle = find_oracle(given, planner())
    paid = result.series.usd_per_hour
    assert paid[60:] == pytest.approx(operator.memory.plan.usd_per_hour)
    assert paid[60:].mean() == pytest.approx(oracle.usd / 4.0)
    assert result.usd <= 1.02 * oracle.usd
    assert result.short_s == 0.0


def test_a_static_plan_replaces_what_it_loses() -> None:
    given = setting(machines=WorldSettings(failures_per_h=0.5), demand=still(), moving=False)
    plan = plan_static(given, planner(), lambda rates: float(rates.max()))
    result = operate(given, StaticOperator("static-peak", plan))
    assert result.events["failures"] > 3
    assert result.events["starts"] > len(plan.instances)
    assert result.kept_share > 0.8


def look(rate: float) -> TrafficReport:
    window = TrafficWindow(rate)
    return TrafficReport((TrafficSeen("chat", window, window, window),))


def test_the_autoscaler_goes_up_at_once_and_down_after_its_window() -> None:
    asked = problem()
    world = VirtualWorld(hold_market(asked.offers), CALM)
    only = asked.replace(services=(asked.service("chat"),))
    operator = ReactiveOperator(only, templates(("chat",)), target=0.5, window_s=300.0)
    per_s = operator.best["chat/llm/both"].per_s

    def count(rate: float, until_s: float) -> int:
        operator.turn(world, look(rate))
        world.advance(until_s, lambda _: None)
        return len(world.living())

    assert count(2.0 * per_s, 300.0) == 4  # half of what each carries
    assert count(2.1 * per_s, 360.0) == 4  # within the tolerance
    assert count(4.0 * per_s, 420.0) == 8
    assert count(1.0 * per_s, 650.0) == 8
    assert count(1.0 * per_s, 700.0) == 8  # eight were wanted less than five minutes ago
    assert count(1.0 * per_s, 900.0) == 2


@pytest.mark.slow
def test_rolling_beats_one_plan_where_demand_wanders() -> None:
    calm, wild = (
        compare_walk(problem(), planner(), sigma, trials=1, seed=2) for sigma in (1e-6, 0.05)
    )
    assert calm.rolling_vs_static == pytest.approx(1.0, abs=0.02)
    assert wild.rolling_vs_static < 0.9


def test_an_own_drain_below_what_is_asked_counts_at_once() -> None:
    class Careless:
        name = "careless"

        def __init__(self, plan: StaticOperator) -> None:
            self.plan, self.turns = plan, 0

        def turn(self, world: VirtualWorld, seen: TrafficReport) -> None:
            self.turns += 1
            if self.turns <= 2:
                self.plan.turn(world, seen)
            elif self.turns == 10:
                for one in world.ready()[:4]:
                    world.drain(one.id)
            elif self.turns == 12:
                self.plan.turn(world, seen)

    given = setting(machines=CALM, demand=still(60), moving=False)
    plan = plan_static(given, planner(), lambda rates: float(rates.max()))
    result = operate(given, Careless(StaticOperator("static", plan)))
    # Two turns of three minutes and a start-up of four, of at least one service.
    assert result.below_demand_s >= 600.0
    assert result.below_demand_s == result.short_s


def test_where_no_template_runs_both_phases_each_is_scaled_by_itself() -> None:
    asked = problem()
    apart = asked.service("chat").model_copy(update={"phases": "apart"})
    only = asked.replace(services=(apart,))
    sized = []
    for phase, node_type in (("prefill", "H100:1"), ("decode", "L40S:1")):
        one = instance("template", f"chat/llm/{phase}", node_type)
        sized.append(SizedTemplate(one.role, node_set(one), one, 1.0))
    operator = ReactiveOperator(only, sized, target=1.0)
    world = VirtualWorld(hold_market(asked.offers), CALM)
    operator.turn(world, look(20.0))
    found = Counter(seen.instance.role for seen in world.living().values())
    # Twenty requests/s on instances that carry ten and four.
    assert found == {"chat/llm/prefill": 2, "chat/llm/decode": 5}
