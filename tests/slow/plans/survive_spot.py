"""Random services on spot nodes that are lost, planned, and held against a day of losses drawn here.

Losses are drawn node by node, with notices, drain and start-up as the fleet states them. All plans of at most
three instances that cost less (`promise_rivals`) are written down without a solver; of those that carry all,
the cheapest are simulated in the same way.

Whole days are simulated, in runs of hours: where runs are short few of them have a loss, all others agree on
a share that says nothing of it, and what waits after a loss is cut off with its run. A rival is looked at for
less, and counts if it keeps in three days that are drawn anew: of many that are looked at some are lucky.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable
from functools import partial

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.plan.files.fleet_file import build_problem
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.prove.planning import plan as make_plan
from atoll.sim.api import simulate
from atoll.sim.problem_demand import demand_of
from atoll.sim.sim_options import Failure, SimOptions
from atoll.solve.plan_request import PlanRequest
from atoll.workload.requests import collect
from tests.slow.plans.case_runs import Draw
from tests.slow.plans.promise_fleets import GPUS
from tests.slow.plans.promise_rivals import Rival, Yard
from tests.slow.plans.survive_losses import Fields, sized
from tests.slow.plans.survive_outcome import CHEAPER, DEADLINE_S, Outcome

_DAY_S = 86_400.0
_RUNS = 12
"""Simulations that a day is divided into."""
_LOOK_REQUESTS = (60_000, 240_000)
"""Requests of the first looks at a rival: one that falls short in them is not simulated for longer."""
_ANEW = 1_000_000
"""What is added to a seed for draws that nothing was chosen by."""
_CONFIRM_DAYS = 3
"""Days in which a rival must keep promises, drawn anew."""
_MOST_RIVALS = 8
_SURE = 2.5
"""Standard errors by which a share must lie on one side of its target."""
_SLACK = 0.01
_DRAIN_S = 20.0
"""Seconds before a loss that is announced in which nothing new is sent to a node."""


def make_fleet(seed: int) -> Problem:
    """Return the fleet of a seed: a service or two, two sorts of machines, on spot and on demand."""
    draw = Draw(41, seed + 2_000_000)
    offers: list[Fields] = []
    for gpu in map(str, draw.rng.permutation(["L4", "A10G", "L40S", "A100-40"])[:2]):
        usd = GPUS[gpu] * draw.between(0.8, 1.25)
        for market, share in (("on-demand", 1.0), ("spot", draw.between(0.25, 0.7))):
            offers.append(
                {
                    "region": "r/a",
                    "node_type": f"{gpu}:1",
                    "market": market,
                    "available": 4,
                    "usd_per_hour": round(usd * share, 2),
                }
            )
    services: dict[str, Fields] = {
        f"s{index}": {
            "model": draw.pick(("llama-3.1-8b", "llama-3.2-3b", "qwen3-8b")),
            "ttft": f"{draw.between(1.0, 4.0)}s",
            "tpot": f"{draw.between(0.06, 0.2)}s",
            "rate": "1/s",
            "lengths": {
                "input": int(draw.between(100, 1500)),
                "output": int(draw.between(20, 200)),
                "input_cv": draw.pick((0.0, 0.5)),
                "output_cv": draw.pick((0.0, 0.5)),
            },
            "phases": "together",
            "attainment": draw.pick(("95%", "90%"), (0.7, 0.3)),
        }
        for index in range(draw.pick((1, 2), (0.7, 0.3)))
    }
    asked = build_problem(
        {
            "name": f"spot-{seed}",
            "services": services,
            "pool": {"offers": offers},
            "settings": {
                "max_nodes_per_instance": 1,
                "engines": ["vllm"],
                "startup": f"{draw.between(40, 400)}s",
            },
            "limits": {
                "spot_loss": f"{draw.between(0.2, 4.0)}/h",
                "spot_notice": draw.pick(("0s", "30s", "2min"), (0.5, 0.25, 0.25)),
            },
        }
    )
    return sized(asked, draw)


def draw_losses(plan: Plan, problem: Problem, seconds: float, seed: int) -> tuple[Failure, ...]:
    """Return losses of the spot nodes of a plan, each back after it has started anew."""
    limits, startup_s = problem.limits, problem.settings.startup_s or 0.0
    rng = np.random.default_rng([41, 5, seed])
    mean_s = 3600.0 / limits.spot_loss_per_h
    away_s = max(1.0, startup_s - limits.spot_notice_s)
    drain_s = min(_DRAIN_S, limits.spot_notice_s)
    found = []
    for instance in plan.instances:
        for node in instance.nodes:
            if node.market != "spot":
                continue
            # As at any other time: now and then it has just been lost.
            at = float(rng.exponential(mean_s)) - away_s * (rng.random() < away_s / mean_s)
            while at < seconds:
                begin = max(0.0, at)
                found.append(
                    Failure(
                        begin,
                        instance=instance.id,
                        node=node.id,
                        back_s=max(at + away_s, begin + 1.0),
                        drained_s=max(0.0, begin - drain_s) if drain_s else None,
                    )
                )
                at = max(at, begin) + away_s + float(rng.exponential(mean_s))
    return tuple(sorted(found, key=lambda loss: loss.time_s))


def kept_in_losses(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    seed: int,
    *,
    days: int = 1,
    requests: float = math.inf,
) -> dict[str, tuple[float, float]]:
    """Return by service the share of requests that keep both promises in days of losses, and its error.

    Of so many `requests` at most: the rest of the day is not simulated.
    """
    rate = sum(service.rate_per_s for service in problem.services)
    seconds = min(_DAY_S, requests / rate) / _RUNS
    runs: dict[str, list[float]] = {service.name: [] for service in problem.services}
    for number in range(days * _RUNS):
        own = 1_000 * seed + number
        arrivals = collect(demand_of(problem, seconds), own)
        failures = draw_losses(plan, problem, seconds, own)
        options = SimOptions(seed=own, failures=failures, from_s=0.05 * seconds)
        for one in simulate(plan, problem, catalog, arrivals, options).services:
            if one.attainment is not None:
                runs[one.name].append(one.attainment)
    return {
        name: (float(np.mean(some)), float(np.std(some, ddof=1)) / math.sqrt(len(some)))
        for name, some in runs.items()
        if len(some) > 1
    }


def run_case(seed: int) -> Outcome:
    """Plan the fleet of a seed, and hold it against losses and against cheaper plans."""
    problem = make_fleet(seed)
    catalog, outcome = problem.catalog(), Outcome(seed, "spot")
    began = time.process_time()
    plan = make_plan(problem, PlanRequest(catalog=catalog, deadline_s=DEADLINE_S, error_bars=False))
    outcome.cpu_s = time.process_time() - began
    outcome.status, outcome.usd_per_hour, outcome.bound = plan.status, plan.objective, plan.bound
    targets = {service.name: service.target for service in problem.services}
    whole = plan.status in ("optimal", "feasible")
    kept = whole and bool(plan.promises) and all(promise.is_kept for promise in plan.promises)
    if kept:
        for name, (share, error) in kept_in_losses(plan, problem, catalog, seed).items():
            if share + _SURE * error < targets[name] - _SLACK:
                text = f"{name} keeps {share:.1%} of {targets[name]:.0%} in a day of losses"
                outcome.fault("spot_below", text)
    under = plan.usd_per_hour * (1.0 - CHEAPER) if kept else math.inf
    rivals = [one for one in Yard(problem, catalog).list_rivals(plan, under) if one.carries >= 1.0]
    cheapest: dict[Hashable, Rival] = {}
    for one in sorted(rivals, key=lambda one: (one.usd_per_hour, -one.carries)):
        cheapest.setdefault(one.stands_on, one)
    outcome.enumerated = len(cheapest) <= _MOST_RIVALS
    for rival in list(cheapest.values())[:_MOST_RIVALS]:
        if surely_keeps(rival.plan, problem, catalog, seed + 1):
            said = f"${rival.usd_per_hour:.3f}/h keeps: {rival.in_words}"
            if kept:
                outcome.fault("dearer", f"${plan.usd_per_hour:.3f}/h planned, {said}")
            else:
                outcome.fault("refused_wrongly", f"{plan.status}, promises not kept; {said}")
            break
    return outcome


def surely_keeps(plan: Plan, problem: Problem, catalog: Catalog, seed: int) -> bool:
    """Return whether a plan surely keeps its promises: at first looks, and in days that are drawn anew."""
    targets = {service.name: service.target for service in problem.services}
    looks = [
        *(partial(kept_in_losses, seed=seed, requests=number) for number in _LOOK_REQUESTS),
        partial(kept_in_losses, seed=seed + _ANEW, days=_CONFIRM_DAYS),
    ]
    for look in looks:
        found = look(plan, problem, catalog)
        sure = all(mean - _SURE * e >= targets[name] for name, (mean, e) in found.items())
        if not sure or len(found) < len(targets):
            return False
    return True
