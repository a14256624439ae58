"""The demand that a problem states, as a workload."""

from __future__ import annotations

from atoll.core.errors import InputError
from atoll.plan.problem import Problem, Service
from atoll.workload.arrival_rates import RateClock
from atoll.workload.arrivals import Renewal
from atoll.workload.builtin import lengths_like
from atoll.workload.requests import Workload
from atoll.workload.sampling import ClassMix, LengthSampler
from atoll.workload.synthetic import Mixed, Synthetic


def demand_of(problem: Problem, duration_s: float) -> Workload:
    """Return arrivals at the rate and burstiness of each service, of its classes, with lengths like its own.

    Those of a service are the same whatever else is asked, and whatever the problem is called.
    """
    parts = tuple(
        Synthetic(
            service.name,
            RateClock(service.rate_per_s),
            sample_lengths(service),
            _renewal(service),
            duration_s=duration_s,
            models=(service.name,),
            prefix=None if service.prefix is None else service.prefix.shared(),
        )
        for service in problem.services
        if service.rate_per_s > 0.0
    )
    if not parts:
        raise InputError(
            f"nothing is asked of {problem.name}", field="rate", hint="give a workload: a trace"
        )
    return parts[0] if len(parts) == 1 else Mixed(problem.name, parts, by_name=True)


def sample_lengths(service: Service) -> LengthSampler:
    """Return lengths to draw from: those of its classes of text where it has some, else like its moments."""
    classes = service.text_classes
    if not classes:
        return lengths_like(service.lengths.mix())
    return ClassMix(
        tuple(klass.name for klass in classes),
        tuple(klass.share for klass in classes),
        tuple(lengths_like(klass.text_mix) for klass in classes),
    )


def _renewal(service: Service) -> Renewal:
    if service.burstiness == 1.0:
        return Renewal()
    return Renewal("gamma", service.burstiness)
