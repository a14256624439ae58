"""Random small fleets that must survive losses, planned and held against all fleets there are.

Capacities are those of single machines and slices on every engine and in every split (`promise_rivals`), and
`tests/reference/loss_enumeration.py` tries all fleets of them below a plan's price: it shares no code with
the solvers. The promised plan is then simulated with each of its machines, or places, lost.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.ids import Phase
from atoll.plan.files.fleet_file import build_problem
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.prove.planning import plan as make_plan
from atoll.sim.api import simulate
from atoll.sim.problem_demand import demand_of
from atoll.sim.sim_options import Failure, SimOptions
from atoll.solve.plan_request import PlanRequest
from atoll.workload.requests import collect
from tests.reference.loss_enumeration import (
    BOTH,
    DECODE,
    PREFILL,
    Lost,
    MachineOffer,
    cheapest,
    fill,
    survives,
)
from tests.slow.plans.case_runs import Draw
from tests.slow.plans.promise_fleets import GPUS, MODELS
from tests.slow.plans.promise_rivals import Yard
from tests.slow.plans.survive_outcome import CHEAPER, DEADLINE_S, Outcome

_PHASES = {Phase.PREFILL: PREFILL, Phase.DECODE: DECODE, Phase.BOTH: BOTH}
_PLACES = ("r/a", "r/b")
_SAME = 1e-6
_LOST_S, _WINDOW_S = 60.0, 300.0
"""When a machine is lost, and how long is simulated."""
_SEEDS = (8_001, 8_002)
_SLACK = 0.01
"""Share below the target from which on a promise counts as broken after a loss."""
_MOST_PER_S = 40.0
Fields = dict[str, object]
Machine = tuple[str, ...]


def make_fleet(seed: int) -> Problem:
    """Return the fleet of a seed: one or two services, two or three offers in one or two places."""
    draw = Draw(41, seed)
    places = _PLACES[: draw.pick((1, 2), (0.6, 0.4))]
    offers: list[Fields] = []
    for _ in range(draw.pick((2, 3), (0.4, 0.6)) + len(places) - 1):
        gpu, number = draw.pick(tuple(GPUS)), draw.pick((1, 2, 4), (0.5, 0.2, 0.3))
        offers.append(
            {
                "region": draw.pick(places),
                "node_type": f"{gpu}:{number}",
                "available": draw.pick((2, 3, 4, 6)),
                "usd_per_hour": round(GPUS[gpu] * number * draw.between(0.7, 1.4), 2),
                "whole": draw.chance(0.3),
            }
        )
    offers = list({(o["region"], o["node_type"]): o for o in offers}.values())
    services: dict[str, Fields] = {
        f"s{index}": {
            "model": draw.pick(MODELS),
            "ttft": f"{draw.between(0.8, 5.0)}s",
            "tpot": f"{draw.between(0.05, 0.3)}s",
            "rate": "1/s",
            "lengths": {
                "input": int(draw.between(100, 2000)),
                "output": int(draw.between(40, 400)),
                "input_cv": draw.pick((0.0, 0.5)),
                "output_cv": draw.pick((0.0, 0.5)),
            },
            # Nothing is handed over between places here, so that everything can be counted out.
            "phases": "together" if len(places) > 1 else draw.pick(("auto", "together", "apart")),
        }
        for index in range(draw.pick((1, 2), (0.6, 0.4)))
    }
    survive: object = 1
    sort = draw.rng.random()
    if len(places) > 1 and sort < 0.5:
        survive = {"zones": 1}
    elif sort < 0.65:
        survive = {"machines": 1, "keep": f"{draw.pick((50, 80))}%"}
    elif sort < 0.75 and len(services) > 1:
        survive = {"machines": 1, "services": ["s0"]}
    elif sort < 0.82:
        survive = {"machines": 2}
    asked = build_problem(
        {
            "name": f"survive-{seed}",
            "services": services,
            "pool": {"offers": offers},
            "settings": {"max_nodes_per_instance": 1, "engines": ["vllm"]},
            "limits": {"survive": survive},
        }
    )
    return sized(asked, draw)


def _plain(problem: Problem) -> Problem:
    """The fleet that need not survive anything: a piece alone never does."""
    return problem.replace(limits=problem.limits.model_copy(update={"survive": 0}))


def sized(problem: Problem, draw: Draw) -> Problem:
    """Return the fleet with rates that take a machine or two of some sort."""
    yard = Yard(_plain(problem), problem.catalog())
    services = []
    for service in problem.services:
        carried: dict[object, float] = defaultdict(float)
        for piece in yard.pieces[service.name]:
            key = (piece.slices[0].offer, piece.slices[0].gpus, piece.role.phase)
            rate = piece.per_s / service.demand(piece.role)
            carried[key] = max(carried[key], rate)
        rates = sorted(rate for rate in carried.values() if rate > 0.0)
        scale = draw.between(0.3, 1.8)
        rate = rates[int(draw.rng.integers(len(rates)))] * scale if rates else 1.0
        services.append(
            service.model_copy(update={"rate_per_s": min(_MOST_PER_S, float(f"{rate:.3g}"))})
        )
    return problem.replace(services=tuple(services))


def offers_of(problem: Problem, catalog: Catalog) -> tuple[list[MachineOffer], int]:
    """Return the machines on offer with what each may carry, and how many places there are."""
    yard = Yard(_plain(problem), catalog)
    shape = (len(problem.services), 3)
    found = []
    for offer in problem.offers:
        best: dict[tuple[int, int, int], float] = defaultdict(float)
        for m, service in enumerate(problem.services):
            for piece in yard.pieces[service.name]:
                (one,) = piece.slices
                if one.offer == offer.key:
                    key = (one.gpus, m, _PHASES[piece.role.phase])
                    best[key] = max(best[key], piece.per_s / service.demand(piece.role))
        pieces = [(*key, min(1.0, share)) for key, share in best.items()]
        place = problem.regions.index(offer.region)
        fillings = fill(offer.gpus, pieces, shape)
        found.append(MachineOffer(place, offer.usd_per_hour, offer.available, fillings))
    return found, len(problem.regions)


def lost_of(problem: Problem) -> Lost:
    """Return what must be survived, for the enumeration; places here are all of one region."""
    asked = problem.limits.survival
    names = [service.name for service in problem.services]
    own = frozenset(names.index(name) for name in asked.services) if asked.services else None
    return Lost(asked.machines, asked.zones, asked.keep, own)


def machines_of(plan: Plan) -> dict[Machine, list[tuple[str, str]]]:
    """Return the machines of a plan with the nodes on each, by instance and node."""
    found: dict[Machine, list[tuple[str, str]]] = defaultdict(list)
    for instance in plan.instances:
        for node in instance.nodes:
            own = str(node.slot) if node.gpu_ids is not None else f"{instance.id} {node.id}"
            key = (instance.region, node.node_type, node.market, own)
            found[key].append((instance.id, node.id))
    return dict(found)


def stands(plan: Plan, problem: Problem) -> bool:
    """Return whether a plan survives by what its instances are said to carry, counted out by itself."""
    names = [service.name for service in problem.services]
    instances = {instance.id: instance for instance in plan.instances}
    offers = []
    for (place, *_), nodes in machines_of(plan).items():
        carried = np.zeros((len(names), 3))
        for name, _ in nodes:
            one = instances[name]
            share = one.throughput_per_s / problem.demand(one.role)
            carried[names.index(one.service), _PHASES[one.phase]] += share
        offers.append(MachineOffer(problem.regions.index(place), 0.0, 1, (carried,)))
    fleet = [(n, 0) for n in range(len(offers))]
    return bool(offers) and survives(offers, fleet, lost_of(problem), len(problem.regions))


def run_case(seed: int) -> Outcome:
    """Plan the fleet of a seed by capacity and with promises, and hold both against what is found."""
    problem = make_fleet(seed)
    catalog = problem.catalog()
    outcome = Outcome(seed, "loss")
    request = PlanRequest(catalog=catalog, deadline_s=DEADLINE_S, error_bars=False)
    plan = make_plan(
        problem, PlanRequest(catalog=catalog, deadline_s=DEADLINE_S, capacity_only=True)
    )
    outcome.status, outcome.usd_per_hour, outcome.bound = plan.status, plan.objective, plan.bound
    _check_capacity(plan, problem, catalog, outcome)
    began = time.process_time()
    cheap = make_plan(_plain(problem), request)
    outcome.plain_cpu_s = time.process_time() - began
    began = time.process_time()
    promised = make_plan(problem, request)
    outcome.cpu_s = time.process_time() - began
    whole = ("optimal", "feasible")
    if promised.status in whole and all(promise.is_kept for promise in promised.promises):
        _check_kept(promised, problem, catalog, outcome)
        if cheap.status in whole and cheap.usd_per_hour > 0.0:
            outcome.price = promised.usd_per_hour / cheap.usd_per_hour - 1.0
    return outcome


def _check_capacity(plan: Plan, problem: Problem, catalog: Catalog, outcome: Outcome) -> None:
    whole = plan.status in ("optimal", "feasible")
    if whole and not stands(plan, problem):
        outcome.fault("does_not_survive", f"${plan.usd_per_hour:.2f}/h by capacity does not")
    offers, places = offers_of(problem, catalog)
    if not any(offer.fillings for offer in offers):
        if whole:
            outcome.fault("dearer", "nothing was found to compare with")
        return
    under = plan.usd_per_hour * (1.0 - _SAME) if whole else float("inf")
    best, outcome.enumerated = cheapest(
        offers, lost_of(problem), places, under=under, most_machines=10, most_fleets=6_000
    )
    if best is None:
        return
    said = f"{len(best.machines)} machines for ${best.usd:.3f}/h survive by capacity"
    if not whole:
        outcome.fault("refused_wrongly", f"{plan.status}, yet {said}")
        return
    if best.usd < plan.usd_per_hour * (1.0 - CHEAPER):
        outcome.fault("dearer", f"${plan.usd_per_hour:.3f}/h planned, {said}")
    if plan.bound is not None and plan.bound > best.usd * (1.0 + _SAME):
        outcome.fault("bound_false", f"bound ${plan.bound:.3f}/h, {said}")


def _check_kept(plan: Plan, problem: Problem, catalog: Catalog, outcome: Outcome) -> None:
    """Simulate every loss of the promised plan on arrivals that it was not sized with."""
    survival = problem.limits.survival
    fewer = problem.replace(
        services=tuple(
            one.model_copy(update={"rate_per_s": one.rate_per_s * survival.keep})
            for one in problem.services
        )
    )
    if not stands(plan, problem):
        outcome.fault("does_not_survive", f"${plan.usd_per_hour:.2f}/h with promises does not")
    for name, nodes in _losses(plan, problem):
        failures = tuple(Failure(_LOST_S, instance=i, node=node) for i, node in nodes)
        kept: dict[str, list[float]] = defaultdict(list)
        for seed in _SEEDS:
            arrivals = collect(demand_of(fewer, _WINDOW_S), seed)
            options = SimOptions(seed=seed, from_s=_LOST_S, failures=failures)
            for one in simulate(plan, fewer, catalog, arrivals, options).services:
                kept[one.name].append(one.attainment or 0.0)
        for service in problem.services:
            share = float(np.mean(kept[service.name] or [0.0]))
            if survival.covers(service.name) and share < service.target - _SLACK:
                text = f"{service.name} keeps {share:.1%} of {service.target:.0%} without {name}"
                outcome.fault("does_not_survive", text)


def _losses(plan: Plan, problem: Problem) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each machine, or place, with its nodes; of two machines at once the pairs that are neighbours."""
    machines = machines_of(plan)
    if problem.limits.survival.zones:
        for place in sorted({key[0] for key in machines}):
            yield place, [node for key, own in machines.items() if key[0] == place for node in own]
        return
    names, number = sorted(machines), problem.limits.survival.machines
    for at in range(len(names)):
        some = [names[(at + step) % len(names)] for step in range(min(number, len(names)))]
        yield " and ".join(map(" ".join, some)), [node for key in some for node in machines[key]]
