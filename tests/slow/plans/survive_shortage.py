"""Random fleets that are too small for their demand, with shared ways and choices: who is served worst.

What single machines and slices carry is counted out (`promise_rivals`), and `tests/reference/shortage_ilp.py`
says the largest share of all demand that they serve at once: it shares no code with the solvers.
"""

from __future__ import annotations

import time

from atoll.catalog.catalog import Catalog
from atoll.plan.files.fleet_file import build_problem
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.prove.planning import plan as make_plan
from atoll.solve.plan_request import PlanRequest
from tests.reference.shortage_ilp import ShortChoice, ShortPiece, most_served
from tests.slow.plans.case_runs import Draw
from tests.slow.plans.promise_fleets import GPUS
from tests.slow.plans.promise_rivals import Yard
from tests.slow.plans.survive_losses import Fields
from tests.slow.plans.survive_outcome import DEADLINE_S, Outcome

_MODELS = ("llama-3.2-3b", "llama-3.1-8b", "phi-4-14b", "qwen3-32b")
_SLACK = 2e-3
"""Share by which the worst-served may be served less."""


def make_fleet(seed: int) -> Problem:
    """Return the fleet of a seed: two to four services, some with a choice, on machines for half of them."""
    draw = Draw(41, seed + 2_000_000)
    first, phases = draw.pick(_MODELS[:3]), draw.pick(("together", "auto", "apart"))
    services: dict[str, Fields] = {}
    for index in range(draw.pick((2, 3, 4), (0.4, 0.4, 0.2))):
        asked: Fields = {
            "ttft": f"{draw.between(0.8, 4.0)}s",
            "tpot": f"{draw.between(0.06, 0.25)}s",
            "rate": f"{draw.between(5.0, 300.0)}/s",
            "lengths": {
                "input": int(draw.between(80, 1500)),
                "output": int(draw.between(20, 200)),
                "input_cv": 0.5,
                "output_cv": 0.5,
            },
            "phases": phases,
        }
        if draw.chance(0.4):
            other = draw.pick(tuple(name for name in _MODELS if name != first))
            errors = sorted((draw.between(1.0, 9.0), draw.between(1.0, 9.0)))
            asked["models"] = [
                {"model": first, "error": f"{errors[1]}%"},
                {"model": other, "error": f"{errors[0]}%"},
            ]
            asked["max_error"] = (
                f"{errors[0] + (errors[1] - errors[0]) * draw.pick((0.3, 0.7)):.4g}%"
            )
        else:
            asked["model"] = first
        services[f"s{index}"] = asked
    gpus = draw.rng.permutation(list(GPUS))[:2]
    offers = [
        {
            "region": "r/a",
            "node_type": f"{gpu}:{draw.pick((1, 2), (0.6, 0.4))}",
            "available": draw.pick((1, 2), (0.7, 0.3)),
            "usd_per_hour": GPUS[gpu],
        }
        for gpu in map(str, gpus)
    ]
    return build_problem(
        {
            "name": f"shortage-{seed}",
            "services": services,
            "pool": {"offers": offers},
            "settings": {"max_nodes_per_instance": 1, "engines": ["vllm"]},
            "share_instances": True,
        }
    )


def most_of(problem: Problem, catalog: Catalog) -> float:
    """Return the largest share of all demand that single machines and slices serve at once."""
    number = {service.name: at for at, service in enumerate(problem.services)}
    place = {offer.key: at for at, offer in enumerate(problem.offers)}
    best: dict[tuple[int, int, int, str], float] = {}
    for name, pieces in Yard(problem, catalog).pieces.items():
        for piece in pieces:
            (one,) = piece.slices
            share = piece.per_s / problem.service(name).demand(piece.role)
            key = (number[name], place[one.offer], one.gpus, str(piece.role.phase))
            best[key] = max(best.get(key, 0.0), share)
    choices = []
    for choice in problem.choices:
        floors = [
            (tuple(number[v.service] for v in choice.variants if v.model == model), share)
            for model, share in choice.min_share.items()
        ]
        ways = tuple(number[v.service] for v in choice.variants)
        errors = tuple(v.error for v in choice.variants)
        choices.append(ShortChoice(ways, errors, choice.max_error, tuple(floors)))
    gpus = [offer.available * offer.gpus for offer in problem.offers]
    every = [ShortPiece(*key, share) for key, share in best.items()]
    return most_served(every, gpus, choices, len(problem.services))


def worst_share(plan: Plan, problem: Problem) -> float:
    """Return the share of the demand of the worst-served service or choice that a plan serves."""
    mixes = {mix.name: mix.shares for mix in plan.mixes}
    return min(
        sum(
            share * plan.served_fraction.get(way, 1.0 if plan.instances else 0.0)
            for way, share in mixes.get(name, {name: 1.0}).items()
        )
        for name in problem.asked_names
    )


def run_case(seed: int) -> Outcome:
    """Plan the fleet of a seed by capacity, and hold its worst-served share against the largest there is."""
    problem = make_fleet(seed)
    catalog, outcome = problem.catalog(), Outcome(seed, "shortage")
    began = time.process_time()
    plan = make_plan(
        problem, PlanRequest(catalog=catalog, deadline_s=DEADLINE_S, capacity_only=True)
    )
    outcome.cpu_s = time.process_time() - began
    outcome.status, outcome.usd_per_hour = plan.status, plan.usd_per_hour
    served, best = worst_share(plan, problem), most_of(problem, catalog)
    if served < best - _SLACK:
        outcome.fault("shortage_below", f"the worst gets {served:.2%}, {best:.2%} is possible")
    return outcome
