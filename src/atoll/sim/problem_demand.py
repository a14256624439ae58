"""The demand that a problem states, as a workload."""

from __future__ import annotations

from atoll.core.errors import InputError
from atoll.plan.problem import Problem, Service
from atoll.workload.arrival_rates import RateClock
from atoll.workload.arrivals import Renewal
from atoll.workload.builtin import lengths_like
from atoll.workload.requests import Workload
from atoll.workload.synthetic import Mixed, Synthetic


def demand_of(problem: Problem, duration_s: float) -> Workload:
    """Return arrivals at the rate and burstiness of each service, with lengths that have its moments.

    Those of a service are the same whatever else is asked, and whatever the problem is called.
    """
    parts = tuple(
        Synthetic(
            service.name,
            RateClock(service.rate_per_s),
            lengths_like(service.lengths.mix()),
            _renewal(service),
            duration_s=duration_s,
            models=(service.name,),
        )
        for service in problem.services
        if service.rate_per_s > 0.0
    )
    if not parts:
        raise InputError(
            f"nothing is asked of {problem.name}", field="rate", hint="give a workload: a trace"
        )
    return parts[0] if len(parts) == 1 else Mixed(problem.name, parts, by_name=True)


def _renewal(service: Service) -> Renewal:
    if service.burstiness == 1.0:
        return Renewal()
    return Renewal("gamma", service.burstiness)
