"""A week of operating a fleet in virtual time: Atoll against other ways to do so, and against an oracle.

Three services with the rhythm of the Azure weeks, chance and bursts; spot prices that move, machines that
fail and are taken back. All contenders meet the same world (`control.virtual`): the same requests, prices and
laws of chance. What templates carry, and what requests keep by load, comes from the event simulator before.
Also: dollars per day of each, the fluid model against the event simulator, GH/AGH's table 4, six days that
are hard to operate (`hard_days`), and what 40 services take. Starts are told as a share of those before they
had a price.
"""

from __future__ import annotations

import subprocess
import sys
import time

from atoll.api.fleet import Fleet
from atoll.control.virtual.contenders import ReactiveOperator, find_oracle
from atoll.control.virtual.fluid_calibration import (
    CalibratedFleet,
    calibrate_fleet,
    carried_requests,
    simulate_rates,
)
from atoll.control.virtual.market import draw_market
from atoll.control.virtual.operator_comparison import CONTENDERS, make_operator
from atoll.control.virtual.virtual_demand import DAY_MINUTES, draw_demand
from atoll.control.virtual.virtual_run import OperationResult, VirtualSetting, operate
from atoll.prove.sized_templates import size_for_share
from benchmarks.operating.hard_days import make_days, multiply
from benchmarks.report import ROOT, Figure, finish, options
from research.operating.demand_walk import SIGMAS, compare_walk
from research.operating.exact_windows import WatchedOperator, check_windows, flow_rates

SEED = 1
STARTS_BEFORE = {2.0: 449, 7.0: 1426}
"""Starts of Atoll in so many days of the week before starts had a price (2026-11-18, seed 1)."""
DAY_STARTS_BEFORE = {
    "flash crowd": 31,
    "twice the history": 52,
    "region outage": 57,
    "dear spot": 30,
    "slow starts": 32,
    "dear spot, slow starts": 31,
}
"""The same of the hard days."""
MANY = 40
HISTORY_DAYS = 14.0
FLEET = """
services:
  chat:
    model: qwen3-32b
    ttft: 4s
    tpot: 100ms
    rate: 12/s
    lengths: azure-conv
    phases: together
  code:
    model: gpt-oss-20b
    ttft: 1500ms
    tpot: 100ms
    rate: 90/s
    lengths: azure-code
    phases: together
  small:
    model: llama-3.1-8b
    ttft: 800ms
    tpot: 50ms
    rate: 100/s
    lengths: 512x128
    phases: together
pool:
  cloud:
    regions: [aws/us-east-2, aws/us-west-2]
    gpus: [L4, A10G, L40S]
    available: 64
    spot: true
    on_demand: true
    whole: true
settings:
  max_nodes_per_instance: 3
"""
WINDOWS = (
    (0.8,),
    (1.0,),
    (1.1,),
    (0.8, 0.9, 1.0, 1.1, 1.2),
    (0.7, 0.7, 1.4, 0.7, 0.7),
    (1.2, 1.2, 0.6, 0.6, 0.6),
)
"""Shapes of ten minutes, as multiples of what a plan carries, on which the two models are compared."""
TARGETS = (0.6, 0.7, 0.8, 0.9)
"""Utilisations that the autoscaler is also tried with."""


def make_setting(fleet: CalibratedFleet, days: float, seed: int = SEED) -> VirtualSetting:
    """Return the world of the benchmark."""
    return VirtualSetting(
        fleet.problem,
        draw_demand(fleet.problem, days, seed, history_days=HISTORY_DAYS),
        draw_market(fleet.problem.offers, days, seed),
        fleet.curves,
        seed=seed,
    )


def compare_models(fleet: CalibratedFleet) -> float:
    """Print what both models say is kept, window by window; return the largest difference in points."""
    problem, catalog = fleet.problem, fleet.planner.catalog
    plan = fleet.planner(size_for_share(problem))
    full = carried_requests(problem, plan)
    worst = 0.0
    print("\n  fluid model beside the event simulator, % of requests that keep their promises")
    for shape in WINDOWS:
        rates = {name: tuple(x * most for x in shape) for name, most in full.items()}
        simulated = simulate_rates(problem, catalog, plan, rates, seed=77)
        line = f"  {'-'.join(f'{x:g}' for x in shape):24s}"
        for service in problem.services:
            name = service.name
            flowed = flow_rates(service, fleet.curves[name], full[name], rates[name])
            worst = max(worst, 100.0 * abs(flowed - simulated[name]))
            line += f"  {name} {100 * flowed:5.1f} / {100 * simulated[name]:5.1f}"
        print(line)
    return worst


def show(result: OperationResult, cpu_s: float) -> None:
    """Print a contender in a line."""
    days = max(1, round(result.days))
    by_day = " ".join(
        f"{result.series.usd_per_hour[k * DAY_MINUTES : (k + 1) * DAY_MINUTES].mean():6.2f}"
        for k in range(days)
    )
    kept = "      -       -        -      -"
    if result.name != "oracle":
        kept = (
            f"{result.kept_share:7.2%} {result.points_above_target:+7.2f} "
            f"{result.short_s:8,.0f} {result.below_demand_s:6,.0f}"
        )
    starts = result.events.get("starts", 0)
    print(f"  {result.name:12s} {result.usd:9,.2f} {kept} {starts:6d} {cpu_s:6.1f}  {by_day}")
    sys.stdout.flush()


def run_all(
    setting: VirtualSetting, fleet: CalibratedFleet
) -> dict[str, tuple[OperationResult, float]]:
    """Run every contender, printing each; return results with their CPU time."""
    print(
        f"\n  {'':12s} {'$':>9s} {'kept':>7s} {'points':>7s} {'short s':>8s} {'below':>6s} "
        f"{'starts':>6s} {'CPU-s':>6s}  mean $/h of each day"
    )
    found = {}
    for name in CONTENDERS:
        began = time.process_time()
        if name == "oracle":
            result = find_oracle(setting, fleet.planner)
        else:
            result = operate(setting, make_operator(name, setting, fleet))
        found[name] = (result, time.process_time() - began)
        show(*found[name])
    return found


def check_run(setting: VirtualSetting, fleet: CalibratedFleet, number: int) -> float:
    """Print windows of Atoll's run again, event by event; return the mean difference in points."""
    watched = WatchedOperator(make_operator("atoll", setting, fleet))
    result = operate(setting, watched)
    print("\n  windows of atoll's run event by event: load, % kept by the fluid / by events")
    found = check_windows(setting, result, watched, fleet.planner.catalog, number)
    for minute in dict.fromkeys(one.minute for one in found):
        shown = "  ".join(
            f"{one.service} {one.load:4.2f} {100 * one.fluid:5.1f} / {100 * one.exact:5.1f}"
            for one in found
            if one.minute == minute
        )
        print(f"  minute {minute:5d}  {shown}")
    apart = [100.0 * abs(one.fluid - one.exact) for one in found]
    return sum(apart) / max(1, len(apart))


def run_hard_days(fleet: CalibratedFleet) -> list[Figure]:
    """Print the hard days; return the worst of them."""
    print(
        "\n  hard days: $ over oracle's and reactive's, points kept over reactive's, starts (before)"
    )
    costs, kept, starts, below_s = [], [], 0, 0.0
    for name, setting in make_days(fleet, SEED):
        atoll, reactive = (
            operate(setting, make_operator(one, setting, fleet)) for one in ("atoll", "reactive")
        )
        oracle = find_oracle(setting, fleet.planner)
        costs.append(atoll.usd / oracle.usd)
        kept.append(100.0 * (atoll.kept_share - reactive.kept_share))
        starts += atoll.events["starts"]
        below_s += atoll.below_demand_s
        print(
            f"  {name:24s} {costs[-1]:6.3f} {atoll.usd / reactive.usd:6.3f} {kept[-1]:+6.2f} "
            f"{atoll.events['starts']:4d} ({DAY_STARTS_BEFORE[name]})"
        )
        sys.stdout.flush()
    before = sum(DAY_STARTS_BEFORE.values())
    return [
        Figure("days_cost_vs_oracle", max(costs), 1.10, "the dearest of six days"),
        Figure("days_kept_minus_reactive", min(kept), -0.5, "points, the worst", at_least=True),
        Figure("days_starts_vs_before", starts / before, 0.5, "all six"),
        Figure("days_below_demand_s", below_s),
    ]


def measure_many(fleet: CalibratedFleet, days: float) -> float:
    """Return CPU-seconds for a virtual day of many services."""
    many = multiply(fleet, MANY)
    setting = make_setting(many, days)
    began = time.process_time()
    operate(setting, make_operator("atoll", setting, many))
    return (time.process_time() - began) / days


def try_targets(setting: VirtualSetting, fleet: CalibratedFleet, atoll_usd: float) -> None:
    """Print the autoscaler with other targets of utilisation."""
    print("\n  the autoscaler at other targets: cost, kept, points above target, atoll over it")
    for target in TARGETS:
        operator = ReactiveOperator(setting.problem, fleet.planner.templates, target=target)
        one = operate(setting, operator)
        print(
            f"  {target:4.0%} {one.usd:9,.2f} {one.kept_share:7.2%} "
            f"{one.points_above_target:+6.2f} {atoll_usd / one.usd:6.3f}"
        )


def walk(fleet: CalibratedFleet, trials: int) -> float:
    """Print GH/AGH's table 4; return what rolling costs over static at the largest sigma."""
    print(f"\n  random walk of demand, {trials} trials of 24 h: $ of one plan, of one every 5 min")
    last = 1.0
    for sigma in SIGMAS:
        row = compare_walk(fleet.problem, fleet.planner, sigma, trials=trials)
        last = row.rolling_vs_static
        print(
            f"  sigma {sigma:.2f}  {row.static_usd:8.2f} +- {row.static_deviation:7.2f}  "
            f"{row.rolling_usd:8.2f} +- {row.rolling_deviation:7.2f}  {100 * (last - 1):+6.1f} %"
        )
        sys.stdout.flush()
    return last


def measure_large() -> dict[str, float]:
    """Return what a decision about 1,000 instances takes, from a process of its own."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.control.large"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return {line.split()[0]: float(line.split()[1]) for line in found.stdout.splitlines()}


def main() -> None:
    """Run a week, or two days of it, and compare."""
    arguments = options(__doc__ or "")
    days = 2.0 if arguments.quick else 7.0
    problem = Fleet.read(FLEET, name="operate.yaml").problem
    began = time.process_time()
    fleet = calibrate_fleet(problem, problem.catalog(), say=lambda text: print(f"  {text}"))
    print(f"  calibrated in {time.process_time() - began:.1f} CPU-s")
    worst = compare_models(fleet)
    setting = make_setting(fleet, days)
    found = run_all(setting, fleet)
    atoll, atoll_cpu_s = found["atoll"]
    exact = check_run(setting, fleet, 3 if arguments.quick else 8)
    if not arguments.quick:
        try_targets(setting, fleet, atoll.usd)
    hard = run_hard_days(fleet)
    many_cpu_s = measure_many(fleet, 0.1 if arguments.quick else 1.0)
    rolling = walk(fleet, 2 if arguments.quick else 10)
    large = measure_large()
    usd = {name: result.usd for name, (result, _) in found.items()}
    finish(
        [
            Figure("cost_vs_oracle", atoll.usd / usd["oracle"], 1.10),
            Figure("cost_vs_reactive", atoll.usd / usd["reactive"], 0.85),
            Figure("cost_vs_static_peak", atoll.usd / usd["static-peak"], 0.60),
            Figure("kept_share", atoll.kept_share),
            Figure(
                "kept_share_minus_target",
                atoll.points_above_target,
                -1.0,
                "points",
                at_least=True,
            ),
            Figure(
                "kept_minus_reactive",
                100.0 * (atoll.kept_share - found["reactive"][0].kept_share),
                -0.5,
                "points",
                at_least=True,
            ),
            Figure("starts_vs_before", atoll.events["starts"] / STARTS_BEFORE[days], 0.5),
            Figure("below_demand_s", atoll.below_demand_s, 0.0),
            *hard,
            Figure("cpu_s_per_day_40", many_cpu_s, 60.0, f"{MANY} services"),
            Figure(
                "virtual_days_per_cpu_s",
                days / atoll_cpu_s,
                1.0,
                "sizing apart",
                at_least=True,
            ),
            Figure("decide_ms_1000", large["decide_ms_1000"], 100.0),
            Figure("rss_mb_1000", large["rss_mb_1000"], 300.0),
            Figure("fluid_error_points", worst, note="largest of all windows"),
            Figure("exact_error_points", exact, note="mean over windows of the run"),
            Figure("rolling_vs_static_sigma05", rolling),
        ],
        short_s=atoll.short_s,
    )


if __name__ == "__main__":
    main()
