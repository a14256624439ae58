"""Any-to-any services in virtual time: loads by hand, the books by class, and a mix that shifts."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.control.decision.executor_capacity import ClassNeed
from atoll.control.decision.lane_capacity import CarriedLoad
from atoll.control.virtual import executor_calibration
from atoll.control.virtual.contenders import AtollOperator, StaticOperator, plan_static
from atoll.control.virtual.executor_calibration import calibrate_executors
from atoll.control.virtual.executor_fluid import ExecutorLoads
from atoll.control.virtual.executor_planner import FleetPlanner, KnownExecutors
from atoll.control.virtual.fluid import KeptCurve
from atoll.control.virtual.fluid_calibration import CalibratedFleet
from atoll.control.virtual.market import hold_market
from atoll.control.virtual.operation import simulate_operation
from atoll.control.virtual.operator_comparison import compare_operators
from atoll.control.virtual.virtual_demand import DemandSeries, TrafficStatistics, draw_demand
from atoll.control.virtual.virtual_run import OperationResult, VirtualSetting, operate
from atoll.core.errors import UsageError
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Instance, RequestPath, RequestStep
from tests.cli.graphs import SMALL
from tests.control.decision.test_mix import executor
from tests.control.virtual.toys import CALM

FLEET = parse_fleet(
    SMALL.replace("rate: 3/s", "rate: 30/s").replace("available: 6", "available: 90")
)
(LOOK,) = FLEET.services
KINDS = frozenset({"T4:1", "L4:1"})
KNOWN = KnownExecutors(LOOK, (("llm",), ("vision",), ("vision", "llm")), KINDS, {})
NEEDS = (ClassNeed("image+text", 0.6, ("vision", "llm")), ClassNeed("text", 0.4, ("llm",)))


def planner() -> FleetPlanner:
    return FleetPlanner(FLEET.catalog(), None, {"look": KNOWN})


def setting(demand: DemandSeries) -> VirtualSetting:
    curves = {f"look/{klass.name}": KeptCurve() for klass in LOOK.classes}
    return VirtualSetting(FLEET, demand, hold_market(FLEET.offers), curves, CALM, seed=2)


def path(klass: str, *steps: tuple[str, dict[str, float]], share: float = 1.0) -> RequestPath:
    made = [RequestStep(parts=tuple(p.split("+")), instances=names) for p, names in steps]
    return RequestPath(service="look", klass=klass, share=share, steps=tuple(made))


EYE, MIND, WHOLE = (executor(*one) for one in (("a", "vision"), ("b", "llm"), ("c", "vision+llm")))
PATHS = (
    path("image+text", ("vision", {"a": 1.0}), ("llm", {"b": 1.0}), share=0.5),
    path("image+text", ("vision+llm", {"c": 1.0}), share=0.5),
    path("text", ("llm", {"b": 1.0})),
)


def loads(*serving: Instance, paths: tuple[RequestPath, ...] = PATHS) -> ExecutorLoads:
    return ExecutorLoads(NEEDS, serving, paths)


def test_loads_are_those_of_the_paths() -> None:
    # A second of 0.4 s of seeing and 0.2 s of writing a picture, 0.1 s of writing a text.
    image, text = loads(EYE, MIND, WHOLE).of((2.0, 5.0))
    # The eye is busy for 0.4 s a second, the mind for 0.7, the whole for 0.6: steps count by their busiest.
    assert image == pytest.approx(0.5 * 0.7 + 0.5 * 0.6)
    assert text == pytest.approx(0.7)
    assert loads(EYE, MIND, WHOLE).carried((2.0, 5.0)) == pytest.approx(7.0 / 0.7)


def test_what_does_not_serve_is_gone_round() -> None:
    # Without the eye all pictures go over the whole; without both nobody sees.
    image, text = loads(MIND, WHOLE).of((1.0, 5.0))
    assert image == pytest.approx(0.6)
    assert text == pytest.approx(0.5)
    image, text = loads(MIND).of((1.0, 5.0))
    assert image == np.inf
    assert text == pytest.approx(0.5)
    assert loads(MIND).carried((1.0, 5.0)) == 0.0
    # A plan's executors do not serve yet: those that do are asked, alike.
    later = (path("text", ("llm", {"new": 1.0})),)
    assert loads(MIND, WHOLE, paths=later).of((0.0, 6.0))[1] == pytest.approx(0.3)
    apart = tuple(
        executor(name, "llm").model_copy(
            update={
                "role": f"look/llm.{phase}/serve",
                "work": tuple(one._replace(part=f"llm.{phase}") for one in MIND.work),
            }
        )
        for name, phase in (("p", "prefill"), ("q", "decode"))
    )
    assert loads(*apart, paths=()).of((0.0, 6.0))[1] == pytest.approx(0.6)


def test_classes_are_drawn_around_what_is_written() -> None:
    law = TrafficStatistics(mix_deviation=0.3, mix_reverts_s=3600.0)
    drawn = draw_demand(FLEET, 4.0, 5, history_days=1.0, statistics=law)
    rows = drawn.classes["look"]
    assert (rows.sum(axis=0) == drawn.counts[0]).all()
    assert rows[0].sum() / rows.sum() == pytest.approx(0.6, abs=0.03)
    hours = rows.reshape(2, -1, 60).sum(axis=2)
    assert (hours[0] / hours.sum(axis=0)).std() > 0.03
    again = draw_demand(FLEET, 4.0, 5, history_days=1.0, statistics=law)
    assert (again.classes["look"] == rows).all()
    still = draw_demand(FLEET, 1.0, 5, statistics=TrafficStatistics(mix_deviation=0.0))
    shares = still.classes["look"][0] / still.counts[0]
    assert np.abs(shares - 0.6).max() < 0.08
    assert (drawn.take(60).classes["look"] == rows[:, : drawn.history + 60]).all()


def compared(days: float) -> list[OperationResult]:
    given = setting(draw_demand(FLEET, days, 3, history_days=2.0))
    fleet = CalibratedFleet(FLEET, planner(), given.curves)
    return list(compare_operators(given, fleet, ("atoll", "static-mean", "reactive", "oracle")))


def test_every_request_of_every_class_is_accounted_for() -> None:
    for one in compared(0.04)[:3]:
        series = one.series
        assert series.kept + series.late + series.lost == pytest.approx(series.arrived)
        assert sum(k.arrived for k in one.classes) == pytest.approx(series.arrived[0])
        assert sum(k.kept for k in one.classes) == pytest.approx(series.kept[0])
        assert {k.klass for k in one.classes} == {"text", "image+text"}


@pytest.mark.slow
def test_a_day_goes_as_it_should() -> None:
    atoll, mean, reactive, oracle = compared(0.2)
    assert atoll.points_above_target >= -1.0
    assert atoll.usd <= 1.3 * oracle.usd
    assert oracle.usd < atoll.usd < reactive.usd
    assert mean.kept_share < atoll.kept_share
    assert reactive.kept_share > 0.95


def shift(pictures: float) -> DemandSeries:
    """Five hours of the same rate, with other shares for the last four."""
    history, before, after = 1500, 60, 240
    total = 60 * 30
    images = [round(0.6 * total)] * (history + before) + [round(pictures * total)] * after
    rows = np.array([images, [total - one for one in images]])
    return DemandSeries(("look",), rows.sum(axis=0, keepdims=True), history, {"look": rows})


@pytest.mark.slow
def test_a_mix_that_shifts_is_followed() -> None:
    given = setting(shift(0.78))
    plan = plan_static(given, planner(), lambda row: float(row[:50].mean()))
    nobody = operate(given, StaticOperator("nobody", plan))
    atoll = AtollOperator(FLEET, planner())
    followed = operate(given, atoll)

    def kept(one: OperationResult, begin: int, end: int) -> float:
        series = one.series
        return float(series.kept[0, begin:end].sum() / series.arrived[0, begin:end].sum())

    assert kept(nobody, 10, 60) >= 0.945
    assert kept(nobody, 180, 300) < 0.9
    assert kept(followed, 180, 300) >= 0.95
    assert followed.usd > nobody.usd
    mix = atoll.memory.mixes["look"]
    assert mix["image+text"] == pytest.approx(0.78, abs=0.03)


def test_plans_carry_what_is_asked_of_each_class() -> None:
    plan = planner()(FLEET)
    carried = CarriedLoad(FLEET, frozenset({"look"}), plan.instances).lanes()["look"]
    assert carried >= LOOK.rate_per_s * (1.0 - 1e-6)
    assert {one.nodes[0].kind for one in plan.instances} <= KINDS
    # The same problem has the same plan, and what runs stays.
    assert planner()(FLEET) == plan
    again = planner()(FLEET.model_copy(update={"running": plan.instances}))
    assert {one.id for one in again.instances} == {one.id for one in plan.instances}
    slow = FleetPlanner(FLEET.catalog(), None, {"look": KNOWN.slower(2.0)})(FLEET)
    assert slow.usd_per_hour > 1.5 * plan.usd_per_hour


@pytest.mark.slow
def test_executors_and_curves_come_from_the_simulator_of_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor_calibration, "SIZES", (1.0,))
    monkeypatch.setattr(executor_calibration, "LOADS", (0.5, 1.0, 1.5))
    monkeypatch.setattr(executor_calibration, "RUNS_PER_LOAD", 1)
    monkeypatch.setattr(executor_calibration, "_REQUESTS", 600)
    cheap = FLEET.replace(offers=tuple(o for o in FLEET.offers if o.node_type == "L4:1"))
    found = calibrate_executors(cheap, LOOK, cheap.catalog(), seed=1)
    assert found.known.kinds == {"L4:1"}
    assert {part.partition(".")[0] for option in found.known.options for part in option} == {
        "vision",
        "llm",
    }
    assert set(found.curves) == {"look/text", "look/image+text"}
    for name, curve in found.curves.items():
        assert list(curve.kept) == sorted(curve.kept, reverse=True)
        # What is full keeps its target in the very draws that the curve is of.
        assert curve.at(1.0) >= LOOK.class_target(name.removeprefix("look/"))
        assert curve.stretch >= 1.0


def test_limits_on_the_whole_fleet_are_refused_in_a_line() -> None:
    limits = FLEET.limits.model_copy(update={"budget_usd_per_hour": 9.0})
    with pytest.raises(UsageError, match="within no limit on all"):
        simulate_operation(FLEET.model_copy(update={"limits": limits}))
