"""A toy of renting: so simple that its optimum is found by trying everything, and a solver that errs.

Every GPU carries so many requests/s, by its type and by how loose the promise is; a machine that must stay
whole carries one service and no more than twice what one of its GPUs does; phases that run apart need twice
as much. Plans have the form of real ones, but only the toy's own rules hold for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.ids import parse_node_type
from atoll.plan.plan import Instance, Node, Plan, Route
from atoll.plan.problem import Lengths, Limits, Offer, Problem, Service, Settings
from atoll.solve.effort import Effort
from atoll.solve.explain.changes import soft
from atoll.solve.explain.planning_again import AskSolver, Planner, SolvedProblem

PER_GPU = {"L4": 1.0, "T4": 0.4, "L40S": 2.5, "A100-40": 1.5}
LENGTHS = Lengths(input_mean=100, output_mean=10, input_mean_square=1e4, output_mean_square=1e2)
_MAX_SLOTS = 4


@cache
def catalog() -> Catalog:
    return Catalog.default()


def service(name: str, rate: float, **fields: object) -> Service:
    given = {"ttft_s": 1.0, "tpot_s": 0.1, "lengths": LENGTHS, "phases": "auto", **fields}
    return Service.model_validate(
        {"name": name, "model": "llama-3.1-8b", "rate_per_s": rate, **given}
    )


def offer(kind: str, available: int, usd: float, **fields: object) -> Offer:
    given = {"region": "east", "node_type": kind, "available": available, "usd_per_hour": usd}
    return Offer.model_validate({**given, **fields})


def problem(
    services: tuple[Service, ...], offers: tuple[Offer, ...], limits: Limits | None = None
) -> Problem:
    return Problem(
        name="toy",
        services=services,
        offers=offers,
        limits=limits or Limits(),
        settings=Settings(on_shortage="fraction"),
    )


def _rate(asked: Service, own: Offer) -> float:
    """Requests/s of one service on one slot of an offer: a GPU, or a whole machine."""
    if not asked.allows(own.node_type):
        return 0.0
    gpus = min(2, own.gpus) if own.whole else 1
    loose = min(4.0, math.sqrt(asked.ttft_s * asked.tpot_s * 10))
    return (
        PER_GPU[parse_node_type(own.node_type).gpu]
        * gpus
        * loose
        / (2.0 if asked.phases == "apart" else 1.0)
    )


def _slots(own: Offer) -> int:
    return own.available * (1 if own.whole else own.gpus)


Choice = tuple[tuple[int, ...], ...]
"""By offer, how many slots each service has."""


def _choices(asked: Problem) -> Iterator[Choice]:
    def of(own: Offer) -> list[tuple[int, ...]]:
        most = min(_slots(own), _MAX_SLOTS)
        numbers = product(range(most + 1), repeat=len(asked.services))
        return [n for n in numbers if sum(n) <= most]

    yield from product(*map(of, asked.offers))


def build(asked: Problem, choice: Choice) -> Plan:
    """Return the plan of a choice, with what it truly serves and costs."""
    instances: list[Instance] = []
    rates = dict.fromkeys((s.name for s in asked.services), 0.0)
    for own, numbers in zip(asked.offers, choice, strict=True):
        slot = 0
        for each, number in zip(asked.services, numbers, strict=True):
            for _ in range(number):
                whole = own.whole or own.gpus == 1
                node = Node(
                    id="n0",
                    node_type=own.node_type,
                    market=own.market,
                    start=0,
                    end=1,
                    tp=1,
                    slot=None if whole else slot // own.gpus,
                    gpu_ids=None if whole else (slot % own.gpus,),
                )
                slot += 1
                rates[each.name] += _rate(each, own)
                instances.append(
                    Instance(
                        id=f"i{len(instances)}",
                        service=each.name,
                        role=f"{each.name}/llm/both",
                        region=own.region,
                        stages=1,
                        nodes=(node,),
                        flows=(),
                        throughput_per_s=_rate(each, own),
                        usd_per_hour=own.usd_per_hour * node.share,
                    )
                )
    shares = {s.name: min(1.0, rates[s.name] / s.rate_per_s) for s in asked.services}
    draft = Plan(
        problem_hash="", problem_name="toy", instances=tuple(instances), usd_per_hour=0.0,
        status="partial", solver="toy",
    )  # fmt: skip
    price = {own.key: own.usd_per_hour for own in asked.offers}
    usd = sum(price[key] * count for key, count in draft.count_nodes().items())
    routes = tuple(
        Route(service=i.service, instances=(i.id,), share=i.throughput_per_s / rates[i.service])
        for i in instances
        if rates[i.service] > 0
    )
    full = min(shares.values()) >= 1.0
    return draft.model_copy(
        update={
            "routes": routes,
            "served_fraction": shares,
            "usd_per_hour": usd,
            "objective": usd,
            "status": "feasible" if full else "partial",
        }
    )


def holds(plan: Plan, asked: Problem, facts: Catalog | None = None) -> bool:
    """Whether a plan keeps the toy's rules: machines that are there, limits, slices only where allowed."""
    del facts
    limits = asked.limits
    for key, count in plan.count_nodes().items():
        own = asked.offer(*key)
        if own is None or count > own.available:
            return False
        if own.whole and any(
            n.gpu_ids is not None and n.node_type == key[1] for i in plan.instances for n in i.nodes
        ):
            return False
    budget, most = limits.budget_usd_per_hour, limits.max_nodes
    return (budget is None or plan.usd_per_hour <= budget + 1e-9) and (
        most is None or plan.nodes <= most
    )


Value = tuple[float, float, float]
"""The least share served, the mean share, and what it costs, less is better."""


def _evaluate(asked: Problem, choice: Choice) -> Value | None:
    """What a choice is worth; None if it breaks a limit."""
    rates = [0.0] * len(asked.services)
    usd, nodes = 0.0, 0
    for own, numbers in zip(asked.offers, choice, strict=True):
        machines = -(-sum(numbers) // (1 if own.whole else own.gpus))
        usd += machines * own.usd_per_hour
        nodes += machines
        for i, (each, number) in enumerate(zip(asked.services, numbers, strict=True)):
            rates[i] += number * _rate(each, own)
    budget, most = asked.limits.budget_usd_per_hour, asked.limits.max_nodes
    if (budget is not None and usd > budget + 1e-9) or (most is not None and nodes > most):
        return None
    pairs = zip(rates, asked.services, strict=True)
    shares = [min(1.0, rate / each.rate_per_s) for rate, each in pairs]
    return (round(min(shares), 9), round(sum(shares) / len(shares), 9), -round(usd, 9))


@cache
def _valued(text: str) -> tuple[tuple[Value, Choice], ...]:
    asked = Problem.from_json(text)
    found = ((_evaluate(asked, choice), choice) for choice in _choices(asked))
    return tuple((value, choice) for value, choice in found if value is not None)


def valued(asked: Problem) -> tuple[tuple[Value, Choice], ...]:
    """Every choice there is, with its worth; of an offer no more than could be of use."""
    few = asked.replace(
        offers=tuple(
            o.model_copy(update={"available": min(o.available, _MAX_SLOTS)}) for o in asked.offers
        )
    )
    return _valued(few.to_json())


def best_plan(asked: Problem) -> Plan:
    """The best plan of all."""
    best = build(asked, max(valued(asked))[1])
    if best.status == "feasible":
        return best.model_copy(update={"status": "optimal", "bound": best.objective, "gap": 0.0})
    return best


def any_plan(asked: Problem, seed: int) -> Plan:
    """Any plan, the same for the same seed and problem."""
    choices = valued(asked)
    mix = int(asked.content_hash()[:8], 16)
    index = int(np.random.default_rng([seed, mix]).integers(len(choices)))
    return build(asked, choices[index][1])


def exact(asked: Problem, effort: Effort, seconds: float) -> SolvedProblem:
    """Answer with the best plan, and prove it."""
    del effort, seconds
    plan = best_plan(asked)
    return SolvedProblem(plan, min(plan.served_fraction.values()))


def erratic(seed: int = 0) -> AskSolver:
    """Return a solver that answers with any plan, however bad."""

    def solve(asked: Problem, effort: Effort, seconds: float) -> SolvedProblem:
        del effort, seconds
        return SolvedProblem(any_plan(asked, seed))

    return solve


def planner(asked: Problem, solver: AskSolver = exact, max_plans: int = 1000) -> Planner:
    """A planner of toys."""
    return Planner(soft(asked), catalog(), solver, holds=holds, max_plans=max_plans)
