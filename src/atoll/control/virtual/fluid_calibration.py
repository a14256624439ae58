"""From a fleet to what its virtual world needs: what templates carry, and what requests keep by load.

Both come from the event simulator, once. Templates are sized alone (`prove.sized_templates`). Then whole
plans of them are simulated at several sizes of the fleet: where too few requests of a service keep their
promises its templates are trimmed, until enough do. At last plans are simulated at several loads, which
gives the curves of the fluid model (`fluid`). Any-to-any services are another simulator's
(`executor_calibration`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atoll.control.decision.route_weights import spread_routes
from atoll.control.virtual.executor_planner import FleetPlanner
from atoll.control.virtual.fluid import FluidQueue, KeptCurve
from atoll.control.virtual.template_planner import TemplatePlanner
from atoll.core.errors import InfeasibleError
from atoll.core.rng import stream
from atoll.prove.graph_kept import plain_problem
from atoll.prove.sized_templates import (
    SizedTemplate,
    size_for_share,
    size_templates,
    trim_templates,
)

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem, Service
    from atoll.sim.sim_result import RequestColumns
    from atoll.workload.classes import RequestClass
    from atoll.workload.requests import Requests

Floats = NDArray[np.float64]
Say = Callable[[str], None]

SIZES = (0.6, 1.0, 1.8)
"""Sizes of the fleet at which whole plans are simulated, as multiples of its rates."""
LOADS = (0.5, 0.7, 0.85, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5)
"""Loads at which the curves are simulated."""
SIMULATED_S = 600.0
"""Seconds that a trial simulates."""
WARM_S = 60.0
"""Seconds at its start that do not count: queues fill."""
OVERLOAD_FACTOR = 3.0
TRIM_FACTOR = 0.96
"""Capacity of templates after a trial in which too few requests kept their promises, relative to before."""
MAX_TRIM_TRIALS = 8
RUNS_PER_LOAD = 3
"""Simulations of every load."""


@dataclass(frozen=True)
class CalibratedFleet:
    """A fleet with what its templates and executors carry, and the curves of its services and classes."""

    problem: Problem
    planner: TemplatePlanner | FleetPlanner
    curves: Mapping[str, KeptCurve]


def calibrate_fleet(
    problem: Problem, catalog: Catalog, *, seed: int = 0, say: Say = lambda _text: None
) -> CalibratedFleet:
    """Return what a virtual world of a fleet needs; see the module's text."""
    if not problem.graph_services:
        return _calibrate_plain(problem, catalog, seed, say)
    from atoll.control.virtual.executor_calibration import calibrate_executors

    plain = plain_problem(problem)
    alone = None if plain is None else _calibrate_plain(plain, catalog, seed, say)
    curves = dict({} if alone is None else alone.curves)
    known = {}
    for service in problem.graph_services:
        found = calibrate_executors(problem, service, catalog, seed=seed, say=say)
        known[service.name] = found.known
        curves |= found.curves
    templates = None
    if alone is not None:
        templates = TemplatePlanner(catalog, alone.planner.templates)
    return CalibratedFleet(problem, FleetPlanner(catalog, templates, known), curves)


def _calibrate_plain(problem: Problem, catalog: Catalog, seed: int, say: Say) -> CalibratedFleet:
    from atoll.core.compiling import compile_entries
    from atoll.sim import event_loop as loop

    compile_entries(loop.__name__)
    say("sizing templates")
    templates = size_templates(problem, catalog, seed=seed)
    planner = TemplatePlanner(catalog, templates)
    served = planner(size_for_share(problem))
    if not served.instances:
        why = "; ".join(served.reasons[:2]) or "no template keeps its promises"
        raise InfeasibleError(f"nothing can be operated: {why}")
    templates = _trim(problem, catalog, templates, seed, say)
    planner = TemplatePlanner(catalog, templates)
    say("simulating loads")
    curves = find_curves(problem, catalog, planner, seed=seed)
    return CalibratedFleet(problem, planner, curves)


def _trim(
    problem: Problem, catalog: Catalog, templates: tuple[SizedTemplate, ...], seed: int, say: Say
) -> tuple[SizedTemplate, ...]:
    """Return templates carrying so little that whole plans keep their promises at every size."""
    targets = {service.name: service.attainment for service in problem.services}
    for trial in range(MAX_TRIM_TRIALS):
        planner = TemplatePlanner(catalog, templates)
        worst = dict.fromkeys(targets, 1.0)
        for size in SIZES:
            asked = scale_rates(problem, dict.fromkeys(targets, size))
            plan = planner(size_for_share(asked))
            # At all that it carries: what is to spare must not hide what is lost.
            full = carried_requests(asked, plan)
            kept = simulate_rates(
                problem, catalog, plan, {name: (rate,) for name, rate in full.items()}, seed=seed
            )
            worst = {name: min(worst[name], kept.get(name, 1.0)) for name in worst}
        short = {name: TRIM_FACTOR for name, kept in worst.items() if kept < targets[name]}
        text = ", ".join(f"{name} {kept:.1%}" for name, kept in sorted(worst.items()))
        say(f"whole plans, trial {trial}: {text}")
        if not short:
            break
        templates = trim_templates(templates, short)
    return templates


def scale_rates(problem: Problem, factors: Mapping[str, float]) -> Problem:
    """Return the problem with other rates, by factor."""
    return problem.replace(
        services=tuple(
            s.model_copy(update={"rate_per_s": s.rate_per_s * factors.get(s.name, 1.0)})
            for s in problem.services
        )
    )


def carried_requests(problem: Problem, plan: Plan) -> dict[str, float]:
    """Return the requests/s that a plan carries of each service."""
    from atoll.control.decision.lane_capacity import CarriedLoad

    names = frozenset(service.name for service in problem.services)
    return dict(CarriedLoad(problem, names, plan.instances).lanes())


def find_curves(
    problem: Problem, catalog: Catalog, planner: TemplatePlanner, *, seed: int = 0
) -> dict[str, KeptCurve]:
    """Return the curves of all services, simulated on the plan for the fleet's own rates."""
    plan = planner(size_for_share(problem))
    full = carried_requests(problem, plan)
    shares: dict[str, list[float]] = {name: [] for name in full}
    for load in LOADS:
        rates = {name: (load * c,) for name, c in full.items()}
        runs = [
            simulate_rates(problem, catalog, plan, rates, seed=seed + 1 + k)
            for k in range(RUNS_PER_LOAD)
        ]
        for name in full:
            shares[name].append(float(np.mean([kept.get(name, 1.0) for kept in runs])))
    most = _measure_most(problem, catalog, plan, full, seed)
    curves = {}
    for name, some in shares.items():
        falling = np.minimum.accumulate(np.array(some))
        stretch = max(1.0, most[name] / full[name]) if full[name] > 0.0 else 1.0
        # Beyond what is finished a queue grows: those loads are for the queue to tell.
        use = [i for i, load in enumerate(LOADS) if load <= max(stretch, 1.0)]
        loads = tuple(LOADS[i] for i in use)
        curves[name] = KeptCurve(loads, tuple(float(falling[i]) for i in use), stretch)
    return curves


def _measure_most(
    problem: Problem, catalog: Catalog, plan: Plan, full: Mapping[str, float], seed: int
) -> dict[str, float]:
    """Return the requests/s that a plan finishes when far more are asked."""
    rates = {name: (OVERLOAD_FACTOR * rate,) for name, rate in full.items()}
    columns, seconds = _simulate(problem, catalog, plan, rates, SIMULATED_S, seed)
    ends = columns.arrival_s + columns.e2e_s
    found = {}
    for at, service in enumerate(problem.services):
        mine = (columns.service == at) & np.isfinite(ends)
        inside = mine & (ends >= 0.5 * seconds) & (ends < seconds)
        found[service.name] = float(inside.sum()) / (0.5 * seconds)
    return found


def simulate_rates(
    problem: Problem,
    catalog: Catalog,
    plan: Plan,
    rates: Mapping[str, Sequence[float]],
    *,
    seconds: float = SIMULATED_S,
    warm_s: float = WARM_S,
    seed: int = 0,
) -> dict[str, float]:
    """Return which share of each service's requests keeps its promises, by event simulation.

    `rates` are requests/s in equal parts of the time; those that come in the first `warm_s` do not count.
    """
    columns, _ = _simulate(problem, catalog, plan, rates, seconds, seed)
    kept = {}
    for at, service in enumerate(problem.services):
        mine = (columns.service == at) & (columns.arrival_s >= warm_s)
        if mine.any():
            met = columns.met_ttft[mine] & columns.met_tpot[mine]
            kept[service.name] = float(met.mean())
    return kept


def open_queue(service: Service, curve: KeptCurve, klass: RequestClass | None = None) -> FluidQueue:
    """Return the queue of a service, or of one class of it, with the time of its answers as lag."""
    if klass is None:
        return FluidQueue(curve, service.ttft_s, service.lengths.output_mean * service.tpot_s)
    soon_s = klass.ttft_s or klass.image_s or service.ttft_s
    wrote_s = klass.output_tokens * (klass.tpot_s or service.tpot_s)
    return FluidQueue(curve, soon_s, max(wrote_s, klass.speech_s or 0.0, klass.image_s or 0.0))


def _simulate(
    problem: Problem,
    catalog: Catalog,
    plan: Plan,
    rates: Mapping[str, Sequence[float]],
    seconds: float,
    seed: int,
) -> tuple[RequestColumns, float]:
    from atoll.sim.api import simulate
    from atoll.sim.sim_options import SimOptions

    routes = spread_routes(problem, plan.instances, ())
    routed = plan.model_copy(update={"routes": routes})
    requests = _draw(problem, rates, seconds, seed)
    options = SimOptions(seed=seed, turns=False)
    report = simulate(routed, problem, catalog, requests, options)
    return report.requests, seconds


def _draw(
    problem: Problem, rates: Mapping[str, Sequence[float]], seconds: float, seed: int
) -> Requests:
    """Return Poisson arrivals whose rate changes from part to part, with the lengths of services."""
    from atoll.workload.builtin import lengths_like
    from atoll.workload.requests import Requests

    arrivals, models, prompts, answers = [], [], [], []
    names = tuple(service.name for service in problem.services)
    for at, service in enumerate(problem.services):
        luck = stream(seed, "virtual windows", service.name)
        own = np.asarray(rates.get(service.name, (0.0,)), np.float64)
        due = np.concatenate(([0.0], np.cumsum(own * (seconds / len(own)))))
        edges = np.linspace(0.0, seconds, len(own) + 1)
        number = math.ceil(due[-1] + 10.0 * math.sqrt(due[-1] + 1.0))
        marks = np.cumsum(luck.standard_exponential(number))
        marks = marks[marks < due[-1]]
        came = np.interp(marks, due, edges)
        drawn = lengths_like(service.lengths.mix()).draw(luck, len(came))
        arrivals.append(came)
        models.append(np.full(len(came), at, np.int16))
        prompts.append(drawn[0])
        answers.append(drawn[1])
    arrival = np.concatenate(arrivals)
    order = np.argsort(arrival, kind="stable")
    return Requests(
        arrival[order],
        np.concatenate(models)[order],
        np.zeros(len(order), np.int16),
        np.concatenate(prompts)[order].astype(np.int32),
        np.concatenate(answers)[order].astype(np.int32),
        names,
    )
