"""Outlook on demand beyond the next plan: what must be carried at once, and until when a rate will do.

A change that takes capacity away lasts until demand is expected to need it again. That is when the forecast,
with the spread of its own past errors, exceeds what is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.control.decision.control_view import ControlPolicy, ForecastState, TrafficSeen, View
from atoll.control.decision.forecast import (
    MIN_RATE,
    find_spread,
    measure_level,
    min_rate,
    predict_peak,
)
from atoll.control.decision.restate import restate_mix
from atoll.plan.problem import Problem, Service

_STEP_S = 600.0
"""Steps in which the future is looked through."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Traffic of services at a time, and what was learned of forecasting it."""

    time_s: float
    traffic: Mapping[str, TrafficSeen]
    states: Mapping[str, ForecastState]
    policy: ControlPolicy

    def pressing(self, problem: Problem) -> Problem:
        """Return the problem with what must be carried not to need a plan at once, class by class.

        Classes need other executors: one that is asked for all that is planned for it is short without that,
        however little is asked of the others.
        """
        services = []
        for service in problem.services:
            seen = self.traffic.get(service.name)
            own = {} if seen is None else {one.service: one for one in seen.classes}
            rate = self._needed_now(service.rate_per_s, seen)
            if own:
                rates = {
                    klass.name: self._needed_now(
                        service.rate_per_s * klass.share, own.get(klass.name)
                    )
                    for klass in service.classes
                }
                rate = sum(rates.values())
                mix = {name: one / max(rate, MIN_RATE) for name, one in rates.items()}
                service = restate_mix(service, mix, self.policy)
            services.append(service.model_copy(update={"rate_per_s": rate}))
        return problem.model_copy(update={"services": tuple(services)})

    def _needed_now(self, planned: float, seen: TrafficSeen | None) -> float:
        """Return requests/s below which who is planned for so many is short: asked once a start serves.

        That is never less than what is planned for by more than `slack`: the rest, as a reserve, is there to
        be used, and may never be asked.
        """
        if seen is None:
            return planned
        level = measure_level(seen, self.time_s)
        soon = predict_peak(level, seen.profile, seen.period_s, self.time_s, self.policy.startup_s)
        soon = max(soon, min_rate(seen.five_minutes.rate_per_s))
        return max((1.0 - self.policy.slack) * planned, min(planned, soon))

    def suffices_until_s(self, service: Service, rate_per_s: float) -> float | None:
        """Return when demand is expected to exceed a rate, None if not within `payback_s`."""
        seen = self.traffic.get(service.name)
        if seen is None:
            return None
        state = self.states.get(service.name, ForecastState(service.name))
        level = measure_level(seen, self.time_s)
        quantile = max(self.policy.down_quantile, self.policy.of(service).quantile)
        spread = math.exp(find_spread(state.errors, quantile, level)) * state.boost
        ahead_s = 0.0
        while ahead_s < self.policy.payback_s:
            ahead_s = min(ahead_s + _STEP_S, self.policy.payback_s)
            peak = predict_peak(level, seen.profile, seen.period_s, self.time_s, ahead_s)
            if peak * spread * service.headroom > rate_per_s:
                return self.time_s + ahead_s
        return None


def look_ahead(view: View, states: tuple[ForecastState, ...], policy: ControlPolicy) -> Outlook:
    """Return the outlook on what is seen."""
    return Outlook(
        view.time_s,
        {seen.service: seen for seen in view.traffic},
        {state.service: state for state in states},
        policy,
    )
