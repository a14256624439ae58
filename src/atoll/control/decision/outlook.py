"""Outlook on demand beyond the next plan: what must be carried at once, and until when a rate will do.

A change that takes capacity away lasts until demand is expected to need it again. That is when the forecast,
with the spread of its own past errors, exceeds what is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.control.decision.control_view import ControlPolicy, ForecastState, TrafficSeen, View
from atoll.control.decision.forecast import find_spread, measure_level, min_rate, predict_peak
from atoll.control.decision.lane_capacity import Lanes, demand_by_lane
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

    def needed_now(self, service: Service) -> float:
        """Return requests/s below which a service is short: asked by the time that a start serves.

        That is never less than what is planned for by more than `slack`: the rest, as a reserve, is there to
        be used, and may never be asked.
        """
        planned = service.rate_per_s
        seen = self.traffic.get(service.name)
        asked = planned
        if seen is not None:
            level = measure_level(seen, self.time_s)
            soon = predict_peak(
                level, seen.profile, seen.period_s, self.time_s, self.policy.startup_s
            )
            soon = max(soon, min_rate(seen.five_minutes.rate_per_s))
            asked = min(planned, soon)
        return max((1.0 - self.policy.slack) * planned, asked)

    def pressing(self, problem: Problem, mixed: frozenset[str]) -> Lanes:
        """Return what every lane must carry not to need a plan at once."""
        pressing = demand_by_lane(problem, mixed)
        for service in problem.services:
            if service.rate_per_s <= 0.0:
                continue
            share = self.needed_now(service) / service.rate_per_s
            lanes = (service.name,) if service.name in mixed else map(str, service.roles)
            for lane in lanes:
                pressing[lane] *= share
        return pressing

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
