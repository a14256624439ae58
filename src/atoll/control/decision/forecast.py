"""How much will be asked: the highest rate over the time that matters, as a quantile.

Let x be the level of the last minutes, p the profile of the day or week, h the horizon. The highest rate
until t + h is predicted as

    y = x * max over u in [0, h] of p(t + u) / p(t)

and planned for as y * exp(e), where e is the wanted quantile of the errors log(highest rate that came / y) of
past forecasts. Without a profile p is constant, which is the naive forecast.
`research/operating/forecast_backtest.py` scores this against other methods on series of rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from atoll.control.decision.control_view import (
    DAY_S,
    ControlPolicy,
    ForecastState,
    PendingForecast,
    TrafficSeen,
)

Floats = NDArray[np.float64]

WEEK_S = 7.0 * DAY_S
MAX_ERRORS = 96
"""Errors that are remembered; older ones are of another time."""
MAX_OPEN_FORECASTS = 2
"""Forecasts of a service that are watched at a time: more would count the same surprise more often."""
MIN_ERRORS = 32
"""Fewer errors than this are filled up with guessed ones."""
_FIRST_SPREAD = 0.15
"""Relative standard deviation of a forecast that nothing is known of."""
MAX_RATIO = 8.0
"""The largest ratio that a profile is believed to rise by, and that an error is remembered with."""
_SMOOTHING_S = 3600.0
"""Usual rates are means over this time: less is chance, more would flatten real slopes."""
LATEST_WEIGHT = 0.5
"""Weight of the last minutes against the last hour, both relative to what is usual then."""
MAX_CHANCE_JUMP = 0.3
"""How much more than usual the last minutes are by chance, at most."""
MIN_RATE = 1e-9


def predict_peak(
    level: float,
    profile: Sequence[float] | Floats,
    period_s: float,
    time_s: float,
    horizon_s: float,
) -> float:
    """Return the highest rate until `horizon_s` from now, by the profile of a period."""
    slots = len(profile)
    if slots < 2 or level <= 0.0:
        return level
    usual = _at(profile, period_s, time_s)
    if usual <= 0.0:
        return level
    slot_s = period_s / slots
    first = math.floor(time_s / slot_s - 0.5) + 1
    last = math.floor((time_s + horizon_s) / slot_s - 0.5)
    # Straight lines between the middles of slots: the highest is at a middle or at an end. More than a
    # period only repeats it.
    corners = [profile[k % slots] for k in range(first, min(last, first + slots) + 1)]
    highest = max((*corners, usual, _at(profile, period_s, time_s + horizon_s)))
    return level * min(MAX_RATIO, float(highest) / usual)


def _at(profile: Sequence[float] | Floats, period_s: float, time_s: float) -> float:
    """Return the profile at a time: slots hold at their middles, straight lines between them."""
    slots = len(profile)
    position = (time_s % period_s) / period_s * slots - 0.5
    low = math.floor(position)
    share = position - low
    return float(profile[low % slots]) * (1.0 - share) + float(profile[(low + 1) % slots]) * share


def build_profile(
    rates: Floats, step_s: float, start_s: float = 0.0
) -> tuple[tuple[float, ...], float]:
    """Return usual rates and their period from a history that begins at `start_s`.

    None for less than a day; then a day's, the mean of each time of day; from a second week on a week's,
    each slot of it the mean of its weeks and, as one more week, of its time of day.
    """
    day = max(2, round(DAY_S / step_s))
    if len(rates) < day:
        return (), DAY_S
    at = np.floor(start_s / step_s + 0.5).astype(np.int64) + np.arange(len(rates))
    daily = _smooth(_mean_by(at % day, rates, day), step_s)
    if len(rates) < 8 * day:
        return tuple(daily.tolist()), DAY_S
    slot = at % (7 * day)
    seen = np.bincount(slot, minlength=7 * day)
    total = np.bincount(slot, weights=rates, minlength=7 * day)
    # A week's level differs from day to day: the day's shape counts at the level of that weekday.
    weekday = _mean_by(slot // day, rates, 7)
    shape = np.tile(daily, 7) / max(float(daily.mean()), MIN_RATE) * np.repeat(weekday, day)
    weekly = _smooth((total + shape) / (seen + 1.0), step_s)
    return tuple(weekly.tolist()), WEEK_S


def _smooth(profile: Floats, step_s: float) -> Floats:
    """Return running means over `_SMOOTHING_S`, around the end of the period."""
    side = round(0.5 * _SMOOTHING_S / step_s)
    shifted = [np.roll(profile, k) for k in range(-side, side + 1)]
    means: Floats = np.mean(shifted, axis=0)
    return means


def _mean_by(slot: NDArray[np.int64], rates: Floats, slots: int) -> Floats:
    seen = np.bincount(slot, minlength=slots)
    total = np.bincount(slot, weights=rates, minlength=slots)
    means: Floats = np.where(seen > 0, total / np.maximum(seen, 1), float(rates.mean()))
    return means


def blend_level(
    latest: float, hour: float, profile: Sequence[float] | Floats, period_s: float, time_s: float
) -> float:
    """Return the level now from the rate of the last minutes and of the last hour.

    Relative to what is usual the two differ by chance only, as long as the rhythm is the usual one. A jump up
    by more than `MAX_CHANCE_JUMP` is no chance: then the last minutes count alone.
    """
    if len(profile) < 2 or hour <= 0.0 or latest <= 0.0:
        return latest
    usual = _at(profile, period_s, time_s)
    earlier = sum(_at(profile, period_s, time_s - 600.0 * k) for k in range(6)) / 6.0
    if usual <= 0.0 or earlier <= 0.0:
        return latest
    lasting = hour * min(MAX_RATIO, usual / earlier)
    if latest > (1.0 + MAX_CHANCE_JUMP) * lasting:
        return latest
    return LATEST_WEIGHT * latest + (1.0 - LATEST_WEIGHT) * lasting


def measure_level(traffic: TrafficSeen, time_s: float) -> float:
    """Return the rate now: blended, or that of the last minute where it is more by more than chance."""
    calm, latest = traffic.five_minutes.rate_per_s, traffic.minute.rate_per_s
    # Four standard deviations of counting a minute's requests: three are seen by chance every day.
    if latest > calm + 4.0 * math.sqrt(max(calm, MIN_RATE) / 60.0):
        return latest
    return blend_level(calm, traffic.hour.rate_per_s, traffic.profile, traffic.period_s, time_s)


def min_rate(rate_per_s: float, counted_s: float = 300.0) -> float:
    """Return a rate that was counted for a while less one standard error: more of it may be chance."""
    return max(0.0, rate_per_s - math.sqrt(max(0.0, rate_per_s) / counted_s))


def find_spread(errors: Sequence[float], quantile: float, level: float) -> float:
    """Return the quantile of past errors; where they are few, among as many guessed ones as are missing.

    Guesses are spread normally, with the chance in counting five minutes' requests on top. So a single
    surprise is one of many from the start.
    """
    missing = max(0, MIN_ERRORS - len(errors))
    if missing == 0:
        return _quantile(errors, quantile)
    deviation = math.hypot(_FIRST_SPREAD, 1.0 / math.sqrt(max(1.0, 300.0 * level)))
    normal = NormalDist(0.0, deviation)
    guessed = [normal.inv_cdf((k + 0.5) / missing) for k in range(missing)]
    return _quantile([*errors, *guessed], quantile)


def _quantile(errors: Sequence[float], quantile: float) -> float:
    """Return the order statistic that a new error stays below with this chance."""
    ordered = sorted(errors)
    # Ranked among one more than there are: the error to come is one of them.
    rank = math.ceil(quantile * (len(ordered) + 1)) - 1
    return ordered[min(max(rank, 0), len(ordered) - 1)]


def forecast(
    traffic: TrafficSeen, state: ForecastState, time_s: float, policy: ControlPolicy
) -> tuple[float, ForecastState]:
    """Return the rate to plan for in requests/s, and the state with what came of earlier forecasts.

    The rate is the highest demand of the last `down_after_s`, with the policy's reserve beyond what is asked
    now. It goes down only where demand is hardly expected to come back to it: to the `down_quantile`, which
    is also what is planned for first.
    """
    level = measure_level(traffic, time_s)
    peak = predict_peak(level, traffic.profile, traffic.period_s, time_s, policy.horizon_s)
    errors, pending = _settle(state, traffic.five_minutes.rate_per_s, time_s)
    # Spread over the horizon, so that no more than `MAX_OPEN_FORECASTS` are open at a time.
    if not pending or time_s - pending[-1].made_s >= policy.horizon_s / MAX_OPEN_FORECASTS:
        pending = (*pending, PendingForecast(time_s, time_s + policy.horizon_s, peak, level))
    demand = peak * math.exp(find_spread(errors, policy.quantile, level))
    # What is asked now is there, whatever is usual; bursts come on top of it.
    demand = max(demand, (1.0 + policy.reserve) * min_rate(traffic.five_minutes.rate_per_s))
    if not state.recent:  # just started: what came earlier this hour counts too
        demand = max(demand, traffic.hour.rate_per_s)
    after_s = time_s - policy.down_after_s
    # Falling rates only: one that a later one exceeds will never be the highest again.
    recent = tuple((at, rate) for at, rate in state.recent if after_s <= at and rate > demand)
    recent = (*recent, (time_s, demand))
    # What was planned for goes down only where demand is hardly expected to come back to it.
    held = peak * math.exp(find_spread(errors, max(policy.down_quantile, policy.quantile), level))
    first = state.planned_per_s <= 0.0
    planned = max(recent[0][1], held if first else min(state.planned_per_s, held))
    learned = replace(state, errors=errors, pending=pending, recent=recent, planned_per_s=planned)
    return planned, learned


def forecast_classes(
    traffic: TrafficSeen, state: ForecastState, time_s: float, policy: ControlPolicy
) -> tuple[dict[str, float], ForecastState]:
    """Return the rate to plan for of each class in requests/s, each forecast by itself, and the state.

    Every class has its own executors to fall short of: all of n classes stay below their forecasts as often
    as one does below its own where each is planned for at the n-th root of the quantile.
    """
    joint = policy.quantile ** (1.0 / max(1, len(traffic.classes)))
    policy = policy.model_copy(update={"quantile": joint})
    states = {one.service: one for one in state.classes}
    rates: dict[str, float] = {}
    for seen in traffic.classes:
        before = states.get(seen.service, ForecastState(seen.service))
        rates[seen.service], states[seen.service] = forecast(seen, before, time_s, policy)
    return rates, replace(state, classes=tuple(states[name] for name in sorted(states)))


def _settle(
    state: ForecastState, rate_per_s: float, time_s: float
) -> tuple[tuple[float, ...], tuple[PendingForecast, ...]]:
    """Return the errors with those of forecasts whose time is over, and the others."""
    errors, pending = list(state.errors), []
    for one in state.pending:
        if time_s <= one.due_s:
            highest = max(one.highest_per_s, rate_per_s)
            pending.append(replace(one, highest_per_s=highest))
        elif one.predicted_per_s > 0.0:
            ratio = max(one.highest_per_s, MIN_RATE) / one.predicted_per_s
            errors.append(math.log(min(max(ratio, 1.0 / MAX_RATIO), MAX_RATIO)))
    return tuple(errors[-MAX_ERRORS:]), tuple(pending)
