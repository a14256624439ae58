"""Simulate a plan, and plan with more headroom until its promises are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from atoll.core.errors import InfeasibleError, UsageError

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.sim.result import ServiceSummary

_REQUESTS = 20_000
"""Requests simulated per service that is asked least often, at most `_LONGEST_S` seconds of them."""
_SHORTEST_S = 600.0
_LONGEST_S = 3600.0
_STEP = 1.1
"""Factor by which headroom grows where a promise is broken."""
_ROUNDS = 12


def refuse_cluster(problem: Problem) -> None:
    """Refuse a fixed cluster: there are no more nodes to give it headroom with."""
    if problem.cluster is not None:
        raise UsageError("--verify is for rented fleets", hint="run `atoll simulate` on the plan")


def verify(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    solve: Callable[[Problem], Plan],
    attainment: float,
    *,
    say: Callable[[str], None] = lambda _text: None,
) -> Plan:
    """Return a plan for `problem` that keeps both promises for a share of every service's requests.

    The headroom of services that fall short grows by a tenth at a time. The bound stays the one proven for
    the problem as it was given: the gap says what keeping promises under queueing costs at most. `say` is
    told of progress.
    """
    refuse_cluster(problem)
    if plan.status not in ("optimal", "feasible"):
        return plan
    raised, found = problem, plan
    seen: Mapping[str, ServiceSummary] = {}
    for number in range(1, _ROUNDS + 1):
        say(f"verifying, round {number}: simulating")
        seen = simulate_services(found, problem, catalog)
        short = {name for name, own in seen.items() if (own.attainment or 0.0) < attainment}
        if not short:
            return _stamp(found, plan, problem, raised, seen)
        say(f"verifying, round {number}: more headroom for {', '.join(sorted(short))}")
        raised = _raise_headroom(raised, short)
        found = solve(raised)
        if found.status not in ("optimal", "feasible"):
            break
    raise InfeasibleError(_why(seen, attainment), hint=_hint(seen))


def _why(seen: Mapping[str, ServiceSummary], attainment: float) -> str:
    worst = min(seen.values(), key=lambda own: own.attainment or 0.0)
    return (
        f"{worst.name} keeps ttft for {worst.attainment_ttft or 0.0:.1%} and tpot for "
        f"{worst.attainment_tpot or 0.0:.1%} of requests, {attainment:.1%} should have both; "
        "more headroom does not help or cannot be had"
    )


def _hint(seen: Mapping[str, ServiceSummary]) -> str:
    worst = min(seen.values(), key=lambda own: own.attainment or 0.0)
    late = (worst.attainment_ttft or 0.0) < (worst.attainment_tpot or 0.0)
    if late:
        return (
            "long prompts take longer than ttft by themselves: loosen ttft, state input_tail, or lower "
            "--attainment"
        )
    return "loosen tpot, make more nodes available, or lower --attainment"


def simulate_services(plan: Plan, problem: Problem, catalog: Catalog) -> dict[str, ServiceSummary]:
    """Return what a simulation finds of each service under its own demand."""
    from atoll.sim.api import simulate
    from atoll.sim.demand import demand_of
    from atoll.sim.options import SimOptions
    from atoll.workload.requests import collect

    rates = [service.rate_per_s for service in problem.services if service.rate_per_s > 0]
    if not rates:
        return {}
    seconds = min(_LONGEST_S, max(_SHORTEST_S, _REQUESTS / min(rates)))
    requests = collect(demand_of(problem, seconds), problem.settings.seed)
    options = SimOptions(seed=problem.settings.seed, from_s=seconds / 20.0)
    result = simulate(plan, problem, catalog, requests, options)
    return {service.name: service for service in result.services}


def _raise_headroom(problem: Problem, short: set[str]) -> Problem:
    services = tuple(
        service.model_copy(update={"headroom": service.headroom * _STEP})
        if service.name in short
        else service
        for service in problem.services
    )
    return problem.replace(services=services)


def _stamp(
    found: Plan,
    first: Plan,
    problem: Problem,
    raised: Problem,
    seen: Mapping[str, ServiceSummary],
) -> Plan:
    """Return the plan as one for the problem as it was given, checked, saying what was found."""
    from atoll.plan.validate.check import check
    from atoll.solve.assembly import relative_gap

    said = tuple(
        f"{service.name} keeps its promises for {seen[service.name].attainment or 0.0:.1%} of "
        f"requests, with headroom {raised.service(service.name).headroom:.2f}"
        for service in problem.services
        if service.name in seen
    )
    bound, objective = first.bound, found.objective
    plan = found.model_copy(
        update={
            "problem_hash": problem.content_hash(),
            "bound": bound,
            "gap": relative_gap(objective, bound),
            "status": first.status if found is first else "feasible",
            "notes": said,
        }
    )
    check(plan, problem)
    return plan
