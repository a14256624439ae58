"""Random any-to-any services on slow links, planned by capacity, and held against plans written down here.

All plans of at most three executors (`promise_executors`), and the plan with one of them changed, are written
down without a solver and checked by `plan.validate`, which charges every transfer on the way it takes. One
more machine on offer, with a slow interface and dear, must change nothing.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict

from atoll.catalog.catalog import Catalog
from atoll.plan.files.fleet_file import build_problem
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.prove.planning import plan as make_plan
from atoll.solve.plan_request import PlanRequest
from tests.slow.plans.case_runs import Draw
from tests.slow.plans.promise_executors import list_executor_rivals
from tests.slow.plans.promise_fleets import GPUS
from tests.slow.plans.promise_rivals import Rival
from tests.slow.plans.survive_losses import Fields
from tests.slow.plans.survive_outcome import CHEAPER, DEADLINE_S, Outcome

_SLOW = "A100-80:1"
"""Offered beside the others with a slow interface."""
_SAME = 1e-6
_GAP = 1e-3
"""Share by which plans may differ that are both proven."""


def make_fleet(seed: int, *, slow_offer: bool = False) -> Problem:
    """Return the fleet of a seed: one service, two sorts of machines, links of 0.3 to 50 Gbit/s."""
    draw = Draw(41, seed + 3_000_000)
    model = draw.pick(("qwen2.5-vl-7b", "qwen2.5-omni-7b"), (0.7, 0.3))
    image: Fields = {
        "share": "100%",
        "input": int(draw.between(100, 600)),
        "output": int(draw.between(40, 250)),
        "images": {"count": draw.pick((1, 2, 4)), "size": draw.pick(("1280x720", "1680x1050"))},
    }
    offers: list[Fields] = []
    for gpu in map(str, draw.rng.permutation(["L4", "A10G", "L40S", "A100-40"])[:2]):
        number = draw.pick((1, 2, 4), (0.4, 0.4, 0.2))
        offers.append(
            {
                "region": "r/a",
                "node_type": f"{gpu}:{number}",
                "available": draw.pick((2, 4, 6)),
                "usd_per_hour": round(GPUS[gpu] * number * draw.between(0.7, 1.4), 2),
            }
        )
    service: Fields = {
        "model": model,
        "rate": f"{draw.between(0.3, 4.0)}/s",
        "ttft": f"{draw.between(1.0, 5.0)}s",
        "tpot": f"{draw.between(0.06, 0.2)}s",
        "classes": {"image+text": image},
    }
    links: Fields = {
        "in_region": {"bandwidth": f"{draw.between(0.3, 50.0)}Gbit/s", "latency": "60us"}
    }
    if slow_offer:
        offers.append({"region": "r/a", "node_type": _SLOW, "available": 4, "usd_per_hour": 30.0})
        links["nics"] = {_SLOW: "100Mbit/s"}
    return build_problem(
        {
            "name": f"links-{seed}",
            "services": {"look": service},
            "pool": {"offers": offers},
            "settings": {"max_nodes_per_instance": 1},
            "catalog": {"links": links},
        }
    )


def as_stated(plan: Plan, problem: Problem) -> Plan:
    """Return a plan whose executors state what its paths send them, in requests/s."""
    sent: dict[str, float] = defaultdict(float)
    for path in plan.paths:
        service = problem.service(path.service)
        rate = service.demand_per_s * service.klass(path.klass).share * path.share
        shares: dict[str, float] = {}
        for step in path.steps:
            shares |= step.instances
        for name, share in shares.items():
            sent[name] += rate * share
    instances = tuple(
        one.model_copy(update={"throughput_per_s": sent[one.id]}) for one in plan.instances
    )
    return plan.model_copy(update={"instances": instances})


def find_cheapest(plan: Plan, problem: Problem, catalog: Catalog, under: float) -> Rival | None:
    """Return the cheapest plan below a price that was written down and that nothing is wrong with."""
    best: Rival | None = None
    for rival in list_executor_rivals(problem, catalog, plan, under):
        if best is not None and rival.usd_per_hour >= best.usd_per_hour:
            continue
        if not validate(as_stated(rival.plan, problem), problem, catalog):
            best = rival
    return best


def run_case(seed: int) -> Outcome:
    """Plan the fleet of a seed and hold it against what is written down."""
    problem = make_fleet(seed)
    catalog, outcome = problem.catalog(), Outcome(seed, "link")
    request = PlanRequest(catalog=catalog, deadline_s=DEADLINE_S, capacity_only=True)
    began = time.process_time()
    plan = make_plan(problem, request)
    outcome.cpu_s = time.process_time() - began
    outcome.status, outcome.usd_per_hour, outcome.bound = plan.status, plan.objective, plan.bound
    for wrong in validate(plan, problem, catalog)[:1]:
        outcome.fault("link_false", f"the plan is not valid: {wrong}")
    whole = plan.status in ("optimal", "feasible")
    best = find_cheapest(plan, problem, catalog, plan.usd_per_hour if whole else math.inf)
    if best is not None:
        said = f"${best.usd_per_hour:.3f}/h serves all: {best.in_words}"
        if not whole:
            outcome.fault("link_false", f"{plan.status}, yet {said}")
        elif best.usd_per_hour < plan.usd_per_hour * (1.0 - CHEAPER):
            outcome.fault("link_false", f"${plan.usd_per_hour:.3f}/h planned, {said}")
        if whole and plan.bound is not None and plan.bound > best.usd_per_hour * (1.0 + _SAME):
            outcome.fault("link_false", f"bound ${plan.bound:.3f}/h, {said}")
    wider = make_fleet(seed, slow_offer=True)
    more = make_plan(
        wider, PlanRequest(catalog=wider.catalog(), deadline_s=DEADLINE_S, capacity_only=True)
    )
    if whole and more.status not in ("optimal", "feasible"):
        outcome.fault("link_false", f"{more.status} with one more machine on offer")
    elif whole and more.usd_per_hour > plan.usd_per_hour * (1.0 + CHEAPER + _GAP):
        text = f"${more.usd_per_hour:.3f}/h with one more machine on offer"
        outcome.fault("link_false", f"${plan.usd_per_hour:.3f}/h planned, {text}")
    return outcome
