"""A mixed fleet (chat, vision, speech) under `operate` while the mix of its classes shifts.

`--week`: virtual weeks, a draw of chance each. Rates follow the Azure weeks, the shares of classes wander,
spot prices move, machines fail and are taken back; Atoll, an autoscaler and one plan for the mean meet the
same world, and an oracle says what no less can be paid. Figures are those of the worst draw. Then eight still
hours in which one class's share is raised by 30 %:
what a plan that stays keeps afterwards, what a controller keeps that sees rates alone, and what one that
sees classes does. `--live`: the same for real, on this machine (`any_fleet_live`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from atoll.api.fleet import Fleet
from atoll.control.operation.control_loop import TrafficReport
from atoll.control.virtual.contenders import (
    AtollOperator,
    StaticOperator,
    find_oracle,
    plan_static,
)
from atoll.control.virtual.fluid_calibration import CalibratedFleet, calibrate_fleet
from atoll.control.virtual.market import draw_market, hold_market
from atoll.control.virtual.operator_comparison import make_operator
from atoll.control.virtual.virtual_demand import (
    DAY_MINUTES,
    DemandSeries,
    draw_demand,
    restate_classes,
)
from atoll.control.virtual.virtual_run import (
    FleetOperator,
    OperationResult,
    VirtualSetting,
    operate,
)
from atoll.control.virtual.world import VirtualWorld, WorldSettings
from atoll.core.rng import stream
from benchmarks.report import Figure, finish

SEED = 1
"""What executors carry, and the still hours, are drawn with it."""
SEEDS = (1, 2)
"""Draws of a week."""
DAYS = 7.0
HISTORY_DAYS = 14.0
CONTENDERS = ("atoll", "static-mean", "reactive", "oracle")
SHIFT = 1.3
"""How many times its share of requests a class has from a moment on."""
SHIFT_MINUTE, SHIFT_MINUTES = 120, 480
"""When that is, and for how long is looked at."""
CALM = WorldSettings(failures_per_h=0.0, preemptions_per_h=0.0, failed_starts=0.0)
FLEET = """
services:
  chat:
    model: qwen3-8b
    rate: 48/s
    ttft: 1s
    tpot: 60ms
    lengths: azure-conv
    phases: together
  look:
    model: qwen2.5-vl-7b
    rate: 64/s
    ttft: 2s
    tpot: 80ms
    phases: together
    classes:
      text: {share: 50%, input: 400, output: 200}
      image+text: {share: 50%, input: 200, output: 150, images: {size: 1280x720}}
  assistant:
    model: qwen2.5-omni-7b
    rate: 32/s
    ttft: 3s
    tpot: 100ms
    phases: together
    classes:
      text: {share: 40%, input: 400, output: 150}
      image+text: {share: 30%, input: 200, output: 150, images: {size: 1280x720}}
      audio -> audio: {share: 30%, input: 50, output: 60, audio: 8s, speech: 12s, ahead: 1s}
pool:
  offers:
    - {region: aws/us-east-2, node_type: L4:1, available: 192, usd_per_hour: 0.80}
    - {region: aws/us-east-2, node_type: L4:1, available: 96, usd_per_hour: 0.36, market: spot}
    - {region: aws/us-east-2, node_type: L40S:1, available: 128, usd_per_hour: 1.86}
    - {region: aws/us-east-2, node_type: L40S:1, available: 96, usd_per_hour: 0.93, market: spot}
settings:
  max_nodes_per_instance: 1
"""


class BlindOperator:
    """A controller that sees how much is asked of a service, and not of which class."""

    name = "rates alone"

    def __init__(self, whole: FleetOperator) -> None:
        self._whole = whole

    def turn(self, world: VirtualWorld, seen: TrafficReport) -> None:
        """Look at what is left of the report."""
        traffic = tuple(replace(one, classes=()) for one in seen.traffic)
        self._whole.turn(world, replace(seen, traffic=traffic))


def run_contenders(setting: VirtualSetting, fleet: CalibratedFleet) -> dict[str, OperationResult]:
    """Run everybody, printing each in a line."""
    print(
        f"\n  {'':12s} {'$':>9s} {'kept':>8s} {'worst class':>12s} {'short s':>8s} {'below':>6s} "
        f"{'starts':>6s} {'CPU-s':>6s}"
    )
    found: dict[str, OperationResult] = {}
    for name in CONTENDERS:
        began = time.process_time()
        if name == "oracle":
            found[name] = find_oracle(setting, fleet.planner.renewed())
            kept = f"{'-':>8s} {'-':>12s} {'-':>8s} {'-':>6s} {'-':>6s}"
        else:
            one = found[name] = operate(setting, make_operator(name, setting, fleet))
            kept = (
                f"{one.kept_share:8.2%} {one.points_above_target:+12.2f} {one.short_s:8,.0f} "
                f"{one.below_demand_s:6,.0f} {one.events['starts']:6d}"
            )
        print(f"  {name:12s} {found[name].usd:9,.2f} {kept} {time.process_time() - began:6.1f}")
        sys.stdout.flush()
    return found


def show_classes(results: Mapping[str, OperationResult]) -> None:
    """Print what requests of every class keep, by contender."""
    print("\n  kept by class: target, then each contender")
    real = [one for one in results.values() if one.classes]
    for at, klass in enumerate(real[0].classes):
        row = "  ".join(f"{one.name} {one.classes[at].kept_share:7.2%}" for one in real)
        print(f"  {klass.service:10s} {klass.klass:16s} {klass.target:.0%}  {row}")


def shift_class(setting: VirtualSetting, service: str, klass: str) -> VirtualSetting:
    """Return still hours: the fleet's own rates, machines that do not fail, another mix from a moment on."""
    problem = setting.problem
    history = 2 * DAY_MINUTES
    minutes = history + SHIFT_MINUTES
    counts, classes = [], {}
    for one in problem.services:
        luck = stream(SEED, "still hours", one.name)
        row = luck.poisson(60.0 * one.rate_per_s, minutes)
        counts.append(row)
        if one.is_graph:
            before = [each.share for each in one.classes]
            grown = [
                each.share * (SHIFT if (one.name, each.name) == (service, klass) else 1.0)
                for each in one.classes
            ]
            after = restate_classes(problem, {one.name: grown}).service(one.name).classes
            shares = np.tile(before, (minutes, 1))
            shares[history + SHIFT_MINUTE :] = [each.share for each in after]
            classes[one.name] = luck.multinomial(row, shares).T.astype(np.int64)
    demand = DemandSeries(
        tuple(one.name for one in problem.services), np.array(counts, np.int64), history, classes
    )
    return replace(setting, demand=demand, market=hold_market(problem.offers), machines=CALM)


def kept_between(result: OperationResult, service: str, begin: int, end: int) -> float:
    """Return the share of a service's requests that kept their promises from one minute to another, in %."""
    at = result.services.index(service)
    series = result.series
    kept = float(series.kept[at, begin:end].sum())
    return 100.0 * kept / max(1.0, float(series.arrived[at, begin:end].sum()))


def shift_classes(
    setting: VirtualSetting, fleet: CalibratedFleet, number: int
) -> dict[str, tuple[float, float]]:
    """Print what services keep where one of their first classes is asked for more; return the worst."""
    print(
        f"\n  one class {SHIFT - 1:+.0%}: % of its service's requests kept before, in the first hour, in the "
        "last four hours"
    )
    worst: dict[str, tuple[float, float]] = {}
    for service in setting.problem.graph_services:
        for klass in service.classes[:number]:
            hours = shift_class(setting, service.name, klass.name)
            # As large as it must be for the mix before.
            plan = plan_static(
                hours, fleet.planner.renewed(), lambda row: float(row[:SHIFT_MINUTE].mean())
            )
            operators: list[FleetOperator] = [
                StaticOperator("nobody", plan),
                BlindOperator(AtollOperator(hours.problem, fleet.planner.renewed())),
                AtollOperator(hours.problem, fleet.planner.renewed()),
            ]
            line = ""
            for operator in operators:
                result = operate(hours, operator)
                parts = [
                    kept_between(result, service.name, begin, end)
                    for begin, end in (
                        (30, SHIFT_MINUTE),
                        (SHIFT_MINUTE, SHIFT_MINUTE + 60),
                        (SHIFT_MINUTES - 240, SHIFT_MINUTES),
                    )
                ]
                line += f"  {operator.name} {parts[0]:.1f} {parts[1]:.1f} {parts[2]:.1f}"
                if operator.name not in worst or parts[2] < worst[operator.name][1]:
                    worst[operator.name] = (parts[0], parts[2])
            print(f"  {service.name:10s} {klass.name:16s}{line}")
            sys.stdout.flush()
    return worst


def draw_week(fleet: CalibratedFleet, days: float, seed: int) -> VirtualSetting:
    """Return the first days of a draw of a week."""
    problem = fleet.problem
    whole = draw_demand(problem, max(days, DAYS), seed, history_days=HISTORY_DAYS)
    return VirtualSetting(
        problem,
        whole.take(round(DAY_MINUTES * days)),
        draw_market(problem.offers, max(days, DAYS), seed),
        fleet.curves,
        seed=seed,
    )


def worst_class(result: OperationResult) -> float:
    """Return by how many points the class that keeps least exceeds its target."""
    return min(100.0 * (one.kept_share - one.target) for one in result.classes)


def run_week(quick: bool, days: float, seeds: Sequence[int]) -> list[Figure]:
    """Return what draws of a virtual week, or of its first days, cost and keep."""
    problem = Fleet.read(FLEET, name="any_fleet.yaml").problem
    began = time.process_time()
    fleet = calibrate_fleet(
        problem, problem.catalog(), seed=SEED, say=lambda text: print(f"  {text}", flush=True)
    )
    print(f"  calibrated in {time.process_time() - began:.1f} CPU-s")
    settings = [draw_week(fleet, days, seed) for seed in seeds]
    draws = []
    for setting in settings:
        print(f"\n  draw {setting.seed}, {days:g} days")
        draws.append(run_contenders(setting, fleet))
        show_classes(draws[-1])
    shifted = shift_classes(settings[0], fleet, 1 if quick else 2)
    return [
        Figure("cost_vs_oracle", max(one["atoll"].usd / one["oracle"].usd for one in draws), 1.15),
        Figure(
            "kept_class_minus_target",
            min(worst_class(one["atoll"]) for one in draws),
            -1.0,
            "points, the worst class of the worst draw",
            at_least=True,
        ),
        Figure("cost_vs_reactive", max(one["atoll"].usd / one["reactive"].usd for one in draws)),
        Figure("below_demand_s", max(one["atoll"].below_demand_s for one in draws)),
        Figure("shift_kept_nobody", shifted["nobody"][1], note="%, where the plan stays"),
        Figure("shift_kept_rates_alone", shifted["rates alone"][1], note="%"),
        Figure("shift_kept", shifted["atoll"][1], note="%"),
    ]


def run_live(quick: bool) -> list[Figure]:
    """Return what changes of mix and kills do to clients on this machine."""
    from tests.slow.tasks.any_fleet_live import run_live as run_fleet

    found = run_fleet(quick)
    bars = {"errors": 0.0, "wrong_answers": 0.0, "leaked": 0.0}
    return [Figure(name, value, bars.get(name)) for name, value in found.items()]


def main() -> None:
    """Run the parts that are asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a day, and a short time live")
    parser.add_argument("--week", action="store_true", help="in virtual time")
    parser.add_argument("--live", action="store_true", help="on this machine")
    parser.add_argument("--days", type=float, help="so many of the week")
    parser.add_argument("--seeds", type=int, nargs="+", help="draws of the week")
    asked = parser.parse_args()
    every = not (asked.week or asked.live)
    figures: list[Figure] = []
    if asked.week or every:
        days = asked.days or (1.0 if asked.quick else DAYS)
        figures += run_week(asked.quick, days, asked.seeds or (SEEDS[:1] if asked.quick else SEEDS))
    if asked.live or every:
        figures += run_live(asked.quick)
    finish(figures)


if __name__ == "__main__":
    main()
