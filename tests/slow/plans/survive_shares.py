"""Random services that may share instances, planned, and every sharer held to its own promise.

The plan is simulated with arrivals that are drawn here, sharer by sharer, with each one's own rate and
lengths; what each request was promised is looked up here, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.plan.files.fleet_file import build_problem
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.prove.planning import plan as make_plan
from atoll.sim.api import simulate
from atoll.sim.sim_options import SimOptions
from atoll.solve.plan_request import PlanRequest
from atoll.workload.requests import Requests
from tests.slow.plans.case_runs import Draw
from tests.slow.plans.promise_fleets import GPUS
from tests.slow.plans.survive_losses import Fields
from tests.slow.plans.survive_outcome import DEADLINE_S, Outcome

_SEEDS = (9_001, 9_002, 9_003)
_REQUESTS = 2_000
"""Requests of the rarest sharer in one simulation, within a limit."""
_MOST_REQUESTS = 60_000
_WARM_SHARE = 0.1
_SLACK = 0.01
"""Share below the target from which on a promise counts as broken."""


def make_services(seed: int) -> dict[str, Fields]:
    """Return two or three services of one model; the first has few and long prompts."""
    draw = Draw(41, seed)
    model = draw.pick(("llama-3.1-8b", "llama-3.2-3b", "phi-4-14b"))
    phases = draw.pick(("together", "auto"), (0.7, 0.3))
    ttft, alike = draw.between(0.4, 2.0), draw.pick((True, False))
    return {
        f"s{index}": {
            "model": model,
            "ttft": f"{ttft if alike else draw.between(0.4, 3.0)}s",
            "tpot": f"{draw.between(0.05, 0.2)}s",
            "rate": f"{draw.between(2.0, 15.0) if index else draw.between(0.1, 1.0)}/s",
            "lengths": {
                "input": int(draw.between(60, 400) if index else draw.between(1000, 7000)),
                "output": int(draw.between(20, 200)),
                "input_cv": draw.pick((0.0, 0.5)),
                "output_cv": draw.pick((0.0, 0.5)),
            },
            "phases": phases,
            "attainment": draw.pick(("95%", "90%"), (0.7, 0.3)),
        }
        for index in range(draw.pick((2, 3), (0.6, 0.4)))
    }


def make_fleet(seed: int) -> tuple[Problem, dict[str, Fields]]:
    """Return the fleet of a seed and its services as they are asked for."""
    draw, services = Draw(41, seed + 1_000_000), make_services(seed)
    gpus = draw.rng.permutation(list(GPUS))[:3]
    offers = [
        {
            "region": "r/a",
            "node_type": f"{gpu}:1",
            "available": 8,
            "usd_per_hour": round(GPUS[gpu] * draw.between(0.7, 1.4), 2),
        }
        for gpu in map(str, gpus)
    ]
    fleet = {
        "name": f"shares-{seed}",
        "services": services,
        "pool": {"offers": offers},
        "settings": {"max_nodes_per_instance": 1, "engines": ["vllm"]},
        "share_instances": True,
    }
    return build_problem(fleet), services


def run_case(seed: int) -> Outcome:
    """Plan the fleet of a seed and hold what it promises against what each service gets."""
    problem, services = make_fleet(seed)
    catalog, outcome = problem.catalog(), Outcome(seed, "sharer")
    began = time.process_time()
    plan = make_plan(problem, PlanRequest(catalog=catalog, deadline_s=DEADLINE_S, error_bars=False))
    outcome.cpu_s = time.process_time() - began
    outcome.status, outcome.usd_per_hour, outcome.bound = plan.status, plan.objective, plan.bound
    whole = plan.status in ("optimal", "feasible")
    # A plan that the deadline left without a simulation promises nothing.
    if not whole or not plan.promises or not all(one.is_kept for one in plan.promises):
        return outcome
    runs = [kept_by_service(plan, problem, services, catalog, seed) for seed in _SEEDS]
    for name, fields in services.items():
        share = float(np.mean([run[name] for run in runs]))
        target = float(str(fields["attainment"]).rstrip("%")) / 100.0
        if share < target - _SLACK:
            outcome.fault("sharer_below", f"{name} keeps {share:.1%} of {target:.0%}")
    return outcome


def kept_by_service(
    plan: Plan, problem: Problem, services: Mapping[str, Fields], catalog: Catalog, seed: int
) -> dict[str, float]:
    """Return the share of each service's requests that keep its own promises, on arrivals drawn here."""
    names = list(services)
    rates = [_number(fields["rate"]) for fields in services.values()]
    seconds = max(300.0, min(_REQUESTS / min(rates), _MOST_REQUESTS / sum(rates)))
    settled = problem.settled(plan.mixes)
    placed = [service.name for service in settled.services]
    shares = {mix.name: mix.shares for mix in plan.mixes}
    rng = np.random.default_rng([seed, 7])
    columns: list[np.ndarray] = []
    for number, (name, rate) in enumerate(zip(names, rates, strict=True)):
        came = np.cumsum(rng.exponential(1.0 / rate, int(rate * seconds * 1.2) + 50))
        came = came[came < seconds]
        ways = shares.get(name, {name: 1.0})
        taken = rng.choice(
            [placed.index(way) for way in ways], len(came), p=np.array(list(ways.values()))
        )
        lengths = services[name]["lengths"]
        assert isinstance(lengths, dict)
        prompts, answers = (
            _lengths(rng, lengths[side], lengths[f"{side}_cv"], len(came))
            for side in ("input", "output")
        )
        columns.append(np.stack([came, taken, np.full(len(came), number), prompts, answers]))
    arrival, way, who, prompts, answers = np.concatenate(columns, axis=1)
    order = np.argsort(arrival, kind="stable")
    requests = Requests(
        arrival[order],
        way[order].astype(np.int16),
        who[order].astype(np.int16),
        prompts[order].astype(np.int32),
        answers[order].astype(np.int32),
        tuple(placed),
        # What the simulator takes for classes only says here whose request it is.
        tuple(f"text (from {name})" for name in names),
    )
    found = simulate(plan, settled, catalog, requests, SimOptions(seed=seed)).requests
    counted = found.judged & (found.arrival_s > _WARM_SHARE * seconds)
    kept = {}
    for number, (name, fields) in enumerate(services.items()):
        mine = counted & (found.klass == number)
        first = found.ttft_s[mine] <= _number(fields["ttft"])
        later = found.tpot_s[mine] <= _number(fields["tpot"])
        kept[name] = float((first & later).mean()) if mine.any() else 0.0
    return kept


def _number(text: object) -> float:
    return float(str(text).removesuffix("/s").removesuffix("s"))


def _lengths(rng: np.random.Generator, mean: float, cv: float, number: int) -> np.ndarray:
    """Log-normal lengths in whole tokens."""
    square = math.log1p(cv * cv)
    drawn = np.exp(math.log(mean) - square / 2 + math.sqrt(square) * rng.standard_normal(number))
    return np.maximum(1, np.rint(drawn))
